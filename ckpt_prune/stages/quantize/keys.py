"""The keys of `quantize`: weights of few bits. The command `quantize` runs it alone."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from ckpt_prune.recipe.recipe import Recipe, StageKeys
from ckpt_prune.stages.quantize.scheme import GROUPS, Format, PackingScheme, Rounding


class Quantize(StageKeys):
    """Rounding of the linear weights of the blocks, behind whatever prunes them."""

    key = "quantize"
    summary = "Store the linear weights of the blocks in 8 or 4 bits."
    asks = frozenset({"few bits"})
    prunes = False
    measures_itself = True
    later: ClassVar[Mapping[str, Any]] = {"types": {}}
    doing = "quantised"
    bar = "quantising"
    option: ClassVar[str] = "quantize.group_size="
    excludes: ClassVar[Mapping[str, str]] = {
        other: f"{other} and quantize do not go in one recipe: prune first, then `ckpt-prune quantize OUT --text FILE`"
        for other in ("rotation", "hidden", "low_rank", "recovery")
    }

    format: Format = Field(description="Type that weights are stored in: int8 or int4 (compressed-tensors).")
    group_size: str | None = Field(
        None,
        description="Columns that share a scale: 32, 64 or 128, or channel for whole rows. Default: channel for int8; "
        "for int4 the largest that divides every weight.",
    )
    rounding: Rounding = Field(
        "gptq",
        description="gptq: later columns make up for earlier ones, by the inputs that reach them behind the blocks "
        "that are pruned and rounded already; nearest: to the nearest number, which needs no data.",
    )

    types: Mapping[str, str] = Field(
        default_factory=dict,
        description="Expression → how weights are stored whose names it is found in, such as mlp.down_proj: "
        "int8:channel or o_proj: int4:32; dense for those that stay. The first that is found counts. Weights that read "
        "one input must be stored alike, since vLLM joins them.",
    )

    @field_validator("types")
    @classmethod
    def _check_types(cls, types: Mapping[str, str]) -> Mapping[str, str]:
        for pattern, name in types.items():
            PackingScheme.parse(name)
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern} is no regular expression ({error})") from error
        return types

    @field_validator("group_size", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.size is not None and recipe.size.kind == "bytes":
            raise ValueError("size.bytes counts weights as they are before quantize: say size.params")
        if any(stage.needs_own_code(recipe) for stage in recipe.stages):
            raise ValueError(
                "runtimes of quantised weights run no code of our own: say widths: uniform, or leave out quantize"
            )

    def needs_moments(self, recipe: Recipe) -> bool:
        return self.rounding == "gptq"

    def needs_samples(self, recipe: Recipe) -> bool:
        return self.rounding == "gptq"

    @property
    def column_group(self) -> int:
        """Columns that a group has at least; 1 if whole rows share a scale."""
        if self.group_size is None:
            return 1 if self.format == "int8" else GROUPS[-1]
        return int(self.group_size) if self.group_size in map(str, GROUPS) else 1


class QuantizeAlone(Quantize):
    """The stage as the command `quantize` runs it: statistics of the model may have been measured before."""

    prunes = True
    measures_itself = False
    option: ClassVar[str] = "--group-size "

    def needs_samples(self, recipe: Recipe) -> bool:
        return False

    def measures_prefix(self, recipe: Recipe) -> bool:
        return self.rounding == "gptq"


class QuantizeRecipe(Recipe):
    """The recipe of the command `quantize`: one stage."""

    kinds: ClassVar[tuple[type[StageKeys], ...]] = (QuantizeAlone,)

    quantize: QuantizeAlone


def quantize_recipe(
    format: Format, group_size: str | None, rounding: Rounding, types: Mapping[str, str] | None = None
) -> QuantizeRecipe:
    """Return the recipe that stores a model's weights in a format; samples are measured behind rounded blocks.

    Args:
        types: of weights that are stored in another one.
    """
    stage = {"format": format, "group_size": group_size, "rounding": rounding, "types": dict(types or {})}
    return QuantizeRecipe.model_validate({"version": 1, "name": "quantize", "target": "sequential", "quantize": stage})
