"""`ckpt_prune.sweep`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.types import AnyModel, AnyPath
from ckpt_prune.architectures.composite import PartName
from ckpt_prune.errors import UserError
from ckpt_prune.options import PlanOptions, checked
from ckpt_prune.progress import progress_shown

if TYPE_CHECKING:
    from ckpt_prune.architectures.spaces import SpaceName
    from ckpt_prune.calibration.statistics import Statistics
    from ckpt_prune.planning.records import Cost
    from ckpt_prune.transform.sweep import DepthPoint, Point


@dataclass(frozen=True)
class Sweep:
    """The curve of a recipe: size and predicted error at several ratios.

    Attributes:
        recipe: its name.
        spaces: that it prunes.
        before: size of the dense model.
        points: one for each ratio.
        depth: the same of whole blocks in place of units, where the statistics say what they do.
    """

    recipe: str
    spaces: tuple["SpaceName", ...]
    before: "Cost"
    points: tuple["Point", ...]
    depth: tuple["DepthPoint", ...] = ()

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        rows = [
            {
                "ratio": point.ratio,
                **point.after.model_dump(),
                "widths": point.widths,
                "errors": point.errors,
                "divergence": point.divergence,
            }
            for point in self.points
        ]
        blocks = [
            {"ratio": own.ratio, "gone": own.gone, **own.after.model_dump(), "divergence": own.divergence}
            for own in self.depth
        ]
        return {"recipe": self.recipe, "before": self.before.model_dump(), "points": rows, "depth": blocks}


def sweep(
    model: AnyModel,
    ratios: str | Sequence[float],
    *,
    recipe: AnyPath | None = None,
    statistics: "AnyPath | Statistics | None" = None,
    overrides: Mapping[str, object] | Sequence[str] = (),
    container: str | None = None,
    family: AnyPath | None = None,
    part: PartName | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Sweep:
    """Plan at several ratios, as `ckpt-prune plan --sweep` does.

    Args:
        model: a folder, a Hub id, or what a function of this package has written.
        ratios: "FROM:TO:STEP", both ends included, or the ratios themselves.
        recipe: a shipped recipe's name or a file; None for the default.
        statistics: what `calibrate` gave, or its folder.
        overrides: changes of the recipe's keys, dotted.
        container: what the output is to be stored as.
        family: file of a description of the model's family, where this version has none.
        part: which part of a model that is made of several: text or vision.
        trust_remote_code: accept a model that asks for code of its own.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars on stderr.

    Raises:
        UserError: as `plan`, or a ratio leaves nothing of a space.
    """
    wanted = _ratios(ratios) if isinstance(ratios, str) else [float(ratio) for ratio in ratios]
    options = checked(PlanOptions, {**locals(), "diagnostics": False})

    from ckpt_prune.architectures.spaces import first_of_experts
    from ckpt_prune.planning.accounting import cost_of
    from ckpt_prune.transform.asked import plan_request
    from ckpt_prune.transform.checks import check_request
    from ckpt_prune.transform.sweep import depth_points_at, points_at

    with progress_shown(progress):
        request = plan_request(options)
        check_request(request)
        request.model.checkpoint.check_finite()
        points = points_at(request, wanted)
        spaces = tuple(first_of_experts(request.recipe.spaces))
        blocks = tuple(depth_points_at(request, wanted))
        return Sweep(request.recipe.name, spaces, cost_of(request.model), tuple(points), blocks)


def _ratios(text: str) -> list[float]:
    """The ratios of FROM:TO:STEP, both ends included."""
    try:
        start, stop, step = (Decimal(part) for part in text.split(":"))
        if not all(number.is_finite() for number in (start, stop, step)):
            raise ValueError(text)
        count = int((stop - start) / step) if step > 0 else -1
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"--sweep {text}: expected FROM:TO:STEP, such as 0.1:0.7:0.1") from error
    if not (0 <= start <= stop < 1) or count < 0 or count > 1000:
        raise UserError(f"--sweep {text}: ratios go up from 0 or more to less than 1, in at most 1000 steps")
    return [float(start + index * step) for index in range(count + 1)]
