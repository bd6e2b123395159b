"""A copy of a checkpoint with other values in its blocks: what recovery writes."""

from ckpt_prune.architectures.model import Model
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.containers.container import Container
from ckpt_prune.job.layout import layout_of, with_rest
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.report import Report
from ckpt_prune.job.run import Run
from ckpt_prune.job.store import BlockStore
from ckpt_prune.runner.publish import publish


def open_copy(run: Run, model: Model) -> BlockStore:
    """Lay out the files of a copy in the staging folder: the checkpoint's own."""
    checkpoint, layout, writer = model.checkpoint, layout_of(model), None
    if run.staging is not None:
        whole, names = with_rest(checkpoint, layout)
        writer = CheckpointWriter(
            run.staging,
            whole,
            sharded=checkpoint.sharded,
            transposed=checkpoint.transposed,
            names=names,
            stacks=checkpoint.stacks,
        )
    run.store = BlockStore(writer, layout)
    return run.store


def write_rest(run: Run, view: ModelView) -> None:
    """Write the tensors outside the blocks as they are."""
    assert run.store is not None
    with run.stages.stage("rest"):
        run.store.write_rest(view)
        run.store.write_outside(view.model.checkpoint)


def publish_copy(run: Run, model: Model, container: Container, report: Report) -> Report:
    """Put a copy in its place, with its rotations if it has any."""
    checkpoint, store = model.checkpoint, run.store
    assert store is not None
    assert store.writer is not None
    asides = [ROTATIONS] if (checkpoint.path / ROTATIONS).is_file() else []
    for name in asides:
        store.writer.copy(checkpoint.path / name)
    names = [*store.layout, *asides]
    return publish(store.writer, report, container, checkpoint, names, run.stages, run.announce)
