"""Commands in two real processes, as torchrun starts them, over gloo."""

import os
import signal
from pathlib import Path

import pytest

from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.cli.main import main
from ckpt_prune.job.step import PruneStep
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.parallel import torchrun as joining
from ckpt_prune.parallel.group import ALONE
from tests.cli.running import TEXT, listing, ok, read_refusal
from tests.forked import posix
from tests.parallel.ranks import DAY, Ended, in_processes

pytestmark = posix
RIDGE = ["prune", "dense", "--recipe", "ridge", "--ratio", "0.5", *TEXT]


def together(tmp_path: Path, *args: str, size: int = 2) -> list[Ended]:
    """Run a command in `size` processes, and check that none but the first prints anything."""
    ended = in_processes(size, lambda _rank: main(list(args)), tmp_path)
    assert [(process.stdout, process.stderr) for process in ended[1:]] == [("", "")] * (size - 1)
    return ended


def test_calibrate(place, tmp_path):
    first, second = together(tmp_path, "calibrate", "dense", *TEXT, "--folds", "2", "-o", "two")
    assert (first.returncode, second.returncode) == (0, 0)
    ok("calibrate", "dense", *TEXT, "--folds", "2", "-o", "one")
    # Every process has a fold of its own: the sums are those of one process to the last bit.
    one, two = (Statistics(Path(name)).index for name in ("one", "two"))
    assert (two.files, two.predicted) == (one.files, one.predicted)
    assert first.stdout == (
        "two: 8 windows of 16 tokens, 2 blocks, moments+gram+linears+fisher+effects, folds 2, 33.4 KB\n"
    )


def test_prune_and_a_process_that_is_killed(place, tmp_path, monkeypatch):
    (ended, *_) = together(tmp_path, *RIDGE, "-o", "out")
    alone = ok(*RIDGE, "-o", "one").replace("to one", "to out").replace("after: one", "after: out")
    assert (ended.returncode, ended.stdout) == (0, alone)
    act = PruneStep.act

    def die(self, block, *args):
        if block == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return act(self, block, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PruneStep, "act", die)
        first, second = together(tmp_path, *RIDGE, "-o", "again")
    assert (first.returncode, second.returncode) == (2, -signal.SIGKILL)
    assert first.stderr.splitlines()[-2:] == [
        "again.partial keeps what is done: the same command with --resume continues",
        "Error: rank 1 died without a word: it was killed, or ran out of memory",
    ]
    (ended, *_) = together(tmp_path, *RIDGE, "-o", "again", "--resume", size=3)
    assert ended.returncode == 0
    assert ended.stderr.splitlines()[0] == "resuming again.partial: 1 of 2 blocks pruned"


def test_a_process_without_the_file_is_named_and_nothing_is_left(place, tmp_path):
    def work(rank: int) -> None:
        os.chdir(place if rank == 0 else tmp_path)
        main(["calibrate", str(place / "dense"), *TEXT, "-o", str(place / "stats2")])

    before = listing()
    first, second = in_processes(2, work, tmp_path)
    assert first.returncode == 2
    # It ends by itself, or by the signal that follows the end of the first one, whichever comes first.
    assert second.returncode in (2, -signal.SIGTERM, 128 + signal.SIGTERM)
    assert first.stderr == "Error: rank 1: calib.txt: no such text file\n"
    assert (second.stdout, second.stderr) == ("", "")
    assert listing() == before


def test_an_error_in_all_is_told_once_and_as_of_one(place, tmp_path):
    first, _ = together(tmp_path, "calibrate", "dense", "--text", "no.txt", "-o", "s")
    assert (first.returncode, first.stderr) == (2, "Error: no.txt: no such text file\n")


def test_ctrl_c_ends_all(place, tmp_path, monkeypatch):
    commit = CheckpointWriter.commit

    def interrupt(self, *args, **kwargs):
        commit(self, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "commit", interrupt)
        patch.setattr(joining, "_SIGNING", DAY)  # the other one lives, however late its sign comes
        # Whoever starts tests in the background of a shell has it ignored; blocks are written by another thread.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            first, second = together(tmp_path, *RIDGE, "-o", "out")
        finally:
            signal.signal(signal.SIGINT, handler)
    assert first.returncode == 130
    assert second.returncode != 0
    assert first.stderr.splitlines()[-2:] == [
        "out.partial keeps what is done: the same command with --resume continues",
        "Interrupted.",
    ]


def test_a_command_for_one_process_says_so(place, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("ckpt_prune.cli.main.join_processes", lambda: pytest.MonkeyPatch.context())
    assert read_refusal("verify", "pruned") == "verify runs in one process: start it without torchrun"


def test_adapters_are_trained_in_one_process(place, monkeypatch):
    monkeypatch.setattr(ALONE, "size", 2)
    assert read_refusal("recover", "pruned", "--method", "lora", *TEXT, "-o", "out") == (
        "--method lora trains in one process: start it without torchrun"
    )
