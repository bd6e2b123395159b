"""Help and version: every command says what it takes."""

import pytest

from ckpt_prune import __version__
from ckpt_prune.cli.main import COMMANDS
from tests.cli.running import misused, ok, run

TAKES = {
    "inspect": ["MODEL", "--ratio", "--recipe", "--json"],
    "calibrate": [
        *["MODEL", "--text", "--samples", "--window", "--seed", "--collect", "--folds", "--output", "--overwrite"],
        *["--dry-run"],
        *["--images", "--labels", "--max-corrupt", "--trust-remote-code", "--device", "--json"],
    ],
    "plan": [
        *["MODEL", "--recipe", "--statistics", "--ratio", "--set KEY=VALUE", "--output", "--trust-remote-code"],
        *["--device", "--json"],
    ],
    "prune": [
        *["MODEL", "--recipe", "--statistics", "--text", "--samples", "--window", "--seed", "--plan", "--ratio"],
        *["--set KEY=VALUE", "--output", "--dry-run", "--resume", "--overwrite", "--device", "--json"],
        *["--images", "--labels", "--max-corrupt", "--trust-remote-code", "--no-diagnostics"],
        *["--perplexity-after", "--state-memory", "--push REPO", "--public"],
    ],
    "recover": [
        *["PRUNED", "--dense MODEL", "--text", "--images", "--samples", "--window", "--seed", "--choose", "--bos"],
        *["--epochs", "--lr", "--batch", "--accumulate", "--schedule", "--only", "--layers", "--held-out"],
        *["--patience", "--perplexity-after", "--state-memory", "--resume", "--overwrite", "--device", "--json"],
        *["--compute-dtype", "--labels", "--max-corrupt", "--output", "--method", "--rank", "--alpha", "--seconds"],
    ],
    "convert": ["MODEL", "--output", "--overwrite", "--json"],
    "compare": [
        *["A", "B", "--text", "--images", "--samples", "--window", "--seed", "--choose", "--bos", "--compute-dtype"],
        *["--lens", "--plot", "--state-memory", "--overwrite", "--trust-remote-code", "--device", "--json"],
    ],
    "verify": ["OUT", "--against MODEL", "--json"],
    "report": ["OUT", "--output", "--overwrite"],
    "evaluate": [
        *["MODEL", "--text", "--window", "--images", "--labels", "--max-corrupt", "--against MODEL2", "--tasks"],
        *["--samples", "--trust-remote-code", "--device", "--json"],
    ],
    "export": [
        *["MODEL", "--output", "--task", "--opset", "--dtype", "--cache / --no-cache", "--optimize", "--tolerance"],
        *["--validate / --no-validate", "--text", "--images", "--labels", "--samples", "--window", "--provider"],
        *["--overwrite", "--trust-remote-code", "--json"],
    ],
    "validate": [
        *["DIR", "--against", "--text", "--images", "--labels", "--samples", "--window", "--tolerance", "--provider"],
        *["--trust-remote-code", "--json"],
    ],
    "benchmark": [
        *["A B", "--onnx", "--batch", "--tokens", "--generate", "--rounds", "--warmup", "--threads", "--provider"],
        *["--device", "--optimize", "--dtype", "--trust-remote-code", "--json"],
    ],
    "quantize": ["MODEL", "--output", "--format", "--group-size", "--statistics", "--overwrite", "--json"],
    "push": [
        "OUT",
        "REPO",
        "--public",
        "--overwrite",
        "--base-model",
        "--license",
        "--evaluation",
        "--dry-run",
        "--json",
    ],
    "recipe": ["list", "show", "copy", "validate", "schema", "push"],
    "recipe push": ["FILE", "REPO", "--public", "--overwrite", "--json"],
    "recipe list": ["--json"],
    "recipe show": ["NAME"],
    "recipe copy": ["NAME", "DESTINATION"],
    "recipe validate": ["FILE", "--json"],
    "recipe schema": [],
    "statistics": ["show", "add"],
    "statistics show": ["FOLDER", "--json"],
    "statistics add": ["A B", "--output", "--overwrite"],
    "demo": ["--output", "--device", "--json"],
}


@pytest.mark.parametrize("command", TAKES)
def test_help_names_what_the_command_takes(command):
    page = ok(*command.split(), "-h")
    assert page.startswith(f"Usage: main {command}")
    assert [word for word in TAKES[command] if word not in page] == []


def test_evaluate_says_which_windows_it_takes():
    """Two figures of other windows are not to be held against each other."""
    page = " ".join(ok("evaluate", "-h").split())
    assert "The first so many windows of the text, so many images at random (seed 0), or a task's first items." in page
    assert "--samples N scores the first N windows of the text, not N at random as calibrate takes them" in page


def test_the_group_lists_every_command_with_its_line():
    page = " ".join(ok("--help").split())
    assert {name.split()[0] for name in TAKES} == set(COMMANDS)
    assert [line for line in COMMANDS.values() if line not in page] == []


def test_version():
    assert ok("--version") == f"ckpt-prune, version {__version__}\n"


def test_no_command_shows_the_help():
    result = run()
    assert result.exit_code == 2
    assert result.output == ok("-h")


def test_a_misspelt_command_is_refused():
    assert misused("prun", "dense") == "No such command 'prun'. Did you mean 'prune'?"
    assert misused("validat") == "No such command 'validat'. Did you mean 'validate' or 'evaluate' or 'calibrate'?"
    assert misused("xyz") == "No such command 'xyz'."
    assert misused("statistics", "shw") == "No such command 'shw'. Did you mean 'show'?"
