"""The keys of `vocabulary`: tokens go from embedding, head and tokenizer."""

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.ratios import parse_percentage
from ckpt_prune.common.similar_names import did_you_mean
from ckpt_prune.recipe.recipe import Recipe, StageKeys
from ckpt_prune.recipe.sizes import Size
from ckpt_prune.stages.vocabulary.records import unpack_rows
from ckpt_prune.stages.vocabulary.scripts import SCRIPTS

COST = 0.002
"""Share by which bits per byte may grow where nothing says how many tokens stay."""
VOCABULARY_ALONE = "vocabulary"
"""The shipped recipe that does nothing else."""
_AUTO, _TEXT, _FIRST = "auto", "text", "first:"
FORMS = "auto, 50%, 24000, a script such as latin, first:24000, text, or a file with one token a line"


def _read_share(value: Any) -> Any:
    share = parse_percentage(value) if isinstance(value, str) else None
    return value if share is None else share


def _check_size(value: Any) -> Any:
    """Check a number of tokens, or a share of them in percent."""
    if isinstance(value, str) and parse_percentage(value) is not None:
        if not 0 < parse_percentage(value) <= 1:  # type: ignore[operator]
            raise ValueError(f"{value} is not a share of the tokens: above 0% and at most 100%")
        return value
    if isinstance(value, bool) or not isinstance(value, int | None) or (value is not None and value < 1):
        raise ValueError(f"{value!r} is not a number of tokens, nor a share of them such as 50%")
    return value


class Vocabulary(StageKeys):
    """Tokens go: those of other scripts, the rare ones, or those that a text does without."""

    key = "vocabulary"
    goal = "stock"
    summary = "Tokens that go from embedding, head and tokenizer."
    unplannable = (
        "makes the vocabulary smaller, which a plan does not cover: `ckpt-prune prune --dry-run` shows what stays and "
        "what it costs"
    )
    doing = "written"
    bar = "copying"

    scripts: list[str] = Field(
        default_factory=list,
        description="Keep tokens of these writing systems (latin, cyrillic, han …), with digits, signs and emoji, "
        "which belong to all.",
    )
    first: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Keep the first tokens by merges or scores, so many of those that scripts leave."
    )
    text: bool = Field(False, description="Keep every token that the text of --text uses, whatever else goes.")
    tokens: str | None = Field(None, description="Keep the tokens in this file, one a line, whatever else goes.")
    size: Annotated[str | int | None, BeforeValidator(_check_size)] = Field(
        None, description="How many tokens stay: a number, or a share such as 50%. Those go that cost least."
    )
    cost: Annotated[float, BeforeValidator(_read_share), Field(ge=0, lt=1)] | None = Field(
        None,
        description="The smallest vocabulary that costs at most this share of bits per byte, predicted and then "
        "measured on held-out text; of a model without a language model's head, of tokens. Default: 0.2%, if no other "
        "key says what stays.",
    )
    multiple_of: int = Field(64, ge=1, description="As many rows stay as are a multiple of this.")
    kept: str | None = Field(
        None,
        description="Keep these rows of the embedding and no others, as reports write them and `frontier` does in "
        "recipes: nothing is counted or measured then.",
    )

    @field_validator("kept")
    @classmethod
    def _check_kept(cls, value: str | None) -> str | None:
        if value is not None:
            unpack_rows(value)
        return value

    @field_validator("scripts")
    @classmethod
    def _check_scripts(cls, value: list[str]) -> list[str]:
        for script in value:
            if script not in SCRIPTS:
                raise ValueError(
                    f"unknown script {script!r}: {did_you_mean(script, SCRIPTS)}known: {', '.join(SCRIPTS)}"
                )
        return value

    @property
    def names_tokens(self) -> bool:
        """Whether a key other than size and cost says which tokens stay."""
        return bool(self.scripts or self.first or self.text or self.tokens)

    @property
    def most_cost(self) -> float | None:
        """The share of bits per byte that may be lost; None if that does not decide."""
        if self.size is not None or self.kept is not None:
            return None
        return self.cost if self.cost is not None or self.names_tokens else COST

    def count(self, tokens: int) -> int | None:
        """Return how many of some tokens stay; None if that is not said."""
        if isinstance(self.size, str):
            return Size(share=Fraction(parse_percentage(self.size) or 0).limit_denominator(10**6)).of(tokens)
        return self.size

    def check_recipe(self, recipe: Recipe) -> None:
        if self.size is not None and self.cost is not None:
            raise ValueError("vocabulary.size and vocabulary.cost both say how many tokens stay: leave one out")
        if self.kept is not None and (self.names_tokens or self.size is not None or self.cost is not None):
            raise ValueError("vocabulary.kept says which tokens stay: leave other keys of vocabulary out")
        alone = all(stage is self or not stage.prunes for stage in recipe.stages)
        if alone and recipe.ratio != Recipe.model_fields["ratio"].default:
            raise ValueError("ratio says nothing of tokens: say vocabulary.size, or --vocabulary 50%")

    def leaves_experts(self, recipe: Recipe) -> bool:
        return True

    def needs_samples(self, recipe: Recipe) -> bool:
        return self.text or self.most_cost is not None

    def needs_text(self, recipe: Recipe) -> bool:
        return True


def vocabulary_changes(value: str | None) -> tuple[str, ...]:
    """Return what `--vocabulary` changes in a recipe, as overrides. UserError for a part that means nothing."""
    if value is None:
        return ()
    keys: dict[str, str] = {}
    scripts = []
    for part in (each.strip() for each in value.split(",")):
        number = part.replace("_", "")
        if part.lower() in SCRIPTS:
            scripts.append(part.lower())
        elif part == _TEXT:
            keys["text"] = "true"
        elif part.startswith(_FIRST) and part.removeprefix(_FIRST).isdecimal():
            keys["first"] = part.removeprefix(_FIRST)
        elif number.isdecimal() or parse_percentage(part) is not None:
            try:
                _check_size(int(number) if number.isdecimal() else part)
            except ValueError as error:
                raise UserError(f"--vocabulary {value}: {error}") from None
            keys["size"] = number if number.isdecimal() else f'"{part}"'
        elif Path(part).is_file():
            keys["tokens"] = f'"{part}"'
        elif part != _AUTO:
            raise UserError(f"--vocabulary {value}: {part!r} is none of these: {FORMS}{_meant(part)}")
    keys |= {"scripts": f"[{', '.join(scripts)}]"} if scripts else {}
    return ("vocabulary={}", *(f"vocabulary.{key}={each}" for key, each in keys.items()))


def _meant(part: str) -> str:
    meant = did_you_mean(part.lower(), SCRIPTS).strip()
    return f"; {meant}" if meant else ""
