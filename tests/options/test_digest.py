"""Options of `prune` that change what is written change the digest of a job: no run is resumed under others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.options.option import check_options
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
    "target_bytes": "80%",
    "target_flops": "80%",
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
"""Another value for every option that changes what is written."""
OF_OTHER_JOBS = {"target_latency", "plan", "statistics", "images", "labels", "audio", "max_corrupt", "family", "part"}
"""Options that a text model, a recipe or its samples cannot have beside those above; their files are in the digest."""
OF_MASKS = {"pattern": "2:4", "rotate": "shared"}
HARMLESS = {
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
DEVICE = {"device"}
"""Its type is in the digest, and this machine may have only one."""


@pytest.fixture
def digest(place: Path) -> Callable[..., str]:
    Path("mine.yaml").write_text(RECIPE)
    Path("other.txt").write_text("the dog ran far away and then the cat sat on a mat " * 40)

    def read(**changes: Any) -> str:
        options = check_options(PruneOptions, GIVEN | changes)
        model = open_model(options.model, Opening.of(options))
        return read_job(options, read_recipe(options), model, print).digest

    return read


def test_every_option_is_harmless_or_in_the_digest():
    assert (
        PruneOptions.model_fields.keys() == CHANGES.keys() | OF_OTHER_JOBS | OF_MASKS.keys() | DEVICE | HARMLESS.keys()
    )


def test_what_changes_an_output_changes_the_digest(digest):
    same = digest()
    assert digest() == same
    assert [name for name, value in CHANGES.items() if digest(**{name: value}) == same] == []
    assert [name for name, value in HARMLESS.items() if digest(**{name: value}) != same] == []
    same = digest(recipe="wanda")
    assert [name for name, value in OF_MASKS.items() if digest(recipe="wanda", **{name: value}) == same] == []
