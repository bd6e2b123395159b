"""What stays in more bits: chosen by what rounding each weight costs the outputs, and what they lose together."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

Harm = Callable[[Collection[str]], float]
"""What the outputs lose where these weights are in few bits, and all others as they would be stored otherwise."""


@dataclass(frozen=True)
class Choice:
    """Which weights are stored in few bits.

    Attributes:
        few: names of those that are.
        more: names of those that are not, the most harmful by the byte first.
        alone: name → what the outputs lose where it alone is rounded to few bits; empty where that was not needed.
        together: what they lose with the choice.
    """

    few: tuple[str, ...]
    more: tuple[str, ...]
    alone: dict[str, float] = field(default_factory=dict)
    together: float = math.nan


def choose(saved: Mapping[str, int], together: Harm, alone: Callable[[str], float], allowed: float) -> Choice:
    """Store as many weights in few bits as may be.

    Where all of them lose too much together, each is measured alone, and the most harmful by the byte that it saves are
    taken out until the rest loses little enough together. How many that takes is found by halving, each time measured
    on the whole graph: harms do not add up.

    Args:
        saved: name → bytes that few bits save of it, in the graph's order.
        together: measures a set of names.
        alone: measures one name.
        allowed: the most that may be lost.
    """
    names = list(saved)
    lost = together(names)
    if lost <= allowed:
        return Choice(tuple(names), (), together=lost)
    harms = {name: alone(name) for name in names}
    ranked = sorted(names, key=lambda name: -harms[name] / max(saved[name], 1))
    enough, measured = len(ranked), math.nan
    low = 1
    while low < enough:
        middle = (low + enough) // 2
        found = together(ranked[middle:])
        if found <= allowed:
            enough, measured = middle, found
        else:
            low = middle + 1
    if math.isnan(measured):
        measured = together(ranked[enough:])
    out = set(ranked[:enough])
    return Choice(tuple(name for name in names if name not in out), tuple(ranked[:enough]), harms, measured)
