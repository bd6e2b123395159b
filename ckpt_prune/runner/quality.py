"""Measuring an output beside the model it was made from, and noting it in the output's record and card."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.checkpoint.model_folder import resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.job.job import Job
from ckpt_prune.options.commands import EvaluateOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.runner.publish import note_loss

if TYPE_CHECKING:
    from ckpt_prune.evaluation.results import Result

_SAMPLES = 16
"""Windows, or images, of data that is named for it."""


def is_measured(options: Any, losses: Any = None) -> bool:
    """Return whether an output is to be measured: there is data, and no earlier run has done it (`losses`)."""
    has_data = options.evaluate_samples != 0 and bool(
        options.evaluate or options.text or options.images or options.talks
    )
    return has_data and bool(options.evaluate or not losses)


def count_samples(options: Any, job: Job) -> int:
    """Return how many windows, of each text, or images an output is measured on at most."""
    if options.evaluate:
        return options.evaluate_samples or _SAMPLES
    from ckpt_prune.evaluation.held_out import count_default

    return options.evaluate_samples or count_default(job.used, is_text=job.model.family.modality == "text")


def count_windows(options: Any, job: Job) -> tuple[int, int]:
    """Return how many windows of text of how many tokens an output will be measured on at most."""
    window = options.window or job.model.tokens
    files = [place for place in options.evaluate or options.text if Path(place).is_file()]
    if not is_measured(options) or not files:
        return 0, window
    windows = count_samples(options, job) * (len(files) if options.evaluate else 1)
    # A token takes a byte at the least.
    return min(windows, sum(file.stat().st_size for file in files) // window), window


def measure_quality(
    out: Path,
    job: Job,
    options: Any,
    say: Notices,
    beside: str,
    others: Sequence[Path] = (),
    *,
    whole: str | None = None,
) -> "list[Result]":
    """Measure an output beside its model on held-out data, and note it in the output's record and card.

    That is the data of --evaluate; else windows or images of the data at hand that the model was not calibrated on. If
    these cannot be measured on, a line says why.

    Args:
        job: that made it.
        options: those of the command, with `QualityOptions` and `SampleOptions` among them.
        say: takes a line.
        beside: the model it was made from, as the user named it.
        others: further models to measure it beside.
        whole: the same as `beside`, if the job's model is not that.

    Returns:
        The result beside the model, and beside each of the others; none if nothing was measured.

    Raises:
        UserError: it cannot be measured on the data of --evaluate.
    """
    count = count_samples(options, job)
    if options.evaluate:
        from ckpt_prune.runner.evaluate import evaluate_model

        data: dict[str, Any] = {"images": options.evaluate[0]}
        if not Path(options.evaluate[0]).is_dir():
            data = {"text": options.evaluate, "window": options.window or job.model.tokens}
        data |= {"model": out, "samples": count, "device": options.device, "trust_remote_code": job.trust}
        places = [beside, *others]
        return [evaluate_model(check_options(EvaluateOptions, data | {"against": place})) for place in places]

    from ckpt_prune.evaluation.held_out import choose_held_out, measure_held_out
    from ckpt_prune.evaluation.pair import Pair

    results: list[Result] = []
    try:
        held_out = choose_held_out(job.model, options, job.used, count, trust=job.trust)
        dense = (job.dense or job.model).checkpoint.whole if whole is None else resolve_model(whole)
        for place in (dense, *others):
            # A model's own code runs where data to measure on was named, as in `evaluate`, and not here.
            result = measure_held_out(Pair(out, place, job.device, trust=False), held_out)
            results.append(result)
            loss = result.loss()
            if loss is not None:
                note_loss(out, loss)
    except UserError as error:
        say(f"{out} was not measured: {error}")
    return results
