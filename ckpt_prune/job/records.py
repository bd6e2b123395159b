"""Records of plans and reports: sites, blocks, dimensions, and what they came from.

Nothing here needs torch: reading a report must not take seconds.
"""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from ckpt_prune.common.records import Amount, Block, Count, Figure, FixedRecord
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.recipe.origin import Origin

RecipeT = TypeVar("RecipeT")
SiteT = TypeVar("SiteT")


class HeadErrors(FixedRecord):
    """Errors of one head's logits, as shares of Σ‖Q Kᵀ‖²; rho2 as in `SiteRecord`."""

    head: Count
    error_uncompensated: Figure = None
    error_compensated: Figure = None
    floor: Figure = None
    rho2: Figure = None


class SiteRecord(FixedRecord):
    """The pruning of a site: one space of one block.

    Attributes:
        expert: None if the block has none.
        consumer: on-disk name of the consumer's weight; None for a space that ends in logits.
        units: of the dense site. A site of q and k has all rows as units.
        kept: units that stay, ascending.
        score: that its units were ranked by, if it was chosen site by site.
        few: tokens that the router sent to an expert, if they were too few, so that it was measured on all tokens of
            the layer.
        method: the compensation; none if nothing is dropped.
        strength: in the recipe's units; None if the method has none.
        share: share of the drift that the weights are fitted to correct; None without drift.
        runner_up, margin: the next best method on held-out folds, and by how much its held-out error is larger,
            relative to the chosen method's; at least by that much if it was ruled out unscored.
        error_uncompensated, error_compensated: predicted Σ‖y − ŷ‖² / Σ‖y‖² without and with compensation, at the
            consumer's output on the calibration tokens, or of the logits. If the target is drift, y is what brings the
            residual stream back to the dense model's. None without second moments.
        divergence: what the errors of the site alone are predicted to do to the model's own output, by the Fisher
            metric (measure/README.md, section 5).
        error_held_out: the compensated error over folds, each scored by a fit to the others: over those that the choice
            held out, or over all of them.
        residual: relative residual at which conjugate gradients stopped, the largest over heads; of q and k.
        j0, floor, rho2: CORP's diagnostics (compensation/README.md, section 3, and CORP C.2), per token, or per sample
            for logits. None if the target is drift: they say nothing about it.
        width, effective_rank, k95, k95_inputs, active: figures of the consumer's input in the dense model
            (`compensation.spectrum`, CORP Table 9).
        heads: errors of every head, of q and k.
    """

    optional = frozenset({"expert", "score", "few", "divergence", "k95_inputs"})

    block: Block
    space: str
    expert: Count | None = None
    consumer: str | None = None
    units: Annotated[int, Field(ge=1, le=2**63)]
    kept: list[int]
    score: str | None = None
    few: Count | None = None
    method: str
    strength: Figure = None
    share: Figure = None
    runner_up: str | None = None
    margin: Figure = None
    error_uncompensated: Figure = None
    error_compensated: Figure = None
    divergence: Figure = None
    error_held_out: Figure = None
    residual: Figure = None
    j0: Figure = None
    floor: Figure = None
    rho2: Figure = None
    width: Amount = None
    effective_rank: Figure = None
    k95: Amount = None
    k95_inputs: Amount = None
    active: Figure = None
    heads: list[HeadErrors] | None = None


class GapRecord(FixedRecord):
    """A run of consecutive blocks that are gone, and what makes up for them.

    Attributes:
        first: number of the first block that is gone, in the dense model.
        into: on-disk name, in the output, of the weight that the map was absorbed in, of experts with `*` for their
            numbers; None without a map.
        method: none (the stream goes on as it is), bias, ridge or affine: the form of the map.
        strength: of ridge and affine, relative.
        distance: mean cosine distance of a token's hidden states before and after the run.
        divergence: what dropping the run is predicted to do to the model's own output.
        error_uncompensated, error_compensated: Σ‖y − ŷ‖² / Σ‖y‖² on the calibration tokens without and with the map,
            y being what the mlp before the gap would have to give.
        error_held_out: the compensated error on folds that were left out of the fit.
    """

    first: Block
    blocks: Annotated[int, Field(ge=1, le=10**6)]
    into: str | None = None
    method: str = "none"
    strength: Figure = None
    distance: Figure = None
    divergence: Figure = None
    error_uncompensated: Figure = None
    error_compensated: Figure = None
    error_held_out: Figure = None


class Tried(FixedRecord):
    """An amount that was tried, the rest of the size met by widths.

    Attributes:
        predicted: what it was predicted to do to the model's own output, units included.
        measured: what it did, on samples that no refit had seen.
    """

    predicted: Figure = None
    measured: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TriedDepth(Tried):
    """So many blocks were gone."""

    blocks: Annotated[int, Field(ge=0, le=10**6)]


class DepthRecord(FixedRecord):
    """The blocks of a model that are gone, or that have zeros in place of a part.

    Attributes:
        part: what is gone: the whole block, its attention or its mlp. Blocks without a part keep their numbers.
        left_out: the output has no tensors of the attentions that are gone, nor of the norm before; else it has zeros.
        blocks: number of blocks of the dense model.
        kept: the blocks that stay, ascending; in the output they are numbered anew.
        choose: how the others were chosen; None if they were given.
        gaps: runs of blocks that are gone, in order.
        tried: numbers of blocks that were tried, ascending; empty if one number was given, and if the stream may lose
            dimensions, too.
    """

    optional = frozenset({"left_out"})

    part: Literal["block", "attention", "mlp"] = "block"
    left_out: bool | None = None
    blocks: Annotated[int, Field(ge=1, le=10**6)]
    kept: list[Block]
    choose: str | None = None
    gaps: list[GapRecord] = Field(default_factory=list)
    tried: list[TriedDepth] = Field(default_factory=list)

    @property
    def gone(self) -> list[int]:
        """The blocks that are gone, or have lost the part, ascending."""
        return [block for block in range(self.blocks) if block not in set(self.kept)]


class StatisticsReference(FixedRecord):
    """Which statistics a plan was made from."""

    path: str
    digest: str


class PlanFile(FixedRecord, Generic[RecipeT, SiteT]):
    """A plan as its file has it; `job.plan.Plan` says which recipe and sites a plan has that can be applied."""

    optional = frozenset({"origin"})

    version: Literal[1] = 1
    model: str
    model_path: str
    recipe: RecipeT
    recipe_digest: str = ""
    origin: Origin | None = None
    statistics: StatisticsReference | None = None
    container: str
    container_note: str | None = None
    before: Cost
    after: Cost
    depth: DepthRecord | None = None
    sites: list[SiteT]
