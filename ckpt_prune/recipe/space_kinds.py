"""The keys that a recipe may have for a space, by the kind of the space (`model.spaces.KIND_OF_SPACE`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from ckpt_prune.compensation.logit_methods import LOGIT_METHODS
from ckpt_prune.compensation.methods import COLUMN_METHODS, ROTARY_METHODS, MethodFacts
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.spaces import BESIDE, KIND_OF_SPACE, KindOfSpace, SpaceName, recipe_space
from ckpt_prune.scoring.expert_scores import EXPERT_SCORES
from ckpt_prune.scoring.logit_scores import LOGIT_SCORES
from ckpt_prune.scoring.rotary_scores import ROTARY_SCORES
from ckpt_prune.scoring.scores import SCORES, Score
from ckpt_prune.scoring.unit_scores import UNIT_SCORES
from ckpt_prune.scoring.value_scores import VALUE_SCORES

CHOSEN = "auto"
"""In place of a score: one of the candidates is chosen for each site."""
CANDIDATES: tuple[str, ...] = ("obs", "rcpu", "wanda-sp")
"""Scores that every site is tried with (`stages.spaces.effects.gradients`). Of equally good ones the first is taken."""


def _no_score(*_: object) -> NoReturn:
    raise ValueError(f"score {CHOSEN} stands for others")


class SpaceSettings(NamedTuple):
    """The settings of a recipe for one space.

    Attributes:
        score: name of the score that ranks its units.
        method: name of the compensation.
        target: of the recipe.
        by_error: True if predicted errors decide widths (allocation least-error).
        centred: True if logits are fitted with keys less their mean over a sample.
    """

    score: str
    method: str
    target: str
    by_error: bool
    centred: bool = False


@dataclass(frozen=True)
class SpaceKind:
    """Facts that recipes need about all spaces of one kind.

    Attributes:
        scores: scores that rank the units, by name.
        methods: compensations, by name.
        moments: what is collected for it if its score, compensation or allocation needs that; None if nothing is.
        unrankable: why units of all blocks cannot be ranked in one list; None if they can.
        stock: True if some class of transformers can have fewer units.
        by_errors: True if the error of every width is known.
        candidates: scores that sites are tried with.
    """

    scores: Mapping[str, Score]
    methods: Mapping[str, MethodFacts]
    moments: Collect | None
    unrankable: str | None = None
    stock: bool = True
    by_errors: bool = True
    candidates: tuple[str, ...] = CANDIDATES

    def needs_moments(self, settings: SpaceSettings) -> bool:
        return self.scores[settings.score].needs_moments or settings.method != "none"

    def needs_taylor(self, settings: SpaceSettings) -> bool:
        """Return True if the score comes from gradients of the unpruned model's loss."""
        return self.scores[settings.score].needs_taylor

    def gram_for(self, settings: SpaceSettings) -> str | None:
        """Return what needs the Gram of the consumer's input, in words for a message; None if nothing does."""
        if self.moments != "gram":
            return None
        if self.methods[settings.method].needs_gram:
            return f"compensation {settings.method}"
        if self.scores[settings.score].needs_gram:
            return f"score {settings.score}"
        if settings.by_error:
            return "allocation least-error"
        return "target drift" if settings.target == "drift" else None

    def collects(self, settings: SpaceSettings) -> set[Collect]:
        """Return what statistics must hold for the space, besides vectors of the consumers' inputs."""
        needed = settings.by_error or self.needs_moments(settings)
        if self.moments == "gram":
            needed = self.gram_for(settings) is not None
        collected: set[Collect] = {self.moments} if needed and self.moments is not None else set()
        collected |= {"taylor"} if self.needs_taylor(settings) else set()
        return collected | ({"centred"} if settings.centred else set())

    def measures_more(self, settings: SpaceSettings) -> bool:
        """Return True if live moments must hold more than the least: Grams, or Grams of centred keys."""
        return settings.centred or self.gram_for(settings) is not None

    def scores_columns(self, score: str) -> bool:
        """Return True if a score is a sum over columns, which FLAP's rankings compare."""
        return self.moments == "gram" and score in SCORES


_COLUMNS = SpaceKind(
    {**SCORES, **UNIT_SCORES, CHOSEN: Score(_no_score, needs_gram=True)}, COLUMN_METHODS, moments="gram"
)
KINDS: dict[KindOfSpace, SpaceKind] = {
    "columns": _COLUMNS,
    "logits": SpaceKind(
        LOGIT_SCORES,
        LOGIT_METHODS,
        moments="logits",
        unrankable="q and k keep the same number of dimensions in every head and layer: allocation: uniform",
        stock=False,
    ),
    "rotary": SpaceKind(
        ROTARY_SCORES,
        ROTARY_METHODS,
        moments="rotary",
        unrankable="every KV head keeps as many rotary pairs as the next: allocation: uniform or least-error",
        stock=False,
    ),
    "experts": SpaceKind(
        EXPERT_SCORES,
        {name: COLUMN_METHODS[name] for name in ("none", "ridge")},
        moments=None,
        unrankable="every block keeps as many experts as the next: allocation: uniform",
        by_errors=False,
    ),
    "values": SpaceKind(
        VALUE_SCORES,
        COLUMN_METHODS,
        moments="gram",
        unrankable="every KV head keeps as many value directions as the next: allocation: uniform or least-error",
        stock=False,
        candidates=tuple(VALUE_SCORES),
    ),
    "pooling": _COLUMNS,
}
"""The facts about spaces of each kind."""
_BESIDE = replace(
    _COLUMNS,
    # Gradients of the loss are gathered for whole KV groups.
    scores={name: score for name, score in _COLUMNS.scores.items() if not score.needs_taylor},
    unrankable="every KV group keeps as many query heads as the next: allocation: uniform or least-error",
)
"""Columns in runs side by side, of which as many stay in each: query heads in KV groups."""

SCORE_NAMES: tuple[str, ...] = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.scores))
FACTS: dict[str, MethodFacts] = {name: facts for kind in KINDS.values() for name, facts in kind.methods.items()}
"""Every compensation that some space has. Kinds that share a name agree on all but its wording."""
FITS_LOGITS: tuple[str, ...] = tuple(name for name in LOGIT_METHODS if name != "none")
"""Compensations that are fitted to attention logits."""


def kind_of(space: SpaceName) -> SpaceKind:
    space_name = recipe_space(space)
    return (
        _BESIDE if space_name in BESIDE and KIND_OF_SPACE[space_name] == "columns" else KINDS[KIND_OF_SPACE[space_name]]
    )
