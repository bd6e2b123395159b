"""Describes a folder of ONNX graphs from its records."""

from pathlib import Path

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import VALIDATION
from ckpt_prune.inspection.answer import GraphDescription, GraphsDescription
from ckpt_prune.onnx.export import count_graph_bytes
from ckpt_prune.onnx.records import GraphEntry, Manifest, Validation, read_manifest, read_validation


def describe_graphs(folder: Path) -> GraphsDescription:
    """Describe a folder that `export`, or `frontier --for onnxruntime`, wrote. Its graphs are not read.

    Raises:
        UserError: a record is damaged.
    """
    manifest = read_manifest(folder)
    validations = read_validation(folder).graphs if (folder / VALIDATION).is_file() else []
    last = {each.file: each for each in validations}
    graphs = [_describe(folder, graph, manifest, last.get(graph.file)) for graph in manifest.graphs]
    return GraphsDescription(
        model=str(folder),
        task=manifest.task,
        cached=manifest.cached,
        provider=None if manifest.optimize == "none" else manifest.optimize,
        source=manifest.source.name,
        fingerprint=manifest.source.fingerprint,
        bytes=sum(graph.bytes for graph in graphs),
        graphs=graphs,
        compared_on=next((str(each.data.get("what")) for each in validations), None),
        versions=manifest.versions,
    )


def _describe(folder: Path, graph: GraphEntry, manifest: Manifest, last: Validation | None) -> GraphDescription:
    size = count_graph_bytes(folder, graph.file)
    if not size:
        raise UserError(f"{folder} has no {graph.file}, which its record lists: export again")
    is_same = last is not None and last.files.get(graph.file) == manifest.files.get(graph.file)
    return GraphDescription(
        file=graph.file,
        dtype=graph.dtype,
        stack=graph.stack,
        opset=graph.opset,
        bytes=size,
        weights={} if graph.quantization is None else graph.quantization.kinds,
        proven=last.passed if last is not None and is_same else None,
    )
