"""Measuring the output of `prune` or `quantize` beside the model it was made from, and noting it in the output."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.checkpoint.model_folder import refuse_adapter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options.data import QualityOptions

if TYPE_CHECKING:
    from ckpt_prune.evaluation.results import Result
    from ckpt_prune.job.job import Job

_SAMPLES = 16
"""Windows, or images, of data that is named for it."""


def check_quality(options: QualityOptions, model: str) -> None:
    """Refuse what cannot be measured as asked."""
    if len(options.evaluate) > 1 and any(Path(place).is_dir() for place in options.evaluate):
        raise UserError("--evaluate takes text files, or one folder of images")
    check_texts(tuple(place for place in options.evaluate if not Path(place).is_dir()))
    if options.evaluate and options.evaluate_samples == 0:
        raise UserError("--evaluate names what to measure on, and --evaluate-samples 0 measures nothing: give one")
    if options.evaluate:
        refuse_adapter(Path(model))


def is_measured(options: Any) -> bool:
    """Return whether there is data to measure an output on; without it nothing is measured."""
    return options.evaluate_samples != 0 and bool(options.evaluate or options.text or options.images)


def count_windows(options: Any, job: "Job") -> tuple[int, list[Path]]:
    """Return how many windows of text an output will be measured on at most, and of which files; 0 of none."""
    files = [Path(place) for place in options.evaluate or options.text]
    if options.evaluate_samples == 0 or not files or not all(file.is_file() for file in files):
        return 0, []
    if options.evaluate:
        return len(files) * (options.evaluate_samples or _SAMPLES), files
    from ckpt_prune.evaluation.held_out import count_default

    return options.evaluate_samples or count_default(len(job.samples or ()), is_text=True), files


def measure_quality(out: Path, job: "Job", options: Any, say: Notices, others: Sequence[Path] = ()) -> "list[Result]":
    """Measure an output beside its model on held-out data, and note it in the output's record and card.

    That is the data of --evaluate; else windows or images of the data at hand that the model was not calibrated on. If
    these cannot be measured on, a line says why.

    Args:
        out: a finished output.
        job: that made it.
        options: those of the command, with `QualityOptions` and `SampleOptions` among them.
        say: takes a line.
        others: further models to measure it beside.

    Returns:
        The result beside the model, and beside each of the others; none if nothing was measured.

    Raises:
        UserError: it cannot be measured on the data of --evaluate.
    """
    trust = getattr(options, "trust_remote_code", False)
    if options.evaluate:
        from ckpt_prune.api.evaluate import evaluate

        data: dict[str, Any] = {"images": options.evaluate[0]}
        if not Path(options.evaluate[0]).is_dir():
            data = {"text": options.evaluate, "window": options.window or job.model.tokens}
        data |= {"device": options.device, "trust_remote_code": trust, "progress": options.progress}
        samples = options.evaluate_samples or _SAMPLES
        return [evaluate(out, against=place, samples=samples, **data) for place in (options.model, *others)]

    from ckpt_prune.evaluation.held_out import choose_held_out, measure_held_out
    from ckpt_prune.evaluation.pair import Pair
    from ckpt_prune.runner.publish import note_loss

    results: list[Result] = []
    try:
        held_out = choose_held_out(job.model, options, job.used, options.evaluate_samples, trust=trust)
        for place in (job.model.checkpoint.whole, *others):
            # A model's own code runs where data to measure on was named, as in `evaluate`, and not here.
            result = measure_held_out(Pair(out, place, job.device, trust=False), held_out)
            results.append(result)
            loss = result.loss()
            if loss is not None:
                note_loss(out, loss)
    except UserError as error:
        say(f"{out} was not measured: {error}")
    return results
