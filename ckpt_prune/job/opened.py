"""The model that a job works on, if a stage puts another one in place of the stored model."""

from dataclasses import dataclass
from typing import Any

from ckpt_prune.model.model import Model
from ckpt_prune.recipe.recipe import Recipe


@dataclass(frozen=True)
class Opened:
    """The model that a job works on.

    Attributes:
        model: a view of the stored one, with its fingerprint.
        recipe: what is to be done with it: a share of the stored model's size is a number now.
        fact: what the stage has found, for `Prepared.facts`. Its `digest` goes into the job's.
    """

    model: Model
    recipe: Recipe
    fact: Any
