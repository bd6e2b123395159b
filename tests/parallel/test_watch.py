"""How a process hears of another one's end."""

import json
import threading
import time

from ckpt_prune.parallel import watch as module
from ckpt_prune.parallel.watch import End, Watch, said_of


class Store(dict):
    """What all processes share."""

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


def name(rank):
    return f"rank {rank}"


def watches(size, store=None, **options):
    store = Store() if store is None else store
    return [Watch(store, rank, size, name, every=0.01, **options) for rank in range(size)]


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_failure_stops_the_others_and_the_first_to_fail_is_told_of():
    stopped = threading.Event()
    first, second, third = watches(3, stop=stopped.set)
    first.begin()
    assert second.fail("no such file")
    assert not third.fail("something else")
    wait_for(stopped.is_set)
    first.close()
    assert first.end == End(1, "no such file")
    assert said_of(first.end, name) == "rank 1: no such file"
    assert second.heard() is None  # its own
    assert third.heard() == End(1, "no such file")


def test_who_does_not_stop_is_ended_and_the_first_one_says_why(monkeypatch, capsys):
    monkeypatch.setattr(module, "GRACE", 0.02)
    left = []
    first, second = watches(2, stop=lambda: None, leave=left.append)
    second.fail("a\nb")
    for each in (second, first):
        each.begin()
    wait_for(lambda: left)
    second.close()
    assert left == [2]
    assert capsys.readouterr().err == "Error: rank 1: a\\nb\n"


def test_a_process_without_signs_of_life_is_missing():
    first, second, third = watches(3)
    second.begin()
    assert first.missing(0.1) == [2]
    third.went()  # ended by a signal, as it says
    assert first.missing(0.1) == []
    second.close()
    second.went()
    begun = time.monotonic()
    assert first.missing(60) == []  # all have left: nothing to wait for
    assert time.monotonic() - begun < 30


def test_a_machine_that_vanishes_is_found(monkeypatch):
    monkeypatch.setattr(module, "SILENT", 0.05)
    stopped = threading.Event()
    store = Store()
    first, second = watches(2, store, stop=stopped.set)
    first.begin()
    second.close()
    wait_for(stopped.is_set)
    first.close()
    assert first.end == End(1, "gave no sign of life for 0 seconds")
    assert json.loads(store["ended"]) == [1, "gave no sign of life for 0 seconds"]


def test_the_end_of_torchrun_ends_all(monkeypatch):
    stopped = threading.Event()
    store = Store()
    (only,) = watches(1, store, stop=stopped.set)
    only.begin()
    monkeypatch.setattr(Store, "set", lambda *_: 1 / 0)
    wait_for(stopped.is_set)
    only.close()
    assert said_of(only.end, name) == "torchrun has ended"


def test_a_process_waits_until_the_user_is_told():
    first, second = watches(2)
    assert not second.wait_told(0.02)
    first.told()
    assert second.wait_told()
