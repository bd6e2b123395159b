"""Scales as the last step of a recipe: fitted to the blocks as they are written, and multiplied into them there."""

from collections.abc import Mapping
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.progress import track
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.report import Adapters
from ckpt_prune.job.run import Run
from ckpt_prune.job.store import BlockStore
from ckpt_prune.stages.recovery.block_training import SampleSplit
from ckpt_prune.stages.recovery.fitting_scales import fitted_scales
from ckpt_prune.stages.recovery.scales import ModelInBlocks, apply_scales
from ckpt_prune.stages.recovery.stage import Recovery

SCALES, SCALED = "scales", "scaled"
"""Units of the journal: scales are fitted; and, before its number, a block has them."""
_FILE = "scales.safetensors"
_OUTPUTS, _INPUTS = "outputs of ", "inputs of "


def rescaled(recovery: Recovery, prepared: Prepared, run: Run) -> Adapters:
    """Fit scales to the blocks that a run has written, and multiply them in.

    The target is the model as it was given, with all its blocks and in its own basis. A run that is killed while they
    are fitted fits them again; one that is killed later goes on with them.

    Returns:
        What was done.

    Raises:
        UserError: nothing can be fitted, or the disk refuses.
    """
    store, writer, model = run.store, run.writer, prepared.model
    assert store is not None
    assert writer is not None
    if SCALES not in writer.notes:
        _fit(recovery, prepared, run, store, writer)
    record = Adapters.model_validate(writer.notes[SCALES])
    scales = _read(writer)
    todo = [block for block in range(model.blocks) if f"{SCALED} {block}" not in writer.done]
    with run.stages.stage("scaling"):
        for block in track(todo if scales else [], "scaling"):
            prefix = model.family.block.format(block=block)
            names = [name for name in scales if name.startswith(prefix)]
            writer.rewrite(f"{SCALED} {block}", names, lambda tensors: apply_scales(tensors, scales))
    return record


def _fit(recovery: Recovery, prepared: Prepared, run: Run, store: BlockStore, writer: CheckpointWriter) -> None:
    training, model = prepared.job.training, prepared.model
    dense = ModelView(prepared.job.model, prepared.device, container=prepared.stored)
    assert training is not None
    samples, dtype = training.samples, training.compute_dtype
    sizes = SampleSplit.of(len(samples), recovery.held_out).sizes(recovery)

    def read(block: int) -> Mapping[str, Tensor]:
        return store.read(model, block)[0]

    fitted, record = fitted_scales(
        ModelInBlocks(
            prepared.view.stream(samples, dtype, sizes=sizes, allocate=training.allocate), read, model.blocks
        ),
        ModelInBlocks(dense.stream(samples, dtype, allocate=training.allocate), dense.block, dense.model.blocks),
        samples,
        recovery,
        seed=recovery.seed,
        text=model.family.modality == "text",
        seen=training.seen,
        stages=run.stages,
        announce=run.announce,
    )
    kept: dict[str, Any] = {}
    for name, (outputs, inputs) in fitted.scales.items():
        kept |= {_OUTPUTS + name: outputs.cpu(), _INPUTS + name: inputs.cpu()}
    writer.keep(_FILE, kept)
    writer.commit(SCALES, note=record.model_dump(mode="json"))


def _read(writer: CheckpointWriter) -> dict[str, tuple[Tensor, Tensor]]:
    kept = load_file(writer.scratch / _FILE)
    names = [name.removeprefix(_OUTPUTS) for name in kept if name.startswith(_OUTPUTS)]
    return {name: (kept[_OUTPUTS + name], kept[_INPUTS + name]) for name in names}
