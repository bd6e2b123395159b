"""How long llama.cpp takes for a file on this machine, and for a weight of each type.

Its time does not depend on what the weights are: files of zeros are timed, for which nothing is rounded.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.common.graph_types import GgufType
from ckpt_prune.common.progress import track
from ckpt_prune.gguf.contents import Layout
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.gguf_weight import GgufWeight
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.llama_cpp import LlamaCppTask, run_llama_cpp
from ckpt_prune.gguf.types import OUTER, is_matrix, kinds_of
from ckpt_prune.recipe.sizes import Timed

REPEATS, ROUNDS = 2, 3
"""Each file is timed so often in each of so many rounds over all files, as other work comes and goes meanwhile."""
GENERATED = 32
"""Tokens of a text that are timed together."""
READ, BEHIND = 512, 64
"""Tokens of the text that is read, or that a single token stands behind, if no other number is asked for."""
_BASE: GgufType = "q8_0"
"""Type of weights that do not have the one that is timed."""
_NARROW = "fewer columns"
_SLOWEST_REST = 0.9
"""Share of a file's time that may be outside its weights: noise must not make these free."""


def time_file(file: Path, timed: Timed, context: int) -> float:
    """Return the nanoseconds that llama.cpp takes for some work, the fastest of all repeats and rounds.

    Args:
        file: GGUF file.
        timed: reading a text, or a single token behind one.
        context: most tokens that the model takes.

    Raises:
        UserError: llama.cpp cannot load the file.
    """
    return min(_time_once(file, timed, context) for _ in range(ROUNDS))


def _time_once(file: Path, timed: Timed, context: int) -> float:
    """Return the nanoseconds of the fastest of `REPEATS`."""
    generated = min(GENERATED, context // 2) if timed.single else 1
    read = min(timed.tokens or (BEHIND if timed.single else READ), context - generated)
    answer = run_llama_cpp(
        LlamaCppTask(
            model=str(file),
            context=read + generated,
            threads=torch.get_num_threads(),
            windows=[[0] * (read + generated)],
            generate=generated,
            repeats=REPEATS,
        )
    )
    return 1e9 / answer.generation_speed if timed.single else 1e9 * read / answer.prompt_speed


@dataclass(frozen=True)
class FileTimes:
    """Nanoseconds of some work on this machine.

    Attributes:
        by_kind: type → of one weight of it.
        outside: of what does not depend on how many weights there are, and of which type.
        untimed: matrices that the work hardly reads, so that their types take no time.
        used: share of the experts of a block that a token is sent to.
    """

    by_kind: Mapping[Kind, float]
    outside: float
    untimed: tuple[str, ...] = ()
    used: float = 1.0

    def of(self, name: str, kind: Kind, weights: float) -> float:
        """Return the nanoseconds of so many weights of a matrix."""
        return 0.0 if name in self.untimed else weights * _share(name, self.used) * self.by_kind[kind]

    def note(self) -> dict[str, Any]:
        """Return what a journal keeps of it."""
        return asdict(self) | {"by_kind": {kind.name: time for kind, time in self.by_kind.items()}}

    @classmethod
    def read(cls, note: Mapping[str, Any]) -> "FileTimes":
        by_kind = {Kind[name]: time for name, time in note["by_kind"].items()}
        return cls(by_kind, note["outside"], tuple(note["untimed"]), note["used"])


def time_types(
    planner: FilePlanner, kinds: Collection[Kind], timed: Timed, folder: Path, columns: int = 0
) -> FileTimes:
    """Time files of zeros: one for each type, and one with fewer columns, which tells what weights do not take.

    Args:
        planner: of the model's files.
        kinds: types in question.
        timed: the work.
        folder: for one file at a time.
        columns: of an MLP that the file with fewer has; 0 where columns stay, and nothing else need be told apart.
    """
    layout = lay_out(planner.model, _BASE)
    untimed = _untimed(layout, timed)
    counted = {
        name: weight for name, weight in layout.tensors.items() if is_matrix(name, weight) and name not in untimed
    }

    def names_for(kind: Kind) -> list[str]:
        return [name for name in counted if counted[name].shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0]

    base = Kind[_BASE.upper()]
    given = {kind: names_for(kind) for kind in {base, *kinds}}
    files = {kind.name: (layout, kinds_of(layout, _BASE)[0] | dict.fromkeys(own, kind)) for kind, own in given.items()}
    if columns:
        narrow = _narrow(layout, columns)
        files[_NARROW] = (narrow, kinds_of(narrow, _BASE)[0])
    times = _time_in_rounds(planner, files, timed, folder)

    whole, weights = times[base.name], _count(layout, given[base])
    outside = 0.0
    if columns:
        each = max(0.0, whole - times[_NARROW]) / (weights - _count(files[_NARROW][0], given[base]))
        outside = min(max(0.0, whole - each * weights), _SLOWEST_REST * whole)
    of_base = (whole - outside) / weights
    by_kind = {base: of_base}
    for kind in kinds:
        if kind != base and (own := _count(layout, given[kind])):
            rest = outside + of_base * (weights - own)
            by_kind[kind] = max(times[kind.name] - rest, (1 - _SLOWEST_REST) * of_base * own) / own
    return FileTimes(by_kind, outside, untimed, _used(layout))


def _time_in_rounds(
    planner: FilePlanner, files: Mapping[str, tuple[Layout, Mapping[str, Kind]]], timed: Timed, folder: Path
) -> dict[str, float]:
    """Return the least time of each file of zeros over all rounds, in nanoseconds."""
    times = dict.fromkeys(files, math.inf)
    for name in track([*files] * ROUNDS, "timing types in llama.cpp", unit="file"):
        layout, kinds = files[name]
        times[name] = min(times[name], _time_zeros(planner, layout, kinds, timed, folder))
    return times


def time_dense(planner: FilePlanner, timed: Timed, folder: Path) -> float:
    """Return the nanoseconds of the model's file in float16, by zeros."""
    layout = lay_out(planner.model, "f16")
    return _time_in_rounds(planner, {"f16": (layout, kinds_of(layout, "f16")[0])}, timed, folder)["f16"]


def _untimed(layout: Layout, timed: Timed) -> tuple[str, ...]:
    """Return the matrices that some work reads a row of, or once for many tokens."""
    embedding, head = OUTER
    if timed.single:
        return (embedding,) if head in layout.tensors else ()
    return tuple(name for name in OUTER if name in layout.tensors)


def _time_zeros(planner: FilePlanner, layout: Layout, kinds: Mapping[str, Kind], timed: Timed, folder: Path) -> float:
    file = folder / "zeros.gguf"
    try:
        planner.write_zeros(file, layout, _BASE, kinds)
        return _time_once(file, timed, int(layout.values["context_length"]))
    finally:
        file.unlink(missing_ok=True)


def _used(layout: Layout) -> float:
    return float(layout.values.get("expert_used_count", 1) / layout.values.get("expert_count", 1))


def _share(name: str, used: float) -> float:
    """Return the share of a matrix that a token is multiplied with."""
    return used if name.endswith("_exps.weight") else 1.0


def _count(layout: Layout, names: Collection[str]) -> float:
    """Return how many weights a token is multiplied with."""
    return sum(math.prod(layout.tensors[name].shape) * _share(name, _used(layout)) for name in names)


def _narrow(layout: Layout, columns: int) -> Layout:
    """Return a layout whose MLPs have so many columns."""
    before = layout.values["feed_forward_length"]
    before = max(before) if isinstance(before, list) else before
    tensors = {}
    for name, weight in layout.tensors.items():
        place = name.partition(".ffn_")[2]
        axis = 1 if place.startswith("down.weight") else 0 if place.startswith(("up.", "gate.")) else None
        tensors[name] = weight if axis is None else _cut(weight, axis, columns, before)
    return replace(layout, tensors=tensors, values=dict(layout.values) | {"feed_forward_length": columns})


def _cut(weight: GgufWeight, axis: int, columns: int, before: int) -> GgufWeight:
    shape = list(weight.shape)
    shape[axis] = shape[axis] // before * columns  # gate and up may be in one
    return replace(weight, shape=tuple(shape))
