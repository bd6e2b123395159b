"""Recipes: the YAML that a team shares, once it is read. Unknown keys are refused."""

import hashlib
import json
from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from ckpt_prune.common.ratios import Ratio
from ckpt_prune.job.block_range import blocks_of, checked_range
from ckpt_prune.job.fields import Strict
from ckpt_prune.job.names import Goal
from ckpt_prune.job.sizes import TargetSize
from ckpt_prune.job.space_kinds import CANDIDATES, CHOSEN, SpaceSettings, kind_of
from ckpt_prune.job.space_recipe import SpaceRecipe
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.family import Family
from ckpt_prune.model.spaces import SpaceName, recipe_space


class StageKeys(Strict):
    """One key of a recipe: its fields are the keys below it. `job.stage.Stage` adds the work.

    A recipe that lacks the key lacks the stage: no code asks a recipe for a key that it may not have, but goes through
    `Recipe.stages`. So a new stage changes no code but its own.

    Attributes:
        key: in a recipe and in a report.
        summary: what it does, in a line, for the list of keys.
        excludes: key of a stage that it does not go with → the message that refuses both.
        later: keys that it has gained, and their defaults. A recipe that says nothing else keeps its digest.
        prunes: whether it takes something from the model, so that a recipe may consist of it.
        doing: what it does to a block, as a participle.
        goal: the group of `recipe list` that its recipes stand in; None if it decides nothing.
        changes_model: whether later stages see another model: fewer blocks, or a narrower residual stream.
    """

    key: ClassVar[str]
    summary: ClassVar[str]
    excludes: ClassVar[Mapping[str, str]] = {}
    later: ClassVar[Mapping[str, Any]] = {}
    prunes: ClassVar[bool] = True
    doing: ClassVar[str] = "pruned"
    goal: ClassVar[Goal | None] = None
    changes_model: ClassVar[bool] = False

    # ---- the recipe ------------------------------------------------------------------------------------------

    @classmethod
    def fill_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Add what the stage's keys say of others, to the values of a recipe that are not checked yet."""
        return values

    @classmethod
    def pick(cls, recipe: "Recipe") -> "StageKeys | None":
        """Return the stage of a recipe, if it has it."""
        stage: StageKeys | None = getattr(recipe, cls.key)
        return stage

    def check_recipe(self, recipe: "Recipe") -> None:
        """Refuse keys of the recipe that do not go with this stage.

        Raises:
            ValueError: the message names the keys.
        """

    def applies(self, recipe: "Recipe") -> bool:
        """Return True if the stage is meant for the size that the recipe asks for."""
        return True

    def at_one_ratio(self) -> "StageKeys":
        """Return the stage that takes as much from every block."""
        return self

    # ---- what it needs measured --------------------------------------------------------------------------------

    def needs_moments(self, recipe: "Recipe") -> bool:
        """Return True if it needs statistics."""
        return False

    def needs_folds(self, recipe: "Recipe") -> bool:
        """Return True if something is chosen on held-out folds."""
        return False

    def collects(self, recipe: "Recipe") -> set[Collect]:
        """Return what statistics must hold beside the vectors of consumers' inputs."""
        return set()

    def measures_dense(self, recipe: "Recipe") -> bool:
        """Return True if the unpruned model is measured first even if blocks are measured behind pruned ones."""
        return False

    def measures_prefix(self, recipe: "Recipe") -> bool:
        """Return True if something is measured behind the pruned blocks before it, if samples are given."""
        return False

    def decides_widths(self, recipe: "Recipe") -> bool:
        """Return True if what is measured decides how much each block, or each linear module, loses."""
        return False

    def needs_samples(self, recipe: "Recipe") -> bool:
        """Return True if it runs the model itself, so that statistics are not enough."""
        return False

    def needs_text(self, recipe: "Recipe") -> bool:
        """Return True if it is for language models alone."""
        return False

    def needs_own_code(self, recipe: "Recipe") -> bool:
        """Return True if no class of transformers can hold its output."""
        return False

    def alone(self, recipe: "Recipe") -> str | None:
        """Return what one process has to do by itself, in words that follow "recipe NAME"; None if several can."""
        return None


AnyStage = TypeVar("AnyStage", bound=StageKeys)


class Recipe(Strict):
    """A recipe: the keys that stages share, and the keys of spaces. `stages.FullRecipe` adds one key for each stage.

    Attributes:
        kinds: all stages that a recipe can have, in the order in which they work.
        full: the class with a key for every stage; set where stages are listed.
    """

    kinds: ClassVar[tuple[type[StageKeys], ...]] = ()
    full: ClassVar[type["Recipe"]]

    version: Literal[1] = Field(description="Version of the recipe format.")
    name: str = Field(min_length=1, description="Name in tables and in the output's ckpt_prune.json.")
    summary: str = Field("", description="One line for `recipe list`.")
    source: str = Field("", description="Paper and equations.")
    goal: Goal | None = Field(
        None,
        description="The group of `recipe list` that it stands in. Default: recovery or zeros, where there is recovery "
        "or a mask, else paper.",
    )
    time: float | None = Field(
        None, gt=0, description="What pruning takes, as a multiple of recipe ridge (tools/time_recipes.py)."
    )
    ratio: Ratio = Field(
        0.2, ge=0, lt=1, description="Share of units to drop in every space, or of weights that a mask zeroes."
    )
    target: Literal["dense", "sequential", "drift"] = Field(
        "dense",
        description="dense: moments of the unpruned model; sequential: measured block by block on the pruned prefix; "
        "drift: the same, and outputs are fitted to what the residual stream lacks of the dense model's "
        "(the last two need text or images; given statistics instead, the dense cache is used).",
    )
    true_sequential: bool = Field(
        True,
        description="With target: sequential or drift, measure again inside a block after each space (RCPU's Algorithm "
        "1); false: once per block, as the released code of Wanda and RCPU does.",
    )
    size: TargetSize | None = Field(
        None, description="Size to reach, in place of a ratio: params, bytes, flops or latency, as in {params: 5.0B}."
    )
    allocation: Literal[
        "uniform", "across-layers", "across-layers-and-spaces", "across-layers-and-spaces-code", "least-error"
    ] = Field(
        "uniform",
        description="uniform: same ratio everywhere; across-layers and across-layers-and-spaces: FLAP's AL-MM and "
        "AL-AM; across-layers-and-spaces-code: AL-AM as its released code cuts and weighs; least-error: the widths of "
        "the least predicted error for the size that the ratio or size says.",
    )
    weigh_by: Literal["effect", "energy"] | None = Field(
        None,
        description="How allocation least-error compares the errors of sites. effect: by what they do to the model's "
        "own output (Fisher metric); energy: as shares of each output's energy. Default: effect.",
    )
    widths: Literal["uniform", "per_layer"] = Field(
        "uniform", description="per_layer: blocks may differ in width; the output then carries remote code."
    )
    layers: str | None = Field(
        None,
        description="Prune blocks a to b - 1 only, as A:B, in numbers of blocks or shares of the depth (12.5%:93.75%); "
        "either may be left out. The others stay whole, so it goes with widths: per_layer.",
    )
    container: str = Field(
        "auto",
        description="auto: a stock class, or remote code where blocks differ in width; any: a stock class, or remote "
        "code where none fits; remote: remote code; padded: a stock class, with zeros where it has no narrower shape, "
        "which saves nothing there; or a model_type to force.",
    )
    spaces: dict[SpaceName, SpaceRecipe] = Field(
        default_factory=dict, description="Spaces to prune; others stay whole."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        for kind in cls.kinds if isinstance(values, dict) else ():
            values = kind.fill_in(values)
        return values

    @field_validator("layers")
    @classmethod
    def _check_range(cls, value: str | None) -> str | None:
        return checked_range(value)

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if self.kinds and not any(stage.prunes for stage in self.stages):
            keys = ", ".join(kind.key for kind in self.kinds if kind.prunes)
            raise ValueError(f"nothing to do: say what goes ({keys})")
        for stage in self.stages:
            for other, reason in stage.excludes.items():
                if self.has(other):
                    raise ValueError(reason)
        for stage in self.stages:
            stage.check_recipe(self)
        self._check_amounts()
        return self

    def _check_amounts(self) -> None:
        if self.layers is not None and self.allocation != "uniform":
            raise ValueError(f"allocation {self.allocation} chooses among all blocks: leave out layers")
        if self.widths == "per_layer" and self.container not in ("auto", "any", "remote"):
            raise ValueError(f"widths per_layer may need remote code, which container {self.container} rules out")
        if self.weigh_by is not None and self.allocation != "least-error":
            raise ValueError("weigh_by is for allocation: least-error")
        given = [f"spaces.{space}.ratio" for space, own in self.spaces.items() if own.ratio is not None]
        # A recipe that is written out has its default ratio, too.
        given += ["ratio"] if self.ratio != Recipe.model_fields["ratio"].default else []
        if self.size is not None and given:
            raise ValueError(f"size and {given[0]} both say how much goes: leave one out")
        if self.size is not None and self.container == "padded":
            raise ValueError("size does not go with container padded, which saves nothing where it fills up")

    @field_serializer("spaces", mode="wrap", when_used="json")
    def _write_spaces(self, spaces: dict[str, SpaceRecipe], handler: SerializerFunctionWrapHandler) -> Any:
        """Write the spaces, with one entry for all experts."""
        return handler({recipe_space(name): own for name, own in spaces.items()})

    # ---- stages ----------------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[StageKeys, ...]:
        """Its stages, in the order in which they work."""
        return tuple(stage for kind in self.kinds if (stage := kind.pick(self)) is not None)

    def get(self, kind: type[AnyStage]) -> AnyStage | None:
        """Return its stage of a kind, if it has one."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def has(self, key: str) -> bool:
        """Return True if it has the stage of a key."""
        return any(stage.key == key for stage in self.stages)

    def without_stages(self, *keys: str) -> Self:
        """Return the recipe without the stages of some keys."""
        return self.model_copy(update=dict.fromkeys(keys))

    @property
    def changes_model(self) -> bool:
        """Whether a stage leaves another model to those after it: fewer blocks, or a narrower residual stream."""
        return any(stage.changes_model for stage in self.stages)

    @property
    def joint(self) -> bool:
        """Whether blocks or dimensions of the residual stream go, and units of what is left."""
        return bool(self.spaces) and self.changes_model

    @property
    def spaces_alone(self) -> Self:
        """The recipe without the stages that leave another model to those after them."""
        return self.without_stages(*(kind.key for kind in self.kinds if kind.changes_model))

    @property
    def at_its_size(self) -> Self:
        """The recipe without stages that are for other sizes than the one it has."""
        left = [stage.key for stage in self.stages if not stage.applies(self)]
        return self.without_stages(*left) if left else self

    @property
    def needs_moments(self) -> bool:
        """Whether a stage needs statistics."""
        return any(stage.needs_moments(self) for stage in self.stages)

    @property
    def needs_folds(self) -> bool:
        """Whether something is chosen on held-out folds."""
        return any(stage.needs_folds(self) for stage in self.stages)

    @property
    def decides_widths(self) -> bool:
        """Whether what is measured decides how much every block, or every linear module, loses."""
        return any(stage.decides_widths(self) for stage in self.stages)

    @property
    def measures_dense(self) -> bool:
        """Whether the unpruned model is measured first even if blocks are measured behind pruned ones."""
        return any(stage.measures_dense(self) for stage in self.stages)

    @property
    def measures_prefix(self) -> bool:
        """Whether something is measured behind the pruned blocks before it, if samples are given."""
        return any(stage.measures_prefix(self) for stage in self.stages)

    @property
    def collect(self) -> tuple[Collect, ...]:
        """What statistics must hold for this recipe, at least."""
        needed: set[Collect] = {"moments"}
        for stage in self.stages:
            needed |= stage.collects(self)
        return tuple(kind for kind in get_args(Collect) if kind in needed)

    @property
    def calibration(self) -> str:
        """The command that measures statistics for this recipe."""
        folds = " --folds 4" if self.needs_folds else ""
        kinds = f" --collect {','.join(self.collect)}" if "taylor" in self.collect else ""
        return f"ckpt-prune calibrate{folds}{kinds}"

    # ---- spaces ----------------------------------------------------------------------------------------------

    def refuse_keys_of_spaces(self, stage: str) -> None:
        """Refuse keys that speak of units of spaces, for a stage that has none.

        Raises:
            ValueError: the message names the key and the stage.
        """
        others = {"allocation": "uniform", "widths": "uniform", "weigh_by": None, "container": "auto"}
        odd = next((key for key, value in others.items() if getattr(self, key) != value), None)
        if odd is not None:
            raise ValueError(f"{odd} speaks of units of spaces: it does not go with {stage}")

    def at(self, family: Family) -> Self:
        """The recipe with what it says of a space for every one of that name that blocks of a family have.

        What the family has not stays as it is, but for what is optional. Under least-error a space of ratio 0 is left
        out. Spaces of one width (`Family.together`) go together. Where a norm stands behind a consumer, target drift is
        sequential: what the stream lacks, divided by gains near zero, becomes outputs so large that the norm takes it
        from all others (compensation/README.md, section 4).
        """
        columns = [own for name, own in family.columns.items() if recipe_space(name) in self.spaces]
        if self.target == "drift" and any(each.norm is not None for each in columns):
            return self.model_copy(update={"target": "sequential"}).at(family)
        able = {recipe_space(name) for name, own in family.spaces.items() if own.whole is None}
        lacking = {name for name, own in self.spaces.items() if own.optional and recipe_space(name) not in able}
        if lacking:
            left = {name: own for name, own in self.spaces.items() if name not in lacking}
            return self.model_copy(update={"spaces": left}).at(family)
        # A size that spaces meet together says nothing of one: what is to stay whole is not among them.
        takes = {name: own for name, own in self.spaces.items() if own.ratio != 0}
        if self.allocation == "least-error" and takes and len(takes) < len(self.spaces):
            return self.model_copy(update={"spaces": takes}).at(family)
        # One config key says their width: what is said of the first is said of the others.
        alike = {recipe_space(name): own for name, own in family.spaces.items() if own.units in family.together}
        told = next((self.spaces[name] for name in alike if name in self.spaces), None)
        if told is not None and not alike.keys() <= {recipe_space(name) for name in self.spaces}:
            more = {name: told for name in alike if name not in self.spaces}
            return self.model_copy(update={"spaces": self.spaces | more}).at(family)
        here = [name for name in family.spaces if recipe_space(name) in self.spaces and name not in self.spaces]
        if not here:
            return self
        kept = {name: own for name, own in self.spaces.items() if name not in {recipe_space(each) for each in here}}
        spaces = kept | {name: self.spaces[recipe_space(name)] for name in here}
        return self.model_copy(update={"spaces": spaces})

    def without(self, spaces: Set[str]) -> Self:
        """The recipe without some of its spaces, as long as others are left."""
        left = {name: own for name, own in self.spaces.items() if name not in spaces}
        return self.model_copy(update={"spaces": left}) if 0 < len(left) < len(self.spaces) else self

    @property
    def shares_stock(self) -> bool:
        """Whether it finds how much goes of each space by itself, and takes as much from every block."""
        return self.allocation == "least-error" and self.widths == "uniform" and self.container in ("auto", "any")

    @property
    def ranks_blocks(self) -> bool:
        """Whether units of all blocks are ranked in one list (FLAP)."""
        return self.allocation.startswith("across")

    @property
    def refits_experts(self) -> bool:
        """Whether experts that stay make up for those that go."""
        return "experts" in self.spaces and self.spaces["experts"].compensation.method != "none"

    @property
    def weighed_by_effect(self) -> bool:
        """Whether widths are found from effects on the model's output."""
        return self.allocation == "least-error" and self.weigh_by != "energy"

    def blocks(self, count: int) -> range:
        """The blocks of a model of `count` that are pruned; the others stay whole.

        Raises:
            UserError: there are none, or the recipe names more than the model has.
        """
        return blocks_of(self.layers, count)

    def ratio_of(self, space: SpaceName) -> float:
        """Share of units to drop in a space."""
        own = self.spaces[space].ratio
        return self.ratio if own is None else own

    @property
    def digest(self) -> str:
        """sha256 of the recipe's canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def canonical_json(self) -> str:
        """Return the recipe as JSON with every default spelt out and its keys sorted, without stages that it lacks.

        So a recipe keeps its digest when the format gains another optional key. What only a list of recipes reads, its
        goal and its time, is left out, too: a recipe that is timed anew is the same.
        """
        values = self.model_dump(mode="json", by_alias=True, exclude={"goal", "time"})
        for space in values["spaces"].values():
            space["compensation"] = _without_absent(space["compensation"], "candidates", "shares", "centre_keys")
            if space["optional"] is None:
                del space["optional"]
        for kind in self.kinds:
            if kind.later and values[kind.key] is not None:
                values[kind.key] = {
                    key: value
                    for key, value in values[kind.key].items()
                    if key not in kind.later or value != kind.later[key]
                }
        optional = [kind.key for kind in self.kinds if kind.key != "spaces"]
        return json.dumps(_without_absent(values, *optional, "size", "weigh_by", "layers"), sort_keys=True)

    @property
    def without_amount(self) -> str:
        """The recipe's canonical JSON but for how much goes: two that share it differ in ratios and size alone."""
        values = json.loads(self.canonical_json())
        for own in values["spaces"].values():
            del own["ratio"]
        return json.dumps({key: value for key, value in values.items() if key not in ("ratio", "size")})

    def settings_of(self, space: SpaceName) -> SpaceSettings:
        """What the recipe says about a space, in the form that its kind is asked in."""
        own = self.spaces[space]
        fitted = own.compensation
        return SpaceSettings(
            own.score, fitted.method, self.target, self.allocation == "least-error", bool(fitted.centre_keys)
        )

    def needs_gram(self, space: SpaceName) -> bool:
        """Whether the space's score or compensation, or the target, needs the Gram of a consumer's input."""
        return self.gram_for(space) is not None

    def measures_more(self, space: SpaceName) -> bool:
        """Whether live moments of the space must hold more than the least (`space_kinds.SpaceKind.measures_more`)."""
        return kind_of(space).measures_more(self.settings_of(space))

    def gram_for(self, space: SpaceName) -> str | None:
        """What needs the Gram of the space's consumer, in words for a message; None where nothing does."""
        return kind_of(space).gram_for(self.settings_of(space))

    @property
    def perplexity_grid(self) -> list[float] | None:
        """The strengths to choose from by calibration perplexity; None where nothing is chosen by it."""
        for space in self.spaces.values():
            if space.compensation.lambda_by == "perplexity":
                return space.compensation.lambda_grid
        return None

    def with_ratio(self, ratio: float) -> Self:
        """A copy with this ratio in every space, and without a size."""
        values = self.model_dump(by_alias=True) | {"ratio": ratio, "size": None}
        for space in values["spaces"].values():
            space["ratio"] = None
        return self.model_validate(values)

    def with_size(self, size: TargetSize) -> Self:
        """A copy with this size in place of every ratio."""
        values = self.model_dump(by_alias=True) | {"ratio": Recipe.model_fields["ratio"].default, "size": size}
        for space in values["spaces"].values():
            space["ratio"] = None
        return self.model_validate(values)

    @property
    def at_one_ratio(self) -> Self:
        """The recipe that takes as much from every block: its size stands for that of widths still to be found."""
        values = self.model_dump(by_alias=True) | {"allocation": "uniform", "weigh_by": None}
        for space in values["spaces"].values():
            if space["score"] == CHOSEN:  # sizes depend on none
                space["score"] = CANDIDATES[0]
        stages = {stage.key: stage.at_one_ratio() for stage in self.stages if stage.key != "spaces"}
        return self.model_validate(values | stages)

    def with_own_ratio(self, space: SpaceName, ratio: float) -> Self:
        """A copy with this ratio in one space."""
        values = self.model_dump(by_alias=True)
        values["spaces"][space]["ratio"] = ratio
        return self.model_validate(values)

    def with_strength(self, strength: float) -> Self:
        """A copy whose strength is fixed wherever it was to be chosen by perplexity."""
        values = self.model_dump(by_alias=True)
        for space in values["spaces"].values():
            if space["compensation"]["lambda_by"] == "perplexity":
                space["compensation"] |= {"lambda": strength, "lambda_grid": None, "lambda_by": None}
        return self.model_validate(values)


def _without_absent(values: dict[str, Any], *optional: str) -> dict[str, Any]:
    """Return a copy without the optional keys that hold None."""
    return {key: value for key, value in values.items() if key not in optional or value is not None}


def _check_full(value: Any) -> Any:
    return value if isinstance(value, Recipe) else Recipe.full.model_validate(value)


AnyRecipe = Annotated[SerializeAsAny[Recipe], BeforeValidator(_check_full)]
"""A recipe inside another file: it is read with the keys of all stages, and written with them."""
