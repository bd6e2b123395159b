"""A statistics folder: an index, and safetensors files for every block, keyed by on-disk tensor names.

- `block-00000.safetensors` holds the moments of every site and fold as `<on-disk weight>/<fold>/<moment>`.
- `fisher-00000.safetensors` holds the Fisher metric at the outputs of the same modules, and scores of units with errors
  of all widths as `<space>/<score>/<scores or errors>`.
- `taylor-00000.safetensors` holds the importances of units as `<consumer weight>/<order>`.

Grams and metrics are symmetric and stored as their packed upper triangle, row by row.
"""

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ckpt_prune.checkpoint.files import read_input, sha256_files
from ckpt_prune.checkpoint.json_files import parse_json_object, pretty_json
from ckpt_prune.checkpoint.staging import disk_failures, write_atomically
from ckpt_prune.common.errors import UserError, refuse_unreadable
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.measure.moments.inputs import VECTORS, Moments, Taylor
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.moments.logits import LogitMoments, packed_width
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.moments.routing import RoutingMoments
from ckpt_prune.measure.statistics.distances import Distances
from ckpt_prune.measure.statistics.files import INDEX, Collect, check_statistics
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.measure.statistics.index import StatisticsIndex
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName

_ROUTING = tuple(field.name for field in fields(RoutingMoments))
_LOGITS = ("queries", "keys", "fourth", "centred")
_ORDERS = ("first", "second")
_CURVES = ("scores", "errors")
MIRRORED = 256
"""Rows and columns of a symmetric matrix that are mirrored at once."""

BlockMoments = dict[str, SpaceMoments]
"""On-disk weight of a consumer, a query projection or a router → moments of each fold."""
BlockCurves = dict[tuple[SpaceName, str], tuple[Tensor, Tensor]]
"""Space and score → the scores of the units of a site, (units,), and the errors of all widths, (units + 1,)."""


def name_file(kind: Literal["block", "fisher", "taylor"], block: int) -> str:
    """Return the name of the file with a block's moments, its Fisher metric, or the importances of its units."""
    return f"{kind}-{block:05d}.safetensors"


def list_files(blocks: int, collect: Container[str]) -> list[str]:
    """List the names of all files of a folder but the index."""
    kinds: list[Literal["block", "fisher", "taylor"]] = ["block", "fisher", "taylor"]
    return [name_file(kind, block) for kind in kinds if kind == "block" or kind in collect for block in range(blocks)]


def _in_block(name: str, block: int) -> str:
    # Not by `str.format`, for which a file's text may be a programme.
    return name.replace("{block}", str(block))


def pack_symmetric(gram: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric (d, d) matrix, row by row: (d (d + 1) / 2,)."""
    return torch.cat([gram[i, i:] for i in range(gram.shape[0])])


def unpack_symmetric(packed: Tensor, width: int) -> Tensor:
    """Return the symmetric (d, d) matrix of its packed upper triangle."""
    gram = packed.new_empty(width, width)
    start = 0
    for i in range(width):
        gram[i, i:] = packed[start : start + width - i]
        start += width - i
    # In squares that a processor's cache holds: columns one by one are many times slower.
    for rows in (slice(at, min(at + MIRRORED, width)) for at in range(0, width, MIRRORED)):
        for columns in (slice(at, min(at + MIRRORED, width)) for at in range(0, rows.start, MIRRORED)):
            gram[rows, columns] = gram[columns, rows].T
        square = gram[rows, rows].triu()
        gram[rows, rows] = square + square.triu(1).T
    return gram


# ---- writing ---------------------------------------------------------------------------------------------------------


def _name_tensors(moments: Any) -> dict[str, Tensor]:
    if isinstance(moments, RoutingMoments):
        return {name: getattr(moments, name) for name in _ROUTING}
    if isinstance(moments, Moments):
        tensors = {"count": torch.tensor(moments.count, dtype=torch.int64)}
        tensors |= {name: getattr(moments, name).contiguous() for name in VECTORS}
        tensors |= {} if moments.routed is None else {"routed": torch.tensor(moments.routed, dtype=torch.int64)}
        return tensors if moments.gram is None else tensors | {"gram": pack_symmetric(moments.gram)}
    counts = {"counts": torch.tensor([moments.samples, moments.tokens], dtype=torch.int64)}
    if isinstance(moments, RotaryMoments):
        return counts | {"pairs": torch.stack([pack_symmetric(gram) for gram in moments.gram])}
    logits = {name: getattr(moments, name) for name in _LOGITS}
    return counts | {name: tensor.contiguous() for name, tensor in logits.items() if tensor is not None}


def write_block(folder: Path, block: int, moments: BlockMoments) -> str:
    """Write one block's moments and return the file's SHA-256."""
    tensors: dict[str, Tensor] = {}
    for weight, folds in moments.items():
        for number, fold in enumerate(folds):
            tensors |= {f"{weight}/{number}/{name}": tensor for name, tensor in _name_tensors(fold).items()}
    return write_tensors(folder, name_file("block", block), tensors)


def write_fisher(folder: Path, block: int, metrics: Mapping[str, Fisher], curves: BlockCurves | None = None) -> str:
    """Write the Fisher metric of one block's sites, by on-disk weight, and return the file's SHA-256.

    `curves` are those that are known, on samples that the metric was not measured on if there are folds.
    """
    sums = {name: metric.sums for name, metric in metrics.items()}
    tensors = {name: pack_symmetric(values) if values.ndim == 2 else values for name, values in sums.items()}
    for key, pair in (curves or {}).items():
        tensors |= {"/".join((*key, name)): tensor for name, tensor in zip(_CURVES, pair, strict=True)}
    return write_tensors(folder, name_file("fisher", block), tensors)


def write_taylor(folder: Path, block: int, importances: Mapping[str, Taylor]) -> str:
    """Write the importances of one block's units, by on-disk weight, and return the file's SHA-256."""
    tensors = {f"{name}/{order}": getattr(sums, order) for name, sums in importances.items() for order in _ORDERS}
    return write_tensors(folder, name_file("taylor", block), tensors)


def write_tensors(folder: Path, name: str, tensors: dict[str, Tensor]) -> str:
    """Write a file of tensors and return its SHA-256."""
    with disk_failures(folder / name):
        try:
            save_file(tensors, folder / name)
        except SafetensorError as error:  # the library's own error of a full disk
            raise OSError(error) from error
        # The library makes files that only their owner may read; these are for a team, as the index is.
        (folder / name).chmod(0o666 & ~_umask())
    return sha256_files(folder, [name])[name]


def _umask() -> int:
    value = os.umask(0o022)
    os.umask(value)
    return value


# ---- reading ---------------------------------------------------------------------------------------------------------


class _TensorFile:
    """An opened file of tensors."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self.names, self._file = path, set(file.keys()), file

    def get(self, name: str, *shape: int | None) -> Tensor:
        """Read a tensor, which must be finite and of this shape; None stands for any size."""
        size = self._file.get_slice(name).get_shape()  # before as much memory is taken
        if len(size) != len(shape) or any(b not in (None, a) for a, b in zip(size, shape, strict=True)):
            expected = ["any" if number is None else number for number in shape]
            raise UserError(f"{self.path}: {name} has shape {size}, where {expected} is meant: measure again")
        tensor: Tensor = self._file.get_tensor(name)
        if not all_finite(tensor):
            raise UserError(f"{self.path}: {name} holds NaN or Inf: measure again")
        return tensor


def _read_inputs(file: _TensorFile, width: int, grams: bool, prefix: str) -> Moments:
    has_gram = grams and f"{prefix}gram" in file.names
    packed = file.get(f"{prefix}gram", packed_width(width)) if has_gram else None
    vectors: dict[str, Any] = {name: file.get(f"{prefix}{name}", width) for name in VECTORS}
    return Moments(
        count=int(file.get(f"{prefix}count")),
        gram=None if packed is None else unpack_symmetric(packed, width),
        routed=int(file.get(f"{prefix}routed")) if f"{prefix}routed" in file.names else None,
        **vectors,
    )


def _read_routing(file: _TensorFile, experts: int, prefix: str) -> RoutingMoments:
    return RoutingMoments(*(file.get(f"{prefix}{name}", experts) for name in _ROUTING))


def _read_logits(file: _TensorFile, heads: int, head_dim: int, prefix: str) -> LogitMoments:
    samples, tokens = file.get(f"{prefix}counts", 2).tolist()
    width = packed_width(head_dim)
    rows = width if f"{prefix}fourth" in file.names else samples
    names = [name for name in _LOGITS if f"{prefix}{name}" in file.names]
    if set(names) - {"centred"} not in ({"fourth"}, {"queries", "keys"}):
        raise UserError(f"{file.path}: {prefix} holds no whole moments: measure again")
    tensors = {name: file.get(f"{prefix}{name}", heads, rows, width) for name in names}
    return LogitMoments(samples, tokens, heads, head_dim, **tensors)


def _read_rotary(file: _TensorFile, pairs: int, prefix: str) -> RotaryMoments:
    samples, tokens = file.get(f"{prefix}counts", 2).tolist()
    packed = file.get(f"{prefix}pairs", None, packed_width(2 * pairs))
    return RotaryMoments(samples, tokens, torch.stack([unpack_symmetric(head, 2 * pairs) for head in packed]))


class Statistics:
    """An opened statistics folder; blocks are read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        check_statistics(folder)
        path = folder / INDEX
        try:
            values = parse_json_object(read_input(path))
            digest = values.pop("digest", None)
            self.index = StatisticsIndex.model_validate(values)
        except (OSError, ValueError) as error:
            refuse_unreadable(error)
            raise UserError(f"{path} is damaged or of another version: measure again") from error
        if digest not in (None, self.index.digest):  # former versions wrote none
            raise UserError(f"{path} is not what was measured (its digest differs): measure again")
        # Counted first: names of a billion blocks take all memory.
        too_many = self.index.blocks > len(self.index.files)
        if too_many or set(self.index.files) != set(list_files(self.index.blocks, self.index.collect)):
            raise UserError(f"{path} does not list the files of each of its {self.index.blocks} blocks: measure again")
        self._bytes = 0
        for name in self.index.files:
            if not (folder / name).is_file():
                raise UserError(f"{folder} lacks {name}, which its index lists: measure again")
            self._bytes += (folder / name).stat().st_size

    def __repr__(self) -> str:
        names = ("modality", "samples", "window", "folds", "blocks")
        facts = {name: getattr(self.index, name) for name in names}
        return short_repr(self, folder=str(self.folder), **facts, collect=self.collected)

    @property
    def digest(self) -> str:
        return self.index.digest

    def read_moments(self, block: int, weights: Container[str] | None = None, *, grams: bool = True) -> BlockMoments:
        """Read moments of one block, of all on-disk weights or of some, with the Grams of inputs or without.

        Raises a UserError that names a file that changed since it was written, or a tensor that holds NaN or Inf.
        """
        index, lacking = self.index, set(self.index.lacking)
        moments: BlockMoments = {}
        with self._open(name_file("block", block)) as file:

            def add(weight: str, read: Callable[[str], Any]) -> None:
                name = _in_block(weight, block)
                if name not in lacking and (weights is None or name in weights):
                    moments[name] = tuple(read(f"{name}/{fold}/") for fold in range(index.folds))

            linears = index.linears if "linears" in index.collect else {}
            for weight, widths in (index.consumers | linears).items():
                width = widths if isinstance(widths, int) else widths[block]
                if width:
                    add(weight, partial(_read_inputs, file, width, grams))
            for router, experts in index.routers.items():
                add(router, partial(_read_routing, file, experts))
            if "logits" in index.collect:
                for query, (heads, head_dim) in index.queries.items():
                    add(query, partial(_read_logits, file, heads, head_dim))
            for query, (_, pairs) in index.turned.items():
                add(query, partial(_read_rotary, file, pairs))
        return moments

    def read_fisher(self, block: int) -> dict[str, Fisher]:
        """Read the Fisher metric at the sites of one block: on-disk weight of the consumer, or of the query → sums."""
        if not self.index.fisher:
            raise UserError(f"{self.folder} holds no Fisher metric: calibrate with --collect moments,gram,fisher")
        with self._open(name_file("fisher", block)) as file:
            packed = {name: file.get(name, None) for name in file.names if "/" not in name}
        queries = {_in_block(name, block) for name in (*self.index.queries, *self.index.turned)}
        metrics = {}
        for name, sums in packed.items():
            width = (isqrt(8 * len(sums) + 1) - 1) // 2
            if name not in queries and packed_width(width) != len(sums):
                raise UserError(
                    f"{self.folder / name_file('fisher', block)}: {name} is no packed triangle: measure again"
                )
            metrics[name] = Fisher(self.index.fisher, sums if name in queries else unpack_symmetric(sums, width))
        return metrics

    def read_curves(self, block: int) -> BlockCurves:
        """Read the scores and errors of all widths that were found while the metric was measured; there may be none."""
        with self._open(name_file("fisher", block)) as file:
            keys = dict.fromkeys(tuple(name.split("/")[:2]) for name in sorted(file.names) if "/" in name)
            pairs = {key: [file.get("/".join((*key, name)), None) for name in _CURVES] for key in keys}
        return {(space, score): (scores, errors) for (space, score), (scores, errors) in pairs.items()}

    def read_taylor(self, block: int) -> dict[str, Taylor]:
        """Read importances of the units of one block, by on-disk weight of the consumer; nothing if not collected."""
        if "taylor" not in self.index.collect:
            return {}
        with self._open(name_file("taylor", block)) as file:
            sites = dict.fromkeys(name.rpartition("/")[0] for name in sorted(file.names))
            return {site: Taylor(*(file.get(f"{site}/{order}", None) for order in _ORDERS)) for site in sites}

    @contextmanager
    def _open(self, name: str) -> Iterator[_TensorFile]:
        path = self.folder / name
        try:
            with safe_open(path, framework="pt", backend="pread") as file:
                yield _TensorFile(path, file)
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}): measure again") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error}): measure again") from error
        # Last, so that damage that can be named is named.
        if sha256_files(self.folder, [name])[name] != self.index.files.get(name):
            raise UserError(f"{path} is not the file that was measured (its digest differs): measure again")

    def check_model(self, model: Model) -> None:
        """Refuse to be used with another model, tokenizer or dtype than was measured."""
        index, fingerprint = self.index, model.checkpoint.fingerprint
        dtype = str(model.dtype).removeprefix("torch.")
        if (index.consumers, index.blocks) != (model.consumer_widths, model.blocks) and index.model != fingerprint:
            raise UserError(f"{self.folder} was measured on another model than this checkpoint: measure again")
        if index.dtype != dtype:
            raise UserError(
                f"{self.folder} was measured on another checkpoint, of {index.dtype} where this one is {dtype}: "
                "measure again"
            )
        if index.tokenizer != model.reader_fingerprint:
            reader = "tokenizer" if index.modality in ("text", "pairs") else "image processor"
            raise UserError(f"{self.folder} was measured with another {reader} than this checkpoint's: measure again")
        if index.model != fingerprint:
            raise UserError(f"{self.folder} was measured on another model than this checkpoint: measure again")
        linears = model.linear_widths if "linears" in index.collect else index.linears
        turned = model.turned_heads if "rotary" in index.collect else {}
        expected = (model.blocks, model.consumer_widths, model.query_heads, turned, linears)
        if (index.blocks, index.consumers, index.queries, index.turned, index.linears) != expected:
            raise UserError(f"{self.folder / INDEX} does not list this model's blocks and consumers: measure again")

    @property
    def collected(self) -> list[str]:
        """Kinds of statistics as `--collect` names them: effects of single sites stand under a key of their own."""
        return [*self.index.collect, *(["effects"] if self.index.effects else [])]

    def summary(self) -> dict[str, Any]:
        """Return what `statistics show` prints."""
        return self.index.model_dump(mode="json", exclude={"files"}) | {
            "collect": self.collected,
            "digest": self.index.digest,
            "bytes": self._bytes,
        }


# ---- entering effects ------------------------------------------------------------------------------------------------


def record_effects(statistics: Statistics, effects: Mapping[str, Sequence[tuple[int, float]]]) -> Statistics:
    """Enter measured effects into a folder's index, in place of any that it has; its moments stay as they are.

    `effects` is as `stages.spaces.effects.measured.measure_effects` returns it.
    """
    return _change_index(statistics, {"effects": {name: list(points) for name, points in effects.items()}})


def record_fisher(
    statistics: Statistics,
    samples: int,
    files: Mapping[str, str],
    predicted: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    spaces: Mapping[SpaceName, Sequence[tuple[int, float]]],
    scores: Mapping[SpaceName, str],
    stream: Distances | None,
    spread: float = 0.0,
) -> Statistics:
    """Enter the Fisher metric, measured on so many samples, and predictions from gradients into a folder's index.

    `files` are those of all blocks, with their SHA-256. `predicted` is site → score → (units dropped, divergence),
    ascending, and `spaces` the same of a space in every block. `scores` is space → the score of all its sites,
    `spread` the relative standard error of what is predicted of a site, over draws of labels.
    """
    index = statistics.index
    changes: dict[str, Any] = {
        "files": {**index.files, **files},
        "collect": [kind for kind in get_args(Collect) if kind in {*index.collect, "fisher"}],
        "fisher": samples,
        "predicted": {
            site: {name: list(curve) for name, curve in by_score.items()} for site, by_score in predicted.items()
        },
        "spaces": {space: list(points) for space, points in spaces.items()},
        "scores": dict(scores),
        "spread": spread,
        "stream": None if stream is None else {"cosine": stream.cosine, "divergence": stream.divergence},
    }
    return _change_index(statistics, changes)


def _change_index(statistics: Statistics, changes: Mapping[str, Any]) -> Statistics:
    try:
        index = StatisticsIndex.model_validate({**statistics.index.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join(str(part) for part in first["loc"])
        raise UserError(f"{statistics.folder}: {where}: {first['msg']}: measure effects again") from error
    return write_index(statistics.folder, index)


def write_index(folder: Path, index: StatisticsIndex) -> Statistics:
    """Write the index, whole or not at all, and open the folder."""
    write_atomically(folder / INDEX, pretty_json(index.model_dump(mode="json") | {"digest": index.digest}))
    return Statistics(folder)
