"""What a recipe may say about a space, by what the space ends in: one class for each kind, one registry.

Recipes ask here. Nothing else in this room tells the kinds apart, and nothing at all compares the names of spaces.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from ckpt_prune.compensation.logit_methods import LOGIT_METHODS
from ckpt_prune.compensation.methods import COLUMN_METHODS, ROTARY_METHODS, MethodFacts
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.spaces import BESIDE, ENDS, Ends, SpaceName, recipe_space
from ckpt_prune.scoring.expert_scores import EXPERT_SCORES
from ckpt_prune.scoring.logit_scores import LOGIT_SCORES
from ckpt_prune.scoring.rotary_scores import ROTARY_SCORES
from ckpt_prune.scoring.scores import SCORES, Score
from ckpt_prune.scoring.unit_scores import UNIT_SCORES
from ckpt_prune.scoring.value_scores import VALUE_SCORES

CHOSEN = "auto"
"""Stands for the score that is chosen for each site."""
CANDIDATES: tuple[str, ...] = ("obs", "rcpu", "wanda-sp")
"""Scores that are tried out at every site (`stages.spaces.effects.gradients`). Of equals the first is taken."""


def _no_score(*_: object) -> NoReturn:
    raise ValueError(f"score {CHOSEN} stands for others")


@dataclass(frozen=True)
class SpaceSettings:
    """What a recipe says about one space.

    Attributes:
        score: name of the score that ranks its units.
        method: name of the compensation.
        target: the recipe's target.
        by_error: whether widths are found from predicted errors (allocation least-error).
        centred: whether the logits are fitted with keys less their mean over a sample.
    """

    score: str
    method: str
    target: str
    by_error: bool
    centred: bool = False


class SpaceKind(ABC):
    """What spaces of one kind have in common for recipes.

    Attributes:
        scores: scores that rank the units, by name.
        methods: compensations, by name.
        unrankable: why units of all blocks cannot be ranked in one list; None where they can.
        stock: whether any class of transformers can have fewer units.
        by_errors: whether the errors of every width can be told.
        candidates: scores that sites are tried out with.
    """

    scores: Mapping[str, Score]
    methods: Mapping[str, MethodFacts]
    unrankable: str | None = None
    stock: bool = True
    by_errors: bool = True
    candidates: tuple[str, ...] = CANDIDATES

    def needs_moments(self, wish: SpaceSettings) -> bool:
        """Whether the score or the compensation needs statistics."""
        return self.scores[wish.score].needs_moments or wish.method != "none"

    @abstractmethod
    def gram_for(self, wish: SpaceSettings) -> str | None:
        """What needs the Gram of the consumer's input, in words for a message; None where nothing does."""

    @abstractmethod
    def collects(self, wish: SpaceSettings) -> set[Collect]:
        """What statistics must hold for this space, beside the vectors of consumers' inputs."""

    def needs_taylor(self, wish: SpaceSettings) -> bool:
        """Whether the score is what gradients of the loss have told of the unpruned model."""
        return False

    @abstractmethod
    def measures_more(self, wish: SpaceSettings) -> bool:
        """Whether moments that are measured live must hold more than the least: Grams, or Grams of centred keys."""

    @abstractmethod
    def scores_columns(self, score: str) -> bool:
        """Whether a score is a sum over columns, which FLAP's rankings compare."""


class ColumnKind(SpaceKind):
    """Spaces that end in the columns of a projection."""

    scores: Mapping[str, Score] = {**SCORES, **UNIT_SCORES, CHOSEN: Score(_no_score, needs_gram=True)}
    methods = COLUMN_METHODS

    def gram_for(self, wish: SpaceSettings) -> str | None:
        """The compensation, the score, the allocation or the target, the first that needs a Gram."""
        if self.methods[wish.method].needs_gram:
            return f"compensation {wish.method}"
        if self.scores[wish.score].needs_gram:
            return f"score {wish.score}"
        if wish.by_error:
            return "allocation least-error"
        return f"target {wish.target}" if wish.target == "drift" else None

    def collects(self, wish: SpaceSettings) -> set[Collect]:
        """The Gram of the consumer's input, where something needs it, and what gradients tell of units."""
        found: set[Collect] = set() if self.gram_for(wish) is None else {"gram"}
        return found | {"taylor"} if self.needs_taylor(wish) else found

    def needs_taylor(self, wish: SpaceSettings) -> bool:
        """Whether the score is what gradients of the loss have told of the unpruned model."""
        return self.scores[wish.score].needs_taylor

    def measures_more(self, wish: SpaceSettings) -> bool:
        """Grams, where something needs them."""
        return self.gram_for(wish) is not None

    def scores_columns(self, score: str) -> bool:
        """Every score but those of whole units."""
        return score in SCORES


class LogitKind(SpaceKind):
    """Spaces that end in the attention logits: the dimensions that q and k share."""

    scores: Mapping[str, Score] = LOGIT_SCORES
    methods: Mapping[str, MethodFacts] = LOGIT_METHODS
    unrankable = "q and k keep the same number of dimensions in every head and layer: allocation: uniform"
    stock = False

    def gram_for(self, wish: SpaceSettings) -> str | None:
        """Nothing: the space has no consumer."""
        return None

    def collects(self, wish: SpaceSettings) -> set[Collect]:
        """Moments of queries and keys, for the score, the compensation or the error of every width."""
        found: set[Collect] = {"logits"} if self.needs_moments(wish) or wish.by_error else set()
        return found | {"centred"} if wish.centred else found

    def measures_more(self, wish: SpaceSettings) -> bool:
        """Grams of centred keys, where logits are fitted with these."""
        return wish.centred

    def scores_columns(self, score: str) -> bool:
        """None: dimensions are scored as they are."""
        return False


class RotaryKind(LogitKind):
    """Rotary pairs of queries and keys."""

    scores: Mapping[str, Score] = ROTARY_SCORES
    methods = ROTARY_METHODS
    unrankable = "every KV head keeps as many rotary pairs as the next: allocation: uniform or least-error"

    def collects(self, wish: SpaceSettings) -> set[Collect]:
        """Moments of rotary pairs, for the score, the compensation or the error of every width."""
        return {"rotary"} if self.needs_moments(wish) or wish.by_error else set()

    def measures_more(self, wish: SpaceSettings) -> bool:
        """Never."""
        return False


class BesideKind(ColumnKind):
    """Columns that stand side by side in runs, as many kept in each: query heads in KV groups."""

    # Gradients of the loss are gathered for whole KV groups.
    scores: Mapping[str, Score] = {name: score for name, score in ColumnKind.scores.items() if not score.needs_taylor}
    unrankable = "every KV group keeps as many query heads as the next: allocation: uniform or least-error"


class ExpertKind(SpaceKind):
    """Whole experts of a block."""

    scores: Mapping[str, Score] = EXPERT_SCORES
    methods: Mapping[str, MethodFacts] = {name: COLUMN_METHODS[name] for name in ("none", "ridge")}
    unrankable = "every block keeps as many experts as the next: allocation: uniform"
    by_errors = False

    def gram_for(self, wish: SpaceSettings) -> str | None:
        """Nothing."""
        return None

    def collects(self, wish: SpaceSettings) -> set[Collect]:
        """Nothing beside what is always collected."""
        return set()

    def measures_more(self, wish: SpaceSettings) -> bool:
        """Nothing."""
        return False

    def scores_columns(self, score: str) -> bool:
        """None: experts are scored as wholes."""
        return False


class ValueKind(ColumnKind):
    """Directions of values, as many in every KV head."""

    scores: Mapping[str, Score] = VALUE_SCORES
    unrankable = "every KV head keeps as many value directions as the next: allocation: uniform or least-error"
    stock = False
    candidates = tuple(VALUE_SCORES)


KINDS: dict[Ends, SpaceKind] = {
    "columns": ColumnKind(),
    "logits": LogitKind(),
    "rotary": RotaryKind(),
    "experts": ExpertKind(),
    "values": ValueKind(),
}
"""What a space ends in → what a recipe may say about it."""
_BESIDE = BesideKind()
SCORE_NAMES: tuple[str, ...] = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.scores))
"""Every score that some space has."""
TRAITS: dict[str, MethodFacts] = {name: traits for kind in KINDS.values() for name, traits in kind.methods.items()}
"""Every compensation that some space has. Kinds that share a name agree on its traits, wording aside."""

FITS_LOGITS: tuple[str, ...] = tuple(name for name in LOGIT_METHODS if name != "none")
"""Compensations that are fitted to attention logits."""


def kind_of(space: SpaceName) -> SpaceKind:
    """The kind of a space."""
    known = recipe_space(space)
    return _BESIDE if known in BESIDE and ENDS[known] == "columns" else KINDS[ENDS[known]]
