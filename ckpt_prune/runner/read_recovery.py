"""From options of `recover` to its job."""

from collections.abc import Callable
from dataclasses import replace

from ckpt_prune.checkpoint.staging import check_output, partial_of, refuse_overlap
from ckpt_prune.job.job import Job, RecoverySamples
from ckpt_prune.measure.samples.choose import choose_fresh_samples, choose_samples
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.options.commands import RecoverOptions
from ckpt_prune.parallel.devices import resolve_device
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.publish import wanted_names
from ckpt_prune.runner.read_job import asked_after, training_dtype
from ckpt_prune.runner.run_job import check_job
from ckpt_prune.stages.recovery.keys import RecoverRecipe
from ckpt_prune.stages.recovery.lora import classes_of, require_peft
from ckpt_prune.stages.recovery.reports import known_samples
from ckpt_prune.stages.report import find_report
from ckpt_prune.stages.shared.pairs import check_same_reader

MOST_SAMPLES = 2048
"""Samples if no number is given, as in the paper, or all there are."""
FEW_SAMPLES = 32
"""The same for scales."""


def read_recovery(options: RecoverOptions, recipe: RecoverRecipe, say: Callable[[str], None]) -> Job:
    """Open the models, check them and the place of the output, and choose the samples."""
    method, out, trust = recipe.recovery.method, options.output, options.trust_remote_code
    if method == "lora":
        require_peft()
    device = resolve_device(options.device)
    pruned, dense = open_model(options.pruned, Opening.of(options)), None
    if method != "lora":
        dense = open_model(str(options.dense), Opening.of(options))
        refuse_overlap(dense.checkpoint.path, out)
    stored = dense.dtype if dense is not None else pruned.dtype
    dtype = training_dtype(options, device, method, stored)
    inputs = [options.images, options.audio, options.labels, *options.text]
    process_group().on_first(
        lambda: check_output(
            pruned.checkpoint.path,
            out,
            resume=options.resume,
            overwrite=options.overwrite,
            inputs=inputs,
            wants=wanted_names(pruned.checkpoint, recipe),
        )
    )
    job = Job(pruned, recipe, device=device, dense=dense)
    check_job(job)
    seen = classes = None
    if method == "scales":
        assert dense is not None
        samples_seen = known_samples(find_report(pruned.checkpoint.path))
        fresh = choose_fresh_samples(dense, options, samples_seen, trust=trust, most=FEW_SAMPLES, say=say)
        samples, seen = fresh.samples, fresh.seen
    else:
        samples = choose_samples(dense or pruned, options, trust=trust, most=MOST_SAMPLES, say=say)
    if dense is None:
        classes = classes_of(pruned, samples, options)
    else:
        check_same_reader(pruned, dense, options.text, trust=trust)
    allocate, after = StateMemory(int(options.state_memory * 2**30), partial_of(out)), frozenset[int]()
    if method == "laco":
        after = asked_after(options.perplexity_after, pruned)
    return replace(job, training=RecoverySamples(samples, dtype, allocate, after, seen, classes))
