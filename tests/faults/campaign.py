"""Which faults there are to try, in an order that a seed decides."""

import itertools
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.jobs import JOBS
from tests.faults.shim import CHANGES, DISTURBED, ERRORS, FULL, GROWS, SHRUNK, SIGNALS, TORN, Fault, Operation
from tests.faults.trial import Machine

THEN = ("resume", "overwrite")
RARE = 6


@dataclass(frozen=True)
class Case:
    """A fault in a job, and what is tried after it.

    A signal comes at an operation, or, where `after` says so, when that share of the job's usual time is over. An input
    that is disturbed is named by `fault.to`, below the inputs.
    """

    job: str
    fault: Fault
    then: str = "resume"
    after: float | None = None

    def __str__(self) -> str:
        where = f"operation {self.fault.at}" if self.after is None else f"{self.after:.3f} of the time"
        return " ".join(filter(None, [self.job, self.fault.what, self.fault.to, "at", where, "then", self.then]))

    def run(self, machine: Machine) -> list[str]:
        """List the promises that do not hold."""
        try:
            if self.after is not None:
                number = getattr(signal, self.fault.what)
                seconds = self.after * machine.reference(self.job).seconds
                return machine.struck(self.job, number, seconds, self.then)
            if self.fault.what in DISTURBED:
                return machine.disturbed(self.job, self.fault.at, self.fault.what, self.fault.to)
            if self.fault.what == SHRUNK:
                return machine.shrunk(self.job, self.fault.at, self.then)
            return machine.faulty(self.job, self.fault, self.then)
        except TimeoutError as error:
            return [str(error)]


def faults_of(operation: Operation) -> tuple[str, ...]:
    """List the faults that can happen at an operation."""
    if operation.what not in CHANGES:
        return (*SIGNALS, "EIO", "EACCES")
    errors = {"sync": ("EIO", "ENOSPC")}.get(operation.what, ERRORS)
    return (
        *SIGNALS,
        *errors,
        *(TORN if operation.what == "write" else ()),
        *((FULL,) if operation.what in GROWS else ()),
    )


def cases(machine: Machine, jobs: Sequence[str], seed: int) -> Iterator[Case]:
    """Every fault at every operation of the jobs, each once, with signals and disturbed inputs between; without end.

    Graphs take ten times as long as all else, and come once in so many rounds.
    """
    rng = random.Random(seed)
    turns = {name: _of_job(machine, name, rng) for name in jobs}
    often = [name for name in jobs if not JOBS[name].graph] or list(jobs)
    for number in itertools.count():
        for name in jobs if number % RARE == 0 else often:
            yield next(turns[name])


def _of_job(machine: Machine, name: str, rng: random.Random) -> Iterator[Case]:
    seen = machine.reference(name).seen
    inside = f"{machine.inputs}/"
    opened = {operation.path for operation in seen if operation.what == "open" and operation.path.startswith(inside)}
    given = sorted(path for path in opened if Path(path).is_file())
    while True:
        at = {changes: _shuffle(name, seen, changes, rng) for changes in (True, False)}
        while at[True] or at[False]:
            # Where files change there is more to go wrong than where they are read.
            for changes in (True, True, True, False):
                if at[changes]:
                    yield at[changes].pop()
            yield Case(name, Fault(0, rng.choice(SIGNALS)), rng.choice(THEN), after=1.1 * rng.random())
            if machine.mounts and JOBS[name].repo is None:
                yield Case(name, Fault(rng.randint(1, len(seen)), SHRUNK), rng.choice(THEN))
            if given:
                to = rng.choice(given).removeprefix(inside)
                yield Case(name, Fault(rng.randint(1, len(seen)), rng.choice(DISTURBED), to))


def _shuffle(name: str, seen: Sequence[Operation], changes: bool, rng: random.Random) -> list[Case]:
    fault_cases = [
        Case(name, Fault(at, what), rng.choice(THEN))
        for at, operation in enumerate(seen, 1)
        if (operation.what in CHANGES) is changes
        for what in faults_of(operation)
    ]
    rng.shuffle(fault_cases)
    return fault_cases
