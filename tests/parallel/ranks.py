"""Real processes that work together, as torchrun starts them, but copies of this one: nothing is imported anew."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.distributed import TCPStore

from tests.forked import work_and_exit


@dataclass(frozen=True)
class Ended:
    """How a process ended: its status, what it printed, and where it printed errors."""

    returncode: int
    stdout: str
    stderr: str


def in_processes(size: int, work: Callable[[int], None], place: Path) -> list[Ended]:
    """Run `work` in so many processes, which find each other as those of torchrun do.

    As torchrun does, SIGTERM goes to all others when one ends with another status than 0.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    files = {rank: [place / f".out{rank}", place / f".err{rank}"] for rank in range(size)}

    def joined(rank: int) -> None:
        os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
        work(rank)

    running: dict[int, int] = {}
    for rank in range(size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as in `forked`
            process = os.fork()
        if not process:
            work_and_exit(partial(joined, rank), files[rank])
        running[rank] = process
    statuses: dict[int, int] = {}
    while running:
        for rank, process in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            statuses[rank] = os.waitstatus_to_exitcode(status)
            del running[rank]
            for other in running.values() if statuses[rank] else ():
                os.kill(other, signal.SIGTERM)
        time.sleep(0.005)
    del store
    said = {rank: [path.read_text() for path in own] for rank, own in files.items()}
    for path in (path for own in files.values() for path in own):
        path.unlink()
    return [Ended(statuses[rank], *said[rank]) for rank in range(size)]
