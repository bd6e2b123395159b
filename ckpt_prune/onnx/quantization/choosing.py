"""In how many bits each weight of a graph is stored: a budget over what rounding costs the outputs."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from ckpt_prune.budget.choices import BudgetError, Choices, save, spend
from ckpt_prune.budget.columns import ColumnLosses, list_sites, read_choices

Harm = Callable[[Collection[str]], float]
"""Returns the loss of the outputs if these weights are in few bits."""

MOST = 64
"""Measurements of weights, alone or several at once, whatever the size of the graph: of SmolLM2-135M's 211 weights so
many find a choice of 3 % more bytes than measuring each does, in a third of the time."""
CLOSE = 0.95
"""A choice that loses at least so much of what is allowed is not looked for again."""


@dataclass(frozen=True)
class Form:
    """A way to store a weight.

    Attributes:
        label: says which.
        cost: of it, in bytes.
        share: its loss, as a share of that of the first form of the weight, which is measured.
    """

    label: Any
    cost: int
    share: float = 1.0


Forms = Mapping[str, Sequence[Form]]
"""Name of a weight → its forms, in the graph's order; the first is the one in few bits that is measured."""


@dataclass(frozen=True)
class Choice:
    """How each weight is stored.

    Attributes:
        labels: of each weight's form, in the graph's order.
        more: names of those that are not in their first form, the most harmful by the byte first.
        alone: name → what the outputs lose if it alone is in its first form; of weights that were measured at once its
            share by bytes; empty if nothing was measured.
        at_once: name → how many weights it was measured with, itself included.
        together: what they lose with the choice, as measured; NaN if that was not.
        predicted: the sum of what each is predicted to lose; NaN if nothing was measured.
    """

    labels: dict[str, Any]
    more: tuple[str, ...] = ()
    alone: dict[str, float] = field(default_factory=dict)
    at_once: dict[str, int] = field(default_factory=dict)
    together: float = math.nan
    predicted: float = math.nan


@dataclass(frozen=True)
class ColumnChoice:
    """Columns that the MLPs of a model keep, chosen with the forms of its weights.

    Attributes:
        columns: of each block's MLP, in order; empty if all keep all.
        predicted: what the outputs are predicted to lose.
        by_pruning: part of it that fewer columns add.
        cost: of the weights, in bytes.
    """

    columns: tuple[int, ...]
    predicted: float
    by_pruning: float
    cost: float


@dataclass(frozen=True)
class Prices:
    """The loss of each weight alone in its first form, as in `Choice`."""

    forms: Forms
    alone: dict[str, float]
    at_once: dict[str, int]

    @property
    def _sites(self) -> list[Choices]:
        return [
            Choices.of((at, form.cost, form.share * self.alone[name]) for at, form in enumerate(own))
            for name, own in self.forms.items()
        ]

    def at_cost(self, limit: float) -> Choice:
        """Return what is predicted to lose least in so many bytes; BudgetError if nothing fits."""
        return self._choose(spend(sites := self._sites, limit), sites)

    def at_loss(self, limit: float) -> Choice:
        """Return what costs least and is predicted to lose at most so much; BudgetError if nothing does."""
        return self._choose(save(sites := self._sites, limit), sites)

    def with_columns(
        self,
        solve: Callable[[Sequence[Choices]], Sequence[int]],
        mlps: Mapping[int, Sequence[str]],
        columns: ColumnLosses,
        costs: Callable[[str, Fraction], Sequence[float]],
        rounding: float = 1.0,
        pruning: float = 1.0,
    ) -> ColumnChoice:
        """Return the columns that a budget takes with forms to match.

        Rounding a matrix of an MLP that keeps a share of its columns adds that share of what it adds to the whole one.

        Args:
            solve: returns the index of each site's choice, as `spend` or `save` under a bound.
            mlps: block → names of the weights of its MLP.
            columns: of blocks whose MLPs may keep fewer than they have, the full number among them.
            costs: of each form of a weight of which a share stays.
            rounding, pruning: what the outputs lose for each unit of the loss of weights, and of columns.
        """

        def forms_of(name: str, share: Fraction) -> list[tuple[int, float, float]]:
            part = float(share)
            price = rounding * part * self.alone[name]
            pairs = zip(self.forms[name], costs(name, share), strict=True)
            return [(at, cost, price * form.share) for at, (form, cost) in enumerate(pairs)]

        units = {block: max(by_width) for block, by_width in columns.items()}
        losses = {block: {kept: pruning * lost for kept, lost in own.items()} for block, own in columns.items()}
        sites = list_sites(self.forms, mlps, losses, units, forms_of)
        at = solve(sites)
        _, widths = read_choices(sites, at)
        kept = tuple(widths[block] for block in columns) if widths != units else ()
        taken = list(zip(sites, at, strict=True))
        predicted = sum(float(site.errors[index]) for site, index in taken)
        cost = sum(float(site.costs[index]) for site, index in taken)
        return ColumnChoice(kept, predicted, sum(losses[block][width] for block, width in widths.items()), cost)

    def _choose(self, at: Sequence[int], sites: Sequence[Choices]) -> Choice:
        taken = {name: site.labels[index] for name, site, index in zip(self.forms, sites, at, strict=True)}
        predicted = sum(float(site.errors[index]) for site, index in zip(sites, at, strict=True))
        return self.of(taken, predicted)

    def of(self, taken: Mapping[str, int], predicted: float = math.nan) -> Choice:
        """Return the choice of these forms."""
        density = {name: self.alone[name] / _saved(own) for name, own in self.forms.items()}
        more = sorted((name for name, at in taken.items() if at), key=lambda name: -density[name])
        labels = {name: own[taken[name]].label for name, own in self.forms.items()}
        return Choice(labels, tuple(more), self.alone, self.at_once, predicted=predicted)


def _saved(forms: Sequence[Form]) -> int:
    """Return the bytes that a weight's first form saves, beside the next one that loses less."""
    better = [form.cost for form in forms if form.share < forms[0].share]
    return max(min(better, default=0) - forms[0].cost, 1)


def price_weights(forms: Forms, alone: Harm, alike: Sequence[Sequence[str]] = (), most: int = MOST) -> Prices:
    """Measure what each weight loses in its first form, all others being as they were.

    If there are more weights than may be measured, those that are alike are first measured at once. Then the run that
    loses most is halved, and both parts are measured, as often as may be.

    Args:
        alone: measures a set of names.
        alike: all names, in runs of those that are used alike, each in the graph's order.
        most: measurements.
    """
    names = list(forms)
    groups: Sequence[Sequence[str]] = [[name] for name in names]
    if len(names) > most:
        groups = alike if 0 < len(alike) <= most else [names]
    found, at_once = dict[str, float](), dict[str, int]()
    for run, lost in _measure_runs(groups, alone, most):
        saved = sum(_saved(forms[name]) for name in run)
        found |= {name: lost * _saved(forms[name]) / saved for name in run}
        at_once |= dict.fromkeys(run, len(run))
    return Prices(forms, {name: found[name] for name in names}, at_once)


def choose_weights(
    forms: Forms, together: Callable[[Mapping[str, Any]], float], price: Callable[[], Prices], allowed: float
) -> Choice:
    """Choose the cheapest forms whose loss, measured together, is at most what is allowed.

    If the smallest forms of all weights lose too much together, each is priced, and the budget is solved for a
    predicted loss. Losses do not quite add up: what is asked of the prediction is corrected by what is measured, each
    time on the whole graph, and between two that are known it is halved.

    Args:
        together: measures labels of all weights.
        price: measures each alone (`price_weights`).
    """
    first = Choice({name: min(own, key=lambda form: form.cost).label for name, own in forms.items()})
    lost = together(first.labels)
    if lost <= allowed:
        return Choice(first.labels, together=lost)
    prices = price()
    best, limit, low, high = None, allowed, 0.0, math.inf
    seen = list[dict[str, Any]]()
    for _ in range(count_measurements(len(forms))[1] - 1):
        try:
            choice = prices.at_loss(limit)
        except BudgetError:
            break
        if choice.labels in seen:
            break
        seen.append(choice.labels)
        lost = together(choice.labels)
        if lost <= allowed:
            best, low = replace(choice, together=lost), limit
            if lost >= CLOSE * allowed:
                break
        else:
            high = limit
        limit *= allowed / max(lost, 1e-12)
        if not low < limit < high:
            limit = math.sqrt(max(low, 1e-12) * high) if math.isfinite(high) else 2 * low
    if best is not None:
        return best
    least = prices.of({name: min(range(len(own)), key=lambda at: own[at].share) for name, own in forms.items()})
    return replace(least, together=together(least.labels))


def count_measurements(weights: int, most: int = MOST) -> tuple[int, int]:
    """Return how many sets of weights are measured at most: as `alone`, and as `together`."""
    return min(weights, most), math.ceil(math.log2(max(weights, 1))) + 2


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
