"""Results of `evaluate`, as JSON, and as tables and sentences for people.

In those that have them, `model` is what was measured, and `against` the model that it was compared with, if there is
one, whose own figures are `reference`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.common.formatting import format_share
from ckpt_prune.common.safe_text import to_one_line
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.evaluation.bits import BitsScore
from ckpt_prune.evaluation.display import Figures
from ckpt_prune.evaluation.display import Result as Result
from ckpt_prune.evaluation.features import FeatureComparison
from ckpt_prune.evaluation.heads import HeadComparison
from ckpt_prune.evaluation.image_classes import Classification
from ckpt_prune.evaluation.perplexity import PerplexityScore, Spread
from ckpt_prune.evaluation.quality import judge
from ckpt_prune.evaluation.sentences import SentenceComparison
from ckpt_prune.job.report import Loss
from ckpt_prune.show.section import MISSING, Table

_NAMED_IMAGES = 10
"""So many images that do not decode are named in text; JSON names all."""
S = TypeVar("S", bound=Figures)


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
        agreement: share of the tokens or images for which both put the same token or class first.
        skipped: names of the images that do not decode; None for text.
        on: what was measured on, in words, if it was chosen for the user.
        spread: of the divergences of single tokens, if they are known.
        self_noise: KL of the reference from itself in another dtype, nats a token, if that was measured.
    """

    model: Path
    score: S
    against: Path | None = None
    reference: S | None = None
    kl: float | None = None
    agreement: float | None = None
    skipped: tuple[str, ...] | None = field(default=None, repr=False)
    on: str | None = field(default=None, kw_only=True)
    spread: Spread | None = field(default=None, kw_only=True, repr=False)
    self_noise: float | None = field(default=None, kw_only=True)

    def data(self) -> dict[str, Any]:
        data = {"model": str(self.model), **self.score.data()}
        against = None if self.reference is None else {"model": str(self.against), **self.reference.data()}
        if self.skipped is not None:
            data |= {"skipped": self.skipped, "agreement": self.agreement, "against": against, "kl": self.kl}
        elif against is not None:
            spread = {} if self.spread is None else self.spread.data()
            data |= {"kl": self.kl, **spread, "top1_agreement": self.agreement, "against": against}
            data |= {} if self.self_noise is None else {"self_noise": self.self_noise}
        return data

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
                samples=self.score.images if isinstance(self.score, Classification) else None,
                windows=getattr(self.score, "windows", None),
                data=self.on or self.score.amount(),
                against=_name(self.against),
            )
        )

    def paragraphs(self) -> list[Table | str]:
        remarks = [*self.score.remarks(self.against), *self._sentences()]
        if self.reference is None:
            table = Table(["model", *self.score.headings()], [[str(self.model), *self.score.cells()]])
            return [table, *([] if self.on is None else [f"measured on {self.on}"]), *remarks]
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

    def _sentences(self) -> list[Table | str]:
        """Say what the figures do not: how far the two are apart, and which images were left out."""
        apart: list[Table | str] = []
        if self.reference is not None and self.kl is not None:
            unit = "token" if self.skipped is None else "image"
            if isinstance(self.score, BitsScore):
                unit = "place where both have read the same text, over the tokens that both have"
            images = self.score.images if isinstance(self.score, Classification) else None
            agreement = format_share(self.agreement or 0, ".1%", images)
            apart.append(f"KL divergence {self.kl:z.4f} nats per {unit}, top-1 agreement {agreement}")
        if self.spread is not None:
            shares = self.spread.data()
            apart.append(
                f"KL of single tokens: median {shares['kl_median']:.4f}, 90% up to {shares['kl_90']:.4f}, 99% up to "
                f"{shares['kl_99']:.4f} nats; in speculative decoding, {shares['accepted']:.1%} of its tokens would be "
                "accepted by the other"
            )
        if self.self_noise is not None:
            apart.append(
                f"noise: the reference is {self.self_noise:.2g} nats from itself in another dtype (float32 or bfloat16)"
            )
        return apart + _name_skipped(self.skipped)


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
        windows, data, against = getattr(both, "windows", None), self.on or both.amount(), _name(self.against)
        figures: dict[str, Any] = {"after": after, "kl": kl, "agreement": agreement, "windows": windows}
        return judge(Loss(of=of, **figures, data=data, against=against))

    def paragraphs(self) -> list[Table | str]:
        figures = self.comparison
        table = Table(["model", *figures.headings()], [[str(self.model), *figures.cells()]])
        on = [] if self.on is None else [f"measured on {self.on}"]
        return [table, *figures.remarks(self.against), *on, *_name_skipped(self.skipped), *_verdict(self)]


@dataclass(frozen=True)
class TextsResult(Result):
    """A model on several texts, each measured by itself, in the order given."""

    results: tuple[tuple[Path, ScoredResult[Any] | ComparisonResult], ...]

    @property
    def together(self) -> ScoredResult[Any] | None:
        """The figures over the tokens of all texts; None if they have no scores."""
        parts = [result for _, result in self.results if isinstance(result, ScoredResult)]
        if len(parts) < len(self.results):
            return None
        first, tokens = parts[0], [part.score.tokens for part in parts]
        join: Any = BitsScore.join if isinstance(first.score, BitsScore) else _join_scores
        joined = join([part.score for part in parts])
        if first.reference is None:
            return ScoredResult(first.model, joined)
        reference = join([part.reference for part in parts if part.reference is not None])
        apart = [[getattr(part, name) for part in parts] for name in ("kl", "agreement")]
        kl, agreement = (None if None in values else _mean(values, tokens) for values in apart)
        spreads = [part.spread for part in parts if part.spread is not None]
        spread = Spread.join(spreads) if len(spreads) == len(parts) else None
        noises = [part.self_noise for part in parts if part.self_noise is not None]
        noise = _mean(noises, tokens) if len(noises) == len(parts) else None
        return ScoredResult(
            first.model, joined, first.against, reference, kl, agreement, spread=spread, self_noise=noise
        )

    def data(self) -> dict[str, Any]:
        """Return what `--json` prints: the figures over all texts, and under "texts" those of each."""
        together = {} if self.together is None else self.together.data()
        mean, other = self.mean_perplexities
        together |= {} if mean is None else {"mean_perplexity": mean}
        together |= {} if other is None else {"against": together["against"] | {"mean_perplexity": other}}
        return together | {"texts": [{"text": str(text), **result.data()} for text, result in self.results]}

    @property
    def mean_perplexities(self) -> tuple[float | None, float | None]:
        """The plain means of the texts' perplexities, of the model and of the reference, as papers print them.

        None where there are none, or one is not finite. The perplexity over all tokens (`together`) is another number.
        """
        scores = [result for _, result in self.results if isinstance(result, ScoredResult)]
        pairs = [[getattr(s, "perplexity", math.inf) for s in (each.score, each.reference)] for each in scores]
        means = [fmean(each) for each in zip(*pairs, strict=True)] or [math.inf, math.inf]
        model, reference = (mean if math.isfinite(mean) else None for mean in means)
        return model, reference

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
        mean, other = self.mean_perplexities
        if mean is not None:
            before = "" if other is None else f"before {other:.3f}, after "
            sentences.append(f"mean of the {len(self.results)} perplexities: {before}{mean:.3f}")
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


# ---- what is in no report of an output ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainResult(Result):
    """Answers, texts or estimates: `record` is what `--json` prints, `parts` are what people read, in order."""

    record: dict[str, Any]
    parts: Sequence[Table | str]

    def __repr__(self) -> str:
        return short_repr(self, record=list(self.record))

    def data(self) -> dict[str, Any]:
        return self.record

    def paragraphs(self) -> list[Table | str]:
        return list(self.parts)


@dataclass(frozen=True)
class CombinedResult(Result):
    """Several measurements of the same models, made in one call, named "text", "tasks" or "generate"."""

    results: dict[str, Result]

    def data(self) -> dict[str, Any]:
        """Return what `--json` prints: the results under their names."""
        return {name: result.data() for name, result in self.results.items()}

    def loss(self) -> Loss | None:
        return self.results["text"].loss() if "text" in self.results else None

    def paragraphs(self) -> list[Table | str]:
        return [part for result in self.results.values() for part in result.paragraphs()]
