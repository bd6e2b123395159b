"""Plots over what was tried or trained: the strength of a fit, the steps of rotations, the epochs of recovery."""

import math
from collections.abc import Sequence

from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import Learned, StrengthSearch
from ckpt_prune.reporting.charts import Point, Series, Style
from ckpt_prune.reporting.plots import Figure, shown

_TRIED, _LEARNED = Style("after", "square"), Style("before", "circle")


def curves(
    learned: Sequence[Learned] = (), search: StrengthSearch | None = None, layers: Sequence[RecoveredLayer] = ()
) -> list[Figure]:
    """Every curve that the report has something of.

    Args:
        learned: rotations, with what their training went through.
        search: of λ by calibration perplexity.
        layers: what recovery did, with the error after every epoch.
    """
    steps = _as_shares(
        [[(step, value) for step, value in entry.curve] for entry in learned],
        "Entropy over steps",
        "Lower is better: of the importance of weights while rotations were learned, as a share of what it was.",
        ("share of entropy", "step"),
    )
    epochs = _as_shares(
        [[*enumerate(layer.curve)] for layer in layers],
        "Error over epochs",
        "Lower is better: of hidden states on held-out samples while blocks were recovered, as a share of what it was.",
        ("share of error", "epoch"),
    )
    return [each for each in (_over_strengths(search), steps, epochs) if each is not None]


def _over_strengths(search: StrengthSearch | None) -> Figure | None:
    """Perplexity on the calibration text over the exponent of λ (RCPU, Figures 5 and 6); None without powers of ten."""
    if search is None:
        return None
    points = []
    for text, perplexity in search.perplexity.items():
        try:
            strength = float(text)
        except ValueError:
            continue
        if perplexity is None or not strength > 0:
            continue
        exponent = math.log10(strength)
        if abs(exponent - round(exponent)) > 1e-9:
            return None
        chosen = " (chosen)" if strength == search.chosen else ""
        points.append(Point(round(exponent), perplexity, perplexity, perplexity, f"{shown(perplexity)}{chosen}"))
    if len(points) < 2:
        return None
    series = Series("calibration text", _TRIED, tuple(sorted(points, key=lambda point: point.place)))
    note = f"Lower is better: of the pruned model on the calibration text. {search.chosen:g} was taken."
    return Figure("Perplexity over λ", note, "perplexity", (series,), None, True, "power of ten of λ", True)


def _as_shares(
    found: Sequence[Sequence[tuple[int, float | None]]], title: str, note: str, words: tuple[str, str]
) -> Figure | None:
    """Curves of blocks, each as a share of its beginning: the mean, from least to most; None where there is nothing."""
    shares: dict[int, list[float]] = {}
    for curve in found:
        before = curve[0][1] if curve else None
        for step, value in curve:
            if before is not None and before > 0 and value is not None:
                shares.setdefault(step, []).append(value / before)
    # Blocks that stopped early are missing from later steps, which would move the mean.
    most = max((len(own) for own in shares.values()), default=0)
    points = [
        Point(step, mean, min(own), max(own), f"mean {shown(mean)}, {shown(min(own))} to {shown(max(own))}")
        for step, own in sorted(shares.items())
        if len(own) == most
        for mean in [min(max(sum(own) / len(own), min(own)), max(own))]
    ]
    if len(points) < 2:
        return None
    unit, across = words
    series = (Series("mean of blocks, least to most", _LEARNED, tuple(points)),)
    return Figure(title, note, unit, series, None, False, across, True)
