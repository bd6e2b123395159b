"""Proving a GGUF file in llama.cpp: it splits text into the same tokens, and computes what PyTorch does."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.llama_cpp import Answer, Task, require_runtime, run_llama_cpp
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.runtimes.comparison import LARGEST_KL, Proof, choose_windows, compare_logs, reference_logs
from ckpt_prune.verification.dense_source import DenseSource

_HARD_TEXT = (
    "Hello, world! It's 3,141,592 or 2025-11-26; they'll \u00e9t\u00e9 na\u00efve \u4f60\u597d \U0001f680\n\n\n"
    "\tdef f(x):\n        return x**2  # 100%\n\r\n   spaces   IS'T can't  WON'T \u0623\u0647 12345678 ___ \u00bd\u00b2"
)
_CHAT = [{"role": "user", "content": "Hello"}]


def prove(
    file: Path,
    folder: Path,
    kind: str,
    options: ProofOptions,
    *,
    dense: DenseSource | None = None,
    trust: bool = False,
    threads: int = 0,
) -> Proof:
    """Compare a file with the checkpoint that it was made from. The whole model is loaded.

    Args:
        file: GGUF.
        folder: of the checkpoint.
        kind: type of the file's matrices.
        options: text, number of windows and their length.
        dense: the model that the checkpoint was pruned from.
        trust: run code that the checkpoint brings.
        threads: of llama.cpp; 0: as PyTorch.

    Raises:
        UserError: llama.cpp is not installed, does not load the file, or splits text into other tokens.
    """
    require_runtime()
    chosen = choose_windows(folder, options, trust=trust)
    windows = chosen.windows
    texts, expected, chat = _texts(folder, windows)
    task = Task(
        model=str(file),
        context=windows.shape[1],
        threads=threads or torch.get_num_threads(),
        texts=texts,
        windows=windows.tolist(),
        positions=chosen.positions,
        chat=None if chat is None else _CHAT,
        generate=chosen.generate,
    )
    answer = run_llama_cpp(task)
    _check_tokens(texts, expected, answer)
    if chat is not None and answer.chat != chat:
        raise UserError(f"llama.cpp fills the chat template differently: {answer.chat!r}, and transformers {chat!r}")
    found = None if dense is None else dense.folder
    others: dict[str, Any] = {} if dense is None or found is not None else {"lacking": dense.lacking}
    if dense is not None and found is not None:
        others["dense"] = dense.name, reference_logs(found, chosen, trust=trust)
    return compare_logs(
        reference_logs(folder, chosen, trust=trust),
        chosen.actual,
        torch.from_numpy(answer.ids),
        torch.from_numpy(answer.logs).double(),
        torch.from_numpy(answer.actual).double(),
        torch.from_numpy(answer.ids[..., 0]),
        model=folder,
        type=kind,
        text=chosen.text,
        texts=len(answer.tokens),
        speeds=(answer.prompt_speed, answer.generation_speed),
        memory=answer.memory,
        allowed=LARGEST_KL.get(kind),
        **others,
    )


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
