"""`ckpt-prune`: the group; every command is a file of its own, imported when it is called."""

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from ckpt_prune._version import __version__
from ckpt_prune.cli.guard import guarded, interruptible
from ckpt_prune.cli.stopping import raise_interruptions, stoppable
from ckpt_prune.common.errors import UserError, to_memory_error
from ckpt_prune.common.similar_names import did_you_mean
from ckpt_prune.parallel.torchrun import is_started_by_torchrun, join_processes

# Threads that spin while they wait cost minutes on a busy machine (the demo took 190 s next to one busy process, and
# takes 45 s). torch reads this when it is first imported, which commands do. A user's own setting stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Large tensors come and go all the time. With pages of 4 KiB the kernel takes as long to hand them out as the processor
# to fill them (absolute values of 4096 x 1536 take 33 ms; 13 ms with huge pages). Read as above; Linux only.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

GROUPS = {
    "The four to start with": {
        "prune": "Write a smaller checkpoint, or one with zeros.",
        "verify": "Prove that an output is whole and loads.",
        "evaluate": "Measure perplexity, accuracy, KL divergence or tasks.",
        "export": "Write a graph for ONNX Runtime, or a GGUF file for llama.cpp.",
    },
    "Measure": {
        "inspect": "Say what a checkpoint is, and what can be pruned.",
        "calibrate": "Measure activation statistics once, for any recipe.",
        "statistics": "Show or add statistics folders.",
    },
    "Decide": {
        "frontier": "Find what makes a model as small as you ask: bits, pruning or both.",
        "recipe": "List, show, copy, validate and share recipes.",
        "plan": "Decide what stays and predict the cost; write only the plan.",
    },
    "Prune": {
        "recover": "Train what a pruned checkpoint has left.",
        "quantize": "Write weights in few bits, for vLLM, or for llama.cpp as GGUF.",
        "convert": "Write timm's ViT, an MAE or a GGUF file as a checkpoint.",
    },
    "Check": {
        "compare": "Compare what leaves every block of two models.",
        "report": "Show what pruning cost, block by block, as an HTML page.",
    },
    "Deploy and share": {
        "validate": "Compare an exported graph with its model again.",
        "benchmark": "Time two models side by side; size and memory.",
        "push": "Share an output through the Hub, verified first.",
        "demo": "Try it all on the model that the package carries.",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
TOGETHER = ("calibrate", "prune", "recover")
"""Commands that torchrun may start in several processes."""


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
        hint = did_you_mean(args[0], COMMANDS, most=3).strip().capitalize()
        if hint and args[0] not in COMMANDS:
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        if args[0] in COMMANDS and args[0] not in TOGETHER and is_started_by_torchrun():
            raise UserError(f"{args[0]} runs in one process: start it without torchrun")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(max(map(len, COMMANDS))), text) for name, text in commands.items()])

    def main(self, args: Sequence[str] | None = None, *more: Any, **others: Any) -> Any:
        """Run as a program: whatever goes wrong is one line and an exit code."""
        words = sys.argv[1:] if args is None else list(args)
        if not others.get("standalone_mode", True):
            return super().main(words, *more, **others)
        with guarded(words):
            code = super().main(words, *more, **(others | {"standalone_mode": False}))
        raise SystemExit(code or 0)

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        with interruptible():
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, alone or with other processes, so that a signal can stop it."""
        try:
            with interruptible(), stoppable(), join_processes(), raise_interruptions():
                return super().invoke(ctx)
        except (MemoryError, RuntimeError) as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            has_dry_run = command is not None and any(option.name == "dry_run" for option in command.params)
            if (memory_error := to_memory_error(error, has_dry_run)) is None:
                raise
            raise memory_error from error


def _show_versions(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    click.echo(f"ckpt-prune {__version__}")
    for package in ("torch", "transformers", "onnxruntime-gpu", "onnxruntime"):
        with suppress(PackageNotFoundError):
            click.echo(f"{package} {version(package)}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, callback=_show_versions, expose_value=False, is_eager=True, help="Show versions."
)
def main() -> None:
    """Make a transformer smaller today, offline, without a training run.

    MODEL is a Hugging Face checkpoint: a folder or a Hub id.

    \b
      ckpt-prune prune MODEL --ratio 0.2 --text calib.txt -o OUT
      ckpt-prune evaluate OUT --against MODEL --text held_out.txt

    Bad input exits with 2 and leaves nothing behind, a failed check with 1. Ctrl-C keeps what is done, for --resume.
    Sizes are printed in decimal units, 1 MB = 1,000,000 bytes; options read MB and MiB.
    """
