"""Blocks that are alike are traced once: the others pass their input on, and are copied into the graph afterwards.

A copy is the nodes of a traced block with the weights, the keys and values and the input of another. Nodes that depend
on none of these, such as sizes of the whole input, are shared. Two blocks of each kind are traced, and their nodes are
compared one by one. Then the exporter's own optimizer runs, which takes as long as tracing, and the second block is
copied as it left it. Meanwhile the weights of that block are inputs of the graph, so that nothing is left out for what
they happen to hold.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import onnx_ir
import onnxscript.optimizer
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor
from torch.utils._pytree import tree_map

from ckpt_prune.onnx.block_kinds import BlockKinds, NotAlikeError
from ckpt_prune.onnx.weight_readings import Readings

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of a node: the modules it was traced in."""
_CACHE_INPUT = re.compile(r"(?:past_key_values|cache)(?:_\d+)?")
_SIZES = ("Shape", "Size")
_GRAPHS = (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)


@contextmanager
def repeat_blocks(kinds: BlockKinds, *, cached: int) -> Iterator[list[str]]:
    """Let a model be traced without the blocks that can be copied, and put the copies into the exporter's graph.

    Args:
        cached: tensors that each block keeps of earlier tokens.

    Yields:
        A list that says afterwards what came of it: [""] if the graph is whole, else why it is not; [] if the exporter
        did not get so far.
    """
    outcome: list[str] = []
    optimize = onnxscript.optimizer.optimize_ir

    def complete(model: onnx_ir.Model, *args: Any, **options: Any) -> None:
        try:
            repetition = _Repetition(model, kinds, cached)
            optimize(model, *args, **options)
            repetition.run()
            outcome.append("")
        except NotAlikeError as error:
            outcome.append(str(error))

    passed = [index for index in range(len(kinds.blocks)) if index not in kinds.traced]
    try:
        for index in passed:
            kinds.blocks[index].forward = _pass_on(kinds.outputs[index])
        with patch.object(onnxscript.optimizer, "optimize_ir", complete):
            yield outcome
    finally:
        for index in passed:
            vars(kinds.blocks[index]).pop("forward", None)


def _pass_on(output: Any) -> Callable[..., Any]:
    """Return a forward that returns its input in the form that the block returns its output."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        entered = args[0] if args else kwargs["hidden_states"]
        return tree_map(lambda leaf: entered if leaf is Tensor else leaf, output)

    return forward


@dataclass(eq=False)
class _Block:
    """The part of a graph that computes one block.

    Attributes:
        nodes: in the graph's order; none if the block was passed.
        weights: initializers, by their names in the block.
        past: inputs of the graph for its keys and values.
        entered, left: what it reads from the block before, and what is read behind it.
        readings: what it reads of its weights; of templates alone.
        data: values that depend on what it reads, and not on sizes of that alone; numbered.
    """

    index: int
    nodes: list[onnx_ir.Node] = field(default_factory=list)
    weights: dict[str, onnx_ir.Value] = field(default_factory=dict)
    past: list[onnx_ir.Value] = field(default_factory=list)
    entered: onnx_ir.Value | None = None
    left: onnx_ir.Value = field(init=False)
    readings: Readings = field(init=False)
    data: dict[onnx_ir.Value, int] = field(default_factory=dict)

    def find_data(self) -> None:
        read = {*self.weights.values(), *self.past, self.entered} - {None}
        self.data = {}
        for node in self.nodes:
            if node.op_type not in _SIZES and any(value in read or value in self.data for value in node.inputs):
                self.data |= {value: len(self.data) + number for number, value in enumerate(node.outputs)}


class _Repetition:
    """Completes the graph of a model of which some blocks were traced: made before it is optimized, run after."""

    def __init__(self, model: onnx_ir.Model, kinds: BlockKinds, cached: int) -> None:
        self._model, self._graph, self._kinds = model, model.graph, kinds
        graph, count = model.graph, len(kinds.blocks)
        self._blocks = [_Block(index) for index in range(count)]
        self._place: dict[onnx_ir.Node, int] = {}
        scope = re.compile(rf"'{re.escape(kinds.path)}\.(\d+)'")
        for node in graph:
            if place := scope.search(node.metadata_props.get(_SCOPES, "")):
                self._place[node] = int(place[1])
                self._blocks[int(place[1])].nodes.append(node)
                if any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
                    raise NotAlikeError(f"block {place[1]} has a graph inside")
        name = re.compile(rf"{re.escape(kinds.path)}\.(\d+)\.(.+)")
        for key, value in graph.initializers.items():
            if place := name.fullmatch(key):
                self._blocks[int(place[1])].weights[place[2]] = value
        past = [value for value in graph.inputs if _CACHE_INPUT.fullmatch(value.name or "")]
        self._cached = cached  # of each block
        self._first_present = len(graph.outputs) - self._cached * count
        if len(past) != self._cached * count or self._first_present < 0:
            raise NotAlikeError(f"{len(past)} inputs hold the cache of {count} blocks")
        for block in self._blocks:
            block.past = past[self._cached * block.index : self._cached * (block.index + 1)]
        self._traced = [self._blocks[index] for index in kinds.traced]
        for number, block in enumerate(self._traced):
            if number:
                block.entered = self._traced[number - 1].left
            block.find_data()
            block.left = self._find_left(block, self._traced[number + 1] if number + 1 < len(self._traced) else None)
        self._templates = self._find_templates()
        for template in self._templates.values():
            template.readings = Readings(graph, template.nodes, template.weights, kinds.path)
            template.readings.hide(kinds.blocks[template.index], template.index)

    def run(self) -> None:
        values = {value.name: value for node in self._graph for value in node.outputs}
        for number, block in enumerate(self._traced):
            if block.left.name not in values:
                raise NotAlikeError(f"the optimizer left nothing of what block {block.index} returns")
            block.left = values[block.left.name]
            if number:
                block.entered = self._traced[number - 1].left
        for template in self._templates.values():
            template.nodes = self._find_nodes(template)
        for number, block in enumerate(self._traced):
            end = self._traced[number + 1].index if number + 1 < len(self._traced) else len(self._blocks)
            current, users = block.left, list(block.left.uses())
            for copied in self._blocks[block.index + 1 : end]:
                current = self._copy(self._templates[self._kinds.kinds[copied.index]], copied, current)
            for use in users if current is not block.left else ():
                use.node.replace_input_with(use.idx, current)
            for index in range(self._first_present):
                if self._graph.outputs[index] is block.left:
                    self._graph.outputs[index] = current
            if end < len(self._blocks):
                self._blocks[end].entered = current
        for template in self._templates.values():
            template.readings.restore(self._kinds.blocks[template.index], template.index)
        self._graph.sort()
        RemoveUnusedNodesPass()(self._model)

    def _presents(self, block: _Block) -> range:
        """Which of the graph's outputs are the block's keys and values."""
        start = self._first_present + self._cached * block.index
        return range(start, start + self._cached)

    def _find_left(self, block: _Block, following: _Block | None) -> onnx_ir.Value:
        """Return the one value of a block that is read behind it: by the next traced block alone, if there is one."""
        ends = set(self._graph.outputs[: self._first_present])
        values = set()
        for value in block.data:
            users = [use.node for use in value.uses() if use.node.op_type not in _SIZES]
            places = {self._place.get(node) for node in users}
            if places - {block.index} or value in ends:
                values.add(value)
                if following is not None and (places != {following.index} or value in ends):
                    raise NotAlikeError(f"block {block.index} is read elsewhere than in the next")
        if len(values) != 1:
            raise NotAlikeError(f"{len(values)} values leave block {block.index}")
        return values.pop()

    def _find_templates(self) -> dict[int, _Block]:
        """For each kind with blocks to copy, its second block, which was compared with the first."""
        templates = {}
        for kind, count in Counter(self._kinds.kinds).items():
            if count > 2:
                first, second = (
                    self._blocks[index] for index in self._kinds.traced if self._kinds.kinds[index] == kind
                )
                if first.entered is None:
                    first.entered = self._find_entered(first, second)
                    first.find_data()
                self._compare(first, second)
                templates[kind] = second
        return templates

    def _find_entered(self, first: _Block, second: _Block) -> onnx_ir.Value:
        """Return what the first block of all reads: the value from outside that it uses as the other uses its input."""

        def uses(value: onnx_ir.Value, block: _Block) -> list[tuple[str, int]]:
            return sorted(
                (use.node.op_type, use.idx) for use in value.uses() if self._place.get(use.node) == block.index
            )

        assert second.entered is not None
        expected = uses(second.entered, second)
        outside = {
            value
            for node in first.nodes
            for value in node.inputs
            if value is not None and (node_before := value.producer()) is not None and node_before not in self._place
        }
        candidates = [value for value in outside if uses(value, first) == expected]
        if len(candidates) != 1:
            raise NotAlikeError(f"{len(candidates)} values may be what block {first.index} reads")
        return candidates[0]

    def _compare(self, first: _Block, second: _Block) -> None:
        """Check node by node that both compute the same of what they read."""
        described = []
        for block in (first, second):
            labels = _Labels(block, self._place)
            nodes = [node for node in block.nodes if any(value in block.data for value in node.outputs)]
            ends = [block.left, *(self._graph.outputs[index] for index in self._presents(block))]
            described.append([*map(labels.describe, nodes), *map(labels.label, ends)])
        if described[0] != described[1]:
            raise NotAlikeError(f"blocks {first.index} and {second.index} are traced into different nodes")

    def _find_nodes(self, template: _Block) -> list[onnx_ir.Node]:
        """Return the nodes to copy: all that depend on what is replaced, up to what leaves the block."""
        read = {template.entered, *template.past, *template.readings.values}
        computed: set[onnx_ir.Value | None] = set()
        nodes = []
        for node in self._graph:
            of_size = node.op_type in _SIZES and not computed.intersection(node.inputs)
            if not of_size and not (read | computed).isdisjoint(node.inputs):
                nodes.append(node)
                computed |= set(node.outputs) - {template.left}
        inside = set(nodes)
        if template.left.producer() not in inside or any(
            use.node not in inside for value in computed if value is not None for use in value.uses()
        ):
            raise NotAlikeError(f"the optimizer joined block {template.index} with others")
        return nodes

    def _copy(self, template: _Block, block: _Block, entered: onnx_ir.Value) -> onnx_ir.Value:
        """Insert a block behind what it reads; what leaves it."""
        weights, even = template.readings.register(self._kinds.blocks[block.index], block.index)
        copies: dict[onnx_ir.Value | None, onnx_ir.Value] = {template.entered: entered}
        copies |= zip(template.past, block.past, strict=True)
        copies |= zip(template.readings.values, weights, strict=True)
        nodes = []
        for node in template.nodes:
            outputs = [
                onnx_ir.Value(
                    name=f"{value.name}.{block.index}",
                    # Shapes within a block of other widths are nobody's.
                    shape=value.shape.copy() if even and value.shape is not None else None,
                    type=value.type,
                )
                for value in node.outputs
            ]
            inputs = [copies.get(value, value) for value in node.inputs]
            nodes.append(
                onnx_ir.Node(
                    node.domain,
                    node.op_type,
                    inputs,
                    node.attributes,
                    outputs=outputs,
                    version=node.version,
                    metadata_props=dict(node.metadata_props),
                )
            )
            copies |= zip(node.outputs, outputs, strict=True)
        before = entered.producer()
        assert before is not None
        self._graph.insert_after(before, nodes)
        for index, output in zip(self._presents(template), self._presents(block), strict=True):
            present = copies[self._graph.outputs[index]]
            present.shape = self._graph.outputs[index].shape
            self._graph.outputs[output] = present
        leaving = copies[template.left]
        leaving.shape = template.left.shape  # which no width within the block changes
        return leaving


class _Labels:
    """Names values of a block by what they are in it, so that those of two blocks can be compared."""

    def __init__(self, block: _Block, place: dict[onnx_ir.Node, int]) -> None:
        self._place = place
        self._known: dict[onnx_ir.Value | None, Any] = {None: None, block.entered: "entered"}
        self._known |= {value: ("own", number) for value, number in block.data.items()}
        self._known |= {value: ("weight", name) for name, value in block.weights.items()}
        self._known |= {value: ("past", number) for number, value in enumerate(block.past)}

    def describe(self, node: onnx_ir.Node) -> tuple[Any, ...]:
        attributes = sorted((name, _plain(attribute)) for name, attribute in node.attributes.items())
        return (node.domain, node.op_type, *attributes, *map(self.label, node.inputs))

    def label(self, value: onnx_ir.Value | None) -> Any:
        if value not in self._known:
            assert value is not None
            node = value.producer()
            if node is None or (node.op_type != "Constant" and node not in self._place):
                self._known[value] = ("outside", value.name)
            else:  # no block's data: what a size or a constant is depends on its operators alone
                self._known[value] = (value.index(), self.describe(node))
        return self._known[value]


def _plain(attribute: onnx_ir.Attr) -> Any:
    value = attribute.value
    if isinstance(value, onnx_ir.TensorProtocol):
        return (str(value.dtype), str(value.shape), value.tobytes())
    return value
