"""Scales fitted to a dense model's predictions, against whole models in float64 (`oracles.scales`)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.stages.recovery.scales import (
    ModelInBlocks,
    ScaleObjective,
    Scales,
    apply_scales,
    default_rate,
    fit_scales,
)
from ckpt_prune.stages.recovery.training import SampleSplit, Trained
from tests.encoders import Pixels
from tests.oracles import scales as oracle
from tests.pairs import one_of

from .twins import BLOCKS, SAMPLES, Twins, Weights, settings, written_once

VARIANTS = ["llama-gqa-tied", "qwen3-biases-mha", "opt", "bert-pretraining", "bert-model", "deit-teacher", "vit-model"]
HEADLESS = ("bert-model", "vit-model")
Fitted = Trained[Scales]


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

    def in_blocks(self, weights: Weights, sizes: Iterable[int] = ()) -> ModelInBlocks:
        return ModelInBlocks(
            self.twins.stream(weights, sizes=sizes), partial(self.twins.block, tensors=weights), BLOCKS
        )

    def fit(self, **changes: object) -> Fitted:
        chosen = settings(**{"lr": 0.02, "epochs": 4} | changes)
        split = SampleSplit.of(SAMPLES, chosen.held_out)
        ours, theirs = self.in_blocks(self.pruned, split.sizes(chosen)), self.in_blocks(self.dense)
        return fit_scales(ours, theirs, self.twins.data, split, chosen, seed=0)

    def objective(self, chosen: RecoverySettings) -> ScaleObjective:
        theirs = self.twins.stream(self.dense)
        for block in range(BLOCKS):
            theirs.advance(block, self.twins.block(block, self.dense))
        ours = self.in_blocks(self.pruned, range(1, SAMPLES))
        return ScaleObjective(ours, self.twins.data, theirs.states, theirs.readout(), chosen)

    def outputs(self, fitted: Fitted | None, rows: Tensor, weights: Weights) -> list[Tensor]:
        """Return the outputs of a whole model in float64 with these weights, scaled if anything was fitted."""
        scaled = weights if fitted is None else weights | apply_scales(weights, fitted.kept or {})
        stream = self.twins.stream(scaled)
        for block in range(BLOCKS):
            stream.advance(block, self.twins.block(block, scaled))
        per_row = [
            stream.readout().outputs(self.twins.data.batch(slice(row, row + 1)), stream.states[row, None])
            for row in rows.tolist()
        ]
        return [torch.cat(parts) for parts in zip(*per_row, strict=True)]

    def divergence(self, fitted: Fitted | None, rows: Tensor) -> float:
        theirs, ours = self.outputs(None, rows, self.dense), self.outputs(fitted, rows, self.pruned)
        return float(oracle.divergence(theirs, ours, logits=self.twins.variant not in HEADLESS))


@pytest.mark.parametrize("variant", one_of(4, VARIANTS))
def test_gradients_are_those_of_the_whole_model(twins_of, variant):
    """With scales that are not one, and a batch in two parts."""
    pair = Pair.of(twins_of(variant))
    twins, rows = pair.twins, torch.tensor([4, 0, 7])
    objective = pair.objective(settings(accumulate=2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for factors in objective.parameters:
            factors.add_(0.2 * torch.randn(factors.shape, generator=generator))
    objective.add_gradients(rows)
    sides = {name: list(pair.pruned[name].shape) for name in objective.scales}
    recorded = {name: factors.grad.split(sides[name]) for name, factors in objective.scales.items()}
    values = {name: factors.detach().double().split(sides[name]) for name, factors in objective.scales.items()}
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


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "deit-teacher"])
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


def test_where_nothing_was_lost_nothing_is_fitted(twins_of):
    pair = Pair.of(twins_of("llama-gqa-tied"))
    same = replace(pair, pruned=pair.dense).fit()
    assert (same.kept, same.steps, same.loss_before, same.loss_after) == (None, 0, 0.0, 0.0)


def test_the_rate_follows_the_root_of_what_was_lost_and_climbs_over_four_steps_at_most(twins_of):
    assert [default_rate(lost) for lost in (0.0, 0.04, 0.16, 9.0)] == pytest.approx([0.0, 1.5e-3, 3e-3, 3e-3])
    objective = Pair.of(twins_of("llama-gqa-tied")).objective(settings())
    assert [objective.climb(steps) for steps in (3, 8, 16, 99)] == [0, 2, 4, 4]
