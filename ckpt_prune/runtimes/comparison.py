"""Compare the predictions of another runtime with those of PyTorch, on the same windows of text."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, computed_field
from torch import Tensor

from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.evaluation.quality import judge, lines_of
from ckpt_prune.evaluation.whole_model import config_of, load_model
from ckpt_prune.job.report import Loss
from ckpt_prune.onnx.samples import choose_proof_samples
from ckpt_prune.onnx.tasks import GraphTask
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.options.graphs import TaskName

WINDOWS, POSITIONS, GENERATED = 8, 16, 64
"""Defaults: windows; places in each at which the next token is predicted; tokens that are timed."""
LARGEST_KL = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-3, "q8_0": 1e-2}
"""Mean divergence from PyTorch, in nats a token, up to which a file passes. With 4 bits it is only measured."""


REMEDY = "more bits lose less, such as q4_k_m, q6_k or q8_0"


class Proof(BaseModel):
    """How a file, or what another runtime loads, compares with PyTorch.

    Attributes:
        runtime: that it was run in.
        type: of its matrices.
        text: what it was compared on.
        texts: texts that both tokenizers split alike; None if the runtime was given tokens.
        speeds: tokens a second, read and generated.
        memory: of the process, in bytes.
        allowed: the mean divergence that passes; None: any.
        losses: beside the checkpoint in PyTorch, and beside the dense model if that was pruned and is there.
        lacking: a line that says why there is no dense model, if the checkpoint was pruned.
        other_weights: tensors of a file that are not those of the checkpoint.
    """

    runtime: str = "llama.cpp"
    type: str
    text: str
    texts: int | None = None
    speeds: tuple[float, float]
    memory: int
    allowed: float | None
    losses: tuple[Loss, ...] = ()
    lacking: str | None = None
    other_weights: tuple[str, ...] = ()

    @property
    def divergence(self) -> float:
        """The figure that `allowed` limits."""
        raise NotImplementedError

    @property
    def figures(self) -> str:
        """A sentence on what was measured."""
        raise NotImplementedError

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether the file computes what PyTorch does, as far as its type can."""
        within = math.isfinite(self.divergence) and (self.allowed is None or self.divergence <= self.allowed)
        return not self.other_weights and within

    def lines(self) -> list[str]:
        split = "" if self.texts is None else f"; {self.texts} texts are split into the same tokens"
        generated = f", {self.speeds[1]:.0f} generated" if self.speeds[1] else ""
        return [
            f"{self.runtime}, {self.type}: {self.figures}",
            f"tokens a second: {self.speeds[0]:.0f} read{generated}; memory {human_bytes(self.memory)}{split}",
            *(line for loss in self.losses[1:] for line in lines_of(loss)[:1]),
            *([] if self.lacking is None else [self.lacking]),
            self._verdict(),
            *(loss.verdict for loss in self.losses if loss.verdict is not None),
        ]

    def _verdict(self) -> str:
        if self.other_weights:
            more = f" and {len(self.other_weights) - 1} more" if len(self.other_weights) > 1 else ""
            return (
                f"failed: {self.other_weights[0]}{more} of the file are not the checkpoint's, rounded: it is "
                "damaged, or was made from another one"
            )
        if not self.passed:
            return f"failed: {self.runtime} computes something else"
        if self.allowed is None:
            return f"no limit is put on what {self.type} loses: it is measured"
        return f"{self.runtime} computes what PyTorch does, as far as {self.type} can"

    def _limited(self, figure: float) -> str:
        return f"{figure:.2g}" + ("" if self.allowed is None else f" (at most {self.allowed:g})")


class RuntimeProof(Proof):
    """How the predictions of a model that generates text compare.

    Attributes:
        positions: predictions that were compared.
        kl: mean divergence KL(PyTorch ‖ runtime) in nats, over the likeliest 4,096 tokens.
        largest_kl: of one prediction.
        top1: share of predictions whose likeliest token is the same.
        perplexity: in PyTorch and in the runtime, at the same positions.
    """

    positions: int
    kl: float
    largest_kl: float
    top1: float
    perplexity: tuple[float, float]

    @property
    def divergence(self) -> float:
        return self.kl

    @property
    def figures(self) -> str:
        ours, theirs = self.perplexity
        return (
            f"KL to PyTorch {self._limited(self.kl)}, top-1 the same {self.top1:.1%}, perplexity {theirs:.4f} "
            f"(PyTorch {ours:.4f}), at {self.positions} positions of {self.text}"
        )


class EmbeddingProof(Proof):
    """How the last hidden states of an encoder, and the embeddings that are pooled of them, compare.

    Attributes:
        tokens: whose hidden states were compared.
        distance: mean over them of 1 − cosine to PyTorch's.
        largest_distance: of one token.
        pooling: of the file: mean, cls or last; None if it states none.
        pooled: mean and largest 1 − cosine of the texts' embeddings; None without pooling.
    """

    tokens: int
    distance: float
    largest_distance: float
    pooling: str | None = None
    pooled: tuple[float, float] | None = None

    @property
    def divergence(self) -> float:
        return max(self.distance, 0.0 if self.pooled is None else self.pooled[0])

    @property
    def figures(self) -> str:
        pooled = ""
        if self.pooled is not None:
            pooled = f"; of texts, pooled by {self.pooling}, {self._limited(self.pooled[0])}"
        return (
            f"1 - cosine to the last hidden states in PyTorch {self._limited(self.distance)}, of one token "
            f"{self.largest_distance:.2g}, at {self.tokens} tokens of {self.text}{pooled}"
        )


@dataclass(frozen=True)
class ProofWindows:
    """The windows that both are run on.

    Attributes:
        windows: token ids, (windows, length), int64.
        positions: after how many tokens of a window the next one is predicted.
        generate: tokens to generate, to be timed.
        text: what the windows are of, in words.
    """

    windows: Tensor
    positions: list[int]
    generate: int
    text: str

    @property
    def actual(self) -> Tensor:
        """The tokens that follow, (windows, positions)."""
        return self.windows[:, self.positions]


def choose_windows(
    folder: Path, options: ProofOptions, *, trust: bool, task: TaskName = "text-generation"
) -> ProofWindows:
    """Choose windows for a checkpoint that generates text, or does another task of text; UserError without a text."""
    samples = choose_proof_samples(folder, GraphTask(task, "text", False), options, trust=trust)
    text = str((samples.description or {}).get("what"))
    if samples.windows is None:
        raise UserError(f"{folder}: there is no text to compare on: {text}")
    windows = samples.windows[: options.samples or max(WINDOWS, len(options.text))]
    length = windows.shape[1]
    return ProofWindows(windows, choose_positions(length), min(GENERATED, length // 2), text)


@dataclass(frozen=True)
class ProofPairs:
    """Sources and targets that an encoder-decoder and a runtime are both run on.

    Attributes:
        sources: token ids of each.
        targets: token ids of each, with the one by which it begins.
        places: after how many tokens of each target the next one is predicted.
        text: what they are of, in words.
    """

    sources: list[list[int]]
    targets: list[list[int]]
    places: list[list[int]]
    text: str

    @property
    def actual(self) -> Tensor:
        """The tokens that follow, (1, places of all targets)."""
        pairs = zip(self.targets, self.places, strict=True)
        return torch.tensor([[target[place] for target, places in pairs for place in places]])

    @torch.inference_mode()
    def reference_logs(self, folder: Path, *, trust: bool) -> Tensor:
        """Return log-probabilities by PyTorch, (1, places of all targets, vocabulary), float64."""
        model = load_model(folder, device="cpu", dtype=torch.float32, trust_remote_code=trust)
        logs = []
        for source, target, places in zip(self.sources, self.targets, self.places, strict=True):
            called = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target[:-1]])}
            logits = model(**called).logits[0, [place - 1 for place in places]]
            logs.append(logits.double().log_softmax(-1))
        return torch.cat(logs)[None]


def choose_proof_pairs(folder: Path, options: ProofOptions, *, trust: bool) -> ProofPairs:
    """Choose pairs of --data for an encoder-decoder; without any, each window of text is its own target."""
    if options.data is not None:
        few = options.model_copy(update={"samples": options.samples or WINDOWS})
        samples = choose_proof_samples(folder, GraphTask("text2text-generation", "pairs", True), few, trust=trust)
        pairs, text = samples.pairs, options.data.name
        assert pairs is not None
        masks = pairs.sources["attention_mask"].bool()
        sources = [ids[mask].tolist() for ids, mask in zip(pairs.sources["input_ids"], masks, strict=True)]
        lengths = 1 + pairs.scored.sum(1)
        targets = [ids[:length].tolist() for ids, length in zip(pairs.windows, lengths, strict=True)]
    else:
        chosen = choose_windows(folder, options, trust=trust, task="feature-extraction")
        config = config_of(folder, trust=trust)
        start = getattr(config, "decoder_start_token_id", None)
        sources, text = chosen.windows.tolist(), chosen.text
        targets = [[config.pad_token_id if start is None else start, *source] for source in sources]
    targets = [target[: GENERATED + 1] for target in targets]
    return ProofPairs(sources, targets, [choose_positions(len(target)) for target in targets], text)


def choose_positions(length: int) -> list[int]:
    """Places all over a window: distances differ, and prompts of several lengths are read."""
    count = min(POSITIONS, length - 1)
    return sorted({max(1, (index + 1) * (length - 1) // count) for index in range(count)})


def reference_logs(folder: Path, chosen: ProofWindows, *, trust: bool) -> Tensor:
    """Return log-probabilities by PyTorch, (windows, positions, vocabulary), float64."""
    model = load_model(folder, device="cpu", dtype=torch.float32, trust_remote_code=trust)
    part = getattr(model, "language_model", None)
    if hasattr(part, "lm_head"):  # a Llama 4; transformers 5.24 fails where it puts together what the whole returns
        model = part
    places = [position - 1 for position in chosen.positions]
    with torch.inference_mode():
        return torch.stack(
            [model(window[None, :-1]).logits[0, places].double().log_softmax(-1) for window in chosen.windows]
        )


def compare_logs(
    logs: Tensor,
    actual: Tensor,
    ids: Tensor,
    theirs: Tensor,
    theirs_actual: Tensor,
    likeliest: Tensor,
    *,
    model: Path,
    dense: tuple[str, Tensor] | None = None,
    **others: Any,
) -> RuntimeProof:
    """Compare log-probabilities of PyTorch with those of a runtime.

    Args:
        logs: of PyTorch, (windows, positions, vocabulary).
        actual: the tokens that follow, (windows, positions).
        ids: tokens that the runtime's are known of, (windows, positions, top).
        theirs: their log-probabilities in the runtime.
        theirs_actual: those of `actual`.
        likeliest: the likeliest tokens in the runtime, (windows, positions).
        model: folder of what PyTorch ran.
        dense: name of another model, and its log-probabilities in PyTorch.
        others: fields of the proof.
    """
    answer = (actual, ids, theirs, theirs_actual, likeliest)
    figures = _compare(logs, *answer)
    comparisons = [(model_name(model), figures)] + ([] if dense is None else [(dense[0], _compare(dense[1], *answer))])
    losses: list[Loss] = []
    for name, row in comparisons:
        before, after, kl = (value if math.isfinite(value) else None for value in (*row["perplexity"], row["kl"]))
        loss = Loss(
            of="perplexity",
            before=before,
            after=after,
            kl=kl,
            agreement=row["top1"],
            data=f"{row['positions']} positions of {others['text']}",
            against=name,
        )
        # What is lost beside its own model few bits have done.
        losses.append(judge(loss, REMEDY if not losses and others["allowed"] is None else ""))
    return RuntimeProof(**figures, losses=tuple(losses), **others)


def _compare(
    logs: Tensor, actual: Tensor, ids: Tensor, theirs: Tensor, theirs_actual: Tensor, likeliest: Tensor
) -> dict[str, Any]:
    ours = logs.gather(-1, ids)
    # The server adds probabilities up in float32: all its logarithms are some 1e-4 too high, which says nothing of the
    # file. So both are normalised over the listed tokens; what PyTorch holds likelier than a listed one counts in full.
    mass, most = ours.exp().sum(-1), logs.topk(ids.shape[-1]).values.exp().sum(-1)
    kl = mass * (ours.softmax(-1) * (ours.log_softmax(-1) - theirs.log_softmax(-1))).sum(-1) + most - mass
    kl = kl.clamp_min(0)
    dense = -logs.gather(-1, actual[..., None]).mean()
    return {
        "positions": kl.numel(),
        "kl": float(kl.mean()),
        "largest_kl": float(kl.max()),
        "top1": float((logs.argmax(-1) == likeliest).double().mean()),
        "perplexity": (float(dense.exp()), float((-theirs_actual.mean()).exp())),
    }
