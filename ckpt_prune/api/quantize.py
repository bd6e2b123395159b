"""`ckpt_prune.quantize`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.function import takes
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.statistics.files import check_statistics
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options.commands import QuantizeOptions
from ckpt_prune.runner.resuming import resumable
from ckpt_prune.stages.quantize.stage import quantize_recipe

if TYPE_CHECKING:
    from ckpt_prune.stages.quantize.record import QuantizationRecord


@dataclass(frozen=True)
class QuantizedModel:
    """The output of `quantize`, and the record in its ckpt_prune_quantised.json."""

    path: Path
    record: "QuantizationRecord"

    def data(self) -> dict[str, Any]:
        return self.record.data()


@takes(QuantizeOptions)
def quantize(options: QuantizeOptions) -> QuantizedModel:
    """Write MODEL, also an output with a stock class, with weights of 8 or 4 bits.

    The linear weights of the blocks are rounded to nearest, symmetric, each group of columns with the scale that
    changes it least; with --statistics by GPTQ. Embeddings, norms and heads stay as they are, and zeros stay zeros. OUT
    has the format of compressed-tensors (pack-quantized), which transformers loads if that package is installed, and
    which vLLM reads. One block is in memory at a time, with --statistics also its Gram matrices. An interrupted run
    leaves OUT.partial, which --resume continues.

    `verify OUT --against MODEL` proves it, `evaluate OUT --against MODEL` measures what it cost.
    """
    check_supported(options.model, None, None)
    if options.statistics is not None:
        check_statistics(options.statistics)

    from ckpt_prune.job.job import Job
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.model.containers.opening import open_fitted
    from ckpt_prune.runner.run_job import run_job

    say = Notices()
    recipe = quantize_recipe(options.format, options.group_size)
    measured = None if options.statistics is None else Statistics(options.statistics)
    job = Job(open_fitted(options.model), recipe, measured)
    with resumable(options.output, say):
        done = run_job(job, options.output, resume=options.resume, overwrite=options.overwrite, announce=say)
    return QuantizedModel(options.output, done.report)
