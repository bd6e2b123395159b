"""Which weights stay in more bits: chosen by what rounding them costs the outputs, alone and together."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

Harm = Callable[[Collection[str]], float]
"""Returns the loss of the outputs if these weights are in few bits."""

MOST = 64
"""Measurements of weights, alone or several at once, whatever the size of the graph: of SmolLM2-135M's 211 weights so
many find a choice of 3 % more bytes than measuring each does, in a third of the time."""


@dataclass(frozen=True)
class Choice:
    """Which weights are stored in few bits.

    Attributes:
        few: names of those that are.
        more: names of those that are not, the most harmful by the byte first.
        alone: name → what the outputs lose if it alone is rounded to few bits; of weights that were measured at
            once its share by bytes; empty if nothing was measured.
        at_once: name → how many weights it was measured with, itself included.
        together: what they lose with the choice.
    """

    few: tuple[str, ...]
    more: tuple[str, ...]
    alone: dict[str, float] = field(default_factory=dict)
    at_once: dict[str, int] = field(default_factory=dict)
    together: float = math.nan


def choose_weights(
    saved: Mapping[str, int],
    together: Harm,
    alone: Harm,
    allowed: float,
    *,
    alike: Sequence[Sequence[str]] = (),
    most: int = MOST,
) -> Choice:
    """Store as many weights in few bits as the allowance permits.

    If all of them lose too much together, each is measured alone, and the most harmful by the byte that it saves are
    taken out until the others lose little enough together. How many that takes is found by halving, each time measured
    on the whole graph: harms do not add up.

    If there are more weights than may be measured, those that are alike are first measured at once. Then the run that
    loses most is halved, and both parts are measured, as often as may be. What is not halved to the end is ranked as
    one.

    Args:
        saved: name → bytes that few bits save of it, in the graph's order.
        together: measures a set of names, all others being stored in more bits.
        alone: measures a set of names, all others being as they were.
        alike: all names, in runs of those that are used alike, each in the graph's order.
        most: measurements by `alone`.
    """
    names = list(saved)
    lost = together(names)
    if lost <= allowed:
        return Choice(tuple(names), (), together=lost)
    groups: Sequence[Sequence[str]] = [[name] for name in names]
    if len(names) > most:
        groups = alike if 0 < len(alike) <= most else [names]
    runs = _measure_runs(groups, alone, most)
    size = {name: max(saved[name], 1) for name in names}
    density = {name: lost / sum(size[each] for each in run) for run, lost in runs for name in run}
    ranked = sorted((name for run, _ in runs for name in run), key=lambda name: -density[name])
    low, enough, measured = 1, len(ranked), math.nan
    while low < enough:
        middle = (low + enough) // 2
        lost = together(ranked[middle:])
        if lost <= allowed:
            enough, measured = middle, lost
        else:
            low = middle + 1
    if math.isnan(measured):
        measured = together(ranked[enough:])
    more = set(ranked[:enough])
    return Choice(
        tuple(name for name in names if name not in more),
        tuple(ranked[:enough]),
        {name: density[name] * size[name] for name in names},
        {name: len(run) for run, _ in runs for name in run},
        measured,
    )


def count_measurements(weights: int, most: int = MOST) -> tuple[int, int]:
    """Return how many sets of weights are measured at most: as `alone`, and as `together`."""
    return min(weights, most), math.ceil(math.log2(max(weights, 1))) + 1


def _measure_runs(groups: Sequence[Sequence[str]], alone: Harm, most: int) -> list[tuple[tuple[str, ...], float]]:
    """Weights that were measured at once, and what they lose."""
    runs = [(tuple(group), alone(group)) for group in groups]
    for _ in range((most - len(runs)) // 2):
        several = [run for run in runs if len(run[0]) > 1]
        if not several:
            break
        worst = max(several, key=lambda run: run[1])
        runs.remove(worst)
        names, half = worst[0], len(worst[0]) // 2
        runs += [(part, alone(part)) for part in (names[:half], names[half:])]
    return runs
