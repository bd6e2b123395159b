"""Rounding the matrices of a GGUF file by what reaches them: block by block, behind the blocks that are rounded.

Every matrix is rounded by ggml with the importance of its inputs, and by error feedback (`ckpt_prune.rounding`). The
one that changes the outputs less on samples that neither has seen is taken. The file gets the very bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GgufType
from ckpt_prune.common.progress import track
from ckpt_prune.gguf.contents import Layout
from ckpt_prune.gguf.gguf_weight import GgufWeight
from ckpt_prune.gguf.layout import lay_out, with_head
from ckpt_prune.gguf.rounding import Array, encode
from ckpt_prune.gguf.types import head_of
from ckpt_prune.job.job import LiveSamples
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.measure.moment_sources import SequentialMoments
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import select_input_moments
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.model import Model
from ckpt_prune.rounding.codes import CODES, decode
from ckpt_prune.rounding.damping import damp_for
from ckpt_prune.rounding.feedback import HEAD_DAMP, importance_of, output_error, round_with_feedback
from ckpt_prune.sparsity.damping import DAMP

FOLDS = 4
"""Folds of the samples, of which the last one decides between two ways to round."""
ROWS = 128
"""Rows of a matrix that decide between them."""
_MOST_GRAMS = 2**31
"""Bytes of the Grams of all experts of a block, up to which they are rounded with error feedback."""
_UNROUNDED = (Kind.F32, Kind.F16, Kind.BF16)


@dataclass(frozen=True)
class _Part:
    """The rows of a matrix of the file that one tensor of the checkpoint gives."""

    source: str
    rows: Tensor
    source_rows: Tensor


@dataclass(frozen=True)
class Placement:
    """The weights of the checkpoint that a matrix of the file is made of, moved, and multiplied by a factor of a row.

    Attributes:
        parts: its rows, by the tensors that they are from.
        columns: column of the checkpoint for each column, (columns,) int64; -1 if it is filled up with zeros.
        factor: that the weights of each row were multiplied with, (rows, 1); 1 if it is filled up with zeros.
    """

    parts: tuple[_Part, ...]
    columns: Tensor
    factor: Tensor

    @property
    def sources(self) -> set[str]:
        return {part.source for part in self.parts}

    def place_gram(self, gram: Tensor) -> Tensor:
        """Return the Gram of the matrix's inputs from that of the checkpoint's module: filled columns read zeros."""
        real = self.columns >= 0
        placed = gram[self.columns][:, self.columns]
        return placed * real * real[:, None]

    def put_back(self, tensors: dict[str, Tensor], values: Tensor) -> None:
        """Write the weights of the matrix into the tensors that they are from, in float32."""
        real = torch.nonzero(self.columns >= 0)[:, 0]
        for part in self.parts:
            new = tensors[part.source].to(torch.float32, copy=True)
            rows = values[part.rows][:, real] / self.factor[part.rows]
            new[part.source_rows[:, None], self.columns[real]] = rows
            tensors[part.source] = new


_NUMBER = " of expert "


class _Matrices:
    """The matrices of a model's file, made of tensors as they stand now, and where they have their weights from.

    The layout is asked for what it makes of tensors that number their rows or columns; so it need not be known how each
    architecture orders them.
    """

    def __init__(self, model: Model, chosen: GgufType) -> None:
        self.now: dict[str, Tensor] = {}
        self.checkpoint = with_head(model).checkpoint
        self._shapes = {name: tuple(info.shape) for name, info in self.checkpoint.tensors.items()}
        self._value: Callable[[str], Tensor] = self.now.__getitem__
        self._sources: list[str] = []
        self.layout = lay_out(model, chosen, self._read)

    def _read(self, name: str) -> Tensor:
        self._sources.append(name)
        return self._value(name)

    def matrices(self, name: str) -> dict[str, GgufWeight]:
        """Return the matrices of a tensor, several with a number if it holds one for each expert."""
        weight = self.layout.tensors[name]
        return {f"{name}{_NUMBER}{place}": part for place, part in enumerate(weight.parts)} or {name: weight}

    def read(self, matrix: str) -> Tensor:
        """Return a matrix of the tensors in `now`."""
        return self.matrices(matrix.partition(_NUMBER)[0])[matrix].read()

    def place(self, name: str) -> Placement:
        ones, sources = self._read_as(name, lambda source: torch.ones(()).expand(self._shapes[source]))
        first = ones[:, :1]  # zeros that fill rows up are behind the others
        factor = first.masked_fill(first == 0, 1.0)

        def number(axis: int, of: str) -> Tensor:
            """Return the places of an axis (counted from 1) of the tensor `of`; 0 of others."""

            def value(source: str) -> Tensor:
                shape = self._shapes[source]
                counted = torch.arange(1, shape[axis] + 1, dtype=torch.float32) * (source == of)
                return (counted[:, None] if axis == 0 else counted).expand(shape)

            return (self._read_as(name, value)[0] / factor).amax(1 - axis).round().long() - 1

        parts = []
        for source in sources:
            rows = number(0, source)
            here = torch.nonzero(rows >= 0)[:, 0]
            parts.append(_Part(source, here, rows[here]))
        return Placement(tuple(parts), number(1, sources[0]), factor)

    def _read_as(self, name: str, value: Callable[[str], Tensor]) -> tuple[Tensor, list[str]]:
        self._sources, self._value = [], value
        try:
            return self.read(name).float(), list(dict.fromkeys(self._sources))
        finally:
            self._value = self.now.__getitem__


def has_room(model: Model, module: str, folds: int = FOLDS) -> bool:
    """Return whether Grams of what a linear module reads are summed: those of all experts of a block are held at once.

    Else it is rounded by importance alone.
    """
    modules = model.family.expert_modules
    if module not in modules:
        return True
    alike = sum(role == modules[module][1] for _, role in modules.values())
    stored = model.checkpoint.tensors
    names = [model.tensor(block, module) for block in range(model.blocks)]
    width = max(stored[name].shape[1] for name in names if name in stored)
    return folds * alike * 4 * width**2 <= _MOST_GRAMS


class Fitter:
    """Rounds the matrices of a file by samples, and keeps their bytes in a folder.

    Args:
        model: whose file it is.
        live: samples that reach its matrices.
        layout: of the file.
        chosen: type of the file.
        kinds: type of every tensor.
        folder: for the bytes; it is there.
        feedback: also try error feedback; else the importance of inputs alone counts, which needs no Grams.
        device: where blocks run; matrices are rounded on a CPU.
    """

    def __init__(
        self,
        model: Model,
        live: LiveSamples,
        layout: Layout,
        chosen: GgufType,
        kinds: Mapping[str, Kind],
        folder: Path,
        *,
        feedback: bool,
        device: torch.device,
    ) -> None:
        self.model, self._live, self._folder = model, live, folder
        self._feedback, self._device = feedback, device
        self._matrices = _Matrices(model, chosen)
        # Matrices of each head that multiply a latent vector are rounded when the file is written.
        names = [
            name
            for name, weight in layout.tensors.items()
            if kinds[name] not in _UNROUNDED and (len(weight.shape) == 2 or weight.parts)
        ]
        self._kinds = {matrix: kinds[name] for name in names for matrix in self._matrices.matrices(name)}
        self.ways: Counter[str] = Counter()
        """How many matrices are rounded in which way."""

    @cached_property
    def rounded(self) -> dict[str, Path]:
        """Matrix → file of numpy with its rows as the file has them. Made when it is asked for first."""
        model, live = self.model, self._live
        view = ModelView(model, self._device, container=container_of(model) if model.has_remote_code else None)
        folds = min(FOLDS, len(live.samples)) if self._feedback else 1
        if self._feedback and folds < 2:
            raise UserError("error feedback needs at least 2 samples, of which one is held out: give more text")
        stream = view.stream(live.samples, live.compute_dtype, folds=folds, allocate=live.allocate)
        grams = {first: self._feedback and has_room(model, first, folds) for first in model.family.inputs}
        source = SequentialMoments(stream, grams, true_sequential=True)
        files: dict[str, Path] = {}
        for block in track(range(model.blocks), "rounding", total=model.blocks):
            tensors = view.block(block)
            self._matrices.now.update(tensors)
            prefix = f"blk.{block}."
            places = {name: self._matrices.place(name) for name in self._kinds if name.startswith(prefix)}
            encoded: dict[str, Array] = {}
            readers = model.inputs(block)
            for keys in source.group_keys(list(readers)):
                moments = source.moments(block, tensors, keys)
                for first in keys:
                    linears = {model.tensor(block, module) for module in readers[first]}
                    for name in [name for name, place in places.items() if place.sources <= linears]:
                        place = places.pop(name)
                        folds_of = [self._place(each.to("cpu"), place) for each in select_input_moments(moments[first])]
                        encoded[name] = self._round(name, folds_of)
                        place.put_back(tensors, decode(encoded[name], self._kinds[name]))
            files |= self._keep(encoded)
            source.advance(block, tensors)
            for name in tensors:
                self._matrices.now.pop(name, None)
        files |= self._round_head(stream)
        return files

    def _place(self, moments: Moments, place: Placement) -> Moments:
        """Return moments of the inputs of a matrix as the file has it: squares and Gram alone are of use."""
        real = place.columns >= 0
        square = moments.square[place.columns] * real
        gram = None if moments.gram is None else place.place_gram(moments.gram)
        return Moments(moments.count, square, square, square, square, gram)

    def _round_head(self, stream: HiddenStream) -> Iterator[tuple[str, Path]]:
        """Round the head, or the embedding that is also the head, by what the head reads behind the rounded blocks."""
        name = head_of(self._matrices.layout.tensors)
        if name not in self._kinds or self._matrices.layout.embeds:
            return
        sums, place = stream.observe_head(gram=self._feedback), self._matrices.place(name)
        self._matrices.now.update(self._matrices.checkpoint.read(place.sources))
        folds = [self._place(each, place) for each in sums]
        yield from self._keep({name: self._round(name, folds, least_damp=HEAD_DAMP)}).items()

    def _keep(self, encoded: Mapping[str, Array]) -> dict[str, Path]:
        """Write rows as the file has them, those of all experts behind each other, into files of numpy."""
        rows: dict[str, list[Array]] = {}
        for matrix, part in encoded.items():
            rows.setdefault(matrix.partition(_NUMBER)[0], []).append(part)
        files: dict[str, Path] = {}
        for name, parts in rows.items():
            if len(parts) == len(self._matrices.matrices(name)):
                files[name] = self._folder / f"{name}.npy"
                with disk_failures(files[name]):
                    np.save(files[name], np.concatenate(parts))
        return files

    def _round(self, name: str, folds: Sequence[Moments], *, least_damp: float = DAMP) -> Array:
        """Round a matrix in the way that loses less on the last fold; return its rows as the file has them."""
        weight, kind = self._matrices.read(name).float(), self._kinds[name]
        seen = sum_folds(folds[:-1] or folds)
        assert isinstance(seen, Moments)
        importance, gram, held_out = importance_of(seen.square), seen.gram, folds[-1].gram

        def by_importance(rows: Tensor) -> Array:
            return np.concatenate(list(encode(name, rows, kind, importance))).reshape(len(rows), -1)

        way, encoded = "importance", None
        if self._feedback and kind in CODES and gram is not None and held_out is not None:
            damp = damp_for(weight.shape[1], seen.count, least_damp)
            encoded = round_with_feedback(weight, gram, [kind], damp)[kind]
            # Every row is rounded by itself, so that a few tell which way is better.
            some = slice(None, None, -(-len(weight) // ROWS))
            fed, weighed = encoded[some], by_importance(weight[some])
            if output_error(weight[some], fed, kind, held_out) < output_error(weight[some], weighed, kind, held_out):
                way = "error feedback"
        self.ways[way] += 1
        return by_importance(weight) if encoded is None or way == "importance" else encoded

    def describe(self) -> str:
        """Say in a line how matrices were rounded; `rounded` was asked for before."""
        counts = ", ".join(f"{count} by {way}" for way, count in sorted(self.ways.items()))
        return f"matrices are rounded by what reaches them behind the rounded blocks: {counts}"
