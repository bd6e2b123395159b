"""`ckpt_prune.quantize`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.resuming import resumable
from ckpt_prune.api.types import AnyModel, AnyPath
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.measure.statistics.files import check_statistics
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options import QuantizeOptions, checked
from ckpt_prune.stages.quantize.scheme import Format
from ckpt_prune.stages.quantize.stage import quantize_recipe

if TYPE_CHECKING:
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.stages.quantize.record import QuantizationRecord


@dataclass(frozen=True)
class QuantizedModel:
    """What was written.

    Attributes:
        path: the output.
        record: as in the output's ckpt_prune_quantised.json.
    """

    path: Path
    record: "QuantizationRecord"

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return self.record.data()


def quantize(
    model: AnyModel,
    *,
    output: AnyPath,
    format: Format,
    group_size: str | int | None = None,
    statistics: "AnyPath | Statistics | None" = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> QuantizedModel:
    """Write a model with weights of few bits, as `ckpt-prune quantize` does, one block at a time.

    Args:
        model: a folder, a Hub id, or what a function of this package has written.
        output: the folder to write; it appears only when it is complete.
        format: int8 or int4.
        group_size: columns that share a scale, 32, 64 or 128, or "channel" for whole rows; None: rows for int8, the
            largest size that fits for int4.
        statistics: of the model, with Grams of all inputs (collect moments, gram, linears): round by GPTQ, which keeps
            outputs, in place of rounding to nearest.
        resume: continue an interrupted run of the same job.
        overwrite: replace what this function wrote before.
        progress: show bars on stderr.

    Raises:
        UserError: the model cannot be quantised so, or the place is taken.
    """
    options = checked(QuantizeOptions, locals())
    check_supported(options.model, None, None)
    if options.statistics is not None:
        check_statistics(options.statistics)

    from ckpt_prune.job.job import Job
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.model.containers.opening import open_fitted
    from ckpt_prune.runner.run_job import run_job

    with show_progress(progress):
        say = Notices()
        recipe = quantize_recipe(options.format, options.group_size)
        measured = None if options.statistics is None else Statistics(options.statistics)
        job = Job(open_fitted(options.model), recipe, measured)
        with resumable(options.output, say):
            done = run_job(job, options.output, resume=options.resume, overwrite=options.overwrite, announce=say)
        return QuantizedModel(options.output, done.report)
