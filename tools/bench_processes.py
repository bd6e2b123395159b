"""One process and several at the same job: seconds, memory of each process, and what differs in the results.

    PYTHONPATH=. python tools/bench_processes.py --out F.jsonl --model M --text T [--jobs …] [--launches 1x1 1x2 2x1]

A launch is PROCESSESxTHREADS; several processes are started by torchrun. `recover` goes on with what `ridge` left of
the first launch. What a launch makes is held against what the first one made: the largest difference of a tensor,
relative to its largest entry. Times mean something on an otherwise idle machine alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tools.bench_lines import add_line, by_key

JOBS: dict[str, list[str]] = {
    "calibrate": ["calibrate", "--collect", "moments,gram", "--folds", "4"],
    "ridge": ["prune", "--recipe", "ridge", "--ratio", "0.2", "--evaluate-samples", "0"],
    "recover": ["recover", "--epochs", "1"],
    "best": ["prune", "--recipe", "best", "--ratio", "0.2", "--evaluate-samples", "0"],
}
SHARED_OPTIONS = ["--compute-dtype", "float32"]
POLL = 0.2
"""Seconds between looks at the memory of processes that torchrun started."""


def make_launch(launch: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command line of a launch, and its environment."""
    processes, threads = map(int, launch.split("x"))
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    line = [sys.executable, *(several if processes > 1 else []), "-m", "ckpt_prune", *words]
    return line, {**os.environ, "OMP_NUM_THREADS": str(threads)}


def peaks(parent: int) -> Iterator[tuple[int, int]]:
    """Number and peak resident bytes of each process below (and with) one that run ckpt_prune."""
    below = {parent}
    for entry in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            status = dict(part.split(":\t", 1) for part in Path(f"/proc/{entry}/status").read_text().splitlines())
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if entry in below or int(status["PPid"]) in below:
            below.add(entry)
            if b"ckpt_prune" in words and b"torch.distributed.run" not in words and "VmHWM" in status:
                yield entry, 1024 * int(status["VmHWM"].split()[0])


def measure_command(line: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a command, and look at what it takes."""
    largest: dict[int, int] = {}
    start = time.monotonic()
    process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while True:
        done, status, used = os.wait4(process.pid, os.WNOHANG)
        if done:
            break
        largest.update(peaks(process.pid))
        time.sleep(POLL)
    if status:
        assert process.stderr is not None
        sys.exit(f"{' '.join(line)}: {process.stderr.read().decode()}")
    return {
        "seconds": time.monotonic() - start,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_bytes": [largest[number] for number in sorted(largest)],
    }


def difference(folder: Path, first: Path) -> float:
    """The largest difference of a tensor of two folders, relative to its largest entry.

    Raises:
        KeyError: they have not the same tensors.
    """
    worst = 0.0
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as ours, safe_open(first / path.relative_to(folder), "pt") as theirs:
            for name in ours.keys():  # noqa: SIM118
                a, b = ours.get_tensor(name).double(), theirs.get_tensor(name).double()
                if a.shape != b.shape:
                    return float("inf")
                worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if a.numel() else 0.0)
    return worst


def words_of(job: str, model: Path, data: list[str], work: Path, launch: str, first: str) -> list[str]:
    """The words of a job's command; `first` is the launch whose `ridge` is recovered."""
    command, *options = JOBS[job]
    source = work / f"ridge-{first}" if job == "recover" else model
    dense = ["--dense", str(model)] if job == "recover" else []
    return [command, str(source), *dense, *options, *data, *SHARED_OPTIONS, "-o", str(work / f"{job}-{launch}")]


def main() -> None:
    """Measure, and print a line for each job and launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bench_processes")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--launches", nargs="+", default=["1x1", "1x2", "2x1"])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    data = ["--text", str(args.text), "--samples", str(args.samples), "--window", str(args.window)]
    for job in args.jobs:
        for launch in args.launches:
            key = f"{job} {launch}"
            if key in by_key(args.out):
                continue
            line, environment = make_launch(
                launch, words_of(job, args.model, data, args.work, launch, args.launches[0])
            )
            figures = measure_command(line, environment)
            output, first = args.work / f"{job}-{launch}", args.work / f"{job}-{args.launches[0]}"
            figures["difference"] = difference(output, first)
            add_line(args.out, {"key": key, "samples": args.samples, "window": args.window, **figures})
            memory = ", ".join(f"{size / 2**20:.0f}" for size in figures["peak_bytes"])
            print(
                f"{key}: {figures['seconds']:.0f} s, {figures['cpu_seconds']:.0f} of processors, {memory} MiB, "
                f"differs by {figures['difference']:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
