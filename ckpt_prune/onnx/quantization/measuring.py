"""Measurements on a running graph: how much its outputs lose by rounding, and the Grams of its weights' inputs."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from ckpt_prune.onnx.quantization.weights import GraphWeight, copy_with_products, find_weights

Array = NDArray[Any]
Feed = Mapping[str, Array]
Pool = Callable[[Tensor], Tensor]
"""Hidden states of texts without padding, (B, T, d) → their vectors, (B, d)."""
PREFIX = ".ckpt-prune-"
"""Begins the names of temporary folders. They are hidden, so that a folder of graphs does not count them as its
files."""
_MOST_GRAMS = 2 << 30
"""Bytes of the Grams of all experts: those of more are not measured."""
_FLOAT = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)


class Probe:
    """A graph whose weights are inputs, so that each run can have others without loading anything again.

    Args:
        model: the graph in float32; not changed.
        feeds: batches of inputs to measure on.
        scratch: folder for a copy of the graph while it is loaded.
        outputs: names of those that count.
        classes: outputs are logits: harm is KL(as it was ‖ rounded) in nats. Otherwise it is the share of the outputs'
            energy that is lost.
        pool: makes the vector (B, d) of each text of an output (B, T, d); then the energy of these counts.
        inputs: rounded runs can also round what a weight is multiplied with, to 8 bits for a whole tensor.

    Attributes:
        weights: name → those that can be rounded.
        pools: `pool`.
    """

    def __init__(
        self,
        model: onnx_ir.Model,
        feeds: Sequence[Feed],
        scratch: Path,
        outputs: Sequence[str],
        *,
        classes: bool,
        pool: Pool | None = None,
        inputs: bool = False,
        threads: int | None = None,
    ) -> None:
        copy = copy_with_products(model)
        self.weights = {weight.name: weight for weight in find_weights(copy.graph)}
        self._plain: dict[str, Array] = {}
        self._flags: dict[str, str] = {}
        for name, weight in self.weights.items():
            assert weight.value.const_value is not None
            self._plain[name] = np.ascontiguousarray(weight.value.const_value.numpy())
            if inputs and weight.products:
                self._flags[name] = _add_rounding_of_inputs(copy.graph, weight)
        for name, weight in self.weights.items():
            del copy.graph.initializers[name]
            weight.value.const_value = None
            weight.value.shape, weight.value.type = onnx_ir.Shape(self._plain[name].shape), _FLOAT
            copy.graph.inputs.append(weight.value)
        self._feeds, self._outputs, self._classes, self.pools = feeds, list(outputs), classes, pool
        self._scratch, self._threads = scratch, threads
        self._session = _load_session(copy, scratch, threads)
        self._expected = self._run(self._session, self._fill_inputs({}, frozenset()), slice(None))

    def measure_harm(
        self, rounded: Mapping[str, Array], inputs: frozenset[str] = frozenset(), on: slice = slice(None)
    ) -> float:
        """Measure how much the outputs lose if weights are replaced.

        Args:
            rounded: name → matrix (K, N), float32.
            inputs: weights whose inputs are rounded too.
            on: which of the feeds.
        """
        values = {name: self.weights[name].turn(matrix) for name, matrix in rounded.items()}
        runs = self._run(self._session, self._fill_inputs(values, inputs), on)
        return self._compare(runs, self._expected[on], self.pools)

    def measure_graph(
        self, model: onnx_ir.Model, on: slice = slice(None), *, reference: "Probe | None" = None, pooled: bool = True
    ) -> float:
        """Measure how much the outputs of a graph as it is stored lose: with inputs rounded as its operators do.

        Args:
            reference: the probe of another model, on the same feeds, whose outputs are held to be right.
            pooled: the vectors of texts count, if there is a way to make them.
        """
        runs = self._run(_load_session(model, self._scratch, self._threads), {}, on)
        return self._compare(runs, (reference or self)._expected[on], self.pools if pooled else None)

    def _compare(
        self, runs: Sequence[Sequence[Tensor]], of_feeds: Sequence[Sequence[Tensor]], pool: Pool | None
    ) -> float:
        lost = size = 0.0
        for given, expected in zip(runs, of_feeds, strict=True):
            pairs = list(zip(given, expected, strict=True))
            if self._classes:
                lost += sum(functional.kl_div(a, b, reduction="sum", log_target=True).item() for a, b in pairs)
                size += sum(len(b) for b in expected)
            else:
                pairs = pairs if pool is None else [(pool(a), pool(b)) for a, b in pairs]
                lost += sum((a - b).double().square().sum().item() for a, b in pairs)
                size += sum(b.double().square().sum().item() for _, b in pairs)
        return lost / size if np.isfinite(lost / size) else float("inf")

    def _fill_inputs(self, values: Mapping[str, Array], inputs: frozenset[str]) -> dict[str, Any]:
        flags = {flag: np.array(name in inputs, np.float32) for name, flag in self._flags.items()}
        return {**self._plain, **values, **flags}

    def _run(self, session: Any, given: Mapping[str, Any], on: slice) -> list[list[Tensor]]:
        """Outputs of each feed; of logits their log-probabilities, (positions, classes)."""
        runs = []
        for feed in self._feeds[on]:
            outputs = [torch.from_numpy(each).float() for each in session.run(self._outputs, {**given, **feed})]
            runs.append([each.flatten(0, -2).log_softmax(-1) for each in outputs] if self._classes else outputs)
        return runs


def _add_rounding_of_inputs(graph: onnx_ir.Graph, weight: GraphWeight) -> str:
    """Let what a weight is multiplied with be rounded: x + flag (rounded x - x); the name of the flag."""
    flag = onnx_ir.Value(name=f"{weight.name}:inputs", shape=onnx_ir.Shape([]), type=_FLOAT)
    graph.inputs.append(flag)
    for node in weight.products:
        x = node.inputs[0]
        low = onnx_ir.node("DynamicQuantizeLinear", [x], num_outputs=3)
        back = onnx_ir.node("DequantizeLinear", low.outputs)
        error = onnx_ir.node("Sub", [back.outputs[0], x])
        scaled = onnx_ir.node("Mul", [error.outputs[0], flag])
        moved = onnx_ir.node("Add", [x, scaled.outputs[0]])
        nodes = [low, back, error, scaled, moved]
        for number, new in enumerate(nodes):
            for place, output in enumerate(new.outputs):
                output.name = f"{node.name}:{number}.{place}"
        graph.insert_before(node, nodes)
        node.replace_input_with(0, moved.outputs[0])
    return flag.name or ""


def measure_grams(
    model: onnx_ir.Model, feeds: Iterable[Feed], scratch: Path, threads: int | None = None
) -> dict[str, tuple[Tensor, int]]:
    """Weight → the sum over all tokens of x xᵀ, (K, K) float32, x being what it is multiplied with, and their number.

    Weights that nothing or several things are multiplied with, and tables, are left out, and so are experts that no
    token is sent to, or all experts if their Grams take more than 2 GiB.

    Args:
        model: in float32; not changed.
        feeds: batches of inputs, without padding.
        scratch: folder for a copy of the graph meanwhile.
    """
    copy = copy_with_products(model)
    inputs: dict[str, str] = {}
    values: dict[str, Any] = {}
    weights = find_weights(copy.graph)
    of_experts = sum(4 * weight.shape[0] ** 2 for weight in weights if weight.is_of_expert)
    for weight in weights:
        if weight.is_of_expert and of_experts > _MOST_GRAMS:
            continue
        read = {str(node.inputs[0].name): node.inputs[0] for node in weight.products if node.inputs[0] is not None}
        if len(read) == 1 and not weight.lookups:
            ((inputs[weight.name], value),) = read.items()
            values[inputs[weight.name]] = value
    if not values:
        return {}
    copy.graph.outputs.clear()
    for value in values.values():
        value.type = _FLOAT
        copy.graph.outputs.append(value)
    sums, counts = dict[str, Tensor](), Counter[str]()
    session = _load_session(copy, scratch, threads)
    for feed in feeds:
        for name, array in zip(values, session.run(list(values), dict(feed)), strict=True):
            x = torch.from_numpy(array).flatten(0, -2)
            sums[name] = sums[name].addmm_(x.T, x) if name in sums else x.T @ x
            counts[name] += len(x)
    return {weight: (sums[name], counts[name]) for weight, name in inputs.items() if counts[name]}


def _load_session(model: onnx_ir.Model, scratch: Path, threads: int | None) -> Any:
    """Return an InferenceSession of a graph on the CPU, by way of a temporary file, which has no limit of 2 GB."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with TemporaryDirectory(prefix=PREFIX, dir=scratch) as place:
        path = Path(place) / "graph.onnx"
        onnx_ir.save(model, path, external_data="graph.onnx_data")
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
