"""Proving a GGUF file in llama.cpp: it splits text into the same tokens, and computes what PyTorch does."""

import math
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, computed_field
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.gguf.llama_cpp import Answer, Task, require_runtime, run_llama_cpp
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.onnx.samples import choose_proof_samples
from ckpt_prune.onnx.tasks import Task as GraphTask
from ckpt_prune.options.data import ProofOptions

WINDOWS, POSITIONS, GENERATED = 8, 16, 64
"""Where nothing is asked for: windows; places in each at which the next token is predicted; tokens that are timed."""
LARGEST_KL = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-3, "q8_0": 1e-2}
"""Mean divergence from PyTorch, in nats a token, up to which a file passes. With 4 bits it is only measured."""
_HARD_TEXT = (
    "Hello, world! It's 3,141,592 or 2025-11-26; they'll \u00e9t\u00e9 na\u00efve \u4f60\u597d \U0001f680\n\n\n"
    "\tdef f(x):\n        return x**2  # 100%\n\r\n   spaces   IS'T can't  WON'T \u0623\u0647 12345678 ___ \u00bd\u00b2"
)
_CHAT = [{"role": "user", "content": "Hello"}]


class Proof(BaseModel):
    """How a file, or what another runtime loads, compares with PyTorch.

    Attributes:
        runtime: that it was run in.
        type: of its matrices.
        text: what it was compared on.
        positions: predictions that were compared.
        kl: mean divergence KL(PyTorch ‖ runtime) in nats, over the likeliest 4,096 tokens.
        largest_kl: of one prediction.
        top1: share of predictions whose likeliest token is the same.
        perplexity: in PyTorch and in the runtime, at the same positions.
        texts: texts that both tokenizers split alike; None if the runtime was given tokens.
        speeds: tokens a second, read and generated.
        memory: of the process, in bytes.
        allowed: the mean divergence that passes; None: any.
    """

    runtime: str = "llama.cpp"
    type: str
    text: str
    positions: int
    kl: float
    largest_kl: float
    top1: float
    perplexity: tuple[float, float]
    texts: int | None = None
    speeds: tuple[float, float]
    memory: int
    allowed: float | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether the file computes what PyTorch does, as far as its type can."""
        return math.isfinite(self.kl) and (self.allowed is None or self.kl <= self.allowed)

    def lines(self) -> list[str]:
        """As the terminal shows it."""
        ours, theirs = self.perplexity
        limit = "" if self.allowed is None else f" (at most {self.allowed:g})"
        split = "" if self.texts is None else f"; {self.texts} texts are split into the same tokens"
        return [
            f"{self.runtime}, {self.type}: KL to PyTorch {self.kl:.2g}{limit}, top-1 the same {self.top1:.1%}, "
            f"perplexity {theirs:.4f} (PyTorch {ours:.4f}), at {self.positions} positions of {self.text}",
            f"tokens a second: {self.speeds[0]:.0f} read, {self.speeds[1]:.0f} generated; memory "
            f"{self.memory / 2**20:.0f} MiB{split}",
            "passed" if self.passed else f"failed: {self.runtime} computes something else",
        ]


def prove(
    file: Path, folder: Path, kind: str, options: ProofOptions, *, trust: bool = False, threads: int = 0
) -> Proof:
    """Compare a file with the checkpoint that it was made from. The whole model is loaded.

    Args:
        file: GGUF.
        folder: of the checkpoint.
        kind: type of the file's matrices.
        options: text, number of windows and their length.
        trust: run code that the checkpoint brings.
        threads: of llama.cpp; 0: as PyTorch.

    Raises:
        UserError: llama.cpp is not installed, does not load the file, or splits text into other tokens.
    """
    require_runtime()
    samples = choose_proof_samples(folder, GraphTask("text-generation", "text", False), options, trust=trust)
    if samples.windows is None:
        raise UserError(f"{folder}: there is no text to compare on: {(samples.description or {}).get('what')}")
    windows = samples.windows[: options.samples or WINDOWS]
    positions = choose_positions(windows.shape[1])
    texts, expected, chat = _texts(folder, windows)
    task = Task(
        model=str(file),
        context=windows.shape[1],
        threads=threads or torch.get_num_threads(),
        texts=texts,
        windows=windows.tolist(),
        positions=positions,
        chat=None if chat is None else _CHAT,
        generate=min(GENERATED, windows.shape[1] // 2),
    )
    answer = run_llama_cpp(task)
    _check_tokens(texts, expected, answer)
    if chat is not None and answer.chat != chat:
        raise UserError(f"llama.cpp fills the chat template differently: {answer.chat!r}, and transformers {chat!r}")
    return compare_logs(
        reference_logs(folder, windows, positions, trust=trust),
        windows[:, positions],
        torch.from_numpy(answer.ids),
        torch.from_numpy(answer.logs).double(),
        torch.from_numpy(answer.actual).double(),
        torch.from_numpy(answer.ids[..., 0]),
        type=kind,
        text=str((samples.description or {}).get("what")),
        texts=len(answer.tokens),
        speeds=(answer.prompt_speed, answer.generation_speed),
        memory=answer.memory,
        allowed=LARGEST_KL.get(kind),
    )


def reference_logs(folder: Path, windows: Tensor, positions: list[int], *, trust: bool) -> Tensor:
    """Return log-probabilities by PyTorch, (windows, positions, vocabulary), float64."""
    model = load_model(folder, device="cpu", dtype=torch.float32, trust_remote_code=trust)
    places = [position - 1 for position in positions]
    with torch.inference_mode():
        return torch.stack([model(window[None, :-1]).logits[0, places].double().log_softmax(-1) for window in windows])


def choose_positions(length: int) -> list[int]:
    """Places all over a window: distances differ, and prompts of several lengths are read."""
    count = min(POSITIONS, length - 1)
    return sorted({max(1, (index + 1) * (length - 1) // count) for index in range(count)})


def _texts(folder: Path, windows: Tensor) -> tuple[list[str], list[list[int]], str | None]:
    tokenizer = load_tokenizer(folder)
    decoded = [tokenizer.decode(window.tolist(), skip_special_tokens=True) for window in windows[:4]]
    texts = [_HARD_TEXT, "", " ", *decoded]
    expected = [list(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    if not tokenizer.chat_template:
        return texts, expected, None
    chat = tokenizer.apply_chat_template(_CHAT, tokenize=False, add_generation_prompt=True)
    return texts, expected, str(chat)


def _check_tokens(texts: list[str], expected: list[list[int]], answer: Answer) -> None:
    for text, ours, theirs in zip(texts, expected, answer.tokens, strict=True):
        if ours != theirs:
            place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
            raise UserError(
                f"llama.cpp splits {text[:40]!r} into other tokens than the checkpoint's tokenizer: from token {place} "
                f"{theirs[place : place + 5]} and not {ours[place : place + 5]}"
            )


def compare_logs(
    logs: Tensor, actual: Tensor, ids: Tensor, theirs: Tensor, theirs_actual: Tensor, likeliest: Tensor, **others: Any
) -> Proof:
    """Compare log-probabilities of PyTorch with those of a runtime.

    Args:
        logs: of PyTorch, (windows, positions, vocabulary).
        actual: the tokens that follow, (windows, positions).
        ids: tokens that the runtime's are known of, (windows, positions, top).
        theirs: their log-probabilities in the runtime.
        theirs_actual: those of `actual`.
        likeliest: the likeliest tokens in the runtime, (windows, positions).
        others: fields of the proof.
    """
    ours = logs.gather(-1, ids)
    # The server adds probabilities up in float32: all its logarithms are some 1e-4 too high, which says nothing of the
    # file. So both are normalised over the listed tokens; what PyTorch holds likelier than a listed one counts in full.
    mass, most = ours.exp().sum(-1), logs.topk(ids.shape[-1]).values.exp().sum(-1)
    kl = mass * (ours.softmax(-1) * (ours.log_softmax(-1) - theirs.log_softmax(-1))).sum(-1) + most - mass
    kl = kl.clamp_min(0)
    dense = -logs.gather(-1, actual[..., None]).mean()
    return Proof(
        positions=kl.numel(),
        kl=float(kl.mean()),
        largest_kl=float(kl.max()),
        top1=float((logs.argmax(-1) == likeliest).double().mean()),
        perplexity=(float(dense.exp()), float((-theirs_actual.mean()).exp())),
        **others,
    )
