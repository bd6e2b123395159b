"""`export`: a graph or a GGUF file is written, and compared with PyTorch before it takes its place."""

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.checkpoint.model_folder import model_name, resolve_model
from ckpt_prune.common.collection import collection_of_new_objects
from ckpt_prune.common.dense_source import DenseSource
from ckpt_prune.common.progress import Notices
from ckpt_prune.evaluation.device_map import spread
from ckpt_prune.gguf import require_gguf
from ckpt_prune.model.containers.opening import Opening, open_checkpoint
from ckpt_prune.options.commands import ExportOptions
from ckpt_prune.options.graphs import GraphSettings
from ckpt_prune.options.option import select_options
from ckpt_prune.verification.dense_source import find_dense_source

if TYPE_CHECKING:
    from ckpt_prune.gguf.export import ExportedGguf
    from ckpt_prune.onnx.export import Exported


def export_model(options: ExportOptions) -> "Exported | ExportedGguf":
    """Write a model in another format (`ckpt_prune.export`)."""
    with spread(options):
        if options.format == "gguf":
            return _export_gguf(options)
        with collection_of_new_objects():
            return _export_graphs(options)


def _export_graphs(options: ExportOptions) -> "Exported":
    from ckpt_prune.onnx.export import GraphWriter, ProvenGraphs
    from ckpt_prune.onnx.proof import Dense, find_dense
    from ckpt_prune.onnx.samples import FEW_WINDOWS, WINDOWS

    settings = select_options(options, GraphSettings)
    source = open_checkpoint(options.model, Opening(options.trust_remote_code, packed=True, whole=True))
    writer = GraphWriter(source, options.output, settings, overwrite=options.overwrite)
    dense = find_dense(options.dense, options.max_loss_dense, source.path)
    if options.proof and dense is None and (near := find_dense_source(source.path)) is not None:
        if near.folder is not None:
            dense = Dense(near.folder)
        else:
            Notices()(near.lacking)
    graphs = ProvenGraphs.of(
        settings,
        source,
        options,
        proof=options.proof,
        dense=dense,
        provider=options.provider,
        trust=options.trust_remote_code,
        windows=WINDOWS if options.dense else FEW_WINDOWS,
    )
    return graphs.write(writer)


def _export_gguf(options: ExportOptions) -> "ExportedGguf":
    require_gguf()
    from ckpt_prune.gguf.export import export_gguf

    dense = dense_of_file(options.dense, resolve_model(options.model)) if options.proof or options.dense else None
    return export_gguf(
        options.model,
        options.output,
        options,
        kind=options.gguf_type,
        others=options.other_types,
        proof=options.proof,
        dense=dense,
        statistics=options.statistics,
        imatrix=options.imatrix,
        overwrite=options.overwrite,
        trust=options.trust_remote_code,
    )


def dense_of_file(name: str | None, folder: Path) -> DenseSource | None:
    """Return the dense model beside which a GGUF file of a checkpoint is measured: the one named, or the one found."""
    if name is None:
        return find_dense_source(folder)
    from ckpt_prune.onnx.proof import find_dense

    named = find_dense(name, None, folder)
    return None if named is None else DenseSource(model_name(named.folder), named.folder)
