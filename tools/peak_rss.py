"""Run a command and print its peak resident memory and time.

Example:
    python tools/peak_rss.py ckpt-prune prune MODEL --recipe magnitude -o OUT
"""

import resource
import subprocess
import sys
import time


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    start = time.monotonic()
    code = subprocess.run(sys.argv[1:], check=False).returncode
    seconds = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"peak RSS {peak / 2**20:.2f} GiB, {seconds:.0f} s, exit code {code}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
