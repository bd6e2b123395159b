"""`ckpt_prune.compare`."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.api.function import takes
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options.commands import CompareOptions
from ckpt_prune.options.data import has_data

if TYPE_CHECKING:
    from ckpt_prune.evaluation.block_comparison import Comparison

WHY = "two models are compared"


@takes(CompareOptions)
def compare(options: CompareOptions) -> "Comparison":
    """Compare what leaves every block of B with what leaves that of A, usually the dense model, on the same samples.

    Both models have the same depth and hidden size. B may be an output of this tool, or a model that another tool
    pruned, quantized or trained and saved as plain weights. Both run side by side, one block of each in memory at a
    time.

    MSE is the mean squared difference of hidden states. Relative error is the squared difference over A's squared
    length. Cosine is the mean over tokens. CKA is linear centred kernel alignment, which no rotation of the states
    changes. The last line compares the outputs: KL(A || B) in nats, or for a model without a head the relative error of
    its last hidden states. If B's hidden states are rotated, A's are rotated alike. Hidden states beyond --state-memory
    go to files in the temporary folder.
    """
    # Refuse what can be refused before torch is imported.
    if not has_data(options):
        raise UserError("compare needs --text FILE, --images DIR for vision models, or --audio DIR")
    for each in (options.reference, options.model):
        check_supported(each, options.family, options.part)
    check_texts(options.text)
    if options.plot is not None:
        from ckpt_prune.show.html import check_page

        check_page(options.plot, options.overwrite)

    from ckpt_prune.checkpoint.staging import write_atomically
    from ckpt_prune.evaluation import block_comparison
    from ckpt_prune.evaluation.comparison_section import show_comparison
    from ckpt_prune.job.model_view import ModelView
    from ckpt_prune.measure.samples.choose import choose_samples
    from ckpt_prune.measure.streams.state_memory import StateMemory
    from ckpt_prune.model.containers.container import container_of
    from ckpt_prune.model.containers.opening import Opening, open_model
    from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
    from ckpt_prune.show.html import print_page
    from ckpt_prune.stages.report import find_report
    from ckpt_prune.stages.shared.pairs import at_same_depth, check_models, check_same_reader, rotated_as

    trust = options.trust_remote_code
    say = Notices()
    target = resolve_device(options.device)
    theirs, ours = (open_model(each, Opening.of(options)) for each in (options.reference, options.model))
    report = find_report(ours.checkpoint.path)
    beside, skips = at_same_depth(ours, theirs, report)
    check_models(ours, beside, WHY)
    chosen = choose_samples(theirs, options, trust=trust, say=say)
    check_same_reader(ours, theirs, options.text, trust=trust)
    for source in (theirs, ours):
        source.checkpoint.check_finite()
    container = container_of(ours).unfactored
    rotated = rotated_as(ours, theirs, target, report)
    comparison = block_comparison.compare(
        ModelView(beside, target, rotated, None if rotated is None else container, skips),
        ModelView(ours, target, container=container),
        chosen,
        compute_dtype=resolve_compute_dtype(options.compute_dtype, target),
        allocate=StateMemory(int(options.state_memory * 2**30), Path(tempfile.gettempdir())),
        lens=options.lens,
    )
    if options.plot is not None:
        title = f"{comparison.model.name} beside {comparison.reference.name}"
        write_atomically(options.plot, print_page(title, [show_comparison(comparison)]))
    return comparison
