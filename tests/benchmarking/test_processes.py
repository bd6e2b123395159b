"""Processes: what they answer, how they fail, and that none is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_prune.benchmarking import processes
from ckpt_prune.benchmarking.participants import Loaded, Memory, Participant
from ckpt_prune.benchmarking.processes import _describe, _describe_exit, start_workers
from ckpt_prune.common.errors import UserError
from tests.benchmarking import targets
from tests.forked import wait_gone


def participant(model: str = "tiny") -> Participant:
    return Participant("A", model, "PyTorch", model, "cpu", 1, "fp32")


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_each_answers_for_its_own_participant():
    with start_workers([participant("0.5"), participant("0.25")], targets.obliging) as started:
        assert [worker.wait_until_loaded() for worker in started] == [Loaded("cpu", None)] * 2
        assert [worker.time("work") for worker in started] == [{"forward": [0.5]}, {"forward": [0.25]}]
        assert started[0].pid != started[1].pid
        assert [worker.finish() for worker in started] == [Memory(1, 2, None)] * 2


@pytest.mark.parametrize(
    ("target", "loads", "message"),
    [
        (targets.failing, False, "out of memory"),
        (targets.crashing, False, "its process was ended by SIGABRT"),
        (targets.leaving, False, "its process ended with code 3"),
        (targets.complaining, True, "no room for the cache"),
        (targets.kill_itself, True, "its process was killed, as systems do if memory runs out"),
    ],
)
def test_a_process_that_fails_says_why(target, loads, message):
    with start_workers([participant()], target) as (worker,):
        if loads:
            worker.wait_until_loaded()
        with pytest.raises(UserError) as caught:
            worker.time("work") if loads else worker.wait_until_loaded()
    assert str(caught.value) == f"tiny in PyTorch: {message}"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (-9, "was killed, as systems do if memory runs out"),
        (-99, "was ended by signal 99"),
        (0xC0000005, "ended with code 3221225477"),
        (None, "hung up"),
    ],
)
def test_exit_codes_are_explained_on_windows_too(code, message, monkeypatch):
    monkeypatch.delattr(signal, "SIGKILL")  # which Windows does not have
    assert _describe_exit(code) == message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("no such model"), "no such model"),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("tried to\n  allocate"), "out of memory: tried to allocate"),
        (KeyError(), "KeyError"),
        (RuntimeError("x" * 400), "RuntimeError: " + "x" * 300),
    ],
)
def test_errors_are_described_in_one_line(error, message):
    assert _describe(error) == message


def test_a_process_that_is_gone_when_it_is_spoken_to():
    with start_workers([participant()], targets.complaining) as (worker,):
        worker.wait_until_loaded()
        worker._connection.send("work")
        worker._process.join()
        # What it said before it went is the reason, not the broken pipe.
        with pytest.raises(UserError, match="no room for the cache"):
            worker.time("work")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_none_is_left(error, monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE", 0.2)
    pids = []

    def block() -> None:
        for target in (targets.waiting, targets.endless):
            with start_workers([participant(), participant()], target) as started:
                for worker in started:
                    worker.wait_until_loaded()
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


SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background deaf to it
from ckpt_prune.benchmarking.participants import Participant
from ckpt_prune.benchmarking.processes import start_workers
from tests.benchmarking.targets import {target}
one = Participant("A", "tiny", "PyTorch", "tiny", "cpu", 1, "fp32")
with start_workers([one, one], {target}) as started:
    pids = [worker.pid for worker in started]
    [worker.wait_until_loaded() for worker in started]
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
        _, stderr = parent.communicate()  # until the last process that could write to it has ended
    for pid in pids:
        wait_gone(pid)
    assert parent.returncode == -number
    if number == signal.SIGINT:
        assert stderr.count("Traceback") == 1
        assert stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(("policy", "waits"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_from_the_first_import_on(monkeypatch, policy, waits):
    """A script that imports torch is imported by its workers before anything of `serve` runs."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    with start_workers([participant()], targets.telling_how_it_waits) as (worker,):
        assert worker.wait_until_loaded().device == waits
    assert os.environ.get("OMP_WAIT_POLICY") == policy
