"""Ranking of the directions of values (compensation/README.md, section 10)."""

from typing import NoReturn

from ckpt_prune.scoring.scores import Score


def _ranked_by_basis(*_: object) -> NoReturn:
    raise ValueError("directions are ranked when they are found (compensation.values)")


VALUE_SCORES: dict[str, Score] = {"principal": Score(_ranked_by_basis, needs_gram=True)}
"""A direction and its strength are one thing: there is no score without the basis."""
