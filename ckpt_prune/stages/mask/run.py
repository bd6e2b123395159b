"""The work of the stage `mask`: share the zeros out over blocks, and mask them."""

from dataclasses import replace

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import MaskShares
from ckpt_prune.job.run import Run
from ckpt_prune.job.step import PruneStep
from ckpt_prune.measure.moment_sources import SequentialMoments
from ckpt_prune.model.family import DATA_OPTIONS
from ckpt_prune.stages.mask.masker import Masker, check_widths
from ckpt_prune.stages.mask.shares import choose_shares
from ckpt_prune.stages.mask.stage import Mask
from ckpt_prune.stages.moments import check_collected, prune_step
from ckpt_prune.stages.rotation.run import rotations_in_turn


def check_mask(mask: Mask, prepared: Prepared) -> None:
    """Refuse a pattern that does not fit the weights, and statistics that lack what the method needs."""
    check_widths(prepared.model, mask)
    if mask.allocation == "divergence" and prepared.model.family.experts is not None:
        raise UserError(
            f"recipe {prepared.recipe.name} tries masks on whole blocks, whose experts may see none of a few samples: "
            "say mask.allocation=owl or alpha"
        )
    if prepared.statistics is not None:
        check_collected(prepared, prepared.statistics)


def check_samples(mask: Mask, prepared: Prepared) -> None:
    """Refuse statistics where shares of zeros need samples to run the model on."""
    if mask.allocation == "divergence" and prepared.live is None:
        raise UserError(
            f"recipe {prepared.recipe.name} shares a mask's zeros out by what they do to the model itself: give "
            f"{DATA_OPTIONS[prepared.model.family.modality]} in place of --statistics"
        )


def share_zeros(mask: Mask, prepared: Prepared, run: Run) -> Prepared:
    """Choose how many zeros each block gets, if that differs."""
    if mask.allocation == "uniform":
        return prepared

    def choose() -> MaskShares:
        with run.timer.time("shares"):
            return choose_shares(prepared, mask)

    return replace(prepared, shares=run.remember("shares", MaskShares, choose))


def masker_of(mask: Mask, prepared: Prepared) -> Masker:
    return Masker(
        prepared.model,
        mask,
        prepared.recipe.ratio,
        mask.groups,
        prepared.output.container.biases,
        prepared.device,
        prepared.diagnostics is not False,
        None if prepared.shares is None else prepared.shares.ratios,
    )


def mask_step(mask: Mask, prepared: Prepared) -> PruneStep:
    """Return what masks a block. Rotations that are learned in turn are learned on its stream."""
    step = prune_step(mask, prepared)
    rotations = rotations_in_turn(prepared)
    if rotations is None:
        return step
    if not isinstance(step.source, SequentialMoments):
        step.carry(prepared.live_stream(prepared.view))
    rotations.stream = step.carried
    return step
