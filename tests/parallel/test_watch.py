"""How a process hears of another one's end."""

import json
import threading

import pytest

from ckpt_prune.parallel import watch as module
from ckpt_prune.parallel.watch import End, Watch, describe_end
from tests.parallel.ranks import DAY


class Store(dict):
    """The store that all processes share."""

    lock = threading.Lock()

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)

    def compare_set(self, key, expected, desired):
        assert expected == ""
        with self.lock:
            return self.setdefault(key, desired.encode())


class Time:
    """A clock that moves when somebody pauses; processes that live give a sign meanwhile."""

    def __init__(self):
        self.now, self.living = 0.0, []

    def pause(self, seconds):
        self.now += seconds
        for process in self.living:
            process._sign()


def name(rank):
    return f"rank {rank}"


def watches(size, store=None, **options):
    store = Store() if store is None else store
    return [Watch(store, rank, size, name, every=0.01, **options) for rank in range(size)]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may let a thread wait: nobody gives up on another one before a day has passed."""
    monkeypatch.setattr(module, "GRACE", DAY)
    monkeypatch.setattr(module, "SILENT", DAY)


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def timed(time):
    return {"clock": lambda: time.now, "pause": time.pause}


def test_a_failure_stops_the_others_and_the_first_to_fail_is_told_of():
    stopped = threading.Event()
    first, second, third = watches(3, stop=stopped.set)
    first.begin()
    assert second.fail("no such file")
    assert not third.fail("something else")
    stopped.wait()
    first.close()
    assert first.end == End(1, "no such file")
    assert describe_end(first.end, name) == "rank 1: no such file"
    assert second.heard() is None  # its own
    assert third.heard() == End(1, "no such file")


def test_who_does_not_stop_is_ended_and_the_first_one_says_why(monkeypatch, capsys):
    monkeypatch.setattr(module, "GRACE", 0.02)
    statuses, gone = [], threading.Event()

    def leave(status):
        statuses.append(status)
        gone.set()

    first, second = watches(2, stop=lambda: None, leave=leave)
    second.fail("a\nb")
    for watcher in (second, first):
        watcher.begin()
    gone.wait()
    second.close()
    assert statuses == [2]
    assert capsys.readouterr().err == "Error: rank 1: a\\nb\n"


def test_a_process_without_signs_of_life_is_missing(time, timed):
    first, second, third = watches(3, **timed)
    time.living = [second]
    assert first.missing(2) == [2]
    assert 2 < time.now < 2.1
    third.leave()  # ended by a signal, as it says
    before = time.now
    assert first.missing(DAY) == []
    assert time.now - before < 0.1  # the second one's next sign
    second.leave()
    before = time.now
    assert first.missing(DAY) == []  # all have left: nothing to wait for
    assert time.now == before


def test_a_machine_that_vanishes_is_found(monkeypatch):
    monkeypatch.setattr(module, "SILENT", 0.05)
    stopped = threading.Event()
    store = Store()
    first, second = watches(2, store, stop=stopped.set)
    first.begin()
    second.close()
    stopped.wait()
    first.close()
    assert first.end == End(1, "gave no sign of life for 0 seconds")
    assert json.loads(store["ended"]) == [1, "gave no sign of life for 0 seconds"]


def test_the_end_of_torchrun_ends_all(monkeypatch):
    stopped = threading.Event()
    store = Store()
    (only,) = watches(1, store, stop=stopped.set)
    only.begin()
    monkeypatch.setattr(Store, "set", lambda *_: 1 / 0)
    stopped.wait()
    only.close()
    assert describe_end(only.end, name) == "torchrun has ended"


def test_a_process_waits_until_the_user_is_told(time, timed):
    first, second = watches(2, **timed)
    assert not second.wait_told(5)
    assert 5 < time.now < 5.1
    first.tell()
    assert second.wait_told(0)
