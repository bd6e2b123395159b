"""A checkpoint with fewer tokens: some rows of the tensors that have one for each, and other files beside them."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ckpt_prune.checkpoint.checkpoint import Checkpoint, PartOf
from ckpt_prune.checkpoint.side_files import side_files_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.composites import merge_part_config
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import parse_config, stock_names, stored_key
from ckpt_prune.stages.vocabulary.files import is_token_key, renumber, rewrite_files
from ckpt_prune.stages.vocabulary.pieces import Pieces

_SIZE = "vocab_size"


@dataclass(frozen=True, eq=False)
class SmallerCheckpoint(Checkpoint):
    """A view of a checkpoint whose embedding, head and what else has a row for each token have fewer of them.

    A tensor is read whole, and its rows are chosen then, bit for bit: memory is that of one tensor.

    Attributes:
        source: the checkpoint with all tokens.
        kept: rows that stay, ascending, by new number.
        rows: names of the tensors that have a row for each token.
    """

    source: Checkpoint = field(kw_only=True)
    kept: Tensor = field(kw_only=True)
    rows: frozenset[str] = field(kw_only=True)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors as `Checkpoint.read` does."""
        names = list(names)
        others = super().read([name for name in names if name not in self.rows])
        return {
            name: self.source.read([name])[name].index_select(0, self.kept) if name in self.rows else others[name]
            for name in names
        }

    @cached_property
    def fingerprint(self) -> str:
        """That of the checkpoint with all tokens."""
        return self.source.fingerprint

    @cached_property
    def _scanned(self) -> str:
        return self.source._scanned


def vocabulary_rows(model: Model) -> int:
    """Return how many rows the embedding has."""
    return int(model.config.get_text_config().vocab_size)


def vocabulary_tensors(model: Model) -> frozenset[str]:
    """Return the tensors that have a row for each token, as the model's class builds them for one token more.

    UserError if a tensor has such an axis in another place, so that fewer tokens would change something else.
    """
    family, checkpoint, rows = model.family, model.checkpoint, vocabulary_rows(model)
    if model.has_remote_code:
        raise UserError("a smaller vocabulary comes first: make it of the dense model, and prune that")
    sides = [stock_names(with_rows(model, count), family.architecture) for count in (rows, rows + 1)]
    tables, prefixes = set(), tuple(family.block.format(block=block) for block in range(model.blocks))
    for name, info in checkpoint.tensors.items():
        before, after = (names.shape(name) for names in sides)
        if before == after:
            continue
        is_part = name.startswith(prefixes) or sides[0].is_part(name)  # of a block, or of a table in several tensors
        if before is None or after is None or after != (before[0] + 1, *before[1:]) or is_part:
            raise UserError(f"{family.model_type} ties {name} to the number of its tokens: the vocabulary stays whole")
        if info.shape != before or info.transposed:
            raise UserError(f"{checkpoint.path}: {name} has the shape {info.shape}, and config.json says {before}")
        tables.add(name)
    if not tables:
        raise UserError(f"{family.model_type} has no tensor with a row for each token: there is no vocabulary to cut")
    return frozenset(tables)


def with_rows(model: Model, rows: int) -> dict[str, Any]:
    """Return the config.json of a model with so many tokens."""
    values = copy.deepcopy(model.checkpoint.config)
    text = model.config.get_text_config()
    inner = values if text is model.config else values.get("text_config", values)
    return (
        {**values, stored_key(_SIZE, values, text): rows}
        if inner is values
        else values | {"text_config": inner | {_SIZE: rows}}
    )


def keep_rows(model: Model, pieces: Pieces | None, kept: Sequence[int]) -> Model:
    """Return the model with some of its tokens, which get new numbers in their order.

    Args:
        pieces: its tokenizer; None if only sizes are asked for, or the files beside the output are there already.
        kept: rows that stay, ascending.
    """
    source, rows = model.checkpoint, vocabulary_tensors(model)
    numbers = number_rows(kept, () if pieces is None else pieces.added.values(), vocabulary_rows(model))
    values = renumber(with_rows(model, len(kept)) | _default_tokens(model.config, source.config), numbers)
    tensors = dict(source.tensors)
    for name in rows:
        info = tensors[name]
        shape = (len(kept), *info.shape[1:])
        tensors[name] = replace(info, shape=shape, nbytes=prod(shape) * info.dtype.itemsize, scaled=None, adapter=None)
    rewritten: Mapping[str, bytes | None] = {}
    if pieces is not None:
        rewritten = rewrite_files(pieces, numbers, side_files_of(source).files)
    arguments = {each.name: getattr(source, each.name) for each in fields(Checkpoint)}
    arguments |= {"config": values, "tensors": tensors, "rewritten": rewritten}
    if source.within is not None:
        arguments["within"] = _renumber_whole(source, values, numbers)
    smaller = SmallerCheckpoint(**arguments, source=source, kept=torch.tensor(kept, dtype=torch.int64), rows=rows)
    config = parse_config(values)
    return Model(smaller, model.family, config)


def _renumber_whole(part: Checkpoint, config: Mapping[str, Any], numbers: Mapping[int, int]) -> PartOf:
    """Return the whole of a part with fewer tokens: it has keys of its own that name some, such as those of images."""
    assert part.within is not None
    whole = part.within.whole
    stated = whole.config | _default_tokens(parse_config(whole.config), whole.config)
    renumbered = replace(part.within, whole=replace(whole, config=renumber(stated, numbers)))
    merged = merge_part_config(replace(part, within=renumbered), config)
    return replace(renumbered, whole=replace(whole, config=merged))


def number_rows(kept: Sequence[int], added: Iterable[int], rows: int) -> dict[int, int]:
    """Return old id → new one. Added tokens that the embedding has no row for stay behind all that have one."""
    beyond = sorted(index for index in added if index >= rows)
    return {old: new for new, old in enumerate([*kept, *beyond])}


def _default_tokens(config: PreTrainedConfig, stated: Mapping[str, Any]) -> dict[str, int]:
    """Return tokens that a config.json leaves to its class, which would not follow new numbers."""
    defaults = {key: value for key, value in config.to_dict().items() if is_token_key(key) and key not in stated}
    return {key: value for key, value in defaults.items() if isinstance(value, int) and value > 0}
