"""Recovery on the fly, interrupted, with states on disk."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import RECIPE, REPORT
from ckpt_prune.job.job import Job, RecoverySamples
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.model import Model
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.reading import load_recipe
from ckpt_prune.stages.recovery import laco as recoverer
from ckpt_prune.stages.recovery.keys import RecoverRecipe
from tests import encoders, families
from tests.families import BLOCKS, contents, prune, windows
from tests.oracles import masked_model
from tests.pairs import dealt, every
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
    "masked llama": ("llama", make_recipe("magnitude")),
    "masked opt": ("opt", make_recipe("magnitude")),
    "masked vit": ("vit", make_recipe("magnitude")),
    "wanda of the dense model": ("qwen3", make_recipe("wanda")),
    "narrower, as mistral": ("llama", families.recipe("none", "magnitude", heads=0.25, mlp=0.5)),
    "narrower mistral": ("mistral", families.recipe("none", "magnitude", heads=0.5, mlp=0.5)),
    "narrower bert, remote": ("bert-mlm", FullRecipe.model_validate(NARROW_BERT)),
    "opened slots": ("llama", families.recipe("bias", heads=0.25)),
    "per layer": ("llama-gqa-tied", load_recipe("flap-global", ratio=0.4)),
    **{
        f"rotated {variant}, {kind}": (variant, rotating(kind, ratio=0.5))
        for variant, kind in (
            *(("qwen3", kind) for kind in ("shared", "per-layer")),
            *(("opt-no-bias", kind) for kind in ("shared", "per-layer")),
        )
    },
}
"""Prunings that do not look at what comes before the block."""


@pytest.mark.parametrize("name", every(5, BLIND))
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


def test_a_recipe_with_recovery_needs_samples(dense, tmp_path):
    folder, recipe = dense.folder("llama"), with_recovery(make_recipe("magnitude"))
    with pytest.raises(UserError, match=r"^recipe test recovers on samples, .*: give --text$"):
        prune(encoders.job_on(folder, recipe), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    one = RecoverySamples(TokenWindows(windows(1)), torch.float32)
    with pytest.raises(UserError, match="give at least 2, not 1"):
        encoders.job_on(folder, recipe, training=one)
    two = RecoverySamples(TokenWindows(windows(2)), torch.float32)
    with pytest.raises(UserError, match="the model has blocks 0 to 2"):
        encoders.job_on(folder, with_recovery(make_recipe("magnitude"), layers="1:4"), training=two)


# ---- interrupted -------------------------------------------------------------------------------------------------


def stop_training_at(patch: pytest.MonkeyPatch, block: int, error: BaseException | None = None) -> None:
    """Ctrl-C, or an error, when a block's training begins."""
    original = recoverer.train_block

    def dying(stream: Any, index: int, *args: Any, **options: Any) -> Any:
        if index == block:
            raise error or KeyboardInterrupt
        return original(stream, index, *args, **options)

    patch.setattr(recoverer, "train_block", dying)


def trained_blocks(patch: pytest.MonkeyPatch) -> list[int]:
    original, seen = recoverer.train_block, []

    def watching(stream: Any, index: int, *args: Any, **options: Any) -> Any:
        seen.append(index)
        return original(stream, index, *args, **options)

    patch.setattr(recoverer, "train_block", watching)
    return seen


FLY: dict[str, tuple[str, FullRecipe]] = {
    "masked": ("llama", make_recipe("magnitude")),
    "wanda by input": ("opt", make_recipe("wanda", "by input")),
    "structured": ("llama", families.recipe("ridge", heads=0.25, lam=0.1, target="sequential")),
    "rotated": ("qwen3", rotating("per-layer", {"method": "wanda"}, ratio=0.5)),
    "images": ("vit", make_recipe("sparsegpt", "by block")),
}
SEVERAL = {"after": frozenset({1, 2})}


@pytest.fixture(scope="module")
def through(dense, tmp_path_factory) -> Callable[[str], dict[str, bytes]]:
    """The files of runs of `FLY` that nothing interrupted, each made once."""

    @cache
    def files(name: str) -> dict[str, bytes]:
        variant, recipe = FLY[name]
        out = tmp_path_factory.mktemp("through") / "out"
        on_the_fly(dense.folder(variant), out, recipe, variant, training=SEVERAL)
        return contents(out)

    return files


# Every kind at another block; with `--thorough` what costs least at every one.
@pytest.mark.parametrize(
    ("name", "block"),
    every(4, dict.fromkeys([*dealt(FLY, range(BLOCKS)), *(("masked", b) for b in range(BLOCKS))])),
)
def test_a_resumed_run_on_the_fly_is_byte_identical(dense, tmp_path, through, name, block, monkeypatch):
    variant, recipe = FLY[name]
    arguments = (dense.folder(variant), tmp_path / "out", recipe, variant)
    expected = through(name)
    with monkeypatch.context() as patch:
        stop_training_at(patch, block)
        with pytest.raises(KeyboardInterrupt):
            on_the_fly(*arguments, training=SEVERAL)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        seen = trained_blocks(patch)
        on_the_fly(*arguments, training=SEVERAL, resume=True)
    assert seen == list(range(block, BLOCKS))
    assert contents(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.fixture(scope="module")
def prunings(dense, masked_llama, tmp_path_factory) -> dict[str, tuple[str, Path]]:
    """Variant and folder of pruned models of several kinds."""
    root = tmp_path_factory.mktemp("prunings")
    with pytest.MonkeyPatch.context() as patch:
        random_rotations(patch)
        turned = pruned_by(dense.folder("opt"), root / "turned", rotating("per-layer", ratio=0.5), None)
    recipe = load_recipe("flap-global", ratio=0.4)
    uneven = pruned_by(dense.folder("seed_oss"), root / "uneven", recipe, data_of("seed_oss"))
    vit = pruned_by(dense.folder("vit"), root / "vit", make_recipe("magnitude"), None)
    return {
        "masked": ("llama", masked_llama),
        "turned": ("opt", turned),
        "uneven": ("seed_oss", uneven),
        "vit": ("vit", vit),
    }


@pytest.fixture(scope="module")
def recovered_through(dense, prunings, tmp_path_factory) -> Callable[[str], dict[str, bytes]]:
    """The files of recoveries of `prunings` that nothing interrupted, each made once."""

    @cache
    def files(name: str) -> dict[str, bytes]:
        variant, pruned = prunings[name]
        out = tmp_path_factory.mktemp("recovered") / "out"
        recover(recovery_job(pruned, dense.folder(variant), training_data(variant), **SEVERAL), out)
        return contents(out)

    return files


@pytest.mark.parametrize(
    ("name", "block", "error"),
    [
        ("masked", 0, RuntimeError("bug")),
        ("masked", 1, torch.OutOfMemoryError("too large")),
        ("turned", 1, KeyboardInterrupt()),
        ("uneven", 2, KeyboardInterrupt()),
        ("vit", 0, KeyboardInterrupt()),
    ],
)
def test_a_resumed_recovery_is_byte_identical(
    dense, prunings, recovered_through, tmp_path, name, block, error, monkeypatch
):
    """Whether the user or a fault ends it; what a fault ends in the first block leaves nothing."""
    variant, pruned = prunings[name]
    job = recovery_job(pruned, dense.folder(variant), training_data(variant), **SEVERAL)
    expected = recovered_through(name)
    with monkeypatch.context() as patch:
        stop_training_at(patch, block, error)
        with pytest.raises(type(error)):
            recover(job, tmp_path / "out")
    assert isinstance(error, KeyboardInterrupt) or (tmp_path / "out.partial").exists() == bool(block)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        seen = trained_blocks(patch)
        recover(job, tmp_path / "out", resume=True)
    assert seen == list(range(block, BLOCKS))
    assert contents(tmp_path / "out") == expected
    assert not (tmp_path / "out.partial").exists()


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


@pytest.mark.parametrize("key", ["lr", "seed", "samples"])
def test_another_job_does_not_resume(dense, masked_llama, tmp_path, key, monkeypatch):
    job = recovery_job(masked_llama, dense.folder("llama"), training_data("llama"))
    with monkeypatch.context() as patch:
        stop_training_at(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            recover(job, tmp_path / "out")
    files = contents(tmp_path)
    with pytest.raises(UserError, match="was begun by a different job"):
        recover(change(job, key), tmp_path / "out", resume=True)
    assert contents(tmp_path) == files


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
