"""Find the blocks that lose their attention, replace one after the other, and train behind each (DC-ViT)."""

from dataclasses import replace

from safetensors.torch import save_file

from ckpt_prune.checkpoint.files import sync
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.progress import meter
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.stages.bare.keys import Bare
from ckpt_prune.stages.bare.mimic import Mimicry, tensors_of
from ckpt_prune.stages.bare.preview import at_bare, best_columns, plan_savings, record_of
from ckpt_prune.stages.bare.records import BareBlock, BareRecord, count_trained

_FILE = "bare.safetensors"


def replace_blocks(prepared: Prepared, run: Run) -> Prepared:
    """Return the state with blocks replaced and trained. An interrupted run begins again with the trials."""
    folder = run.scratch
    with disk_failures(folder):
        folder.mkdir(exist_ok=True)

    def make() -> BareRecord:
        with run.timer.time("mimicry"):
            live = prepared.live_samples
            mimicry = Mimicry(prepared.model, prepared.stage(Bare), live.samples, prepared.device)
            record = _replace_all(prepared, mimicry)
        dtypes = {name: info.dtype for name, info in prepared.model.checkpoint.tensors.items()}
        with disk_failures(folder):
            save_file(tensors_of(mimicry, record.trained, dtypes), folder / _FILE)
            sync(folder / _FILE)
        return record

    record = run.remember(Bare.key, BareRecord, make, [folder / _FILE])
    bare = at_bare(prepared, record)
    trained = {
        name: replace(info, file=str(folder / _FILE)) for name, info in read_header(folder / _FILE).tensors.items()
    }
    checkpoint = replace(bare.model.checkpoint, replaced=trained)
    return replace(bare, model=replace(bare.model, checkpoint=checkpoint))


def _replace_all(prepared: Prepared, mimicry: Mimicry) -> BareRecord:
    model, bare, (saved, kept) = prepared.model, prepared.stage(Bare), plan_savings(prepared)
    tried: list[float] = []
    if bare.blocks is None:
        tried = _try_each(prepared, mimicry, kept[0])
        order = sorted(range(model.blocks), key=lambda block: (tried[block], block))[: len(kept)]
    else:
        order = bare.blocks
    replaced: list[BareBlock] = []
    mimicry.reset()
    for block, count in zip(order, kept, strict=True):
        columns = best_columns(model, mimicry.block_tensors(block), block, count)
        mimicry.replace_block(block, columns)
        replaced.append(BareBlock(block=block, columns=columns))
        with meter(bare.epochs, f"training without attention of block {block}", unit="epoch") as epochs:
            behind = count_trained(model.blocks, [each.block for each in replaced])
            trained = mimicry.train(behind, bare.epochs, epochs.step)
        figures = {"error_before": trained.loss_before, "error_after": trained.loss_after, "epochs": trained.epochs}
        replaced[-1] = replaced[-1].model_copy(update=figures)
    return record_of(prepared, saved, replaced).model_copy(update={"tried": tried})


def _try_each(prepared: Prepared, mimicry: Mimicry, count: int) -> list[float]:
    """Return the divergence of the model's output with each block alone replaced, and trained."""
    model, bare, tried = prepared.model, prepared.stage(Bare), list[float]()
    epochs = bare.trial_epochs or bare.epochs
    with meter(model.blocks * epochs, "trying each block", unit="epoch") as progress:
        for block in range(model.blocks):
            mimicry.reset()
            mimicry.replace_block(block, best_columns(model, mimicry.block_tensors(block), block, count))
            mimicry.train(count_trained(model.blocks, [block]), epochs, progress.step)
            tried.append(mimicry.divergence())
    return tried
