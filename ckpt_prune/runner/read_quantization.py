"""From options of `quantize` to its job."""

from collections.abc import Callable
from dataclasses import replace

from ckpt_prune.checkpoint.staging import check_output, partial_of
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.containers.opening import open_fitted
from ckpt_prune.options.commands import QuantizeOptions
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.publish import wanted_names
from ckpt_prune.runner.run_job import check_job
from ckpt_prune.stages.quantize.keys import quantize_recipe
from ckpt_prune.stages.quantize.records import QUANTISATION_KIND


def read_quantization(options: QuantizeOptions, measures: bool, say: Callable[[str], None]) -> Job:
    """Open the model, check it and the place of the output, and choose the samples if it is measured."""
    device, model, out = resolve_device(options.device), open_fitted(options.model), options.output
    recipe = quantize_recipe(
        options.format, options.group_size, "gptq" if measures or options.statistics is not None else "nearest"
    )
    process_group().on_first(
        lambda: check_output(
            model.checkpoint.path,
            out,
            resume=options.resume,
            overwrite=options.overwrite,
            inputs=[options.statistics, options.images, options.audio, options.labels, *options.text],
            wants=wanted_names(model.checkpoint, recipe),
            kind=QUANTISATION_KIND,
        )
    )
    job = Job(model, recipe, None if options.statistics is None else Statistics(options.statistics), device=device)
    if not measures:
        return job
    check_job(job, needs_data=False)
    samples = choose_samples(model, options, say=say)
    dtype = resolve_compute_dtype(options.compute_dtype, device, model.dtype)
    allocate = StateMemory(int(options.state_memory * 2**30), partial_of(out))
    source = ", ".join(map(str, options.text)) or str(options.images or options.audio)
    return replace(job, live=LiveSamples(samples, 1, dtype, allocate, options.seed, source))
