"""A command that is killed while llama.cpp proves a file: nothing looks finished, nothing stays, --resume ends it."""

import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckpt_prune.cli.main import main
from ckpt_prune.gguf import llama_cpp
from tests.cli.running import ok
from tests.faults.trial import files_of
from tests.forked import begin, posix
from tests.gguf_files.tiny import proving, save

pytestmark = posix


def kill_in_proof(arguments: list[str], folder: Path, number: int) -> int:
    """Send a signal to a command once it waits for llama.cpp. Return its exit code."""
    told, tell = os.pipe()

    def wait(*_: object, **__: object) -> None:
        os.write(tell, b"!")
        signal.pause()

    def work() -> None:
        llama_cpp.subprocess = SimpleNamespace(run=wait, DEVNULL=None)  # type: ignore[assignment]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main(arguments, "ckpt-prune")

    child = begin(work, folder)
    os.close(tell)
    assert os.read(told, 1) == b"!", child.ended().stderr
    os.close(told)
    child.send(number)
    return child.ended().returncode


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_an_output_has_no_name_while_its_file_is_proven(tmp_path, monkeypatch, name):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    model = save(tmp_path / "model", "llama", num_hidden_layers=2)
    prune = ["prune", str(model), "--recipe", "magnitude", "--ratio", "0.5", "--text", str(proving(model).text[0])]
    prune += ["--window", "48", "--set", "export.format=gguf", "-o", "out"]
    number = getattr(signal, name)
    assert kill_in_proof(prune, tmp_path, number) == (-number if name == "SIGKILL" else 128 + number)
    assert [path.name for path in work.iterdir()] == ["out.partial"]
    assert not list(temporary.iterdir())
    said = ok(*prune, "--resume")
    assert "llama.cpp computes what PyTorch does, as far as f32 can\n" in said
    resumed = files_of(work / "out")
    assert sorted(path.name for path in work.iterdir()) == ["out"]
    assert not [path for path in resumed if "partial" in path]
    ok(*prune, "--overwrite")
    assert files_of(work / "out") == resumed
    assert {"model-f32.gguf", "ckpt_prune.json"} <= resumed.keys()


def test_a_file_by_itself_leaves_nothing_that_the_next_run_does_not_take(tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    work = tmp_path / "work"
    work.mkdir()
    model = save(tmp_path / "model", "llama", num_hidden_layers=2)
    export = ["export", str(model), "--format", "gguf", "--text", str(proving(model).text[0]), "--window", "48"]
    export += ["-o", str(work / "m.gguf")]
    assert kill_in_proof(export, tmp_path, signal.SIGKILL) == -signal.SIGKILL
    assert not (work / "m.gguf").exists()
    ok(*export)
    assert [path.name for path in work.iterdir()] == ["m.gguf"]
