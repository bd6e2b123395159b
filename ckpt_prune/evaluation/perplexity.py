"""Perplexity of a model on windows of tokens, and its divergence from a reference (README.md, section 1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_same_vocabulary, check_windows, iterate_rows
from ckpt_prune.evaluation.display import Columns, Figures
from ckpt_prune.evaluation.streamed import StreamedModel, Strip
from ckpt_prune.measure.samples.pairs import PairWindows
from ckpt_prune.measure.samples.samples import ScoredWindows, move_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LanguageModel: TypeAlias = "PreTrainedModel | StreamedModel"
STRIP_BYTES = 64 * 2**20
"""A head makes logits of so many bytes at a time, counted as float32."""
CHUNK = 2**20
"""Logits whose log-probabilities are worked out at once: 4 MiB of float32, which stay in a cache."""


@dataclass(frozen=True)
class PerplexityScore(Figures):
    """Perplexity of a model on a text. It means nothing without its window.

    Attributes:
        perplexity: exp(nll).
        nll: mean negative log-likelihood, nats per scored token.
        tokens: that were scored: windows × (window − 1), because nothing predicts the first token of a window. Those
            that stand for images, or fill up a pair, are left out.
    """

    columns: ClassVar[Columns] = (
        ("perplexity", "perplexity", ".3f"),
        ("window", "window", "d"),
        ("tokens", "tokens", ","),
    )
    perplexity: float
    nll: float
    tokens: int
    window: int
    windows: int

    def data(self) -> dict[str, Any]:
        data = super().data()
        if not math.isfinite(self.perplexity):  # JSON has no infinity
            data["perplexity"] = None
        return data


@dataclass(frozen=True)
class PairScore(PerplexityScore):
    """Perplexity of an encoder-decoder on the targets of pairs; each pair is as long as it is."""

    columns = (("perplexity", "perplexity", ".3f"), ("pairs", "windows", ","), ("tokens", "tokens", ","))
    hidden = ("window",)

    def data(self) -> dict[str, Any]:
        data = super().data()
        data["pairs"] = data.pop("windows")
        return data


@dataclass(frozen=True)
class TokenComparison:
    """A model and a reference on the same tokens, with a `PerplexityScore` or `masked.MaskedScore` each.

    Attributes:
        kl: mean over the scored tokens of KL(reference ‖ model), nats.
        top1_agreement: share of the scored tokens for which both find the same token likeliest, 0 to 1.
        spread: how the divergences of single tokens are spread; None if that is not known.
    """

    score: PerplexityScore
    reference_score: PerplexityScore
    kl: float
    top1_agreement: float
    spread: "Spread | None" = None


@dataclass(frozen=True)
class Spread:
    """How far single tokens' predictions are apart, and how many of them a draft would get right.

    Attributes:
        divergences: KL(reference ‖ model) of every token, (tokens,) float32, nats.
        accepted: mean over tokens of Σ min(p, q): the chance that speculative decoding takes a token of the model as
            one of the reference (Leviathan et al. 2023).
    """

    divergences: Tensor
    accepted: float

    def quantile(self, share: float) -> float:
        """Return the divergence that this share of the tokens does not pass: the nearest one that occurs."""
        place = min(len(self.divergences) - 1, int(share * len(self.divergences)))
        return float(self.divergences.sort().values[place])

    def data(self) -> dict[str, float]:
        """Return what JSON has of it."""
        shares = {"kl_median": 0.5, "kl_90": 0.9, "kl_99": 0.99}
        return {name: self.quantile(share) for name, share in shares.items()} | {"accepted": self.accepted}

    @classmethod
    def join(cls, parts: Sequence["Spread"]) -> "Spread":
        """Return the spread of the tokens of several together."""
        counts = [len(part.divergences) for part in parts]
        accepted = sum(part.accepted * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
        return cls(torch.cat([part.divergences for part in parts]), accepted)


class PredictionSums:
    """Adds up how well one model or two predict tokens, and how far their predictions are apart."""

    def __init__(self) -> None:
        self.tokens, self.nll, self.right, self.kl, self.agreeing = 0, [0.0, 0.0], [0, 0], 0.0, 0
        self._divergences: list[Tensor] = []
        self._accepted = 0.0

    def add(self, logits: Sequence[Tensor], targets: Tensor) -> None:
        """Add what the models say, by logits (N, vocabulary) of any floating dtype each, of targets, (N,)."""
        rows = max(1, CHUNK // logits[0].shape[-1])
        for part in zip(*(torch.split(each, rows) for each in (targets, *logits)), strict=True):
            self._add([each.float().log_softmax(-1) for each in part[1:]], part[0])

    def _add(self, predictions: Sequence[Tensor], targets: Tensor) -> None:
        self.tokens += len(targets)
        for place, predicted in enumerate(predictions):
            nll = functional.nll_loss(predicted, targets, reduction="none")
            self.nll[place] += nll.sum(dtype=torch.float64).item()
            self.right[place] += int((predicted.argmax(-1) == targets).sum())
        if len(predictions) == 2:
            ours, theirs = predictions
            divergences = functional.kl_div(ours, theirs, reduction="none", log_target=True)
            self.kl += divergences.sum(dtype=torch.float64).item()
            self._divergences.append(divergences.sum(-1).float().cpu())
            self._accepted += torch.minimum(ours, theirs).exp_().sum(dtype=torch.float64).item()
            self.agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())

    @property
    def mean_kl(self) -> float:
        """KL(reference ‖ model), nats a token; two models were added up."""
        return self.kl / self.tokens

    @property
    def spread(self) -> Spread:
        """How single tokens are apart; two models were added up."""
        return Spread(torch.cat(self._divergences).clamp_min(0), self._accepted / self.tokens)

    def perplexity(self, place: int) -> tuple[float, float]:
        """Return a model's perplexity, infinity if a float cannot hold it, and its mean negative log-likelihood."""
        nll = self.nll[place] / self.tokens
        if math.isnan(nll):
            raise UserError(
                "the model's logits are not numbers (NaN): its weights are damaged or overflow in this dtype"
            )
        return math.exp(nll) if nll < 700 else math.inf, nll


def perplexity(model: LanguageModel, windows: Tensor | ScoredWindows, *, what: str = "perplexity") -> PerplexityScore:
    """Measure perplexity on windows, int64 (windows, window): exp of the mean over every token but each window's first.

    Puts the model in evaluation mode.
    """
    return _score(_add_up([model], windows, what), 0, windows)


def compare(
    model: LanguageModel, reference: LanguageModel, windows: Tensor | ScoredWindows, *, what: str = "comparing"
) -> TokenComparison:
    """Measure both perplexities, KL(reference ‖ model) and top-1 agreement in one pass over the windows.

    The two models may be on different devices.
    """
    check_same_vocabulary(model, reference)
    sums = _add_up([model, reference], windows, what)
    score, reference_score = (_score(sums, place, windows) for place in range(2))
    return TokenComparison(score, reference_score, sums.mean_kl, sums.agreeing / sums.tokens, sums.spread)


def self_noise(model: StreamedModel, windows: Tensor) -> float:
    """Measure how far a model is from itself in bfloat16, or in float32 if that is what it runs in: KL in nats."""
    other = torch.float32 if model.dtype == torch.bfloat16 else torch.bfloat16
    return max(0.0, _add_up([replace(model, dtype=other), model], windows, "the reference in another dtype").mean_kl)


@torch.no_grad()
def _add_up(models: Sequence[LanguageModel], samples: Tensor | ScoredWindows, what: str) -> PredictionSums:
    shown = None if isinstance(samples, Tensor) else samples
    windows = samples if isinstance(samples, Tensor) else samples.windows
    for model in models:
        check_windows(model, windows)
    # One after the other: what is run block by block holds none of its blocks afterwards.
    reference = models[1].model if len(models) > 1 and isinstance(models[1], StreamedModel) else None
    readers = [
        model.read(windows, what, keep=model.model is reference)
        if isinstance(model, StreamedModel)
        else WholeLogits(model.eval(), windows, shown)
        for model in models
    ]
    sums, device = PredictionSums(), models[0].device
    positions = max(1, STRIP_BYTES // (models[0].config.get_text_config().vocab_size * 4))
    longest = shown.longest if isinstance(shown, PairWindows) else 1
    for rows in iterate_rows(models[0], windows, what=what, longest=longest):
        strips = [reader.of_batch(rows) for reader in readers]
        for row, tokens in enumerate(windows[rows].to(device)):
            for start in range(0, len(tokens) - 1, positions):
                targets = tokens[start + 1 : start + 1 + positions]
                part = slice(start, start + len(targets))
                logits = [strip(row, part).to(device) for strip in strips]
                if shown is not None:
                    scored = shown.scored[rows][row, part.start + 1 : part.stop + 1].to(device)
                    logits, targets = [each[scored] for each in logits], targets[scored]
                if len(targets):
                    sums.add(logits, targets)
    return sums


@dataclass(frozen=True)
class WholeLogits:
    """Logits of windows by a model that is in memory as a whole, those of a batch at once.

    `shown` has the windows with all that the model is called with beside them.
    """

    model: "PreTrainedModel"
    windows: Tensor
    shown: ScoredWindows | None = None

    @torch.inference_mode()
    def of_batch(self, rows: slice) -> Strip:
        """Return what gives the logits of some windows."""
        if self.shown is not None:
            return self._of_shown(rows)
        ids = self.windows[rows].to(self.model.device)
        logits = self.model(input_ids=ids, use_cache=False).logits
        return lambda row, part: logits[row, part]

    def _of_shown(self, rows: slice) -> Strip:
        assert self.shown is not None
        logits: list[Tensor] = []
        for batch in self.shown.called_with(rows):
            inputs = move_batch(batch, self.model.device, self.model.dtype)
            logits.extend(self.model(**inputs, use_cache=False).logits)
        return lambda row, part: logits[row][part]


def _score(sums: PredictionSums, place: int, windows: Tensor | ScoredWindows) -> PerplexityScore:
    """Return the score of one of the models that were added up."""
    ids = windows if isinstance(windows, Tensor) else windows.windows
    count, window = ids.shape
    kind = PairScore if isinstance(windows, PairWindows) else PerplexityScore
    return kind(*sums.perplexity(place), sums.tokens, window, count)
