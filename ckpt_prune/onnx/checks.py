"""Checks of an exported folder that run no graph: files, operators, inputs and outputs."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.files import sha256_files
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.model_folder import way_to_source
from ckpt_prune.common.check import Check, run_check
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.filenames import VALIDATION
from ckpt_prune.common.progress import track
from ckpt_prune.onnx.records import Manifest, Port, read_manifest, read_validation
from ckpt_prune.onnx.session import DATA, default_provider, open_session, read_graph
from ckpt_prune.onnx.tasks import PAST, PRESENT

NAMED = 3
"""So many of the weights that changed are named."""
SMALL = 1024
"""Bytes of the largest constants that the checker is given: shapes of outputs follow from some of them."""
INPUTS = (
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "pixel_values", "input_features"),
    *("encoder_hidden_states", "encoder_attention_mask", "use_cache_branch"),
)
_UNKNOWN_TO_ONNX = {"SimplifiedLayerNormalization"}
"""Operators that onnxruntime registers under ONNX's own name, and ONNX's schemas do not have."""


def verify_graph(folder: Path, source: Path | None = None) -> list[Check]:
    """Check an exported folder, as `verify` does; `source` is the checkpoint that it should be of."""
    refuse_unfinished(folder)
    manifest = read_manifest(folder)
    checks: list[Check] = []
    for graph in manifest.split():
        graph_checks = _verify_one(folder, graph)
        several = len(manifest.graphs) > 1
        checks += (
            [replace(check, name=f"{graph.file}: {check.name}") for check in graph_checks] if several else graph_checks
        )
    if source is not None:
        checks.append(run_check("source", lambda: _verify_source(folder, manifest, source)))
    return checks


def _verify_one(folder: Path, graph: Manifest) -> list[Check]:
    present = hash_present_files(folder, graph)
    return [
        run_check("files", lambda: check_files(folder, graph, present)),
        run_check("checker", lambda: check_operators(read_structure(folder / graph.file), graph)),
        run_check("finite", lambda: _check_finite(folder / graph.file)),
        run_check("load", lambda: _check_load(folder, graph)),
        run_check("validation", lambda: _check_validation(folder, graph, present)),
    ]


def _check_finite(path: Path) -> tuple[bool, str]:
    weights = read_graph(path).graph.initializers
    try:
        for name, value in track(list(weights.items()), "checking for NaN and Inf", unit="tensor"):
            tensor = value.const_value
            if tensor is not None and tensor.dtype.is_floating_point() and not np.isfinite(tensor.numpy()).all():
                return False, f"{name} has NaN or Inf"
    except Exception as error:  # protobuf's and onnx_ir's exceptions share no base class
        raise UserError(f"{path.name} cannot be read: {one_line(error)}") from error
    return True, f"no NaN, no Inf in {len(weights)} tensors"


def _check_load(folder: Path, graph: Manifest) -> tuple[bool | None, str]:
    provider = default_provider(graph.optimize)
    try:
        session = open_session(folder / graph.file, provider=provider)
    except UserError as error:
        # A graph for CUDA alone proves nothing on a machine without it.
        return (None if provider == "cuda" else False), str(error)
    inner = session.inner
    loaded = f"onnxruntime loads it: {len(inner.get_inputs())} inputs, {len(inner.get_outputs())} outputs"
    return True, loaded if session.note is None else f"{loaded}; {session.note}"


def _check_validation(folder: Path, graph: Manifest, present: dict[str, str]) -> tuple[bool | None, str]:
    if not (folder / VALIDATION).is_file():
        return None, f"no {VALIDATION}: not compared with PyTorch, `ckpt-prune validate` does it"
    records = read_validation(folder).graphs  # that of two stacks has the name of the decoder's graph
    record = next((each for each in records if graph.file in (each.file, *each.files)), None)
    if record is None:
        return None, f"{VALIDATION} has nothing of {graph.file}: `ckpt-prune validate` compares it with PyTorch"
    own_files = {name: record.files.get(name) for name in graph.files}
    if own_files != present or record.against.fingerprint != graph.source.fingerprint:
        return False, f"{VALIDATION} is not about these files: run `ckpt-prune validate`"
    if not record.passed:
        return False, f"{VALIDATION} says that the graph does not compute what the model does"
    limit = (
        "within the tolerance" if record.max_loss is None else f"at most {record.max_loss:.4g} of the metric is lost"
    )
    return True, f"compared with PyTorch on {len(record.cases)} inputs, on {record.provider}: {limit}"


def _verify_source(folder: Path, manifest: Manifest, source: Path) -> tuple[bool, str]:
    if manifest.source.fingerprint != Checkpoint.open(source, packed=True).fingerprint:
        names = f"its record names {manifest.source.name}{way_to_source(folder)}"
        return False, f"it was exported from another model than {source}: {names}"
    return True, f"exported from {source}"


def hash_present_files(folder: Path, graph: Manifest) -> dict[str, str]:
    """sha256 of each of an exported folder's files that is there: all of its weights are read."""
    return sha256_files(folder, [name for name in graph.files if (folder / name).is_file()])


def check_files(folder: Path, graph: Manifest, present: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether the files of a folder, by `hash_present_files`, are those that were written."""
    absent = [name for name in graph.files if name not in present]
    if absent:
        return False, f"{absent[0]} is gone"
    changed = [name for name, digest in present.items() if digest != graph.files[name]]
    if not changed:
        return True, f"{len(graph.files)} files as written"
    graph_files = [name for name in changed if name in (graph.file, f"{graph.file}{DATA}")]
    others = [name for name in changed if name not in graph_files]
    faults = [f"{', '.join(names)} changed since it was written" for names in (others, graph_files) if names]
    if graph_files:
        faults[-1] += f": {_name_changed_weights(folder, graph)}"
    return False, "; ".join(faults)


def _name_changed_weights(folder: Path, graph: Manifest) -> str:
    try:
        model = read_graph(folder / graph.file)
    except UserError as error:
        return f"{error}; it may be cut off"
    weights = {name: value.const_value for name, value in model.graph.initializers.items()}
    recorded = graph.graph.tensors
    changed = [name for name, digest in recorded.items() if _hash_tensor(weights.get(name)) != digest]
    if not changed:
        return f"not in its {len(recorded)} weights"
    more = ", ..." if len(changed) > NAMED else ""
    return f"{len(changed)} of {len(recorded)} weights differ or cannot be read: {', '.join(changed[:NAMED])}{more}"


def _hash_tensor(tensor: Any) -> str | None:
    """Return the digest of a weight's bytes; None if the file ends before them."""
    try:
        return None if tensor is None else hashlib.sha256(tensor.tobytes()).hexdigest()
    except (OSError, ValueError):
        return None


def read_structure(path: Path) -> onnx.ModelProto:
    """Read a graph without the bytes of its large weights, of which name, type and shape remain.

    Raises:
        UserError: the file is damaged.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's
        raise UserError(f"{path.name} cannot be read: {one_line(error)}") from error
    for weight in model.graph.initializer:
        if len(weight.raw_data) > SMALL:
            weight.ClearField("raw_data")
            weight.data_location = onnx.TensorProto.EXTERNAL
    return model


def check_operators(structure: onnx.ModelProto, graph: Manifest) -> tuple[bool, str]:
    """Run `onnx.checker`, with shape inference, on a graph by `read_structure`."""
    detail = f"onnx.checker, opset {graph.graph.opset}"
    model = copy.deepcopy(structure)
    try:
        if not graph.is_stock:
            _hide_foreign_operators(model)
        _take_weights_for_inputs(model.graph)
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # the checker's, shape inference's and protobuf's exceptions share no base class
        raise UserError(f"onnx.checker: {one_line(error)}") from error
    return True, detail if graph.is_stock else f"{detail}; onnxruntime's own operators are not its matter"


def _hide_foreign_operators(model: onnx.ModelProto) -> None:
    """Let the checker read a fused graph: with onnxruntime's operators in their own domain.

    The shape that the graph notes of a weight beside it is dropped: the fusions write another rank there.
    """
    graph = model.graph
    for node in graph.node:
        if node.domain == "" and node.op_type in _UNKNOWN_TO_ONNX:
            node.domain = "com.microsoft"
    weights = {weight.name for weight in graph.initializer}
    for index in reversed(range(len(graph.value_info))):
        if graph.value_info[index].name in weights:
            del graph.value_info[index]


def _take_weights_for_inputs(graph: onnx.GraphProto) -> None:
    """Replace weights that lie elsewhere by inputs: the checker needs only their types and shapes.

    A graph in memory has no folder to look for them in.
    """
    for index in reversed(range(len(graph.initializer))):
        weight = graph.initializer[index]
        if weight.data_location == onnx.TensorProto.EXTERNAL:
            graph.input.append(onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
            del graph.initializer[index]


def check_interface(
    structure: onnx.ModelProto,
    manifest: Manifest,
    outputs: Sequence[str],
    cache: Sequence[str],
    missing: Sequence[str] = (),
) -> tuple[bool, str]:
    """Return whether inputs and outputs are those of the record, and have the names that the model's have.

    Whether their sizes are right, and free where they should be, shows when the graph is run.

    Args:
        structure: of the graph, by `read_structure`.
        outputs: names of what PyTorch returns, the main one first.
        cache: names of the keys and values it keeps, `present.i.key` and `present.i.value`.
        missing: inputs that its outputs depend on and the record does not name.
    """
    graph = structure.graph
    weights = {weight.name for weight in graph.initializer}
    inputs = [_describe_value(value) for value in graph.input if value.name not in weights]
    faults = _compare_with_record("input", inputs, manifest.inputs)
    faults += _compare_with_record("output", list(map(_describe_value, graph.output)), manifest.outputs)
    faults += [f"{name}, which the model's outputs depend on, is no input" for name in missing]
    faults += [
        f"{port.name} is {port.type} in a graph of {manifest.dtype}"
        for port in (*manifest.inputs, *manifest.outputs)
        if port.type.startswith("float") and port.type != manifest.float_type
    ]
    names = {port.name for port in manifest.outputs}
    if outputs[0] not in names:
        faults.append(f"{outputs[0]}, which the model returns, is no output")
    faults += [f"the model returns no {name}" for name in sorted(names - {*outputs, *cache}) if PRESENT not in name]
    kept = 4 if any(".encoder." in name for name in cache) else 2
    past = {name.replace(PRESENT, PAST, 1) for name in cache}
    for what, ports, expected in (("input", manifest.inputs, past), ("output", manifest.outputs, set(cache))):
        cached = {port.name for port in ports if port.name.startswith((PAST, PRESENT))}
        if cached != expected:
            layers = f"keys and values of {len(cached) / kept:g} layers are an {what}"
            faults.append(f"{layers}, the model has {len(expected) // kept} layers")
    fed = past | set(INPUTS)
    faults += [f"nothing is known to feed the input {port.name} with" for port in inputs if port.name not in fed]
    if faults:
        return False, faults[0] + (f"; and {len(faults) - 1} more" if len(faults) > 1 else "")
    layers = f", keys and values of {len(cache) // kept} layers" if cache else ""
    return True, f"{len(manifest.inputs)} inputs and {len(manifest.outputs)} outputs as the model has them{layers}"


def _describe_value(value: Any) -> Port:
    kind = value.type.tensor_type
    return Port(
        name=value.name,
        type=onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name if kind.elem_type else "undefined",
        shape=[axis.dim_value if axis.HasField("dim_value") else axis.dim_param for axis in kind.shape.dim],
    )


def _compare_with_record(what: str, ports: list[Port], recorded: list[Port]) -> list[str]:
    names, expected = [port.name for port in ports], [port.name for port in recorded]
    if names != expected:
        return [f"the graph's {what}s are {_shorten(names)}, its record says {_shorten(expected)}"]
    return [
        f"{what} {port.name} is {_describe_port(port)}, its record says {_describe_port(record)}"
        for port, record in zip(ports, recorded, strict=True)
        if port != record
    ]


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _describe_port(port: Port) -> str:
    return f"{port.type} [{', '.join(map(str, port.shape))}]"
