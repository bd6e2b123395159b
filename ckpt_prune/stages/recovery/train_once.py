"""Training of a model as a whole, by scales or LoRA: an interrupted run goes on with what it has trained."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from ckpt_prune.common.progress import meter
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.stages.recovery.keys import Afterwards, Recovery
from ckpt_prune.stages.recovery.records import Adapters
from ckpt_prune.stages.recovery.training import Progress, SampleSplit, Trained

Kept = TypeVar("Kept")


def train_once(
    recovery: Recovery,
    prepared: Prepared,
    run: Run,
    entry: str,
    fit: Callable[[Progress], Trained[Kept]],
    files: Callable[[Kept], Mapping[str, Mapping[str, Tensor]]],
) -> Adapters:
    """Train a model, unless an interrupted run has: one that is killed before that trains again. Return the record.

    Args:
        entry: of the journal: what is trained.
        fit: trains it.
        files: what is kept for the rest of the run, by names of files in the scratch folder: the first has a tensor for
            each module. Nothing is kept if no epoch was better than the start.
    """
    writer = run.writer
    assert writer is not None
    if entry not in writer.notes:
        with meter(recovery.epochs, f"training {entry}", unit="epoch") as epochs:
            trained = fit(epochs.step)
        if not trained.steps:
            run.announce(
                f"there is nothing to train: the loss is {trained.loss_before:.3g}, and the weights stay as they are"
            )
        elif trained.kept is None:
            run.announce(
                f"no epoch was better than the model as it was, at lr {trained.rate:g}: the weights stay as they are; "
                "try a smaller learning rate, or more samples"
            )
        kept = {} if trained.kept is None else files(trained.kept)
        for file, tensors in kept.items():
            writer.keep(file, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
        record = _record(recovery, prepared, trained, modules=len(next(iter(kept.values()), ())))
        writer.commit(entry, note=record.model_dump(mode="json"))
    return Adapters.model_validate(writer.notes[entry])


def _record(recovery: Recovery, prepared: Prepared, trained: Trained[Kept], *, modules: int) -> Adapters:
    training = prepared.job.training
    assert training is not None
    lora = recovery.lora if isinstance(recovery, Afterwards) and recovery.method == "lora" else None
    text = prepared.model.family.modality == "text"
    return Adapters(
        method="scales" if lora is None else "lora",
        rank=None if lora is None else lora.rank,
        alpha=None if lora is None else lora.alpha,
        lr=trained.rate,
        seed=recovery.seed,
        settings=recovery.of_all() | ({} if lora is None else lora.beyond_adapters()),
        data=training.samples.fingerprint,
        seen=training.seen,
        samples=len(training.samples),
        window=training.samples.tokens if text else None,
        measured=len(SampleSplit.of(len(training.samples), recovery.held_out).measured),
        modules=modules,
        parameters=trained.parameters,
        steps=trained.steps,
        epochs=trained.epochs,
        seconds=round(trained.seconds, 3),
        loss_before=trained.loss_before,
        loss_after=trained.loss_after,
    )
