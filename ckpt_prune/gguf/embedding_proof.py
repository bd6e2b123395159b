"""Proving the GGUF file of an encoder in llama.cpp: the same tokens, hidden states and embeddings as in PyTorch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.common.dense_source import DenseSource
from ckpt_prune.evaluation.quality import judge
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.gguf.encoders import is_encoder, is_ranker, read_dense, stated_pooling
from ckpt_prune.gguf.llama_cpp import LlamaCppTask, run_llama_cpp
from ckpt_prune.gguf.reading import GgufFile
from ckpt_prune.gguf.tokenizer import load_stored_tokenizer
from ckpt_prune.job.report import Loss
from ckpt_prune.model.skeleton import base_model_of
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.runtimes.comparison import REMEDY, EmbeddingProof, ProofWindows, choose_windows
from ckpt_prune.runtimes.tokens import check_texts_split, texts_to_split

LARGEST_DISTANCE = {"f32": 1e-9, "f16": 1e-5, "bf16": 1e-4, "q8_0": 5e-3}
"""Mean 1 − cosine to PyTorch's last hidden states up to which a file passes, about ten times what was measured. It is
half the square of the relative error: 3e-11 in f32 (random weights), 5e-7 and 1.4e-6 in f16, 1.3e-4 and 6e-4 in q8_0,
where llama.cpp rounds what matrices read, too (gte-small, all-MiniLM-L6-v2). With 4 bits it is only measured."""
_LOOKED_UP = ("bert", "gemma-embedding", "gemma", "gemma2", "gemma3", "t5encoder")
"""Architectures that take GELU from a table."""
_SAME_WEIGHTS = 0.02
"""The same limit where the checkpoint has the file's rounded weights: llama.cpp still rounds what matrices read."""


def prove_embeddings(
    file: GgufFile,
    folder: Path,
    kind: str,
    options: ProofOptions,
    *,
    dense: DenseSource | None = None,
    scratch: Path | None = None,
    trust: bool = False,
    threads: int = 0,
    same_weights: bool = False,
) -> EmbeddingProof:
    """Compare a file with the encoder that it was made from; arguments are as in `proof.prove`.

    Raises:
        UserError: llama.cpp does not load the file, or splits text into other tokens.
    """
    chosen = choose_windows(folder, options, trust=trust, task="feature-extraction")
    if not is_encoder(file.values):  # llama.cpp keeps room for a token that would follow
        longest = int(file.values[f"{file.values['general.architecture']}.context_length"]) - 1
        chosen = replace(chosen, windows=chosen.windows[:, :longest])
    tokenizer = load_stored_tokenizer(folder)
    texts = texts_to_split(tokenizer, chosen.windows)
    pooling = stated_pooling(file.values)
    pairs = _choose_pairs(texts) if is_ranker(file.values) else []
    task = LlamaCppTask(
        model=str(file.path),
        context=max(chosen.windows.shape[1], _MOST_OF_PAIRS if pairs else 0),
        threads=threads or torch.get_num_threads(),
        texts=texts,
        windows=chosen.windows.tolist(),
        states=True,
        pooled=pooling is not None,
        ranked=pairs,
    )
    answer = run_llama_cpp(task, scratch)
    check_texts_split("llama.cpp", tokenizer, texts, answer.tokens)
    theirs = torch.from_numpy(answer.states).double()
    embeddings = None if pooling is None else torch.from_numpy(answer.pooled).double()
    scores = torch.from_numpy(answer.pooled).double() if pairs else None
    dense_layers = any(name.startswith("dense_") for name in file.tensors)
    figures = _compare(_read_states(folder, chosen, dense_layers, trust=trust), theirs, pooling, embeddings)
    if scores is not None:
        ours, pooling = _read_scores(folder, pairs, trust=trust), "rank"
        figures["pooled"] = (float((ours - scores).square().sum() / ours.square().sum() / 2),) * 2
    allowed = _allowed(file.values["general.architecture"], kind, same_weights=same_weights)
    measured = [(model_name(folder), figures, REMEDY if allowed is None else "")]
    others: dict[str, Any] = {}
    if dense is not None and dense.folder is not None:
        states = _read_states(dense.folder, chosen, dense_layers, trust=trust)
        measured.append((dense.name, _compare(states, theirs, pooling, embeddings), ""))
    elif dense is not None:
        others["lacking"] = dense.lacking
    data = f"{figures['tokens']} tokens of {chosen.text}"
    losses = [
        judge(Loss(of="cosine of hidden states", after=1 - row["distance"], data=data, against=name), remedy)
        for name, row, remedy in measured
    ]
    return EmbeddingProof(
        **figures,
        pooling=pooling,
        type=kind,
        text=chosen.text,
        texts=len(texts),
        speeds=(answer.prompt_speed, 0.0),
        memory=answer.memory,
        allowed=allowed,
        losses=tuple(losses),
        **others,
    )


@torch.inference_mode()
def _read_states(folder: Path, chosen: ProofWindows, dense_layers: bool, *, trust: bool) -> Tensor:
    """Return the last hidden states of an encoder in PyTorch, (windows, length, hidden) float64.

    With modules Dense, which the file has, what these make of them.
    """
    model: Any = base_model_of(load_model(folder, device="cpu", dtype=torch.float32, trust_remote_code=trust))
    states = torch.cat([model(input_ids=window[None]).last_hidden_state.double() for window in chosen.windows])
    for weight in read_dense(folder, states.shape[-1]).values() if dense_layers else ():
        states = states @ weight.read().double().T
    return states


_MOST_OF_PAIRS = 256
"""Tokens of two texts together."""


def _choose_pairs(texts: Sequence[str]) -> list[list[str]]:
    """Return pairs of short texts, which have several lengths."""
    short = [text[: 40 + 20 * place] for place, text in enumerate(texts) if text.strip()]
    return [[query, text] for query, text in zip(short, [*short[1:], short[0]], strict=True)]


@torch.inference_mode()
def _read_scores(folder: Path, pairs: Sequence[Sequence[str]], *, trust: bool) -> Tensor:
    """Return the scores of pairs of texts in PyTorch, (pairs, 1) float64."""
    model: Any = load_model(folder, device="cpu", dtype=torch.float32, trust_remote_code=trust)
    tokenizer = load_stored_tokenizer(folder)
    return torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits.double() for pair in pairs])


def pool(states: Tensor, pooling: str) -> Tensor:
    """Return an embedding for each window, (windows, hidden), of its states (windows, length, hidden)."""
    return states.mean(1) if pooling == "mean" else states[:, 0 if pooling == "cls" else -1]


def _compare(states: Tensor, theirs: Tensor, pooling: str | None, embeddings: Tensor | None) -> dict[str, Any]:
    """Compare hidden states (windows, length, hidden), and embeddings (windows, hidden), token by token."""
    distances = _distance(states, theirs)
    figures: dict[str, Any] = {
        "tokens": distances.numel(),
        "distance": float(distances.mean()),
        "largest_distance": float(distances.max()),
    }
    if pooling is not None and embeddings is not None:
        of_texts = _distance(pool(states, pooling), embeddings)
        figures["pooled"] = float(of_texts.mean()), float(of_texts.max())
    return figures


def _distance(one: Tensor, other: Tensor) -> Tensor:
    return (1 - functional.cosine_similarity(one, other, dim=-1)).clamp_min(0)


def _allowed(architecture: str, kind: str, *, same_weights: bool) -> float | None:
    """Return the mean distance that passes; None: any. In some GELU is taken from a table of float16 numbers."""
    if kind == "f32" and architecture in _LOOKED_UP:
        kind = "f16"
    if same_weights and kind not in ("f32", "f16", "bf16"):
        return _SAME_WEIGHTS
    return LARGEST_DISTANCE.get(kind)
