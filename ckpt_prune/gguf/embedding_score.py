"""The embeddings of a GGUF file in llama.cpp beside those of a model in PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.checkpoint.sentence_modules import read_modules
from ckpt_prune.evaluation.batches import check_finite
from ckpt_prune.evaluation.fewer_tokens import TokenParts
from ckpt_prune.evaluation.file_score import FileScore
from ckpt_prune.evaluation.heads import FEWEST_TEXTS
from ckpt_prune.evaluation.sentences import compare_embeddings, cut_texts, open_embedder
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.gguf.contents import POOLING_KEY, Layout
from ckpt_prune.gguf.llama_cpp import LlamaCppTask, run_llama_cpp
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.model.skeleton import base_model_of

if TYPE_CHECKING:
    from ckpt_prune.evaluation.embedder import Embedder

_AS_POOLED = {"Transformer", "Pooling", "Normalize"}
"""Modules of sentence-transformers that leave an embedding in the direction that pooling gives it."""


@dataclass(frozen=True, eq=False)
class TextEmbeddings:
    """A model's embeddings of texts, which files are held against.

    If llama.cpp pools as the modules of the model's folder do, they are embeddings of short texts that are cut out of
    windows. Else they are the last hidden states at every token of the windows. No token goes of such models.

    Attributes:
        windows: token ids, (windows, length) int64.
        texts: name of the text that each vector is of.
        ids: token ids of what is read at once: of each short text, or of each window.
        vectors: (texts or tokens, hidden) float32.
        short: the short texts; none if hidden states are compared.
        perplexity: none, since no token is predicted.
    """

    windows: Tensor
    texts: Sequence[str]
    ids: Sequence[list[int]]
    vectors: Tensor
    short: Sequence[str] = ()
    perplexity: None = None

    def diverge(self, folder: Path, _parts: TokenParts | None = None) -> float:
        """Return the share of their energy that the vectors of a checkpoint, run in PyTorch, lose."""
        made, _ = _make_vectors(folder, self.windows, self.short, trust=True)
        return self._compare(made).kl

    def score(self, file: Path, _parts: TokenParts | None = None) -> FileScore:
        """Run a file in llama.cpp, and compare its embeddings with the model's.

        Raises:
            UserError: llama.cpp is not installed, or cannot load the file.
        """
        task = LlamaCppTask(
            model=str(file),
            context=max(map(len, self.ids)),
            threads=torch.get_num_threads(),
            windows=list(self.ids),
            states=not self.short,
            pooled=bool(self.short),
        )
        answer = run_llama_cpp(task)
        made = torch.from_numpy(answer.pooled if self.short else answer.states).flatten(0, -2)
        return replace(self._compare(made), bytes=file.stat().st_size, speeds=(answer.prompt_speed,))

    def _compare(self, made: Tensor) -> FileScore:
        """Return the score of vectors like `vectors`, without size and speeds."""
        check_finite("embeddings", made)
        cosine = functional.cosine_similarity(made.double(), self.vectors.double()).clamp_max(1)
        lost, ranks = 2 * (1 - cosine), None
        if len(self.short) >= FEWEST_TEXTS:
            ranks = compare_embeddings(made, self.vectors, 0).rank_correlation
        of_texts: dict[str, list[float]] = {}
        for name, own in zip(self.texts, lost.tolist(), strict=True):
            of_texts.setdefault(name, []).append(own)
        means = {name: sum(several) / len(several) for name, several in of_texts.items()}
        return FileScore(
            bytes=0,
            kl=float(lost.mean()),
            perplexity=None,
            speeds=(),
            top1=float(cosine.mean()),
            ranks=ranks,
            kl_of=means if len(means) > 1 else {},
        )


def read_embeddings(
    folder: Path, windows: Tensor, layout: Layout, *, texts: Sequence[str] = (), trust: bool = False
) -> TextEmbeddings:
    """Run a checkpoint in PyTorch as a whole, and keep its embeddings of texts.

    Args:
        windows: token ids of text, (windows, length) int64.
        layout: of its file, which says how llama.cpp pools.
        texts: name of the text of each window; empty if that is the same.

    Raises:
        UserError: sentence-transformers is missing, where the folder is one of it.
    """
    names, short = list(texts) or [""] * len(windows), list[str]()
    others = {each.kind for each in read_modules(folder)} - _AS_POOLED
    if POOLING_KEY in layout.values and (not others or "dense_2.weight" in layout.tensors):
        tokenizer = load_tokenizer(folder)
        cut = [cut_texts(window[None], tokenizer) for window in windows]
        short = [text for own in cut for text in own]
        names = [name for name, own in zip(names, cut, strict=True) for _ in own]
    elif not layout.architecture.encodes:  # llama.cpp keeps room for a token that would follow
        windows = windows[:, : int(layout.values["context_length"]) - 1]
    vectors, embedder = _make_vectors(folder, windows, short, trust=trust)
    ids = windows.tolist() if embedder is None else embedder.split(short, windows.shape[1])
    if not short:
        names = [name for name in names for _ in range(windows.shape[1])]
    return TextEmbeddings(windows, names, ids, vectors, short)


@torch.inference_mode()
def _make_vectors(
    folder: Path, windows: Tensor, short: Sequence[str], *, trust: bool
) -> "tuple[Tensor, Embedder | None]":
    """Return a checkpoint's embeddings of short texts, with what makes them, or its hidden states of windows."""
    model: Any = base_model_of(load_model(folder, device="cpu", dtype=torch.float32, trust_remote_code=trust))
    if not short:
        states = [model(input_ids=window[None]).last_hidden_state[0].float() for window in windows]
        return torch.cat(states), None
    embedder = open_embedder(model, folder, load_tokenizer(folder))
    return embedder.embed(short, windows.shape[1])[0], embedder
