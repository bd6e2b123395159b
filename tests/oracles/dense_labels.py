"""Figures of labels of pixels by their definitions, one pixel after the other, in float64."""

import math
from collections.abc import Sequence

Plane = Sequence[Sequence[float]]


def drawn_out(plane: Plane, height: int, width: int) -> list[list[float]]:
    """Bilinear, pixels as areas: the middle of pixel i lies at (i + 1/2) · rows / height − 1/2 of the rows."""

    def places(count: int, size: int) -> list[tuple[int, int, float]]:
        weights = []
        for i in range(size):
            at = max(0.0, (i + 0.5) * count / size - 0.5)
            low = math.floor(at)
            weights.append((low, min(low + 1, count - 1), at - low))
        return weights

    return [
        [
            (1 - v) * ((1 - u) * plane[a][c] + u * plane[a][d]) + v * ((1 - u) * plane[b][c] + u * plane[b][d])
            for c, d, u in places(len(plane[0]), width)
        ]
        for a, b, v in places(len(plane), height)
    ]


def normalise(token: Sequence[float], norm: dict[str, Sequence[float]]) -> list[float]:
    """A batch norm at inference."""
    return [
        (x - m) / math.sqrt(v + 1e-5) * g + b
        for x, m, v, g, b in zip(
            token, norm["running_mean"], norm["running_var"], norm["weight"], norm["bias"], strict=True
        )
    ]


def miou(predicted: Sequence[int], true: Sequence[int], classes: int) -> tuple[float, float, list[float | None]]:
    """Mean intersection over union, pixel accuracy and each class's; a negative truth is no label."""
    pairs = [(p, t) for p, t in zip(predicted, true, strict=True) if t >= 0]
    shares: list[float | None] = []
    for c in range(classes):
        union = sum(c in pair for pair in pairs)
        shares.append(sum(p == c == t for p, t in pairs) / union if union else None)
    there = [share for share in shares if share is not None]
    return sum(there) / len(there), sum(p == t for p, t in pairs) / len(pairs), shares
