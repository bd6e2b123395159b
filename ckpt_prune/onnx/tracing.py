"""From a model in memory to an ONNX graph: transformers' exporter, and names that deployments know."""

import contextlib
import copy
import inspect
import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx_ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxscript import opset18
from onnxscript.rewriter._basics import MatchResult
from onnxscript.rewriter._matcher import SimplePatternMatcher
from torch._dynamo import config as dynamo_config
from torch.export import Dim
from torch.onnx._internal.exporter._registration import ONNXRegistry
from transformers import Cache, DynamicCache
from transformers.exporters import utils as exporter_utils
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

from ckpt_prune._version import __version__
from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.collection import without_collection
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.context import context_length
from ckpt_prune.model.skeleton import quiet_transformers
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.onnx.block_kinds import find_block_kinds
from ckpt_prune.onnx.repetition import repeat_blocks
from ckpt_prune.onnx.stacks import BRANCH, KINDS, DecoderStep
from ckpt_prune.onnx.tasks import PAST, PRESENT, GraphTask

DEFAULT_OPSET = 20

_BATCH, _SEQUENCE, _PAST, _TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
_CACHE = re.compile(r"(?:(?:input|output)\.)?(?:past_key_values|cache)\.layers\.(\d+)\.(key|value)s")
_SOURCE, _PAST_SOURCE = "encoder_sequence_length", "past_encoder_sequence_length"
_OPERATORS: dict[str, ONNXRegistry] = {}
"""Opset and so on → torch's operators in ONNX."""
_TEXTS, _TOKENS, _PAST_TOKENS, _PAST_STATES, _STATES = 2, 3, 4, 5, 7
"""Sizes of the example. None is 1, which the tracer would take for a constant, and no two are equal."""


@dataclass(frozen=True)
class Example:
    """Arguments of a model's forward, and torch.export's `dynamic_shapes` for them."""

    inputs: dict[str, Any]
    dynamic: dict[str, Any]


def make_example(model: Any, task: GraphTask) -> Example:
    """Inputs to trace a model with.

    Text: `input_ids`, `attention_mask`, and what else the model's forward knows of `position_ids` (generation) and
    `token_type_ids`, int64 (B, T), both axes dynamic; with a cache also keys and values of earlier tokens,
    (B, heads, past, head_dim) in every layer, and the mask is (B, past + T). Images: `pixel_values`, (B, C, H, W)
    of the size in the task or the config, with only B dynamic. An encoder that hears has `input_features` likewise,
    (B, channels, frames). A decoder behind an encoder: as `DecoderStep` has them.
    """
    if task.stack == "decoder":
        return _make_decoder_example(model)
    if task.stack == "encoder" and model.main_input_name != "input_ids":
        channels, frames = model.config.num_mel_bins, 2 * model.config.max_source_positions
        features = torch.zeros(_TEXTS, channels, frames, dtype=model.dtype)
        return Example({"input_features": features}, {"input_features": {0: Dim.AUTO}})
    if task.modality == "image":
        size = (getattr(model.config, "num_channels", 3), *get_image_size(model.config, task))
        return Example({"pixel_values": torch.zeros(_TEXTS, *size, dtype=model.dtype)}, {"pixel_values": {0: Dim.AUTO}})
    past = _PAST_TOKENS if task.cached else 0
    context = context_length(model.config.get_text_config())
    if context is not None and context < past + _TOKENS:
        raise UserError(f"a context of {context} tokens is too short to trace: {past + _TOKENS} are needed")
    parameters = inspect.signature(model.forward).parameters
    ids = torch.ones(_TEXTS, _TOKENS, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in parameters:
        inputs["attention_mask"] = ids.new_ones(_TEXTS, past + _TOKENS)
    if task.name == "text-generation" and "position_ids" in parameters:
        inputs["position_ids"] = torch.arange(past, past + _TOKENS).repeat(_TEXTS, 1)
    # GPT-2's takes them too, and for zeros adds the embedding of a token.
    if "token_type_ids" in parameters and getattr(model.config, "type_vocab_size", None):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    dynamic: dict[str, Any] = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in inputs}
    if task.cached:
        name, cache = _fill_cache(model, past)
        inputs[name] = cache
        # A cache is given to torch.export as the flat list of its tensors.
        dynamic[name] = [{0: Dim.AUTO, 2: Dim.AUTO} for layer in cache.layers for _ in ("key", "value")]
    if "use_cache" in parameters:
        inputs["use_cache"] = task.cached
    return Example(inputs, dynamic)


def _make_decoder_example(step: DecoderStep) -> Example:
    context = context_length(step.config.get_text_config(decoder=True))
    if context is not None and context < _PAST_TOKENS + _TOKENS:
        raise UserError(f"a context of {context} tokens is too short to trace: {_PAST_TOKENS + _TOKENS} are needed")
    ids, states = torch.ones(_TEXTS, _PAST_TOKENS, dtype=torch.int64), torch.zeros(_TEXTS, _STATES, step.width)
    states = states.to(step.dtype)
    inputs: dict[str, Any] = {"input_ids": ids[:, :_TOKENS], "encoder_hidden_states": states}
    if step.reads_mask:
        inputs["encoder_attention_mask"] = torch.ones(_TEXTS, _STATES, dtype=torch.int64)
    dynamic: dict[str, Any] = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in inputs}
    inputs["past_key_values"] = step.make_past(ids, states[:, :_PAST_STATES])
    dynamic["past_key_values"] = [{0: Dim.AUTO, 2: Dim.AUTO} for _ in inputs["past_key_values"]]
    return Example(inputs, dynamic)


def get_cache(output: Any) -> Any:
    """The keys and values in what a forward returns: `cache` from transformers 5.24 on, `past_key_values` before."""
    return output.cache if hasattr(output, "cache") else output.past_key_values


def get_image_size(config: Any, task: GraphTask) -> tuple[int, int]:
    """Height and width that a vision model reads, or its graph."""
    if task.image is not None:
        return task.image
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    raise UserError(
        f"{config.model_type} cannot be traced: config.json has no image_size, and the folder no image processor "
        "that makes one"
    )


@torch.no_grad()
def _fill_cache(model: Any, tokens: int) -> tuple[str, DynamicCache]:
    """The argument that takes a cache, and one with keys and values of so many tokens, of the sizes of each layer.

    Without a config every layer of the cache grows, also if attention looks at a window only: the mask keeps to it,
    and the graph needs no more state than the tensors.
    """
    name: Any = cache_argument(model.forward)
    cache = DynamicCache()
    ids = torch.ones(_TEXTS, tokens, dtype=torch.int64)
    try:
        model(**{"input_ids": ids, name: cache, "use_cache": True})
    except Exception:  # a model that keeps other things fails over this cache in ways of its own
        cache = DynamicCache()
    if name is None or len(cache.layers) == 0 or any(getattr(layer, "keys", None) is None for layer in cache.layers):
        raise UserError(
            f"{type(model).__name__} keeps other things than keys and values of earlier tokens: say --no-cache "
            "(of state spaces that loop over tokens, such as Mamba's, no graph can be made)"
        )
    return name, cache


def trace_model(model: Any, task: GraphTask, *, opset: int | None, fusions: str | None, log: Path) -> onnx_ir.Model:
    """Trace a model into an ONNX graph by transformers' own exporter: torch's dynamo exporter with patches.

    Inputs and outputs have the names that the Hub's ONNX models have: those of the forward, and for layer i
    `past_key_values.i.key`, `past_key_values.i.value` in and `present.i.key`, `present.i.value` out. Dynamic axes are
    named `batch_size`, `sequence_length`, `past_sequence_length` and `total_sequence_length` (past and new).

    Args:
        opset: None for `DEFAULT_OPSET`.
        fusions: provider, cpu or cuda, whose fused operators of onnxruntime are used; None: ONNX's own operators.
        log: file that gets the exporter's output and traceback if it fails.
    """
    example, opset = make_example(model, task), opset or DEFAULT_OPSET
    config = OnnxConfig(dynamic=True, dynamic_shapes=example.dynamic, opset_version=opset, ort_fusions=fusions)
    output = io.StringIO()
    try:
        alone = model.alone() if isinstance(model, DecoderStep) else contextlib.nullcontext()
        with alone, _capture(output), quiet_transformers(), without_collection(), _faster():
            graph = _trace_once(model, example, config)
            if graph is None:
                graph = _trace_whole(model, example, config)
    except Exception as error:  # torch.export, onnxscript and model code raise anything here
        write_atomically(log, f"{output.getvalue()}\n{''.join(traceback.format_exception(error))}")
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = next((line.strip() for line in str(cause).splitlines() if line.strip()), "no message")
        reason = f"{type(cause).__name__}: {message}"[:300]
        raise UserError(
            f"{type(model).__name__} cannot be exported: {reason} (all that was said is in {log})"
        ) from error
    _rename_ports(graph.graph, task)
    _name_weights(graph.graph, model)
    _share_tied_weights(graph.graph)
    _drop_metadata(graph)
    if (kept := graph.opset_imports.get("")) != opset:
        raise UserError(
            f"{type(model).__name__} cannot be written in opset {opset}: the exporter kept {kept}; leave out --opset, "
            "or say that one"
        )
    return graph


def _trace_whole(model: Any, example: Example, config: OnnxConfig) -> onnx_ir.Model:
    # It takes flags such as use_cache out of the inputs it is given.
    graph: onnx_ir.Model = OnnxExporter().export_program(model, dict(example.inputs), config)[0]
    return graph


def _trace_once(model: Any, example: Example, config: OnnxConfig) -> onnx_ir.Model | None:
    """Trace one block of each kind, and repeat it; None if that is not proven to give the graph of the whole model."""
    inputs = copy.deepcopy(example.inputs)
    for name in inputs.keys() & {"attention_mask", "encoder_attention_mask"}:
        inputs[name][0, 0] = 0  # without padding some models make no mask, and masks tell kinds apart
    past: list[tuple[torch.Tensor, ...]] = [
        (layer.keys, layer.values) for value in inputs.values() if isinstance(value, Cache) for layer in value.layers
    ]
    if isinstance(model, DecoderStep):
        kept = inputs["past_key_values"]
        past = [tuple(kept[start : start + len(KINDS)]) for start in range(0, len(kept), len(KINDS))]
    try:
        kinds = find_block_kinds(model, inputs, past)
        if len(kinds.traced) == len(kinds.blocks):
            return None
        with repeat_blocks(kinds, cached=len(past[0]) if past else 0) as outcome:
            graph = _trace_whole(model, example, config)
    except Exception:  # the full trace says what is wrong, if it fails too
        return None
    return graph if outcome == [""] else None


@contextlib.contextmanager
def _capture(into: io.StringIO) -> Iterator[None]:
    """Keep what the exporter prints, warns and logs from the terminal."""
    handler = logging.StreamHandler(into)
    roots = ("torch", "onnxscript", "onnx_ir", "transformers")
    # Some of torch's loggers have handlers of their own.
    children = [
        name for name in logging.root.manager.loggerDict if name.startswith(tuple(f"{root}." for root in roots))
    ]
    loggers = [logging.getLogger(name) for name in (*roots, *children)]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    try:
        for logger in loggers:
            is_root = logger.name in roots
            logger.handlers, logger.propagate = ([handler] if is_root else []), not is_root
        with contextlib.redirect_stdout(into), contextlib.redirect_stderr(into), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


@contextlib.contextmanager
def _faster() -> Iterator[None]:
    """Trace in half of the time.

    Nobody reads where in Python a node comes from. Sizes are symbols, so that hardly two calls are alike, and to look
    for a call takes longer than to work it out. Forty other models are not imported. The exporter parses the sources of
    all operators for each graph: once is enough. Rules of onnxscript pass over nodes of another type at once, where
    some list the whole graph before they look at one.
    """
    read, match = ONNXRegistry.from_torchlib, SimplePatternMatcher.match
    find: Any = getattr(exporter_utils, "import_dotted_path", None)  # since transformers 5.24

    def find_imported(path: str, missing_ok: bool = False) -> Any:
        module = ".".join(path.split(".")[:4])
        if missing_ok and path.startswith("transformers.models.") and module not in sys.modules:
            return None
        return find(path, missing_ok)

    def read_once(**options: Any) -> ONNXRegistry:
        if repr(options) not in _OPERATORS:
            _OPERATORS[repr(options)] = read(**options)
            # Llama 4 indexes its rotary angles with None, and torch has this operator for real numbers alone.
            _OPERATORS[repr(options)].register_op(torch.ops.aten.unsqueeze.default, _unsqueeze_complex, is_complex=True)
        known = _OPERATORS[repr(options)]
        copied = copy.copy(known)
        copied.functions = {name: list(functions) for name, functions in known.functions.items()}  # an export adds some
        return copied

    def match_type(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if self.pattern.output_nodes[0].op.matches(node.op_type):
            return match(self, model, graph, node, **options)
        return MatchResult().fail("another type")

    with (
        patch.object(torch.fx.config, "do_not_emit_stack_traces", True),
        dynamo_config.patch(fake_tensor_cache_enabled=False),
        patch.object(ONNXRegistry, "from_torchlib", staticmethod(read_once)),
        patch.object(SimplePatternMatcher, "match", match_type),
        patch.object(exporter_utils, "import_dotted_path", find_imported, create=True),
    ):
        yield


def _unsqueeze_complex(self: Any, dim: int) -> Any:
    """Add an axis to complex numbers, which graphs hold as pairs on a last axis of their own."""
    return opset18.Unsqueeze(self, opset18.Constant(value_ints=[dim if dim >= 0 else dim - 1]))


def _rename_ports(graph: onnx_ir.Graph, task: GraphTask) -> None:
    """Give inputs and outputs their public names, and their dynamic axes names that say what they are."""
    if task.stack is not None:
        _rename_stack(graph)
        return
    for value in graph.inputs:
        value.name = _CACHE.sub(rf"{PAST}\1.\2", value.name or "")
        if value.name.startswith(PAST):
            axes = {0: _BATCH, 2: _PAST}
        elif task.modality == "image":
            axes = {0: _BATCH}
        else:
            axes = {0: _BATCH, 1: _TOTAL if value.name == "attention_mask" and task.cached else _SEQUENCE}
        _name_axes(value, axes)
    for value in graph.outputs:
        value.name = _CACHE.sub(rf"{PRESENT}\1.\2", value.name or "")
        shape = value.shape
        if value.name.startswith(PRESENT):
            axes = {0: _BATCH, 2: _TOTAL}
        elif task.modality == "text" and shape is not None and len(shape) > 1 and not _is_number(shape[1]):
            axes = {0: _BATCH, 1: _SEQUENCE}
        else:  # pooled outputs and logits of a whole text have no axis of tokens
            axes = {0: _BATCH}
        _name_axes(value, axes)


def _rename_stack(graph: onnx_ir.Graph) -> None:
    """Do so for one stack of an encoder-decoder."""
    is_decoder = any(value.name == "encoder_hidden_states" for value in graph.inputs)
    past = [value for value in graph.inputs if (value.name or "").startswith(PAST)]
    for place, value in enumerate(past):
        value.name = f"{PAST}{place // len(KINDS)}.{KINDS[place % len(KINDS)]}"
    for value in (*graph.inputs, *graph.outputs):
        name = value.name or ""
        if name == "input_features" or (value.shape is not None and _is_number(value.shape[1]) and not is_decoder):
            axes = {0: _BATCH}
        elif name.startswith((PAST, PRESENT)):
            of_source, is_past = ".encoder." in name, name.startswith(PAST)
            length = (_PAST_SOURCE if is_past else _SOURCE) if of_source else (_PAST if is_past else _TOTAL)
            axes = {0: _BATCH, 2: length}
        else:
            axes = {0: _BATCH, 1: _SEQUENCE if is_decoder and not name.startswith("encoder_") else _SOURCE}
        _name_axes(value, axes)
    if is_decoder:
        graph.inputs.append(
            onnx_ir.Value(name=BRANCH, shape=onnx_ir.Shape([1]), type=onnx_ir.TensorType(onnx_ir.DataType.BOOL))
        )


def _is_number(size: Any) -> bool:
    """Return whether an axis has a fixed size; the exporter writes some as symbols such as "6"."""
    return isinstance(size, int) or str(size.value).isdigit()


def _name_axes(value: onnx_ir.Value, names: dict[int, str]) -> None:
    shape = value.shape
    if shape is None or any(axis >= len(shape) or _is_number(shape[axis]) for axis in names):
        fixed = [] if shape is None else [str(size) for size in shape]
        raise UserError(
            f"{value.name} of the exported graph has shape {fixed}, where axes {sorted(names)} should be dynamic: "
            "the model computes with a fixed size there"
        )
    sizes: list[int | str] = []
    for axis, size in enumerate(shape):
        plain = size if isinstance(size, int) else int(str(size.value)) if _is_number(size) else str(size.value)
        sizes.append(names.get(axis, plain))
    value.shape = onnx_ir.Shape(sizes)


def _name_weights(graph: onnx_ir.Graph, model: Any) -> None:
    """Name weights that the exporter transposed and numbered after their parameters, `NAME.T`, for messages."""
    transposed = {
        _fingerprint(parameter.detach().mT): f"{name}.T"
        for name, parameter in model.named_parameters()
        if parameter.ndim in (2, 3)
    }
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or len(tensor.shape) not in (2, 3) or not name.startswith(("val_", "transpose")):
            continue
        parameter = transposed.get(_fingerprint(torch.from_numpy(tensor.numpy())))
        if parameter is not None and parameter not in graph.initializers:
            value.name = parameter


def _share_tied_weights(graph: onnx_ir.Graph) -> None:
    """Store a head that is tied to the embedding once, and transpose it; onnxruntime does so once, when it loads."""
    plain: dict[tuple[Any, ...], onnx_ir.Value] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and len(tensor.shape) == 2 and not name.endswith(".T"):
            plain[_fingerprint(torch.from_numpy(tensor.numpy()).T)] = value
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or not name.endswith(".T"):
            continue
        array = tensor.numpy()
        other = plain.get(_fingerprint(torch.from_numpy(array)))
        if other is None or other.const_value is None or not np.array_equal(other.const_value.numpy().T, array):
            continue
        node = onnx_ir.node("Transpose", [other], {"perm": [1, 0]})
        node.outputs[0].name = f"{name}.tied"
        graph.insert_before(graph[0], node)
        value.replace_all_uses_with(node.outputs[0])
        del graph.initializers[name]


def _fingerprint(matrix: torch.Tensor) -> tuple[Any, ...]:
    """Shape and some elements of a weight, which tell it from the others."""
    rows, columns = (max(1, size // 8) for size in matrix.shape[-2:])
    return (*matrix.shape, *matrix[..., ::rows, ::columns].flatten().tolist())


def _drop_metadata(graph: onnx_ir.Model) -> None:
    """Drop what no runtime reads: stack traces of this machine, and shapes inside the graph in the tracer's names."""
    ClearMetadataAndDocStringPass()(graph)
    for weight in graph.graph.initializers.values():
        if weight.const_value is not None:
            # Fusions note another rank for some scalars.
            weight.shape = onnx_ir.Shape(list(weight.const_value.shape.numpy()))
    outputs = {id(value) for value in graph.graph.outputs}
    for node in graph.graph:
        for value in node.outputs:
            if id(value) not in outputs:
                value.shape = None
    graph.producer_name, graph.producer_version = "ckpt_prune", __version__
