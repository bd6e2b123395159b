"""Going on after a stop: the files must come out byte for byte as from one run."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_prune.checkpoint.journal import JOURNAL, Journal
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from tests.forked import posix, run_forked
from tests.interrupting import interrupt_at

from .folders import writing
from .test_writer import contents, layout_of, leave_unfinished, refusal, two_files, write_all

BLOCKS, SHAPE = range(4), (64, 33)


def work(out: Path, stop: str, resume: bool) -> None:
    """Write four blocks into two shards.

    Args:
        out: folder.
        stop: where to die by SIGKILL, "BLOCK before|inside|after", or "never".
        resume: whether to go on with what is there.
    """

    def die(where: str) -> None:
        if where == stop:
            os.kill(os.getpid(), signal.SIGKILL)

    layout: dict[str, Any] = {f"model-{number}.safetensors": {} for number in range(2)}
    for block in BLOCKS:
        for part in "ab":
            layout[f"model-{block // 2}.safetensors"][f"{block}.{part}"] = (torch.bfloat16, SHAPE)
    with Staging(out, job="job", resume=resume) as staging:
        writer = CheckpointWriter(staging, layout, sharded=True)
        writer.write_text(f"note-{resume}.txt" if stop != "never" else "note.txt", "side file")
        for block in BLOCKS:
            if str(block) in writer.done:
                print("skipped", block)
                continue
            previous = writer.read([f"{block - 1}.b"])[f"{block - 1}.b"] if block else torch.ones(SHAPE).bfloat16()
            generator = torch.Generator().manual_seed(block)
            writer.write(f"{block}.a", previous + torch.randn(SHAPE, generator=generator).bfloat16())
            die(f"{block} inside")
            writer.write(f"{block}.b", torch.randn(SHAPE, generator=generator).bfloat16())
            die(f"{block} before")
            writer.commit(str(block))
            die(f"{block} after")
        writer.write_json("config.json", {"model_type": "llama"})
        die("end before")
        writer.finish()


def run(out: Path, stop: str, resume: bool = False) -> "subprocess.CompletedProcess[str]":
    return run_forked(lambda: work(out, stop, resume), Path.cwd())


@posix
def test_killed_runs_resume_to_identical_bytes(tmp_path: Path) -> None:
    assert run(tmp_path / "whole", "never").returncode == 0
    expected = contents(tmp_path / "whole")
    out = tmp_path / "out"
    for number, (stop, skipped) in enumerate([("1 inside", 0), ("3 before", 1)]):
        done = run(out, stop, resume=number > 0)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout.split("\n")[:-1] == [f"skipped {block}" for block in range(skipped)]
        assert not out.exists()
    done = run(out, "never", resume=True)
    assert done.returncode == 0, done.stderr
    assert contents(out) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def double_first(out: Path, **options: bool) -> None:
    """Write two files and double all that is in the first one."""
    files = two_files()
    names = list(next(iter(files.values())))
    with writing(out, layout_of(files), job="job", sharded=True, **options) as writer:
        if "all" not in writer.done:
            for tensors in files.values():
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
            writer.commit("all")
        if "doubled" not in writer.done:
            writer.rewrite("doubled", names, lambda read: {name: 2 * tensor for name, tensor in read.items()})
        writer.finish()


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize(("method", "call"), [("keep", 1), ("_put", 7), ("_put", 8), ("_put", 9), ("commit", 1)])
def test_what_is_half_rewritten_is_rewritten_from_what_was_there(
    tmp_path: Path, method: str, call: int, torn: bool
) -> None:
    """Neither what is doubled is doubled again, nor what is torn."""
    double_first(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, method, call)
        with pytest.raises(KeyboardInterrupt):
            double_first(tmp_path / "out")
    if torn and method == "_put":
        place = tmp_path / "out.partial" / next(iter(two_files()))
        data = place.read_bytes()
        place.write_bytes(data[:-8] + b"\xaa" * 8)
    double_first(tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


CRASHES = [RuntimeError("bug"), torch.OutOfMemoryError("out of memory"), MemoryError()]


class TestCrashes:
    """A run that fails for another reason than bad input can be resumed once a unit is done."""

    @pytest.mark.parametrize("error", CRASHES, ids=lambda error: type(error).__name__)
    def test_after_a_unit_the_work_stays_and_resumes_to_identical_bytes(self, tmp_path: Path, error: Exception) -> None:
        files = two_files()
        write_all(tmp_path / "whole", files)
        leave_unfinished(tmp_path / "out", files, error=error)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial", "whole"]
        done = list(files)[:1]
        with writing(tmp_path / "out", layout_of(files), job="job", sharded=True, resume=True) as writer:
            assert sorted(writer.done) == done
            for name, tensor in files[list(files)[1]].items():
                writer.write(name, tensor)
            writer.write_text("config.json", (tmp_path / "whole" / "config.json").read_text())
            writer.finish()
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    @pytest.mark.parametrize("error", CRASHES, ids=lambda error: type(error).__name__)
    def test_before_any_unit_nothing_is_left(self, tmp_path: Path, error: Exception) -> None:
        leave_unfinished(tmp_path / "out", two_files(), commit=False, error=error)
        assert not list(tmp_path.iterdir())
        write_all(tmp_path / "out", two_files())  # and nothing holds the folder

    @pytest.mark.parametrize("commit", [False, True])
    def test_bad_input_leaves_nothing(self, tmp_path: Path, commit: bool) -> None:
        leave_unfinished(tmp_path / "out", two_files(), commit=commit, error=UserError("bad"))
        assert not list(tmp_path.iterdir())

    def test_a_resumed_run_that_crashes_at_once_keeps_what_was_done(self, tmp_path: Path) -> None:
        files = two_files()
        leave_unfinished(tmp_path / "out", files, error=RuntimeError("bug"))
        with (
            pytest.raises(RuntimeError, match="again"),
            writing(tmp_path / "out", layout_of(files), job="job", sharded=True, resume=True),
        ):
            raise RuntimeError("again")
        with writing(tmp_path / "out", layout_of(files), job="job", sharded=True, resume=True) as writer:
            assert sorted(writer.done) == list(files)[:1]


class TestRefusals:
    def test_another_job(self, tmp_path: Path) -> None:
        leave_unfinished(tmp_path / "out", two_files(), job="another")
        assert refusal(tmp_path / "out", two_files(), resume=True) == (
            f"{tmp_path / 'out'}.partial was begun by a different job; "
            "--resume needs the same one, --overwrite starts afresh"
        )

    def test_another_layout(self, tmp_path: Path) -> None:
        leave_unfinished(tmp_path / "out", two_files())
        files = two_files()
        files["model-00002-of-00002.safetensors"]["new"] = torch.ones(1)
        assert refusal(tmp_path / "out", files, resume=True) == (
            f"{tmp_path / 'out'}.partial was begun with other tensors or shapes; --overwrite starts afresh"
        )

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"version": 1, "job": "job"})])
    def test_a_journal_that_cannot_be_read(self, tmp_path: Path, text: str) -> None:
        leave_unfinished(tmp_path / "out", two_files())
        (tmp_path / "out.partial" / JOURNAL).write_text(text)
        assert refusal(tmp_path / "out", two_files(), resume=True) == (
            f"{tmp_path / 'out'}.partial has no readable journal to resume from; --overwrite starts afresh"
        )
        write_all(tmp_path / "out", two_files(), overwrite=True)

    def test_a_folder_that_another_resumption_writes(self, tmp_path: Path) -> None:
        leave_unfinished(tmp_path / "out", two_files())
        with Staging(tmp_path / "out", job="job", resume=True) as first:
            assert refusal(tmp_path / "out", two_files(), resume=True) == (
                f"{tmp_path / 'out'}.partial is being written by another run; wait for it or stop it"
            )
            assert first.active


# ---- what was changed between two runs -------------------------------------------------------------------------------


def in_entries(out: Path, **options: Any) -> list[str]:
    """Write three entries into three shards, of which `b` also has a file beside them. Return those that were made."""
    made = []
    layout: Any = {f"{name}.safetensors": {name: (torch.float32, (5, 3))} for name in "abc"}
    with Staging(out, job="job", **options) as staging:
        writer = CheckpointWriter(staging, layout, sharded=True)
        for number, name in enumerate("abc"):
            if name in writer.done:
                continue
            made.append(name)
            if name == "b":
                writer.keep("beside", {"x": torch.ones(3)})
            writer.write(name, torch.full((5, 3), number + 1.0))
            writer.commit(name, note=number)
        if "doubled" not in writer.done:
            made.append("doubled")
            writer.rewrite("doubled", ["b", "c"], lambda read: {name: 2 * tensor for name, tensor in read.items()})
        writer.finish()
    return made


def stop_at(out: Path, method: str = "finish", call: int = 1) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, method, call)
        with pytest.raises(KeyboardInterrupt):
            in_entries(out)


def flip(path: Path, at: int = -1) -> None:
    """Change one byte of a file, and neither its length nor its time."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "made"),
    [
        (lambda folder: None, []),
        (lambda folder: flip(folder / "a.safetensors"), ["a", "b", "c", "doubled"]),
        (lambda folder: flip(folder / "b.safetensors"), ["b", "c", "doubled"]),
        (lambda folder: flip(folder / "b.safetensors", 12), ["b", "c", "doubled"]),
        (lambda folder: os.truncate(folder / "b.safetensors", 70), ["b", "c", "doubled"]),
        (lambda folder: (folder / "b.safetensors").unlink(), ["b", "c", "doubled"]),
        # What a dropped entry has rewritten (b) is not what stood there before.
        (lambda folder: flip(folder / "c.safetensors"), ["b", "c", "doubled"]),
        (lambda folder: flip(folder / "measured" / "beside"), ["b", "c", "doubled"]),
        (lambda folder: (folder / "measured" / "beside").unlink(), ["b", "c", "doubled"]),
    ],
    ids=["nothing", "first", "byte", "header", "cut", "gone", "rewritten", "beside", "beside gone"],
)
def test_what_was_changed_between_two_runs_is_made_again(tmp_path: Path, change: Any, made: list[str]) -> None:
    in_entries(tmp_path / "whole")
    stop_at(tmp_path / "out")
    change(tmp_path / "out.partial")
    assert in_entries(tmp_path / "out", resume=True) == made
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_of_several_shards_only_one_was_changed(tmp_path: Path) -> None:
    """The other shards stay as they are; the first entry that was changed is named."""
    stop_at(tmp_path / "out", "rewrite")
    flip(tmp_path / "out.partial" / "c.safetensors")
    layout: Any = {f"{name}.safetensors": {name: (torch.float32, (5, 3))} for name in "abc"}
    with writing(tmp_path / "out", layout, sharded=True, resume=True) as writer:
        assert (writer.changed, writer.done, writer.notes) == ("c", {"a", "b"}, {"a": 0, "b": 1})
        assert [writer.read([name])[name][0, 0].item() for name in "ab"] == [1.0, 2.0]


def test_of_the_tensors_of_an_entry_only_one_was_changed(tmp_path: Path) -> None:
    layout: Any = {"model.safetensors": dict.fromkeys("ab", (torch.float32, (5, 3)))}

    def stop() -> None:
        with writing(tmp_path / "out", layout, sharded=False) as writer:
            for name in "ab":
                writer.write(name, torch.ones(5, 3))
            writer.commit("both")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    flip(tmp_path / "out.partial" / "model.safetensors")
    with writing(tmp_path / "out", layout, sharded=False, resume=True) as writer:
        assert (writer.changed, writer.done) == ("both", set())


def test_new_values_that_were_changed_before_they_were_put_in_place(tmp_path: Path) -> None:
    in_entries(tmp_path / "whole")
    for call in (4, 5):  # before the first tensor is rewritten, and before the second one is
        stop_at(tmp_path / "out", "_put", call)
        flip(tmp_path / "out.partial" / "measured" / "doubled.safetensors")
        assert in_entries(tmp_path / "out", resume=True) == (["doubled"] if call == 4 else ["b", "c", "doubled"])
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")


def test_data_is_on_disk_before_the_journal_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses what was not synced: at every journal, the bytes of all its entries are."""
    events: list[tuple[str, str]] = []
    dirty: set[str] = set()
    put, synced, replaced = CheckpointWriter._put, os.fsync, Path.replace
    save = Journal.save

    def write(self: CheckpointWriter, name: str, tensor: torch.Tensor) -> str:
        dirty.add(self._plan[name].file)
        events.append(("write", name))
        return put(self, name, tensor)

    def sync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink().name
        dirty.discard(place)
        events.append(("sync", place))
        synced(descriptor)

    def replace(self: Path, target: Path) -> Path:
        assert ("sync", self.name) == events[-1], "a file took its place before it was on disk"
        events.append(("replace", Path(target).name))
        return replaced(self, target)

    def record(self: Journal) -> None:
        done = {f"{name}.safetensors" for digests in self.entries.values() for name in digests}
        assert not dirty & done, f"the journal says {dirty & done} are done"
        save(self)
        events.append(("journal", list(self.entries)[-1] if self.entries else ""))

    monkeypatch.setattr(CheckpointWriter, "_put", write)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(Journal, "save", record)
    in_entries(tmp_path / "out")
    journal = [("sync", f"{JOURNAL}.tmp"), ("replace", JOURNAL), ("sync", "out.partial")]
    own = [("write", "a"), ("sync", "a.safetensors"), *journal, ("journal", "a")]
    at = events.index(("write", "a"))
    assert events[at : at + len(own)] == own
    beside = [("sync", "beside.tmp"), ("replace", "beside"), ("sync", "measured"), ("write", "b")]
    at = events.index(("sync", "beside.tmp"))
    assert events[at : at + 4] == beside
    # New values are on disk, and known to be, before the first old byte goes.
    again = [*journal, ("journal", "c"), *[("write", name) for name in "bc"]]
    again += [*[("sync", f"{name}.safetensors") for name in "bc"], *journal, ("journal", "doubled")]
    at = len(events) - 1 - events[::-1].index(("write", "b")) - 4
    assert events[at : at + len(again)] == again
    # All files are on disk before the journal says that the folder is complete.
    rest = events[at + len(again) :]
    assert {f"{name}.safetensors" for name in "abc"} <= {name for what, name in rest[: rest.index(journal[0])]}


def test_a_journal_forgets_an_entry_with_what_came_after_it(tmp_path: Path) -> None:
    """Digests, files and notes go together."""
    journal = Journal(tmp_path, "job")
    for name in "abc":
        (tmp_path / name).write_text(name)
        journal.record(name, {f"tensor {name}": "0"}, note=name, files=[tmp_path / name])
    journal.drop_from("b")
    left = Journal.read(tmp_path)
    assert list(left.entries) == ["a", "b", "c"]
    journal.save()
    left = Journal.read(tmp_path)
    assert left.entries == {"a": {"tensor a": "0"}}
    assert [*left.files, *left.notes] == ["a", "a"]
    assert left.has_files("a")
    (tmp_path / "a").write_text("another")
    assert not left.has_files("a")
