"""One fault in one command, and what must hold after it."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ckpt_prune
from ckpt_prune.checkpoint.journal import JOURNAL, is_unfinished_run
from ckpt_prune.cli.main import main
from ckpt_prune.common.filenames import VALIDATION
from tests.faults.jobs import JOBS, THEIRS, Job, lay
from tests.faults.shim import REACHED, SHRUNK, SIGNALS, Fault, Operation, Shim, disturb, mount
from tests.forked import Child, begin
from tests.graphs import traced_before
from tests.hub_server import Hub, talk_to
from tests.reports import comparable

ROOM = 2**28
"""Bytes of a disk of a job's own: outputs are refused where 64 MiB are not left beside them."""
Files = dict[str, bytes]
_TOOL = Path(ckpt_prune.__file__).parent
_HEARD = [getattr(signal, name) for name in SIGNALS[1:]]


@dataclass(frozen=True)
class Ran:
    """A command that ended: its exit code (negative: the signal that killed it) and what it said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Reference:
    """A job without a fault: its files, and every operation on its output and on what it is given."""

    before: Files
    after: Files
    seen: tuple[Operation, ...]
    seconds: float


class Machine:
    """Runs jobs in copies of this process, in folders of their own.

    Args:
        folder: with `inputs`, as `make_inputs` wrote it.
        hub: that jobs with a `repo` push to.
        mounts: whether disks of a few pages can be mounted here, and are to be.
        seconds: the longest that any command may take, for campaigns that look for what hangs.
    """

    def __init__(
        self, folder: Path, hub: Hub | None = None, *, mounts: bool = False, seconds: float | None = None
    ) -> None:
        self.folder, self.inputs, self.hub, self.mounts = folder, folder / "inputs", hub, mounts
        self._seconds = seconds
        self._references: dict[str, Reference] = {}
        self._graphs = dict.fromkeys(("export", "export-again", "export-int8"), self.inputs / "onnx")
        self.untouched = _stamps(self.inputs)
        self._count = 0

    def reference(self, name: str) -> Reference:
        """A job without a fault; once."""
        if name not in self._references:
            job, place = JOBS[name], self.place(name)
            before = files_of(place)
            seen = place.with_suffix(".seen")
            began = time.monotonic()
            ran = self.run(name, place, job.arguments, None, seen)
            seconds = time.monotonic() - began
            if ran.code != 0:
                raise AssertionError(f"{name} fails without a fault: {ran.err or ran.out}")
            operations = tuple(Operation(*record) for record in json.loads(seen.read_text()))
            job_reference = Reference(before, files_of(place), operations, seconds)
            self._references[name] = job_reference
            if job.graph and name not in self._graphs:
                self._graphs[name] = self.folder / f"graph-{name}"
                shutil.copytree(place / job.out / "onnx", self._graphs[name])
            shutil.rmtree(place)
        return self._references[name]

    def run(
        self,
        name: str,
        place: Path,
        arguments: tuple[str, ...],
        fault: Fault | None = None,
        seen: Path | None = None,
        strike: Callable[[Child], None] = lambda child: None,
    ) -> Ran:
        """A command in a copy of this process.

        Args:
            name: of the job.
            place: the working folder.
            arguments: of the command line.
            fault: what happens to it.
            seen: file for the operations that it did.
            strike: sends a signal to it when its time has come.
        """

        def work() -> None:
            os.chdir(place)
            tempfile.tempdir = str(place)
            shim = Shim((place, place.parent / "inputs"), fault)
            with pytest.MonkeyPatch.context() as patch:
                if name in self._graphs:
                    traced_before(patch, self._graphs[name])
                if self.hub is not None:
                    talk_to(self.hub, self.folder / "hf", patch)
                shim.install()
                _hear()
                try:
                    main(arguments, "ckpt-prune")
                except KeyboardInterrupt as error:
                    if _was_raised_in_tool(error):
                        raise
                    raise SystemExit(128 + signal.SIGINT) from None
                finally:
                    if seen is not None:
                        shim.off()
                        seen.write_text(json.dumps([[operation.what, operation.path] for operation in shim.seen]))

        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        child = begin(work, place.parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        strike(child)
        done = child.ended(self._seconds)
        if torch.version.cuda and any(phrase in done.stderr for phrase in ("Autograd-and-Fork", "c10::Error")):
            pytest.skip("what has trained in a CUDA build of torch cannot be copied: run these tests with a CPU build")
        if JOBS[name].repo is not None:
            self._fetch(JOBS[name], place)
        return Ran(done.returncode, done.stdout, done.stderr)

    def _fetch(self, job: Job, place: Path) -> None:
        """Replace the job's output folder by what the Hub has of its repository now."""
        assert self.hub is not None
        shutil.rmtree(place / job.out, ignore_errors=True)
        repo = self.hub.repos.get(str(job.repo))
        for name, data in ({} if repo is None else repo.files).items():
            if name != ".gitattributes":  # the Hub's own
                path = place / job.out / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def faulty(self, name: str, fault: Fault, then: str) -> list[str]:
        """Run a job with a fault, then what a user would do; what does not hold, in lines.

        Args:
            name: of the job.
            fault: which.
            then: "resume" or "overwrite".
        """
        reference, job, place = self.reference(name), JOBS[name], self.place(name)
        try:
            ran = self.run(name, place, job.arguments, fault)
            return self._judged(job, name, place, reference, ran, _list_allowed_codes(fault), then)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def shrunk(self, name: str, at: int, then: str) -> list[str]:
        """The same on a disk of its own, whose room ends at that operation; when the next run begins there is more."""
        reference, job = self.reference(name), JOBS[name]
        self._count += 1
        place = self.folder / f"at-{self._count}"
        place.mkdir()
        try:
            mount(place, ROOM, "-t", "tmpfs", "tmpfs")
            lay(job, self.inputs, place)
            ran = self.run(name, place, job.arguments, Fault(at, SHRUNK, str(place)))
            wrong = [*_code_faults(ran, {0, 2}), *_place_faults(job, place, reference, ran)]
            mount(place, ROOM, options="remount,")
            return wrong + list(self._after_faults(job, name, place, reference, then))
        finally:
            subprocess.run(["umount", "--lazy", place], check=False)
            shutil.rmtree(place, ignore_errors=True)

    def struck(self, name: str, number: int, seconds: float, then: str) -> list[str]:
        """The same for a signal that comes after some time."""

        def strike(child: Child) -> None:
            time.sleep(seconds)
            child.send(number)

        return self._struck(name, number, then, None, strike)

    def struck_from(self, name: str, number: int, at: int, then: str) -> list[str]:
        """The same for a signal that comes from outside, once a job has begun an operation."""
        reached, writer = os.pipe()

        def strike(child: Child) -> None:
            os.close(writer)
            os.read(reached, 1)
            os.close(reached)
            child.send(number)

        return self._struck(name, number, then, Fault(at, REACHED, str(writer)), strike)

    def _struck(
        self, name: str, number: int, then: str, fault: Fault | None, strike: Callable[[Child], None]
    ) -> list[str]:
        reference, job, place = self.reference(name), JOBS[name], self.place(name)
        try:
            ran = self.run(name, place, job.arguments, fault, strike=strike)
            # Before Python handles signals the system does, which is the same to a shell.
            allowed = {-number, 0} if number == signal.SIGKILL else {-number, 128 + number, 0}
            return self._judged(job, name, place, reference, ran, allowed, then)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def disturbed(self, name: str, at: int, how: str, which: str) -> list[str]:
        """The same for an input that another process changes meanwhile.

        What comes out is made of the old one or of the new one, and of no mixture.

        Args:
            name: of the job.
            at: which operation comes after the change.
            how: one of DISTURBED.
            which: the input, below the inputs.
        """
        reference, job = self.reference(name), JOBS[name]
        apart = self._apart(name)
        place = apart / "at"
        try:
            ran = self.run(name, place, job.arguments, Fault(at, how, str(apart / "inputs" / which)))
            # transformers maps the files of whole models: the system ends who reads behind the end of one.
            wrong = list(_code_faults(ran, {0, 2, -signal.SIGBUS} if how == "cut" else {0, 2}))
            if ran.code == 0 and files_of(place) != reference.after:
                anew = self._apart(name)
                disturb(anew / "inputs" / which, how)
                again = self.run(name, anew / "at", job.arguments)
                if again.code != 0 or files_of(place) != files_of(anew / "at"):
                    wrong.append(
                        f"a mixture: {_difference(files_of(place), reference.after)} {again.err.strip()[-200:]}"
                    )
                shutil.rmtree(anew)
            elif ran.code != 0:
                wrong += _place_faults(job, place, reference, ran)
                shutil.copy(self.inputs / which, apart / "inputs" / which)
                wrong += self._after_faults(job, name, place, reference, "resume")
            return wrong
        finally:
            shutil.rmtree(apart, ignore_errors=True)

    def _apart(self, name: str) -> Path:
        """A folder with inputs of its own, and a job's place beside them."""
        self._count += 1
        self._empty_hub()
        apart = self.folder / f"apart-{self._count}"
        shutil.copytree(self.inputs, apart / "inputs", symlinks=True)
        lay(JOBS[name], self.inputs, apart / "at")
        return apart

    def place(self, name: str) -> Path:
        self._count += 1
        self._empty_hub()
        place = self.folder / f"at-{self._count}"
        lay(JOBS[name], self.inputs, place)
        return place

    def _empty_hub(self) -> None:
        if self.hub is not None:
            self.hub.repos.clear()
            self.hub.blobs.clear()

    def _judged(
        self, job: Job, name: str, place: Path, reference: Reference, ran: Ran, allowed: set[int], then: str
    ) -> list[str]:
        wrong = [*_code_faults(ran, allowed), *_place_faults(job, place, reference, ran)]
        wrong += self._after_faults(job, name, place, reference, then)
        if _stamps(self.inputs) != self.untouched:
            wrong.append("an input was touched")
            self.untouched = _stamps(self.inputs)
        return wrong

    def _after_faults(self, job: Job, name: str, place: Path, reference: Reference, then: str) -> Iterator[str]:
        """Yield what is wrong after another run, or two."""
        attempts = []
        for option in _attempts(job, then):
            ran = self.run(name, place, (*(a for a in job.arguments if a != "--overwrite"), *option))
            attempts.append(f"{' '.join(option) or 'again'}: {ran.code} {ran.err.strip()[-300:]}")
            if ran.code == 0 or (job.fixed and files_of(place) == reference.after):
                break
            if ran.code != 2 or "Traceback" in ran.err or "--overwrite" not in ran.err:
                yield f"the next run: {'; '.join(attempts)}"
        else:
            yield f"no run ends well: {'; '.join(attempts)}"
            return
        files = files_of(place)
        if files != reference.after:
            yield f"after {'; '.join(attempts)}: {_difference(files, reference.after)}"


def _hear() -> None:
    """Let signals come, which waited for a command that they can be sent to."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def _was_raised_in_tool(error: KeyboardInterrupt) -> bool:
    """Whether Ctrl-C came behind the first line of this tool; before it nobody can make a line of it but Python."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(Path(frame.f_code.co_filename).is_relative_to(_TOOL) for frame in frames)


def can_mount(folder: Path) -> bool:
    """Whether this process may put a disk of its own below a folder."""
    place = folder / "mounted"
    place.mkdir()
    try:
        mount(place, ROOM, "-t", "tmpfs", "tmpfs")
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)
        place.rmdir()
    return True


def _list_allowed_codes(fault: Fault) -> set[int]:
    if fault.what in SIGNALS:
        number = getattr(signal, fault.what)
        return {-number} if fault.what == "SIGKILL" else {128 + number}
    return {"short": {0}, "torn-SIGKILL": {-signal.SIGKILL}}.get(fault.what, {2, 0})


def _attempts(job: Job, then: str) -> list[tuple[str, ...]]:
    """List the commands that a user tries one after the other."""
    if job.fixed:
        return [()]
    if then == "overwrite":
        return [("--overwrite",)]
    return [("--resume",) if job.resumable else (), ("--overwrite",)]


def _code_faults(ran: Ran, allowed: set[int]) -> Iterator[str]:
    lines = ran.err.strip().splitlines()
    if ran.code not in allowed:
        yield f"exit code {ran.code}, not {sorted(allowed)}: {' '.join(lines)[-400:]}"
    if "Traceback" in ran.err or "Exception ignored" in ran.err:
        yield f"a traceback: {' | '.join(lines)[-600:]}"
    elif ran.code == 2 and sum(line.startswith("Error: ") for line in lines) != 1:
        yield f"not one line: {lines}"


def _place_faults(job: Job, place: Path, reference: Reference, ran: Ran) -> Iterator[str]:
    """Yield what is wrong in the folder after a fault, before another run."""
    files = files_of(place)
    if ran.code == 0:
        if files != reference.after:
            yield f"exit code 0, and {_difference(files, reference.after)}"
        return
    out = _below(files, job.out)
    aside = f".{job.out}.ckpt_prune-replaced"
    new = _below(reference.after, job.out)
    exported = (f"{job.out}/onnx/", f"{job.out}/model-f32.gguf")
    without = {name: data for name, data in new.items() if not name.startswith(exported)}
    # What was killed never stands there without its exports; what cannot be exported does.
    finished = [new, *([without] if ran.code == 2 else [])]
    if f"{aside}/{THEIRS}" in files:  # what is not this tool's moves last
        finished += [{name: data for name, data in tree.items() if name != f"{job.out}/{THEIRS}"} for tree in finished]
    settled_files = {
        name: data
        for name, data in out.items()
        if not name.startswith((f"{job.out}/onnx.partial/", f"{job.out}/{JOURNAL}", f"{job.out}/.model-f32.gguf."))
    }
    if out and settled_files not in (_below(reference.before, job.out), *finished):
        yield f"{job.out} is neither old nor new: {_difference(out, _below(reference.after, job.out))}"
    if ran.code < 0:
        return
    strays = {name.split("/")[0] for name in files} - {job.out}
    if not out and job.old and aside not in strays:
        yield f"{job.out} is gone"
    for name in sorted(strays):
        if name == f"{job.out}.partial" and (job.resumable or job.graph):
            if not is_unfinished_run(place / name):
                yield f"{name} has no journal: {sorted(_below(files, name))[:4]}"
        elif not name.startswith(f".{job.out}.ckpt_prune-"):
            yield f"{name} is left: {sorted(_below(files, name))[:4]}"


def files_of(folder: Path) -> Files:
    """Every file's bytes but for what a run took; a folder without files stands for itself."""
    contents: Files = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            if not any(path.iterdir()):
                contents[f"{name}/"] = b""
        elif path.name == VALIDATION:
            contents[name] = b""
        elif path.name != JOURNAL:
            contents[name] = comparable(path)
    return contents


def _below(files: Files, name: str) -> Files:
    return {path: data for path, data in files.items() if path.split("/")[0] == name}


def _difference(files: Files, expected: Files) -> str:
    parts = {
        "too many": sorted(files.keys() - expected.keys()),
        "missing": sorted(expected.keys() - files.keys()),
        "other": sorted(name for name in files.keys() & expected.keys() if files[name] != expected[name]),
    }
    return ", ".join(f"{what}: {names[:4]}" for what, names in parts.items() if names)


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    stamps = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        stamps[str(path)] = (stat.st_size, stat.st_mtime_ns)
    return stamps
