"""Processes: what they answer, how they fail, and that none is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_prune.benchmarking import pool
from ckpt_prune.benchmarking.messages import Memory, Ready, Seat
from ckpt_prune.benchmarking.pool import Worker, how_it_ended, workers
from ckpt_prune.common.errors import UserError
from tests.benchmarking import targets
from tests.forked import wait_gone
from tests.pairs import every


def seat(model: str = "tiny") -> Seat:
    return Seat("A", model, "PyTorch", model, "cpu", 1, "fp32")


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_each_answers_for_its_own_seat():
    with workers([seat("0.5"), seat("0.25")], targets.obliging) as started:
        assert [worker.ready() for worker in started] == [Ready("cpu", None)] * 2
        assert [worker.time("work") for worker in started] == [{"forward": [0.5]}, {"forward": [0.25]}]
        assert started[0].pid != started[1].pid
        assert [worker.finish() for worker in started] == [Memory(1, 2, None)] * 2


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (targets.failing, "tiny in PyTorch: out of memory"),
        (targets.crashing, "tiny in PyTorch: its process was ended by SIGABRT"),
        (targets.leaving, "tiny in PyTorch: its process ended with code 3"),
    ],
)
def test_a_model_that_does_not_load(target, said):
    with workers([seat()], target) as (worker,), pytest.raises(UserError) as caught:
        worker.ready()
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (targets.complaining, "tiny in PyTorch: no room for the cache"),
        (targets.killed, "tiny in PyTorch: its process was killed, as systems do where memory runs out"),
    ],
)
def test_a_model_that_fails_while_it_is_timed(target, said):
    with workers([seat()], target) as (worker,):
        worker.ready()
        with pytest.raises(UserError) as caught:
            worker.time("work")
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "was killed, as systems do where memory runs out"),
        (-15, "was ended by SIGTERM"),
        (-99, "was ended by signal 99"),
        (0, "ended with code 0"),
        (0xC0000005, "ended with code 3221225477"),
        (None, "hung up"),
    ],
)
def test_what_exit_codes_mean_on_windows_too(code, said, monkeypatch):
    monkeypatch.delattr(signal, "SIGKILL")  # which Windows does not have
    assert how_it_ended(code) == said


def test_a_process_that_is_gone_when_it_is_spoken_to():
    with workers([seat()], targets.complaining) as (worker,):
        worker.ready()
        worker._connection.send("work")
        worker._process.join()
        # What it said before it went is the reason, not the broken pipe.
        with pytest.raises(UserError, match="no room for the cache"):
            worker.time("work")


@pytest.mark.parametrize("error", every(2, [None, UserError("no"), KeyboardInterrupt()]))
def test_none_is_left(error, monkeypatch):
    monkeypatch.setattr(pool, "_PATIENCE", 0.2)
    pids = []

    def block() -> None:
        for target in (targets.waiting, targets.endless):
            with workers([seat(), seat()], target) as started:
                for worker in started:
                    worker.ready()
                pids.extend(worker.pid for worker in started)
                assert all(map(alive, pids[-2:]))
                if error is not None:
                    raise error

    if error is None:
        block()
    else:
        with pytest.raises(type(error)):
            block()
    assert len(pids) >= 2
    assert not any(map(alive, pids))


def test_none_is_left_where_the_second_cannot_start(monkeypatch):
    started = []

    class Second(Worker):
        def __init__(self, *args) -> None:
            if started:
                raise OSError("no more processes")
            super().__init__(*args)
            started.append(self.pid)

    monkeypatch.setattr(pool, "Worker", Second)
    with pytest.raises(OSError, match="no more processes"), workers([seat(), seat()], targets.waiting):
        pass
    assert len(started) == 1
    assert not alive(started[0])


SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background deaf to it
from ckpt_prune.benchmarking.pool import workers
from ckpt_prune.benchmarking.messages import Seat
from tests.benchmarking.targets import {target}
seat = Seat("A", "tiny", "PyTorch", "tiny", "cpu", 1, "fp32")
with workers([seat, seat], {target}) as started:
    pids = [worker.pid for worker in started]
    [worker.ready() for worker in started]
    print(*pids, flush=True)
    input()
    [worker.time("work") for worker in started]
    print("both answer", flush=True)
    started[0].time("work")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ends_with_its_parent(number):
    """Ctrl-C goes to all processes of a terminal: only the parent speaks. A parent that is killed leaves none either,
    once they next look at their pipe, which `answering_once` never does; `serve` is always there or at work."""
    target = "obliging" if number == signal.SIGKILL else "answering_once"
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(target=target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if number == signal.SIGINT:
            for pid in pids:
                os.kill(pid, signal.SIGINT)
            parent.stdin.write("\n")
            parent.stdin.flush()
            # Python passes over an interrupt that comes while it destroys an object: now the parent waits, and nothing
            # else.
            assert [parent.stdout.readline() for _ in range(2)] == ["both answer\n", "at work\n"]
        (os.killpg if number == signal.SIGINT else os.kill)(parent.pid, number)
        _, said = parent.communicate()  # until the last process that could write to it has ended
    for pid in pids:
        wait_gone(pid)
    assert parent.returncode == -number
    if number == signal.SIGINT:
        assert said.count("Traceback") == 1
        assert said.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(("own", "waits"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_from_the_first_import_on(monkeypatch, own, waits):
    """A script that imports torch is imported by its workers before anything of `serve` runs."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    with workers([seat()], targets.telling_how_it_waits) as (worker,):
        assert worker.ready().device == waits
    assert os.environ.get("OMP_WAIT_POLICY") == own
