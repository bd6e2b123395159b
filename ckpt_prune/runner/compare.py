"""`compare`: two models side by side, block by block."""

import tempfile
from pathlib import Path

from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.progress import Notices
from ckpt_prune.evaluation import block_comparison
from ckpt_prune.evaluation.comparison_section import show_comparison
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.options.commands import CompareOptions
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.show.html import print_page
from ckpt_prune.stages.report import find_report
from ckpt_prune.stages.shared.pairs import at_same_depth, check_models, check_same_reader, rotated_as

WHY = "two models are compared"


def compare_models(options: CompareOptions) -> block_comparison.Comparison:
    """Compare what leaves every block of two models (`ckpt_prune.compare`)."""
    trust = options.trust_remote_code
    say = Notices()
    target = resolve_device(options.device)
    theirs, ours = (open_model(each, Opening.of(options)) for each in (options.reference, options.model))
    report = find_report(ours.checkpoint.path)
    partners, skips = at_same_depth(ours, theirs, report)
    check_models(ours, partners, WHY)
    chosen = choose_samples(theirs, options, trust=trust, say=say)
    check_same_reader(ours, theirs, options.text, trust=trust)
    for source in (theirs, ours):
        source.checkpoint.check_finite()
    container = container_of(ours).unfactored
    rotated = rotated_as(ours, theirs, target, report)
    comparison = block_comparison.compare(
        ModelView(partners, target, rotated, None if rotated is None else container, skips),
        ModelView(ours, target, container=container),
        chosen,
        compute_dtype=resolve_compute_dtype(options.compute_dtype, target),
        allocate=StateMemory(int(options.state_memory * 10**9), Path(tempfile.gettempdir())),
    )
    if options.plot is not None:
        title = f"{comparison.model.name} beside {comparison.reference.name}"
        write_atomically(options.plot, print_page(title, [show_comparison(comparison)]))
    return comparison
