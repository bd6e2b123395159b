"""`ckpt_prune.quantize`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.function import takes
from ckpt_prune.api.quality import check_quality, is_measured, measure_quality
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.measure.statistics.files import check_statistics
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options.commands import QuantizeOptions
from ckpt_prune.options.data import has_data
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.resuming import resumable

if TYPE_CHECKING:
    from ckpt_prune.evaluation.results import Result
    from ckpt_prune.stages.quantize.records import QuantizationRecord


@dataclass(frozen=True)
class QuantizedModel:
    """The output of `quantize`, and the record in its ckpt_prune_quantised.json.

    `evaluations` are what was measured of it beside MODEL, and beside the dense model if MODEL is a pruned one.
    """

    path: Path
    record: "QuantizationRecord"
    evaluations: "tuple[Result, ...]" = ()

    def data(self) -> dict[str, Any]:
        return self.record.data()


@takes(QuantizeOptions)
def quantize(options: QuantizeOptions) -> QuantizedModel:
    """Write MODEL, also an output with a stock class, with weights of 8 or 4 bits.

    The linear weights of the blocks get whole numbers, symmetric, each group of columns with a scale of its own. With
    --text they are rounded by GPTQ: later columns make up for earlier ones, and each block is measured behind the
    blocks that are rounded already. Without text and --statistics they are rounded to nearest. Embeddings, norms and
    heads stay as they are, and zeros stay zeros. OUT has the format of compressed-tensors (pack-quantized), which
    transformers loads if that package is installed, and which vLLM reads. One block is in memory at a time, with its
    Gram matrices, and the hidden states of the samples. An interrupted run leaves OUT.partial, which --resume
    continues.

    `verify OUT --against MODEL` proves it. With data at hand, OUT and MODEL are measured on windows of it that were not
    used for rounding; if MODEL is a pruned model, its dense one is measured too, if it lies beside it.
    """
    measures = has_data(options)
    if measures and options.statistics is not None:
        raise UserError("--statistics takes the place of --text: give one of them")
    check_supported(options.model, None, None)
    check_texts(options.text)
    check_quality(options, options.model)
    if options.statistics is not None:
        check_statistics(options.statistics)

    from ckpt_prune.runner.read_quantization import read_quantization
    from ckpt_prune.runner.run_job import run_job

    say = Notices()
    job = read_quantization(options, measures, say)
    with resumable(options.output, say):
        done = run_job(job, options.output, resume=options.resume, overwrite=options.overwrite, announce=say)
    record, results = done.report, []
    if is_measured(options) and (options.evaluate or not record.losses):
        from ckpt_prune.stages.quantize.records import read_record
        from ckpt_prune.verification.dense_source import find_dense_source

        dense = find_dense_source(job.model.checkpoint.path)
        others = [dense.folder] if dense is not None and dense.folder is not None else []
        if dense is not None and not others:
            say(dense.lacking)
        results = process_group().alone(lambda: measure_quality(options.output, job, options, say, others))
        record = read_record(options.output)
    return QuantizedModel(options.output, record, tuple(results))
