"""A plan on other statistics than it was made from: what every site loses there."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ckpt_prune.architectures.spaces import SpaceName, space_of
from ckpt_prune.calibration.fisher import Fisher
from ckpt_prune.calibration.moments import total
from ckpt_prune.calibration.sources import CachedMoments
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.compensation.logit import absolute_strength
from ckpt_prune.compensation.shift import freedom, shift
from ckpt_prune.compensation.spectrum import EXACT_WIDTH
from ckpt_prune.errors import UserError
from ckpt_prune.transform.engine import AtSite
from ckpt_prune.transform.settle import Settled
from ckpt_prune.transform.solvers.columns import inputs_of


@dataclass(frozen=True)
class SiteShift:
    """One site. Errors are shares of the energy of its output, each on the tokens that it is told of.

    Attributes:
        block, space: which.
        kept, units: how many stay, of how many.
        calibration: error after compensation on the tokens that the plan was made from.
        uncompensated, test, floor: on the others: without compensation, after it, and the least there can be.
        covariances, means, smallest: as `compensation.shift.Shift` has them; None of inputs too wide for eigenvalues.
        bound: CORP's C.1.3 with constants of one, relative likewise: far above what happens.
        freedom: numbers that the compensation is free to choose.
        tokens: that it was chosen on.
    """

    block: int
    space: SpaceName
    kept: int
    units: int
    calibration: float | None
    uncompensated: float
    test: float
    floor: float
    covariances: float | None
    means: float
    smallest: float | None
    bound: float | None
    freedom: int
    tokens: int

    def data(self) -> dict[str, Any]:
        """As JSON has it, where nothing is infinite."""
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}


class Shifting:
    """Looks on while a plan is made, and asks of every site what it loses on other statistics.

    Args:
        settled: the job that is planned.
        statistics: of the same model on other text or images.

    Attributes:
        source: of the other moments, for `Pruner.sites`.
        sites: those told of so far, in the order of computation.
        left: spaces of which nothing is told: they do not end in columns.

    Raises:
        UserError: they are of another model, or one of the two has no Grams.
    """

    def __init__(self, settled: Settled, statistics: Statistics) -> None:
        if settled.request.shortened is not None:
            name = settled.request.whole.recipe.name
            raise UserError(
                f"--test holds sites against other samples, and recipe {name} drops whole blocks: leave it out"
            )
        statistics.check_model(settled.model)
        own = settled.request.statistics
        if own is not None and own.index.digest == statistics.index.digest:
            raise UserError(
                f"--test {statistics.folder} holds the same statistics as --statistics: measure others, on other "
                "samples"
            )
        for each in (settled.request.statistics, statistics):
            if each is None:
                raise UserError("--test holds a plan against other statistics than it was made from: give --statistics")
            if "gram" not in each.index.collect:
                raise UserError(
                    f"--test needs Grams, and {each.folder} has none: calibrate with --collect moments,gram"
                )
        self.source = CachedMoments(statistics, settled.model)
        self.sites: list[SiteShift] = []
        self.left: list[str] = []

    def see(self, block: int, at: AtSite) -> None:
        """One site, solved."""
        plan, new = at.solved
        if new is None:
            return
        if at.solver.description.ends != "columns":
            self.left += [] if plan.space in self.left else [plan.space]
            return
        solver = at.solver
        calibration, others = (total(inputs_of(folds)).to(solver.device) for folds in (at.moments, at.others))
        weight = at.tensors[plan.consumer or ""].to(solver.device)
        columns = solver.model.consumer_columns(solver.space, torch.tensor(plan.kept)).to(solver.device)
        own = solver.own.compensation
        found = shift(
            weight,
            calibration,
            others,
            columns,
            float(absolute_strength(plan.strength or 0.0, own.lambda_units, calibration.square[columns].mean())),
            spectra=calibration.width <= EXACT_WIDTH,
        )
        # The divergence under the metric 2 I is the error itself.
        twice = Fisher(1, 2 * torch.eye(len(weight)))
        lost = solver.divergence(block, at.tensors, (total(inputs_of(at.others)),), at.solved, twice)
        assert lost is not None
        energy = found.energy or math.inf
        self.sites.append(
            SiteShift(
                block=block,
                space=space_of(plan.space, plan.expert),
                kept=len(plan.kept),
                units=plan.units,
                calibration=plan.error_compensated,
                uncompensated=found.uncompensated / energy,
                test=lost / energy,
                floor=found.floor / energy,
                covariances=found.covariances,
                means=found.means,
                smallest=found.smallest,
                bound=None if found.bound is None else found.bound / energy,
                freedom=freedom(plan.method, len(weight), len(columns)),
                tokens=calibration.count,
            )
        )
