"""Real processes that work together, as torchrun starts them, but copies of this one: nothing is imported anew."""

import os
import select
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import TCPStore

from ckpt_prune.parallel import torchrun as joining
from ckpt_prune.parallel import watch
from tests.forked import work_and_exit

DAY = 86400.0
"""Seconds: a process that waits for another one here gives up after so many, however busy the machine is."""


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
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DAY))
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    files = {rank: [place / f".out{rank}", place / f".err{rank}"] for rank in range(size)}

    def work_as(rank: int) -> None:
        os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
        joining._TELLING = watch.GRACE = watch.SILENT = DAY
        work(rank)

    running: dict[int, int] = {}
    ranks: dict[int, int] = {}
    for rank in range(size):
        # Its other end closes when the process ends.
        end, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as in `run_forked`
            process = os.fork()
        if not process:
            work_and_exit(partial(work_as, rank), files[rank])
        os.close(writer)
        running[rank], ranks[end] = process, rank
    statuses: dict[int, int] = {}
    while running:
        for end in select.select([*ranks], [], [])[0]:
            os.close(end)
            rank = ranks.pop(end)
            _, status = os.waitpid(running.pop(rank), 0)
            statuses[rank] = os.waitstatus_to_exitcode(status)
            for other in running.values() if statuses[rank] else ():
                os.kill(other, signal.SIGTERM)
    del store
    texts = {rank: [path.read_text() for path in paths] for rank, paths in files.items()}
    for path in (path for paths in files.values() for path in paths):
        path.unlink()
    return [Ended(statuses[rank], *texts[rank]) for rank in range(size)]
