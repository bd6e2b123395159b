"""Recovery on the fly, interrupted, with states on disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_prune.common.filenames import RECIPE, REPORT
from ckpt_prune.job.job import Job, RecoverySamples
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.model import Model
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recovery.keys import RecoverRecipe
from tests import encoders
from tests.families import BLOCKS, contents, prune, windows
from tests.oracles import masked_model
from tests.reports import recover
from tests.stages.recovering import (
    QUICK,
    assert_described,
    assert_recovered,
    block_of,
    is_linear,
    pruned_by,
    recover_pruned,
    recovery_job,
    training_data,
)
from tests.stages.test_rotations import random_rotations, rotating
from tests.stages.whole import data_of, make_recipe, stock, tensors_of, whole


def with_recovery(recipe: FullRecipe, **changes: Any) -> FullRecipe:
    values = recipe.model_dump(mode="json", by_alias=True)
    return FullRecipe.model_validate(values | {"recovery": QUICK | changes})


def on_the_fly(
    folder: Path,
    out: Path,
    recipe: FullRecipe,
    variant: str,
    *,
    resume: bool = False,
    training: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Prune with a step of recovery; `training` are arguments of its samples, `changes` settings."""
    samples = RecoverySamples(training_data(variant), torch.float32, **(training or {}))
    live = data_of(variant)
    job = encoders.job_on(folder, with_recovery(recipe, **changes), None, live, training=samples)
    return prune(job, out, resume=resume)


# ---- on the fly --------------------------------------------------------------------------------------------------

NARROW = {"score": "magnitude", "ratio": 0.5, "compensation": {"method": "none"}}
NARROW_BERT = {"version": 1, "name": "test", "container": "any", "spaces": {"heads": NARROW, "mlp": NARROW}}
BLIND: dict[str, tuple[str, FullRecipe]] = {
    "masked vit": ("vit", make_recipe("magnitude")),
    "wanda of the dense model": ("qwen3", make_recipe("wanda")),
    "narrower bert, remote": ("bert-mlm", FullRecipe.model_validate(NARROW_BERT)),
    "rotated": ("opt-no-bias", rotating("per-layer", ratio=0.5)),
}
"""Prunings that do not look at what comes before the block."""


@pytest.mark.parametrize("name", BLIND)
def test_on_the_fly_equals_prune_then_recover(dense, tmp_path, name, monkeypatch):
    """Prunings that ignore earlier blocks give the same checkpoint and errors on the fly as if recovered afterwards."""
    variant, recipe = BLIND[name]
    folder = dense.folder(variant)
    with monkeypatch.context() as patch:
        random_rotations(patch)
        pruned_by(folder, tmp_path / "pruned", recipe, data_of(variant))
    after = recover_pruned(
        tmp_path / "pruned", folder, tmp_path / "after", training_data(variant), after=frozenset({1})
    )
    with monkeypatch.context() as patch:
        random_rotations(patch)
        fly = on_the_fly(folder, tmp_path / "fly", recipe, variant, training={"after": frozenset({1})})
    ours, theirs = contents(tmp_path / "fly"), contents(tmp_path / "after")
    assert ours.keys() == theirs.keys()
    assert {file for file in ours if ours[file] != theirs[file]} == {REPORT, "README.md", RECIPE}
    assert any(layer["recovered"] for layer in fly["layers"])
    assert fly["layers"] == after["layers"]
    assert {name for name, digest in fly["files"].items() if after["files"][name] != digest} == {RECIPE}
    assert after["recovery"].pop("earlier") is None
    assert fly["recovery"] == after["recovery"] | {"on_the_fly": True}
    assert_recovered(tmp_path / "fly", tmp_path / "pruned", fly)


def test_what_is_pruned_next_sees_recovered_blocks(dense, tmp_path):
    """The mask of each block is that of a whole model whose earlier blocks are the recovered ones."""
    variant, folder = "llama", dense.folder("llama")
    recipe, data = make_recipe("wanda", "by block"), data_of("llama")
    plain = tensors_of(pruned_by(folder, tmp_path / "plain", recipe, data))
    report = on_the_fly(folder, tmp_path / "out", recipe, variant)
    assert_described(tmp_path / "out", tmp_path / "plain", report)
    tensors = tensors_of(tmp_path / "out")
    weights = [name for name in tensors if is_linear(name, tensors) and name.endswith(".weight")]
    moved = {block_of(name) for name in weights if not torch.equal(tensors[name] == 0, plain[name] == 0)}
    assert moved
    assert 0 not in moved
    for block in range(BLOCKS):
        model = stock(folder, variant)
        before = {name: tensor for name, tensor in tensors.items() if "layers." in name and block_of(name) < block}
        model.load_state_dict(before, strict=False)
        # Half of what is recovered is zero already: masking it again takes nothing more.
        expected = whole(model, variant).mask(data, masked_model.wanda, "by block")
        for name in weights:
            if block_of(name) <= block:
                assert torch.equal(tensors[name] == 0, expected[name] == 0), name


# ---- the same job ------------------------------------------------------------------------------------------------


SEVERAL = {"after": frozenset({1, 2})}


CHANGED: dict[str, Any] = {
    **{"epochs": 3, "lr": 0.002, "batch": 3, "accumulate": 2, "schedule": "constant", "only": "mlp", "layers": "0:2"},
    **{"held_out": 0.5, "patience": 1, "seed": 1, "after": frozenset({1}), "norms": True, "teacher": "pruned"},
    **{"method": "scales"},
    **{"compute_dtype": torch.bfloat16, "samples": TokenWindows(windows(6, 24, seed=12))},
}


def change(job: Job, key: str) -> Job:
    if hasattr(job.training, key):
        return train_otherwise(job, **{key: CHANGED[key]})
    assert isinstance(job.recipe, RecoverRecipe)
    stage = job.recipe.recovery.model_copy(update={key: CHANGED[key]})
    return replace(job, recipe=job.recipe.model_copy(update={"recovery": stage}))


def train_otherwise(job: Job, **changes: Any) -> Job:
    assert job.training is not None
    return replace(job, training=replace(job.training, **changes))


def test_a_job_is_known_by_everything_its_output_depends_on(dense, masked_llama, tmp_path):
    job = recovery_job(masked_llama, dense.folder("llama"), training_data("llama"))
    assert set(RecoverySettings.model_fields) <= CHANGED.keys()
    others = [change(job, key) for key in CHANGED]
    other_pruned = pruned_by(dense.folder("llama"), tmp_path / "pruned", make_recipe("magnitude", ratio=0.4), None)
    others.append(replace(job, model=Model.open(other_pruned)))
    others.append(replace(job, dense=Model.open(other_pruned)))
    assert len({candidate.digest for candidate in [job, *others]}) == 1 + len(others)
    # Where states are kept makes no difference.
    assert train_otherwise(job, allocate=StateMemory(0, tmp_path)).digest == job.digest


# ---- states on disk ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 10_000])
def test_states_on_disk_change_no_byte(dense, masked_llama, tmp_path, limit):
    """All of them, and some: those of one model take 6 x 24 x 16 float32."""
    memory = StateMemory(limit, tmp_path)
    job = recovery_job(masked_llama, dense.folder("llama"), training_data("llama"), **SEVERAL)
    recover(job, tmp_path / "plain")
    recover(train_otherwise(job, allocate=memory), tmp_path / "mapped")
    assert contents(tmp_path / "mapped") == contents(tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mapped", "plain"]
