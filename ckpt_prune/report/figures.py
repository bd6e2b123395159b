"""Every figure that the command line, the model card and the page show of a report. They format; this computes.

Functions take the records, not the report, where plans have the same ones. Nothing here needs torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt_prune.job.records import Cost, FactoredLinear, MaskedLinear, SiteRecord
from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import Learned, Mask, Perplexity, Recovery

CostKey = Literal["parameters", "bytes", "flops", "cache"]
_COSTS: tuple[CostKey, ...] = ("parameters", "bytes", "flops")
SOLVED = 1e-6
"""Relative residual below which a logit solve is as good as the float32 moments it was made from."""


# ---- costs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostChange:
    """One of the costs, before and after."""

    key: CostKey
    before: int
    after: int

    @property
    def share(self) -> float:
        """What is left."""
        return self.after / self.before


def cost_changes(before: Cost, after: Cost) -> list[CostChange]:
    """Parameters, bytes and FLOPs; and what a token takes in the cache, where that changes."""
    found = [CostChange(key, getattr(before, key), getattr(after, key)) for key in _COSTS]
    if before.cache and after.cache is not None and after.cache != before.cache:
        found.append(CostChange("cache", before.cache, after.cache))
    return found


# ---- sites -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpaceErrors:
    """Means over the sites of a space that have both errors.

    Attributes:
        space: which.
        uncompensated, compensated: as `SiteRecord` has them.
        drift: whether they are of what the dense model's residual stream asks for.
    """

    space: str
    uncompensated: float
    compensated: float
    drift: bool


def space_errors(sites: Sequence[SiteRecord]) -> list[SpaceErrors]:
    """Mean errors of every space that has any, in the order of the sites."""
    found = []
    for space, own in _by_space(sites).items():
        known = [
            (a, b) for s in own if (a := s.error_uncompensated) is not None and (b := s.error_compensated) is not None
        ]
        if known:
            bare, compensated = (sum(errors) / len(known) for errors in zip(*known, strict=True))
            found.append(SpaceErrors(space, bare, compensated, any(site.share is not None for site in own)))
    return found


def held_out_errors(sites: Sequence[SiteRecord]) -> dict[str, float]:
    """Space → mean error on held-out folds over the sites that are compensated."""
    means = {}
    for space, own in _by_space(sites).items():
        errors = [e for s in own if (e := s.error_held_out) is not None and s.method != "none"]
        if errors:
            means[space] = sum(errors) / len(errors)
    return means


def worse_on_held_out(sites: Sequence[SiteRecord]) -> list[SiteRecord]:
    """Sites whose compensation makes the error larger on samples that the fit has not seen."""
    return [
        site
        for site in sites
        if site.method != "none"
        and site.error_held_out is not None
        and site.error_uncompensated is not None
        and site.error_held_out > site.error_uncompensated
    ]


def unsolved(sites: Sequence[SiteRecord]) -> list[tuple[SiteRecord, float]]:
    """Sites whose logits are not solved to the end, and the relative residual they were left with."""
    return [(site, site.residual) for site in sites if site.residual is not None and site.residual > SOLVED]


@dataclass(frozen=True)
class Verdict:
    """Whether compensation lowers an error.

    Attributes:
        sites: how many lost units, are compensated and were measured.
        failed: those where it does not.
    """

    sites: int
    failed: list[SiteRecord]


def verdict(sites: Sequence[SiteRecord], error: Literal["error_compensated", "error_held_out"]) -> Verdict | None:
    """Whether compensation lowers the error on calibration data, or on held-out data; None where nothing was measured.

    Sites where there was nothing to compensate do not fail.
    """
    pairs = [
        (site, before, after)
        for site in sites
        if len(site.kept) < site.units and site.method != "none"
        if (before := site.error_uncompensated) is not None and (after := site.figure(error)) is not None
    ]
    if not pairs:
        return None
    return Verdict(len(pairs), [site for site, before, after in pairs if after >= before and before > 0])


def relative_floor(site: SiteRecord) -> float | None:
    """The least error any weights and bias can reach, relative as the errors are; None where it is not known.

    Floor and j0 are per token; their ratio, times the uncompensated error, stands beside the errors.
    """
    if site.floor is None or site.j0 is None or site.error_uncompensated is None:
        return None
    # Where nothing is lost there is nothing to be relative to.
    return site.floor / site.j0 * site.error_uncompensated if site.j0 > 0 else 0.0 if site.floor == 0 else None


def inputs_of(site: SiteRecord) -> int | None:
    """Inputs of the consumer. Units of an MLP are its inputs; a head is several, which the report may count."""
    width = site.width or (site.units if site.space == "mlp" else None)
    return width if width is not None and width > 0 else None


def _by_space(sites: Sequence[SiteRecord]) -> dict[str, list[SiteRecord]]:
    return {space: [s for s in sites if s.space == space] for space in dict.fromkeys(s.space for s in sites)}


# ---- masks and rotations -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskFigures:
    """What a mask did.

    Attributes:
        linears: weights that have it.
        zeros, size: of all together.
        mean_error: of the outputs on the calibration samples; None where no error was measured.
        worst: where that is largest, and how large.
        asked: damping of Hessians that the recipe asks for; None where it does not say.
        damped: linears whose Hessians took more, and how much.
    """

    linears: int
    zeros: int
    size: int
    mean_error: float | None
    worst: tuple[MaskedLinear, float] | None
    asked: float | None
    damped: list[tuple[MaskedLinear, float]]

    @property
    def share(self) -> float:
        """The share of zeros."""
        return self.zeros / self.size


def shares_line(mask: Mask | None) -> str | None:
    """How a mask's zeros are shared out over blocks, in words; None where all blocks have as many."""
    if mask is None or mask.shares is None or not mask.shares.ratios:
        return None
    if mask.shares.kept:
        of = mask.pattern.partition(":")[2]
        kept = f"{min(mask.shares.kept)} to {max(mask.shares.kept)} of {of} weights kept"
    else:
        kept = f"{min(mask.shares.ratios):.1%} to {max(mask.shares.ratios):.1%} zeros"
    return f"zeros shared out over blocks by {mask.allocation}: {kept}"


def mask_figures(linears: Sequence[MaskedLinear], asked: float | None) -> MaskFigures | None:
    """What a mask did to all linears together; None where there are none.

    Args:
        linears: in the order of the report.
        asked: `UsedRecipe.damp`.
    """
    if not linears:
        return None
    errors = [(linear, linear.error) for linear in linears if linear.error is not None]
    return MaskFigures(
        linears=len(linears),
        zeros=sum(linear.zeros for linear in linears),
        size=sum(linear.size for linear in linears),
        mean_error=sum(error for _, error in errors) / len(errors) if errors else None,
        worst=max(errors, key=lambda pair: pair[1]) if errors else None,
        asked=asked,
        damped=[
            (linear, linear.damp)
            for linear in linears
            if asked is not None and linear.damp is not None and linear.damp > asked
        ],
    )


@dataclass(frozen=True)
class FactorFigures:
    """What factoring did.

    Attributes:
        linears: modules that two thin ones stand in for.
        size, left: parameters of their weights, and of the factors.
        least, most: ranks.
        mean_error: of the outputs on the calibration samples; None where no error was measured.
        worst: where that is largest, and how large.
    """

    linears: int
    size: int
    left: int
    least: int
    most: int
    mean_error: float | None
    worst: tuple[FactoredLinear, float] | None


def factor_figures(factored: Sequence[FactoredLinear]) -> FactorFigures | None:
    """What factoring did to all linears together; None where there are none."""
    if not factored:
        return None
    errors = [(linear, linear.error) for linear in factored if linear.error is not None]
    ranks = [linear.rank for linear in factored]
    return FactorFigures(
        linears=len(factored),
        size=sum(linear.size for linear in factored),
        left=sum(linear.left for linear in factored),
        least=min(ranks),
        most=max(ranks),
        mean_error=sum(error for _, error in errors) / len(errors) if errors else None,
        worst=max(errors, key=lambda pair: pair[1]) if errors else None,
    )


def kind_of(linear: MaskedLinear | FactoredLinear) -> str:
    """What tables call a linear; where the file does not say, the path of the module in its block."""
    if linear.kind is not None:
        return linear.kind
    name = linear.weight.removesuffix(".weight")
    return name.partition(f".{linear.block}.")[2] or name


@dataclass(frozen=True)
class RotationFigures:
    """Entropies of the importance before and after rotation, in nats, and the least and most steps of training.

    Steps are None where no rotation has any on record.
    """

    before: float
    after: float
    steps: tuple[int, int] | None

    @property
    def change(self) -> float | None:
        """Relative; None where every weight is zero, so that nothing is left to concentrate."""
        return relative_change(self.before, self.after)


def rotation_figures(learned: Sequence[Learned]) -> RotationFigures | None:
    """The figure for all rotations together; None where an entropy is not known."""
    known = [
        (entry.entropy_before, entry.entropy_after)
        for entry in learned
        if entry.entropy_before is not None and entry.entropy_after is not None
    ]
    if not known or len(known) < len(learned):
        return None
    before, after = (math.fsum(values) for values in zip(*known, strict=True))
    steps = sorted(entry.steps for entry in learned if entry.steps is not None)
    return RotationFigures(before, after, (steps[0], steps[-1]) if steps else None)


def relative_change(before: float | None, after: float | None) -> float | None:
    """After / before − 1; None where that has no meaning."""
    return after / before - 1 if before is not None and after is not None and before > 0 else None


# ---- recovery ----------------------------------------------------------------------------------------------------

Likeness = Literal["mse", "cka"]


@dataclass(frozen=True)
class Means:
    """Means over those blocks that have a figure both before and after recovery."""

    before: float
    after: float
    blocks: int


@dataclass(frozen=True)
class RecoveryFigures:
    """What recovery did to all blocks together.

    Attributes:
        blocks, recovered: how many there are, and how many have new weights.
        images: whether samples are images.
        samples, held_out, measured, window: how many, how many of them held out, how many errors are of (of those that
            are trained on, where none is held out), tokens of each; None where the file does not say.
        epochs, lr: of the settings; NaN where the file does not say at which rate.
        only, layers: the part that was recovered; None: all.
        complete: figure of a layer, such as mse_after → mean over all blocks, or None where one is not finite.
        means: mse or cka → means over the blocks that have it; a key is absent where none has.
        broken: blocks whose error is not finite.
        idle: blocks no epoch of which was better than the old weights, though training did not get lost.
        diverged: blocks where it did.
        worse: whether the error after the last block is larger than without recovery.
        perplexities: ascending numbers of recovered blocks.
    """

    blocks: int
    recovered: int
    images: bool
    samples: int | None
    held_out: int | None
    measured: int | None
    window: int | None
    epochs: int | None
    lr: float
    only: str | None
    layers: str | None
    complete: dict[str, float | None]
    means: dict[Likeness, Means]
    broken: list[int]
    idle: list[int]
    diverged: list[int]
    worse: bool
    perplexities: list[Perplexity]

    @property
    def tried_on(self) -> str:
        """Which samples errors are of."""
        return "held-out" if self.held_out != 0 else "training"


def recovery_figures(recovery: Recovery | None, layers: Sequence[RecoveredLayer]) -> RecoveryFigures | None:
    """What recovery did; None without one."""
    if recovery is None:
        return None
    data, settings = recovery.data, recovery.settings
    last = layers[-1] if layers else None
    return RecoveryFigures(
        blocks=len(layers),
        recovered=sum(layer.recovered for layer in layers),
        images=data.text("modality") == "image",
        samples=data.amount("samples"),
        held_out=data.amount("held_out"),
        measured=data.amount("measured") or data.amount("held_out"),
        window=data.amount("window"),
        epochs=settings.amount("epochs"),
        lr=rate if (rate := settings.figure("lr")) is not None else math.nan,
        only=settings.text("only"),
        layers=settings.text("layers"),
        complete={
            key: _complete_mean([layer.figure(key) for layer in layers])
            for key in ("mse_before", "mse_after", "cka_before", "cka_after")
        },
        means={name: means for name in _LIKENESSES if (means := _means(layers, name)) is not None},
        broken=[layer.block for layer in layers if layer.mse_after is None],
        idle=[layer.block for layer in layers if layer.epochs and not layer.recovered and not layer.diverged],
        diverged=[layer.block for layer in layers if layer.diverged],
        worse=last is not None
        and last.mse_before is not None
        and last.mse_after is not None
        and last.mse_after > last.mse_before,
        perplexities=sorted(recovery.perplexity_after or [], key=lambda entry: entry.blocks),
    )


_LIKENESSES: tuple[Likeness, ...] = ("mse", "cka")


def _complete_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _means(layers: Sequence[RecoveredLayer], name: Likeness) -> Means | None:
    pairs = [(layer.figure(f"{name}_before"), layer.figure(f"{name}_after")) for layer in layers]
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not known:
        return None
    before, after = (math.fsum(values) / len(known) for values in zip(*known, strict=True))
    return Means(before, after, len(known))
