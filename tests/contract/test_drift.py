"""Drift of blocks that do more to a consumer's output than to add it: against streams written out from definitions."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.drift import observe_drift
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from tests.oracles.drift import Tokens, assert_measured

from .dense import Dense
from .models import Case, first_cases
from .whole import record_states

FOLDS = 2
Scale = Callable[[nn.Module, Tensor], Tensor]
"""Of a block and outputs of a consumer: what these are multiplied by, (..., 1) or (..., hidden)."""


def _of_norm(name: str, offset: float) -> Scale:
    def scale(block: nn.Module, output: Tensor) -> Tensor:
        norm: Any = block.get_submodule(name)
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        return (norm.weight.detach() + offset) / (output.square().mean(-1, keepdim=True) + eps).sqrt()

    return scale


def _sandwich(offset: float, attention: str = "post_attention", mlp: str = "post_feedforward") -> dict[str, Scale]:
    return {"heads": _of_norm(f"{attention}_layernorm", offset), "mlp": _of_norm(f"{mlp}_layernorm", offset)}


def _gate(_block: nn.Module, output: Tensor) -> Tensor:
    return torch.full_like(output[..., :1], 0.6)


def _plain(_block: nn.Module, output: Tensor) -> Tensor:
    return torch.ones_like(output[..., :1])


SCALES: dict[str, dict[str, Scale]] = {
    "gemma2": _sandwich(1),
    "gemma3_text": _sandwich(1),
    "olmo2": _sandwich(0),
    "glm4": _sandwich(0, "post_self_attn", "post_mlp"),
    "granite": {"heads": _gate, "mlp": _gate},
    "cohere": {"heads": _plain, "mlp": _plain},
}
"""One family of each kind: four norms, norms after alone, a multiplier, attention and mlp side by side."""
CHOSEN = [case for case in first_cases() if case.model_type in SCALES]


class Seen:
    """The second block of a whole model: the stream around its consumers, from what these give.

    Args:
        case: of the model.
        model: float64.
    """

    def __init__(self, case: Case, model: nn.Module) -> None:
        path = f"{case.family.layers}.1"
        consumers = {space: f"{path}.{case.family.spaces[space].solved_from[0]}" for space in SCALES[case.model_type]}
        data = case.samples(6)
        results = record_states(model, data, results=[*consumers.values(), path])
        inputs = record_states(model, data, inputs=[*consumers.values(), path])
        block = model.get_submodule(path)
        self.inputs = {space: torch.from_numpy(inputs[name]) for space, name in consumers.items()}
        self.outputs = {space: torch.from_numpy(results[name]) for space, name in consumers.items()}
        self.scales = {space: SCALES[case.model_type][space](block, output) for space, output in self.outputs.items()}
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}
        stream = torch.from_numpy(inputs[path])
        for space, output in self.outputs.items():
            self.before[space] = stream
            self.after[space] = stream = stream + output * self.scales[space]
        # What is written out here is what the class does; its norms compute in float32.
        torch.testing.assert_close(stream, torch.from_numpy(results[path]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_the_target_makes_the_dense_stream(dense: Dense, case: Case) -> None:
    """y* is what the consumer has to give for that, at the scale that its own output has."""
    model = dense.model(case)
    dense_model, pruned = case.model().double(), case.model().double()
    before = {name: tensor.double() for name, tensor in model.checkpoint.read(list(model.checkpoint.tensors)).items()}
    after = copy.deepcopy(before)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in case.family.linears:
            weight = after[case.family.tensor(0, module)]
            weight[torch.rand(weight.shape, generator=generator) < 0.5] = 0
            case.block(pruned, 0).get_submodule(module).weight.copy_(weight)  # type: ignore[operator, union-attr]
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float64)
    reads = [lambda names, source=source: {name: source[name] for name in names} for source in (before, after)]
    streams = [HiddenStream(factory, list(before), read, case.samples(6), folds=FOLDS) for read in reads]
    for stream, tensors in zip(streams, (before, after), strict=True):
        stream.advance(0, {name: tensors[name] for name in model.block_names(0)})
    block_tensors = {name: before[name] for name in model.block_names(1)}
    drifts, _ = observe_drift(*streams, 1, block_tensors, block_tensors, dict.fromkeys(SCALES[case.model_type], True))
    theirs, ours = Seen(case, dense_model), Seen(case, pruned)
    for space, folds in drifts.items():
        targets = (theirs.after[space] - ours.before[space]) / ours.scales[space]
        tokens = (ours.inputs[space].numpy(), targets.numpy(), ours.outputs[space].numpy())
        assert_measured(folds, Tokens(*tokens), rtol=1e-5)  # type: ignore[arg-type]
    # The block's own end serves the mlp, so that the dense stream may go past it.
    _, passed = observe_drift(*streams, 1, block_tensors, block_tensors, {"heads": True}, later=["mlp"])
    assert passed
    again, _ = observe_drift(*streams, 1, None, block_tensors, {"mlp": True})
    torch.testing.assert_close(again["mlp"][0].drift.cross, drifts["mlp"][0].drift.cross)  # type: ignore[union-attr]
