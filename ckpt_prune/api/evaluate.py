"""`ckpt_prune.evaluate`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_prune.api.types import AnyModel, AnyPath, Bos, Texts
from ckpt_prune.errors import UserError
from ckpt_prune.options import EvaluateOptions, checked
from ckpt_prune.progress import progress_shown

if TYPE_CHECKING:
    from ckpt_prune.evaluation.results import Result


def evaluate(
    model: AnyModel,
    *,
    text: Texts = (),
    window: int | None = None,
    images: AnyPath | None = None,
    labels: AnyPath | None = None,
    max_corrupt: float = 0.05,
    limit: int | None = None,
    bos: Bos = "auto",
    against: AnyModel | None = None,
    tasks: str | Sequence[str] | None = None,
    include_path: AnyPath | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> "Result":
    """Measure a model, as `ckpt-prune evaluate` does. The whole model is loaded, and both with `against`.

    Args:
        model: a folder, a Hub id, or what a function of this package has written.
        text: files to measure perplexity on; masked tokens of a masked language model, features of a base model.
        window: tokens per window; needed with text.
        images: folder of images for an image classifier, or for a base model of images.
        labels: CSV with columns file and label.
        max_corrupt: share of the images that may fail to decode.
        limit: at most so many windows, images (at random, seed 0) or examples of a task.
        bos: begin-of-sequence token before the text.
        against: a reference, usually the dense model.
        tasks: lm-eval tasks instead of text.
        include_path: folder with lm-eval task files of one's own.
        trust_remote_code: run code that a folder brings.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars and notices on stderr.

    Returns:
        Of text a `PerplexityResult`, `MaskedResult` or `FeaturesResult`, of images an `AccuracyResult` or
        `FeaturesResult`, of tasks a `TaskResult`: see `ckpt_prune.evaluation.results`.

    Raises:
        UserError: options that do not go together, a model that does not load, or two that cannot be compared.
    """
    options = checked(EvaluateOptions, locals())
    _check(options)

    from ckpt_prune.checkpoint.hub import resolve
    from ckpt_prune.devices import resolve_device
    from ckpt_prune.evaluation.pictures import measure_images
    from ckpt_prune.evaluation.results import TaskResult
    from ckpt_prune.evaluation.texts import Pair, measure_text

    with progress_shown(progress):
        target = resolve_device(options.device)
        folder = resolve(options.model)
        if options.tasks is not None:
            from ckpt_prune.evaluation.harness import run_tasks

            names = [name.strip() for name in options.tasks.split(",") if name.strip()]
            found = run_tasks(folder, names, device=target, limit=options.limit, include_path=options.include_path)
            return TaskResult(folder, found)
        reference = None if options.against is None else resolve(options.against)
        pair = Pair(folder, reference, target, options.trust_remote_code)
        return measure_text(pair, options) if options.images is None else measure_images(pair, options)


def _check(options: EvaluateOptions) -> None:
    """What does not go together, told before anything is loaded."""
    if options.tasks is None and options.include_path is not None:
        raise UserError("--include-path goes with --tasks")
    if options.images is None and options.labels is not None:
        raise UserError("--labels goes with --images")
    if options.images is not None:
        if options.text or options.window is not None or options.tasks is not None:
            raise UserError("--images does not go with --text, --window or --tasks")
        return
    if options.tasks is not None:
        if options.text or options.window is not None or options.against is not None:
            raise UserError("--tasks does not go with --text, --window or --against")
        if options.trust_remote_code:
            raise UserError("--tasks never runs a checkpoint's own code: --trust-remote-code does not go with it")
        return
    if not options.text:
        raise UserError("evaluate needs --text FILE, --images DIR for a vision model, or --tasks")
    if options.window is None:
        raise UserError(
            "evaluate needs --window T: a perplexity means nothing without its window (128 and 2048 are common)"
        )
