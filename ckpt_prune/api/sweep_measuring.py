"""Measured points of a sweep: the model is pruned at each value and compared with the dense one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.sweep_values import words
from ckpt_prune.checkpoint.scratch import scratch_folder
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options.data import EvaluationOptions
from ckpt_prune.options.option import check_options

if TYPE_CHECKING:
    from ckpt_prune.api.prune import Pruned
    from ckpt_prune.evaluation.results import Result

OptionsAt = Callable[[float | str], dict[str, Any]]
"""A value → what `prune` takes, but the place of its output."""


@dataclass(frozen=True)
class Scores:
    """The score of a pruned model at one point of a sweep.

    Attributes:
        metric: perplexity, masked_perplexity or top1.
        score: of the pruned model; None if it is not finite.
        kl: divergence from the dense model, in nats per token or image; None if it is not finite.
        told: what was measured on, and the dense model's own score, in words.
    """

    metric: str
    score: float | None
    kl: float | None
    told: str


@dataclass(frozen=True)
class PointMeasurer:
    """How points are made and measured.

    Attributes:
        data: text files, or one folder of images.
        window: tokens per window of text.
        samples: windows, or images, at most.
        at: options of `prune` at a value.
    """

    model: Any
    data: tuple[Path, ...]
    window: int | None
    samples: int | None
    at: OptionsAt

    @property
    def images(self) -> Path | None:
        return self.data[0] if len(self.data) == 1 and self.data[0].is_dir() else None

    def check(self, *, of_images: bool) -> None:
        """Refuse data that cannot be measured on, for a model that is calibrated on images or on text."""
        if of_images and self.images is None:
            raise UserError("--images calibrates a model of images: give --evaluate DIR, a folder of images, too")
        if self.samples is not None and self.samples < 1:
            raise UserError(f"--evaluate-samples {self.samples}: at least one is needed")
        if self.images is not None:
            return
        evaluation = check_options(EvaluationOptions, {"text": self.data, "window": self.window})
        check_texts(evaluation.text)
        if evaluation.window is None:
            raise UserError("--evaluate needs --window: perplexities of different windows cannot be compared")

    def foresee(self, values: Sequence[float | str]) -> None:
        """Check every job before the first begins."""
        from ckpt_prune.api.prune import prune
        from ckpt_prune.runner.run_job import check_job

        for value in values:
            dry_run = prune(**self.at(value) | {"progress": False}, dry_run=True)
            assert dry_run.settled is not None
            check_job(dry_run.settled.job)  # a dry run needs no data

    def each(self, key: str, values: Sequence[float | str]) -> Iterator[tuple["Pruned", Scores]]:
        """Yield the result at every value, and print the value before."""
        say = Notices()
        for place, value in enumerate(values, start=1):
            say(f"{words(key, value)} ({place} of {len(values)})")
            yield self.measure_at(value)

    def measure_at(self, value: float | str) -> tuple["Pruned", Scores]:
        """Prune at a value into a temporary folder, and measure the output."""
        from ckpt_prune.api.evaluate import evaluate
        from ckpt_prune.api.prune import prune

        options = self.at(value)
        how = {name: options[name] for name in ("device", "progress", "trust_remote_code")}
        data: Mapping[str, Any] = {"text": self.data, "window": self.window}
        if self.images is not None:
            data = {"images": self.images}
        with scratch_folder() as folder:
            small = prune(**options, output=str(folder / "point"), diagnostics=False, evaluate_samples=0)
            return small, _scores(evaluate(small, against=self.model, samples=self.samples, **data, **how))


def _scores(result: "Result") -> Scores:
    from ckpt_prune.evaluation.image_classes import Classification
    from ckpt_prune.evaluation.masked import MaskedScore
    from ckpt_prune.evaluation.results import ScoredResult, TextsResult

    if isinstance(result, TextsResult) and result.together is not None:
        result = result.together
    if not isinstance(result, ScoredResult):
        raise UserError("--evaluate measures a perplexity of text or classes of images, which this model has not")
    assert result.reference is not None
    if isinstance(result.score, Classification):
        metric, on, own = "top1", f"{result.score.images} images", result.score.top1
        dense_top1 = result.reference.top1
        dense = "top-1 (no labels)" if dense_top1 is None else f"top-1 (dense: {dense_top1:.1%})"
    else:
        metric, on = "perplexity", f"{result.score.windows} windows"
        if isinstance(result.score, MaskedScore):
            metric, on = "masked_perplexity", f"{result.score.tokens} masked tokens"
        dense = f"{metric.replace('_', ' ')} (dense: {result.reference.perplexity:.3f})"
        on, own = f"{on} of {result.score.window} tokens", result.score.perplexity
    score, kl = (each if each is not None and isfinite(each) else None for each in (own, result.kl))
    return Scores(metric, score, kl, f"{dense} and KL on {on}")
