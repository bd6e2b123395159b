"""Scales fitted to a dense model's predictions, against whole models in float64 (`oracles.scales`)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ckpt_prune.stages.recovery import scales as module
from ckpt_prune.stages.recovery.block_training import SampleSplit
from ckpt_prune.stages.recovery.records import Trained
from ckpt_prune.stages.recovery.scales import ModelInBlocks, Scales, apply_scales, fit_scales
from tests.encoders import Pixels
from tests.oracles import scales as oracle
from tests.pairs import every

from .twins import BLOCKS, SAMPLES, Twins, Weights, settings, written_once

VARIANTS = ["llama-gqa-tied", "qwen3-biases-mha", "opt", "bert-pretraining", "bert-model", "deit-teacher", "vit-model"]
HEADLESS = ("bert-model", "vit-model")


@pytest.fixture(scope="module")
def twins_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twins]:
    return written_once(tmp_path_factory)


@dataclass
class Pair:
    """A dense model and a masked one."""

    twins: Twins
    dense: Weights
    pruned: Weights

    @classmethod
    def of(cls, twins: Twins) -> "Pair":
        return cls(twins, twins.disk(), twins.disk(twins.pruned()))

    def fit(self, **changes: object) -> Trained[Scales]:
        chosen = settings(**{"lr": 0.02, "epochs": 4} | changes)
        split = SampleSplit.of(SAMPLES, chosen.held_out)
        ours = self.twins.stream(self.pruned, sizes=split.sizes(chosen))
        theirs = self.twins.stream(self.dense)
        sides = (
            ModelInBlocks(stream, lambda block, weights=weights: self.twins.block(block, weights), BLOCKS)
            for stream, weights in ((ours, self.pruned), (theirs, self.dense))
        )
        return fit_scales(next(sides), next(sides), self.twins.data, split, chosen, seed=0)

    def outputs(self, fitted: Trained[Scales] | None, rows: Tensor, weights: Weights) -> list[Tensor]:
        """Return the outputs of a whole model in float64 with these weights, scaled if anything was fitted."""
        scaled = weights if fitted is None else weights | apply_scales(weights, fitted.kept)
        stream = self.twins.stream(scaled)
        for block in range(BLOCKS):
            stream.advance(block, self.twins.block(block, scaled))
        per_row = [
            stream.readout().outputs(self.twins.data.batch(slice(row, row + 1)), stream.states[row, None])
            for row in rows.tolist()
        ]
        return [torch.cat(parts) for parts in zip(*per_row, strict=True)]

    def divergence(self, fitted: Trained[Scales] | None, rows: Tensor) -> float:
        theirs, ours = self.outputs(None, rows, self.dense), self.outputs(fitted, rows, self.pruned)
        return float(oracle.divergence(theirs, ours, logits=self.twins.variant not in HEADLESS))


@pytest.mark.parametrize("variant", every(4, VARIANTS))
def test_gradients_are_those_of_the_whole_model(twins_of, variant, monkeypatch):
    """Gradients of the first batch are those of the whole model, with scales that are not one."""
    pair = Pair.of(twins_of(variant))
    twins, rows = pair.twins, torch.tensor([4, 0, 7])
    generator = torch.Generator().manual_seed(3)
    recorded: dict[str, tuple[Tensor, Tensor]] = {}
    values: dict[str, tuple[Tensor, Tensor]] = {}
    begin, gradients = module._ScaleFit.begin, module._ScaleFit.gradients

    def begun(task):
        begin(task)
        for pairs in task.scales.values():
            for side in pairs:
                with torch.no_grad():
                    side.add_(0.2 * torch.randn(side.shape, generator=generator))

    def first(task, _rows):
        gradients(task, rows)
        if not recorded:
            recorded.update({name: (o.grad.clone(), i.grad.clone()) for name, (o, i) in task.scales.items()})
            values.update({name: (o.detach().double(), i.detach().double()) for name, (o, i) in task.scales.items()})

    monkeypatch.setattr(module._ScaleFit, "begin", begun)
    monkeypatch.setattr(module._ScaleFit, "gradients", first)
    pair.fit(epochs=1)
    model, pruned = twins.dense().model, twins.pruned().model
    factory = twins.stream(pair.dense).factory
    pairs = {}
    for name, (o, i) in values.items():
        parameters = factory.find_parameters(name)
        for parameter, part in zip(parameters, o.chunk(len(parameters)), strict=True):
            pairs[parameter] = (part.requires_grad_(), i.requires_grad_())
    batch = {k: v.double() if v.is_floating_point() else v for k, v in whole_batch(twins, rows).items()}
    with torch.no_grad():
        theirs = oracle.outputs(model, batch, {})
    loss = oracle.divergence(theirs, oracle.outputs(pruned, batch, pairs), logits=variant not in HEADLESS)
    for name, (_, i) in values.items():
        expected = torch.autograd.grad(
            loss, [*(pairs[p][0] for p in factory.find_parameters(name)), i], retain_graph=True
        )
        torch.testing.assert_close(recorded[name][0].double(), torch.cat(expected[:-1]), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(recorded[name][1].double(), expected[-1], rtol=1e-4, atol=1e-7)
        assert float(recorded[name][0].abs().max()) > 1e-6, name


def whole_batch(twins: Twins, rows: Tensor) -> dict[str, Tensor]:
    data = twins.data
    every = data.batch(slice(0, len(data)))
    assert isinstance(data, Pixels) or "input_ids" in every
    return {name: values[rows] for name, values in every.items()}


@pytest.mark.parametrize("variant", every(2, ["llama-gqa-tied", "bert-model", "deit-teacher"]))
def test_what_is_told_is_the_divergence_of_the_scaled_model(twins_of, variant):
    pair = Pair.of(twins_of(variant))
    fitted = pair.fit()
    measured = SampleSplit.of(SAMPLES, 0.2).measured
    assert fitted.loss_before == pytest.approx(pair.divergence(None, measured), rel=1e-5)
    assert fitted.loss_after == pytest.approx(pair.divergence(fitted, measured), rel=1e-5)
    assert fitted.loss_after < 0.99 * fitted.loss_before
    assert (fitted.steps, fitted.epochs, fitted.rate) == (4 * 3, 4, 0.02)
    assert fitted.parameters == sum(sum(pair.pruned[name].shape) for name in fitted.kept)


def test_names_shapes_dtypes_and_zeros_stay(twins_of):
    pair = Pair.of(twins_of("llama-gqa-tied"))
    fitted = pair.fit(epochs=1, held_out=0)
    stored = {name: tensor.bfloat16() for name, tensor in pair.twins.block(1, pair.pruned).items()}
    new = apply_scales(stored, fitted.kept)
    assert new.keys() == stored.keys()
    for name, tensor in stored.items():
        assert (new[name].shape, new[name].dtype) == (tensor.shape, torch.bfloat16)
        assert torch.equal(new[name] == 0, tensor == 0)
        assert torch.equal(new[name], tensor) == (name not in fitted.kept)
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".")[-2] for name in fitted.kept} == set(linears)


def test_where_nothing_is_gained_there_are_no_scales(twins_of):
    pair = Pair.of(twins_of("llama-gqa-tied"))
    same = replace(pair, pruned=pair.dense).fit()
    assert (same.kept, same.loss_before, same.loss_after) == ({}, 0.0, 0.0)
    lost = Pair.of(twins_of("opt")).fit(lr=1e4, patience=1)
    assert (lost.kept, lost.loss_after, lost.epochs) == ({}, lost.loss_before, 1)


def test_without_held_out_samples_the_last_epoch_stays(twins_of):
    pair = Pair.of(twins_of("llama-gqa-tied"))
    fitted = pair.fit(held_out=0, lr=0.3, epochs=2)
    assert fitted.kept
    assert math.isfinite(fitted.loss_after)
    assert fitted.loss_after != fitted.loss_before
