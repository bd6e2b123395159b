"""Run commands as a shell would, and check how they refuse bad input."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.cli.guard import FAULT
from ckpt_prune.cli.main import COMMANDS, main
from tests.interrupting import interrupt_at
from tests.reports import comparable

DENSE = (
    "target is dense here, and not sequential as the recipe says: statistics are of the dense model alone; give --text "
    "or --images for the other"
)
"""What `prune --statistics` says of a sequential recipe."""
TEXT = ("--text", "calib.txt", "--samples", "8", "--window", "16")


def changed(words: Sequence[str], *others: str) -> tuple[str, ...]:
    """Return a command line with options, of one value each, in place of those of the same names."""
    names = {word for word in others if word.startswith("--")}
    kept = [word for before, word in zip(("", *words), words, strict=False) if not {before, word} & names]
    return (*kept, *others)


def run(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    if isinstance(result.exception, SystemExit):
        if result.exit_code == FAULT and result.exception.__cause__ is not None:
            raise result.exception.__cause__  # a person gets one line of it
    elif result.exception is not None:
        raise result.exception
    return result


def ok(*args: str) -> str:
    """Standard output of a command that succeeds."""
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def enter_copy(folder: Path, parent: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a folder into `parent`, make the copy the working folder, and return it."""
    shutil.copytree(folder, parent / "here")
    monkeypatch.chdir(parent / "here")
    return parent / "here"


def drop_time_line(output: str) -> str:
    """Return the output of a dry run without the line that estimates time."""
    lines = output.splitlines(keepends=True)
    assert sum(line.startswith("it takes ") for line in lines) == 1, output
    return "".join(line for line in lines if not line.startswith("it takes "))


def without_quality(output: str) -> list[str]:
    """Return the lines of a `prune` up to its last file, without what every output is told of itself after that."""
    lines = [line for line in output.splitlines() if not line.startswith("fewer bits lose less than pruning")]
    ends = [place for place, line in enumerate(lines, start=1) if line.startswith("written to ")]
    return lines[: ends[0]] if ends else lines


def read_refusal(*args: str) -> str:
    """Return the one line of a command that refuses its input; nothing on disk below the working folder changes."""
    before = listing()
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert listing() == before
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    message = lines[0].removeprefix("Error: ")
    said = {"error": {"code": 2, "message": message}} if "--json" in args else None
    assert (json.loads(result.stdout) if result.stdout else None) == said
    assert not unknown_options(message, args[0]), message
    return message


def unknown_options(message: str, command: str) -> set[str]:
    """Return the options that a message names, and neither its command nor one that it names before them has."""
    known, unknown = options_of(command), set()
    ours = re.sub(r"`([^`]*)`", lambda quoted: quoted[1] if quoted[1].startswith("ckpt-prune") else "", message)
    for word in re.findall(r"(?<![\w-])(?:--[a-z][a-z0-9-]*\*?|the command that began it|[a-z]+)", ours):
        if word == "the command that began it":
            known |= {"--resume", "--overwrite"}
        elif word in COMMANDS:
            known |= options_of(word)
        elif word.endswith("*") and any(each.startswith(word[:-1]) for each in known):
            continue  # all of that beginning
        elif word.startswith("--") and word not in known:
            unknown.add(word)
    return unknown


def options_of(command: str) -> set[str]:
    """Return the options of a command, and of those below it."""
    found = main.get_command(click.Context(main), command)
    if found is None:
        return set()
    every = [found, *(found.commands.values() if isinstance(found, click.Group) else ())]
    return {name for each in every for param in each.params for name in (*param.opts, *param.secondary_opts)}


def read_usage_error(*args: str) -> str:
    """Run a command line that click cannot split. Return its error: the first line, the second names the help."""
    before = listing()
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert listing() == before
    error, hint = result.stderr.splitlines()
    assert error.startswith("Error: ")
    assert re.fullmatch(r"Help: main( [a-z]+){0,2} --help", hint)
    return error.removeprefix("Error: ")


def interrupt_job(job: list[str], commit: int) -> None:
    """Run a job with the output `out`, Ctrl-C just before a commit: what is done is kept, and nothing else is left."""
    before = {Path(name).parts[0] for name in listing()}
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, "commit", commit)
        result = run(*job, "-o", "out")
    holds = Journal.read(Path("out.partial")).entries
    message = "keeps what is done: the same command with --resume continues"
    if not holds:
        message = "holds nothing that is done yet: the same command with --resume starts afresh"
    assert (result.exit_code, result.stderr) == (130, f"out.partial {message}\nInterrupted.\n")
    assert {Path(name).parts[0] for name in listing()} - before == {"out.partial"}


def resume_job(job: list[str]) -> None:
    """Resume an interrupted job, check that its files equal those of `whole`, and delete them."""
    ok(*job, "-o", "out", "--resume")
    assert same_files("out", "whole")
    assert not Path("out.partial").exists()
    shutil.rmtree("out")


def listing() -> dict[str, tuple[int, int]]:
    """Every file and folder below the working folder with its size and time of change."""
    entries = {}
    for path in Path().rglob("*"):
        stat = path.lstat()
        entries[str(path)] = (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
    return entries


def read_json(path: str | Path) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def set_config(folder: str, **changes: Any) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(read_json(path) | changes))


def edit_statistics(folder: str | Path, **changes: Any) -> None:
    """Change the index of a statistics folder as if a former version had written it so, without a digest."""
    path = Path(folder) / "statistics.json"
    index = read_json(path)
    index.pop("digest", None)
    path.write_text(json.dumps(index | changes))


def edit_weights(folder: str, change: Any, file: str = "model.safetensors") -> None:
    """Let `change` edit the dictionary of a file's tensors in place."""
    path = Path(folder) / file
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def poison(name: str, value: float = float("nan")) -> Any:
    """An edit for `edit_weights`: one element of one tensor becomes `value`."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[0] = value

    return change


def same_files(a: str, b: str) -> bool:
    names = {path.name for path in Path(a).iterdir()}
    return names == {path.name for path in Path(b).iterdir()} and all(
        comparable(Path(a) / name) == comparable(Path(b) / name) for name in names
    )


def near(value: Any) -> Any:
    """What a command prints as JSON, with floats that may differ as sums of float32 in another order do.

    A processor may add up some hundred products of a few layers in another order: about 2⁻²⁴ for each.
    """
    if isinstance(value, dict):
        return {name: near(each) for name, each in value.items()}
    if isinstance(value, list):
        return [near(each) for each in value]
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
