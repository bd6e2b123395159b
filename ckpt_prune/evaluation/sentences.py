"""How near two models' embeddings of texts are."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install
from ckpt_prune.evaluation.batches import check_finite
from ckpt_prune.evaluation.display import Figures
from ckpt_prune.evaluation.heads import FEWEST_TEXTS
from ckpt_prune.evaluation.metrics import rank_correlation

if TYPE_CHECKING:
    from ckpt_prune.evaluation.embedder import Embedder

TEXT_TOKENS = 48
"""Of a text that is cut out of a window, at most."""


@dataclass(frozen=True)
class SentenceComparison(Figures):
    """A model's embeddings of texts beside a reference's.

    Attributes:
        cosine: mean over texts of the cosine of the two embeddings, -1 to 1.
        rank_correlation: Spearman's, of the cosines of all pairs of texts in the two models, -1 to 1.
        nearest: share of the texts whose nearest other text is the same in both, 0 to 1.
        tokens: of all texts, after they were cut.
    """

    columns = (
        ("cosine", "cosine", ".4f"),
        ("rank correlation", "rank_correlation", ".4f"),
        ("same nearest", "nearest", ".1%"),
        ("texts", "texts", ","),
    )
    remark = "embeddings against those of {against}; ranks of the cosines of {pairs:,} pairs"
    cosine: float
    rank_correlation: float
    nearest: float
    texts: int
    pairs: int
    tokens: int


def open_embedder(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> "Embedder":
    """Put what a sentence-transformers folder makes of hidden states behind a model that is loaded already.

    Args:
        model: a base model, or a graph that is called like one.
        folder: with the modules.
        tokenizer: the folder's, which pads.

    Raises:
        UserError: the folder's modules cannot be run, or sentence-transformers (the extra `embed`) is missing.
    """
    if find_spec("sentence_transformers") is None:
        raise UserError(f"embeddings need sentence-transformers: {install('embed')}")
    from ckpt_prune.evaluation.embedder import Embedder

    return Embedder(model, folder, tokenizer)


def compare_sentences(model: "Embedder", reference: "Embedder", texts: Sequence[str], most: int) -> SentenceComparison:
    """Compare two models' embeddings of texts, at least `FEWEST_TEXTS`, cut to `most` tokens."""
    if len(texts) < FEWEST_TEXTS:
        raise UserError(f"the text has {len(texts)} lines that are not empty, each a text; {FEWEST_TEXTS} are needed")
    most = min(most, *(each.longest or most for each in (model, reference)))
    (ours, tokens), (theirs, _) = model.embed(texts, most), reference.embed(texts, most)
    return compare_embeddings(ours, theirs, tokens)


def compare_embeddings(ours: Tensor, theirs: Tensor, tokens: int) -> SentenceComparison:
    """Compare embeddings of the same texts, which have so many tokens, with those of a reference; both are (N, d)."""
    check_finite("embeddings", ours, theirs)
    (cosines, nearest), (other_cosines, other_nearest) = _compare_texts(ours), _compare_texts(theirs)
    return SentenceComparison(
        cosine=float(functional.cosine_similarity(ours.double(), theirs.double()).mean()),
        rank_correlation=rank_correlation(cosines, other_cosines),
        nearest=float((nearest == other_nearest).double().mean()),
        texts=len(ours),
        pairs=len(cosines),
        tokens=tokens,
    )


def cut_texts(windows: Tensor, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return short texts for windows of a long one, int64 (N, T): two or more of each, as long as sentences are."""
    length = min(TEXT_TOKENS, max(1, windows.shape[1] // 2))
    pieces = [piece.tolist() for window in windows for piece in window.split(length)]
    texts = [str(tokenizer.decode(piece, skip_special_tokens=True)).strip() for piece in pieces]
    return [text for text in texts if text]


def _compare_texts(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines of all pairs of texts, (N (N - 1) / 2), and every text's nearest other, (N)."""
    from sentence_transformers.util import cos_sim

    similar: Tensor = cos_sim(embeddings.double(), embeddings.double())
    cosines = similar[torch.ones_like(similar, dtype=torch.bool).triu(1)]
    return cosines, similar.fill_diagonal_(-torch.inf).argmax(1)
