"""Proving a GGUF file in llama.cpp: it splits text into the same tokens, and computes what PyTorch does."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.dense_source import DenseSource
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import config_of
from ckpt_prune.gguf.architectures import ARCHITECTURES, ENCODER_DECODER, EXPERT_COUNTS, TANH_GELU
from ckpt_prune.gguf.embedding_proof import prove_embeddings
from ckpt_prune.gguf.encoders import is_encoder, stated_pooling
from ckpt_prune.gguf.layout import bounds_are_exact
from ckpt_prune.gguf.llama_cpp import Answer, LlamaCppTask, require_runtime, run_llama_cpp
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.tokenizer import CHATS, fill_chats, find_frame, load_stored_tokenizer
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.runtimes.comparison import (
    LARGEST_KL,
    EmbeddingProof,
    RuntimeProof,
    choose_proof_pairs,
    choose_windows,
    compare_logs,
    reference_logs,
)
from ckpt_prune.runtimes.tokens import check_texts_split, check_tokens, split, texts_to_split

_SAME_WEIGHTS = 0.05
"""Mean divergence of a file of rounded weights from a checkpoint of the same ones, up to which it passes: SmolLM2-135M
has 0.003 (q8_0, q4_0) to 0.006 (q4_k_m, q2_k), Gemma 3 270M 0.012 (q4_k_m); what is read wrongly has more by far."""


def prove(
    file: Path,
    folder: Path,
    kind: str,
    options: ProofOptions,
    *,
    ends: Sequence[int] = (),
    dense: DenseSource | None = None,
    scratch: Path | None = None,
    trust: bool = False,
    threads: int = 0,
    same_weights: bool = False,
) -> RuntimeProof | EmbeddingProof:
    """Compare a file with the checkpoint that it was made from. The whole model is loaded.

    Args:
        file: GGUF.
        folder: of the checkpoint.
        kind: type of the file's matrices.
        options: text, number of windows and their length.
        ends: tokens at which llama.cpp is to end a text.
        dense: the model that the checkpoint was pruned from.
        scratch: an empty folder for temporary files; None: one in TMPDIR.
        trust: run code that the checkpoint brings.
        threads: of llama.cpp; 0: as PyTorch.
        same_weights: the checkpoint has the file's weights, and not those that they were rounded from.

    Raises:
        UserError: llama.cpp is not installed, does not load the file, splits text or a filled chat template into other
            tokens, or goes on after an end.
    """
    require_runtime()
    how: dict[str, Any] = {"dense": dense, "scratch": scratch, "trust": trust, "threads": threads}
    how["same_weights"] = same_weights
    if is_encoder((opened := open_gguf(file)).values) or stated_pooling(opened.values) is not None:
        return prove_embeddings(opened, folder, kind, options, **how)
    if opened.values["general.architecture"] == ENCODER_DECODER:
        return _prove_pairs(file, folder, kind, options, ends, **how)
    chosen = choose_windows(folder, options, trust=trust)
    windows = chosen.windows
    tokenizer = load_stored_tokenizer(folder)
    texts = texts_to_split(tokenizer, windows)
    prompts = fill_chats(tokenizer)
    task = LlamaCppTask(
        model=str(file),
        context=windows.shape[1],
        threads=threads or torch.get_num_threads(),
        texts=texts,
        windows=windows.tolist(),
        positions=chosen.positions,
        chats=[CHATS[place] for place in prompts],
        ends=list(ends),
        generate=chosen.generate,
    )
    answer = run_llama_cpp(task, scratch)
    check_texts_split("llama.cpp", tokenizer, texts, answer.tokens)
    _check_prompts(tokenizer, [*prompts.values()], answer)
    _check_ends(tokenizer, ends, answer)
    return _compare(
        partial(reference_logs, chosen=chosen, trust=trust),
        chosen.actual,
        answer,
        dense,
        model=folder,
        type=kind,
        text=chosen.text,
        texts=len(texts) + len(prompts),
        allowed=_allowed_kl(folder, kind, trust=trust, same_weights=same_weights),
    )


def _prove_pairs(
    file: Path,
    folder: Path,
    kind: str,
    options: ProofOptions,
    ends: Sequence[int],
    *,
    dense: DenseSource | None,
    scratch: Path | None,
    trust: bool,
    threads: int,
    same_weights: bool,
) -> RuntimeProof:
    """Compare a file with an encoder-decoder; arguments are as in `prove`."""
    pairs = choose_proof_pairs(folder, options, trust=trust)
    tokenizer = load_stored_tokenizer(folder)
    texts = texts_to_split(tokenizer, pairs.sources)
    task = LlamaCppTask(
        model=str(file),
        context=max(map(len, (*pairs.sources, *pairs.targets))),
        threads=threads or torch.get_num_threads(),
        texts=texts,
        windows=pairs.sources,
        ends=list(ends),
        targets=pairs.targets,
        places=pairs.places,
    )
    answer = run_llama_cpp(task, scratch)
    check_texts_split("llama.cpp", tokenizer, texts, answer.tokens)
    _check_ends(tokenizer, ends, answer)
    return _compare(
        partial(pairs.reference_logs, trust=trust),
        pairs.actual,
        answer,
        dense,
        model=folder,
        type=kind,
        text=pairs.text,
        texts=len(texts),
        allowed=_allowed_kl(folder, kind, trust=trust, same_weights=same_weights),
    )


def _check_ends(tokenizer: Any, ends: Sequence[int], answer: Answer) -> None:
    if left := [end for end in ends if end not in answer.stops]:
        named = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in left)
        raise UserError(f"llama.cpp goes on after {named}, where generate ends a text")


def _compare(
    read_logs: Callable[[Path], Tensor], actual: Tensor, answer: Answer, dense: DenseSource | None, **others: Any
) -> RuntimeProof:
    """Compare what llama.cpp predicts with what the models do, whose log-probabilities `read_logs` returns."""
    if dense is not None and dense.folder is None:
        others["lacking"] = dense.lacking
    elif dense is not None and dense.folder is not None:
        others["dense"] = dense.name, read_logs(dense.folder)
    return compare_logs(
        read_logs(others["model"]),
        actual,
        torch.from_numpy(answer.ids),
        torch.from_numpy(answer.logs).double(),
        torch.from_numpy(answer.actual).double(),
        torch.from_numpy(answer.ids[..., 0]),
        speeds=(answer.prompt_speed, answer.generation_speed),
        memory=answer.memory,
        **others,
    )


def _allowed_kl(folder: Path, kind: str, *, trust: bool, same_weights: bool) -> float | None:
    """Return the mean divergence that passes; None: any.

    llama.cpp looks GELU up in a table of float16 numbers, in files of float32 too. It rounds the
    inputs of rounded weights to 8 bits, whatever the type of the weights is. Where two experts are chosen by almost
    the same weight, any rounding may choose the other, so that nothing is allowed or refused of rounded mixtures.
    """
    config = config_of(folder, trust=trust).get_text_config()
    activations = {getattr(config, key, None) for key in ("hidden_activation", "hidden_act", "dense_act_fn")}
    looked_up = not activations.isdisjoint(TANH_GELU) or any(
        each.gelu for each in ARCHITECTURES if each.model_type == config.model_type
    )
    if kind == "f32" and (looked_up or bounds_are_exact(config)):
        kind = "f16"
    if kind not in ("f32", "f16", "bf16"):
        if any(getattr(config, key, None) for key in EXPERT_COUNTS):
            return None
        if same_weights:
            return _SAME_WEIGHTS
    return LARGEST_KL.get(kind)


def _check_prompts(tokenizer: Any, prompts: list[str], answer: Answer) -> None:
    """Refuse a file whose chat template becomes other letters or tokens.

    llama.cpp leaves the first and last token of a filled template out if it puts them around the prompt itself.
    """
    start, end = find_frame(tokenizer)
    first, last = (
        token if there else "" for token, there in ((tokenizer.bos_token, start), (tokenizer.eos_token, end))
    )
    for prompt, theirs, tokens in zip(prompts, answer.prompts, answer.prompt_tokens, strict=True):
        if theirs != prompt.removeprefix(first).removesuffix(last):
            raise UserError(f"llama.cpp fills the chat template differently: {theirs!r}, and transformers {prompt!r}")
        expected = split(tokenizer, prompt, framed=False)
        expected = [tokenizer.bos_token_id] * (start and expected[:1] != [tokenizer.bos_token_id]) + expected
        expected += [tokenizer.eos_token_id] * (end and expected[-1:] != [tokenizer.eos_token_id])
        check_tokens("llama.cpp", prompt, expected, tokens)
