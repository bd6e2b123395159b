"""`quantize`: a job of one stage, and the measuring of its output."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt_prune.checkpoint.model_folder import resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.evaluation.results import Result
from ckpt_prune.gguf import require_gguf
from ckpt_prune.job.job import Job
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.containers.opening import open_fitted
from ckpt_prune.options.commands import QuantizeOptions
from ckpt_prune.options.data import ProofOptions, has_data
from ckpt_prune.options.option import digested_options
from ckpt_prune.parallel.devices import resolve_device
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.quality import is_measured, measure_quality
from ckpt_prune.runner.read_job import check_job_output, read_live
from ckpt_prune.runner.resuming import resumable
from ckpt_prune.runner.run_job import check_job, run_job
from ckpt_prune.runner.scheme_budgets import check_storable, choose_for_bytes
from ckpt_prune.stages.quantize.keys import quantize_recipe
from ckpt_prune.stages.quantize.records import QUANTISATION_KIND, QuantizationRecord, read_record
from ckpt_prune.verification.dense_source import find_dense_source

if TYPE_CHECKING:
    from ckpt_prune.gguf.export import ExportedGguf


@dataclass(frozen=True)
class QuantizedModel:
    """The output of `quantize`, and the record in its ckpt_prune_quantised.json.

    `evaluations` are what was measured of it beside MODEL, and beside the dense model if MODEL is a pruned one.
    """

    path: Path
    record: QuantizationRecord
    evaluations: tuple[Result, ...] = ()

    def data(self) -> dict[str, Any]:
        return self.record.data()


def quantize_model(options: QuantizeOptions) -> "QuantizedModel | ExportedGguf":
    """Round the weights of a model (`ckpt_prune.quantize`)."""
    if options.format == "gguf":
        return _quantize_gguf(options)
    out, say = options.output, Notices()
    job = _read(options, say)
    with resumable(out, say):
        record = run_job(job, out, resume=options.resume, overwrite=options.overwrite, announce=say).report
    if not is_measured(options, record.losses):
        return QuantizedModel(out, record)
    # A model that is pruned already is also held against what it was pruned from.
    dense = find_dense_source(job.model.checkpoint.path)
    others = [dense.folder] if dense is not None and dense.folder is not None else []
    if dense is not None and not others:
        say(dense.lacking)
    results = process_group().alone(lambda: measure_quality(out, job, options, say, options.model, others))
    return QuantizedModel(out, read_record(out), tuple(results))


def _quantize_gguf(options: QuantizeOptions) -> "ExportedGguf":
    """Write a GGUF file whose matrices are rounded by the samples of the options, and prove it in llama.cpp."""
    require_gguf()
    from ckpt_prune.gguf.export import export_gguf, open_text_model

    if process_group().size > 1:
        raise UserError("--format gguf rounds in one process: start it without torchrun")
    device = resolve_device(options.device)
    live = read_live(options, open_text_model(options.model), device, Notices())
    proving = ProofOptions(
        text=options.evaluate or options.text, window=options.window, samples=options.evaluate_samples or None
    )
    return export_gguf(
        options.model,
        options.output,
        proving,
        kind=options.type,
        others=options.other_types,
        proof=options.evaluate_samples != 0,
        dense=find_dense_source(resolve_model(options.model)),
        live=live,
        feedback=True,
        device=device,
        overwrite=options.overwrite,
    )


def _read(options: QuantizeOptions, say: Notices) -> Job:
    """Open the model, check it and the place of the output, and choose the samples if it is measured."""
    device, model, measures = resolve_device(options.device), open_fitted(options.model), has_data(options)
    assert options.format != "gguf"
    rounding: Literal["gptq", "nearest"] = "gptq" if measures or options.statistics is not None else "nearest"
    recipe = quantize_recipe(options.format, options.group_size, rounding)
    inputs = [options.statistics]
    check_job_output(options, model, recipe, inputs, overwrite=options.overwrite, kind=QUANTISATION_KIND)
    if options.target_bytes is not None:
        if process_group().size > 1:
            raise UserError("--target-bytes chooses in one process: start it without torchrun")
        check_storable(model)
        live = read_live(options, model, device, say)
        chosen = choose_for_bytes(options, model, live.samples, say)
        return Job(model, chosen, None, device=device, asked=digested_options(options), live=live)
    statistics = None if options.statistics is None else Statistics(options.statistics)
    job = Job(model, recipe, statistics, device=device, asked=digested_options(options))
    if not measures:
        return job
    check_job(job, needs_data=False)
    return replace(job, live=read_live(options, model, device, say))
