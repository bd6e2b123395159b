"""What `evaluate` gives: one kind of result for every kind of model, each as an object and as JSON."""

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.evaluation.choices import ChoiceScore
from ckpt_prune.evaluation.features import FeatureComparison
from ckpt_prune.evaluation.generation import Continuation
from ckpt_prune.evaluation.heads import HeadComparison
from ckpt_prune.evaluation.image_classes import Classification
from ckpt_prune.evaluation.masked import MaskedScore
from ckpt_prune.evaluation.memory_plan import MemoryPlans
from ckpt_prune.evaluation.patch_heads import Depth, Segmentation
from ckpt_prune.evaluation.perplexity import Score
from ckpt_prune.evaluation.probes import Probe
from ckpt_prune.evaluation.sentences import SentenceComparison


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


S = TypeVar("S")


@dataclass(frozen=True)
class _OfTokens(ABC, Generic[S]):
    """A language model on text, and perhaps a reference on the same.

    Attributes:
        model: that was measured.
        score: its own.
        against: the reference, where there is one.
        reference: its score.
        kl: mean over scored tokens of KL(reference ‖ model), nats.
        agreement: share of the tokens where both predict the same.
    """

    model: Path
    score: S
    against: Path | None = None
    reference: S | None = None
    kl: float | None = None
    agreement: float | None = None

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found = self._figures(self.model, self.score)
        if self.against is not None and self.reference is not None:
            found |= {
                "kl": self.kl,
                "top1_agreement": self.agreement,
                "against": self._figures(self.against, self.reference),
            }
        return found

    @staticmethod
    @abstractmethod
    def _figures(model: Path, score: Any) -> dict[str, Any]:
        """Those of one model."""


@dataclass(frozen=True)
class PerplexityResult(_OfTokens[Score]):
    """A causal language model on text; attributes are `model`, `score`, `against`, `reference`, `kl`, `agreement`."""

    @staticmethod
    def _figures(model: Path, score: Score) -> dict[str, Any]:
        return {
            "model": str(model),
            "perplexity": _finite(score.perplexity),
            "nll": score.nll,
            "window": score.window,
            "windows": score.windows,
            "tokens": score.tokens,
        }


@dataclass(frozen=True)
class MaskedResult(_OfTokens[MaskedScore]):
    """A masked language model, asked for masked tokens; attributes as those of `PerplexityResult`."""

    @staticmethod
    def _figures(model: Path, score: MaskedScore) -> dict[str, Any]:
        return {
            "model": str(model),
            "masked_perplexity": _finite(score.perplexity),
            "accuracy": score.accuracy,
            "window": score.window,
            "windows": score.windows,
            "masked": score.tokens,
        }


@dataclass(frozen=True)
class AccuracyResult:
    """An image classifier on images.

    Attributes:
        model: that was measured.
        score: its own.
        skipped: names of images that do not decode.
        against: the reference, where there is one.
        reference: its score.
        kl: mean over images of KL(reference ‖ model), nats.
        agreement: share of the images where both put the same class first.
    """

    model: Path
    score: Classification
    skipped: tuple[str, ...] = field(default=(), repr=False)
    against: Path | None = None
    reference: Classification | None = None
    kl: float | None = None
    agreement: float | None = None

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        against = None
        if self.against is not None and self.reference is not None:
            against = {"model": str(self.against), "top1": self.reference.top1, "top5": self.reference.top5}
        return {
            "model": str(self.model),
            "images": self.score.images,
            "top1": self.score.top1,
            "top5": self.score.top5,
            "agreement": self.agreement,
            "kl": self.kl,
            "against": against,
            "skipped": list(self.skipped),
        }


@dataclass(frozen=True)
class FeaturesResult:
    """A base model's features beside those of a reference.

    Attributes:
        model: that was measured.
        against: the reference.
        found: cosine and relative error of the last hidden states.
        skipped: names of images that do not decode; None of text.
    """

    model: Path
    against: Path
    found: FeatureComparison
    skipped: tuple[str, ...] | None = field(default=None, repr=False)

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        figures = {
            "model": str(self.model),
            "against": str(self.against),
            "cosine": self.found.cosine,
            "relative_error": self.found.relative_error,
            "samples": self.found.samples,
            "tokens": self.found.tokens,
        }
        return figures if self.skipped is None else figures | {"skipped": list(self.skipped)}


@dataclass(frozen=True)
class ProbeResult:
    """A probe of the features of images.

    Attributes:
        model: that was measured.
        kind: knn or linear.
        score: of the probe.
        train, test: images that it was fitted on, and tried on.
        split: how these were told apart.
        against: the reference, where there is one.
        reference: the same probe of its features.
    """

    model: Path
    kind: str
    score: Probe
    train: int
    test: int
    split: str
    against: Path | None = None
    reference: Probe | None = None

    @property
    def agreement(self) -> float | None:
        """Share of the test images that both put in the same class; None without a reference."""
        if self.reference is None:
            return None
        same = sum(a == b for a, b in zip(self.score.picked, self.reference.picked, strict=True))
        return same / len(self.score.picked)

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        against = None
        if self.against is not None and self.reference is not None:
            against = {"model": str(self.against), "top1": self.reference.top1, "strength": self.reference.strength}
        return {
            "model": str(self.model),
            "probe": self.kind,
            "top1": self.score.top1,
            "strength": self.score.strength,
            "features": self.score.features,
            "train": self.train,
            "test": self.test,
            "split": self.split,
            "agreement": self.agreement,
            "difference": None if self.reference is None else self.score.top1 - self.reference.top1,
            "against": against,
        }


@dataclass(frozen=True)
class PatchHeadResult:
    """A linear head on the patches of images.

    Attributes:
        model: that was measured.
        head: file that was read.
        score: against label maps.
        images: how many.
        size: height and width of what was compared.
        skipped: names of images that do not decode.
        against: the reference, where there is one.
        reference: the same head's on its patches.
        agreement: share of the labelled pixels that both put in one class; None of depth, and without a reference.
    """

    model: Path
    head: Path
    score: Segmentation | Depth
    images: int
    size: tuple[int, int]
    skipped: tuple[str, ...] = field(default=(), repr=False)
    against: Path | None = None
    reference: Segmentation | Depth | None = None
    agreement: float | None = None

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        against = None
        if self.against is not None and self.reference is not None:
            against = {"model": str(self.against), **asdict(self.reference)}
        return {
            "model": str(self.model),
            "patch_head": str(self.head),
            **asdict(self.score),
            "images": self.images,
            "size": list(self.size),
            "agreement": self.agreement,
            "against": against,
            "skipped": list(self.skipped),
        }


@dataclass(frozen=True)
class HeadResult:
    """A classifier of texts or tokens, or one that finds answers, beside a reference.

    Attributes:
        model: that was measured.
        against: the reference.
        found: divergence and agreement, or the order of single numbers.
    """

    model: Path
    against: Path
    found: HeadComparison

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"model": str(self.model), "against": str(self.against), **asdict(self.found)}


@dataclass(frozen=True)
class SentencesResult:
    """A sentence-transformers folder's embeddings of texts beside those of a reference.

    Attributes:
        model: that was measured.
        against: the reference.
        found: cosine, rank correlation and nearest texts.
    """

    model: Path
    against: Path
    found: SentenceComparison

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"model": str(self.model), "against": str(self.against), **asdict(self.found)}


@dataclass(frozen=True)
class TaskResult:
    """Tasks that were run by lm-eval.

    Attributes:
        model: that was measured.
        tables: lm-eval's own: results (task → metric → value), versions and n-samples.
        against: the reference, where there is one.
        reference: its tables.
    """

    model: Path
    tables: dict[str, Any]
    against: Path | None = None
    reference: dict[str, Any] | None = None

    def __repr__(self) -> str:
        against = None if self.against is None else str(self.against)
        return short_repr(self, model=str(self.model), tasks=list(self.tables["results"]), against=against)

    def figures(self) -> list[tuple[str, str, float, float | None]]:
        """Task, metric, value and the reference's value; standard errors are left out."""
        found = []
        for task, metrics in self.tables["results"].items():
            others = {} if self.reference is None else self.reference["results"][task]
            for metric, value in metrics.items():
                if isinstance(value, float) and "stderr" not in metric:
                    found.append((task, metric, value, others.get(metric)))
        return found

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        if self.reference is None:
            return self.tables
        differences: dict[str, dict[str, float]] = {}
        for task, metric, value, other in self.figures():
            if other is not None:
                differences.setdefault(task, {})[metric] = value - other
        return self.tables | {"against": {"model": str(self.against)} | self.reference, "differences": differences}


@dataclass(frozen=True)
class ChoiceResult:
    """A causal language model on files of multiple-choice items.

    Attributes:
        model: that was measured.
        scores: task → its own score; a task is named as its file.
        against: the reference, where there is one.
        references: task → its score.
    """

    model: Path
    scores: dict[str, ChoiceScore]
    against: Path | None = None
    references: dict[str, ChoiceScore] | None = None

    def agreement(self, task: str) -> float | None:
        """Share of a task's items where both choose the same; None without a reference."""
        if self.references is None:
            return None
        ours, theirs = self.scores[task].picked, self.references[task].picked
        return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        tasks: dict[str, Any] = {}
        for task, score in self.scores.items():
            tasks[task] = self._figures(score)
            if self.references is not None:
                own = self._figures(self.references[task])
                difference, error = score.difference(self.references[task])
                tasks[task] |= {
                    "agreement": self.agreement(task),
                    "difference": difference,
                    "difference_stderr": error,
                    "against": own,
                }
        against = None if self.against is None else str(self.against)
        return {"model": str(self.model), "against": against, "tasks": tasks}

    @staticmethod
    def _figures(score: ChoiceScore) -> dict[str, Any]:
        return {
            "items": score.items,
            "accuracy": score.accuracy,
            "accuracy_norm": score.accuracy_norm,
            "stderr": score.stderr,
            "chance": score.chance,
        }


@dataclass(frozen=True)
class LabelScore:
    """What a model makes of texts whose labels are known.

    Attributes:
        items: labelled.
        figures: metric → its value.
        by_name: whether the model's classes were told by their names; else by number. None of numbers.
    """

    items: int
    figures: dict[str, float]
    by_name: bool | None


@dataclass(frozen=True)
class Alike:
    """Two models' answers to the same texts.

    Attributes:
        kl: mean over texts of KL(reference ‖ model), nats; None of numbers.
        agreement: share of the texts where both put the same class first; None of numbers.
        rank_correlation: Spearman's, of two models' numbers; None of classes.
    """

    kl: float | None
    agreement: float | None
    rank_correlation: float | None


@dataclass(frozen=True)
class LabelResult:
    """A classifier of texts, or one that gives them a number, on texts whose labels are known.

    Attributes:
        model: that was measured.
        scores: task → its own score.
        against: the reference, where there is one.
        references: task → its score.
        alike: task → how alike the two answer.
    """

    model: Path
    scores: dict[str, LabelScore]
    against: Path | None = None
    references: dict[str, LabelScore] | None = None
    alike: dict[str, Alike] | None = None

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        tasks: dict[str, Any] = {}
        for task, score in self.scores.items():
            tasks[task] = {"items": score.items, "by_name": score.by_name, **score.figures}
            if self.references is not None and self.alike is not None:
                own = self.references[task].figures
                tasks[task] |= {
                    **asdict(self.alike[task]),
                    "difference": {metric: value - own[metric] for metric, value in score.figures.items()},
                    "against": own,
                }
        against = None if self.against is None else str(self.against)
        return {"model": str(self.model), "against": against, "tasks": tasks}


@dataclass(frozen=True)
class GenerationResult:
    """What a causal language model says after prompts.

    Attributes:
        model: that was asked.
        prompts: it was given.
        said: its continuations.
        against: the reference, where there is one.
        reference: what that says.
    """

    model: Path
    prompts: tuple[str, ...]
    said: tuple[Continuation, ...]
    against: Path | None = None
    reference: tuple[Continuation, ...] | None = None

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        rows = [
            {"prompt": prompt, **asdict(own)} | ({} if other is None else {"against": asdict(other)})
            for prompt, own, other in zip(
                self.prompts, self.said, self.reference or (None,) * len(self.said), strict=True
            )
        ]
        against = None if self.against is None else str(self.against)
        return {"model": str(self.model), "against": against, "generated": rows}


OneResult = (
    ChoiceResult
    | LabelResult
    | GenerationResult
    | PerplexityResult
    | MaskedResult
    | AccuracyResult
    | FeaturesResult
    | ProbeResult
    | PatchHeadResult
    | SentencesResult
    | HeadResult
    | TaskResult
    | MemoryPlans
)


@dataclass(frozen=True)
class CombinedResult:
    """Several measurements of the same models, made in one call.

    Attributes:
        results: "text", "tasks" or "generate" → what was measured.
    """

    results: dict[str, OneResult]

    def data(self) -> dict[str, Any]:
        """As `--json` prints it: the results under their names."""
        return {name: result.data() for name, result in self.results.items()}


Result = OneResult | CombinedResult
