"""Recipes: the YAML file that says what to prune, once it is read. Unknown keys are refused."""

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
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

from ckpt_prune.common.block_range import blocks_of, checked_range
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.fields import Strict
from ckpt_prune.common.ratios import Ratio
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.family import Family
from ckpt_prune.model.runtimes import Change, read_target
from ckpt_prune.model.spaces import ALIKE, SpaceName, recipe_space
from ckpt_prune.recipe.names import Goal
from ckpt_prune.recipe.sizes import TargetSize
from ckpt_prune.recipe.space_kinds import CANDIDATES, CHOSEN, SpaceSettings, kind_of
from ckpt_prune.recipe.space_recipe import SpaceRecipe


class StageKeys(Strict):
    """One key of a recipe: its fields are the keys below it. `job.stage.Stage` adds the work.

    A recipe without the key is a job without the stage. Code goes through `Recipe.stages` and never asks a recipe for a
    key that it may not have, so that a new stage changes no code but its own.

    Attributes:
        key: in a recipe and in a report.
        summary: what it does, in one line, for the list of keys.
        excludes: key of a stage that it does not go with → the message that refuses both.
        later: keys that it has gained, and their defaults. A recipe that leaves them alone keeps its digest.
        prunes: True if it takes something from the model, so that a recipe may consist of it.
        doing: what it does to a block, as a participle.
        goal: the group of `recipe list` that its recipes stand in; None if it decides nothing.
        changes_model: True if later stages see another model: fewer blocks, or a narrower residual stream.
        named: name → keys; a recipe may say the name in place of them.
        bar: what the progress bar says while blocks are worked on.
        changes_weights: True if the output computes something else because of it.
        trains: True if it trains on samples, beside any statistics.
        does, by_itself: of a stage that changes the model, what it does, and the command that does nothing else.
        writes: names beside the checkpoint that the output may have because of it.
        unplannable: what a recipe with it does that no plan can say, as the end of a refusal; "" if a plan can say it.
        measures_itself: True if its moments are measured while blocks are written, and statistics are of no use to it.
        asks: what its output asks of a runtime, whatever its keys say.
    """

    key: ClassVar[str]
    summary: ClassVar[str]
    excludes: ClassVar[Mapping[str, str]] = {}
    later: ClassVar[Mapping[str, Any]] = {}
    prunes: ClassVar[bool] = True
    doing: ClassVar[str] = "pruned"
    goal: ClassVar[Goal | None] = None
    bar: ClassVar[str] = "pruning"
    changes_model: ClassVar[bool] = False
    named: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    changes_weights: ClassVar[bool] = True
    trains: ClassVar[bool] = False
    does: ClassVar[str] = ""
    by_itself: ClassVar[str] = ""
    writes: ClassVar[tuple[str, ...]] = ()
    unplannable: ClassVar[str] = ""
    measures_itself: ClassVar[bool] = False
    asks: ClassVar[frozenset[Change]] = frozenset()

    @classmethod
    def expand(cls, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that a name stands for in a recipe of these values."""
        return dict(cls.named[name])

    @classmethod
    def fill_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Add what the stage's keys imply for other keys, before the values of a recipe are checked."""
        return values

    @classmethod
    def check_ratio(cls, values: Mapping[str, Any], ratio: float) -> None:
        """Raise UserError if a ratio from the command line does not go with the stage's keys in a file."""

    @classmethod
    def check_size(cls, name: str) -> None:
        """Raise UserError if no size can be asked of a recipe (of this name) that has the stage."""

    @classmethod
    def settles_ratio(cls, keys: tuple[str, ...], values: Mapping[str, Any]) -> bool:
        """Return True if an override of a key says how much goes, so that the ratio of the file is left out.

        Args:
            keys: path of that key, such as ("mask", "pattern").
            values: of the stage, with the override.
        """
        return False

    @classmethod
    def pick(cls, recipe: "Recipe") -> "StageKeys | None":
        stage: StageKeys | None = getattr(recipe, cls.key)
        return stage

    def check_recipe(self, recipe: "Recipe") -> None:
        """Raise ValueError for keys of the recipe that do not go with this stage."""

    def leaves_experts(self, recipe: "Recipe") -> bool:
        """Return True if no weight in few bits changes, though experts may go: the output may keep their bytes."""
        return not self.changes_weights

    def applies(self, recipe: "Recipe") -> bool:
        """Return True if the stage is meant for the size that the recipe asks for."""
        return True

    def check_plannable(self, recipe: "Recipe") -> None:
        """Refuse, with UserError, to plan what a plan cannot say."""
        if self.unplannable:
            raise UserError(f"recipe {recipe.name} {self.unplannable}")

    @property
    def beside_plan(self) -> str | None:
        """The line that tells who makes a plan what it leaves out of this stage."""
        return None

    # ---- where the output runs ---------------------------------------------------------------------------------

    @property
    def runtimes(self) -> Sequence[str]:
        """Runtimes that the output is for because of this stage, beside those of `Recipe.runs_on`."""
        return ()

    def changes(self, recipe: "Recipe", spaces: Set[str]) -> Set[Change]:
        """Return what its output asks of a runtime; `spaces` are those that the recipe prunes in this model."""
        return self.asks

    @property
    def column_group(self) -> int:
        """Columns that share something in the output, so that widths are multiples of it."""
        return 1

    def in_multiples_of(self, unit: int) -> Self:
        """Return the keys with what they count rounded to multiples of this."""
        return self

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
        """Return what statistics must hold besides vectors of the consumers' inputs."""
        return set()

    def measures_dense(self, recipe: "Recipe") -> bool:
        """Return True if the unpruned model is measured first even if blocks are measured behind pruned ones."""
        return False

    def measures_prefix(self, recipe: "Recipe") -> bool:
        """Return True if it can measure behind the pruned blocks before it, given samples."""
        return False

    def decides_widths(self, recipe: "Recipe") -> bool:
        """Return True if measuring decides how much each block, or each linear module, loses."""
        return False

    @property
    def runs_model(self) -> bool:
        """True if it runs the model itself, beside any statistics that are given."""
        return False

    def needs_samples(self, recipe: "Recipe") -> bool:
        """Return True if it runs the model itself, so that statistics are not enough."""
        return False

    def needs_text(self, recipe: "Recipe") -> bool:
        """Return True if it works for language models only."""
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
        description="The group of `recipe list` that it stands in. Default: by what the recipe does: "
        "recovery, depth, hidden, low-rank or zeros, else paper.",
    )
    time: float | None = Field(None, gt=0, description="What pruning takes, as a multiple of recipe ridge.")
    ratio: Ratio = Field(
        0.2, ge=0, lt=1, description="Share of units to drop in every space, or of weights that a mask zeroes."
    )
    target: Literal["dense", "sequential", "drift"] = Field(
        "dense",
        description="What is measured, and what outputs are fitted to. dense: moments of the unpruned model; "
        "sequential: measured block by block on the pruned prefix; "
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
        "uniform",
        "across-layers",
        "across-layers-raw",
        "across-layers-and-spaces",
        "across-layers-and-spaces-code",
        "least-error",
    ] = Field(
        "uniform",
        description="uniform: same ratio everywhere; across-layers and across-layers-and-spaces: FLAP's AL-MM and "
        "AL-AM; across-layers-raw: one list for each space, of scores as they are; across-layers-and-spaces-code: "
        "AL-AM as its released code cuts and weighs; least-error: the widths of the least predicted error for the size "
        "that the ratio or size says.",
    )
    weigh_by: Literal["effect", "energy"] | None = Field(
        None,
        description="How allocation least-error compares the errors of sites. effect: by what they do to the model's "
        "own output (Fisher metric); energy: as shares of each output's energy. Default: effect.",
    )
    widths: Literal["uniform", "per_layer"] = Field(
        "uniform",
        description="uniform: as many units of a space stay in every block; per_layer: blocks may differ in width, and "
        "the output then carries code of its own.",
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
    runs_on: list[str] | None = Field(
        None,
        description="Runtimes that the output is for, as [llama.cpp:q4_0, vllm]: what does not run "
        "there is refused, and widths are multiples of what the type behind the colon wants.",
    )
    spaces: dict[SpaceName, SpaceRecipe] = Field(
        default_factory=dict, description="Spaces to prune, such as heads and mlp; others stay whole."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = cls.expand_names(values)
        for kind in cls.kinds:
            values = kind.fill_in(values)
        return values

    @classmethod
    def expand_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Put keys in place of the names that stages have for them."""
        return values | {
            kind.key: kind.expand(name, values)
            for kind in cls.kinds
            if isinstance(name := values.get(kind.key), str) and name in kind.named
        }

    @field_validator("runs_on")
    @classmethod
    def _check_runtimes(cls, value: list[str] | None) -> list[str] | None:
        for text in value or []:
            try:
                read_target(text)
            except UserError as error:
                raise ValueError(str(error)) from error
        return value

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
        if self.layers is not None and self.allocation != "uniform":
            raise ValueError(f"allocation {self.allocation} chooses among all blocks: leave out layers")
        if self.widths == "per_layer" and self.container not in ("auto", "any", "remote"):
            raise ValueError(f"widths per_layer may need remote code, which container {self.container} rules out")
        if self.weigh_by is not None and self.allocation != "least-error":
            raise ValueError("weigh_by is for allocation: least-error")
        ratios = [f"spaces.{space}.ratio" for space, settings in self.spaces.items() if settings.ratio is not None]
        ratios += [f"spaces.{space}.keep" for space, settings in self.spaces.items() if settings.keep is not None]
        # A recipe that is written out has its default ratio, too.
        ratios += ["ratio"] if self.ratio != _default_ratio() else []
        if self.size is not None and ratios:
            raise ValueError(f"size and {ratios[0]} both say how much goes: leave one out")
        if self.size is not None and self.container == "padded":
            raise ValueError("size does not go with container padded, which saves nothing where it fills up")
        return self

    @field_serializer("spaces", mode="wrap", when_used="json")
    def _write_spaces(self, spaces: dict[str, SpaceRecipe], handler: SerializerFunctionWrapHandler) -> Any:
        """Write one entry for all experts."""
        return handler({recipe_space(name): settings for name, settings in spaces.items()})

    # ---- stages ----------------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[StageKeys, ...]:
        """Its stages, in the order in which they work."""
        return tuple(stage for kind in self.kinds if (stage := kind.pick(self)) is not None)

    def get(self, kind: type[AnyStage]) -> AnyStage | None:
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def has(self, key: str) -> bool:
        return any(stage.key == key for stage in self.stages)

    def without_stages(self, *keys: str) -> Self:
        return self.model_copy(update=dict.fromkeys(keys))

    @property
    def changes_model(self) -> bool:
        """True if a stage leaves another model to those after it: fewer blocks, or a narrower residual stream."""
        return any(stage.changes_model for stage in self.stages)

    @property
    def sizing(self) -> tuple[StageKeys, ...]:
        """The stages that make shapes smaller: whole blocks, dimensions of the residual stream or units of spaces."""
        return tuple(stage for stage in self.stages if stage.changes_model or stage.key == "spaces")

    @property
    def joint(self) -> bool:
        """True if blocks or dimensions of the residual stream go, and units of what is left."""
        return bool(self.spaces) and self.changes_model

    @property
    def spaces_alone(self) -> Self:
        """The recipe without the stages that leave another model to those after them."""
        return self.without_stages(*(kind.key for kind in self.kinds if kind.changes_model))

    @property
    def at_its_size(self) -> Self:
        """The recipe without stages that are for other sizes than its own."""
        unused = [stage.key for stage in self.stages if not stage.applies(self)]
        return self.without_stages(*unused) if unused else self

    @property
    def needs_moments(self) -> bool:
        return any(stage.needs_moments(self) for stage in self.stages)

    @property
    def needs_statistics(self) -> bool:
        """True if a stage uses moments of the model as it was before, or behind the blocks before."""
        return any(stage.needs_moments(self) and not stage.measures_itself for stage in self.stages)

    @property
    def needs_folds(self) -> bool:
        return any(stage.needs_folds(self) for stage in self.stages)

    @property
    def folds(self) -> int:
        """The groups of samples whose sums are kept apart by default: to choose on, or to see whether a fit wins."""
        if self.needs_folds:
            return 4
        return 2 if any(settings.compensation.by_rule for settings in self.spaces.values()) else 1

    @property
    def decides_widths(self) -> bool:
        return any(stage.decides_widths(self) for stage in self.stages)

    @property
    def measures_dense(self) -> bool:
        return any(stage.measures_dense(self) for stage in self.stages)

    @property
    def measures_prefix(self) -> bool:
        return any(stage.measures_prefix(self) for stage in self.stages)

    @property
    def collect(self) -> tuple[Collect, ...]:
        """The least that statistics must hold for this recipe."""
        needed: set[Collect] = {"moments"}
        for stage in self.stages:
            needed |= stage.collects(self)
        return tuple(kind for kind in get_args(Collect) if kind in needed)

    @property
    def calibration(self) -> str:
        """The command that measures statistics for this recipe."""
        folds = f" --folds {self.folds}" if self.folds > 1 else ""
        kinds = f" --collect {','.join(self.collect)}" if "taylor" in self.collect else ""
        return f"ckpt-prune calibrate{folds}{kinds}"

    # ---- spaces ----------------------------------------------------------------------------------------------

    def refuse_keys_of_spaces(self, stage: str, containers: Sequence[str] = ()) -> None:
        """Raise ValueError for keys that speak of units of spaces, on behalf of a stage that has none.

        Args:
            containers: that mean something to the stage all the same.
        """
        container = self.container if self.container in containers else "auto"
        defaults = {"allocation": "uniform", "widths": "uniform", "weigh_by": None, "container": container}
        changed = next((key for key, value in defaults.items() if getattr(self, key) != value), None)
        if changed is not None:
            raise ValueError(f"{changed} is about units of spaces: it does not go with {stage}")

    def at(self, family: Family) -> Self:
        """Return the recipe with one entry for every space of a family's blocks that it names.

        Spaces that the family lacks stay, unless they are optional, as heads and mlp are by default, and all spaces of
        an encoder-decoder or of stages: many classes can lose none of them. With least-error, a space of ratio 0 is
        left out.
        Spaces that share one width (`Family.together`) all go if one of them does, but for those that stay whole where
        blocks may differ. If a norm follows a consumer, target
        drift becomes sequential: what the stream lacks, divided by gains near zero, would become outputs so large that
        the norm takes it from all others (compensation/README.md, section 4). So it does where blocks carry several
        streams, of which no output is all that they lack.
        """
        consumers = [space for name, space in family.columns.items() if recipe_space(name) in self.spaces]
        no_drift = family.several_streams or any(space.norm is not None for space in consumers)
        if self.target == "drift" and no_drift:
            return self.model_copy(update={"target": "sequential"}).at(family)
        prunable = {recipe_space(name) for name, space in family.spaces.items() if space.whole is None}
        all_by_default = family.modality in ("pairs", "audio") or family.stage is not None
        lacking = {
            name
            for name, settings in self.spaces.items()
            if (all_by_default or name in ("heads", "mlp") if settings.optional is None else settings.optional)
            and recipe_space(name) not in prunable
        }
        if "mlp" in lacking and "pooling" in prunable - self.spaces.keys():  # only what is behind the blocks loses any
            return self._with_spaces({"pooling" if k == "mlp" else k: v for k, v in self.spaces.items()}).at(family)
        if lacking:
            return self._with_spaces({k: v for k, v in self.spaces.items() if k not in lacking}).at(family)
        # Spaces that meet a size together have no ratio of their own: one that is to stay whole is not among them.
        pruned = {name: settings for name, settings in self.spaces.items() if settings.ratio != 0}
        if self.allocation == "least-error" and pruned and len(pruned) < len(self.spaces):
            return self._with_spaces(pruned).at(family)
        # An mlp in place of experts has their settings, and heads of linear attention those of heads, by default. What
        # pools tokens has those of the mlp. They stay whole where blocks may differ and a model has room for one width.
        may_differ = self.widths != "uniform" or self.ranks_blocks
        uniform = {recipe_space(name) for name, space in family.spaces.items() if space.uniform}
        added = {
            other: self.spaces[named]
            for other, named in ALIKE.items()
            if named in self.spaces and other in prunable - self.spaces.keys()
            if not (may_differ and other in uniform)
        }
        if added:
            spaces: dict[SpaceName, SpaceRecipe] = {}
            for name, settings in self.spaces.items():  # each behind that which it is pruned like
                spaces |= {name: settings, **{other: own for other, own in added.items() if ALIKE[other] == name}}
            return self._with_spaces(spaces).at(family)
        # One config key says their width: what is said of the first is said of the others.
        alike = [recipe_space(name) for name, space in family.spaces.items() if space.units in family.together]
        alike = [name for name in alike if not (may_differ and name in uniform)]
        shared = next((self.spaces[name] for name in alike if name in self.spaces), None)
        if shared is not None and not set(alike) <= {recipe_space(name) for name in self.spaces}:
            missing = {name: shared for name in alike if name not in self.spaces}
            return self._with_spaces(self.spaces | missing).at(family)
        # Experts: one entry for each.
        numbered = [name for name in family.spaces if recipe_space(name) in self.spaces and name not in self.spaces]
        if not numbered:
            return self
        replaced = {recipe_space(name) for name in numbered}
        others = {name: settings for name, settings in self.spaces.items() if name not in replaced}
        return self._with_spaces(others | {name: self.spaces[recipe_space(name)] for name in numbered})

    def without(self, spaces: Set[str]) -> Self:
        """Return the recipe without some of its spaces, if others are left."""
        others = {name: settings for name, settings in self.spaces.items() if name not in spaces}
        return self._with_spaces(others) if 0 < len(others) < len(self.spaces) else self

    def _with_spaces(self, spaces: Mapping[SpaceName, SpaceRecipe]) -> Self:
        return self.model_copy(update={"spaces": dict(spaces)})

    @property
    def shares_stock(self) -> bool:
        """True if it finds how much goes of each space by itself, and takes as much from every block."""
        return self.allocation == "least-error" and self.widths == "uniform" and self.container in ("auto", "any")

    @property
    def ranks_blocks(self) -> bool:
        """True if units of all blocks are ranked in one list (FLAP)."""
        return self.allocation.startswith("across")

    @property
    def refits_experts(self) -> bool:
        """True if the experts that stay make up for those that go."""
        return "experts" in self.spaces and self.spaces["experts"].compensation.method != "none"

    @property
    def weighed_by_effect(self) -> bool:
        """True if effects on the model's output decide widths."""
        return self.allocation == "least-error" and self.weigh_by != "energy"

    def blocks(self, count: int) -> range:
        """Return the blocks of a model of `count` that are pruned; the others stay whole."""
        return blocks_of(self.layers, count)

    def ratio_of(self, space: SpaceName) -> float:
        """Return the share of units to drop in a space."""
        space_ratio = self.spaces[space].ratio
        return self.ratio if space_ratio is None else space_ratio

    @property
    def digest(self) -> str:
        """sha256 of the recipe's canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def canonical_json(self) -> str:
        """Return the recipe as JSON with all defaults and sorted keys, without optional keys that it lacks.

        So a recipe keeps its digest when the format gains another optional key. Its goal and time, which only a list of
        recipes reads, are left out.
        """
        values = self.model_dump(mode="json", by_alias=True, exclude={"goal", "time"})
        for space in values["spaces"].values():
            space["compensation"] = _without_absent(space["compensation"], "candidates", "shares", "centre_keys")
            for key in ("optional", "keep"):
                if space[key] is None:
                    del space[key]
        for kind in self.kinds:
            keys = values.get(kind.key)
            if kind.later and keys is not None:
                values[kind.key] = {k: v for k, v in keys.items() if k not in kind.later or v != kind.later[k]}
        optional = [kind.key for kind in self.kinds if kind.key != "spaces"]
        return json.dumps(_without_absent(values, *optional, "size", "weigh_by", "layers", "runs_on"), sort_keys=True)

    @property
    def without_amount(self) -> str:
        """The canonical JSON without how much goes: two recipes that share it differ in ratios and size only."""
        values = json.loads(self.canonical_json())
        for settings in values["spaces"].values():
            del settings["ratio"]
            settings.pop("keep", None)
        return json.dumps({key: value for key, value in values.items() if key not in ("ratio", "size")})

    def settings_of(self, space: SpaceName) -> SpaceSettings:
        """Return what the recipe says about a space, in the form that `SpaceKind` is asked in."""
        settings = self.spaces[space]
        method, centred = settings.compensation.method, bool(settings.compensation.centre_keys)
        return SpaceSettings(settings.score, method, self.target, self.allocation == "least-error", centred)

    def measures_more(self, space: SpaceName) -> bool:
        return kind_of(space).measures_more(self.settings_of(space))

    def gram_for(self, space: SpaceName) -> str | None:
        return kind_of(space).gram_for(self.settings_of(space))

    @property
    def perplexity_grid(self) -> list[float] | None:
        """The strengths to choose from by calibration perplexity; None if nothing is chosen by it."""
        fits = [settings.compensation for settings in self.spaces.values()]
        return next((fit.lambda_grid for fit in fits if fit.lambda_by == "perplexity"), None)

    # ---- the same recipe with other values -------------------------------------------------------------------

    def with_ratio(self, ratio: float) -> Self:
        """Return a copy with this ratio in every space, and without a size."""
        return self._with_amount({"ratio": ratio, "size": None})

    def with_size(self, size: TargetSize) -> Self:
        """Return a copy with this size in place of every ratio."""
        return self._with_amount({"ratio": _default_ratio(), "size": size})

    def _with_amount(self, amount: dict[str, Any]) -> Self:
        values = self.model_dump(by_alias=True) | amount
        for space in values["spaces"].values():
            space |= {"ratio": None, "keep": None}
        return self.model_validate(values)

    @property
    def at_one_ratio(self) -> Self:
        """The recipe that takes as much from every block: its size stands for that of widths still to be chosen."""
        values = self.model_dump(by_alias=True) | {"allocation": "uniform", "weigh_by": None}
        for space in values["spaces"].values():
            if space["score"] == CHOSEN:  # sizes depend on no score
                space["score"] = CANDIDATES[0]
        stages = {stage.key: stage.at_one_ratio() for stage in self.stages if stage.key != "spaces"}
        return self.model_validate(values | stages)

    def with_own_ratio(self, space: SpaceName, ratio: float) -> Self:
        values = self.model_dump(by_alias=True)
        values["spaces"][space]["ratio"] = ratio
        return self.model_validate(values)

    def with_strength(self, strength: float) -> Self:
        """Return a copy with a fixed strength wherever it was to be chosen by perplexity."""
        values = self.model_dump(by_alias=True)
        for space in values["spaces"].values():
            if space["compensation"]["lambda_by"] == "perplexity":
                space["compensation"] |= {"lambda": strength, "lambda_grid": None, "lambda_by": None}
        return self.model_validate(values)


def _default_ratio() -> Any:
    return Recipe.model_fields["ratio"].default


def _without_absent(values: dict[str, Any], *optional: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in optional or value is not None}


AnyRecipe = Annotated[
    SerializeAsAny[Recipe],
    BeforeValidator(lambda value: value if isinstance(value, Recipe) else Recipe.full.model_validate(value)),
]
"""A recipe inside another file: it is read with the keys of all stages, and written with them."""
