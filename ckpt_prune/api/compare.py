"""`ckpt_prune.compare`."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.api.types import AnyModel, AnyPath, Bos, Choose, ComputeDtype, Texts
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options import CompareOptions, PartName, checked, has_data

if TYPE_CHECKING:
    from ckpt_prune.evaluation.block_comparison import Comparison

WHY = "two models are compared"


def compare(
    reference: AnyModel,
    model: AnyModel,
    *,
    text: Texts = (),
    images: AnyPath | None = None,
    labels: AnyPath | None = None,
    max_corrupt: float = 0.05,
    audio: AnyPath | None = None,
    samples: int | None = None,
    window: int | None = None,
    seed: int = 0,
    choose: Choose = "random",
    bos: Bos = "auto",
    compute_dtype: ComputeDtype = "auto",
    lens: bool = False,
    plot: AnyPath | None = None,
    state_memory: float = 8.0,
    overwrite: bool = False,
    family: AnyPath | None = None,
    part: PartName | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> "Comparison":
    """Compare what leaves every block of two models, as `ckpt-prune compare` does. One block of each is held at a time.

    Args:
        reference: usually the dense model: a folder, a Hub id or a result.
        model: what is held against it, of the same depth and hidden size.
        text: files to run language models on.
        images: folder of images to run vision models on.
        labels: CSV with a column file and perhaps split (calib).
        max_corrupt: share of the images that may fail to decode.
        audio: folder of audio to run an encoder of speech on.
        samples: windows, or images; None for 128 windows, or all images up to 4000.
        window: tokens per window; None for the model's context, at most 2048.
        seed: of the choice of samples.
        choose: random samples, or the first ones.
        bos: begin-of-sequence token before the text.
        compute_dtype: in which blocks run; auto for float32.
        lens: also compare what each model's own head makes of every block's states.
        plot: HTML file to write.
        state_memory: GiB of hidden states that are kept in memory; more of them are memory-mapped.
        overwrite: replace an existing page.
        family: file of a description of the model's family, where this version has none.
        part: which part of models that are made of several: text, vision or encoder.
        trust_remote_code: accept a model that asks for code of its own.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars and notices on stderr.

    Raises:
        UserError: bad input, or two models that cannot be compared block by block.
    """
    options = checked(CompareOptions, locals())
    # Before torch is imported, what can be told without it.
    if not has_data(options, options):
        raise UserError("compare needs --text FILE, --images DIR for vision models, or --audio DIR")
    for each in (options.reference, options.model):
        check_supported(each, options.family, options.part)
    check_texts(options.text)
    if options.plot is not None:
        from ckpt_prune.reporting.place import check_page

        check_page(options.plot, options.overwrite)

    from ckpt_prune.checkpoint.staging import write_atomically
    from ckpt_prune.evaluation import block_comparison
    from ckpt_prune.job.model_view import ModelView
    from ckpt_prune.job.report_file import report_of
    from ckpt_prune.measure.samples.choose import choose_samples
    from ckpt_prune.measure.samples.text import read_text
    from ckpt_prune.measure.streams.state_memory import StateMemory
    from ckpt_prune.model.containers.container import container_of
    from ckpt_prune.model.containers.opening import Opening, open_model
    from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
    from ckpt_prune.reporting.comparison import comparison_page
    from ckpt_prune.stages.recovery.pairs import at_same_depth, check_models, check_same_reader, rotated_as

    trust = options.trust_remote_code
    with show_progress(progress):
        say = Notices()
        target = resolve_device(options.device)
        theirs, ours = (open_model(each, Opening.of(options)) for each in (options.reference, options.model))
        report = report_of(ours.checkpoint.path)
        beside, leaps = at_same_depth(ours, theirs, report)
        check_models(ours, beside, WHY)
        chosen = choose_samples(theirs, options, options, trust=trust, say=say)
        check_same_reader(ours, theirs, read_text(options.text) if options.text else "", trust=trust)
        for source in (theirs, ours):
            source.checkpoint.check_finite()
        container = container_of(ours).unfactored
        rotated = rotated_as(ours, theirs, target, report)
        found = block_comparison.compare(
            ModelView(beside, target, rotated, None if rotated is None else container, leaps),
            ModelView(ours, target, container=container),
            chosen,
            compute_dtype=resolve_compute_dtype(options.compute_dtype, target),
            allocate=StateMemory(int(options.state_memory * 2**30), Path(tempfile.gettempdir())),
            lens=options.lens,
        )
        if options.plot is not None:
            write_atomically(options.plot, comparison_page(found))
        return found
