"""Grams of what the weights of a graph are multiplied with, summed over real inputs."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir
import torch
from torch import Tensor

from ckpt_prune.onnx.quantization.probe import PREFIX, Feed, open_model
from ckpt_prune.onnx.quantization.weights import split_gemms, weights_of


class Grams:
    """Sums over all tokens of x xᵀ, for each value that weights are multiplied with."""

    def __init__(self, sums: dict[str, Tensor], inputs: dict[str, str]) -> None:
        self._sums, self._inputs = sums, inputs

    def of(self, weight: str) -> Tensor | None:
        """(K, K) float32 of a weight's inputs; None of one that nothing is multiplied with, or several things are."""
        name = self._inputs.get(weight)
        return None if name is None else self._sums[name]


def grams_of(model: onnx_ir.Model, feeds: Iterable[Feed], scratch: Path, threads: int | None = None) -> Grams:
    """Run a graph and sum.

    Args:
        model: in float32; not changed.
        feeds: batches of inputs, without padding.
        scratch: folder for a copy of the graph meanwhile.
        threads: of one operator.
    """
    copy = model.clone()
    split_gemms(copy.graph)
    inputs: dict[str, str] = {}
    values: dict[str, Any] = {}
    for weight in weights_of(copy.graph):
        read = {node.inputs[0].name: node.inputs[0] for node in weight.products if node.inputs[0] is not None}
        if len(read) == 1 and not weight.lookups:
            ((inputs[weight.name], value),) = ((str(name), value) for name, value in read.items())
            values[inputs[weight.name]] = value
    copy.graph.outputs.clear()
    for value in values.values():
        value.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
        copy.graph.outputs.append(value)
    sums: dict[str, Tensor] = {}
    if values:
        with TemporaryDirectory(prefix=PREFIX, dir=scratch) as place:
            session = open_model(copy, Path(place), threads)
            for feed in feeds:
                for name, found in zip(values, session.run(list(values), dict(feed)), strict=True):
                    x = torch.from_numpy(found).flatten(0, -2)
                    sums[name] = sums[name].addmm_(x.T, x) if name in sums else x.T @ x
    return Grams(sums, inputs)
