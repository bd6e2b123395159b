"""Sites whose choices are forms of matrices, and of an MLP also how many of its columns stay."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ckpt_prune.budget.choices import Choices

ColumnLosses = Mapping[int, Mapping[int, float]]
"""Block → columns that its MLP may keep → loss that it adds that the others go."""
FormsOf = Callable[[str, Fraction], Iterable[tuple[Any, float, float]]]
"""Name of a matrix, share of it that stays → its forms: label, cost and error of each."""
_WHOLE = Fraction(1)
_Choice = tuple[tuple[int | None, int, dict[str, Any]], float, float]
"""Block and its columns, if it is an MLP, and forms by name; their cost; what they add."""


def list_sites(
    names: Collection[str],
    mlps: Mapping[int, Sequence[str]],
    columns: ColumnLosses,
    units: Mapping[int, int],
    forms_of: FormsOf,
) -> list[Choices]:
    """Return a site for each matrix, and one for each MLP that may keep fewer columns, with all its matrices.

    A label is the columns of a block, if that is an MLP's, and the forms of its matrices by name (`read_choices`).

    Args:
        names: of all matrices.
        mlps: block → names of the matrices of its MLP.
        columns: of these blocks.
        units: block → columns that its MLP has.
        forms_of: a matrix of an MLP that keeps a share of its columns is asked for with that share.
    """
    of_mlps = {name for block in columns for name in mlps[block]}
    sites = [Choices.of(_combine([name], _WHOLE, forms_of)) for name in names if name not in of_mlps]
    for block, by_width in columns.items():
        several: list[_Choice] = []
        for width, lost in by_width.items():
            of_width = _combine(mlps[block], Fraction(width, units[block]), forms_of, lost)
            several += [((block, width, forms), cost, error) for (_, _, forms), cost, error in of_width]
        sites.append(Choices.of(several))
    return sites


def _combine(names: Sequence[str], share: Fraction, forms_of: FormsOf, lost: float = 0.0) -> list[_Choice]:
    """Return forms of several matrices, without those that others beat at their cost."""
    choices: list[_Choice] = [((None, 0, {}), 0.0, lost)]
    for name in names:
        forms = list(forms_of(name, share))
        both = Choices.of(
            ((None, 0, taken | {name: form}), cost + size, error + loss)
            for (_, _, taken), cost, error in choices
            for form, size, loss in forms
        )
        choices = list(zip(both.labels, both.costs.tolist(), both.errors.tolist(), strict=True))
    return choices


def read_choices(sites: Sequence[Choices], at: Sequence[int]) -> tuple[dict[str, Any], dict[int, int]]:
    """Return the form of each matrix, and the columns that the MLP of each block keeps, of what a budget took."""
    forms: dict[str, Any] = {}
    widths: dict[int, int] = {}
    for choices, index in zip(sites, at, strict=True):
        block, width, taken = choices.labels[index]
        forms |= taken
        if block is not None:
            widths[block] = width
    return forms, widths
