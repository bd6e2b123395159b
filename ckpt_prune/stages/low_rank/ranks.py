"""Which rank every linear module of a model gets: one share of its parameters, or the shares of least error in all."""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt_prune.compensation.factoring import rank_for_ratio, saves_parameters

L = TypeVar("L", bound=Hashable)


@dataclass(frozen=True)
class Thin:
    """A linear module that may become two.

    Attributes:
        rows, columns: of its weight.
        energies: of every direction of its output, descending (`factoring.direction_energies`); empty if ranks are not
            chosen by them.
    """

    rows: int
    columns: int
    energies: Sequence[float] = ()


def round_rank(linear: Thin, rank: int, multiple_of: int) -> int | None:
    """Round a rank up to a multiple; None if its factors would save nothing, so that the module stays."""
    up = -(-rank // multiple_of) * multiple_of
    return up if saves_parameters(linear.rows, linear.columns, up) else None


def uniform_ranks(linears: Mapping[L, Thin], ratio: float, multiple_of: int = 1) -> dict[L, int]:
    """Return the published ranks: every weight loses the same share of its parameters (`factoring.rank_for_ratio`).

    Returns:
        Ranks of those that become two.
    """
    ranks = {
        each: round_rank(linear, rank_for_ratio(linear.rows, linear.columns, ratio), multiple_of)
        for each, linear in linears.items()
    }
    return {each: rank for each, rank in ranks.items() if rank is not None}


def ranks_by_energy(linears: Mapping[L, Thin], ratio: float, multiple_of: int = 1) -> dict[L, int]:
    """Return the ranks of least error for as many parameters as one ratio leaves.

    The error of a linear is Σ_{i ≥ r} e_i / Σ e_i, convex in r, and every rank costs d_out + d_in parameters. So taking
    directions in the order of what they save for a parameter is optimal up to the last one. A linear whose factors
    would have as many parameters as its weight stays whole.

    Returns:
        Ranks of those that become two; at least 1.
    """
    room = sum(
        rank_for_ratio(linear.rows, linear.columns, ratio) * (linear.rows + linear.columns)
        for linear in linears.values()
    )
    keys = list(linears)
    rank_of = dict.fromkeys(keys, 1)
    room -= sum(linear.rows + linear.columns for linear in linears.values())
    energies = [sum(linear.energies) or 1.0 for linear in linears.values()]
    queue: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        """Enter the next direction of a module, if it saves parameters."""
        linear = linears[keys[index]]
        rank = rank_of[keys[index]]
        if rank < len(linear.energies) and saves_parameters(linear.rows, linear.columns, rank):
            heapq.heappush(queue, (-linear.energies[rank] / energies[index] / (linear.rows + linear.columns), index))

    for index in range(len(keys)):
        offer(index)
    while queue:
        _, index = heapq.heappop(queue)
        linear = linears[keys[index]]
        rank = rank_of[keys[index]] + 1
        cost = linear.rows + linear.columns
        if not saves_parameters(linear.rows, linear.columns, rank):  # from here on the weight itself is smaller
            cost = linear.rows * linear.columns - (rank - 1) * cost
        if cost <= room:
            room -= cost
            rank_of[keys[index]] = rank
            offer(index)
    ranks = {each: round_rank(linear, rank_of[each], multiple_of) for each, linear in linears.items()}
    return {each: rank for each, rank in ranks.items() if rank is not None}
