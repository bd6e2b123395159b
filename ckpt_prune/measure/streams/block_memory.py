"""Results of a block's modules, kept so that its next run starts at the first module whose weights changed."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.measure.streams.experts import SplitExperts


class AllSeenError(Exception):
    """Raised by a hook to stop a block once all that is asked for has been seen."""


@dataclass(frozen=True)
class BlockPiece:
    """A module of a block that runs once in it, apart from the others.

    Attributes:
        path: in the block.
        last: path of the linear module whose output is the piece's own; None if there is none, or more is done to it.
        nones: how many times None stands beside the output in a tuple; None if the output is no tuple.
    """

    path: str
    last: str | None = None
    nones: int | None = None

    def holds(self, path: str) -> bool:
        """Return True if a parameter or module is the piece's, or the piece itself."""
        return f"{path}.".startswith(f"{self.path}.")

    def passes_to(self, consumer: str) -> str | None:
        """Return the path of the input of a linear module in the piece, or of the output that one behind it may read.

        None if it is in the piece, and not its last, or if the output is no tensor alone.
        """
        if self.holds(consumer):
            return consumer if consumer == self.last else None
        return self.path if self.nones is None else None


@dataclass(frozen=True)
class Structure:
    """Pieces of a block in the order in which they run, and the paths of all modules that are called once in a run."""

    pieces: tuple[BlockPiece, ...] = ()
    single: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Kept:
    """A module's input or output. It is void once a tensor was changed in place.

    Attributes:
        columns: of a tensor, those that the module still has, int64; None if it has all.
    """

    value: Any
    versions: tuple[int, ...]
    columns: Tensor | None = None

    @property
    def valid(self) -> bool:
        return self.versions == _versions(self.value)

    def narrow(self) -> Any:
        """Return it without the columns that are gone."""
        return self.value if self.columns is None else self.value.index_select(-1, self.columns.to(self.value.device))

    def select(self, columns: Tensor | None) -> "_Kept":
        """Return it with these of the columns that it has; None stands for all."""
        if columns is None:
            return self
        return replace(self, columns=columns if self.columns is None else self.columns[columns])


class BlockMemory:
    """Outputs of the pieces of one block, and inputs of their last linear modules, for every batch of a stream.

    A piece runs again only if its own weights changed, or those of a piece before it. If only its last linear module
    changed, that alone runs. The same holds if that module lost columns, and the modules before it lost the rows of the
    same units: then columns of the old tensor are taken. The numbers are those of a whole run. Some libraries add up in
    another order where a product has fewer columns. So columns are taken only if the first batch of their shape gives
    what a whole run gives, bit for bit. Modules whose order is unknown always run.

    Args:
        fits: says whether there is room for a tensor, and counts it if so.

    Attributes:
        batch: the number of the one that runs.
    """

    def __init__(self, fits: Callable[[Tensor], bool]) -> None:
        self._fits = fits
        self._structures: dict[Any, Structure] = {}
        self._state: Any = None
        self._tensors: Mapping[str, Tensor] = {}
        self._kept: dict[tuple[str, int], _Kept] = {}
        self._exact: dict[tuple[str, torch.Size], bool] = {}  # whether columns are those of a whole run
        self.batch = 0

    def clear(self) -> None:
        self._kept.clear()
        self._exact.clear()
        self._state, self._tensors = None, {}

    def structure(self, block: nn.Module, probe: Callable[[], Structure]) -> Structure:
        """Return the structure of blocks of the same classes; `probe` finds that of the first one."""
        classes = tuple((path, type(module)) for path, module in block.named_modules())
        if classes not in self._structures:
            self._structures[classes] = probe()
        return self._structures[classes]

    @contextmanager
    def attach_block(
        self,
        block: nn.Module,
        structure: Structure,
        state: Any,
        tensors: Mapping[str, Tensor],
        find_paths: Callable[[str], Collection[str]],
        find_makers: Callable[[], Mapping[str, Collection[str]]],
        *,
        keep: bool,
    ) -> Iterator[None]:
        """Let a block take from memory what it would compute again. What is watched by hooks runs.

        Args:
            block: built of `tensors`; hooks are on it already.
            structure: of the block.
            state: equal to that of the run before if the same states enter the same block.
            tensors: on-disk name → tensor.
            find_paths: on-disk name → paths in the block of its parameters.
            find_makers: gives path of a linear module → on-disk names of the tensors that make its input: row j of
                them makes column j, and no other row does.
            keep: whether another run will follow.
        """
        if state == self._state:
            self._forget(structure, self._tensors, tensors, find_paths, find_makers)
        else:
            self._kept.clear()
        self._state, self._tensors = state, dict(tensors)
        handles = []
        pieces = [(piece, block.get_submodule(piece.path)) for piece in structure.pieces]
        try:
            for piece, module in pieces:
                watched = {path for path, inner in module.named_modules(prefix=piece.path) if _has_hooks(inner)}
                last = None if piece.last is None else block.get_submodule(piece.last)
                forward: Any = partial(self._run, piece, module.forward, last, watched, keep)
                module.forward = forward
                if piece.last is not None and last is not None and keep:
                    handles.append(last.register_forward_pre_hook(partial(self._see_input, piece.last), prepend=True))
            yield
        finally:
            for _, module in pieces:
                module.__dict__.pop("forward", None)  # that of the class is there again
            for handle in handles:
                handle.remove()

    def _run(
        self,
        piece: BlockPiece,
        forward: Callable[..., Any],
        last: nn.Module | None,
        watched: Collection[str],
        keep: bool,
        *args: Any,
        **options: Any,
    ) -> Any:
        output = None if watched else self._find(piece.path)
        if output is not None and self._is_exact(piece.path, output):
            return output.narrow()
        inner = self._find(piece.last) if piece.last and all(path == piece.last for path in watched) else None
        if piece.last and last is not None and inner is not None and self._is_exact(piece.last, inner):
            result = last(inner.narrow())
            value = result if piece.nones is None else (result, *[None] * piece.nones)
        else:
            with self._compare_input(piece.last, last, inner):
                value = forward(*args, **options)
            if output is not None:
                self._compare(piece.path, output, value)
        if keep and self._keep(piece.path, value):
            self._kept.pop((piece.last or "", self.batch), None)
        return value

    def _find(self, path: str) -> _Kept | None:
        kept = self._kept.get((path, self.batch))
        return kept if kept is not None and kept.valid else None

    def _is_exact(self, path: str, kept: _Kept) -> bool:
        return kept.columns is None or self._exact.get((path, kept.value.shape), False)

    def _compare(self, path: str, kept: _Kept, whole: Tensor) -> None:
        self._exact[path, kept.value.shape] = torch.equal(kept.narrow(), whole)

    @contextmanager
    def _compare_input(self, path: str | None, last: nn.Module | None, inner: _Kept | None) -> Iterator[None]:
        """Note whether the columns of an input that is there are what a whole run hands to a piece's last module."""
        if path is None or last is None or inner is None:
            yield
            return
        kept = inner

        def compare(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self._compare(path, kept, args[0])

        handle = last.register_forward_pre_hook(compare, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _see_input(self, path: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        remembered = self._kept.get((path, self.batch))
        if remembered is None or remembered.columns is not None or remembered.value is not args[0]:
            self._keep(path, args[0])

    def _keep(self, path: str, value: Any) -> bool:
        tensors = _tensors(value)
        fits = tensors is not None and all(self._fits(tensor) for tensor in tensors)
        if fits:
            self._kept[path, self.batch] = _Kept(value, _versions(value))
        return fits

    def _forget(
        self,
        structure: Structure,
        before: Mapping[str, Tensor],
        now: Mapping[str, Tensor],
        find_paths: Callable[[str], Collection[str]],
        find_makers: Callable[[], Mapping[str, Collection[str]]],
    ) -> None:
        """Forget what depends on tensors that changed."""
        if not self._kept:
            return
        changed = [name for name in {**before, **now} if not are_same(before.get(name), now.get(name))]
        paths = {path for name in changed for path in find_paths(name) or [name]}
        kept: dict[str, Tensor | None] = {}  # path → the columns that stay, None for all
        if all(any(piece.holds(path) for piece in structure.pieces) for path in paths):
            for piece in structure.pieces:
                parents = {path.rpartition(".")[0] for path in paths if piece.holds(path)}
                if piece.last is not None and parents <= {piece.last}:
                    kept[piece.last] = None
                elif parents:
                    kept |= _find_narrower(piece, parents, before, now, find_paths, find_makers())
                if parents:
                    break
                kept[piece.path] = None
        self._kept = {key: value.select(kept[key[0]]) for key, value in self._kept.items() if key[0] in kept}
        self._exact.clear()


def _find_narrower(
    piece: BlockPiece,
    parents: set[str],
    before: Mapping[str, Tensor],
    now: Mapping[str, Tensor],
    find_paths: Callable[[str], Collection[str]],
    makers: Mapping[str, Collection[str]],
) -> dict[str, Tensor]:
    """Find what a piece hands on that has lost nothing but columns, and the columns that stay.

    Args:
        parents: paths of the modules in the piece whose tensors changed.
        before, now: on-disk name → tensor.
        find_paths: as in `BlockMemory.attach_block`.
        makers: what `find_makers` gives there.
    """
    narrower: dict[str, Tensor] = {}
    for consumer, names in makers.items():
        inside = {path.rpartition(".")[0] for name in names for path in find_paths(name)}
        passed = piece.passes_to(consumer)
        if passed is not None and parents & inside and parents <= inside | {consumer}:
            columns = find_rows(*([each[name] for name in names if name in each] for each in (before, now)))
            if columns is not None:
                narrower[passed] = columns
    return narrower


def find_structure(block: nn.Module, linears: Collection[str], run: Callable[[], Any]) -> Structure:
    """Find the structure of a block by watching a run.

    Args:
        block: without hooks.
        linears: paths of its linear modules.
        run: runs it.
    """
    calls: dict[str, list[_Call]] = {}

    def see(path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        first, *others = output if isinstance(output, tuple) and output else (output,)
        if not isinstance(first, Tensor) or any(other is not None for other in others):
            calls.setdefault(path, []).append(_Call())
            return
        inside = [linear for linear in linears if linear in calls and linear != path and BlockPiece(path).holds(linear)]
        lasts = [linear for linear in inside if calls[linear][0].gave(first)]
        nones = len(others) if isinstance(output, tuple) else None
        calls.setdefault(path, []).append(_Call(weakref.ref(first), first._version, nones, lasts[0] if lasts else None))

    modules = {path: module for path, module in block.named_modules() if path}
    handles = [module.register_forward_hook(partial(see, path)) for path, module in modules.items()]
    run()
    for handle in handles:
        handle.remove()
    single = {path: of_module[0] for path, of_module in calls.items() if len(of_module) == 1}

    order = list(calls)  # of a dict: in which modules have first ended
    return Structure(
        tuple(sorted(_split(block, "", linears, calls, single), key=lambda piece: order.index(piece.path))),
        frozenset(single),
    )


def _split(
    block: nn.Module,
    parent: str,
    linears: Collection[str],
    calls: Mapping[str, list["_Call"]],
    single: Mapping[str, "_Call"],
) -> Iterator[BlockPiece]:
    """Yield the pieces below a module. It is no closure: one that calls itself would keep the block in a circle."""
    for name, child in block.get_submodule(parent).named_children():
        path = f"{parent}.{name}".removeprefix(".")
        inside = {linear for linear in linears if BlockPiece(path).holds(linear)}
        call = single.get(path)
        if call is not None and next(child.parameters(), None) is not None:
            last = call.last if call.last in single else None
            if last or inside <= {path} or isinstance(child, SplitExperts):
                yield BlockPiece(path, last, call.nones)
                continue
        if call is not None or path not in calls:
            yield from _split(block, path, linears, calls, single)


@dataclass(frozen=True)
class _Call:
    """The output of a module: a tensor, alone or followed by `nones` in a tuple. `last` is the linear that made it."""

    output: Callable[[], Tensor | None] = lambda: None
    version: int = 0
    nones: int | None = None
    last: str | None = None

    def gave(self, tensor: Tensor) -> bool:
        """Return True if it gave this tensor, which was not changed since."""
        return self.output() is tensor and self.version == tensor._version


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _tensors(value: Any) -> list[Tensor] | None:
    """Return the tensors of a module's input or output; None if it has anything else than these and None."""
    values = value if isinstance(value, tuple) else (value,)
    if not all(each is None or isinstance(each, Tensor) for each in values):
        return None
    return [each for each in values if each is not None]


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in _tensors(value) or ())


def find_rows(before: Sequence[Tensor], now: Sequence[Tensor]) -> Tensor | None:
    """Return the rows of some tensors, one beside the other, that others consist of; None if they have more than these.

    Args:
        before: (n, …) each.
        now: (m, …) each, of the same types.

    Returns:
        m numbers, int64. Of rows that are equal in all tensors it is the last one.
    """
    if len(before) != len(now) or any(len({len(tensor) for tensor in each}) != 1 for each in (before, now)):
        return None
    places = {row: place for place, row in enumerate(_rows(before))}
    numbers = [places.get(row) for row in _rows(now)]
    return None if None in numbers else torch.tensor(numbers)


def _rows(tensors: Sequence[Tensor]) -> Iterator[tuple[bytes, ...]]:
    """Yield the bytes of each row of several tensors."""
    flat = [tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8).numpy() for tensor in tensors]
    return zip(*([row.tobytes() for row in tensor] for tensor in flat), strict=True)


def are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return True if two tensors, either of which may be missing, have the same type and values."""
    return one is other or (
        one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)
    )
