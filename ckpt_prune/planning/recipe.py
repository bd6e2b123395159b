"""Recipes: the YAML a team shares. Unknown keys are refused, and every error names file, line and key."""

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.calibration.kinds import Collect
from ckpt_prune.compensation.methods import (
    AUTO,
    CANDIDATES,
    COLUMN_METHODS,
    GRID,
    LOGIT_METHODS,
    METHODS,
    SHARES,
    Traits,
)
from ckpt_prune.errors import UserError
from ckpt_prune.planning.export_recipe import ExportRecipe
from ckpt_prune.planning.fields import Strict, one_of
from ckpt_prune.planning.mask_recipe import MaskRecipe, RotationRecipe
from ckpt_prune.planning.recovery_recipe import RecoveryRecipe
from ckpt_prune.planning.sizes import TargetSize
from ckpt_prune.planning.yaml12 import Yaml12Loader
from ckpt_prune.rotations.importance import Backbone
from ckpt_prune.scoring.logit_scores import LOGIT_SCORES, LogitScore
from ckpt_prune.scoring.scores import SCORES, Score
from ckpt_prune.scoring.unit_scores import UNIT_SCORES, UnitScore
from ckpt_prune.sparsity.damping import DAMP
from ckpt_prune.sparsity.patterns import UNSTRUCTURED, parse_pattern

COLUMN_SCORES: dict[str, Score | UnitScore] = {**SCORES, **UNIT_SCORES}
"""All that a recipe may rank the units of an output projection by."""

if TYPE_CHECKING:
    ScoreName = str
    MethodName = str
    CandidateName = str
else:
    ScoreName = one_of("score", COLUMN_SCORES | LOGIT_SCORES)
    MethodName = one_of("method", COLUMN_METHODS | LOGIT_METHODS)
    CandidateName = one_of("candidate", METHODS)
Rounding = Literal["floor", "ceil", "nearest"]
DEFAULT_RECIPE = "best"
"""The shipped recipe of those who name none."""


def methods_of(space: SpaceName) -> Mapping[str, Traits]:
    """Compensations of a space: those of logits for q and k, those of projections for the others."""
    return LOGIT_METHODS if space == "qk" else COLUMN_METHODS


def scores_of(space: SpaceName) -> Mapping[str, Score | UnitScore | LogitScore]:
    """Scores that rank the units of a space."""
    return LOGIT_SCORES if space == "qk" else COLUMN_SCORES


class Compensation(Strict):
    """How what stays is rewritten after units are dropped (METHODS sections 1 and 3)."""

    method: MethodName = Field("none", description="Closed form folded into the consumer; logit: into q and k.")
    lam: float | None = Field(
        None, alias="lambda", ge=0, description="Ridge strength, for ridge, affine, grail and logit. Default 0.01."
    )
    lambda_units: Literal["relative", "absolute"] = Field(
        "relative", description="relative: times the mean diagonal of the kept Gram; absolute: as it stands."
    )
    lambda_grid: list[float] | None = Field(
        None, min_length=2, description="Strengths to choose from; method auto has a grid of its own."
    )
    lambda_by: Literal["folds", "perplexity"] | None = Field(
        None,
        description="How the grid is searched. folds: per site by held-out error, in closed form; "
        "perplexity: one value for the model by calibration perplexity (RCPU 7.1), which needs text.",
    )
    candidates: list[CandidateName] | None = Field(
        None,
        min_length=1,
        description="What method auto chooses among. Default: none, bias, rotation, rotation-scale, ridge, affine; "
        "those with a bias only where the projection has one already.",
    )
    shares: list[float] | None = Field(
        None,
        min_length=1,
        description="With target: drift, shares of the drift to correct, each from 0 (the sequential target) to 1 (the "
        "dense model's own residual stream); of several the best on held-out folds. Default: 0, 0.25, 0.5, 0.75, 1 "
        "for method auto and lambda_by: folds; else 1.",
    )

    @classmethod
    def nothing(cls) -> "Compensation":
        """No compensation."""
        return cls.model_validate({})

    @model_validator(mode="after")
    def _consistent(self) -> "Compensation":
        uses = (LOGIT_METHODS | COLUMN_METHODS)[self.method].uses_lambda
        given = [k for k in ("lam", "lambda_grid", "lambda_by") if getattr(self, k) is not None]
        if given and not uses:
            raise ValueError(f"method {self.method} has no lambda")
        if self.method == AUTO and (self.lam is not None or self.lambda_by is not None):
            raise ValueError("method auto chooses lambda on folds: lambda and lambda_by do not go with it")
        if self.method != AUTO and (self.lambda_grid is None) != (self.lambda_by is None):
            raise ValueError("lambda_grid and lambda_by go together")
        if self.candidates is not None and self.method != AUTO:
            raise ValueError(f"candidates are for method auto, not {self.method}")
        if not all(0 <= share <= 1 for share in self.shares or []):
            raise ValueError("shares of the drift are numbers from 0 to 1")
        if self.shares is not None and len(self.shares) > 1 and not self.by_folds:
            raise ValueError("several shares of the drift are chosen from by method auto or lambda_by: folds")
        if self.lambda_grid is not None and self.lam is not None:
            raise ValueError("give lambda or lambda_grid, not both")
        if self.lambda_grid is not None and min(self.lambda_grid) < 0:
            raise ValueError("lambda_grid holds a negative strength")
        return self

    @property
    def strength(self) -> float:
        """λ where it is fixed."""
        return 0.01 if self.lam is None else self.lam

    @property
    def by_folds(self) -> bool:
        """Whether something is chosen on held-out folds."""
        return self.method == AUTO or self.lambda_by == "folds"

    @property
    def grid(self) -> list[float]:
        """Strengths to choose from on folds."""
        return list(GRID) if self.lambda_grid is None else self.lambda_grid

    @property
    def drift_shares(self) -> list[float]:
        """Shares of the drift to choose from; of one, that one."""
        if self.shares is not None:
            return self.shares
        return list(SHARES) if self.by_folds else [1.0]

    def methods(self, *, biased: bool) -> list[str]:
        """Closed forms of a projection to choose from; of one, that one.

        Args:
            biased: whether the projection has a bias in the source.
        """
        if self.method != AUTO:
            return [self.method]
        if self.candidates is not None:
            return list(dict.fromkeys(self.candidates))
        return [name for name in CANDIDATES if biased or not METHODS[name].adds_bias]

    @property
    def opens_bias(self) -> bool:
        """Whether a projection without a bias may get one."""
        known = self.method in COLUMN_METHODS
        return known and any(METHODS[name].adds_bias for name in self.methods(biased=False))


class SpaceRecipe(Strict):
    """What happens to one space."""

    score: ScoreName = Field(description="Which units to keep: those with the highest score.")
    ratio: float | None = Field(None, ge=0, lt=1, description="Share of units to drop; the recipe's ratio by default.")
    rounding: Rounding | None = Field(
        None,
        description="Of units x ratio to units dropped. Default: floor for heads and dimensions, ceil for columns.",
    )
    multiple_of: int = Field(1, ge=1, description="Round the kept width up to a multiple of this many units.")
    compensation: Compensation = Field(default_factory=Compensation.nothing, description="none by default.")


class Recipe(Strict):
    """A recipe: what to score with, how much to drop, how to compensate, and into which container."""

    version: Literal[1] = Field(description="Version of the recipe format.")
    name: str = Field(min_length=1, description="Name in tables and in the output's ckpt_prune.json.")
    summary: str = Field("", description="One line for `recipe list`.")
    source: str = Field("", description="Paper and equations.")
    ratio: float = Field(
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
        None, description="Size to reach, in place of a ratio: params, bytes or flops, such as {params: 5.0B}."
    )
    allocation: Literal["uniform", "across-layers", "across-layers-and-spaces", "least-error"] = Field(
        "uniform",
        description="uniform: same ratio everywhere; across-layers and across-layers-and-spaces: FLAP's AL-MM and "
        "AL-AM; least-error: the widths of the least predicted error for the size that the ratio or size says.",
    )
    weigh_by: Literal["effect", "energy"] | None = Field(
        None,
        description="How allocation least-error compares the errors of sites. effect: by what pruning each alone does "
        "to the model's own output, measured; energy: as shares of each output's energy. Default: effect.",
    )
    widths: Literal["uniform", "per_layer"] = Field(
        "uniform", description="per_layer: blocks may differ in width; the output then carries remote code."
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
    mask: MaskRecipe | None = Field(None, description="Zeros in the weights of every block, instead of spaces.")
    rotation: RotationRecipe | None = Field(None, description="Rotations learned before the mask.")
    recovery: RecoveryRecipe | None = Field(
        None, description="Train what stays of each block right after it is pruned (LaCo)."
    )
    export: ExportRecipe | None = Field(None, description="End in an ONNX graph, in the output's folder onnx.")

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

    @model_validator(mode="after")
    def _one_kind(self) -> "Recipe":
        if self.rotation is not None and self.mask is None:
            raise ValueError("rotation comes before a mask: say mask (with ratio 0 nothing is zeroed)")
        if bool(self.spaces) == (self.mask is not None):
            raise ValueError(
                "a recipe has either spaces, which lose units, or a mask, which zeroes weights; for both, prune twice, "
                "the mask last"
                if self.mask is not None
                else "nothing to do: spaces or a mask is missing"
            )
        if self.rotation is not None and self.rotation.damp != DAMP and self.importance != "sparsegpt":
            raise ValueError(f"rotation.damp is for sparsegpt's importance, not {self.importance}'s: leave it out")
        if self.mask is not None and (self.allocation, self.widths, self.size) != ("uniform", "uniform", None):
            raise ValueError("allocation, widths and size speak of units: they do not go with a mask")
        if self.mask is not None and self.target == "drift":
            raise ValueError("target drift is for spaces, whose consumers are refitted: say sequential with a mask")
        if self.mask is not None and self.container == "padded":
            raise ValueError("container padded is for spaces: a mask leaves every shape as it is")
        if self.mask is not None and "ratio" not in self.model_fields_set:
            raise ValueError("an unstructured mask needs ratio, the share of weights to zero; N:M patterns do not")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        for space, own in self.spaces.items():
            if own.score not in scores_of(space):
                allowed = ", ".join(scores_of(space))
                raise ValueError(f"spaces.{space}: score {own.score} does not rank its units; allowed here: {allowed}")
            if own.compensation.method not in methods_of(space):
                allowed = ", ".join(methods_of(space))
                raise ValueError(
                    f"spaces.{space}: method {own.compensation.method} is not for this space; allowed here: {allowed}"
                )
        if self.ranks_blocks and "qk" in self.spaces:
            raise ValueError("q and k keep the same number of dimensions in every head and layer: allocation: uniform")
        if self.ranks_blocks and self.widths == "uniform":
            raise ValueError(
                f"allocation {self.allocation} gives every block its own widths, which no stock model can load: "
                "say widths: per_layer to accept remote code, or allocation: uniform"
            )
        if self.ranks_blocks and self.target != "dense":
            raise ValueError(f"allocation {self.allocation} compares all blocks before any is pruned: target: dense")
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

    def _consistent_budget(self) -> None:
        for space, own in self.spaces.items():
            if self.ranks_blocks and own.score in UNIT_SCORES:
                raise ValueError(f"spaces.{space}: score {own.score} ranks units, and FLAP's rankings compare columns")
            known = own.score in UNIT_SCORES or space == "qk"
            if self.allocation == "least-error" and not known:
                raise ValueError(
                    f"spaces.{space}: allocation least-error needs the errors of every width, which score obs gives, "
                    f"not {own.score}"
                )
            if own.compensation.shares is not None and self.target != "drift":
                raise ValueError(f"spaces.{space}: shares are of the drift: say target: drift")
        if self.allocation == "least-error" and {"heads", "qk"} <= self.spaces.keys():
            raise ValueError(
                "allocation least-error adds up what units of every space save, and a dimension of q and k saves less "
                "with fewer heads: leave out spaces.heads or spaces.qk"
            )
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

    @property
    def ranks_blocks(self) -> bool:
        """Whether units of all blocks are ranked in one list (FLAP)."""
        return self.allocation.startswith("across")

    @property
    def weighed_by_effect(self) -> bool:
        """Whether widths are found from measured effects on the model's output."""
        return self.allocation == "least-error" and self.weigh_by != "energy"

    def ratio_of(self, space: SpaceName) -> float:
        """Share of units to drop in a space."""
        own = self.spaces[space].ratio
        return self.ratio if own is None else own

    @property
    def digest(self) -> str:
        """sha256 of the recipe's canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def canonical_json(self) -> str:
        """The recipe with every default spelt out, keys sorted; without the parts that it may have and has not.

        So a recipe that does not use them has the digest it had before there were any.
        """
        values = self.model_dump(mode="json", by_alias=True)
        for own in values["spaces"].values():
            own["compensation"] = _without(own["compensation"], "candidates", "shares")
        optional = ("mask", "rotation", "recovery", "export", "size", "weigh_by")
        return json.dumps(_without(values, *optional), sort_keys=True)

    @property
    def needs_moments(self) -> bool:
        """Whether any score, compensation, mask or rotation needs statistics."""
        masked = self.mask is not None and self.mask.method != "magnitude"
        return masked or self.rotation_needs_moments or any(self.space_needs_moments(space) for space in self.spaces)

    @property
    def importance(self) -> Backbone:
        """Whose importance the rotations concentrate."""
        assert self.mask is not None
        assert self.rotation is not None
        return self.rotation.importance or self.mask.method

    @property
    def rotation_needs_moments(self) -> bool:
        """Whether rotations are learned from statistics of the dense model."""
        return self.rotation is not None and self.importance != "magnitude"

    def space_needs_moments(self, space: SpaceName) -> bool:
        """Whether the space's score or compensation needs statistics."""
        own = self.spaces[space]
        return scores_of(space)[own.score].needs_moments or own.compensation.method != "none"

    def needs_gram(self, space: SpaceName) -> bool:
        """Whether the space's score or compensation, or the target, needs the Gram of a consumer's input."""
        own = self.spaces[space]
        if space == "qk":
            return False
        scored = scores_of(space)[own.score].needs_gram
        return scored or COLUMN_METHODS[own.compensation.method].needs_gram or self.target == "drift"

    def gram_for(self, space: SpaceName) -> str:
        """What of a space that needs a Gram needs it, for a message."""
        own = self.spaces[space]
        if COLUMN_METHODS[own.compensation.method].needs_gram:
            return f"compensation {own.compensation.method}"
        return f"score {own.score}" if scores_of(space)[own.score].needs_gram else f"target {self.target}"

    @property
    def collect(self) -> tuple[Collect, ...]:
        """What statistics must hold for this recipe, at least."""
        found: list[Collect] = ["moments"]
        if any(self.needs_gram(space) for space in self.spaces):
            found.append("gram")
        if "qk" in self.spaces and (self.space_needs_moments("qk") or self.allocation == "least-error"):
            found.append("logits")
        if self.mask is not None:
            found += ["gram", "linears"] if self.needs_linear_grams else ["linears"]
        return tuple(found)

    @property
    def calibration(self) -> str:
        """The command that measures statistics for this recipe, for a message."""
        folds = " --folds 4" if self.needs_folds else ""
        return f"ckpt-prune calibrate{folds}{' --effects' if self.weighed_by_effect else ''}"

    @property
    def needs_linear_grams(self) -> bool:
        """Whether the mask or the rotations need the Gram of every linear's input.

        Wanda's norms do under rotations, which mix inputs.
        """
        assert self.mask is not None
        turned = self.rotation is not None and self.mask.method != "magnitude"
        return self.rotation_needs_moments or turned or self.mask.method == "sparsegpt"

    @property
    def perplexity_grid(self) -> list[float] | None:
        """The λ grid to be searched by calibration perplexity, where there is one."""
        for space in self.spaces.values():
            if space.compensation.lambda_by == "perplexity":
                return space.compensation.lambda_grid
        return None

    @property
    def needs_folds(self) -> bool:
        """Whether something is to be chosen on held-out folds."""
        return any(s.compensation.by_folds for s in self.spaces.values())

    def with_ratio(self, ratio: float) -> "Recipe":
        """The same recipe with this ratio in every space, in place of a size."""
        values = self.model_dump(by_alias=True) | {"ratio": ratio, "size": None}
        for space in values["spaces"].values():
            space["ratio"] = None
        return Recipe.model_validate(values)

    def with_strength(self, strength: float) -> "Recipe":
        """The same recipe with λ fixed wherever it was to be chosen by perplexity."""
        values = self.model_dump(by_alias=True)
        for space in values["spaces"].values():
            if space["compensation"]["lambda_by"] == "perplexity":
                space["compensation"] |= {"lambda": strength, "lambda_grid": None, "lambda_by": None}
        return Recipe.model_validate(values)


def _without(values: dict[str, Any], *optional: str) -> dict[str, Any]:
    """The same without those of the optional keys that hold nothing."""
    return {key: value for key, value in values.items() if key not in optional or value is not None}


def json_schema() -> dict[str, Any]:
    """JSON Schema of the recipe format, for editors."""
    return Recipe.model_json_schema(by_alias=True)


# ---- finding and reading ---------------------------------------------------------------------------------------


def recipes_folder() -> Path:
    """Where the shipped recipes are: inside the installed package, or at the root of a source checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Name → file of every shipped recipe, sorted by name."""
    return {path.stem: path for path in sorted(recipes_folder().glob("*.yaml"), key=lambda path: path.stem)}


def find_recipe(reference: str) -> Path:
    """A shipped recipe's name or a path to a file, as a path.

    Raises:
        UserError: neither; the nearest shipped name is suggested.
    """
    shipped = shipped_recipes()
    if reference in shipped:
        return shipped[reference]
    path = Path(reference)
    if path.is_file():
        return path
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        raise UserError(f"{reference}: no such recipe file")
    near = difflib.get_close_matches(reference, shipped, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no recipe {reference!r}: {hint}shipped are {', '.join(shipped)}; or give a path to a .yaml file")


def recipe_text(path: Path) -> str:
    """What stands in a recipe file, comments included.

    Raises:
        UserError: it is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: a recipe is a YAML file") from error


def load_recipe(
    reference: str,
    overrides: tuple[str, ...] = (),
    ratio: float | None = None,
    size: Mapping[str, str] | None = None,
) -> Recipe:
    """Read and check a recipe.

    Args:
        reference: a shipped recipe's name or a path.
        overrides: `key=value` pairs, dotted keys, YAML values, applied before checking.
        ratio: replaces the recipe's ratio and every space's own.
        size: replaces all ratios and the recipe's size: params, bytes or flops.

    Raises:
        UserError: not found, not YAML, or not a recipe; each message names file, line and key path.
    """
    path = find_recipe(reference)
    content = recipe_text(path)
    values, lines = parse_yaml(content, path)
    if "sites" in values:
        raise UserError(f"{path} is a plan, not a recipe: say --plan {path}")
    if not {"spaces", "mask", "name"} & values.keys():
        raise UserError(f"{path} is not a recipe: it has neither name nor spaces (`ckpt-prune recipe show rcpu`)")
    for override in overrides:
        keys = _apply_override(values, override)
        # What is set on the command line has no line in the file.
        lines = {known: line for known, line in lines.items() if known[: len(keys)] != keys} | {keys: 0}
        lines |= {keys[:n]: 0 for n in range(1, len(keys)) if keys[:n] not in lines}
    if ratio is not None:
        mask = values.get("mask")
        pattern = str(mask.get("pattern", UNSTRUCTURED)) if isinstance(mask, dict) else UNSTRUCTURED
        if pattern != UNSTRUCTURED:
            raise UserError(
                f"--ratio {ratio:g} does not go with pattern {pattern}, which says by itself how much is zeroed: "
                f"take a recipe without one, or say --set mask.pattern={UNSTRUCTURED} as well"
            )
        values["ratio"] = ratio
        values.pop("size", None)
    if size is not None:
        if "mask" in values:
            raise UserError(f"recipe {path.stem} has a mask, which leaves every size as it is: say --ratio")
        values["size"] = dict(size)
        values.pop("ratio", None)
    if ratio is not None or size is not None:
        for space in _mappings(values.get("spaces")):
            space.pop("ratio", None)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        found = [_explain(e, path, lines, values) for e in error.errors()]
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise UserError("; ".join(found[:3]) + more) from error


def _mappings(values: Any) -> list[dict[str, Any]]:
    return [v for v in values.values() if isinstance(v, dict)] if isinstance(values, dict) else []


def parse_yaml(content: str, path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """A YAML mapping and the line (from 1) of each of its key paths.

    Raises:
        UserError: not YAML, not a mapping, or a key given twice.
    """
    lines: dict[tuple[str, ...], int] = {}

    def walk(node: yaml.Node, prefix: tuple[str, ...]) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            here = (*prefix, str(key.value))
            line = key.start_mark.line + 1
            if here in lines:
                raise UserError(f"{path}, line {line}: {'.'.join(here)} is given twice")
            lines[here] = line
            walk(value, here)

    try:
        root = yaml.compose(content, Loader=Yaml12Loader)
        values = yaml.load(content, Loader=Yaml12Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not YAML: {reason}") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply for a recipe") from error
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{path} holds a value that cannot be read: {error}") from error
    if not isinstance(values, dict) or root is None:
        raise UserError(f"{path} is not a recipe: a mapping of keys is expected (`ckpt-prune recipe show rcpu`)")
    try:
        walk(root, ())
    except RecursionError as error:  # an alias inside what it stands for
        raise UserError(f"{path} refers to itself") from error
    return values, lines


def _apply_override(values: dict[str, Any], override: str) -> tuple[str, ...]:
    """Change one key of a recipe's values; returns its path."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override}: expected key=value, for example spaces.mlp.ratio=0.3")
    try:
        value = yaml.load(text, Loader=Yaml12Loader)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override}: {text!r} is not a YAML value") from error
    *parents, last = key.split(".")
    place = values
    for depth, parent in enumerate(parents):
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise UserError(f"--set {override}: {'.'.join(parents[: depth + 1])} holds a value, not keys")
    place[last] = value
    return (*parents, last)


def _allowed_keys(loc: tuple[Any, ...]) -> list[str]:
    """Keys allowed in the mapping that a location's last key stands in."""
    model: type[BaseModel] = Recipe
    parts: dict[Any, type[BaseModel]] = {
        "mask": MaskRecipe,
        "rotation": RotationRecipe,
        "recovery": RecoveryRecipe,
        "export": ExportRecipe,
        "size": TargetSize,
    }
    if len(loc) >= 2 and loc[0] in parts:
        model = parts[loc[0]]
    elif len(loc) >= 3 and loc[0] == "spaces":
        model = Compensation if len(loc) >= 4 and loc[2] == "compensation" else SpaceRecipe
    elif len(loc) == 2 and loc[0] == "spaces":
        return list(SpaceName.__args__)  # type: ignore[attr-defined]
    return [field.alias or name for name, field in model.model_fields.items()]


def _explain(error: Any, path: Path, lines: dict[tuple[str, ...], int], values: dict[str, Any]) -> str:
    loc = tuple(part for part in error["loc"] if part != "[key]")
    keys = tuple(str(part) for part in loc)
    line = next((lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in lines), None)
    where = f"{path}, line {line}" if line else "--set" if line == 0 else str(path)
    key = ".".join(keys)
    if error["type"] in {"extra_forbidden", "literal_error"} and (
        error["type"] == "extra_forbidden" or error["loc"][-1] == "[key]"
    ):
        allowed = _allowed_keys(loc)
        near = difflib.get_close_matches(keys[-1], allowed, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if keys[-1] in Recipe.model_fields and len(keys) > 1:
            hint = f"{keys[-1]} stands at the top of a recipe; "
        return f"{where}: unknown key {key}: {hint}allowed here: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{where}: {key} is missing"
    if error["type"] == "model_type":
        return f"{where}: {key}: keys are expected ({', '.join(_allowed_keys((*loc, '')))}), got {error['input']!r}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}: {key + ': ' if key else ''}{message}"
    return f"{where}: {key}: {message[0].lower()}{message[1:]}, got {error['input']!r}"
