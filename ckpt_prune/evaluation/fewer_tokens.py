"""Scores of models by text, also of models with fewer tokens, which write the text with other tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.evaluation.file_score import FileScore, standard_error
from ckpt_prune.evaluation.perplexity import LanguageModel, PerplexityScore, TokenComparison, perplexity
from ckpt_prune.measure.samples.samples import ScoredWindows

TokenParts = Callable[[int], Sequence[int]]
"""A model's token → the tokens of a model with fewer that stand in its place."""


@dataclass(frozen=True, eq=False)
class WrittenWindows(ScoredWindows):
    """Windows in other tokens. The first token of each is not predicted, nor is what fills it up at its end."""

    def called_with(self, rows: slice) -> list[dict[str, Tensor]]:
        return [{"input_ids": self.windows[rows]}]


def write_with(windows: Tensor, parts: TokenParts) -> WrittenWindows:
    """Return windows (windows, length) as a model with fewer tokens writes them, filled up at their ends."""
    written = [[parts(token) for token in window] for window in windows.tolist()]
    flat = [[part for token in window for part in token] for window in written]
    longest = max(map(len, flat))
    ids = torch.tensor([ids + ids[:1] * (longest - len(ids)) for ids in flat])
    places, first = torch.arange(longest), torch.tensor([len(window[0]) for window in written])
    lengths = torch.tensor([len(ids) for ids in flat])
    return WrittenWindows(ids, scored=(places >= first[:, None]) & (places < lengths[:, None]))


@dataclass(frozen=True, eq=False)
class TextCosts:
    """The negative log-likelihood of texts by a model, with which models of fewer tokens are compared.

    Attributes:
        windows: token ids of the model, (windows, length) int64.
        texts: name of the text of each window; empty if that is the same.
        open_model: opens the model.
    """

    windows: Tensor
    texts: Sequence[str]
    open_model: Callable[[], LanguageModel]

    @cached_property
    def _by_text(self) -> dict[str, Tensor]:
        names = list(self.texts) or [""] * len(self.windows)
        return {name: self.windows[[own == name for own in names]] for name in dict.fromkeys(names)}

    @cached_property
    def _costs(self) -> dict[str, PerplexityScore]:
        model = self.open_model()
        return {name: perplexity(model, windows) for name, windows in self._by_text.items()}

    @property
    def nll(self) -> float:
        """The mean negative log-likelihood of the model, nats a token."""
        costs = self._costs.values()
        return sum(each.nll * each.tokens for each in costs) / sum(each.tokens for each in costs)

    def score(self, model: LanguageModel, parts: TokenParts) -> FileScore:
        """Return how much more negative log-likelihood a model with fewer tokens has, without size and times."""
        fewer = {name: perplexity(model, write_with(own, parts)) for name, own in self._by_text.items()}
        of_fewer, of_whole = (
            {name: each.nll * each.tokens for name, each in costs.items()} for costs in (fewer, self._costs)
        )
        return score_costs(of_fewer, of_whole, {name: each.tokens for name, each in self._costs.items()})


def score_costs(fewer: Mapping[str, float], whole: Mapping[str, float], tokens: Mapping[str, float]) -> FileScore:
    """Return the score of a model with fewer tokens, without size and times.

    Args:
        fewer, whole: name of a text → its negative log-likelihood by that model, and by one with all tokens, in nats.
        tokens: name of a text → tokens that the latter predicts of it.
    """
    total, nll = sum(tokens.values()), sum(fewer.values())
    more = {name: (fewer[name] - whole[name]) / count for name, count in tokens.items()}
    kl = (nll - sum(whole.values())) / total
    return FileScore(0, kl, math.exp(nll / total), (), kl_of=more if len(more) > 1 else {})


def score_of(both: TokenComparison, windows: Tensor, texts: Sequence[str]) -> FileScore:
    """Return the score of a model of all tokens, compared on windows of several texts, without size and times."""
    score = FileScore(0, both.kl, both.score.perplexity, (), top1=both.top1_agreement)
    if both.spread is None:
        return score
    of_windows, of_texts = both.spread.divergences.view(len(windows), -1).mean(1), dict[str, list[float]]()
    for name, kl in zip(texts, of_windows.tolist(), strict=bool(texts)):
        of_texts.setdefault(name, []).append(kl)
    means = {name: sum(several) / len(several) for name, several in of_texts.items()}
    quantiles: dict[str, Any] = both.spread.data()
    return replace(score, kl_of=means, kl_error=standard_error(of_windows.tolist()), **quantiles)
