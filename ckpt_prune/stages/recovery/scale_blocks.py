"""Scales as the last step of a job: fitted to the blocks as they are written, and multiplied into them there."""

from functools import partial

from safetensors.torch import load_file

from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.stages.recovery.keys import Recovery
from ckpt_prune.stages.recovery.records import Adapters
from ckpt_prune.stages.recovery.scales import ModelInBlocks, Scales, apply_scales, fit_scales
from ckpt_prune.stages.recovery.target import pruned_view, target_of
from ckpt_prune.stages.recovery.train_once import train_once
from ckpt_prune.stages.recovery.training import Progress, SampleSplit, Trained

SCALES, SCALED = "scales", "scaled"
"""Entries of the journal: scales are fitted; and, before its number, a block has them."""
_FILE = "scales.safetensors"


def scale_blocks(recovery: Recovery, prepared: Prepared, run: Run) -> Adapters:
    """Fit scales to the blocks that a run has written, and multiply them in. Return what was done.

    The target is the model as it was given, with all its blocks and in its own basis. A run that is killed while they
    are fitted fits them again; one that is killed later continues with them.
    """
    fit = partial(_fit, recovery, prepared, run)
    record = train_once(recovery, prepared, run, SCALES, fit, lambda scales: {_FILE: scales})
    writer, model = run.writer, prepared.model
    assert writer is not None
    scales = load_file(writer.scratch / _FILE) if record.modules else {}
    todo = [block for block in range(model.blocks) if f"{SCALED} {block}" not in writer.done]
    with run.timer.time("scaling"):
        for block in track(todo if scales else [], "scaling"):
            prefix = model.family.block.format(block=block)
            names = [name for name in scales if name.startswith(prefix)]
            writer.rewrite(f"{SCALED} {block}", names, lambda tensors: apply_scales(tensors, scales))
    return record


def _fit(recovery: Recovery, prepared: Prepared, run: Run, progress: Progress) -> Trained[Scales]:
    training, model, store = prepared.job.training, prepared.model, run.store
    assert training is not None
    assert store is not None
    samples, dtype, allocate = training.samples, training.compute_dtype, training.allocate
    split, text = SampleSplit.of(len(samples), recovery.held_out), model.family.modality == "text"
    dense_view = target_of(prepared) or ModelView(prepared.job.model, prepared.device, container=prepared.job.stored)
    pruned = ModelInBlocks(
        pruned_view(prepared).stream(samples, dtype, sizes=split.sizes(recovery), allocate=allocate),
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
    with run.timer.time("scales"):
        return fit_scales(pruned, dense, samples, split, recovery, seed=recovery.seed, progress=progress)
