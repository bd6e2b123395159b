"""Folders in the system's temporary one."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_prune.checkpoint.scratch import scratch_folder
from ckpt_prune.common.errors import UserError
from tests.forked import begin, posix


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    here = tmp_path / "temporary"
    here.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(here))
    return here


def test_only_what_errors_speak_of_stays(place: Path) -> None:
    with scratch_folder() as folder:
        assert not any(folder.iterdir())  # the demo asks for an empty one
        (folder / "A").mkdir()
        (folder / "A" / "model.onnx").write_bytes(b"graph")
        (folder / "left.log").write_bytes(b"")
    assert not list(place.iterdir())
    with suppress(UserError), scratch_folder(keeps=".log") as folder:
        (folder / "A").mkdir()
        log = folder / "B.log"
        log.write_text("what was said")
        raise UserError("it cannot be traced")
    with scratch_folder():
        pass
    assert list(place.rglob("*")) == [folder, log]


@posix
def test_what_a_killed_run_leaves_the_next_one_clears(tmp_path: Path, place: Path) -> None:
    """It stayed for ever; what is in use, or of another name, is left alone."""

    ready, writer = os.pipe()

    def work() -> None:
        with scratch_folder() as folder:
            (folder / "graph").write_bytes(b"large")
            os.write(writer, b"!")
            while True:
                signal.pause()

    child = begin(work, tmp_path)
    os.read(ready, 1)
    [graph] = place.glob("*/graph")
    (place / "ckpt-prune-mine").mkdir()
    with scratch_folder():
        assert graph.exists()
    child.send(signal.SIGKILL)
    child.ended()
    os.close(ready)
    os.close(writer)
    assert graph.exists()
    with scratch_folder() as folder:
        assert {*place.iterdir()} == {place / "ckpt-prune-mine", folder, folder.with_name(f"{folder.name}.lock")}


def test_a_folder_that_cannot_be_written_is_a_line(place: Path) -> None:
    place.rmdir()
    with pytest.raises(UserError, match=f"^cannot write {place} "), scratch_folder():
        pass
