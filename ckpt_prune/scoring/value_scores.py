"""How directions of values are ranked (compensation/README.md, section 10)."""

from typing import NoReturn

from ckpt_prune.scoring.unit_scores import Score


def _by_the_turn(*_: object) -> NoReturn:
    raise ValueError("what directions carry is found with them (compensation.values)")


VALUE_SCORES: dict[str, Score] = {"principal": Score(_by_the_turn)}
"""Scores by name. A direction and what it carries are one thing: there is no score without the basis."""
