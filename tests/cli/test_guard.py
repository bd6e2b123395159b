"""Whatever goes wrong: one line, an exit code, and with `--json` an object."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpt_prune.cli.guard import DEBUG
from ckpt_prune.cli.main import main
from ckpt_prune.common.errors import UserError
from tests.cli.running import read_refusal
from tests.forked import posix

INSPECT = "ckpt_prune.cli.inspect_command.command.function"


def start(*words: str, shell: str) -> "subprocess.CompletedProcess[str]":
    """Run a command line in a process of its own, its streams led elsewhere by the shell."""
    line = f'"{sys.executable}" -m ckpt_prune {" ".join(words)} {shell}'
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )


@posix
@pytest.mark.parametrize(
    ("shell", "line"),
    [
        (">/dev/full", "standard output cannot be written (No space left on device): send it to a place that takes"),
        (">&-", "standard output is closed: send it to a file, or to /dev/null"),
        ("| (exec <&-; sleep 0)", "standard output cannot be written (Broken pipe): "),
        ("2>&- >&-", None),
        (">/dev/full 2>/dev/full", None),
    ],
)
@pytest.mark.parametrize("words", [("--help",), ("recipe", "show", "ridge")], ids=" ".join)
def test_an_output_that_cannot_be_written(words, shell, line):
    done = start(*words, shell=shell)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == (line is not None), done.stderr
    assert line is None or lines[0].startswith(f"Error: {line}")


@posix
def test_without_a_place_for_errors_a_command_still_works():
    assert "\nname: ridge\n" in start("recipe", "show", "ridge", shell="2>&-").stdout
    assert start("inspect", "nowhere", shell="2>&-").returncode == 2


@pytest.mark.parametrize(
    "error",
    [
        AssertionError(),
        KeyError("x"),
        RecursionError("maximum recursion depth exceeded"),
        ValueError("a\nb"),
        SystemError(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("wanted", [(), ("--json",)], ids=str)
def test_a_fault_of_ours_is_one_line_and_1(monkeypatch, error, wanted):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(INSPECT, fail)
    monkeypatch.delenv(DEBUG, raising=False)
    result = CliRunner().invoke(main, ["inspect", "x", *wanted])
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    kind = type(error).__name__
    assert line.startswith(f"Error: this is a fault of ckpt-prune, not of what you gave it ({kind} at ckpt_prune/")
    assert f"{DEBUG}=1 shows where it happened" in line
    message = line.removeprefix("Error: ")
    assert json.loads(result.stdout or "{}") == ({"error": {"code": 1, "message": message}} if wanted else {})
    monkeypatch.setenv(DEBUG, "1")
    assert CliRunner().invoke(main, ["inspect", "x", *wanted]).exception is error


def test_bad_input_is_an_object_with_json(monkeypatch):
    def refuse(*_, **__):
        raise UserError("x is no folder: give one")

    monkeypatch.setattr(INSPECT, refuse)
    result = CliRunner().invoke(main, ["inspect", "x", "--json"])
    assert (result.exit_code, result.stderr) == (2, "Error: x is no folder: give one\n")
    assert json.loads(result.stdout) == {"error": {"code": 2, "message": "x is no folder: give one"}}
    misspelt = CliRunner().invoke(main, ["inspect", "x", "--json", "--rato", "3"])
    assert misspelt.exit_code == 2
    assert json.loads(misspelt.stdout)["error"]["message"].startswith("No such option '--rato'.")
    assert len(misspelt.stderr.splitlines()) == 2  # the second names the help


def test_a_null_character_in_a_path_is_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (
        ("inspect", "a\0b"),
        ("prune", "x", "--recipe", "a\0b", "-o", "out"),
        ("prune", "x", "--text", "a\0b", "-o", "out"),
        ("prune", "x", "-o", "a\0b"),
        ("recipe", "show", "a\0b"),
    ):
        assert " holds a null character, which no " in read_refusal(*words)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, and LOCAL_RANK is not: unset both, or use"),
        ({"RANK": "x"}, "the environment variable RANK is 'x', no number: unset it, or use torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "the environment variable WORLD_SIZE is '-2', no number: "),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "the environment variable LOCAL_RANK is '', no number: "),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "::", "MASTER_PORT": "1"},
            "RANK is 2 of WORLD_SIZE 2: unset both, or use torchrun",
        ),
    ],
)
def test_variables_of_torchrun_that_do_not_fit(tmp_path, monkeypatch, variables, line):
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read_refusal("prune", "x", "--recipe", "magnitude", "-o", "out").startswith(line)
