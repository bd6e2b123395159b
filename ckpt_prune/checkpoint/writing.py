"""Writing a checkpoint tensor by tensor: shapes first, data as it comes, in place all at once or not at all."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.checkpoint.jsonfile import canonical, pretty
from ckpt_prune.checkpoint.reading import INDEX, read_tensors
from ckpt_prune.checkpoint.shard import TensorInfo, build_header, write_tensor
from ckpt_prune.checkpoint.staging import Staging, disk_failures, sync
from ckpt_prune.checkpoint.units import human_bytes
from ckpt_prune.errors import UserError

Layout = Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]

_MARGIN_BYTES = 64 * 2**20


class CheckpointWriter:
    """Writes OUT through a staging folder `OUT.partial`; use it as a context manager and end with `finish()`.

    Tensors are written in any order, in units (a block, say) that are committed. After a kill or Ctrl-C the staging
    folder stays, and the same job with `resume=True` goes on after the last committed unit: the files come out byte for
    byte as from one run. So it does after a crash, where a unit was committed. A UserError in a run that was not
    resumed, and leaving without `finish()`, removes it. OUT is untouched until `finish()`.

        with CheckpointWriter(out, layout, job=digest, sharded=True) as writer:
            for unit in units:
                if unit.name not in writer.done:
                    writer.write("model.norm.weight", tensor)
                    writer.commit(unit.name)
            writer.write_json("config.json", config)
            writer.finish()

    Args:
        out: the folder to make; its parent must exist.
        layout: for each safetensors file its tensors' dtypes and shapes.
        job: a digest of everything that determines the output; a staging folder of another job is not resumed.
        sharded: whether to write an index; without it `layout` must have one file.
        aside: files of the layout that are no part of the checkpoint: the index does not list them, and they need not
            have its suffix.
        metadata: free text for each file's header, beside `{"format": "pt"}`.
        resume: go on with a staging folder that an equal job left; without one, just start.
        overwrite: replace an existing OUT when finished, and drop what an unfinished run left.

    Raises:
        UserError: (constructor) OUT or a staging folder exists and may not be touched; (entering) no room on the disk.
        ValueError: the layout is impossible.
    """

    def __init__(
        self,
        out: Path,
        layout: Layout,
        *,
        job: str,
        sharded: bool,
        aside: Set[str] = frozenset(),
        metadata: Mapping[str, str] | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        files = len(layout.keys() - aside)
        if not sharded and files != 1:
            raise ValueError(f"{files} files need an index")
        self._sharded, self._aside = sharded, aside
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._plan: dict[str, TensorInfo] = {}
        for file, tensors in layout.items():
            if Path(file).name != file or (file not in aside and not file.endswith(".safetensors")):
                raise ValueError(f"{file!r} is not a plain safetensors file name")
            if repeated := self._plan.keys() & tensors.keys():
                raise ValueError(f"tensor {min(repeated)!r} is in two files")
            self._headers[file], header = build_header(file, tensors, {"format": "pt", **(metadata or {})})
            self._sizes[file] = header.file_bytes
            self._plan.update(header.tensors)
        digest = hashlib.sha256(
            canonical({file: data.hex() for file, data in self._headers.items()}).encode()
        ).hexdigest()
        self._staging = Staging(out, job=job, layout=digest, resume=resume, overwrite=overwrite)
        self._written = {name for names in self._staging.units.values() for name in names}
        self._pending: list[str] = []
        self._active = self._resumed = False

    @property
    def done(self) -> frozenset[str]:
        """The committed units, those of the resumed run included."""
        return frozenset(self._staging.units)

    def __enter__(self) -> "CheckpointWriter":
        self._resumed = bool(self._staging.units)
        self._staging.start()
        try:
            self._check_space()
            with disk_failures(self._staging.path):
                self._clear_strays()
                for file in self._headers:
                    self._allocate(file)
        except BaseException:
            if not self._resumed:
                self._staging.discard()
            self._staging.release()
            raise
        self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Bad input leaves nothing of a run of its own. Ctrl-C, exit requests and crashes (memory that ran out after
        # hours) are no fault of what is done already, nor is anything of what an earlier run left: it stays.
        if kind is None or (issubclass(kind, UserError) and not self._resumed) or self._crashed_early(kind):
            self.abort()
        self._staging.release()

    def _crashed_early(self, kind: type[BaseException]) -> bool:
        """Whether this is a crash that nothing was done before."""
        return issubclass(kind, Exception) and not self._staging.units

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one planned tensor, from any device, in chunks of 64 MiB.

        Raises:
            ValueError: the name is not planned or already written, or shape or dtype differ from the plan.
            UserError: the disk refuses.
        """
        self._check_active()
        if name not in self._plan:
            raise ValueError(f"tensor {name!r} is not in the layout")
        if name in self._written:
            raise ValueError(f"tensor {name!r} is already written")
        info = self._plan[name]
        with disk_failures(self._staging.path), (self._staging.path / info.file).open("r+b", buffering=0) as handle:
            write_tensor(handle, info, tensor)
        self._written.add(name)
        self._pending.append(name)

    @property
    def folder(self) -> Path:
        """Where the files grow until `finish()`."""
        return self._staging.path

    @property
    def notes(self) -> dict[str, Any]:
        """What was noted with each committed unit, those of the resumed run included."""
        return dict(self._staging.notes)

    def commit(self, unit: str, note: Any = None) -> None:
        """Record that everything written since the last commit is unit `unit` and is on disk.

        Args:
            unit: its name.
            note: JSON that a resumed run will want to know of the unit; None for nothing.

        Raises:
            ValueError: the unit is already done.
            UserError: the disk refuses.
        """
        self._check_active()
        if unit in self.done:
            raise ValueError(f"unit {unit!r} is already done")
        with disk_failures(self._staging.path):
            for file in sorted({self._plan[name].file for name in self._pending}):
                sync(self._staging.path / file)
            self._staging.record(unit, self._pending, note)
        self._pending = []

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors written before, in this run or a resumed one, with planned shape and dtype on CPU.

        Raises:
            ValueError: a tensor is not written yet.
        """
        names = list(names)
        for name in names:
            if name not in self._written:
                raise ValueError(f"tensor {name!r} is not written yet")
        return read_tensors(self._staging.path, [self._plan[name] for name in names])

    def write_json(self, name: str, value: object) -> None:
        """Write `value` as JSON to the top-level file `name`."""
        self.write_text(name, pretty(value))

    def write_text(self, name: str, text: str) -> None:
        """Write `text` as UTF-8 to the top-level file `name`."""
        with disk_failures(self._staging.path):
            self._side_file(name).write_text(text, encoding="utf-8", newline="\n")

    def copy(self, path: Path) -> None:
        """Copy a file's contents (a link's target) to the top level under its own name."""
        with disk_failures(self._staging.path):
            shutil.copyfile(path, self._side_file(path.name))

    def finish(self) -> None:
        """Write the index where there is one, and put the staging folder in OUT's place.

        Raises:
            ValueError: planned tensors were not written.
            UserError: OUT appeared meanwhile, or the disk refuses.
        """
        self._check_active()
        if missing := sorted(self._plan.keys() - self._written):
            raise ValueError(f"{len(missing)} planned tensors were not written, the first is {missing[0]!r}")
        if self._sharded:
            self.write_json(INDEX, self._index())
        with disk_failures(self._staging.path):
            self._staging.publish()
        self._active = False

    def abort(self) -> None:
        """Remove the staging folder; after `finish()` there is nothing to do."""
        if self._active:
            self._active = False
            self._staging.discard()

    def _index(self) -> dict[str, object]:
        listed = {name: info for name, info in self._plan.items() if info.file not in self._aside}
        return {
            "metadata": {
                "total_parameters": sum(info.numel for info in listed.values()),
                "total_size": sum(info.nbytes for info in listed.values()),
            },
            "weight_map": {name: listed[name].file for name in sorted(listed)},
        }

    def _check_active(self) -> None:
        if not self._active:
            raise ValueError("CheckpointWriter is used outside its `with` block, or after finish()")

    def _side_file(self, name: str) -> Path:
        self._check_active()
        if not name or Path(name).name != name or name.startswith(".") or name in self._headers:
            raise ValueError(f"{name!r} cannot be a side file")
        return self._staging.path / name

    def _check_space(self) -> None:
        folder = self._staging.path.parent
        needed = 0
        for file, size in self._sizes.items():
            path = self._staging.path / file
            # What a resumed run has claimed already is not claimed again.
            needed += max(0, size - (path.stat().st_blocks * 512 if path.exists() else 0))
        check_room(folder, needed)

    def _clear_strays(self) -> None:
        """Drop side files of a killed run: this one writes its own."""
        for path in self._staging.path.iterdir():
            if path.name not in self._headers and not path.name.startswith("."):
                path.unlink()

    def _allocate(self, file: str) -> None:
        """Give the file its header and full length, unless a resumed run has."""
        path, header, size = self._staging.path / file, self._headers[file], self._sizes[file]
        if path.exists():
            with path.open("rb") as handle:
                if path.stat().st_size == size and handle.read(len(header)) == header:
                    return
            if any(self._plan[name].file == file for name in self._written):
                raise UserError(f"{path} was changed since it was written; --overwrite starts afresh")
        with path.open("wb") as handle:
            handle.write(header)
            handle.flush()
            claim(handle.fileno(), size)


def check_room(folder: Path, needed: int, what: str = "the output needs", remedy: str = "") -> None:
    """Refuse to begin where `needed` bytes and a margin for the small files do not fit.

    Args:
        folder: where.
        needed: bytes.
        what: they are for, with a verb.
        remedy: what else can be done than to make room.

    Raises:
        UserError: with both figures.
    """
    free = shutil.disk_usage(folder).free
    needed += _MARGIN_BYTES
    if needed > free:
        raise UserError(
            f"{folder} has {human_bytes(free)} free and {what} {human_bytes(needed)}; "
            f"free space or choose another place{remedy}"
        )


def claim(descriptor: int, size: int) -> None:
    """Lengthen a file to `size`, reserving the space where the file system can."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)
