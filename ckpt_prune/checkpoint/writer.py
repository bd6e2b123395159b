"""Writing a checkpoint tensor by tensor: shapes first, then data in any order, then one swap into place."""

import hashlib
import shutil
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import INDEX, read_tensors
from ckpt_prune.checkpoint.disk_space import check_free_space, reserve_space
from ckpt_prune.checkpoint.files import open_input, sync
from ckpt_prune.checkpoint.journal import JOURNAL
from ckpt_prune.checkpoint.json_files import canonical_json, pretty_json
from ckpt_prune.checkpoint.shard import Stack, TensorInfo, build_header, digest_tensor, stack_shapes, write_tensor
from ckpt_prune.checkpoint.staging import SCRATCH, Staging, disk_failures

Layout = Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]


class _Pending(threading.local):
    """Tensors that a thread has written and not committed → hex SHA-256, and files that it has kept."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.files: list[Path] = []


class CheckpointWriter:
    """Writes a checkpoint into an entered staging folder, until `finish()`.

    Tensors are written in any order, and committed in entries such as a block. What an earlier run of the same job
    committed is done, and the files get the same bytes as from one run.

        with Staging(out, job=digest) as staging:
            writer = CheckpointWriter(staging, layout, sharded=True)
            for entry in entries:
                if entry.name not in writer.done:
                    writer.write("model.norm.weight", tensor)
                    writer.commit(entry.name)
            writer.write_json("config.json", config)
            writer.finish()

    Args:
        staging: entered.
        layout: dtypes and shapes of the tensors in each safetensors file.
        sharded: write an index. Without one, `layout` must have one file.
        aside: files of the layout that do not belong to the checkpoint: the index does not list them, and they may have
            another suffix.
        metadata: free text for each file's header, beside `{"format": "pt"}`.
        transposed: matrices of the layout whose files hold their transposes.
        names: tensor of the layout → its name in the file, if that differs.
        stacks: tensor of a file → how it holds several tensors of the layout.

    Attributes:
        out: final place of the folder.
        folder: in which the files grow until `finish()`.
        scratch: folder for files that the output does not hold.
        job: digest of everything that the output depends on.
        changed: first entry of the resumed run whose bytes are not those that it wrote. The journal lacks it and all
            that came after it, so that they are made again. None if there is no such entry.

    Raises:
        UserError: the run that is resumed had another layout, or the disk has no room.
        ValueError: the layout is impossible.
    """

    def __init__(
        self,
        staging: Staging,
        layout: Layout,
        *,
        sharded: bool,
        aside: Set[str] = frozenset(),
        metadata: Mapping[str, str] | None = None,
        transposed: Set[str] = frozenset(),
        names: Mapping[str, str] | None = None,
        stacks: Mapping[str, Stack] | None = None,
    ) -> None:
        self._stacks = stacks or {}
        files = len(layout.keys() - aside)
        if not sharded and files != 1:
            raise ValueError(f"{files} files need an index")
        self._sharded, self._aside = sharded, aside
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._plan: dict[str, TensorInfo] = {}
        stacked = set[str]()
        for file, tensors in layout.items():
            if Path(file).name != file or (file not in aside and not file.endswith(".safetensors")):
                raise ValueError(f"{file!r} is not a plain safetensors file name")
            if repeated := self._plan.keys() & tensors.keys():
                raise ValueError(f"tensor {min(repeated)!r} is in two files")
            layout_names = {(names or {}).get(name, name): name for name in tensors}
            shapes = {}
            for stored_name, name in layout_names.items():
                dtype, shape = tensors[name]
                shapes[stored_name] = dtype, shape[::-1] if name in transposed else shape
            stacks_here = {n: stack for n, stack in self._stacks.items() if not tensors.keys().isdisjoint(stack.parts)}
            if split := stacked & stacks_here.keys():
                raise ValueError(f"parts of {min(split)!r} are in two files")
            stacked |= stacks_here.keys()
            shapes = stack_shapes(shapes, stacks_here)
            self._headers[file], header = build_header(file, shapes, {"format": "pt", **(metadata or {})})
            self._sizes[file] = header.file_bytes
            for info in header.tensors.values():
                for stored_name, part in self._parts(info, tensors).items():
                    name = layout_names.get(stored_name, stored_name)
                    self._plan[name] = part.transpose() if name in transposed else part
        digest = hashlib.sha256(
            canonical_json({file: data.hex() for file, data in self._headers.items()}).encode()
        ).hexdigest()
        self.out, self.folder, self.scratch, self.job = staging.out, staging.path, staging.scratch, staging.journal.job
        self._staging, self._journal = staging, staging.journal
        self._pending = _Pending()
        self._side_names: set[str] = set()
        staging.settle_layout(digest)
        self.changed = self._drop_changed()
        self._written = {name for digests in self._journal.entries.values() for name in digests}
        self._check_space()
        with disk_failures(staging.path):
            self._clear_strays()
            for file in self._headers:
                self._allocate(file)

    def _parts(self, info: TensorInfo, tensors: Container[str]) -> dict[str, TensorInfo]:
        """Return the tensors that are written into a tensor of a file: itself, or its parts in the layout."""
        if info.name not in self._stacks:
            return {info.name: info}
        stack = self._stacks[info.name]
        present = [part for part in stack.parts if part in tensors]
        return {part: info.part(index, part, stack.each) for index, part in enumerate(present)}

    @property
    def done(self) -> frozenset[str]:
        """Committed entries, also those of the resumed run."""
        return frozenset(self._journal.entries)

    @property
    def side_names(self) -> frozenset[str]:
        """Names of written files without tensors, and of the index that `finish()` writes."""
        return frozenset(self._side_names | ({INDEX} if self._sharded else set()))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one planned tensor, from any device, in chunks of 64 MiB."""
        self._check_active()
        if name not in self._plan:
            raise ValueError(f"tensor {name!r} is not in the layout")
        if name in self._written:
            raise ValueError(f"tensor {name!r} is already written")
        with disk_failures(self.folder):
            self._pending.digests[name] = self._put(name, tensor)
        self._written.add(name)

    def _put(self, name: str, tensor: Tensor) -> str:
        info = self._plan[name]
        with (self.folder / info.file).open("r+b", buffering=0) as handle:
            return write_tensor(handle, info, tensor)

    def rewrite(
        self, entry: str, names: Iterable[str], change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        """Change tensors of committed entries, and record that as an entry.

        New values are on disk in a file of their own before the first old byte goes. If the run is killed in between,
        the next one takes that file, and never reads half-written tensors.

        `change` receives the named tensors and returns those of them that change.
        """
        if entry in self.done:
            raise ValueError(f"entry {entry!r} is already done")
        changed = self.scratch / f"{entry}.safetensors"
        if entry not in self._journal.files:
            new = change(self.read(names))
            self.keep(changed.name, {name: tensor.cpu().contiguous() for name, tensor in new.items()})
            self._pending.files.remove(changed)
            with disk_failures(self.folder):
                self._journal.trust(entry, [changed])
                self._journal.save()
        new = load_file(changed)
        with disk_failures(self.folder):
            digests = {name: self._put(name, tensor) for name, tensor in new.items()}
            for file in sorted({self._plan[name].file for name in new}):
                sync(self.folder / file)
            del self._journal.files[entry]
            self._journal.record(entry, digests)
            changed.unlink()

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors (contiguous, on CPU) atomically to a file of the scratch folder."""
        self._check_active()
        fresh = self.scratch / f"{name}.tmp"
        with disk_failures(self.folder):
            self.scratch.mkdir(exist_ok=True)
            save_file(dict(tensors), fresh)
            sync(fresh)
            fresh.replace(self.scratch / name)
            sync(self.scratch)
        self._pending.files.append(self.scratch / name)

    @property
    def notes(self) -> dict[str, Any]:
        """Notes of committed entries, also those of the resumed run."""
        return dict(self._journal.notes)

    def commit(self, entry: str, note: Any = None) -> None:
        """Record what this thread wrote since its last commit as an entry on disk, with JSON for a resumed run."""
        self._check_active()
        if entry in self.done:
            raise ValueError(f"entry {entry!r} is already done")
        with disk_failures(self.folder):
            for file in sorted({self._plan[name].file for name in self._pending.digests}):
                sync(self.folder / file)
            self._journal.record(entry, self._pending.digests, note, self._pending.files)
        self._pending.digests, self._pending.files = {}, []

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors that this run or the resumed one wrote, with planned shape and dtype, to CPU."""
        names = list(names)
        for name in names:
            if name not in self._written:
                raise ValueError(f"tensor {name!r} is not written yet")
        stored = read_tensors(self.folder, [self._plan[name] for name in names])
        return {name: stored[self._plan[name].name] for name in names}

    def write_json(self, name: str, value: object) -> None:
        """Write `value` as JSON to a file, perhaps in a sub-folder."""
        self.write_text(name, pretty_json(value))

    def write_text(self, name: str, text: str) -> None:
        """Write `text` as UTF-8 to a file, perhaps in a sub-folder."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write `content` to a file, perhaps in a sub-folder."""
        with disk_failures(self.folder):
            target = self._side_file(name)
            target.write_bytes(content)
            if target.parent != self.folder:
                sync(target)

    def copy(self, path: Path, name: str | None = None) -> None:
        """Copy a file, or the target of a link, under its own name or another, perhaps in a sub-folder."""
        with disk_failures(self.folder):
            target = self._side_file(name or path.name)
            shutil.copyfile(path, target)
            if target.parent != self.folder:
                sync(target)

    def finish(self) -> list[str]:
        """Write the index of a sharded checkpoint, and put the staging folder in OUT's place.

        Returns:
            Paths below OUT that this tool did not write, and that stay there.
        """
        self._check_active()
        if missing := sorted(self._plan.keys() - self._written):
            raise ValueError(f"{len(missing)} planned tensors were not written, the first is {missing[0]!r}")
        self.write_index()
        return self._staging.publish()

    def write_index(self) -> None:
        """Write the index of a sharded checkpoint, as `finish()` does, too."""
        if self._sharded:
            self.write_json(INDEX, self._index())

    def _index(self) -> dict[str, object]:
        listed = {info.name: info for info in self._plan.values() if info.file not in self._aside}
        stack_of = {part: name for name, stack in self._stacks.items() for part in stack.parts}
        return {
            "metadata": {
                "total_parameters": sum(info.numel for info in listed.values()),
                "total_size": sum(info.nbytes for info in listed.values()),
            },
            "weight_map": dict(sorted((stack_of.get(name, name), info.file) for name, info in listed.items())),
        }

    def _check_active(self) -> None:
        if not self._staging.active:
            raise ValueError("CheckpointWriter is used outside the `with` block of its staging, or after finish()")

    def _side_file(self, name: str) -> Path:
        self._check_active()
        parts = name.split("/")
        plain = all(part and Path(part).name == part and not part.startswith(".") for part in parts)
        if not plain or name in self._headers:
            raise ValueError(f"{name!r} cannot be a side file")
        self._side_names.add(name)
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _check_space(self) -> None:
        folder = self.folder.parent
        needed = 0
        for file, size in self._sizes.items():
            path = self.folder / file
            # What a resumed run has claimed already is not claimed again.
            needed += max(0, size - (path.stat().st_blocks * 512 if path.exists() else 0))
        check_free_space(folder, needed)

    def _clear_strays(self) -> None:
        # Side files and temporary ones of a killed run: this one makes its own.
        for path in self.folder.iterdir():
            if path.name in self._headers or path.name in (JOURNAL, SCRATCH):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _is_allocated(self, file: str) -> bool:
        """Return whether a file has its header and full length."""
        path, header = self.folder / file, self._headers[file]
        if not path.is_file() or path.stat().st_size != self._sizes[file]:
            return False
        with path.open("rb") as handle:
            return handle.read(len(header)) == header

    def _allocate(self, file: str) -> None:
        """Give the file its header and full length, unless the resumed run did."""
        if self._is_allocated(file):
            return
        with (self.folder / file).open("wb") as handle:
            handle.write(self._headers[file])
            handle.flush()
            reserve_space(handle.fileno(), self._sizes[file])

    def _drop_changed(self) -> str | None:
        """Drop the first entry from the journal whose bytes are not on disk, and all after it. Return its name."""
        entries, found, changed = self._journal.entries, self._digest_written(), None
        rewriting = self._names_half_rewritten()
        while True:
            expected = {name: digest for digests in entries.values() for name, digest in digests.items()}
            bad = {name for name, digest in expected.items() if found.get(name) != digest} - rewriting
            if not bad:
                return changed
            # Tensors that a dropped entry has rewritten are not those of the entries before it either: look again.
            changed, rewriting = next(entry for entry, digests in entries.items() if bad & digests.keys()), set()
            self._journal.drop_from(changed)
            entries = self._journal.entries

    def _digest_written(self) -> dict[str, str]:
        """Return the hex SHA-256 of all tensors in the journal, as they are on disk."""
        digests = {}
        names = dict.fromkeys(name for digests in self._journal.entries.values() for name in digests)
        for file in dict.fromkeys(self._plan[name].file for name in names):
            if self._is_allocated(file):
                with open_input(self.folder / file) as handle:
                    for name in (name for name in names if self._plan[name].file == file):
                        digests[name] = digest_tensor(handle, self._plan[name])
        return digests

    def _names_half_rewritten(self) -> set[str]:
        """Return the tensors whose new values are in a file, since a run was killed while it rewrote them.

        A file that is not as it was written is forgotten.
        """
        names: set[str] = set()
        for entry in self._journal.files.keys() - self._journal.entries.keys():
            if self._journal.has_files(entry):
                names |= load_file(self.scratch / f"{entry}.safetensors").keys()
            else:
                del self._journal.files[entry]
        return names
