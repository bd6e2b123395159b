"""Scales as the last step of a job: fitted to the blocks as they are written, and multiplied into them there."""

from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import meter, track
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.stages.recovery.block_training import SampleSplit
from ckpt_prune.stages.recovery.keys import Recovery
from ckpt_prune.stages.recovery.records import Adapters
from ckpt_prune.stages.recovery.scales import NOTHING, ModelInBlocks, apply_scales, fit_scales

SCALES, SCALED = "scales", "scaled"
"""Entries of the journal: scales are fitted; and, before its number, a block has them."""
_FILE = "scales.safetensors"
_OUTPUTS, _INPUTS = "outputs of ", "inputs of "


def scale_blocks(recovery: Recovery, prepared: Prepared, run: Run) -> Adapters:
    """Fit scales to the blocks that a run has written, and multiply them in. Return what was done.

    The target is the model as it was given, with all its blocks and in its own basis. A run that is killed while they
    are fitted fits them again; one that is killed later continues with them.
    """
    writer, model = run.writer, prepared.model
    assert writer is not None
    if SCALES not in writer.notes:
        _fit(recovery, prepared, run, writer)
    scales = _read(writer)
    todo = [block for block in range(model.blocks) if f"{SCALED} {block}" not in writer.done]
    with run.timer.time("scaling"):
        for block in track(todo if scales else [], "scaling"):
            prefix = model.family.block.format(block=block)
            names = [name for name in scales if name.startswith(prefix)]
            writer.rewrite(f"{SCALED} {block}", names, lambda tensors: apply_scales(tensors, scales))
    return Adapters.model_validate(writer.notes[SCALES])


def _fit(recovery: Recovery, prepared: Prepared, run: Run, writer: CheckpointWriter) -> None:
    training, model, store = prepared.job.training, prepared.model, run.store
    assert training is not None
    assert store is not None
    samples, dtype, allocate = training.samples, training.compute_dtype, training.allocate
    split, text = SampleSplit.of(len(samples), recovery.held_out), model.family.modality == "text"
    dense_view = prepared.target or ModelView(prepared.job.model, prepared.device, container=prepared.stored)
    pruned = ModelInBlocks(
        prepared.pruned_view.stream(samples, dtype, sizes=split.sizes(recovery), allocate=allocate),
        lambda block: store.read(model, block)[0],
        model.blocks,
    )
    dense = ModelInBlocks(
        dense_view.stream(samples, dtype, allocate=allocate), dense_view.block, dense_view.model.blocks
    )
    what = f"windows of {samples.tokens} tokens" if text else "samples"
    held_out = f"{len(split.measured)} of them held out" if recovery.held_out else "none held out"
    rate = "" if recovery.lr is None else f" at lr {recovery.lr:g}"
    run.announce(
        f"fitting scales of {plural(len(recovery.blocks(model.blocks)), 'block')} on {len(samples)} {what}, "
        f"{held_out}, up to {plural(recovery.epochs, 'epoch')} in steps of {recovery.batch}{rate}"
    )
    with run.timer.time("scales"), meter(recovery.epochs, "fitting scales", unit="epoch") as epochs:
        fitted = fit_scales(
            pruned,
            dense,
            samples,
            split,
            recovery,
            seed=recovery.seed,
            progress=lambda epoch, loss: epochs.step(epoch, loss),
        )
    if not fitted.kept and fitted.loss_before <= NOTHING:
        run.announce(
            "the model predicts what the dense one does: there is nothing to fit, and its weights stay as they are"
        )
    elif not fitted.kept:
        run.announce(
            f"no epoch was better than the model as it was, at lr {fitted.rate:g}: the weights stay as they are; try a "
            "smaller learning rate, or more samples"
        )
    record = fitted.record(recovery, training, measured=len(split.measured), text=text)
    kept: dict[str, Any] = {}
    for name, (outputs, inputs) in fitted.kept.items():
        kept |= {_OUTPUTS + name: outputs.cpu(), _INPUTS + name: inputs.cpu()}
    writer.keep(_FILE, kept)
    writer.commit(SCALES, note=record.model_dump(mode="json"))


def _read(writer: CheckpointWriter) -> dict[str, tuple[Tensor, Tensor]]:
    kept = load_file(writer.scratch / _FILE)
    names = [name.removeprefix(_OUTPUTS) for name in kept if name.startswith(_OUTPUTS)]
    return {name: (kept[_OUTPUTS + name], kept[_INPUTS + name]) for name in names}
