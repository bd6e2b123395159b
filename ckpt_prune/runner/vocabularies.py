"""Smaller vocabularies for a file: what they cost, what their files would be, and how their tokens write a text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.checkpoint.side_files import side_files_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from ckpt_prune.stages.vocabulary.files import read_pieces
from ckpt_prune.stages.vocabulary.keys import Vocabulary
from ckpt_prune.stages.vocabulary.settle import VocabularyChoice
from ckpt_prune.stages.vocabulary.smaller_checkpoint import keep_rows, number_rows, vocabulary_rows

SHARES = (75, 50, 25, 12)
"""Per cent of the rows of the embedding that are in question, besides all of them."""
_LEAST_PART = 0.2
"""Share of the parameters from which on an embedding is large enough to be in question."""


@dataclass(frozen=True)
class SmallerVocabulary:
    """Some tokens of a model.

    Attributes:
        kept: rows of the embedding that stay, ascending.
        lost: what the absence of the others costs, nats a token of text as all tokens write it.
    """

    kept: Sequence[int]
    lost: float


def is_embedding_large(model: Model) -> bool:
    """Return whether fewer tokens are in question: whether the embedding is a large part of the model."""
    embedding = model.checkpoint.tensors[model.family.embedding_weight]
    return prod(embedding.shape) >= _LEAST_PART * cost_of(model).parameters


def price_vocabularies(model: Model, options: SampleOptions, shares: Sequence[int]) -> Iterator[SmallerVocabulary]:
    """Measure on `--text` what vocabularies of some shares cost, each when it is asked for.

    There are none if the embedding is a small part of the model. A line says so if its tokenizer cannot be made
    smaller, or the text is too short to hold a part of it out.
    """
    if not shares or not is_embedding_large(model):
        return
    try:
        choice = VocabularyChoice(model, Vocabulary.model_validate({}), options)
        keep_rows(model, choice.pieces, choice.kept_without(0))
        for share in shares:
            kept, lost = choice.price(vocabulary_rows(model) * share // 100)
            yield SmallerVocabulary(kept, max(0.0, lost))
    except UserError as error:
        Notices()(f"no smaller vocabulary is tried: {error}")


def plan_with_rows(model: Model, kept: Sequence[int], folder: Path) -> FilePlanner:
    """Return the planner of the files of a model with some of its tokens, whose tokenizer is written into a folder."""
    side = side_files_of(model.checkpoint).files
    smaller = keep_rows(model, read_pieces(model.checkpoint.path, side), kept)
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: path.read_bytes() for name, path in side.items()} | dict(smaller.checkpoint.rewritten)
    files["config.json"] = pretty_json(smaller.checkpoint.config).encode()
    for name, content in files.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return FilePlanner(smaller, folder)


def parts_of_tokens(model: Model, kept: Sequence[int]) -> Callable[[int], list[int]]:
    """Return a function from a token of a model to the tokens, by their new numbers, that stand in its place.

    Args:
        model: with all tokens.
        kept: rows that stay, ascending.
    """
    pieces = read_pieces(model.checkpoint.path, side_files_of(model.checkpoint).files)
    numbers, stay = number_rows(kept, pieces.added.values(), vocabulary_rows(model)), set(kept)

    @cache
    def parts(token: int) -> list[int]:
        return [numbers[part] for part in pieces.expand(token, stay)]

    return parts
