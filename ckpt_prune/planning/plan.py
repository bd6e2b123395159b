"""The plan file: which units of which spaces stay, with scores and predicted errors."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from ckpt_prune.architectures.sites import Site
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.errors import UserError
from ckpt_prune.planning.accounting import Cost
from ckpt_prune.planning.recipe import Recipe


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class HeadErrors(_Record):
    """Errors of one head's logits, as shares of Σ‖Q Kᵀ‖². `rho2` is the one of `SitePlan`."""

    head: int
    error_uncompensated: float
    error_compensated: float
    floor: float
    rho2: float


class SitePlan(_Record):
    """One space of one block.

    Attributes:
        block, space, expert: the site. `expert` is None where the block has none, and then left out of JSON.
        consumer: on-disk name of the consumer's weight; None for a space that ends in logits.
        units: units of the dense site. A site of q and k has all rows as units.
        kept: units that stay, ascending.
        scores: scores of all units, to six significant digits.
        method: the compensation; none where nothing is dropped.
        strength: in the recipe's units; None where the method has none.
        share: share of the drift that the weights are fitted to correct; None without drift.
        runner_up, margin: the next best method on held-out folds, and by how much its held-out error is larger,
            relative to the chosen method's. None unless the method was chosen on folds.
        error_uncompensated, error_compensated: predicted Σ‖y − ŷ‖² / Σ‖y‖² without and with compensation, at the
            consumer's output on the calibration tokens, or of the logits. Where the target is drift, y is what brings
            the residual stream back to the dense model's. None without second moments.
        error_held_out: the compensated error over all folds, each scored by a fit to the others. None with one fold,
            or where it was neither asked for nor chosen by.
        residual: relative residual at which conjugate gradients stopped, the largest over heads; None but for q and k.
        j0, floor, rho2: CORP's diagnostics (METHODS section 1 and CORP C.2), per token, or per sample for logits. None
            unless asked for. None, too, where the target is drift: they say nothing about it.
        width, effective_rank, k95, active: figures of the consumer's input in the dense model (`compensation.spectrum`,
            CORP Table 9); None unless asked for.
        heads: errors of every head; None unless asked for, and but for q and k.
    """

    block: int
    space: SpaceName
    expert: int | None = None
    consumer: str | None
    units: int
    kept: list[int]
    scores: list[float]
    method: str
    strength: float | None = None
    share: float | None = None
    runner_up: str | None = None
    margin: float | None = None
    error_uncompensated: float | None = None
    error_compensated: float | None = None
    error_held_out: float | None = None
    residual: float | None = None
    j0: float | None = None
    floor: float | None = None
    rho2: float | None = None
    width: int | None = None
    effective_rank: float | None = None
    k95: int | None = None
    active: float | None = None
    heads: list[HeadErrors] | None = None

    @property
    def site(self) -> Site:
        """The site that this is the plan of."""
        return Site(self.block, self.space, self.expert)

    @model_serializer(mode="wrap")
    def _without_expert(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Files of models without experts do not change."""
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if key != "expert" or value is not None}


class MaskedLinear(_Record):
    """What a mask did to one linear module of one block.

    Attributes:
        block: index.
        weight: on-disk name.
        rows, columns: of the weight.
        zeros: weights that the mask zeroed. Weights that were zero before are among them.
        error: Σ‖y − ŷ‖² / Σ‖y‖² at the module's output on the calibration tokens; None without Grams.
        damp: what SparseGPT added to the diagonal of the Hessian, as a share of its mean; None for other methods.
        dead: number of inputs that were zero on every calibration token. SparseGPT zeroes their columns. None for other
            methods.
    """

    block: int
    weight: str
    rows: int
    columns: int
    zeros: int
    error: float | None = None
    damp: float | None = None
    dead: int | None = None


class StatisticsReference(_Record):
    """Which statistics a plan was made from."""

    path: str
    digest: str


class Plan(_Record):
    """Everything that `prune` needs to apply the same decisions again. It applies them to the same model only."""

    version: Literal[1] = 1
    model: str
    model_path: str
    recipe: Recipe
    recipe_digest: str
    statistics: StatisticsReference | None
    container: str
    container_note: str | None
    before: Cost
    after: Cost
    sites: list[SitePlan]

    def to_json(self) -> str:
        """Readable JSON, with one line for every site."""
        data = self.model_dump(mode="json", by_alias=True)
        sites = data.pop("sites")
        head = json.dumps(data, indent=2).removesuffix("\n}")
        lines = ",\n".join("    " + json.dumps(site) for site in sites)
        return f'{head},\n  "sites": [\n{lines}\n  ]\n}}\n'

    @property
    def digest(self) -> str:
        """sha256 of the plan's JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        UserError: the file is not there or not a plan, or was edited so that its recipe does not match its digest.
    """
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        plan = Plan.model_validate(values)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, ValidationError) as error:
        raise UserError(f"{path} is not a plan: plans are written by `ckpt-prune plan`") from error
    if plan.recipe.digest != plan.recipe_digest:
        raise UserError(f"{path}: the recipe inside does not match its digest: plan again instead of editing it")
    return plan
