"""What jobs take beside the FLOPs and bytes that they cannot do without, at this machine's speed.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/bench_floor.py --out F.jsonl --text T.txt --models FOLDER ...

The floor of a job: the FLOPs of its products, factors and decompositions (`transform/work.py`) at the speed of matrix
products in the type they are made in, and the bytes that it writes at the speed of the disk. What element-wise
operations move, digests, Python and starting are no part of it. Seconds are of processors: with one thread, on a
machine on which at most one other process runs, that is what the clock says. Models made up of a larger one's blocks
come from `make_synthetic_llama.py`. Each line of the output is one measurement; a run goes on where the last stopped.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ckpt_prune.runner.estimate.estimate import of_calibration
from ckpt_prune.runner.estimate.machine_speed import Rates, measured_rates
from ckpt_prune.runner.estimate.work import Stage, Work

from ckpt_prune.containers.opening import open_model
from ckpt_prune.measure.moments.kinds import Collect
from tools.bench_command import as_options, command
from tools.bench_lines import add_line, by_key
from tools.bench_parts import stages_of_prune

COLLECT: list[Collect] = ["moments", "gram"]
PRUNES = {"ridge, dense cache": "ridge", "ridge, sequential": "ridge", "best": "best"}
JOBS = ("calibrate", *PRUNES)
RATIO = 0.2


def floor(stages: list[Stage], rates: Rates) -> float:
    """Seconds that no implementation goes below."""

    def least(work: Work) -> float:
        return (
            work.gemm / rates.gemm
            + work.grams / rates.grams
            + work.single / rates.single
            + (work.wide + work.factor + work.eigen) / rates.wide
            + work.disk / rates.disk
        )

    return sum(least(stage.work) for stage in stages)


def stages_of(model: Path, job: str, samples: Mapping[str, Any], statistics: Path) -> list[Stage]:
    """What a job is made of."""
    if job == "calibrate":
        return of_calibration(open_model(str(model)), samples["samples"], samples["window"], COLLECT, 1)
    data = {"statistics": statistics} if job == "ridge, dense cache" else samples
    return stages_of_prune(model, {"recipe": PRUNES[job], "ratio": RATIO, "container": "any", **data})


def seconds_of(model: Path, job: str, samples: Mapping[str, Any], statistics: Path, scratch: Path) -> float:
    """Of processors, in a process of its own."""
    if job == "calibrate":
        line = ["calibrate", model, "--collect", ",".join(COLLECT), *as_options(samples), "-o", statistics]
    else:
        given = as_options({"statistics": statistics} if job == "ridge, dense cache" else samples)
        how = ["--recipe", PRUNES[job], "--ratio", str(RATIO), "--container", "any"]
        line = ["prune", model, *how, *given, "-o", scratch / "out"]
    return command(*line, "--overwrite").seconds


def main() -> None:
    """Measure, and print a line for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    samples = {"text": args.text, "samples": args.samples, "window": args.window}
    known = by_key(args.out)
    print("| model | job | CPU s | floor | times |\n|---|---|---|---|---|")
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            statistics = Path(folder) / "statistics"
            for job in args.jobs:
                key = f"{model.name} | {job} | {args.samples} of {args.window}"
                if key not in known:
                    if job == "ridge, dense cache" and not statistics.exists():
                        seconds_of(model, "calibrate", samples, statistics, Path(folder))
                    took = seconds_of(model, job, samples, statistics, Path(folder))
                    rates = measured_rates(torch.device("cpu"), open_model(str(model)).dtype)
                    least = floor(stages_of(model, job, samples, statistics), rates)
                    known[key] = {"key": key, "cpu_seconds": took, "floor": least}
                    add_line(args.out, known[key])
                line = known[key]
                shares = f"{line['cpu_seconds']:.0f} | {line['floor']:.1f} | {line['cpu_seconds'] / line['floor']:.2f}"
                print(f"| {model.name} | {job} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
