"""A tiny model on disk, its text and its statistics, made once; tests copy what they break."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.running import TEXT, enter_copy, ok
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.hub_server import Hub, serving, talk_to
from tests.once import once, run_folder

PRUNE = ("prune", "dense", "--recipe", "rcpu", "--ratio", "0.5", *TEXT)
EXPORT = ("--set", "export.format=onnx")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "dog", "ran", "far", "away"]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    rng = random.Random(0)
    (folder / "calib.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(400)))
    with quiet_transformers():
        model = tiny_llama(max_position_embeddings=32)
        model.save_pretrained(folder / "dense")
        model.save_pretrained(folder / "sharded", max_shard_size="10KB")
    for name in ("dense", "sharded"):
        tiny_tokenizer("<s> $A").save_pretrained(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ok("calibrate", "dense", *TEXT, "-o", "stats")
        ok("prune", "dense", "--recipe", "rcpu", "--ratio", "0.5", "--statistics", "stats", "-o", "pruned")
    return folder


@pytest.fixture(scope="session")
def finished(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `out`, pruned and exported by one command, and what that printed in `said`; for all workers."""

    from tests.graphs import trace_as_commands_do  # imports what exports, which few commands do

    def make(here: Path) -> Path:
        shutil.copytree(made / "dense", here / "dense")
        shutil.copy(made / "calib.txt", here)
        with pytest.MonkeyPatch.context() as patch, trace_as_commands_do():
            patch.chdir(here)
            (here / "said").write_text(ok(*PRUNE, *EXPORT, "-o", "out"))
        return here

    return once(run_folder(tmp_path_factory) / "pruned-and-exported", make)


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `dense`, `calib.txt`, `stats` and `pruned` of its own."""
    return enter_copy(made, tmp_path, monkeypatch)


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on this machine, its empty cache, and a token that may write."""
    with serving() as server:
        talk_to(server, tmp_path_factory.mktemp("hf"), monkeypatch)
        yield server
