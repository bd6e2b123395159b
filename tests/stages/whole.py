"""Checkpoints, jobs and whole models are shared here by the tests of masks and of rotations."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.family import Family
from ckpt_prune.stages import FullRecipe
from tests import encoders, families
from tests.contract.open_experts import unstack_experts
from tests.families import prune
from tests.oracles import masked_model
from tests.oracles.masked_model import INPUTS, Model, Rule, Target
from tests.stored import Sources

RULES: dict[str, tuple[dict[str, Any], Rule]] = {
    "magnitude": ({"method": "magnitude"}, masked_model.magnitude),
    "magnitude row": ({"method": "magnitude", "compare": "row"}, masked_model.magnitude_in_rows),
    "magnitude 2:4": ({"method": "magnitude", "pattern": "2:4"}, masked_model.magnitude_in_fours),
    "wanda": ({"method": "wanda"}, masked_model.wanda),
    "wanda matrix": ({"method": "wanda", "compare": "matrix"}, masked_model.wanda_in_matrix),
    "wanda 2:4": ({"method": "wanda", "pattern": "2:4"}, masked_model.wanda_in_fours),
    "sparsegpt": ({"method": "sparsegpt", "block": 8, "damp": 0.01}, masked_model.sparsegpt),
    "sparsegpt 2:4": (
        {"method": "sparsegpt", "pattern": "2:4", "block": 8, "damp": "auto"},
        masked_model.sparsegpt_in_fours,
    ),
}
TARGETS: dict[Target, dict[str, Any]] = {
    "dense": {"target": "dense"},
    "by block": {"target": "sequential", "true_sequential": False},
    "by input": {"target": "sequential", "true_sequential": True},
}


def sources_of_all(root: Path) -> Sources:
    """Dense checkpoints of the variants of `families`, of `encoders`, and "wide" ones."""

    def make(folder: Path, variant: str, **options: Any) -> Path:
        if variant.startswith("wide "):
            return make_wide(folder, variant.removeprefix("wide "))
        return (families if variant in families.VARIANTS else encoders).make(folder, variant, **options)

    def calibrate(variant: str, folder: Path, out: Path, *, folds: int) -> Statistics:
        """All of it, on `data_of`."""
        return encoders.calibrate(folder, out, data_of(variant), folds=folds)

    return Sources(root, make, calibrate)


def make_wide(folder: Path, variant: str, **config: Any) -> Path:
    """A variant whose widths groups of four fill: its mlp has 24 columns."""
    if variant == "opt":
        sizes = encoders.SIZES["opt"] | {"ffn_dim": 24}
    else:
        sizes = families.SIZES | families.VARIANTS[variant].config | {"intermediate_size": 24}
    model_type = variant.partition("-")[0]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes | config))).eval()
    encoders.randomise(model, 7)
    model.save_pretrained(folder)
    families.tiny_tokenizer().save_pretrained(folder)
    return folder


def data_of(variant: str) -> Samples:
    if variant in encoders.VARIANTS:
        return encoders.samples(variant, 16)
    return TokenWindows(families.windows(6, 24))


def stock(folder: Path, variant: str) -> PreTrainedModel:
    if variant in encoders.VARIANTS:
        return encoders.stock(folder, variant)
    return families.stock(folder, dtype=torch.float32)


def whole(model: PreTrainedModel, variant: str) -> Model:
    """A variant's stock model as the oracle sees it."""
    if variant in encoders.VARIANTS:
        chosen = encoders.VARIANTS[variant]
        inputs = INPUTS["dinov2 swiglu" if chosen.swiglu else chosen.model_type]
        return Model(model, inputs, chosen.layers, chosen.disk["block"])
    if model.config.model_type == "opt":
        return Model(model, INPUTS["opt"], "model.decoder.layers", "model.decoder.layers.{}.")
    return Model(model, INPUTS[model.config.model_type], "model.layers", "model.layers.{}.")


def make_recipe(rule: str, target: Target = "dense", **more: Any) -> FullRecipe:
    mask, _ = RULES[rule]
    ratio = {} if "pattern" in mask else {"ratio": 0.5}
    values = {"version": 1, "name": "test", "mask": mask} | ratio | TARGETS[target] | more
    return FullRecipe.model_validate(values)


def prune_by_mask(folder: Path, out: Path, recipe: FullRecipe, data: Samples) -> dict[str, Any]:
    return prune(encoders.job_on(folder, recipe, None, data), out)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def assert_masked(
    out: Path, source: Path, expected: dict[str, torch.Tensor], family: Family | None = None, *, updated: bool = False
) -> None:
    """The linears of the blocks have these weights, everything else the source's bits."""
    after, before = tensors_of(out), tensors_of(source)
    assert after.keys() == before.keys()
    if family is not None:
        after, before = unstack_experts(family, after), unstack_experts(family, before)
    assert expected.keys() <= after.keys()
    for name, tensor in after.items():
        if name not in expected:
            assert torch.equal(tensor, before[name]), name
            continue
        new = expected[name]
        assert torch.equal(tensor == 0, new == 0), name
        assert not torch.equal(tensor, before[name]), name
        if updated:
            torch.testing.assert_close(tensor, new, rtol=1e-4, atol=1e-4 * float(new.abs().max()), msg=None)
        else:
            assert torch.equal(tensor, new), name


class Reading:
    def __init__(self) -> None:
        self.blocks: set[str] = set()
        self.together = self.alive = 0
        self.held: dict[str, int] = {}


def block_of(name: str) -> str | None:
    return name.split("layers.")[1].split(".")[0] if "layers." in name else None


def watch_reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    seen, original = Reading(), Checkpoint.read

    def release(block: str) -> None:
        seen.held[block] -= 1

    def read(self: Checkpoint, names: Any) -> dict[str, torch.Tensor]:
        tensors = original(self, names)
        blocks = {block for name in tensors if (block := block_of(name)) is not None}
        seen.blocks |= blocks
        seen.together = max(seen.together, len(blocks))
        for name, tensor in tensors.items():
            if (block := block_of(name)) is not None:
                seen.held[block] = seen.held.get(block, 0) + 1
                weakref.finalize(tensor, release, block)
        seen.alive = max(seen.alive, sum(count > 0 for count in seen.held.values()))
        return tensors

    monkeypatch.setattr(Checkpoint, "read", read)
    return seen
