"""From a model in memory to an ONNX graph: transformers' exporter, and names that deployments know."""

import contextlib
import gc
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

from ckpt_prune._version import __version__
from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.skeleton import quiet_transformers
from ckpt_prune.onnx.tasks import PAST, PRESENT, Task
from ckpt_prune.onnx.tracing import Example

DEFAULT_OPSET = 20

_BATCH, _SEQUENCE, _PAST, _TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
_CACHE = re.compile(r"(?:(?:input|output)\.)?(?:past_key_values|cache)\.layers\.(\d+)\.(key|value)s")


def build_graph(
    model: Any, example: Example, task: Task, *, opset: int, fusions: str | None, log: Path
) -> onnx_ir.Model:
    """Trace a model into an ONNX graph.

    By transformers' own exporter, which is torch's dynamo exporter with patches for its models.

    Inputs and outputs have the names that the Hub's ONNX models have: those of the forward, and for layer i
    `past_key_values.i.key`, `past_key_values.i.value` in and `present.i.key`, `present.i.value` out. Dynamic axes are
    named `batch_size`, `sequence_length`, `past_sequence_length` and `total_sequence_length` (past and new).

    Args:
        model: in evaluation mode.
        example: what to trace it with.
        task: what it is for.
        opset: ONNX opset.
        fusions: fuse into operators of onnxruntime for this provider, cpu or cuda; such a graph runs in onnxruntime
            only. None: ONNX's own operators.
        log: file that gets the exporter's output and traceback where it fails.

    Raises:
        UserError: the exporter cannot trace the model, or an axis that should be dynamic came out fixed.
    """
    config = OnnxConfig(dynamic=True, dynamic_shapes=example.dynamic, opset_version=opset, ort_fusions=fusions)
    said = io.StringIO()
    try:
        with _captured(said), quiet_transformers(), _uncollected(), _untraced():
            # It takes flags such as use_cache out of the inputs it is given.
            graph: onnx_ir.Model = OnnxExporter().export_program(model, dict(example.inputs), config)[0]
    except Exception as error:  # torch.export, onnxscript and model code raise anything here
        write_atomically(log, f"{said.getvalue()}\n{''.join(traceback.format_exception(error))}")
        reason = _first_line(error)
        raise UserError(
            f"{type(model).__name__} cannot be exported: {reason[:300]} (all that was said is in {log})"
        ) from error
    _rename(graph.graph, task)
    _name_weights(graph.graph, model)
    _share_tied(graph.graph)
    _lighten(graph)
    if graph.opset_imports.get("") != opset:
        raise UserError(
            f"{type(model).__name__} cannot be written in opset {opset}: the exporter kept "
            f"{graph.opset_imports.get('')}; leave out --opset, or say that one"
        )
    return graph


def _first_line(error: BaseException) -> str:
    """The first line that says something, of the error that started it all."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next((line for line in lines if line), 'no message')}"


@contextlib.contextmanager
def _captured(into: io.StringIO) -> Iterator[None]:
    """Keep what the exporter prints, warns and logs from the terminal."""
    handler = logging.StreamHandler(into)
    roots = ("torch", "onnxscript", "onnx_ir", "transformers")
    # Some of torch's have a handler of their own.
    known = list(logging.root.manager.loggerDict)
    children = [name for name in known if name.startswith(tuple(f"{root}." for root in roots))]
    loggers = [logging.getLogger(name) for name in (*roots, *children)]
    before = [(each.handlers[:], each.propagate) for each in loggers]
    try:
        for each in loggers:
            top = each.name in roots
            each.handlers, each.propagate = ([handler] if top else []), not top
        with contextlib.redirect_stdout(into), contextlib.redirect_stderr(into), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, (handlers, propagate) in zip(loggers, before, strict=True):
            each.handlers, each.propagate = handlers, propagate


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Leave garbage until tracing is done: of objects by the million, looking through them is a tenth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Do not look up for each node where in Python it comes from, a tenth of the time: no graph keeps it."""
    config = torch.fx.config
    before = getattr(config, "do_not_emit_stack_traces", False)  # older versions know no such switch
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _rename(graph: onnx_ir.Graph, task: Task) -> None:
    """Give inputs and outputs their public names and their dynamic axes names that say what they are."""
    for value in graph.inputs:
        value.name = _CACHE.sub(rf"{PAST}\1.\2", value.name or "")
        _name_axes(value, _input_axes(value.name, task))
    for value in graph.outputs:
        value.name = _CACHE.sub(rf"{PRESENT}\1.\2", value.name or "")
        _name_axes(value, _output_axes(value, task))


def _input_axes(name: str, task: Task) -> dict[int, str]:
    if name.startswith(PAST):
        return {0: _BATCH, 2: _PAST}
    if task.modality == "image":
        return {0: _BATCH}
    return {0: _BATCH, 1: _TOTAL if name == "attention_mask" and task.cached else _SEQUENCE}


def _output_axes(value: onnx_ir.Value, task: Task) -> dict[int, str]:
    if (value.name or "").startswith(PRESENT):
        return {0: _BATCH, 2: _TOTAL}
    # Pooled outputs and logits of a whole text have no axis of tokens.
    shape = value.shape
    per_token = task.modality == "text" and shape is not None and len(shape) > 1 and not _is_number(shape[1])
    return {0: _BATCH, 1: _SEQUENCE} if per_token else {0: _BATCH}


def _is_number(size: Any) -> bool:
    """Whether an axis has a fixed size; the exporter writes some as symbols such as "6"."""
    return isinstance(size, int) or str(size.value).isdigit()


def _plain(size: Any) -> int | str:
    """A fixed size as a number, another as the tracer's symbol."""
    if isinstance(size, int):
        return size
    return int(size.value) if _is_number(size) else str(size.value)


def _name_axes(value: onnx_ir.Value, names: dict[int, str]) -> None:
    shape = value.shape
    if shape is None or any(axis >= len(shape) or _is_number(shape[axis]) for axis in names):
        sizes = [] if shape is None else [str(size) for size in shape]
        raise UserError(
            f"{value.name} of the exported graph has shape {sizes}, where axes {sorted(names)} should be dynamic: "
            "the model computes with a fixed size there"
        )
    value.shape = onnx_ir.Shape([names[axis] if axis in names else _plain(shape[axis]) for axis in range(len(shape))])


def _name_weights(graph: onnx_ir.Graph, model: Any) -> None:
    """Give weights that the exporter transposed, and numbered, the names of the parameters they are: `NAME.T`.

    So that what is found wrong in a weight says which.
    """
    known = {
        _sample(parameter.detach().T): f"{name}.T"
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
    }
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or len(tensor.shape) != 2 or not name.startswith("val_"):
            continue
        found = known.get(_sample(torch.from_numpy(tensor.numpy())))
        if found is not None and found not in graph.initializers:
            value.name = found


def _share_tied(graph: onnx_ir.Graph) -> None:
    """Store a head that is tied to the embedding once: its transpose is taken when the graph is loaded.

    onnxruntime folds it then, so that nothing is computed at each call.
    """
    plain: dict[tuple[Any, ...], onnx_ir.Value] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and len(tensor.shape) == 2 and not name.endswith(".T"):
            plain[_sample(torch.from_numpy(tensor.numpy()).T)] = value
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or not name.endswith(".T"):
            continue
        array = tensor.numpy()
        other = plain.get(_sample(torch.from_numpy(array)))
        if other is None or other.const_value is None or not np.array_equal(other.const_value.numpy().T, array):
            continue
        node = onnx_ir.node("Transpose", [other], {"perm": [1, 0]})
        node.outputs[0].name = f"{name}.tied"
        graph.insert_before(graph[0], node)
        value.replace_all_uses_with(node.outputs[0])
        del graph.initializers[name]


def _sample(matrix: torch.Tensor) -> tuple[Any, ...]:
    """What tells a weight from the others: its shape and some of its elements."""
    rows, columns = (max(1, size // 8) for size in matrix.shape)
    return (*matrix.shape, *matrix[::rows, ::columns].flatten().tolist())


def _lighten(graph: onnx_ir.Model) -> None:
    """Drop what no runtime reads: stack traces of this machine, and shapes inside the graph in the tracer's names."""
    ClearMetadataAndDocStringPass()(graph)
    for weight in graph.graph.initializers.values():
        if weight.const_value is not None:
            # Fusions note another rank for some scalars.
            weight.shape = onnx_ir.Shape(list(weight.const_value.shape.numpy()))
    named = {id(value) for value in graph.graph.outputs}
    for node in graph.graph:
        for value in node.outputs:
            if id(value) not in named:
                value.shape = None
    graph.producer_name, graph.producer_version = "ckpt_prune", __version__
