"""One block of a large model's shape through every stage, and what follows for all of its blocks.

    PYTHONPATH=. python tools/bench_parts.py --out F.jsonl --text T.txt [--shapes …] [--jobs …]

Checkpoints of random weights with one and with two blocks of the shape are written (`make_synthetic_llama.py`). Each
job runs on both in a process of its own, which is measured: seconds on the clock, of processors, and the peak of
memory. What all blocks take is extrapolated: what one takes, and so many times what the second one adds.

The jobs are `fisher` (moments with Grams on four folds, the metric, sites tried out), `ridge` (sequential) and `best`
(order by three scores, curves of every width, drift, choice on folds). `best` weighs by energy here: of a single block
it would measure every site's effect, which it does not do for deep models.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench_command import Done, as_options, command
from tools.bench_lines import add_line, lines_of

FOLDS, RATIO = 4, 0.2


@dataclass(frozen=True)
class Large:
    """A model's blocks, and the options of `make_synthetic_llama.py` for their shape."""

    blocks: int
    options: tuple[str, ...]


SHAPES = {
    "llama-7b": Large(32, ("--hidden", "4096", "--intermediate", "11008", "--heads", "32")),
    "llama-3-70b": Large(80, ("--hidden", "8192", "--intermediate", "28672", "--heads", "64", "--kv-heads", "8")),
}
JOBS: dict[str, list[str]] = {
    "fisher": ["calibrate", "--collect", "moments,gram,fisher", "--folds", str(FOLDS)],
    "ridge": ["prune", "--ratio", str(RATIO), "--recipe", "ridge", "--evaluate-samples", "0"],
    "best": ["prune", "--ratio", str(RATIO), "--recipe", "best", "--set", "weigh_by=energy", "--evaluate-samples", "0"],
}


def checkpoint(place: Path, shape: str, blocks: int) -> Path:
    """Return a checkpoint of so many blocks of a shape; make it if it is not there."""
    folder = place / f"{shape}-{blocks}"
    if not folder.is_dir():
        script = Path(__file__).with_name("make_synthetic_llama.py")
        how = [*SHAPES[shape].options, "--layers", str(blocks)]
        subprocess.run([sys.executable, str(script), str(folder), *how], check=True)
    return folder


def run(model: Path, job: str, samples: Mapping[str, Any]) -> Done:
    """Run a job in a process of its own."""
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        name, *options = JOBS[job]
        return command(name, model, *options, *as_options(samples), "-o", f"{folder}/out")


def measure(place: Path, shape: str, job: str, samples: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line of results."""
    one, two = (run(checkpoint(place, shape, blocks), job, samples) for blocks in (1, 2))
    blocks = SHAPES[shape].blocks
    return {
        "shape": shape, "job": job, **{k: v for k, v in samples.items() if k != "text"},
        "seconds": one.clock, "cpu_seconds": one.seconds, "peak_bytes": one.gibibytes * 2**30, "two_blocks": two.clock,
        "blocks": blocks, "all_blocks": one.clock + (blocks - 1) * (two.clock - one.clock),
    }  # fmt: skip


def main() -> None:
    """Measure, and print a line for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    samples = {"text": args.text, "samples": args.samples, "window": args.window}
    earlier = lines_of(args.out)
    for shape in args.shapes:
        for job in args.jobs:
            if any((line["shape"], line["job"]) == (shape, job) for line in earlier):
                continue
            figures = measure(args.work, shape, job, samples)
            add_line(args.out, figures)
            print(
                f"{shape} {job}: {figures['seconds']:.0f} s ({figures['cpu_seconds']:.0f} of processors), "
                f"{figures['peak_bytes'] / 2**30:.1f} GiB; "
                f"{figures['blocks']} blocks {figures['all_blocks'] / 3600:.1f} h",
                flush=True,
            )


if __name__ == "__main__":
    main()
