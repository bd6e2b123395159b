"""`ckpt-prune`: the group; every command is a file of its own, imported when it is called."""

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from ckpt_prune._version import __version__
from ckpt_prune.cli.stopping import exit_code, stoppable, unmasked
from ckpt_prune.common.errors import UserError, to_user_error
from ckpt_prune.common.safe_text import escape_output, to_one_line
from ckpt_prune.parallel.torchrun import is_started_by_torchrun, join_processes

# Threads that spin while they wait cost minutes on a busy machine (the demo took 190 s next to one busy process, and
# takes 45 s). torch reads this when it is first imported, which commands do. A user's own setting stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Large tensors come and go all the time. With pages of 4 KiB the kernel takes as long to hand them out as the processor
# to fill them (absolute values of 4096 x 1536 take 33 ms; 13 ms with huge pages). Read as above; Linux only.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

COMMANDS = {
    "inspect": "What a checkpoint is, what can be pruned, and into which container.",
    "convert": "Write timm's ViT, or an MAE, as the stock class that computes it.",
    "calibrate": "Measure activation statistics once, to reuse with any recipe.",
    "plan": "Decide what stays and predict the cost; write only the plan.",
    "prune": "Write a smaller checkpoint, or one with zeros, that transformers loads.",
    "recover": "Train what a pruned checkpoint has left, one block at a time (LaCo).",
    "verify": "Prove that an output is whole and loads.",
    "quantize": "Write weights of 8 or 4 bits, for transformers and vLLM.",
    "export": "Write an ONNX graph, compared with PyTorch in onnxruntime.",
    "validate": "Compare an exported graph with its model again.",
    "benchmark": "Latency, throughput, size and memory of two models side by side.",
    "report": "Show what pruning cost, block by block, as one HTML page.",
    "compare": "What leaves every block of two models, side by side.",
    "evaluate": "Perplexity, accuracy on images and KL divergence, or lm-eval tasks.",
    "push": "Share an output through the Hub, verified first.",
    "recipe": "List, show, copy, validate and share recipes.",
    "statistics": "Show or add statistics folders.",
    "demo": "The whole path on the model the package carries.",
}
TOGETHER = ("calibrate", "prune", "recover")
"""Commands that torchrun may start in several processes."""


class Refusal(click.ClickException):
    """Bad input, as the shell sees it: one line on stderr and exit code 2."""

    exit_code = 2


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn a signal that asks to stop into one line and its exit code."""
    try:
        yield
    except KeyboardInterrupt as error:
        with suppress(OSError):  # after SIGHUP the terminal may be gone
            click.echo("Interrupted.", err=True)
        raise SystemExit(exit_code(error)) from None


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, so that `--help` does not load torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ckpt_prune.cli.{cmd_name}_command")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is called; if there is none, suggest the nearest names."""
        near = " or ".join(repr(name) for name in difflib.get_close_matches(args[0], COMMANDS))
        if near and args[0] not in COMMANDS:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near}?", ctx)
        if args[0] in COMMANDS and args[0] not in TOGETHER and is_started_by_torchrun():
            raise UserError(f"{args[0]} runs in one process: start it without torchrun")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, **more: Any) -> Any:
        """Run as a program, and handle Ctrl-C also while click does not."""
        with interruptible():
            return super().main(*args, **more)

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        with interruptible():
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Bad input becomes one line and exit code 2, a signal 128 plus its number (Ctrl-C: 130)."""
        try:
            with interruptible(), stoppable(), escape_output(sys.stdout), join_processes(), unmasked():
                return super().invoke(ctx)
        except UserError as error:
            raise Refusal(to_one_line(str(error))) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads what is printed: click ends the program
                raise
            raise Refusal(to_one_line(str(to_user_error(error)))) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ckpt-prune")
def main() -> None:
    """Make a transformer smaller today, offline.

    Reads a Hugging Face checkpoint (a folder or a Hub id) of a language or vision model, drops attention heads, MLP
    columns or dimensions of q and k, lets the tensors that stay absorb a closed-form compensation, and writes a
    checkpoint that transformers loads (with code of its own if blocks differ in width, as with recipe best). Or it
    zeroes single weights. What is lost can be trained back, one block at a time, towards the dense model (recover).

    \b
      ckpt-prune demo
      ckpt-prune prune MODEL --recipe rcpu --ratio 0.2 --text calib.txt -o OUT
      ckpt-prune evaluate OUT --against MODEL --text held_out.txt --window 2048
      ckpt-prune export OUT -o OUT/onnx

    Bad input exits with code 2 and leaves nothing behind; a check that fails exits with code 1. Ctrl-C,
    SIGTERM and SIGHUP keep what is done, for --resume, and exit with 128 and the signal's number.
    """
