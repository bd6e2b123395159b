"""What can be said of an exported folder without running its graph: files, operators, inputs and outputs."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.common.errors import UserError
from ckpt_prune.onnx.manifest import Manifest, Port
from ckpt_prune.onnx.reading import read_graph
from ckpt_prune.onnx.session import DATA
from ckpt_prune.onnx.tasks import PAST, PRESENT

NAMED = 3
"""So many of the weights that changed are named."""
INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "pixel_values")
_OWN = {"SimplifiedLayerNormalization"}
"""Operators that onnxruntime registers under ONNX's own name, where ONNX's schemas do not have them."""

Shapes = Sequence[tuple[int, ...]]
"""Shapes of one output, for several sizes of batch and length."""


def present_files(folder: Path, manifest: Manifest) -> dict[str, str]:
    """sha256 of each of an exported folder's files that is there: all of its weights are read."""
    return sha256_files(folder, [name for name in manifest.files if (folder / name).is_file()])


def check_files(folder: Path, manifest: Manifest, present: Mapping[str, str]) -> tuple[bool, str]:
    """Whether the files of a folder are those that were written; of the graph's, names the weights that are not.

    Args:
        folder: of the graph.
        manifest: its record.
        present: what `present_files` found.
    """
    absent = [name for name in manifest.files if name not in present]
    if absent:
        return False, f"{absent[0]} is gone"
    changed = [name for name, digest in present.items() if digest != manifest.files[name]]
    if not changed:
        return True, f"{len(manifest.files)} files as written"
    graph = [name for name in changed if name in (manifest.file, f"{manifest.file}{DATA}")]
    beside = [name for name in changed if name not in graph]
    faults = [f"{', '.join(names)} changed since it was written" for names in (beside, graph) if names]
    if graph:
        faults[-1] += f": {_changed_weights(folder, manifest)}"
    return False, "; ".join(faults)


def _changed_weights(folder: Path, manifest: Manifest) -> str:
    try:
        graph = read_graph(folder / manifest.file)
    except UserError as error:
        return f"{error}; it may be cut off"
    found = {name: value.const_value for name, value in graph.graph.initializers.items()}
    wrong = [name for name, digest in manifest.tensors.items() if _digest(found.get(name)) != digest]
    if not wrong:
        return f"not in its {len(manifest.tensors)} weights"
    more = ", ..." if len(wrong) > NAMED else ""
    return f"{len(wrong)} of {len(manifest.tensors)} weights differ or cannot be read: {', '.join(wrong[:NAMED])}{more}"


def _digest(tensor: Any) -> str | None:
    """The digest of a weight's bytes; None where the file ends before them."""
    try:
        return None if tensor is None else hashlib.sha256(tensor.tobytes()).hexdigest()
    except (OSError, ValueError):
        return None


def check_operators(folder: Path, manifest: Manifest) -> tuple[bool, str]:
    """What `onnx.checker` says, shape inference included.

    Raises:
        UserError: it refuses the graph, or cannot read it.
    """
    try:
        if manifest.stock:
            onnx.checker.check_model(str(folder / manifest.file), full_check=True)
            return True, f"onnx.checker, opset {manifest.opset}"
        onnx.checker.check_model(_without_own(folder / manifest.file), full_check=True)
    except Exception as error:  # the checker's, shape inference's and protobuf's exceptions share no base class
        raise UserError(f"onnx.checker: {_reason(error)}") from error
    return True, f"onnx.checker, opset {manifest.opset}; onnxruntime's own operators are not its matter"


def _without_own(path: Path) -> onnx.ModelProto:
    """A fused graph as the checker reads it: onnxruntime's operators in their own domain, large weights as inputs.

    A graph in memory has no folder to look for external data in; a weight in there only counts by its type and shape.
    What the graph notes of a weight's shape beside the weight is left out: the fusions write another rank there.
    """
    graph = onnx.load(path, load_external_data=False)
    for node in graph.graph.node:
        if node.domain == "" and node.op_type in _OWN:
            node.domain = "com.microsoft"
    weights = {each.name for each in graph.graph.initializer}
    for index in reversed(range(len(graph.graph.value_info))):
        if graph.graph.value_info[index].name in weights:
            del graph.graph.value_info[index]
    for index in reversed(range(len(graph.graph.initializer))):
        each = graph.graph.initializer[index]
        if each.data_location == onnx.TensorProto.EXTERNAL:
            graph.graph.input.append(onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims))
            del graph.graph.initializer[index]
    return graph


def check_interface(
    folder: Path,
    manifest: Manifest,
    outputs: Mapping[str, Shapes],
    cache: Mapping[str, Shapes],
    image: tuple[int, ...] | None,
    gone: Sequence[str] = (),
) -> tuple[bool, str]:
    """Whether inputs and outputs are those of the record, and those of the model.

    Args:
        folder: of the graph.
        manifest: its record.
        outputs: what PyTorch returns for several sizes of batch and length: name → shapes, the main one first.
        cache: keys and values it keeps, `present.i.key` and `present.i.value` → shapes (B, heads, T, head_dim).
        image: (C, H, W) that it reads, or None.
        gone: inputs that its outputs depend on and the record does not name.
    """
    try:
        graph = onnx.load(folder / manifest.file, load_external_data=False).graph
    except Exception as error:
        raise UserError(f"{manifest.file} cannot be read ({_reason(error)})") from error
    weights = {each.name for each in graph.initializer}
    faults = []
    for what, values, ports in (
        ("input", [each for each in graph.input if each.name not in weights], manifest.inputs),
        ("output", list(graph.output), manifest.outputs),
    ):
        faults += _against_record(what, [_port(value) for value in values], ports)
    faults += [f"{name}, which the model's outputs depend on, is no input" for name in gone]
    faults += _against_model(manifest, outputs, cache, image)
    if faults:
        return False, faults[0] + (f"; and {len(faults) - 1} more" if len(faults) > 1 else "")
    layers = f", keys and values of {len(cache) // 2} layers" if cache else ""
    return True, f"{len(manifest.inputs)} inputs and {len(manifest.outputs)} outputs as the model has them{layers}"


def _port(value: Any) -> Port:
    kind = value.type.tensor_type
    return Port(
        name=value.name,
        type=onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name if kind.elem_type else "undefined",
        shape=[axis.dim_value if axis.HasField("dim_value") else axis.dim_param for axis in kind.shape.dim],
    )


def _against_record(what: str, found: list[Port], recorded: list[Port]) -> list[str]:
    names, wanted = [port.name for port in found], [port.name for port in recorded]
    if names != wanted:
        return [f"the graph's {what}s are {_named(names)}, its record says {_named(wanted)}"]
    return [
        f"{what} {port.name} is {_described(port)}, its record says {_described(known)}"
        for port, known in zip(found, recorded, strict=True)
        if port != known
    ]


def _against_model(
    manifest: Manifest, outputs: Mapping[str, Shapes], cache: Mapping[str, Shapes], image: tuple[int, ...] | None
) -> list[str]:
    floats = manifest.float_type
    faults = [
        f"{port.name} is {port.type} in a graph of {manifest.dtype}"
        for port in (*manifest.inputs, *manifest.outputs)
        if port.type.startswith("float") and port.type != floats
    ]
    main = next(iter(outputs))
    if main not in {port.name for port in manifest.outputs}:
        faults.append(f"{main}, which the model returns, is no output")
    past = {name.replace(PRESENT, PAST, 1): shapes for name, shapes in cache.items()}
    for what, ports, kept in (("input", manifest.inputs, past), ("output", manifest.outputs, cache)):
        there = {port.name for port in ports if port.name.startswith((PAST, PRESENT))}
        if there != set(kept):
            faults.append(
                f"keys and values of {len(there) / 2:g} layers are an {what}, the model has {len(kept) // 2} layers"
            )
    for port in manifest.inputs:
        shapes = past.get(port.name)
        if shapes is not None:
            faults += _shape_faults(port, shapes, "the model")
        elif port.name not in INPUTS:
            faults.append(f"nothing is known to feed the input {port.name} with")
        elif image is not None:
            faults += _shape_faults(port, [(batch, *image) for batch in (2, 3)], "the model")
        else:
            faults += _shape_faults(port, [(2, 3), (3, 4)], "the model")
    for port in manifest.outputs:
        shapes = cache.get(port.name) or outputs.get(port.name)
        if shapes is not None:
            faults += _shape_faults(port, shapes, "PyTorch")
        elif not port.name.startswith(PRESENT):
            faults.append(f"the model returns no {port.name}")
    return faults


def _shape_faults(port: Port, shapes: Shapes, whose: str) -> list[str]:
    """Where a port differs from shapes of several sizes: an axis that varies must have a name, another its size."""
    ranks = {len(shape) for shape in shapes}
    if ranks != {len(port.shape)}:
        return [f"{port.name} is {_described(port)}, {whose} has {' and '.join(str(list(s)) for s in shapes)}"]
    faults = []
    for axis, size in enumerate(port.shape):
        sizes = [shape[axis] for shape in shapes]
        varies = len(set(sizes)) > 1
        if varies and isinstance(size, int):
            faults.append(f"axis {axis} of {port.name} should have any size and has {size}")
        elif not varies and size != sizes[0]:
            faults.append(f"axis {axis} of {port.name} is {size}, {whose} has {sizes[0]}")
    return faults


def _named(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _described(port: Port) -> str:
    return f"{port.type} [{', '.join(map(str, port.shape))}]"


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
