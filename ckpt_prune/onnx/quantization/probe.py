"""How much a graph's outputs change where some of its weights are rounded: measured, by running it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ckpt_prune.common import progress
from ckpt_prune.onnx.quantization.weights import Weight, split_gemms, weights_of

Array = NDArray[Any]
Feed = Mapping[str, Array]
PREFIX = ".ckpt-prune-"
"""Of names of temporary folders: hidden, so that a folder of graphs does not count them among its files."""


class Probe:
    """A graph whose weights are inputs, so that each run can have others without loading anything again.

    Args:
        model: the graph in float32; a copy is changed, not itself.
        feeds: batches of inputs to measure on.
        scratch: folder for a copy of the graph while it is loaded.
        outputs: names of those that count.
        classes: outputs are logits: harm is KL(as it was ‖ rounded) in nats. Otherwise it is the share of the outputs'
            energy that is lost.
        inputs: rounded runs can also round what a weight is multiplied with, to 8 bits for a whole tensor.
        threads: of one operator.

    Attributes:
        weights: name → those that can be rounded.
        seconds: that a run on the first feed takes.
    """

    def __init__(
        self,
        model: onnx_ir.Model,
        feeds: Sequence[Feed],
        scratch: Path,
        outputs: Sequence[str],
        *,
        classes: bool,
        inputs: bool = False,
        threads: int | None = None,
    ) -> None:
        copy = model.clone()
        split_gemms(copy.graph)
        self.weights = {weight.name: weight for weight in weights_of(copy.graph)}
        self._plain: dict[str, Array] = {}
        self._flags: dict[str, str] = {}
        for name, weight in self.weights.items():
            assert weight.value.const_value is not None
            self._plain[name] = np.ascontiguousarray(weight.value.const_value.numpy())
            if inputs and weight.products:
                self._flags[name] = _roundable(copy.graph, weight)
        for name, weight in self.weights.items():
            del copy.graph.initializers[name]
            weight.value.const_value = None
            weight.value.shape = onnx_ir.Shape(self._plain[name].shape)
            weight.value.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
            copy.graph.inputs.append(weight.value)
        self._feeds, self._outputs, self._classes = feeds, list(outputs), classes
        with TemporaryDirectory(prefix=PREFIX, dir=scratch) as place:
            self._session = open_model(copy, Path(place), threads)
        begun = progress.now()
        first = self._run({}, frozenset(), slice(1))
        self.seconds = progress.now() - begun
        self._expected = [self._prepared(found) for found in [*first, *self._run({}, frozenset(), slice(1, None))]]

    def matrix(self, name: str) -> Array:
        """A weight's own values, (K, N)."""
        plain = self._plain[name]
        return np.ascontiguousarray(plain.T if self.weights[name].table else plain)

    def harm(
        self, rounded: Mapping[str, Array], inputs: frozenset[str] = frozenset(), on: slice = slice(None)
    ) -> float:
        """What the outputs lose where weights are replaced.

        Args:
            rounded: name → matrix (K, N), float32.
            inputs: weights whose inputs are rounded too.
            on: which of the feeds.
        """
        values = {name: self.weights[name].stored(matrix) for name, matrix in rounded.items()}
        found = self._run(values, inputs, on)
        parts = [
            self._lost(self._prepared(given), expected)
            for given, expected in zip(found, self._expected[on], strict=True)
        ]
        lost = sum(part for part, _ in parts) / sum(size for _, size in parts)
        return lost if np.isfinite(lost) else float("inf")

    def _run(self, values: Mapping[str, Array], inputs: frozenset[str], on: slice = slice(None)) -> list[list[Tensor]]:
        flags = {flag: np.array(name in inputs, np.float32) for name, flag in self._flags.items()}
        weights: dict[str, Any] = {**self._plain, **values, **flags}
        return [
            [torch.from_numpy(each) for each in self._session.run(self._outputs, {**weights, **feed})]
            for feed in self._feeds[on]
        ]

    def _prepared(self, found: list[Tensor]) -> list[Tensor]:
        if not self._classes:
            return [each.float() for each in found]
        return [each.float().flatten(0, -2).log_softmax(-1) for each in found]

    def _lost(self, given: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
        """What one batch loses, and what it is a share of: positions, or energy."""
        if self._classes:
            lost = sum(
                functional.kl_div(a, b, reduction="sum", log_target=True).item()
                for a, b in zip(given, expected, strict=True)
            )
            return lost, float(sum(len(each) for each in expected))
        lost = sum((a - b).double().square().sum().item() for a, b in zip(given, expected, strict=True))
        return lost, sum(each.double().square().sum().item() for each in expected)


def _roundable(graph: onnx_ir.Graph, weight: Weight) -> str:
    """Let what a weight is multiplied with be rounded: x + flag (rounded x - x); the name of the flag."""
    flag = onnx_ir.Value(name=f"{weight.name}:inputs", shape=onnx_ir.Shape([]), type=_FLOAT)
    graph.inputs.append(flag)
    for node in weight.products:
        x = node.inputs[0]
        low = onnx_ir.node("DynamicQuantizeLinear", [x], num_outputs=3)
        back = onnx_ir.node("DequantizeLinear", low.outputs)
        apart = onnx_ir.node("Sub", [back.outputs[0], x])
        scaled = onnx_ir.node("Mul", [apart.outputs[0], flag])
        moved = onnx_ir.node("Add", [x, scaled.outputs[0]])
        new = [low, back, apart, scaled, moved]
        for number, each in enumerate(new):
            for place, output in enumerate(each.outputs):
                output.name = f"{node.name}:{number}.{place}"
        graph.insert_before(node, new)
        node.replace_input_with(0, moved.outputs[0])
    return flag.name or ""


_FLOAT = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)


def open_model(model: onnx_ir.Model, place: Path, threads: int | None = None) -> Any:
    """An InferenceSession of a graph on the CPU.

    By way of a file, which has no limit of 2 GB.

    Args:
        model: the graph.
        place: a temporary folder; it may go when the session is closed.
        threads: of one operator; by default as many as torch uses.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    onnx_ir.save(model, place / "graph.onnx", external_data="graph.onnx_data")
    return onnxruntime.InferenceSession(str(place / "graph.onnx"), options, providers=["CPUExecutionProvider"])
