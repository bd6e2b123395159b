"""Break every command that writes, at every moment, and see whether anything is wrong afterwards.

    PYTHONPATH=. python tools/faults.py --hours 0.5 --seed 1

tests/faults says what is broken and what must hold. What does not is printed at once; the last line has the figures.
"""

import argparse
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from tests.faults.campaign import cases
from tests.faults.jobs import JOBS, make_inputs
from tests.faults.trial import Machine, can_mount
from tests.hub_server import serving

MEMORY = Path("/dev/shm")
SECONDS = 900
"""The longest that any command may take, on a machine that is busy with other things."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.1, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="of what is broken where")
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS], default=[*JOBS], metavar="JOB", help="; ".join(JOBS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="ckpt-prune-faults-", dir=MEMORY if MEMORY.is_dir() else None))
    injected: Counter[str] = Counter()
    wrong = 0
    try:
        make_inputs(folder, graphs=any(JOBS[name].graph for name in given.jobs))
        with serving() as hub:
            mounts = can_mount(folder)
            if not mounts:
                print("no disk can be mounted here: only the shim makes disks full", flush=True)
            machine = Machine(folder, hub, mounts=mounts, seconds=SECONDS)
            last = time.monotonic() + 3600 * given.hours
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with suppress(KeyboardInterrupt):  # what was tried so far counts
                for case in cases(machine, given.jobs, given.seed):
                    if time.monotonic() > last:
                        break
                    violations = case.run(machine)
                    injected[case.fault.what] += 1
                    if violations:
                        wrong += 1
                        print(case, *violations, sep="\n    ", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        kinds = ", ".join(f"{count} {what}" for what, count in injected.most_common())
        took = sum(sum(resource.getrusage(whose)[:2]) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(
            f"{injected.total()} faults in {len(given.jobs)} jobs, seed {given.seed}, {took:.0f} s of the processor: "
            f"{wrong} violations ({kinds})"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
