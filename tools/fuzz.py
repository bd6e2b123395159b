"""Give every command that reads files files that are almost right, and see whether anything but a line comes of it.

    PYTHONPATH=. python tools/fuzz.py --cases 20000 --seed 1

tests/fuzz says which files, how they are changed and what must hold. `--show TARGET NUMBER` prints one changed file.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from tests.fuzz.run import Failure, batch, case_bytes
from tests.fuzz.targets import GRAPHS, TARGETS, make_place

MEMORY = Path("/dev/shm")
WAITED = 300
"""Seconds on the clock that a command may take, on a machine that is busy with other things."""
BATCH = 100
SHARE = 50
"""Graphs are read in processes of their own, which takes so many times as long: so many fewer are tried."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="in all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop before a batch that would begin later")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS], default=[*TARGETS], metavar="TARGET")
    parser.add_argument("--show", nargs=2, metavar=("TARGET", "NUMBER"), help="print a changed file and end")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="ckpt-prune-fuzz-", dir=MEMORY if MEMORY.is_dir() else None))
    tried: Counter[str] = Counter()
    failures: list[Failure] = []
    try:
        place = make_place(folder, graphs=bool(GRAPHS & set(given.targets)))
        if given.show:
            sys.stdout.buffer.write(case_bytes(place, given.show[0], given.seed, int(given.show[1])))
            return 0
        last = time.monotonic() + given.seconds
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):  # what was tried so far counts
            while tried.total() < given.cases and time.monotonic() < last:
                for target in given.targets:
                    count = BATCH // SHARE if target in GRAPHS else BATCH
                    batch_failures = batch(place, target, given.seed, tried[target], count, waited=WAITED)
                    tried[target] += count
                    failures += batch_failures
                    for failure in batch_failures:
                        print(f"{failure.target} {failure.number}: {failure.command}: {failure.what}", flush=True)
                    if tried.total() >= given.cases or time.monotonic() > last:
                        break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kinds = ", ".join(f"{count} {what}" for what, count in tried.items())
    print(f"{tried.total()} cases, seed {given.seed}: {len(failures)} failures ({kinds})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
