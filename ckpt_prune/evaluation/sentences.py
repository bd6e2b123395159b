"""Embeddings of texts as a sentence-transformers folder describes them, and how near two models' are.

They are made without that package, and were equal to its own to the bit on all-MiniLM-L6-v2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.checkpoint.checkpoint import read_tensors
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.sentence_modules import (
    MODULES,
    SENTENCE_SETTINGS,
    TRANSFORMER_SETTINGS,
    WEIGHTS,
    Module,
    read_modules,
)
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.batches import check_finite, group_by_length
from ckpt_prune.evaluation.display import Figures
from ckpt_prune.evaluation.heads import FEWEST_TEXTS
from ckpt_prune.evaluation.metrics import rank_correlation
from ckpt_prune.measure.samples.text import check_vocabulary
from ckpt_prune.model.context import context_length

_CHUNK = 1024
"""Texts whose similarities with all others are held at once."""

_TEXT_TOKENS = 48
"""Of a text that is cut out of a window, at most."""

Layer = Callable[[Tensor, Tensor], Tensor]
"""Makes new states (B, T, d) or embeddings (B, d) from these and the mask of tokens (B, T)."""


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


# ---- the modules ----------------------------------------------------------------------------------------------------


def _average(states: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(states.dtype)
    return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def _positions(mask: Tensor) -> Tensor:
    """Return the place of every token, from 1; 0 for padding."""
    return mask * torch.arange(1, mask.shape[1] + 1)


def _pick(states: Tensor, places: Tensor) -> Tensor:
    return states[torch.arange(len(states)), places]


POOLING: dict[str, Layer] = {
    "cls_token": lambda states, mask: _pick(states, mask.argmax(1)),
    "max_tokens": lambda states, mask: states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1),
    "mean_tokens": _average,
    "mean_sqrt_len_tokens": lambda states, mask: _average(states, mask) * mask.sum(1, keepdim=True).sqrt(),
    "weightedmean_tokens": lambda states, mask: _average(states, _positions(mask)),
    "lasttoken": lambda states, mask: _pick(states, _positions(mask).argmax(1)),
}
"""Modes of the module Pooling, in the order in which sentence-transformers puts several of them together."""
_SHORT = {mode.removesuffix("s").removesuffix("_token"): mode for mode in POOLING}
_MODE = "pooling_mode_"
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda values: values,
    "Tanh": torch.tanh,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "Sigmoid": torch.sigmoid,
}


def pooling_modes(folder: Path) -> list[str]:
    """Return the modes of a module Pooling, keys of `POOLING`, in their order."""
    config = read_json_object(folder / "config.json")
    name = config.get("pooling_mode")  # newer versions name the mode
    modes = [name] if isinstance(name, str) else []
    modes += [key.removeprefix(_MODE) for key, value in config.items() if key.startswith(_MODE) and value is True]
    modes = [_SHORT.get(mode, mode) for mode in modes]
    unknown = [mode for mode in modes if mode not in POOLING]
    if unknown or not modes:
        what = f"asks for {unknown[0]}" if unknown else "says no pooling mode"
        raise UserError(f"{folder / 'config.json'} {what}; known are {', '.join(POOLING)}")
    return [mode for mode in POOLING if mode in modes]


def _read_pooling(folder: Path) -> Layer:
    layers = [POOLING[mode] for mode in pooling_modes(folder)]
    return lambda states, mask: torch.cat([layer(states, mask) for layer in layers], -1)


def _read_normalize(_folder: Path) -> Layer:
    return lambda values, _mask: functional.normalize(values, dim=-1)


def activation_of(folder: Path) -> str:
    """Return the activation of a module Dense: Identity, Tanh, ReLU, GELU or Sigmoid."""
    config = read_json_object(folder / "config.json")
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UserError(f"{folder / 'config.json'} asks for {name}; known are {', '.join(_ACTIVATIONS)}")
    return name


def _read_dense(folder: Path) -> Layer:
    name = activation_of(folder)
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}")
    tensors = read_tensors(folder, read_header(folder / WEIGHTS).tensors.values())
    if "linear.weight" not in tensors:
        raise UserError(f"{folder / WEIGHTS} has no linear.weight")
    weight = tensors["linear.weight"].float()
    bias = tensors["linear.bias"].float() if "linear.bias" in tensors else None
    return lambda values, _mask: _ACTIVATIONS[name](functional.linear(values, weight, bias))


_READERS: dict[str, Callable[[Path], Layer]] = {
    "Pooling": _read_pooling,
    "Normalize": _read_normalize,
    "Dense": _read_dense,
}


class SentenceModel:
    """A base model, and what its folder does with the hidden states.

    `longest` is how many tokens of a text are read at most; None if nothing limits them.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer
        transformer, modules = read_modules(folder)[:1], read_modules(folder)[1:]
        if transformer != [Module("Transformer", None)]:
            raise UserError(f"{folder / MODULES} does not begin with a Transformer in the folder itself")
        unknown = [module.kind for module in modules if module.kind not in _READERS]
        if unknown:
            raise UserError(f"{folder} has a module {unknown[0]}; known are {', '.join(_READERS)}")
        if not modules or modules[0].kind != "Pooling":
            raise UserError(f"{folder} has no Pooling behind its Transformer, so a text has no one embedding")
        self._layers = [_READERS[module.kind](folder / (module.folder or "")) for module in modules]
        settings = _read_settings(folder / TRANSFORMER_SETTINGS)
        limits = [settings.get("max_seq_length"), context_length(model.config)]
        self.longest = min((limit for limit in limits if isinstance(limit, int)), default=None)
        self._lower = settings.get("do_lower_case") is True
        self._prompt = _read_default_prompt(folder / SENTENCE_SETTINGS)
        pooling = _read_settings(folder / (modules[0].folder or "") / "config.json")
        self._unpooled = 0 if pooling.get("include_prompt", True) else self._count_prompt_tokens()

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], most: int) -> tuple[Tensor, int]:
        """Return embeddings of texts, (N, d) float32 on CPU, and how many tokens the texts have.

        A text is cut to `most` tokens, and to what the folder says.
        """
        most = min(most, self.longest or most)
        texts = [f"{self._prompt}{text}" for text in texts]
        texts = [text.lower() for text in texts] if self._lower else texts
        encoded = self._tokenizer(texts, truncation=True, max_length=most)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        check_vocabulary(torch.tensor([token for ids in encoded["input_ids"] for token in ids]), self._model.config)
        embeddings: dict[int, Tensor] = {}
        for rows in track(group_by_length(lengths), "embedding", unit="batch"):
            batch: Any = self._tokenizer.pad(
                {name: [values[row] for row in rows] for name, values in encoded.items()}, return_tensors="pt"
            )
            output = self._model(**{name: values.to(self._model.device) for name, values in batch.items()})
            values, mask = output.last_hidden_state.float().cpu(), batch["attention_mask"]
            mask = mask * (mask.cumsum(1) > self._unpooled)
            for layer in self._layers:
                values = layer(values, mask)
            embeddings |= zip(rows, values, strict=True)
        return torch.stack([embeddings[row] for row in range(len(texts))]), sum(lengths)

    def _count_prompt_tokens(self) -> int:
        """Return the tokens of the prompt and of what the tokenizer opens a text with."""
        ids = self._tokenizer(self._prompt)["input_ids"] if self._prompt else []
        closed = bool(ids) and ids[-1] in self._tokenizer.all_special_ids
        return len(ids) - closed


def _read_settings(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_default_prompt(path: Path) -> str:
    """Return the prompt before every text. Raises UserError if one is named that is not there."""
    settings = _read_settings(path)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    if name is None:
        return ""
    if not (isinstance(prompts, dict) and isinstance(prompts.get(name), str)):
        raise UserError(f"{path} has the default_prompt_name {name!r}, and no such prompt: add it, or write null")
    return str(prompts[name])


# ---- the comparison -------------------------------------------------------------------------------------------------


def compare_sentences(
    model: SentenceModel, reference: SentenceModel, texts: Sequence[str], most: int
) -> SentenceComparison:
    """Compare two models' embeddings of texts, at least `FEWEST_TEXTS`, cut to `most` tokens."""
    if len(texts) < FEWEST_TEXTS:
        raise UserError(f"the text has {len(texts)} lines that are not empty, each a text; {FEWEST_TEXTS} are needed")
    most = min(most, *(each.longest or most for each in (model, reference)))
    (ours, tokens), (theirs, _) = model.embed(texts, most), reference.embed(texts, most)
    check_finite("embeddings", ours, theirs)
    (cosines, nearest), (other_cosines, other_nearest) = _compare_texts(ours), _compare_texts(theirs)
    return SentenceComparison(
        cosine=float(functional.cosine_similarity(ours.double(), theirs.double()).mean()),
        rank_correlation=rank_correlation(cosines, other_cosines),
        nearest=float((nearest == other_nearest).double().mean()),
        texts=len(texts),
        pairs=len(cosines),
        tokens=tokens,
    )


def cut_texts(windows: Tensor, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return short texts for windows of a long one, int64 (N, T): two or more of each, as long as sentences are."""
    length = min(_TEXT_TOKENS, max(1, windows.shape[1] // 2))
    pieces = [piece.tolist() for window in windows for piece in window.split(length)]
    texts = [str(tokenizer.decode(piece, skip_special_tokens=True)).strip() for piece in pieces]
    return [text for text in texts if text]


def _compare_texts(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines of all pairs of texts, (N (N - 1) / 2), and every text's nearest other, (N)."""
    unit = functional.normalize(embeddings.double(), dim=1)
    cosines, nearest = [], []
    for start in range(0, len(unit), _CHUNK):
        rows = torch.arange(start, min(start + _CHUNK, len(unit)))
        similar = unit[rows] @ unit.T
        cosines.append(similar[torch.arange(len(unit)) > rows[:, None]])
        similar[torch.arange(len(rows)), rows] = -torch.inf
        nearest.append(similar.argmax(1))
    return torch.cat(cosines), torch.cat(nearest)
