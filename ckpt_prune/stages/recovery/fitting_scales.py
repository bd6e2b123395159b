"""Fitting scales, with what is said before, meanwhile and for the record."""

from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import meter
from ckpt_prune.job.report import Adapters
from ckpt_prune.job.run import Announce
from ckpt_prune.job.timing import Stages
from ckpt_prune.job.training_settings import RecoverySettings
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.stages.recovery.block_training import SampleSplit
from ckpt_prune.stages.recovery.scales import FittedScales, ModelInBlocks, fit_scales


def fitted_scales(
    pruned: ModelInBlocks,
    dense: ModelInBlocks,
    samples: Samples,
    settings: RecoverySettings,
    *,
    seed: int,
    text: bool,
    seen: bool | None,
    stages: Stages,
    announce: Announce,
) -> tuple[FittedScales, Adapters]:
    """Scales of a pruned model, and their record.

    Args:
        pruned: what is fitted.
        dense: what it was made from.
        samples: that both are run on.
        settings: of fitting, as `fit_scales` takes them.
        seed: of the order of samples.
        text: whether samples are windows of text.
        seen: whether the model was pruned on these samples, or fitted to them before; None where that is not known.
        stages: of the run, to which fitting is added.
        announce: told what is about to be done, and whether nothing was gained.

    Raises:
        UserError: there is nothing to fit.
    """
    split = SampleSplit.of(len(samples), settings.held_out)
    what = f"windows of {samples.tokens} tokens" if text else "samples"
    held = f"{len(split.measured)} of them held out" if settings.held_out else "none held out"
    rate = "" if settings.lr is None else f" at lr {settings.lr:g}"
    announce(
        f"fitting scales of {plural(len(settings.blocks(pruned.blocks)), 'block')} on {len(samples)} {what}, {held}, "
        f"up to {plural(settings.epochs, 'epoch')} in steps of {settings.batch}{rate}"
    )
    with stages.stage("scales"), meter(settings.epochs, "fitting scales", unit="epoch") as epochs:
        fitted = fit_scales(
            pruned, dense, samples, split, settings, seed=seed, progress=lambda epoch, loss: epochs.step(epoch, loss)
        )
    if not fitted.scales and not fitted.before:
        announce(
            "the model predicts what the dense one does: there is nothing to fit, and its weights stay as they are"
        )
    elif not fitted.scales:
        announce(
            f"no epoch was better than the model as it was, at lr {fitted.rate:g}: the weights stay as they are; try a "
            "smaller learning rate, or more samples"
        )
    told = Adapters(
        method="scales",
        lr=fitted.rate,
        seed=seed,
        settings=settings.of_all(),
        data=samples.fingerprint,
        seen=seen,
        samples=len(samples),
        window=samples.tokens if text else None,
        measured=len(split.measured),
        modules=len(fitted.scales),
        parameters=fitted.parameters,
        steps=fitted.steps,
        epochs=fitted.epochs,
        seconds=round(fitted.seconds, 3),
        loss_before=fitted.before,
        loss_after=fitted.after,
    )
    return fitted, told
