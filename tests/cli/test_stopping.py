"""SIGTERM and SIGHUP end like Ctrl-C."""

import os
import signal
import time
import weakref
from itertools import count
from pathlib import Path

import pytest

from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.cli.main import main
from ckpt_prune.cli.stopping import Stopped, exit_code, stoppable
from ckpt_prune.model import skeleton
from tests.cli.running import TEXT, resume_job, run
from tests.forked import posix, run_forked


@posix
def test_what_is_done_is_kept_and_can_be_resumed(place, monkeypatch, tmp_path):
    commit, calls = CheckpointWriter.commit, count(1)

    def count_commits(*args, **kwargs):
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return commit(*args, **kwargs)

    job = ["prune", "dense", "--recipe", "rcpu", "--ratio", "0.5", *TEXT]
    assert run(*job, "-o", "whole").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "commit", count_commits)
        done = run_forked(lambda: main([*job, "-o", "out"]), tmp_path)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr.splitlines()[-2:] == [
        "out.partial keeps what is done: the same command with --resume continues",
        "Interrupted.",
    ]
    assert Path("out.partial").is_dir()
    resume_job(job)


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_the_first_signal_stops_and_others_do_not_disturb(name):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup

    def work():
        with stoppable():
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)

    try:
        with pytest.raises(Stopped) as caught:
            work()
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert exit_code(caught.value) == 128 + number
    assert exit_code(KeyboardInterrupt()) == 130


def stopped_and_masked(*_given, **_options):
    """Hide Ctrl-C as transformers' `no_init_weights` does: it restores what its `try` may not have read yet."""
    try:
        raise KeyboardInterrupt
        before = 1
    finally:
        assert before


@pytest.mark.parametrize(
    ("place_of_it", "words"),
    [
        ("ckpt_prune.model.skeleton.stock_class", ("verify", "dense")),
        ("ckpt_prune.inspection.describe.describe", ("inspect", "dense")),
    ],
)
def test_ctrl_c_that_a_library_makes_an_error_of_its_own(place, monkeypatch, place_of_it, words):
    """Ctrl-C that a library turns into an error ends a command as usual, whether or not errors are expected there."""
    monkeypatch.setattr(place_of_it, stopped_and_masked)
    monkeypatch.setattr(skeleton, "_stock_names", skeleton._stock_names.__wrapped__)
    result = run(*words)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


@posix
def test_under_nohup_a_hangup_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_that_python_loses_comes_again(name, capfd):
    """Python prints and drops an exception that is raised in the callback of a weak reference."""
    number = getattr(signal, name)

    class Dropped:
        pass

    def work():
        dropped = Dropped()
        watched = weakref.ref(dropped, lambda _: os.kill(os.getpid(), number))
        with stoppable():
            del dropped
            assert watched() is None
            while True:
                time.sleep(0.01)  # until it comes

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert exit_code(caught.value) == 128 + number
    assert capfd.readouterr().err == ""
