"""Recipes: the YAML a team shares, as it is once it is read. Unknown keys are refused."""

import hashlib
import json
from collections.abc import Set
from typing import Any, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, field_serializer, field_validator, model_validator

from ckpt_prune.architectures.family import Family
from ckpt_prune.architectures.spaces import COUPLED, ENDS, SpaceName, known_space
from ckpt_prune.calibration.kinds import Collect
from ckpt_prune.planning.block_range import blocks_of, checked_range
from ckpt_prune.planning.depth_recipe import DepthRecipe
from ckpt_prune.planning.export_recipe import ExportRecipe
from ckpt_prune.planning.fields import Strict
from ckpt_prune.planning.hidden_recipe import HiddenRecipe
from ckpt_prune.planning.kinds import CANDIDATES, CHOSEN, Wish, kind_of
from ckpt_prune.planning.low_rank_recipe import LowRankRecipe
from ckpt_prune.planning.mask_recipe import MaskRecipe, RotationRecipe
from ckpt_prune.planning.names import Backbone, Goal
from ckpt_prune.planning.recovery_recipe import RecoveryRecipe
from ckpt_prune.planning.sizes import TargetSize
from ckpt_prune.planning.space_recipe import SpaceRecipe
from ckpt_prune.ratios import Ratio
from ckpt_prune.sparsity.damping import DAMP
from ckpt_prune.sparsity.patterns import UNSTRUCTURED, parse_pattern


class Recipe(Strict):
    """A recipe: which units or weights go, what makes up for them, and which container the output has."""

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
    depth: DepthRecipe | None = Field(
        None, description="Whole blocks that go, before anything else is done to those that stay."
    )
    hidden: HiddenRecipe | None = Field(
        None, description="Dimensions of the residual stream that go, in a basis that is measured."
    )
    mask: MaskRecipe | None = Field(None, description="Zeros in the weights of every block, instead of spaces.")
    rotation: RotationRecipe | None = Field(None, description="Rotations learned before the mask.")
    low_rank: LowRankRecipe | None = Field(
        None, description="Two thin linears in the place of each, instead of spaces or a mask."
    )
    recovery: RecoveryRecipe | None = Field(
        None,
        description="Train what stays: of each block right after it is pruned (LaCo), or scales of all at the end.",
    )
    export: ExportRecipe | None = Field(None, description="End in an ONNX graph, in the output's folder onnx.")

    @field_validator("layers")
    @classmethod
    def _a_range(cls, value: str | None) -> str | None:
        return checked_range(value)

    @model_validator(mode="before")
    @classmethod
    def _ratio_of_pattern(cls, values: Any) -> Any:
        """An N:M pattern is its own ratio."""
        mask = values.get("mask") if isinstance(values, dict) else None
        text = mask.get("pattern", UNSTRUCTURED) if isinstance(mask, dict) else UNSTRUCTURED
        try:
            groups = parse_pattern(text)
        except (TypeError, ValueError):  # the field says why
            return values
        if groups is None:
            return values
        if values.get("ratio", groups.ratio) != groups.ratio:
            raise ValueError(
                f"pattern {groups} zeroes {groups.ratio:g} of the weights by itself: leave out ratio, or set it to that"
            )
        return values | {"ratio": groups.ratio}

    @model_validator(mode="before")
    @classmethod
    def _widths_of_blocks(cls, values: Any) -> Any:
        """Columns go in multiples of the graph's blocks, where their size is asked for: others it refuses."""
        spaces, export = (values.get(key) if isinstance(values, dict) else None for key in ("spaces", "export"))
        if not isinstance(spaces, dict) or not isinstance(export, dict):
            return values
        size, columns = export.get("block_size"), spaces.get("mlp")
        if not isinstance(columns, dict) or not isinstance(size, int):
            return values
        return values | {"spaces": spaces | {"mlp": {"multiple_of": size} | columns}}

    @model_validator(mode="after")
    def _one_kind(self) -> "Recipe":
        if self.rotation is not None and self.mask is None:
            raise ValueError("rotation comes before a mask: say mask (with ratio 0 nothing is zeroed)")
        if self.spaces and self.mask is not None:
            raise ValueError(
                "a recipe has either spaces, which lose units, or a mask, which zeroes weights; for both, prune twice, "
                "the mask last"
            )
        parts = (self.mask, self.depth, self.hidden, self.low_rank)
        if not self.spaces and all(part is None for part in parts):
            raise ValueError("nothing to do: spaces, depth, hidden, low_rank or a mask is missing")
        self._consistent_depth()
        self._consistent_hidden()
        self._consistent_low_rank()
        if self.rotation is not None and self.rotation.damp != DAMP and self.importance != "sparsegpt":
            raise ValueError(f"rotation.damp is for sparsegpt's importance, not {self.importance}'s: leave it out")
        self._consistent_rotation()
        if self.mask is not None and self.layers is not None:
            raise ValueError("layers is for spaces: a mask zeroes weights of every block")
        if self.mask is not None and (self.allocation, self.widths, self.size) != ("uniform", "uniform", None):
            raise ValueError("allocation, widths and size speak of units: they do not go with a mask")
        if self.mask is not None and self.target == "drift":
            raise ValueError("target drift is for spaces, whose consumers are refitted: say sequential with a mask")
        if self.mask is not None and self.container == "padded":
            raise ValueError("container padded is for spaces: a mask leaves every shape as it is")
        if self.mask is not None and "ratio" not in self.model_fields_set:
            raise ValueError("an unstructured mask needs ratio, the share of weights to zero; N:M patterns do not")
        return self

    def _consistent_low_rank(self) -> None:
        if self.low_rank is None:
            return
        beside = [key for key in ("spaces", "mask", "depth", "hidden", "recovery") if getattr(self, key)]
        if beside:
            raise ValueError(f"low_rank factors linears of the dense model: {beside[0]} does not go with it")
        odd = [
            key
            for key in ("allocation", "widths", "weigh_by", "layers", "size")
            if getattr(self, key) != Recipe.model_fields[key].default
        ]
        if odd:
            raise ValueError(f"{odd[0]} speaks of units of spaces: it does not go with low_rank")
        if self.target == "drift":
            raise ValueError("target drift is for spaces, whose consumers are refitted: say sequential with low_rank")
        if self.low_rank.update and not (self.low_rank.whitens and self.target == "sequential"):
            raise ValueError("low_rank.update fits to what reaches a linear: say method: whitened, target: sequential")
        if self.container not in ("auto", "any", "remote"):
            raise ValueError(f"low_rank needs remote code, which container {self.container} rules out")
        if self.ratio == 0:
            raise ValueError("low_rank with ratio 0 leaves nothing to do: say which share of the parameters goes")

    def _consistent_depth(self) -> None:
        if self.depth is None:
            return
        if self.mask is not None:
            raise ValueError(
                "depth drops whole blocks: for a mask as well, prune twice, the blocks first, since the others see "
                "another stream then"
            )
        if self.recovery is not None and self.recovery.method != "scales":
            raise ValueError(
                "depth drops whole blocks: recover the others by scales (recovery.method), or afterwards, with "
                "`ckpt-prune recover`"
            )
        if self.spaces:
            self._consistent_joint(self.depth)
            return
        if self.depth.auto or self.depth.under is not None:
            key = "drop: auto" if self.depth.auto else "under"
            raise ValueError(f"depth.{key} is for recipes with spaces, which lose what the blocks do not")
        if self.hidden is not None:
            self._consistent_blocks_beside_stream(self.depth)
            return
        self._without_units("depth alone")
        if self.depth.blocks is not None and self.size is not None:
            raise ValueError("size and depth.blocks both say how much goes: leave one out")
        if self.depth.drop is not None and self.size is not None:
            raise ValueError("size and depth.drop both say how much goes: leave one out")
        if self.depth.blocks is not None and self.layers is not None:
            raise ValueError("layers says among which blocks to choose, and depth.blocks chooses: leave one out")

    def _consistent_blocks_beside_stream(self, depth: DepthRecipe) -> None:
        if depth.drop is None and depth.blocks is None:
            raise ValueError(
                "ratio and size speak of the residual stream here: say which blocks go besides, depth.drop (a number) "
                "or depth.blocks"
            )

    def _without_units(self, part: str) -> None:
        """Refuse what speaks of units of spaces beside a part that has none."""
        others = {"allocation": "uniform", "widths": "uniform", "weigh_by": None, "container": "auto"}
        odd = next((key for key, value in others.items() if getattr(self, key) != value), None)
        if odd is not None:
            raise ValueError(f"{odd} speaks of units of spaces: it does not go with {part}")

    def _consistent_hidden(self) -> None:
        if self.hidden is None:
            return
        if self.mask is not None:
            raise ValueError(
                "hidden turns the residual stream into another basis: for a mask as well, prune twice, the mask last, "
                "or first where the output needs code of its own (kind: per-block)"
            )
        if self.depth is not None and self.hidden.kind != "shared":
            raise ValueError(
                "hidden.kind: per-block needs code of its own: for whole blocks as well say kind: shared, or prune "
                "twice, the blocks first"
            )
        if self.depth is not None and self.depth.part != "block":
            raise ValueError(f"depth.part: {self.depth.part} leaves zeros: beside hidden whole blocks go")
        if self.recovery is not None:
            raise ValueError("hidden turns the residual stream into another basis, and recovery does not follow it")
        if self.layers is not None:
            raise ValueError("hidden goes through all blocks: leave out layers")
        if self.size is not None and self.size.kind == "latency" and self.hidden.kind != "shared":
            raise ValueError(
                "a latency is foreseen by a table of stock blocks, and hidden.kind: per-block puts matrices on their "
                "skip connections: give params, bytes or flops with it, or say kind: shared"
            )
        if self.spaces:
            self._consistent_narrow(self.hidden)
            return
        self._without_units("hidden")
        if self.hidden.auto:
            raise ValueError("hidden.drop: auto is for recipes with spaces, which lose what the stream does not")
        if self.target == "drift":
            raise ValueError("target drift is for spaces, whose consumers are refitted: say sequential with hidden")
        if self.target == "sequential" and self.hidden.kind == "shared":
            raise ValueError("one basis for all blocks is known before any is sliced: say target: dense")
        if self.hidden.drop is not None and self.size is not None:
            raise ValueError("size and hidden.drop both say how much goes: leave one out")

    def _consistent_narrow(self, hidden: HiddenRecipe) -> None:
        """Dimensions of the residual stream, and units of what reads and writes it."""
        if hidden.kind != "shared":
            raise ValueError(
                "hidden.kind: per-block needs code of its own, in whose blocks nothing else is pruned: beside spaces "
                "say kind: shared, or prune twice, the spaces first"
            )
        if hidden.drop is None:
            raise ValueError(
                "ratio and size speak of spaces here: say how many dimensions go besides, hidden.drop (a number, or "
                "auto)"
            )
        if hidden.auto and not self.weighed_by_effect:
            raise ValueError(
                "hidden.drop: auto weighs dimensions by what they do to the model's output, as the widths must be: say "
                "allocation: least-error, without weigh_by"
            )

    def _consistent_joint(self, depth: DepthRecipe) -> None:
        """Whole blocks, and units of those that stay."""
        if depth.part != "block":
            raise ValueError(f"depth.part: {depth.part} leaves zeros: beside spaces whole blocks go")
        if depth.drop is None and depth.blocks is None:
            raise ValueError(
                "ratio and size speak of spaces here: say how many blocks go besides, depth.drop (a number, or auto) "
                "or depth.blocks"
            )
        if self.layers is not None:
            raise ValueError("layers could mean the blocks that may go or those that are pruned: leave it out")
        if depth.auto and not self.weighed_by_effect and self.at_its_size.depth is not None:
            raise ValueError(
                "depth.drop: auto weighs blocks by what they do to the model's output, as the widths must be: say "
                "allocation: least-error, without weigh_by"
            )

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        for space, own in self.spaces.items():
            kind = kind_of(space)
            if own.score not in kind.scores:
                allowed = ", ".join(kind.scores)
                raise ValueError(f"spaces.{space}: score {own.score} does not rank its units; allowed here: {allowed}")
            if own.compensation.method not in kind.methods:
                allowed = ", ".join(kind.methods)
                raise ValueError(
                    f"spaces.{space}: method {own.compensation.method} is not for this space; allowed here: {allowed}"
                )
            if kind.needs_taylor(self.wish(space)) and self.target != "dense":
                raise ValueError(
                    f"spaces.{space}: score {own.score} is measured on the unpruned model, with a pass back through "
                    "all of it: say target: dense"
                )
        for space in self.spaces:
            reason = kind_of(space).unrankable
            by_errors = self.allocation == "least-error" and not kind_of(space).by_errors
            if reason is not None and (self.ranks_blocks or by_errors):
                raise ValueError(reason)
        if self.refits_experts and self.target == "dense":
            raise ValueError(
                "spaces.experts: those that stay are refitted on the tokens that reach them once others are gone: say "
                "target: sequential or drift"
            )
        if "experts" in self.spaces and "mlp" in map(known_space, self.spaces):
            raise ValueError("experts go whole or lose columns: for both, prune twice, whole experts first")
        if self.ranks_blocks and self.widths == "uniform":
            raise ValueError(
                f"allocation {self.allocation} gives every block its own widths, which no stock model can load: "
                "say widths: per_layer to accept remote code, or allocation: uniform"
            )
        if self.ranks_blocks and self.target != "dense":
            raise ValueError(f"allocation {self.allocation} compares all blocks before any is pruned: target: dense")
        if self.target == "drift" and not self.true_sequential:
            for pair in COUPLED:
                if all(space in self.spaces and ENDS[space] != "logits" for space in pair):
                    raise ValueError(
                        f"{' and '.join(pair)} end in one projection, and with true_sequential: false both would make "
                        "up for the same drift: leave true_sequential out"
                    )
        self._consistent_budget()
        if len({s.compensation.lambda_by for s in self.spaces.values()} & {"perplexity", "folds"}) > 1:
            raise ValueError("lambda_by must be the same in every space that has a grid")
        grids = {
            (tuple(s.compensation.lambda_grid), s.compensation.lambda_units)
            for s in self.spaces.values()
            if s.compensation.lambda_grid and s.compensation.lambda_by == "perplexity"
        }
        if len(grids) > 1:
            raise ValueError("lambda_by: perplexity chooses one value for the model: grids and units must agree")
        return self

    def _consistent_rotation(self) -> None:
        if self.rotation is None or self.mask is None:
            return
        if self.rotation.entropy == "groups" and self.mask.groups is None:
            raise ValueError("rotation.entropy groups is of an N:M pattern's groups: say mask.pattern, such as 2:4")
        if self.rotation.measured == "dense":
            return
        if self.importance == "magnitude":
            raise ValueError("rotation.measured is of inputs, which magnitude's importance does not see: leave it out")
        if self.rotation.kind == "shared":
            raise ValueError(
                "rotation.measured pruned needs rotations that are learned block by block, and kind shared has one of "
                "all blocks before the first is pruned: say kind: per-layer or values"
            )
        if self.target != "sequential":
            raise ValueError("rotation.measured pruned is of what is pruned before a block: say target: sequential")

    def _consistent_budget(self) -> None:
        if self.layers is not None and self.allocation != "uniform":
            raise ValueError(f"allocation {self.allocation} chooses among all blocks: leave out layers")
        if self.layers is not None and self.widths == "uniform" and self.spaces:
            raise ValueError(
                "layers leaves other blocks whole, so that blocks differ in width, which no stock model can load: say "
                "widths: per_layer to accept remote code"
            )
        for space, own in self.spaces.items():
            if self.ranks_blocks and not kind_of(space).scores_columns(own.score):
                raise ValueError(f"spaces.{space}: score {own.score} ranks units, and FLAP's rankings compare columns")
            if own.score == CHOSEN and self.allocation != "least-error":
                raise ValueError(
                    f"spaces.{space}: score {CHOSEN} is chosen by the errors of every width: say allocation: "
                    "least-error"
                )
            if own.compensation.shares is not None and self.target != "drift":
                raise ValueError(f"spaces.{space}: shares are of the drift: say target: drift")
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
    def _as_written(self, spaces: dict[str, SpaceRecipe], handler: SerializerFunctionWrapHandler) -> Any:
        """What is said of every expert is written once."""
        return handler({known_space(name): own for name, own in spaces.items()})

    def at(self, family: Family) -> "Recipe":
        """The recipe with what it says of a space for every one of that name that blocks of a family have.

        What the family has not stays as it is, but for what is optional. Under least-error a space of ratio 0 is left
        out. Spaces of one width (`Family.together`) go together. Where a norm stands behind a consumer, target drift is
        sequential: what the stream lacks, divided by gains near zero, becomes outputs so large that the norm takes it
        from all others (compensation/README.md, section 4).
        """
        columns = [own for name, own in family.columns.items() if known_space(name) in self.spaces]
        if self.target == "drift" and any(each.norm is not None for each in columns):
            return self.model_copy(update={"target": "sequential"}).at(family)
        able = {known_space(name) for name, own in family.spaces.items() if own.whole is None}
        lacking = {name for name, own in self.spaces.items() if own.optional and known_space(name) not in able}
        if lacking:
            left = {name: own for name, own in self.spaces.items() if name not in lacking}
            return self.model_copy(update={"spaces": left}).at(family)
        # A size that spaces meet together says nothing of one: what is to stay whole is not among them.
        takes = {name: own for name, own in self.spaces.items() if own.ratio != 0}
        if self.allocation == "least-error" and takes and len(takes) < len(self.spaces):
            return self.model_copy(update={"spaces": takes}).at(family)
        # One config key says their width: what is said of the first is said of the others.
        alike = {known_space(name): own for name, own in family.spaces.items() if own.units in family.together}
        told = next((self.spaces[name] for name in alike if name in self.spaces), None)
        if told is not None and not alike.keys() <= {known_space(name) for name in self.spaces}:
            more = {name: told for name in alike if name not in self.spaces}
            return self.model_copy(update={"spaces": self.spaces | more}).at(family)
        here = [name for name in family.spaces if known_space(name) in self.spaces and name not in self.spaces]
        if not here:
            return self
        kept = {name: own for name, own in self.spaces.items() if name not in {known_space(each) for each in here}}
        spaces = kept | {name: self.spaces[known_space(name)] for name in here}
        return self.model_copy(update={"spaces": spaces})

    def without(self, spaces: Set[str]) -> "Recipe":
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
    def shares_out(self) -> bool:
        """Whether what was measured decides how much every block, or every linear, loses."""
        return self.allocation == "least-error" or (self.low_rank is not None and self.low_rank.allocation == "energy")

    @property
    def measures_dense(self) -> bool:
        """Whether the unpruned model is measured in any case, also where what is pruned before a block counts."""
        return self.shares_out or (self.low_rank is not None and self.low_rank.update)

    @property
    def linears_need_moments(self) -> bool:
        """Whether a mask or factors are chosen by moments of every linear module's input."""
        if self.low_rank is not None:
            return self.low_rank.whitens
        return self.mask is not None and self.mask.method != "magnitude"

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
        """The recipe with every default spelt out and its keys sorted. Optional parts that it lacks are left out.

        So a recipe keeps its digest when the format gains another optional part. What only a list of recipes reads, its
        goal and its time, is left out, too: a recipe that is timed anew is the same.
        """
        values = self.model_dump(mode="json", by_alias=True, exclude={"goal", "time"})
        for own in values["spaces"].values():
            own["compensation"] = _without(own["compensation"], "candidates", "shares", "centre_keys")
            if own["optional"] is None:
                del own["optional"]
        for part, keys in _LATER.items():
            if values[part] is not None:
                values[part] = {k: v for k, v in values[part].items() if k not in keys or v != keys[k]}
        optional = (
            *("depth", "hidden", "mask", "rotation", "low_rank", "recovery", "export"),
            *("size", "weigh_by", "layers"),
        )
        return json.dumps(_without(values, *optional), sort_keys=True)

    @property
    def after_depth(self) -> "Recipe":
        """What is left to do once the blocks are gone. A size stays where spaces or the stream have to meet it."""
        others = self.spaces or self.hidden is not None
        return self.model_copy(update={"depth": None, "size": self.size if others else None})

    @property
    def joint(self) -> bool:
        """Whether whole blocks go, dimensions of the residual stream, or both, and units of what is left."""
        return bool(self.spaces) and (self.depth is not None or self.hidden is not None)

    @property
    def basis_from_statistics(self) -> bool:
        """Whether moments of what linear modules read tell the one basis of the residual stream."""
        hidden = self.hidden
        alone = not self.spaces and self.depth is None
        return hidden is not None and hidden.kind == "shared" and hidden.signal == "normed" and alone

    @property
    def spaces_alone(self) -> "Recipe":
        """The recipe without blocks and dimensions of the stream."""
        return self.model_copy(update={"depth": None, "hidden": None})

    @property
    def at_its_size(self) -> "Recipe":
        """The recipe without `depth`, where that is for other sizes than the one it has."""
        under = None if self.depth is None else self.depth.under
        if under is None or (self.size is not None and self.size.kind in under):
            return self
        return self.model_copy(update={"depth": None})

    @property
    def after_hidden(self) -> "Recipe":
        """What is left to do once the stream has lost its dimensions. A size stays where spaces have to meet it."""
        if self.spaces:
            return self.model_copy(update={"hidden": None})
        return self.model_copy(update={"hidden": None, "size": None, "target": "dense"})

    @property
    def without_amount(self) -> str:
        """The recipe's canonical JSON but for how much goes: two that share it differ in ratios and size alone."""
        values = json.loads(self.canonical_json())
        for own in values["spaces"].values():
            del own["ratio"]
        return json.dumps({key: value for key, value in values.items() if key not in ("ratio", "size")})

    @property
    def needs_moments(self) -> bool:
        """Whether any score, compensation, mask or rotation needs statistics."""
        masked = self.mask is not None and (
            self.mask.method != "magnitude" or self.mask.allocation in ("owl", "divergence")
        )
        return (
            masked
            or self.linears_need_moments
            or (self.depth is not None and self.depth.measures)
            or self.hidden is not None
            or self.allocation == "least-error"
            or self.rotation_needs_moments
            or any(kind_of(space).needs_moments(self.wish(space)) for space in self.spaces)
        )

    @property
    def importance(self) -> Backbone:
        """The mask method whose importance of weights the rotations concentrate."""
        assert self.mask is not None
        assert self.rotation is not None
        return self.rotation.importance or self.mask.method

    @property
    def rotation_needs_moments(self) -> bool:
        """Whether rotations are learned from statistics of the dense model."""
        return self.rotation is not None and self.importance != "magnitude"

    @property
    def rotates_in_turn(self) -> bool:
        """Whether every block's rotations are learned on what is pruned before it."""
        return self.rotation is not None and self.rotation.measured == "pruned"

    def wish(self, space: SpaceName) -> Wish:
        """What the recipe says about a space, in the form that its kind is asked in."""
        own = self.spaces[space]
        fitted = own.compensation
        return Wish(own.score, fitted.method, self.target, self.allocation == "least-error", bool(fitted.centre_keys))

    def needs_gram(self, space: SpaceName) -> bool:
        """Whether the space's score or compensation, or the target, needs the Gram of a consumer's input."""
        return self.gram_for(space) is not None

    def measures_more(self, space: SpaceName) -> bool:
        """Whether live moments of the space must hold more than the least (`kinds.Kind.measures_more`)."""
        return kind_of(space).measures_more(self.wish(space))

    def gram_for(self, space: SpaceName) -> str | None:
        """What needs the Gram of the space's consumer, in words for a message; None where nothing does."""
        return kind_of(space).gram_for(self.wish(space))

    @property
    def collect(self) -> tuple[Collect, ...]:
        """What statistics must hold for this recipe, at least."""
        found: set[Collect] = {"moments"}
        for space in self.spaces:
            found |= kind_of(space).collects(self.wish(space))
        if self.weighed_by_effect or (self.depth is not None and self.depth.choice not in (None, "loss")):
            found.add("fisher")
        sliced = self.hidden is not None and self.hidden.kind == "shared" and not self.spaces
        if sliced or (self.low_rank is not None and self.low_rank.whitens):
            found |= {"gram", "linears"}
        if self.mask is not None:
            found |= {"gram", "linears"} if self.needs_linear_grams else {"linears"}
        return tuple(each for each in get_args(Collect) if each in found)

    @property
    def calibration(self) -> str:
        """The command that measures statistics for this recipe."""
        folds = " --folds 4" if self.needs_folds else ""
        kinds = f" --collect {','.join(self.collect)}" if "taylor" in self.collect else ""
        return f"ckpt-prune calibrate{folds}{kinds}"

    @property
    def needs_linear_grams(self) -> bool:
        """Whether the mask or the rotations need the Gram of every linear module's input.

        Wanda needs norms alone, until importance rotations mix the inputs.
        """
        assert self.mask is not None
        turned = self.rotation is not None and self.mask.method != "magnitude"
        return self.rotation_needs_moments or turned or self.mask.method == "sparsegpt"

    @property
    def perplexity_grid(self) -> list[float] | None:
        """The strengths to choose from by calibration perplexity; None where nothing is chosen by it."""
        for space in self.spaces.values():
            if space.compensation.lambda_by == "perplexity":
                return space.compensation.lambda_grid
        return None

    @property
    def needs_folds(self) -> bool:
        """Whether something is to be chosen on held-out folds."""
        if self.depth is not None and self.depth.compensation.lambda_by == "folds":
            return True
        return any(s.compensation.by_folds for s in self.spaces.values())

    def with_ratio(self, ratio: float) -> "Recipe":
        """A copy with this ratio in every space, and without a size."""
        values = self.model_dump(by_alias=True) | {"ratio": ratio, "size": None}
        for space in values["spaces"].values():
            space["ratio"] = None
        return Recipe.model_validate(values)

    def with_size(self, size: TargetSize) -> "Recipe":
        """A copy with this size in place of every ratio."""
        values = self.model_dump(by_alias=True) | {"ratio": Recipe.model_fields["ratio"].default, "size": size}
        for space in values["spaces"].values():
            space["ratio"] = None
        return Recipe.model_validate(values)

    @property
    def at_one_ratio(self) -> "Recipe":
        """A copy that takes as much from every block: how large the output gets, where widths are still to be found."""
        values = self.model_dump(by_alias=True) | {"allocation": "uniform", "weigh_by": None}
        for space in values["spaces"].values():
            if space["score"] == CHOSEN:  # sizes depend on none
                space["score"] = CANDIDATES[0]
        if values["low_rank"] is not None:
            values["low_rank"]["allocation"] = "uniform"
        return Recipe.model_validate(values)

    def with_own_ratio(self, space: SpaceName, ratio: float) -> "Recipe":
        """A copy with this ratio in one space."""
        values = self.model_dump(by_alias=True)
        values["spaces"][space]["ratio"] = ratio
        return Recipe.model_validate(values)

    def with_strength(self, strength: float) -> "Recipe":
        """A copy whose strength is fixed wherever it was to be chosen by perplexity."""
        values = self.model_dump(by_alias=True)
        for space in values["spaces"].values():
            if space["compensation"]["lambda_by"] == "perplexity":
                space["compensation"] |= {"lambda": strength, "lambda_grid": None, "lambda_by": None}
        return Recipe.model_validate(values)


_LATER: dict[str, dict[str, Any]] = {
    "mask": {"allocation": "uniform", "threshold": None, "spread": None},
    "rotation": {"measured": "dense", "compute_dtype": "float32", "entropy": "lines"},
    "low_rank": {"update": False},
    "recovery": {"method": "laco"},
}
"""Keys that parts of a recipe have gained, and their defaults: a recipe that says nothing else keeps its digest."""


def _without(values: dict[str, Any], *optional: str) -> dict[str, Any]:
    """A copy without the optional keys that hold None."""
    return {key: value for key, value in values.items() if key not in optional or value is not None}


def json_schema() -> dict[str, Any]:
    """JSON Schema of the recipe format, for editors."""
    return Recipe.model_json_schema(by_alias=True)
