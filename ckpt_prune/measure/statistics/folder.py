"""Statistics on disk: a folder with an index and safetensors files for every block, keyed by on-disk tensor names.

`statistics.json` says of which model, tokenizer and data they are; `block-00000.safetensors` holds, for every consumer
and fold, the moments as `<consumer weight>/<fold>/<moment>`, and those of queries and keys, or of rotary pairs, as
`<query weight>/<fold>/<moment>`; `fisher-00000.safetensors` the Fisher metric at the outputs of the same modules, under
their names; `taylor-00000.safetensors` the importances of units as `<consumer weight>/<order>`. Grams and metrics are
symmetric and stored as their packed upper triangle, row by row. Two folders of the same model can be summed, but for
those importances.
"""

import hashlib
import json
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import reduce
from math import isqrt
from operator import add
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ckpt_prune.architectures.family import Modality
from ckpt_prune.architectures.model import Model, Width
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.checkpoint.staging import disk_failures, write_atomically
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.measure.moments.inputs import ACTIVE_THRESHOLD, Moments, Taylor
from ckpt_prune.measure.moments.kinds import Collect, SpaceMoments
from ckpt_prune.measure.moments.logits import LogitMoments, packed_width
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.moments.routing import RoutingMoments
from ckpt_prune.measure.samples.shards import overlapping, united
from ckpt_prune.measure.statistics.distances import Distances
from ckpt_prune.measure.statistics.files import INDEX, check_statistics
from ckpt_prune.measure.statistics.fisher import Fisher

_VECTORS = ("sum", "square", "absolute", "active")
_ROUTING = tuple(each.name for each in fields(RoutingMoments))
_LOGITS = ("queries", "keys", "fourth", "centred")
_ORDERS = ("first", "second")


BlockMoments = dict[str, SpaceMoments]
"""On-disk weight of a consumer, or of a query projection → moments of each fold."""

Effect = tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0, allow_inf_nan=False)]]
"""Units dropped of one site, of q and k dimensions of every head, and how far that takes the model's output."""


def _check_ascending(name: str, effects: Sequence[Effect]) -> None:
    counts = [count for count, _ in effects]
    if not counts or counts != sorted(set(counts)):
        raise ValueError(f"{name}: units dropped must ascend")


class StreamDistances(BaseModel):
    """What runs of blocks do to the residual stream and to the model's own output (`distances.Distances`)."""

    model_config = ConfigDict(extra="forbid")

    cosine: list[list[float]]
    divergence: list[list[float]]


class StatisticsIndex(BaseModel):
    """What the statistics are of.

    Attributes:
        version: of the format.
        model, tokenizer, dtype: fingerprints of the checkpoint and of its tokenizer or image processor, and the
            checkpoint's dtype.
        modality: text or image.
        data: fingerprints of the calibration samples; several after adding.
        seed, samples, window, tokens: of the samples, windows of text or images; after adding, samples and tokens are
            totals.
        folds: moments are kept apart for this many contiguous runs of samples.
        collect: moments (vectors), gram (Grams), both of consumers' inputs; logits (moments of queries and keys);
            centred (with keys less their mean over each sample, too); rotary (moments of rotary pairs);
            linears (vectors, and Grams where asked for, also of the inputs of all other linears); fisher (the Fisher
            metric at the outputs of consumers and of queries); taylor (importances of units, by gradients of the loss).
        compute_dtype: in which the model ran.
        blocks: how many blocks there are.
        leading: the first of them that come before those with consumers. Left out like `effects`.
        consumers: consumer's on-disk weight → width, of all blocks, or of each where they differ.
        queries: query's on-disk weight → heads and their width, for every block; of families whose q and k can be
            pruned.
        turned: query's on-disk weight → query heads and their rotary pairs, for every block, where moments of them
            were collected. Left out like `effects`.
        routers: router's on-disk weight → experts, for every block; left out of what is written where there are none.
        linears: of the linears that are no consumer, the on-disk weight of the first of those that read one input,
            with `/input` → width of that input, for every block.
        active_above: absolute value above which an input counts as active; left out of what is written where it is
            `moments.ACTIVE_THRESHOLD`.
        files: file → sha256.
        fisher: samples that the Fisher metric was measured on; 0, and left out of what is written, where it was not.
        predicted: on-disk weight of a consumer → score → what dropping the units of least score is predicted to do to
            the model's own output, by units dropped, ascending (`effects.gradients`). Left out like `effects`.
        spaces: space → what dropping units of it in every block at once does to the model's own output, by units
            dropped of each, ascending (`effects.gradients`). Left out like `effects`.
        scores: space → the score for all of its sites, where it is to be preferred to the best of each. Left out like
            `effects`.
        stream: of the samples of `fisher`, what leaving out runs of blocks does (`distances.EndDistances`). Left out
            like `effects`.
        effects: on-disk weight of a consumer, or of a query projection → what pruning that site alone does to the
            model's own output, by units dropped, ascending (`stages.spaces.effects`). Empty, and left out of what is
            written, where it was not measured, so that statistics without it have the digest they always had.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    model: str
    tokenizer: str | None
    dtype: str
    modality: Modality = "text"
    data: list[str]
    seed: int
    samples: int = Field(ge=1)
    window: int = Field(ge=2)
    tokens: int = Field(ge=1)
    folds: int = Field(ge=1)
    collect: list[Collect]
    compute_dtype: str
    blocks: int = Field(ge=1)
    leading: Annotated[int, Field(ge=0)] = 0
    consumers: dict[str, Width]
    queries: dict[str, tuple[int, int]] = Field(default_factory=dict)
    turned: dict[str, tuple[int, int]] = Field(default_factory=dict)
    routers: dict[str, int] = Field(default_factory=dict)
    linears: dict[str, int] = Field(default_factory=dict)
    active_above: Annotated[float, Field(ge=0, allow_inf_nan=False)] = ACTIVE_THRESHOLD
    files: dict[str, str]
    fisher: Annotated[int, Field(ge=0)] = 0
    predicted: dict[str, dict[str, list[Effect]]] = Field(default_factory=dict)
    spaces: dict[str, list[Effect]] = Field(default_factory=dict)
    scores: dict[str, str] = Field(default_factory=dict)
    stream: StreamDistances | None = None
    effects: dict[str, list[Effect]] = Field(default_factory=dict)

    @field_validator("effects", "spaces")
    @classmethod
    def _ascending(cls, effects: dict[str, list[Effect]]) -> dict[str, list[Effect]]:
        for name, own in effects.items():
            _check_ascending(name, own)
        return effects

    @field_validator("predicted")
    @classmethod
    def _all_ascending(cls, predicted: dict[str, dict[str, list[Effect]]]) -> dict[str, dict[str, list[Effect]]]:
        for name, scores in predicted.items():
            for own in scores.values():
                _check_ascending(name, own)
        return predicted

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        for key in ("leading", "turned", "routers", "fisher", "predicted", "spaces", "scores", "stream", "effects"):
            if not values.get(key):
                values.pop(key, None)
        if values.get("active_above") == ACTIVE_THRESHOLD:
            del values["active_above"]
        return values

    @property
    def digest(self) -> str:
        """sha256 over the whole index, and through it over every file."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def block_file(block: int) -> str:
    """Name of a block's file."""
    return f"block-{block:05d}.safetensors"


def name_file(block: int) -> str:
    """Name of the file with the Fisher metric of a block's sites."""
    return f"fisher-{block:05d}.safetensors"


def taylor_file(block: int) -> str:
    """Name of the file with the importances of a block's units."""
    return f"taylor-{block:05d}.safetensors"


def files_of(blocks: int, collect: Container[str]) -> list[str]:
    """Names of all files of a folder but the index."""
    kinds = [block_file]
    kinds += [name for kind, name in {"fisher": name_file, "taylor": taylor_file}.items() if kind in collect]
    return [name(block) for name in kinds for block in range(blocks)]


def _in_block(name: str, block: int) -> str:
    """The on-disk name of a tensor in a block; not by `str.format`, for which a file's text may be a programme."""
    return name.replace("{block}", str(block))


def pack_symmetric(gram: Tensor) -> Tensor:
    """Upper triangle of a symmetric (d, d) matrix, row by row, (d (d + 1) / 2,)."""
    return torch.cat([gram[i, i:] for i in range(gram.shape[0])])


def unpack_symmetric(packed: Tensor, width: int) -> Tensor:
    """The symmetric (d, d) matrix of its packed upper triangle."""
    gram = packed.new_empty(width, width)
    start = 0
    for i in range(width):
        row = packed[start : start + width - i]
        gram[i, i:] = row
        gram[i:, i] = row
        start += width - i
    return gram


def _flat(moments: Moments | LogitMoments | RotaryMoments | RoutingMoments) -> dict[str, Tensor]:
    """Moments as tensors by name."""
    if isinstance(moments, RotaryMoments):
        counts = torch.tensor([moments.samples, moments.tokens], dtype=torch.int64)
        return {"counts": counts, "pairs": torch.stack([pack_symmetric(gram) for gram in moments.gram])}
    if isinstance(moments, RoutingMoments):
        return {name: getattr(moments, name) for name in _ROUTING}
    if isinstance(moments, LogitMoments):
        known = {name: getattr(moments, name) for name in _LOGITS if getattr(moments, name) is not None}
        counts = torch.tensor([moments.samples, moments.tokens], dtype=torch.int64)
        return {"counts": counts} | {name: tensor.contiguous() for name, tensor in known.items()}
    found = {"count": torch.tensor(moments.count, dtype=torch.int64)}
    found |= {name: getattr(moments, name).contiguous() for name in _VECTORS}
    found |= {} if moments.routed is None else {"routed": torch.tensor(moments.routed, dtype=torch.int64)}
    return found if moments.gram is None else found | {"gram": pack_symmetric(moments.gram)}


def _umask() -> int:
    value = os.umask(0o022)
    os.umask(value)
    return value


def write_block(folder: Path, block: int, moments: BlockMoments) -> str:
    """Write one block's moments; returns the file's sha256.

    Args:
        folder: where to.
        block: its index.
        moments: by on-disk weight, one for each fold.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for weight, folds in moments.items():
        parts: Sequence[Moments | LogitMoments | RotaryMoments | RoutingMoments] = folds
        for fold, each in enumerate(parts):
            tensors |= {f"{weight}/{fold}/{name}": tensor for name, tensor in _flat(each).items()}
    return _write(folder, block_file(block), tensors)


def write_fisher(folder: Path, block: int, found: Mapping[str, Fisher]) -> str:
    """Write the Fisher metric of one block's sites; returns the file's sha256.

    Args:
        folder: where to.
        block: its index.
        found: by on-disk weight, all of the same number of samples.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    sums = {name: own.sums for name, own in found.items()}
    return _write(folder, name_file(block), {n: pack_symmetric(s) if s.ndim == 2 else s for n, s in sums.items()})


def write_taylor(folder: Path, block: int, found: Mapping[str, Taylor]) -> str:
    """Write the importances of one block's units; returns the file's sha256.

    Args:
        folder: where to.
        block: its index.
        found: by on-disk weight.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    tensors = {f"{name}/{order}": getattr(own, order) for name, own in found.items() for order in _ORDERS}
    return _write(folder, taylor_file(block), tensors)


def _write(folder: Path, name: str, tensors: dict[str, Tensor]) -> str:
    with disk_failures(folder / name):
        try:
            save_file(tensors, folder / name)
        except SafetensorError as error:  # the library's own error of a full disk
            raise OSError(error) from error
        # The library makes files that only their owner may read; these are for a team, as the index is.
        (folder / name).chmod(0o666 & ~_umask())
    return sha256_files(folder, [name])[name]


class Statistics:
    """An opened statistics folder; blocks are read when asked for.

    Args:
        folder: the folder.

    Raises:
        UserError: no index, a damaged one, or a block's file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        check_statistics(folder)
        path = folder / INDEX
        try:
            self.index = StatisticsIndex.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValidationError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is damaged or of another version: measure again") from error
        # Counted first: names of a billion blocks take all memory.
        many = self.index.blocks > len(self.index.files)
        if many or set(self.index.files) != set(files_of(self.index.blocks, self.index.collect)):
            raise UserError(f"{path} does not list the files of each of its {self.index.blocks} blocks: measure again")
        self._bytes = 0
        for name in self.index.files:
            if not (folder / name).is_file():
                raise UserError(f"{folder} lacks {name}, which its index lists: measure again")
            self._bytes += (folder / name).stat().st_size

    def __repr__(self) -> str:
        own = self.index
        return short_repr(
            self,
            folder=str(self.folder),
            modality=own.modality,
            samples=own.samples,
            window=own.window,
            folds=own.folds,
            blocks=own.blocks,
            collect=self.collected,
        )

    def block(self, block: int, weights: Container[str] | None = None) -> BlockMoments:
        """Moments of one block: on-disk weight → one for each fold.

        Args:
            block: its index.
            weights: those wanted; None reads all.

        Raises:
            UserError: the file changed since it was written, or a tensor holds NaN or Inf; the message names it.
        """
        found: BlockMoments = {}
        with self._open(block_file(block)) as (names, get):

            def inputs(prefix: str, width: int) -> Moments:
                packed = get(f"{prefix}gram", packed_width(width)) if f"{prefix}gram" in names else None
                gram = None if packed is None else unpack_symmetric(packed, width)
                vectors = {name: get(f"{prefix}{name}", width) for name in _VECTORS}
                routed = int(get(f"{prefix}routed")) if f"{prefix}routed" in names else None
                count = int(get(f"{prefix}count"))
                return Moments(count, **vectors, gram=gram, drift=None, taylor=None, routed=routed)

            def logits(prefix: str, heads: int, head_dim: int) -> LogitMoments:
                samples, tokens = get(f"{prefix}counts", 2).tolist()
                width = packed_width(head_dim)
                rows = width if f"{prefix}fourth" in names else samples
                held = [name for name in _LOGITS if f"{prefix}{name}" in names]
                if set(held) - {"centred"} not in ({"fourth"}, {"queries", "keys"}):
                    raise UserError(
                        f"{self.folder / block_file(block)}: {prefix} holds no whole moments: measure again"
                    )
                parts = {name: get(f"{prefix}{name}", heads, rows, width) for name in held}
                return LogitMoments(samples, tokens, heads, head_dim, **parts)

            def rotary(prefix: str, pairs: int) -> RotaryMoments:
                samples, tokens = get(f"{prefix}counts", 2).tolist()
                packed = get(f"{prefix}pairs", None, pairs * (2 * pairs + 1))
                return RotaryMoments(samples, tokens, torch.stack([unpack_symmetric(own, 2 * pairs) for own in packed]))

            folds = range(self.index.folds)
            linears = self.index.linears if "linears" in self.index.collect else {}
            for weight, widths in (self.index.consumers | linears).items() if block >= self.index.leading else ():
                name = _in_block(weight, block)
                if weights is not None and name not in weights:
                    continue
                width = widths if isinstance(widths, int) else widths[block]
                found[name] = tuple(inputs(f"{name}/{fold}/", width) for fold in folds)
            for router, experts in self.index.routers.items() if block >= self.index.leading else ():
                name = _in_block(router, block)
                if weights is None or name in weights:
                    found[name] = tuple(
                        RoutingMoments(*(get(f"{name}/{fold}/{sums}", experts) for sums in _ROUTING)) for fold in folds
                    )
            if "logits" in self.index.collect:
                for query, (heads, head_dim) in self.index.queries.items():
                    name = _in_block(query, block)
                    if weights is not None and name not in weights:
                        continue
                    found[name] = tuple(logits(f"{name}/{fold}/", heads, head_dim) for fold in folds)
            for query, (_, pairs) in self.index.turned.items():
                name = query.format(block=block)
                if weights is None or name in weights:
                    found[name] = tuple(rotary(f"{name}/{fold}/", pairs) for fold in folds)
        return found

    def fisher(self, block: int) -> dict[str, Fisher]:
        """The Fisher metric at the sites of one block: on-disk weight of the consumer, or of the query → sums.

        Args:
            block: its index.

        Raises:
            UserError: it was not measured, the file changed since it was written, or a tensor holds NaN or Inf.
        """
        if not self.index.fisher:
            raise UserError(f"{self.folder} holds no Fisher metric: calibrate with --collect moments,gram,fisher")
        with self._open(name_file(block)) as (names, get):
            packed = {name: get(name, None) for name in names}
        queries = {_in_block(name, block) for name in (*self.index.queries, *self.index.turned)}
        found = {}
        for name, sums in packed.items():
            width = (isqrt(8 * len(sums) + 1) - 1) // 2
            if name not in queries and packed_width(width) != len(sums):
                raise UserError(f"{self.folder / name_file(block)}: {name} is no packed triangle: measure again")
            found[name] = Fisher(self.index.fisher, sums if name in queries else unpack_symmetric(sums, width))
        return found

    def taylor(self, block: int) -> dict[str, Taylor]:
        """Importances of the units of one block: on-disk weight of the consumer → those of its units.

        Args:
            block: its index.

        Returns:
            Nothing where they were not collected.

        Raises:
            UserError: the file changed since it was written, or a tensor holds NaN or Inf.
        """
        if "taylor" not in self.index.collect:
            return {}
        with self._open(taylor_file(block)) as (names, get):
            sites = dict.fromkeys(name.rpartition("/")[0] for name in sorted(names))
            return {site: Taylor(*(get(f"{site}/{order}", None) for order in _ORDERS)) for site in sites}

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[set[str], Callable[..., Tensor]]]:
        """The names of a file's tensors, and what reads one of a shape, where None stands for any size.

        Raises:
            UserError: the file changed since it was written, or a tensor that was read holds NaN or Inf.
        """
        path = self.folder / name
        try:
            with safe_open(path, framework="pt", backend="pread") as file:

                def get(name: str, *shape: int | None) -> Tensor:
                    found = file.get_slice(name).get_shape()  # before as much memory is taken
                    if len(found) != len(shape) or any(b not in (None, a) for a, b in zip(found, shape, strict=True)):
                        wanted = ["any" if size is None else size for size in shape]
                        raise UserError(f"{path}: {name} has shape {found}, where {wanted} is meant: measure again")
                    tensor: Tensor = file.get_tensor(name)
                    if not all_finite(tensor):
                        raise UserError(f"{path}: {name} holds NaN or Inf: measure again")
                    return tensor

                yield set(file.keys()), get
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}): measure again") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error}): measure again") from error
        # Last, so that damage that can be named is named.
        if sha256_files(self.folder, [path.name])[path.name] != self.index.files.get(path.name):
            raise UserError(f"{path} is not the file that was measured (its digest differs): measure again")

    def check_model(self, model: Model) -> None:
        """Refuse to be used with another model.

        Raises:
            UserError: dtype, tokenizer, model, or its blocks and consumers differ from what was measured.
        """
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
            reader = "tokenizer" if index.modality == "text" else "image processor"
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
        """What `statistics show` prints."""
        return self.index.model_dump(mode="json", exclude={"files"}) | {
            "collect": self.collected,
            "digest": self.index.digest,
            "bytes": self._bytes,
        }


def record_effects(statistics: Statistics, effects: Mapping[str, Sequence[tuple[int, float]]]) -> Statistics:
    """Enter measured effects into a folder's index, in place of any that it has; its moments stay as they are.

    Args:
        statistics: the folder; its index is rewritten, whole or not at all.
        effects: as `stages.spaces.effects.measured.measure_effects` returns them.

    Raises:
        UserError: an effect is negative, NaN or Inf, or counts do not ascend; or the folder cannot be written.
    """
    return _entered(statistics, {"effects": {name: list(own) for name, own in effects.items()}})


def record_fisher(
    statistics: Statistics,
    samples: int,
    files: Mapping[str, str],
    predicted: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    spaces: Mapping[SpaceName, Sequence[tuple[int, float]]],
    scores: Mapping[SpaceName, str],
    stream: Distances,
) -> Statistics:
    """Enter the Fisher metric, whose files are there, and what is predicted from gradients into a folder's index.

    Args:
        statistics: the folder; its index is rewritten, whole or not at all.
        samples: on how many it was measured.
        files: of all blocks, with their sha256.
        predicted: site → score → (units dropped, divergence), ascending.
        spaces: space → (units dropped of every block, divergence), ascending.
        scores: space → the score of all its sites.
        stream: what leaving out runs of blocks does.

    Raises:
        UserError: a divergence is negative, NaN or Inf, or counts do not ascend; or the folder cannot be written.
    """
    index = statistics.index
    collect = [kind for kind in get_args(Collect) if kind in {*index.collect, "fisher"}]
    told = {name: {score: list(own) for score, own in scores.items()} for name, scores in predicted.items()}
    known: dict[str, Any] = {
        "files": {**index.files, **files},
        "collect": collect,
        "fisher": samples,
        "predicted": told,
        "spaces": {space: list(own) for space, own in spaces.items()},
        "scores": dict(scores),
        "stream": {"cosine": stream.cosine, "divergence": stream.divergence},
    }
    return _entered(statistics, known)


def _entered(statistics: Statistics, changes: Mapping[str, Any]) -> Statistics:
    try:
        index = StatisticsIndex.model_validate({**statistics.index.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join(str(part) for part in first["loc"])
        raise UserError(f"{statistics.folder}: {where}: {first['msg']}: measure effects again") from error
    write_atomically(statistics.folder / INDEX, index.model_dump_json(indent=2) + "\n")
    return Statistics(statistics.folder)


def check_addable(a: Statistics, b: Statistics) -> None:
    """Refuse to add what does not belong together.

    Raises:
        UserError: model, tokenizer, dtype, folds or what was collected differ, both saw the same windows, or what they
            hold does not add.
    """
    same = {
        "model": "models",
        "tokenizer": "tokenizers",
        "dtype": "checkpoint dtypes",
        "folds": "numbers of folds",
        "collect": "kinds of moments",
        "compute_dtype": "compute dtypes",
        "modality": "modalities",
        "window": "windows",
        "consumers": "consumers",
        "queries": "queries",
        "turned": "rotary pairs",
        "routers": "routers",
        "linears": "linears",
        "active_above": "thresholds of activity",
    }
    for field, name in same.items():
        if getattr(a.index, field) != getattr(b.index, field):
            raise UserError(f"{a.folder} and {b.folder} are of different {name}: only equal ones can be added")
    if overlapping(a.index.data, b.index.data):
        raise UserError(f"{a.folder} and {b.folder} hold the same calibration samples: they would count twice")
    if "taylor" in a.index.collect:
        raise UserError(
            f"{a.folder} and {b.folder} hold Taylor importances, absolute values of sums over samples, which do not "
            "add: calibrate once on all samples, or leave taylor out of --collect"
        )


def add_index(a: StatisticsIndex, b: StatisticsIndex) -> StatisticsIndex:
    """The index of a sum, but for its files; effects are the mean of what both know, weighted by samples."""
    shared = a.samples / (a.samples + b.samples)
    predicted = {
        name: _mean_effects(own, b.predicted[name], a.fisher / (a.fisher + b.fisher))
        for name, own in a.predicted.items()
        if name in b.predicted
    }
    return a.model_copy(
        update={
            "data": united([*a.data, *b.data]),
            "samples": a.samples + b.samples,
            "tokens": a.tokens + b.tokens,
            "fisher": a.fisher + b.fisher,
            "predicted": predicted,
            "spaces": _mean_effects(a.spaces, b.spaces, shared),
            "scores": {space: score for space, score in a.scores.items() if b.scores.get(space) == score},
            "stream": _mean_stream(a, b),
            "effects": _mean_effects(a.effects, b.effects, shared),
        }
    )


def _mean_stream(a: StatisticsIndex, b: StatisticsIndex) -> StreamDistances | None:
    """The mean over the samples of both, where both have it."""
    if a.stream is None or b.stream is None:
        return None
    share = a.fisher / (a.fisher + b.fisher)

    def mean(ours: list[list[float]], theirs: list[list[float]]) -> list[list[float]]:
        rows = zip(ours, theirs, strict=True)
        return [[share * x + (1 - share) * y for x, y in zip(own, other, strict=True)] for own, other in rows]

    return StreamDistances(
        cosine=mean(a.stream.cosine, b.stream.cosine), divergence=mean(a.stream.divergence, b.stream.divergence)
    )


def _mean_effects(
    a: Mapping[str, list[Effect]], b: Mapping[str, list[Effect]], share: float
) -> dict[str, list[Effect]]:
    """The mean of what both know at the same points; `share` is a's weight."""
    found: dict[str, list[Effect]] = {}
    for name, own in a.items():
        theirs = b.get(name, [])
        if [count for count, _ in own] == [count for count, _ in theirs]:
            pairs = zip(own, theirs, strict=True)
            found[name] = [(count, share * x + (1 - share) * y) for (count, x), (_, y) in pairs]
    return found


def add_block(folders: Sequence[Statistics], block: int) -> BlockMoments:
    """One block's moments of all folders, fold by fold."""

    def both(left: BlockMoments, right: BlockMoments) -> BlockMoments:
        sums = {name: [x + y for x, y in zip(left[name], right[name], strict=True)] for name in left}  # type: ignore[operator]
        return {name: tuple(folds) for name, folds in sums.items()}

    return reduce(both, (each.block(block) for each in folders))


def add_fisher(folders: Sequence[Statistics], block: int) -> dict[str, Fisher]:
    """The Fisher metric of one block's sites over the samples of all folders."""
    found = [each.fisher(block) for each in folders]
    return {name: reduce(add, (each[name] for each in found)) for name in found[0]}
