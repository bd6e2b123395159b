"""Embeddings of texts by sentence-transformers, which makes them of hidden states as a folder of its own says.

Importing this needs that package, the extra `embed`; `sentences.open_embedder` says so.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as known
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.sentence_modules import (
    MODULES,
    SENTENCE_SETTINGS,
    TRANSFORMER_SETTINGS,
    Module,
    check_module_weights,
    read_modules,
)
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.batches import BATCH_TOKENS
from ckpt_prune.measure.samples.text import check_vocabulary
from ckpt_prune.model.context import context_length

_CHUNK = 1024
"""Texts that are sorted by their length, to be read in batches without much padding."""


class Embedder:
    """A base model, or a graph that is called like one, with what its folder does with the hidden states.

    Attributes:
        longest: how many tokens of a text are read at most; None if nothing limits them.

    Raises:
        UserError: the folder asks for what sentence-transformers does not bring, or makes no one embedding of a text.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        logging.getLogger("sentence_transformers").setLevel(
            logging.ERROR
        )  # it warns of default prompts, which are meant
        modules = read_modules(folder)
        if modules[:1] != [Module("Transformer", None)]:
            raise UserError(f"{folder / MODULES} does not begin with a Transformer in the folder itself")
        if "Pooling" not in {module.kind for module in modules}:
            raise UserError(f"{folder} has no Pooling behind its Transformer, so a text has no one embedding")
        check_module_weights(folder)
        self._reader = _LoadedTransformer(model, tokenizer, _read_settings(folder / TRANSFORMER_SETTINGS))
        self.longest = self._reader.longest
        settings = _read_settings(folder / SENTENCE_SETTINGS)
        try:
            behind = [
                getattr(known, module.kind).load(str(folder), subfolder=module.folder or "", local_files_only=True)
                for module in modules[1:]
            ]
            self._model = SentenceTransformer(
                modules=[self._reader, *behind],
                prompts=settings.get("prompts"),
                default_prompt_name=settings.get("default_prompt_name"),
                device="cpu",
            )
        except Exception as error:  # it raises anything over a config.json
            raise UserError(f"{folder}: sentence-transformers cannot load its modules: {one_line(error)}") from error
        self._folder = folder

    def embed(self, texts: Sequence[str], most: int) -> tuple[Tensor, int]:
        """Return embeddings of texts, (N, d) float32 on CPU, and how many tokens the texts have.

        A text is cut to `most` tokens, and to what the folder says.
        """
        most = min(most, self.longest or most)
        self._reader.longest, self._reader.tokens = most, 0
        options: Any = {"batch_size": max(1, BATCH_TOKENS // most), "convert_to_tensor": True}
        try:
            embeddings = [
                self._model.encode(list(texts[start : start + _CHUNK]), show_progress_bar=False, **options)
                for start in track(range(0, len(texts), _CHUNK), "embedding", unit="batch")
            ]
        except (KeyError, TypeError, ValueError) as error:  # of modules in an order in which they do not fit
            raise UserError(f"{self._folder}: its modules cannot be run: {one_line(error)}") from error
        return torch.cat(embeddings), self._reader.tokens

    def split(self, texts: Sequence[str], most: int) -> list[list[int]]:
        """Return the token ids that are read of each text, with the folder's own prompt; arguments as of `embed`."""
        self._reader.longest = min(most, self.longest or most)
        prompt = self._model.prompts.get(self._model.default_prompt_name or "")
        read = self._reader.preprocess(texts, prompt)
        pairs = zip(read["input_ids"], read["attention_mask"].bool(), strict=True)
        return [ids[real].tolist() for ids, real in pairs]

    @torch.no_grad()
    def pool(self, states: Tensor) -> Tensor:
        """Return the vectors (B, d) of texts without padding, all of length one, of their hidden states (B, T, d)."""
        features: dict[str, Any] = {"token_embeddings": states, "attention_mask": torch.ones(states.shape[:2])}
        for module in list(self._model)[1:]:
            features = module(features)
        return functional.normalize(features["sentence_embedding"], dim=-1)


class _LoadedTransformer(known.InputModule):
    """Reads texts in place of Transformer, which would load a second model, and takes no graph or pruned shape.

    Attributes:
        longest: how many tokens of a text are read at most.
        tokens: how many were read so far.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> None:
        super().__init__()
        self._held = (model.eval(),)  # in a tuple it is no submodule, and stays on its device
        self.tokenizer = tokenizer
        limits = [settings.get("max_seq_length"), context_length(model.config)]
        self.longest = min((limit for limit in limits if isinstance(limit, int)), default=None)
        self.tokens = 0
        self._lower = settings.get("do_lower_case") is True

    def preprocess(self, inputs: Sequence[str], prompt: str | None = None, **_options: Any) -> dict[str, Any]:
        """Return what the model reads of texts with the prompt before each, and how many tokens the prompt has."""
        texts = [f"{prompt or ''}{text}" for text in inputs]
        texts = [text.lower() for text in texts] if self._lower else texts
        encoded = self.tokenizer(texts, padding=True, truncation=True, max_length=self.longest, return_tensors="pt")
        self.tokens += int(encoded["attention_mask"].sum())
        if prompt:  # with what the tokenizer opens a text with, without what closes it
            ids = self.tokenizer(prompt)["input_ids"]
            encoded["prompt_length"] = len(ids) - (ids[-1] in self.tokenizer.all_special_ids)
        return dict(encoded)

    def forward(self, features: dict[str, Any], **_options: Any) -> dict[str, Any]:
        """Add the last hidden states, (B, T, d) float32 on CPU."""
        (model,) = self._held
        check_vocabulary(features["input_ids"], model.config)
        inputs = {name: features[name].to(model.device) for name in features if name != "prompt_length"}
        return features | {"token_embeddings": model(**inputs).last_hidden_state.float().cpu()}

    def save(self, *_args: Any, **_options: Any) -> None:
        raise NotImplementedError("an embedder is only measured with")


def _read_settings(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
