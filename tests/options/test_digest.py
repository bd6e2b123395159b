"""Options that change what is written are in the digest of a job, so that no run is resumed under other values."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.options.option import check_options, option, shell_of
from ckpt_prune.runner.read_job import read_job
from ckpt_prune.runner.read_recipe import read_recipe

GIVEN = {
    "model": "dense",
    "output": "out",
    "recipe": "mine.yaml",
    "text": "calib.txt",
    "samples": 8,
    "window": 16,
    "device": "cpu",
}
RECIPE = "version: 1\nname: mine\nratio: 0.5\nspaces:\n  mlp: {score: rcpu, compensation: {method: ridge}}\n"
RECIPE += "recovery: {epochs: 1}\n"
CHANGES = {
    "runs_on": ("vllm",),
    "model": "pruned",
    "recipe": "ridge",
    "ratio": 0.25,
    "target_params": "80%",
    "overrides": ("spaces.mlp.ratio=0.25",),
    "container": "any",
    "text": "other.txt",
    "samples": 4,
    "window": 8,
    "seed": 1,
    "choose": "first",
    "bos": "never",
    "compute_dtype": "bfloat16",
    "folds": 3,
    "diagnostics": False,
    "perplexity_after": "1",
}
"""Another value for options that change what is written."""
UNREAD = {"statistics", "plan", "images", "labels", "audio", "data", "family"}
"""Files and folders that a job of text does not read; of those that are read, the content is in the digest."""
HARMLESS: dict[str, Any] = {
    "evaluate": ("held_out.txt",),
    "evaluate_samples": 4,
    "output": "elsewhere",
    "overwrite": True,
    "resume": True,
    "dry_run": True,
    "state_memory": 1.0,
    "progress": False,
    "trust_remote_code": True,
    "public": True,
    "push": "org/name",
}


@pytest.fixture
def digest(place: Path) -> Callable[..., str]:
    Path("mine.yaml").write_text(RECIPE)
    Path("other.txt").write_text("the dog ran far away and then the cat sat on a mat " * 40)

    def read(kind: type[PruneOptions] = PruneOptions, **changes: Any) -> str:
        options = check_options(kind, GIVEN | changes)
        model = open_model(options.model, Opening.of(options))
        return read_job(options, read_recipe(options), model, print).digest

    return read


def marked(how: str) -> set[str]:
    return {name for name, field in PruneOptions.model_fields.items() if shell_of(field).digest == how}


def test_what_is_left_out_of_the_digest_was_looked_at():
    """An option is in it by its value, unless it is marked; these marks alone are right."""
    assert marked("none") == HARMLESS.keys()
    assert marked("content") == UNREAD | {"model", "recipe", "text", "device"}


class More(PruneOptions):
    """Options of a toy."""

    strength: float = option(default=0.5)
    """What is written depends on it."""
    colour: str = option(default="red", digest="none")
    """It does not."""


def test_an_option_is_in_the_digest_unless_it_is_marked_as_harmless(digest):
    same = digest(More)
    assert digest(More, strength=0.25) != same
    assert digest(More, colour="blue") == same


def test_what_changes_an_output_changes_the_digest(digest):
    same = digest()
    assert digest() == same
    assert [name for name, value in CHANGES.items() if digest(**{name: value}) == same] == []
    assert [name for name, value in HARMLESS.items() if digest(**{name: value}) != same] == []


def test_the_same_files_elsewhere_are_the_same_job(digest):
    same = digest()
    shutil.copytree("dense", "moved")
    shutil.copy("calib.txt", "renamed.txt")
    assert digest(model="moved", text="renamed.txt") == same
