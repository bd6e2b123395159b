"""Helpers for tests of recovery: pruned models of every kind, jobs on them, and what must hold of every output."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import ckpt_prune
from ckpt_prune.common.filenames import RECIPE, REPORT
from ckpt_prune.job.job import Job, RecoverySamples
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.model.model import Model
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recovery.keys import recover_recipe
from ckpt_prune.stages.recovery.training import SampleSplit
from ckpt_prune.verification.verify import verify
from tests import encoders, families
from tests.reports import recover
from tests.stages.whole import prune_by_mask, stock, tensors_of

SAMPLES = 6
BATCH = 2
QUICK: dict[str, Any] = {"epochs": 2, "lr": 0.001, "batch": BATCH, "held_out": 0.34}
"""Enough to change something; two of six samples are held out."""
HELD_OUT = SampleSplit.of(SAMPLES, QUICK["held_out"]).measured.tolist()

RECOVERY_KEYS = {"dense", "on_the_fly", "settings", "data", "perplexity_after"}
SETTINGS_KEYS = {
    "method",
    "epochs",
    "lr",
    "batch",
    "accumulate",
    "schedule",
    "only",
    "layers",
    "held_out",
    "patience",
    "seed",
}
SETTINGS_KEYS |= {"norms", "teacher"}
DATA_KEYS = {"modality", "data", "samples", "held_out", "measured", "window", "tokens"}
LAYER_KEYS = {"block", "mse_before", "mse_start", "mse_after", "cka_before", "cka_after"}
LAYER_KEYS |= {"epochs", "best_epoch", "rate", "diverged", "recovered"}


def training_data(variant: str) -> Samples:
    """Return the samples that a variant is recovered on, none of which it was pruned on."""
    if variant in encoders.VARIANTS:
        return encoders.samples(variant, SAMPLES, seed=11)
    return TokenWindows(families.windows(SAMPLES, 24, seed=11))


def recovery_job(pruned: Path, dense: Path, samples: Samples, **changes: Any) -> Job:
    """`changes` are settings, the seed, or other arguments of the samples."""
    settings = {key: changes.pop(key) for key in list(changes) if key in RecoverySettings.model_fields}
    recipe = recover_recipe(RecoverySettings.model_validate(QUICK | settings), seed=changes.pop("seed", 0))
    training = RecoverySamples(samples, changes.pop("compute_dtype", torch.float32), **changes)
    return Job(Model.open(pruned), recipe, dense=Model.open(dense), training=training)


def pruned_by(folder: Path, out: Path, recipe: FullRecipe, data: Samples | None) -> Path:
    """Prune in one go, on data where the recipe looks at any."""
    prune_by_mask(folder, out, recipe, data)
    return out


def load_float32(folder: Path, variant: str) -> PreTrainedModel:
    """In float32; by stock transformers unless the folder has remote code."""
    if "auto_map" in json.loads((folder / "config.json").read_text()):
        return ckpt_prune.load(folder, dtype=torch.float32)
    return stock(folder, variant).float()


def layers_of(variant: str) -> str:
    """Path of the blocks in a model."""
    if variant in encoders.VARIANTS:
        return encoders.VARIANTS[variant].layers
    return "model.decoder.layers" if variant.endswith("opt") else "model.layers"


def last_states(folder: Path, variant: str, data: Samples) -> Tensor:
    """Return the output of the last block for each held-out sample, from running the whole model."""
    path = f"{layers_of(variant)}.{families.BLOCKS - 1}"
    states = encoders.watch(load_float32(folder, variant), data, results=[path])[path]
    return torch.from_numpy(states)[HELD_OUT]


@cache
def dense_states(dense: Path, variant: str) -> Tensor:
    """Return the last states of a dense checkpoint on its `training_data`, computed once."""
    return last_states(dense, variant, training_data(variant))


def is_linear(name: str, tensors: dict[str, Tensor]) -> bool:
    """Whether a tensor is the weight or bias of a linear module of a block; modules that turn the stream are none."""
    owner, _, kind = name.rpartition(".")
    if not any(layers in name for layers in ("layers.", "encoder.layer.")) or owner.endswith("_rotation"):
        return False
    weight = tensors.get(f"{owner}.weight")
    return kind in ("weight", "bias") and weight is not None and weight.ndim == 2


def block_of(name: str) -> int:
    return int(name.partition("layers." if "layers." in name else "encoder.layer.")[2].partition(".")[0])


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Zeros of another sign differ."""
    return ours.dtype == theirs.dtype and torch.equal(
        ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
    )


def assert_recovered(
    out: Path, pruned: Path, report: dict[str, Any], dense: Path | None = None
) -> dict[int, list[str]]:
    """Everything that holds of every recovered output, whatever it was made from; of its kept units too, given `dense`.

    Returns:
        Block → names of its tensors that are new.
    """
    after, before = tensors_of(out), tensors_of(pruned)
    assert list(after) == list(before)
    layers = {layer["block"]: layer for layer in report["layers"]}
    assert list(layers) == list(range(families.BLOCKS))
    changed: dict[int, list[str]] = {block: [] for block in layers}
    for name, tensor in after.items():
        assert (tensor.dtype, tensor.shape) == (before[name].dtype, before[name].shape), name
        if not same_bits(tensor, before[name]):
            assert is_linear(name, after), f"{name} is no linear of a block"
            changed[block_of(name)].append(name)
        if is_linear(name, after) and name.endswith(".weight"):
            assert torch.equal(tensor == 0, before[name] == 0), name
        elif is_linear(name, after):
            empty = (before[f"{name.removesuffix('bias')}weight"] == 0).all(1) & (before[name] == 0)
            assert not tensor[empty].any(), name
        assert bool(tensor.isfinite().all()), name
    for block, layer in layers.items():
        curve = layer.get("curve", [])  # left out where nothing was trained
        assert layer.keys() - {"curve"} == LAYER_KEYS
        assert layer["recovered"] == bool(changed[block]) == (layer["best_epoch"] > 0)
        assert layer["best_epoch"] <= layer["epochs"] <= 3 * report["recovery"]["settings"]["epochs"]
        assert layer["best_epoch"] < max(len(curve), 1) <= layer["epochs"] + 1
        assert layer["mse_after"] <= layer["mse_start"] * (1 + 1e-5)
        assert not layer["recovered"] or layer["mse_after"] < layer["mse_start"]
        assert all(0 <= layer[key] <= 1 for key in ("cka_before", "cka_after"))
    assert layers[0]["mse_before"] == pytest.approx(layers[0]["mse_start"], rel=1e-6)
    assert_described(out, pruned, report, dense)
    return changed


def earlier_of(pruned: Path) -> dict[str, Any] | None:
    report = json.loads((pruned / REPORT).read_text()) if (pruned / REPORT).is_file() else {}
    return {key: report[key] for key in ("recovery", "layers")} if "recovery" in report else None


def assert_described(out: Path, pruned: Path, report: dict[str, Any], dense: Path | None = None) -> None:
    """The report is on disk, whole; config and side files are carried; `verify` passes."""
    assert json.loads((out / REPORT).read_text()) == report
    recovery = report["recovery"]
    assert recovery.keys() == (RECOVERY_KEYS if recovery["on_the_fly"] else RECOVERY_KEYS | {"earlier"})
    assert recovery.get("earlier") == earlier_of(pruned)
    assert recovery["settings"].keys() == SETTINGS_KEYS
    assert recovery["data"].keys() == DATA_KEYS
    assert recovery["data"]["samples"] == SAMPLES
    assert recovery["data"]["held_out"] == recovery["data"]["measured"] == len(HELD_OUT)
    assert recovery["data"]["tokens"] == SAMPLES * recovery["data"]["window"]
    files = {path.name for path in pruned.iterdir()} - {RECIPE}
    assert {path.name for path in out.iterdir()} - {RECIPE} == files | {REPORT, "README.md"}
    for name in files:
        if name == "config.json":
            # Older versions of transformers read the base of rotary positions under a key of its own.
            after, before = (json.loads((folder / name).read_text()) for folder in (out, pruned))
            assert after == {key: after[key] for key in after if key == "rope_theta"} | before
        elif name not in (REPORT, "README.md") and not name.startswith("model"):
            assert (out / name).read_bytes() == (pruned / name).read_bytes(), name
    checks = {check.name: check.passed for check in verify(out, dense)}
    assert checks.pop("sparsity") is not False
    assert checks.pop("side files", None) is not False
    expected = ("tensors", "finite", "load", "digests", *(() if dense is None else ("kept units",)))
    assert checks == dict.fromkeys(expected, True)


def recover_pruned(pruned: Path, dense: Path, out: Path, samples: Samples, **changes: Any) -> dict[str, Any]:
    return recover(recovery_job(pruned, dense, samples, **changes), out)
