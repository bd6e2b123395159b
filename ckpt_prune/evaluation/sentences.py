"""Embeddings of texts as a sentence-transformers folder says, and how near two models' are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.architectures.context import context_length
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
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.batches import by_length, check_tokens
from ckpt_prune.evaluation.correlation import rank_correlation

FEWEST = 3
"""Texts: two have one pair, and no ranks."""
_CHUNK = 1024
"""Texts whose similarities with all others are held at once."""

Step = Callable[[Tensor, Tensor], Tensor]
"""What a module makes of states (B, T, d) or embeddings (B, d), and the mask of tokens (B, T)."""


@dataclass(frozen=True)
class SentenceComparison:
    """A model's embeddings of texts beside a reference's."""

    cosine: float
    """Mean over texts of the cosine of the two embeddings, -1 to 1."""
    rank_correlation: float
    """Spearman's, of the cosines of all pairs of texts in the two models, -1 to 1."""
    nearest: float
    """Share of the texts whose nearest other text is the same in both, 0 to 1."""
    texts: int
    pairs: int
    tokens: int
    """Of all texts, as they were cut."""


# ---- the modules ----------------------------------------------------------------------------------------------------


def _cls(states: Tensor, mask: Tensor) -> Tensor:
    return states[torch.arange(len(states)), mask.argmax(1)]


def _max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return _weighted(states, mask.to(states.dtype))


def _mean_sqrt(states: Tensor, mask: Tensor) -> Tensor:
    return _mean(states, mask) * mask.sum(1, keepdim=True).to(states.dtype).sqrt()


def _by_position(states: Tensor, mask: Tensor) -> Tensor:
    return _weighted(states, (mask * torch.arange(1, mask.shape[1] + 1)).to(states.dtype))


def _last(states: Tensor, mask: Tensor) -> Tensor:
    return states[torch.arange(len(states)), (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)]


def _weighted(states: Tensor, weights: Tensor) -> Tensor:
    return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


POOLING: dict[str, Step] = {
    "cls_token": _cls,
    "max_tokens": _max,
    "mean_tokens": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean_tokens": _by_position,
    "lasttoken": _last,
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


def _pooling(folder: Path, _own: Module) -> Step:
    config = read_json_object(folder / "config.json")
    named = config.get("pooling_mode")  # newer versions name the mode
    asked = [named] if isinstance(named, str) else []
    asked += [key.removeprefix(_MODE) for key, value in config.items() if key.startswith(_MODE) and value is True]
    asked = [_SHORT.get(each, each) for each in asked]
    unknown = [each for each in asked if each not in POOLING]
    if unknown or not asked:
        what = f"asks for {unknown[0]}" if unknown else "says no pooling mode"
        raise UserError(f"{folder / 'config.json'} {what}; known are {', '.join(POOLING)}")
    steps = [step for mode, step in POOLING.items() if mode in asked]
    return lambda states, mask: torch.cat([step(states, mask) for step in steps], -1)


def _normalise(_folder: Path, _own: Module) -> Step:
    return lambda values, _mask: functional.normalize(values, dim=-1)


def _dense(folder: Path, _own: Module) -> Step:
    config = read_json_object(folder / "config.json")
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UserError(f"{folder / 'config.json'} asks for {name}; known are {', '.join(_ACTIVATIONS)}")
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}")
    tensors = read_tensors(folder, read_header(folder / WEIGHTS).tensors.values())
    weight, bias = (tensors[key].float() if key in tensors else None for key in ("linear.weight", "linear.bias"))
    if weight is None:
        raise UserError(f"{folder / WEIGHTS} has no linear.weight")
    return lambda values, _mask: _ACTIVATIONS[name](functional.linear(values, weight, bias))


_KNOWN: dict[str, Callable[[Path, Module], Step]] = {"Pooling": _pooling, "Normalize": _normalise, "Dense": _dense}


class SentenceModel:
    """A base model and what its folder does with the hidden states, read without sentence-transformers.

    Args:
        model: of the folder.
        folder: with `modules.json`.
        tokenizer: of both.

    Attributes:
        longest: tokens of a text at most, or None where nothing says.

    Raises:
        UserError: it does not begin with the model, has a module that is not known here, or none that makes one vector
            of a text.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer
        found = read_modules(folder)
        if found[:1] != [Module("Transformer", None)]:
            raise UserError(f"{folder / MODULES} does not begin with a Transformer in the folder itself")
        modules = found[1:]
        unknown = [each.kind for each in modules if each.kind not in _KNOWN]
        if unknown:
            raise UserError(f"{folder} has a module {unknown[0]}; known are {', '.join(_KNOWN)}")
        if not modules or modules[0].kind != "Pooling":
            raise UserError(f"{folder} has no Pooling behind its Transformer, so a text has no one embedding")
        self._steps = [_KNOWN[each.kind](folder / (each.folder or ""), each) for each in modules]
        settings = _settings(folder / TRANSFORMER_SETTINGS)
        limits = [settings.get("max_seq_length"), context_length(model.config)]
        self.longest = min((each for each in limits if isinstance(each, int)), default=None)
        self._lower = settings.get("do_lower_case") is True
        self._prompt = _default_prompt(folder / SENTENCE_SETTINGS)
        pooling = _settings(folder / (modules[0].folder or "") / "config.json")
        self._unpooled = 0 if pooling.get("include_prompt", True) else self._prompt_length()

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], most: int) -> tuple[Tensor, int]:
        """Embeddings of texts, (N, d) float32 on CPU, and how many tokens they have.

        Args:
            texts: in any order.
            most: tokens of a text; longer ones are cut, also to what the folder says.
        """
        most = min(most, self.longest or most)
        texts = [f"{self._prompt}{text}" for text in texts]
        texts = [text.lower() for text in texts] if self._lower else texts
        encoded = self._tokenizer(texts, truncation=True, max_length=most)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        check_tokens(self._model, torch.tensor([token for ids in encoded["input_ids"] for token in ids]))
        found: dict[int, Tensor] = {}
        for rows in track(by_length(lengths), "embedding", unit="batch"):
            batch: Any = self._tokenizer.pad(
                {name: [values[row] for row in rows] for name, values in encoded.items()}, return_tensors="pt"
            )
            output = self._model(**{name: values.to(self._model.device) for name, values in batch.items()})
            values, mask = output.last_hidden_state.float().cpu(), batch["attention_mask"]
            mask = mask * (mask.cumsum(1) > self._unpooled)
            for step in self._steps:
                values = step(values, mask)
            found |= dict(zip(rows, values, strict=True))
        return torch.stack([found[row] for row in range(len(texts))]), sum(lengths)

    def _prompt_length(self) -> int:
        """Tokens of the prompt and of what the tokenizer opens a text with."""
        ids = self._tokenizer(self._prompt)["input_ids"] if self._prompt else []
        closed = bool(ids) and ids[-1] in self._tokenizer.all_special_ids
        return len(ids) - closed


def _settings(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _default_prompt(path: Path) -> str:
    """What sentence-transformers puts before every text where no prompt is asked for.

    Raises:
        UserError: it is named, and there is none of that name.
    """
    settings = _settings(path)
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
    """Embed texts by two models.

    Args:
        model: that is measured.
        reference: what it is held against.
        texts: at least `FEWEST`.
        most: tokens of a text.

    Raises:
        UserError: there are fewer, or an embedding is not a number.
    """
    if len(texts) < FEWEST:
        raise UserError(f"the text has {len(texts)} lines that are not empty, each a text; {FEWEST} are needed")
    most = min(most, *(each.longest or most for each in (model, reference)))
    (ours, tokens), (theirs, _) = model.embed(texts, most), reference.embed(texts, most)
    if not (all_finite(ours) and all_finite(theirs)):
        raise UserError("the embeddings are not numbers (NaN): the weights are damaged or overflow in this dtype")
    pairs, nearest = zip(*(_pairs(each) for each in (ours, theirs)), strict=True)
    return SentenceComparison(
        cosine=float(functional.cosine_similarity(ours.double(), theirs.double()).mean()),
        rank_correlation=rank_correlation(*pairs),
        nearest=float((nearest[0] == nearest[1]).double().mean()),
        texts=len(texts),
        pairs=len(pairs[0]),
        tokens=tokens,
    )


def _pairs(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines of all pairs of texts, (N (N - 1) / 2), and every text's nearest other, (N)."""
    unit = functional.normalize(embeddings.double(), dim=1)
    cosines, nearest = [], []
    for start in range(0, len(unit), _CHUNK):
        rows = torch.arange(start, min(start + _CHUNK, len(unit)))
        near = unit[rows] @ unit.T
        later = torch.arange(len(unit)) > rows[:, None]
        cosines.append(near[later])
        near[torch.arange(len(rows)), rows] = -torch.inf
        nearest.append(near.argmax(1))
    return torch.cat(cosines), torch.cat(nearest)
