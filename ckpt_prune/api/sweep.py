"""`ckpt_prune.sweep`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import isfinite
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.types import AnyModel, AnyPath, Texts
from ckpt_prune.architectures.composite import PartName
from ckpt_prune.checkpoint.scratch import scratch_folder
from ckpt_prune.errors import UserError
from ckpt_prune.glance import glance
from ckpt_prune.options import PlanOptions, checked
from ckpt_prune.progress import progress_shown

if TYPE_CHECKING:
    from ckpt_prune.architectures.spaces import SpaceName
    from ckpt_prune.calibration.statistics import Statistics
    from ckpt_prune.planning.records import Cost
    from ckpt_prune.transform.request import Request
    from ckpt_prune.transform.sweep import DepthPoint, Point

RATIO = "ratio"
"""The key that is swept where none is named."""
MOST = 1000
"""Values of one sweep."""


@dataclass(frozen=True)
class Sweep:
    """The curve of a recipe: size and error at several values of one of its keys.

    Attributes:
        recipe: its name.
        key: the recipe's key that varies; `ratio` is that of every space.
        spaces: that it prunes.
        before: size of the dense model.
        points: one for each value.
        measured: what `Point.perplexity` is of, in words; None where nothing was measured.
        depth: where ratios vary, the same of whole blocks in place of units, where the statistics say what they do.
    """

    recipe: str
    spaces: tuple["SpaceName", ...]
    before: "Cost"
    points: tuple["Point", ...]
    key: str = RATIO
    measured: str | None = None
    depth: tuple["DepthPoint", ...] = ()

    def __repr__(self) -> str:
        ends = (self.points[0].value, self.points[-1].value) if self.points else None
        return glance(
            self,
            recipe=self.recipe,
            key=self.key,
            values=ends,
            points=len(self.points),
            before=self.before,
            measured=self.measured,
        )

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        rows = []
        for point in self.points:
            row = {
                self.key: point.value,
                **point.after.model_dump(),
                "widths": point.widths,
                "errors": point.errors,
                "divergence": point.divergence,
            }
            rows.append(row if self.measured is None else row | {"perplexity": point.perplexity, "kl": point.measured})
        blocks = [
            {"ratio": own.ratio, "gone": own.gone, **own.after.model_dump(), "divergence": own.divergence}
            for own in self.depth
        ]
        found = {"recipe": self.recipe, "before": self.before.model_dump(), "points": rows, "depth": blocks}
        return found if self.measured is None else found | {"measured": self.measured}


def sweep(
    model: AnyModel,
    values: str | Sequence[float],
    *,
    recipe: AnyPath | None = None,
    statistics: "AnyPath | Statistics | None" = None,
    overrides: Mapping[str, object] | Sequence[str] = (),
    evaluate: Texts = (),
    window: int | None = None,
    samples: int | None = None,
    container: str | None = None,
    family: AnyPath | None = None,
    part: PartName | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Sweep:
    """Plan at several values of a recipe's key, as `ckpt-prune plan --sweep` does.

    Args:
        model: a folder, a Hub id, or what a function of this package has written.
        values: ratios, as numbers or as "FROM:TO:STEP", both ends included; or "KEY=FROM:TO:STEP" or "KEY=A,B,C" of any
            key that `overrides` may have.
        recipe: a shipped recipe's name or a file; None for the default.
        statistics: what `calibrate` gave, or its folder.
        overrides: changes of the recipe's keys, dotted.
        evaluate: text that every point is measured on: the model is pruned into a temporary folder for it, and loaded
            whole.
        window: tokens of a window of `evaluate`.
        samples: windows of it, at most.
        container: what the output is to be stored as.
        family: file of a description of the model's family, where this version has none.
        part: which part of a model that is made of several: text, vision or encoder.
        trust_remote_code: accept a model that asks for code of its own.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars on stderr.

    Raises:
        UserError: as `plan`, `prune` and `evaluate`, or a value that the recipe does not take.
    """
    key, wanted = _asked(values) if isinstance(values, str) else (RATIO, [float(ratio) for ratio in values])
    if not evaluate and (window is not None or samples is not None):
        raise UserError("--window and --samples are of the text to measure on: give --evaluate FILE")
    if evaluate and window is None:
        raise UserError("--evaluate needs --window: perplexities of different windows cannot be compared")
    named = ("model", "recipe", "statistics", "container", "family", "part", "trust_remote_code", "device", "progress")
    given = {name: value for name, value in locals().items() if name in named}
    changes = [f"{k}={v}" for k, v in overrides.items()] if isinstance(overrides, Mapping) else [*overrides]

    def at(value: float | str) -> dict[str, Any]:
        """Options of a command at one value."""
        if key == RATIO:
            return given | {"overrides": changes, "ratio": float(value)}
        return given | {"overrides": [*changes, f"{key}={value}"]}

    from ckpt_prune.architectures.spaces import first_of_experts
    from ckpt_prune.planning.accounting import cost_of
    from ckpt_prune.transform.asked import plan_request
    from ckpt_prune.transform.asked_recipe import recipe_of
    from ckpt_prune.transform.checks import check_request
    from ckpt_prune.transform.sweep import depth_points_at, point_of, points_at

    def request_of(options: Mapping[str, Any]) -> "Request":
        asked = checked(PlanOptions, {**options, "diagnostics": False})
        found = plan_request(asked, *recipe_of(asked))
        check_request(found)
        return found

    with progress_shown(progress):
        told, blocks = None, []
        if key == RATIO:
            ratios = [float(ratio) for ratio in wanted]
            request = request_of(given | {"overrides": changes})
            request.model.checkpoint.check_finite()
            points, blocks = points_at(request, ratios), depth_points_at(request, ratios)
        else:
            # All are checked before the first is planned.
            requests = [request_of(at(value)) for value in wanted]
            request = requests[0]
            request.model.checkpoint.check_finite()
            points = [point_of(value, own) for value, own in zip(wanted, requests, strict=True)]
        if evaluate:
            points, told = _measured([*points], at, evaluate, window, samples)
        spaces = tuple(first_of_experts(request.recipe.spaces))
        return Sweep(request.recipe.name, spaces, cost_of(request.model), tuple(points), key, told, tuple(blocks))


def _measured(
    points: Sequence["Point"],
    at: Callable[[float | str], dict[str, Any]],
    text: Texts,
    window: int | None,
    samples: int | None,
) -> tuple[list["Point"], str]:
    """Points with the perplexity of each, and what it is of."""
    from ckpt_prune.api.evaluate import evaluate
    from ckpt_prune.api.prune import prune
    from ckpt_prune.evaluation.results import PerplexityResult

    found, windows, dense = [], 0, 0.0
    for point in points:
        options = at(point.value)
        with scratch_folder() as folder:
            small = prune(**options, output=str(folder / "point"), diagnostics=False)
            quiet = {"device": options["device"], "progress": options["progress"]}
            trust = options["trust_remote_code"]
            how = {"text": text, "window": window, "samples": samples, "trust_remote_code": trust}
            result = evaluate(small, against=options["model"], **how, **quiet)
        if not isinstance(result, PerplexityResult) or result.reference is None:
            raise UserError("--evaluate is for causal language models, whose text has a perplexity")
        windows, dense = result.score.windows, result.reference.perplexity
        own = [each if each is not None and isfinite(each) else None for each in (result.score.perplexity, result.kl)]
        found.append(replace(point, perplexity=own[0], measured=own[1]))
    return found, f"perplexity (dense: {dense:.3f}) and KL on {windows} windows of {window} tokens"


def _asked(text: str) -> tuple[str, list[float | str]]:
    """The key and its values."""
    key, equals, values = text.rpartition("=")
    if not equals:
        return RATIO, [*_ratios(text)]
    if key == RATIO and ":" in values:
        return RATIO, [*_ratios(values)]
    if not key or not values:
        raise UserError(f"--sweep {text}: expected FROM:TO:STEP, or KEY=A,B,C or KEY=FROM:TO:STEP of a recipe's key")
    found: list[float | str] = []
    if values.count(":") == 2:
        found += _steps(text, values, f"--sweep {text}: values go up, in at most {MOST} steps")
    else:
        found += [_number(part.strip()) for part in values.split(",")]
    if len(set(found)) < len(found):
        raise UserError(f"--sweep {text}: one value is given twice")
    if key == RATIO and not all(isinstance(value, float) for value in found):
        raise UserError(f"--sweep {text}: ratios are numbers")
    return key, found


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _steps(text: str, values: str, refusal: str) -> list[float]:
    """The numbers of FROM:TO:STEP, both ends included.

    Args:
        text: what was given.
        values: its numbers.
        refusal: what to say where they do not go up.
    """
    try:
        start, stop, step = (Decimal(part) for part in values.split(":"))
        if not all(number.is_finite() for number in (start, stop, step)):
            raise ValueError(text)
        count = int((stop - start) / step) if step > 0 and stop >= start else -1
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"--sweep {text}: expected FROM:TO:STEP, such as 0.1:0.7:0.1") from error
    if not 0 <= count <= MOST:
        raise UserError(refusal)
    return [float(start + index * step) for index in range(count + 1)]


def _ratios(text: str) -> list[float]:
    """The ratios of FROM:TO:STEP, both ends included."""
    refusal = f"--sweep {text}: ratios go up from 0 or more to less than 1, in at most {MOST} steps"
    found = _steps(text, text, refusal)
    if not (found[0] >= 0 and found[-1] < 1):
        raise UserError(refusal)
    return found
