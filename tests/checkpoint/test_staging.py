"""The staging folder serves outputs of other kinds than checkpoints; the rest is tested through the writers."""

import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from ckpt_prune.checkpoint import locks
from ckpt_prune.checkpoint.folder_kinds import EXPORT_KIND, OUTPUT_KIND, FolderKind
from ckpt_prune.checkpoint.staging import Staging, disk_failures
from ckpt_prune.common.errors import DiskError, UserError
from tests import refusals

KINDS = [OUTPUT_KIND, EXPORT_KIND, FolderKind("sums.json", "a folder of sums", unfinished="dropped")]


def staging(out: Path, *, resume: bool = False, overwrite: bool = False, **more: Any) -> Staging:
    return Staging(out, job="job", resume=resume, overwrite=overwrite, **more)


refusal = partial(refusals.refusal, staging)


def folder(path: Path, record: str, files: list[str], **more: Any) -> Path:
    path.mkdir()
    (path / record).write_text(json.dumps({"files": dict.fromkeys(files, ""), **more}))
    for name in files:
        (path / name).write_text(name)
    return path


def kill(run: Staging) -> None:
    """Leave what a kill leaves of a run that has begun."""
    run.__enter__()
    run.release()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.record)
def test_a_folder_with_its_record_is_replaced(tmp_path, kind):
    out = folder(tmp_path / "out", kind.record, ["a", "b"])
    for resume in (False, True):
        assert refusal(out, kind=kind, resume=resume) == f"{out} exists; --overwrite replaces it, or give another -o"
    with staging(out, overwrite=True, kind=kind) as run:
        (run.path / "new").write_text("new")
        assert {path.name for path in out.iterdir()} == {"a", "b", kind.record}
        assert run.publish() == []
    assert [path.name for path in out.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "it has no %s"),
        ("", "its %s is damaged"),
        ("[]", "its %s is damaged"),
        ("{}", "its %s is damaged"),
        ('{"files": 3}', "its %s is damaged"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.record)
def test_a_folder_without_a_record_is_never_replaced(tmp_path, kind, overwrite, text, reason):
    out = folder(tmp_path / "out", "config.json", ["model.safetensors", "model.onnx"])
    if text is not None:
        (out / kind.record).write_text(text)
    assert refusal(out, overwrite=overwrite, kind=kind) == (
        f"{out} exists and is not {kind.what} ({reason % kind.record}), so it is never replaced; choose another name"
    )


@pytest.mark.parametrize(("kind", "ways"), [(OUTPUT_KIND, "--resume continues it, "), (EXPORT_KIND, "")])
def test_what_can_be_done_about_an_unfinished_run(tmp_path, kind, ways):
    kill(staging(tmp_path / "out", kind=kind))
    assert refusal(tmp_path / "out", kind=kind) == (
        f"{tmp_path / 'out.partial'} is left from an unfinished run; {ways}--overwrite starts afresh"
    )
    (tmp_path / "out.partial" / "rest").write_text("of the killed run")
    with staging(tmp_path / "out", overwrite=True, kind=kind) as run:
        assert [path.name for path in run.path.iterdir()] == [".ckpt_prune_journal.json"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_another_run_has_left_since_it_was_checked_is_not_lost(tmp_path, overwrite):
    late = staging(tmp_path / "out", overwrite=overwrite)
    kill(staging(tmp_path / "out"))
    (tmp_path / "out.partial" / "done").write_text("hours of work")
    with pytest.raises(UserError, match="is left from an unfinished run; --resume continues it"):
        late.__enter__()
    assert (tmp_path / "out.partial" / "done").read_text() == "hours of work"


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}])
def test_a_run_that_is_gone_on_with_is_held_as_a_new_one_is(tmp_path, how):
    """Two resumptions would write one folder."""
    kill(staging(tmp_path / "out"))
    with staging(tmp_path / "out", **how) as run:
        for other in ({}, {"resume": True}, {"overwrite": True}):
            assert refusal(tmp_path / "out", **other) == (
                f"{run.path} is being written by another run; wait for it or stop it"
            )


def test_what_nobody_goes_on_with_is_dropped_without_asking(tmp_path):
    killed = staging(tmp_path / "out", kind=KINDS[2])
    killed.__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    assert refusal(tmp_path / "out", kind=KINDS[2]) == (
        f"{tmp_path / '.out.partial'} is being written by another run; wait for it or stop it"
    )
    killed.release()
    with staging(tmp_path / "out", kind=KINDS[2]) as run:
        (run.path / "new").write_text("new")
        run.publish()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_a_new_folder_is_checked_again_before_it_is_filled(tmp_path):
    run = staging(tmp_path / "out", kind=EXPORT_KIND)
    folder(tmp_path / "out", EXPORT_KIND.record, ["model.onnx"])
    assert refusals.refusal(run.__enter__) == f"{tmp_path / 'out'} exists; --overwrite replaces it, or give another -o"
    assert not (tmp_path / "out.partial").exists()


def test_where_there_are_no_locks_work_goes_on(tmp_path, monkeypatch):
    """On a system without them, and on a file system without them."""

    def refuse_lock(*_args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    for name, patched, value in (("system", "fcntl", None), ("files", "fcntl.flock", refuse_lock)):
        with monkeypatch.context() as patch:
            patch.setattr(f"{locks.__name__}.{patched}", value)
            with staging(tmp_path / name) as first:
                assert first.path.is_dir()
                staging(tmp_path / name, resume=True).release()


def test_a_lock_on_a_folder_that_another_run_has_replaced_is_none(tmp_path, monkeypatch):
    run = staging(tmp_path / "out", kind=KINDS[2])
    lock = locks.fcntl.flock

    def late(descriptor: int, how: int) -> None:
        lock(descriptor, how)
        run.path.rename(tmp_path / "deleted")
        run.path.mkdir()

    monkeypatch.setattr(locks.fcntl, "flock", late)
    with pytest.raises(UserError, match=r"\.out\.partial is being written by another run; wait for it or stop it"):
        run.__enter__()
    assert run.path.is_dir()


def test_what_the_library_says_of_a_full_disk_is_a_line(tmp_path):
    """Maps of gaps and bases of streams are written by it: it was a traceback."""
    with pytest.raises(DiskError, match="No space left"), disk_failures(tmp_path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_an_output_holds_nothing_of_what_it_was_made_by(tmp_path, monkeypatch):
    """An output waits for the next run if its scratch files cannot be deleted: one was published with them."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def publish() -> None:
        with staging(tmp_path / "out") as job, monkeypatch.context() as patch:
            (job.path / OUTPUT_KIND.record).write_text("{}")
            job.scratch.mkdir()
            (job.scratch / "statistics.json").write_text("sums")
            patch.setattr("os.unlink", refuse)
            job.publish()

    with pytest.raises(DiskError, match=r"cannot write .* \(Input/output error\)"):
        publish()
    assert not (tmp_path / "out").exists()
    again = staging(tmp_path / "out", resume=True)
    with again:
        again.publish()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [OUTPUT_KIND.record]


def test_a_signal_before_a_folder_is_known_to_be_ours_leaves_none(tmp_path, monkeypatch):
    def interrupt(_: Staging) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "_take_lock", interrupt)
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())
