"""The predictions of a GGUF file in llama.cpp beside those of a model in PyTorch, at every token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.fewer_tokens import TokenParts, WrittenWindows, score_costs, write_with
from ckpt_prune.evaluation.file_score import FileScore, standard_error
from ckpt_prune.evaluation.perplexity import PredictionSums
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.gguf.llama_cpp import LlamaCppTask, run_llama_cpp
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.types import head_of

GENERATED = 64
"""Tokens that are generated, to be timed."""
_TOKENS = 128
"""Tokens whose logits are held at once."""
_CHECKED = 32
"""Tokens at which a model's logits are compared with those of its head."""


@dataclass(frozen=True)
class Head:
    """The head of a model: it makes logits of the states behind the last norm.

    Attributes:
        weight: (vocabulary, hidden) float32.
        factor: that the logits are multiplied with.
        cap: that they stay within, by a tanh; None: any.
        bias: (vocabulary,), if there is one.
    """

    weight: Tensor
    factor: float = 1.0
    cap: float | None = None
    bias: Tensor | None = None

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of states (tokens, hidden)."""
        logits = states @ self.weight.T if self.bias is None else torch.addmm(self.bias, states, self.weight.T)
        logits = logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@dataclass(frozen=True)
class TextPredictions:
    """A model's predictions for windows of text, which files are held against.

    Attributes:
        windows: token ids, (windows, length) int64.
        states: behind the last norm, (windows, length, hidden) float32.
        head: that makes logits of them.
        perplexity: of the model.
        nll: −Σ log p of each window, in nats.
        texts: name of the text that each window is of; empty if that is the same.
    """

    windows: Tensor
    states: Tensor
    head: Head
    perplexity: float
    nll: Sequence[float]
    texts: Sequence[str] = ()

    def add_up(self, of_windows: Sequence[float]) -> dict[str, float]:
        """Return the sum of each text, by its name, of what each window has."""
        of_texts: dict[str, float] = {}
        for name, own in zip(self.texts or [""] * len(of_windows), of_windows, strict=True):
            of_texts[name] = of_texts.get(name, 0.0) + own
        return of_texts

    @property
    def tokens(self) -> dict[str, float]:
        """Name of a text → tokens that are predicted of it."""
        return self.add_up([self.windows.shape[1] - 1] * len(self.windows))

    def score_costs(self, nll: Sequence[float]) -> FileScore:
        """Return the score of a model with fewer tokens by its −Σ log p of each window, without size and speeds."""
        score = score_costs(self.add_up(nll), self.add_up(self.nll), self.tokens)
        return replace(score, kl_error=self._error([ours - own for ours, own in zip(nll, self.nll, strict=True)]))

    def _error(self, lost: Sequence[float]) -> float | None:
        """Return the standard error of the mean of what each window loses, in nats a token."""
        return standard_error([each / (self.windows.shape[1] - 1) for each in lost])

    @torch.inference_mode()
    def diverge(self, folder: Path, parts: TokenParts | None = None) -> float:
        """Return the mean KL of a checkpoint, run in PyTorch, from the model on its windows, in nats a token.

        With `parts` it is what the text costs more (`FileScore`).
        """
        if parts is None:
            return _compare(*_read_states(folder, self.windows, trust=True), self)[0].mean_kl
        written = write_with(self.windows, parts)
        return self.score_costs(_add_nll(*_read_states(folder, written.windows, trust=True), written)).kl

    @torch.inference_mode()
    def score(self, file: Path, parts: TokenParts | None = None) -> FileScore:
        """Run a file in llama.cpp, and compare its predictions with the model's.

        llama.cpp gives what the head reads; the head's own product is made here, with its weights as the file has them.
        `parts` is given for a file with fewer tokens.

        Raises:
            UserError: llama.cpp is not installed, or cannot load the file.
        """
        written = None if parts is None else write_with(self.windows, parts)
        windows = self.windows if written is None else written.windows
        task = LlamaCppTask(
            model=str(file),
            context=windows.shape[1],
            threads=torch.get_num_threads(),
            windows=windows.tolist(),
            generate=min(GENERATED, windows.shape[1] // 2),
            states=True,
        )
        answer = run_llama_cpp(task)
        size, head, states = file.stat().st_size, _head_of(file), torch.from_numpy(answer.states)
        speeds = (answer.prompt_speed, answer.generation_speed)
        if written is not None:
            return replace(self.score_costs(_add_nll(head, states, written)), bytes=size, speeds=speeds)
        sums, kl = _compare(head, states, self)
        means = {name: total / self.tokens[name] for name, total in self.add_up(kl).items() if name}
        spread: dict[str, Any] = {**sums.spread.data(), "kl_of": means, "kl_error": self._error(kl)}
        return FileScore(size, sums.mean_kl, sums.perplexity(0)[0], speeds, **spread, top1=sums.agreeing / sums.tokens)


@torch.inference_mode()
def read_reference(folder: Path, windows: Tensor, *, texts: Sequence[str] = (), trust: bool = False) -> TextPredictions:
    """Run a checkpoint in PyTorch as a whole, and keep what its head reads: all logits would take gigabytes.

    Raises:
        UserError: its logits are not what a linear head, a factor and a cap make.
    """
    head, states = _read_states(folder, windows, trust=trust)
    sums, reached = PredictionSums(), [0.0]
    for hidden, ids in zip(track(states, "its predictions", unit="window"), windows, strict=True):
        for part in torch.split(torch.arange(len(ids) - 1), _TOKENS):
            sums.add([head.logits(hidden[part])], ids[part + 1])
        reached.append(sums.nll[0])
    nll = [after - before for before, after in pairwise(reached)]
    return TextPredictions(windows, states, head, sums.perplexity(0)[0], nll, texts)


def _add_nll(head: Head, states: Tensor, written: WrittenWindows) -> list[float]:
    """Return −Σ log p of the tokens that count in each window, in nats."""
    sums, reached = PredictionSums(), [0.0]
    each_window = zip(track(states, "comparing", unit="window"), written.windows, written.scored, strict=True)
    for hidden, ids, counted in each_window:
        for part in torch.split(torch.nonzero(counted)[:, 0], _TOKENS):
            sums.add([head.logits(hidden[part - 1])], ids[part])
        reached.append(sums.nll[0])
    return [after - before for before, after in pairwise(reached)]


def _read_states(folder: Path, windows: Tensor, *, trust: bool) -> tuple[Head, Tensor]:
    """Return a checkpoint's head, and what it reads at every token of windows, (windows, length, hidden) float32."""
    model: Any = load_model(folder, device="cpu", dtype=torch.float32, trust_remote_code=trust)
    head, seen = _find_head(model, windows[:1, :_CHECKED], folder), list[Tensor]()

    def see(_module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(args[0])
        return (args[0][:, :1],)  # the product with the vocabulary is made for some tokens at a time

    model.get_output_embeddings().register_forward_pre_hook(see)
    for window in track(windows, f"running {folder.name}", unit="window"):
        model(input_ids=window[None], use_cache=False)
    return head, torch.cat(seen)


def _compare(head: Head, states: Tensor, reference: TextPredictions) -> tuple[PredictionSums, list[float]]:
    """Compare what a head makes of states, (windows, length, hidden), with a model's predictions.

    Also returns the divergence of each window, in nats.
    """
    sums, reached = PredictionSums(), [0.0]
    theirs = zip(reference.states, reference.windows, strict=True)
    for ours, (dense, ids) in zip(track(states, "comparing", unit="window"), theirs, strict=True):
        for part in torch.split(torch.arange(len(ids) - 1), _TOKENS):
            sums.add([head.logits(ours[part]), reference.head.logits(dense[part])], ids[part + 1])
        reached.append(sums.kl)
    return sums, [after - before for before, after in pairwise(reached)]


def _find_head(model: Any, ids: Tensor, folder: Path) -> Head:
    """Return the head of a model by the logits that it makes of a few tokens, (1, tokens)."""
    linear, seen = model.get_output_embeddings(), list[Tensor]()
    hook = linear.register_forward_hook(lambda _module, args, _made: seen.append(args[0]))
    logits = model(input_ids=ids, use_cache=False).logits[0]
    hook.remove()
    head = Head(linear.weight.detach(), 1.0, None, linear.bias)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap is None:
        unscaled = head.logits(seen[0][0]).double()
        head = replace(head, factor=float((logits * unscaled).sum() / unscaled.square().sum()))
    else:
        head = replace(head, cap=float(cap))
    if not torch.allclose(head.logits(seen[0][0]), logits, rtol=1e-3, atol=1e-3):
        raise UserError(f"{folder}: its head does more than multiply, so that files of it are not measured here")
    return head


def _head_of(file: Path) -> Head:
    opened = open_gguf(file)
    architecture = opened.values["general.architecture"]
    bias = opened.read("output.bias") if "output.bias" in opened.tensors else None
    return Head(
        opened.read(head_of(opened.tensors)),
        _factor(opened.values, architecture),
        _cap(opened.values, architecture),
        bias,
    )


def _factor(values: Mapping[str, Any], architecture: str) -> float:
    scale = float(values.get(f"{architecture}.logit_scale") or 1)
    return 1 / scale if architecture.startswith("granite") else scale


def _cap(values: Mapping[str, Any], architecture: str) -> float | None:
    cap = values.get(f"{architecture}.final_logit_softcapping")
    return float(cap) if cap else None
