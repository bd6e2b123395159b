"""Results of `evaluate`: one data class for each kind, as JSON, and as tables and sentences for people.

In each of them `model` is what was measured, and `against` the model that it was compared with, if there is one, whose
own figures are `reference` or `references`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.safe_text import to_one_line
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.evaluation.choices import ChoiceScore
from ckpt_prune.evaluation.display import Figures
from ckpt_prune.evaluation.display import Result as Result
from ckpt_prune.evaluation.features import FeatureComparison
from ckpt_prune.evaluation.generation import GeneratedText
from ckpt_prune.evaluation.heads import HeadComparison
from ckpt_prune.evaluation.image_classes import Classification
from ckpt_prune.evaluation.perplexity import PerplexityScore
from ckpt_prune.evaluation.sentences import SentenceComparison
from ckpt_prune.job.quality import judge
from ckpt_prune.job.report import Loss
from ckpt_prune.show.section import MISSING, Table

_NAMED_IMAGES = 10
"""So many images that do not decode are named in text; JSON names all."""
S = TypeVar("S", bound=Figures)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _name(path: Path | None) -> str | None:
    return None if path is None else model_name(path)


def _verdict(result: Result) -> list[Table | str]:
    loss = result.loss()
    return [] if loss is None or loss.verdict is None else [loss.verdict]


def _name_skipped(skipped: Sequence[str] | None) -> list[Table | str]:
    if not skipped:
        return []
    more = f" and {len(skipped) - _NAMED_IMAGES} more" if len(skipped) > _NAMED_IMAGES else ""
    return [to_one_line(f"left out, {len(skipped)} not decoding: {', '.join(skipped[:_NAMED_IMAGES])}{more}")]


# ---- scores of a model, and perhaps of a reference -------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredResult(Result, Generic[S]):
    """A model with a score, and perhaps a reference with one.

    Attributes:
        kl: mean over tokens or images of KL(reference ‖ model), nats.
        agreement: share of the tokens, images or labelled pixels for which both put the same token or class first.
        on: what was measured on, in words, if it was chosen for the user.
    """

    model: Path
    score: S
    against: Path | None = None
    reference: S | None = None
    kl: float | None = None
    agreement: float | None = None
    on: str | None = field(default=None, kw_only=True)

    def data(self) -> dict[str, Any]:
        details = {each.name: getattr(self, each.name) for each in fields(self)[len(fields(ScoredResult)) :]}
        return {
            **self._data_of(self.model, self.score),
            **details,
            "agreement": self.agreement,
            "against": None if self.reference is None else self._data_of(self.against, self.reference),
        }

    def loss(self) -> Loss | None:
        """Return both figures of the first column, with what they were measured on."""
        if self.reference is None:
            return None
        of, key, _ = self.score.columns[0]
        of = "top-1 accuracy" if of == "top-1" else of
        figures = getattr(self.reference, key), getattr(self.score, key), self.kl, self.agreement
        before, after, kl, agreement = (each if each is not None and math.isfinite(each) else None for each in figures)
        return judge(
            Loss(
                of=of,
                before=before,
                after=after,
                kl=kl,
                agreement=agreement,
                data=self.on or self.score.amount(),
                against=_name(self.against),
            )
        )

    def paragraphs(self) -> list[Table | str]:
        remarks = [*self.score.remarks(self.against), *self._sentences()]
        if self.reference is None:
            return [Table(["model", *self.score.headings()], [[str(self.model), *self.score.cells()]]), *remarks]
        both = f"before: {self.against}, after: {self.model}; {self.on or self.score.amount()}"
        return [Table(["", "before", "after", "share"], list(self._compare())), both, *remarks, *_verdict(self)]

    def _compare(self) -> Iterator[list[str]]:
        """Yield a row for each figure that both models have, as `prune` and `plan` print sizes."""
        assert self.reference is not None
        for (heading, key, _), old, new in zip(
            self.score.columns, self.reference.cells(), self.score.cells(), strict=True
        ):
            before, after = getattr(self.reference, key), getattr(self.score, key)
            if not isinstance(after, int):
                yield [heading, old, new, f"{after / before:.1%}" if before and after is not None else MISSING]

    def _data_of(self, model: Path | None, score: Any) -> dict[str, Any]:
        return {"model": str(model), **score.data()}

    def _sentences(self) -> list[Table | str]:
        """Say what the figures do not: here how far the two are apart."""
        if self.reference is None:
            return []
        unit = "image" if isinstance(self.score, Classification) else "token"
        return [f"KL divergence {self.kl:.4f} nats per {unit}, top-1 agreement {self.agreement:.1%}"]


class PerplexityResult(ScoredResult[PerplexityScore]):
    """A causal language model on text."""

    def data(self) -> dict[str, Any]:
        data = self._data_of(self.model, self.score)
        if self.reference is not None:
            against = self._data_of(self.against, self.reference)
            data |= {"kl": self.kl, "top1_agreement": self.agreement, "against": against}
        return data

    def _data_of(self, model: Path | None, score: PerplexityScore) -> dict[str, Any]:
        data = super()._data_of(model, score)
        if not math.isfinite(score.perplexity):  # JSON has no infinity
            data["perplexity"] = None
        return data


class MaskedResult(PerplexityResult):
    """A masked language model on masked tokens; scores are `masked.MaskedScore`."""

    def _data_of(self, model: Path | None, score: PerplexityScore) -> dict[str, Any]:
        data = super()._data_of(model, score)
        data["masked_perplexity"], data["masked"] = data.pop("perplexity"), data.pop("tokens")
        return data


@dataclass(frozen=True)
class AccuracyResult(ScoredResult[Classification]):
    """An image classifier on images; `skipped` are the names of those that do not decode."""

    skipped: tuple[str, ...] = field(default=(), repr=False)

    def data(self) -> dict[str, Any]:
        return super().data() | {"kl": self.kl}

    def _sentences(self) -> list[Table | str]:
        return [*super()._sentences(), *_name_skipped(self.skipped)]


# ---- figures of a model and a reference together ---------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonResult(Result):
    """A model compared with a reference, without knowing what is right: features, predictions or embeddings.

    `skipped` are the names of images that do not decode; None for text. `on` is as in `ScoredResult`.
    """

    model: Path
    against: Path
    comparison: FeatureComparison | HeadComparison | SentenceComparison
    skipped: tuple[str, ...] | None = field(default=None, repr=False)
    on: str | None = field(default=None, kw_only=True)

    def data(self) -> dict[str, Any]:
        data = {"model": str(self.model), "against": str(self.against), **self.comparison.data()}
        return data if self.skipped is None else data | {"skipped": self.skipped}

    def loss(self) -> Loss:
        """Return how near both are, with what that was measured on."""
        both, kl, agreement = self.comparison, None, None
        if isinstance(both, HeadComparison):
            of, after, kl, agreement = "rank correlation", both.rank_correlation, both.kl, both.agreement
        else:
            of = "cosine of the embeddings" if isinstance(both, SentenceComparison) else "cosine of the features"
            after = both.cosine
        data, against = self.on or both.amount(), _name(self.against)
        return judge(Loss(of=of, after=after, kl=kl, agreement=agreement, data=data, against=against))

    def paragraphs(self) -> list[Table | str]:
        figures = self.comparison
        table = Table(["model", *figures.headings()], [[str(self.model), *figures.cells()]])
        on = [] if self.on is None else [f"measured on {self.on}"]
        return [table, *figures.remarks(self.against), *on, *_name_skipped(self.skipped), *_verdict(self)]


@dataclass(frozen=True)
class TextsResult(Result):
    """A model on several texts, each measured by itself, in the order given."""

    results: tuple[tuple[Path, PerplexityResult | ComparisonResult], ...]

    @property
    def together(self) -> PerplexityResult | None:
        """The figures over the tokens of all texts; None if there is no perplexity of each."""
        parts = [result for _, result in self.results if isinstance(result, PerplexityResult)]
        if len(parts) < len(self.results):
            return None
        first, tokens = parts[0], [part.score.tokens for part in parts]
        joined = _join_scores([part.score for part in parts])
        if first.reference is None:
            return type(first)(first.model, joined)
        reference = _join_scores([part.reference for part in parts if part.reference is not None])
        kl, agreement = (_mean([getattr(part, name) for part in parts], tokens) for name in ("kl", "agreement"))
        return type(first)(first.model, joined, first.against, reference, kl, agreement)

    def data(self) -> dict[str, Any]:
        """Return what `--json` prints: the figures over all texts, and under "texts" those of each."""
        together = {} if self.together is None else self.together.data()
        return together | {"texts": [{"text": str(text), **result.data()} for text, result in self.results]}

    def loss(self) -> Loss | None:
        return None if self.together is None else self.together.loss()

    def paragraphs(self) -> list[Table | str]:
        """Return a table with a line, or the lines, of each text, and what else is said of each."""
        results = [(str(text), result) for text, result in self.results]
        if self.together is not None:
            results.append(("all", self.together))
        tables, sentences = [], []
        for text, result in results:
            table, *rest = result.paragraphs()
            assert isinstance(table, Table)
            tables.append(Table(["text", *table.columns], [[text, *row] for row in table.rows]))
            sentences += [f"{text}: {sentence}" for sentence in rest]
        return [Table(tables[0].columns, [row for table in tables for row in table.rows]), *sentences]


def _join_scores(scores: Sequence[PerplexityScore]) -> PerplexityScore:
    """Return the score over the tokens of several: counts add, shares and means are weighed by tokens."""
    tokens = [score.tokens for score in scores]
    counts = {name: sum(getattr(score, name) for score in scores) for name in ("tokens", "windows")}
    means: dict[str, Any] = {
        each.name: _mean([getattr(score, each.name) for score in scores], tokens)
        for each in fields(scores[0])
        if each.name not in (*counts, "window", "perplexity")
    }
    perplexity = math.exp(means["nll"]) if means["nll"] < 700 else math.inf
    return replace(scores[0], **counts, **means, perplexity=perplexity)


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


# ---- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskResult(Result):
    """Tasks that were run by lm-eval, with its own tables: results (task → metric → value), versions and n-samples."""

    model: Path
    tables: dict[str, Any]
    against: Path | None = None
    reference: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return short_repr(self, model=str(self.model), tasks=list(self.tables["results"]), against=_text(self.against))

    def figures(self) -> list[tuple[str, str, float, float | None]]:
        """List task, metric, value and the reference's value; standard errors are left out."""
        figures = []
        for task, metrics in self.tables["results"].items():
            others = {} if self.reference is None else self.reference["results"][task]
            for metric, value in metrics.items():
                if isinstance(value, float) and "stderr" not in metric:
                    figures.append((task, metric, value, others.get(metric)))
        return figures

    def data(self) -> dict[str, Any]:
        if self.reference is None:
            return self.tables
        differences: dict[str, dict[str, float]] = {}
        for task, metric, value, other in self.figures():
            if other is not None:
                differences.setdefault(task, {})[metric] = value - other
        return self.tables | {"against": {"model": str(self.against)} | self.reference, "differences": differences}

    def paragraphs(self) -> list[Table | str]:
        if self.reference is None:
            rows = [[task, metric, f"{value:.4f}"] for task, metric, value, _ in self.figures()]
            return [Table(["task", "metric", "value"], rows)]
        rows = [
            [task, metric, f"{value:.4f}", *(["-"] * 2 if other is None else [f"{other:.4f}", f"{value - other:+.4f}"])]
            for task, metric, value, other in self.figures()
        ]
        return [Table(["task", "metric", str(self.model), str(self.against), "difference"], rows)]


@dataclass(frozen=True)
class ChoiceResult(Result):
    """A causal language model on multiple-choice items, with a score for each task, named as its file."""

    model: Path
    scores: dict[str, ChoiceScore]
    against: Path | None = None
    references: dict[str, ChoiceScore] | None = None

    def agreement(self, task: str) -> float | None:
        """Return the share of a task's items for which both choose the same; None without a reference."""
        if self.references is None:
            return None
        picked, other_picked = self.scores[task].picked, self.references[task].picked
        return sum(a == b for a, b in zip(picked, other_picked, strict=True)) / len(picked)

    def data(self) -> dict[str, Any]:
        tasks: dict[str, Any] = {}
        for task, score in self.scores.items():
            tasks[task] = score.data()
            if self.references is not None:
                difference, error = score.difference(self.references[task])
                tasks[task] |= {
                    "agreement": self.agreement(task),
                    "difference": difference,
                    "difference_stderr": error,
                    "against": self.references[task].data(),
                }
        return {"model": str(self.model), "against": _text(self.against), "tasks": tasks}

    def paragraphs(self) -> list[Table | str]:
        rows, differences = [], []
        for task, score in self.scores.items():
            rows.append([task, str(self.model), *score.cells()])
            if self.references is not None:
                rows.append([task, str(self.against), *self.references[task].cells()])
                difference, error = score.difference(self.references[task])
                differences.append([task, f"{difference:+.1%}", f"{error:.1%}", f"{self.agreement(task):.1%}"])
        scores = Table(["task", "model", *ChoiceScore.headings()], rows)
        columns = ["task", "difference", "+/-", "both choose the same"]
        return [scores, Table(columns, differences)] if differences else [scores]


@dataclass(frozen=True)
class LabelScore:
    """Metrics of a model on labelled texts.

    `by_name` is whether the model's classes were matched by their names, else by number; None for numbers.
    """

    items: int
    figures: dict[str, float]
    by_name: bool | None


@dataclass(frozen=True)
class LabelComparison:
    """How far two models answer alike: classes by KL(reference ‖ model), nats, and agreement; numbers by ranks."""

    kl: float | None
    agreement: float | None
    rank_correlation: float | None


@dataclass(frozen=True)
class LabelResult(Result):
    """A classifier of texts, or a model that gives them a number, on tasks of texts whose labels are known."""

    model: Path
    scores: dict[str, LabelScore]
    against: Path | None = None
    references: dict[str, LabelScore] | None = None
    comparisons: dict[str, LabelComparison] | None = None

    def data(self) -> dict[str, Any]:
        tasks: dict[str, Any] = {}
        for task, score in self.scores.items():
            tasks[task] = {"items": score.items, "by_name": score.by_name, **score.figures}
            if self.references is not None and self.comparisons is not None:
                others = self.references[task].figures
                tasks[task] |= {
                    **asdict(self.comparisons[task]),
                    "difference": {metric: value - others[metric] for metric, value in score.figures.items()},
                    "against": others,
                }
        return {"model": str(self.model), "against": _text(self.against), "tasks": tasks}

    def paragraphs(self) -> list[Table | str]:
        rows = []
        for task, score in self.scores.items():
            for metric, value in score.figures.items():
                other = None if self.references is None else self.references[task].figures[metric]
                reference = [] if other is None else [f"{other:.4f}", f"{value - other:+.4f}"]
                rows.append([task, metric, f"{value:.4f}", *reference, f"{score.items:,}"])
        against = [] if self.against is None else [str(self.against), "difference"]
        parts: list[Table | str] = [Table(["task", "metric", str(self.model), *against, "texts"], rows)]
        for task, both in (self.comparisons or {}).items():
            if both.kl is None:
                parts.append(f"{task}: rank correlation of the two models' numbers {both.rank_correlation:.4f}")
            else:
                parts.append(f"{task}: both put the same class first for {both.agreement:.1%}, KL {both.kl:.6f}")
        for task, score in self.scores.items():
            if score.by_name is False:
                parts.append(f"{task}: the model does not name its classes as the task does; they are taken by number")
        return parts


@dataclass(frozen=True)
class GenerationResult(Result):
    """How a causal language model continues prompts."""

    model: Path
    prompts: tuple[str, ...]
    continuations: tuple[GeneratedText, ...]
    against: Path | None = None
    reference: tuple[GeneratedText, ...] | None = None

    def data(self) -> dict[str, Any]:
        rows = []
        for number, prompt in enumerate(self.prompts):
            rows.append({"prompt": prompt, **asdict(self.continuations[number])})
            if self.reference is not None:
                rows[-1]["against"] = asdict(self.reference[number])
        return {"model": str(self.model), "against": _text(self.against), "generated": rows}

    def paragraphs(self) -> list[Table | str]:
        parts: list[Table | str] = []
        for number, prompt in enumerate(self.prompts):
            both = [(self.model, self.continuations[number])]
            if self.against is not None and self.reference is not None:
                both.append((self.against, self.reference[number]))
            parts.append(repr(prompt))
            for model, continuation in both:
                # A model may write what a terminal would obey.
                text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in continuation.text)
                parts.append(f"{model} ({continuation.tokens} tokens, {continuation.repeated:.0%} repeated):\n{text}")
        return parts


# ---- memory, and several results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceShare:
    """The parts of a model, named as in accelerate's map, that one device (cpu, disk, or a GPU's number) would hold.

    `room` is how many bytes the device may take; None for a disk.
    """

    device: str
    bytes: int
    room: int | None
    parts: tuple[str, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Devices that would hold parts of a model, in the order in which they are filled."""

    model: Path
    dtype: str
    devices: tuple[DeviceShare, ...]


@dataclass(frozen=True)
class MemoryPlans(Result):
    """Plans of all models that are in memory together, in the order in which they are loaded."""

    plans: tuple[MemoryPlan, ...]

    def data(self) -> dict[str, Any]:
        return {"memory": [asdict(plan) | {"model": str(plan.model)} for plan in self.plans]}

    def paragraphs(self) -> list[Table | str]:
        parts: list[Table | str] = []
        for plan in self.plans:
            rows = []
            for share in plan.devices:
                name = f"cuda:{share.device}" if share.device.isdigit() else share.device
                room = "-" if share.room is None else human_bytes(share.room)
                rows.append([name, str(len(share.parts)), human_bytes(share.bytes), room])
            parts += [f"{plan.model}, {plan.dtype}:", Table(["device", "parts", "bytes", "room"], rows)]
            if any(share.device == "disk" for share in plan.devices):
                parts.append("what is left on disk is read again for every batch")
        return parts


@dataclass(frozen=True)
class Foreseen(Result):
    """What a measurement will take: `estimate` as JSON has it, and `line` in words."""

    estimate: dict[str, Any]
    line: str

    def data(self) -> dict[str, Any]:
        return {"estimate": self.estimate}

    def paragraphs(self) -> list[Table | str]:
        return [f"it takes {self.line}"]


OneResult = (
    ChoiceResult
    | LabelResult
    | GenerationResult
    | PerplexityResult
    | MaskedResult
    | AccuracyResult
    | ComparisonResult
    | TextsResult
    | TaskResult
    | MemoryPlans
    | Foreseen
)


@dataclass(frozen=True)
class CombinedResult(Result):
    """Several measurements of the same models, made in one call, named "text", "tasks" or "generate"."""

    results: dict[str, OneResult]

    def data(self) -> dict[str, Any]:
        """Return what `--json` prints: the results under their names."""
        return {name: result.data() for name, result in self.results.items()}

    def loss(self) -> Loss | None:
        return self.results["text"].loss() if "text" in self.results else None

    def paragraphs(self) -> list[Table | str]:
        return [part for result in self.results.values() for part in result.paragraphs()]
