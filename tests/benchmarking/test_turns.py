"""Who is timed when."""

from dataclasses import dataclass, field

from ckpt_prune.benchmarking import run
from ckpt_prune.benchmarking.run import take_turns
from ckpt_prune.benchmarking.workload import Workload

WORK = Workload("image", 1, 0, 0, False, False, 0, (3, 8, 8))


@dataclass
class Clock:
    """One hand for all: it moves by one whenever somebody runs."""

    now: int = 0
    log: list[str] = field(default_factory=list)


@dataclass
class Runner:
    name: str
    clock: Clock

    def time(self, workload: Workload) -> dict[str, list[float]]:
        assert workload is WORK
        self.clock.now += 1
        self.clock.log.append(self.name)
        return {"forward": [self.clock.now]}


def turns(names: str, **rounds: int) -> tuple[str, list[list[float]]]:
    """The order of runs with a stroke after every round, and of each its counted timings."""
    clock = Clock()
    runners = [Runner(name, clock) for name in names]
    found = take_turns(runners, WORK, tick=lambda: clock.log.append("|"), **rounds)
    return "".join(clock.log), [[timing["forward"][0] for timing in each] for each in found]


def test_a_round_is_each_once_and_the_first_rotates():
    assert turns("abcd", rounds=5, warmup=0)[0] == "abcd|bcda|cdab|dabc|abcd|"


def test_two_take_the_lead_in_turns():
    assert turns("ab", rounds=3, warmup=0) == ("ab|ba|ab|", [[1, 4, 5], [2, 3, 6]])


def test_warm_up_is_run_and_not_counted():
    order, found = turns("ab", rounds=2, warmup=3)
    assert order == "ab|ba|ab|ba|ab|"
    assert found == [[8, 9], [7, 10]]


def test_nobody_is_timed_right_behind_another(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(run, "sleep", lambda seconds: clock.log.append(f"{seconds:g}"))
    take_turns([Runner(name, clock) for name in "ab"], WORK, rounds=1, warmup=1, tick=lambda: None, rest=0.5)
    assert clock.log == ["0.5", "a", "0.5", "b", "0.5", "b", "0.5", "a"]
