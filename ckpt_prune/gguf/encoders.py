"""Encoders in llama.cpp, which gives their last hidden states, or one embedding of a text that is pooled of them."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gguf import PoolingType
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import read_tensors
from ckpt_prune.checkpoint.json_files import pretty_json, read_json_object
from ckpt_prune.checkpoint.sentence_modules import MODULES, POOLING_KEYS, WEIGHTS, read_modules, read_pooling
from ckpt_prune.checkpoint.shard import TensorInfo, read_header
from ckpt_prune.gguf.architectures import DENSE, RANK
from ckpt_prune.gguf.contents import POOLING_KEY, CannotMapError
from ckpt_prune.gguf.gguf_weight import GgufWeight

TYPES_KEY = "tokenizer.ggml.token_type_count"
"""Key, as it stands, with the rows of the table of token types, of which llama.cpp adds the first to every token."""
TOKEN_TYPES = "embeddings.token_type_embeddings"
"""Module of that table."""
CAUSAL_KEY = "attention.causal"
_POOLER = "pooler."
_LINEAR = "linear.weight"
_WITHOUT_HEAD = ("Model", "ForMaskedLM", "ForPreTraining")
"""Endings of classes whose use in llama.cpp is that of their hidden states."""
RANKS = "ForSequenceClassification"
"""Ending of classes whose head may give a score of two texts."""
_POOLING = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "lasttoken": PoolingType.LAST}
"""Pooling of sentence-transformers → llama.cpp's."""


def reads_texts(architecture: str) -> bool:
    """Return whether a class's hidden states are what it is used for in llama.cpp: heads that predict masks are not."""
    return architecture.endswith(_WITHOUT_HEAD)


def place_of_score(name: str) -> str | None:
    """Return the name here of a tensor of the head of a class that ends in `RANKS`; None if it is no such tensor."""
    module, _, kind = name.rpartition(".")
    found = {"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}.get(module, module)
    return f"{found}.{kind}" if found in RANK else None


def score_of(outer: Mapping[str, GgufWeight]) -> int:
    """Return llama.cpp's number for a head that gives a score of two texts.

    Raises:
        CannotMapError: it gives several, or tokens of the second text have a type of their own.
    """
    count = outer["classifier.out_proj.weight"].shape[0]
    if count != 1:
        raise CannotMapError(f"a head gives one score of two texts there, and here {count}")
    types = outer.get(f"{TOKEN_TYPES}.weight")
    if types is not None and types.shape[0] > 1 and bool((rows := types.read().float()).ne(rows[0]).any()):
        raise CannotMapError(
            "every token has type 0 there, and here tokens of the second text have type 1, with a row of its own in "
            f"{TOKEN_TYPES}"
        )
    return int(PoolingType.RANK)


def is_left_out(module: str) -> bool:
    """Return whether embeddings do without a module that stands beside the blocks: they are not made of its output."""
    return module.startswith(_POOLER)


def describe_left_out(names: Sequence[str]) -> str:
    """Return a line on the tensors that a file does not hold."""
    others = names[1] if len(names) == 2 else f"{len(names) - 1} more"
    more = f" and {others}" if len(names) > 1 else ""
    return f"left out: {names[0]}{more} (llama.cpp makes embeddings of the last hidden states, not of a head's output)"


def read_dense(folder: Path, hidden: int) -> dict[str, GgufWeight]:
    """Return the weights of the two modules Dense behind the pooling of an embedder, as llama.cpp has them, by name.

    None if it has others: with biases, an activation, or of other widths than from `hidden` and back to it.

    Raises:
        UserError: modules.json, or a file of such a module, is damaged.
    """
    modules = read_modules(folder)
    if [each.kind for each in modules if each.kind != "Normalize"] != ["Transformer", "Pooling", "Dense", "Dense"]:
        return {}
    found: dict[str, GgufWeight] = {}
    for module, named in zip(DENSE, (each.folder for each in modules if each.kind == "Dense"), strict=True):
        place = folder / (named or "")
        settings, tensors = read_json_object(place / "config.json"), read_header(place / WEIGHTS).tensors
        is_plain = str(settings.get("activation_function")).endswith(".Identity") and tensors.keys() == {_LINEAR}
        if not is_plain or len(tensors[_LINEAR].shape) != 2:
            return {}
        read = partial(_read_linear, place, tensors[_LINEAR])
        found[f"{module}.weight"] = GgufWeight(tensors[_LINEAR].shape, read)
    first, last = (each.shape for each in found.values())
    return found if first[1] == last[0] == hidden and first[0] == last[1] else {}


def _read_linear(place: Path, info: TensorInfo) -> Tensor:
    (tensor,) = read_tensors(place, [info]).values()
    return tensor


def pooling_of(folder: Path, *, dense: bool = False) -> tuple[int | None, list[str]]:
    """Return llama.cpp's number for the pooling of a sentence-transformers folder, and lines on what the file lacks.

    Args:
        dense: the file holds its modules Dense.

    Raises:
        UserError: modules.json, or a config.json beside it, is damaged.
    """
    modules = read_modules(folder)
    pooling = next((module for module in modules if module.kind == "Pooling"), None)
    if pooling is None:
        return None, ["no modules.json names a pooling: llama.cpp gives a vector for each token, or pools by --pooling"]
    modes = read_pooling(folder / (pooling.folder or ""))
    number = _POOLING.get(modes[0]) if len(modes) == 1 else None
    if number is None:
        notes = [f"llama.cpp does not pool by {' and '.join(modes) or 'nothing'}: it gives a vector for each token"]
    else:
        notes = []
    others = [each.kind for each in modules if each.kind not in ("Transformer", "Pooling", "Normalize")]
    if others and not dense:
        notes.append(f"{' and '.join(others)} of modules.json are left out: embeddings are what the pooling makes")
    return (None if number is None else int(number)), notes


def is_ranker(values: Mapping[str, Any]) -> bool:
    """Return whether the keys of a file say that it gives a score of two texts."""
    return bool(values.get(f"{values.get('general.architecture')}.{POOLING_KEY}") == PoolingType.RANK)


def is_encoder(values: Mapping[str, Any]) -> bool:
    """Return whether the keys of a file say that all of its tokens see each other."""
    return values.get(f"{values.get('general.architecture')}.{CAUSAL_KEY}") is False


def stated_pooling(values: Mapping[str, Any]) -> str | None:
    """Return how a file pools, by its keys: mean, cls or last; None if it states none of these."""
    number = values.get(f"{values.get('general.architecture')}.{POOLING_KEY}")
    return next((kind.name.lower() for kind in _POOLING.values() if isinstance(number, int) and kind == number), None)


def texts_of_pooling(values: Mapping[str, Any], hidden: int) -> dict[str, str]:
    """Return the files by which sentence-transformers pools as a GGUF file of these keys does; none if it does not.

    Its vectors have length 1, as those of llama.cpp's own commands.
    """
    pooling = stated_pooling(values)
    if pooling is None:
        return {}
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    mode = next(mode for mode, kind in _POOLING.items() if kind.name.lower() == pooling)
    settings = {"word_embedding_dimension": hidden, POOLING_KEYS[mode]: True}
    return {MODULES: pretty_json(modules), "1_Pooling/config.json": pretty_json(settings)}


def describe_read(values: Mapping[str, Any], context: int) -> str:
    """Return a line on what the folder of an encoder has otherwise than the model that its file was made of."""
    pooled = "" if stated_pooling(values) is None else ", whether embeddings have length 1 (here they have)"
    return (
        f"the file does not say how many tokens of a text its model takes (here {context}){pooled}, and holds no "
        "pooler: AutoModel fills one with random numbers, which embeddings are not made of"
    )
