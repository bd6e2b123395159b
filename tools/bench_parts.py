"""One block of a large model's shape through every stage, and what follows for all of its blocks.

    PYTHONPATH=. python tools/bench_parts.py --out F.jsonl --text T.txt [--shapes …] [--jobs …] [--estimate]

A checkpoint of random weights with a single block of the shape is written (`make_synthetic_llama.py`). Each job runs
on it in a process of its own, which is measured: seconds on the clock, of processors, and the peak of memory. Beside it
stands what the tool estimates of the job. What all blocks take is extrapolated: the estimate of as many blocks (the
one of a single block and so many times what a second one adds), times measured over estimated. For a GPU there is the
estimate alone, at the rates of `GPU`; for `--processes` of them, samples are shared and what is solved is not
(parallel/README.md, section 2). Moments, metric and streams grow with `--samples`, what is solved does not. With
`--estimate` nothing is run: the estimates alone are told, by the FLOPs and bytes of each stage.

The jobs are `fisher` (moments with Grams on four folds, the metric, sites tried out), `ridge` (sequential) and `best`
(order by three scores, curves of every width, drift, choice on folds; weighed by energy, since of a single block every
site's own effect would be measured, which deep models are spared).
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ckpt_prune.runner.estimate.estimate import Stage, of_calibration, of_prune
from ckpt_prune.runner.estimate.machine_speed import Rates, measured_rates

from ckpt_prune.containers.opening import open_model
from ckpt_prune.measure.moments.kinds import Collect
from ckpt_prune.options import PruneOptions, checked
from ckpt_prune.runner.read_job import prune_request, read_asked
from ckpt_prune.runner.read_recipe import read_recipe
from ckpt_prune.runner.run_job import preview_job
from tools.bench_command import as_options, command
from tools.bench_lines import add_line, lines_of

GPU = Rates(3e14, 2e14, 4e13, 4e13, 1e13, 3e11, 2e12, 5e11, 1e5, 1e9, 1e9, 2**30)
"""Of an accelerator with 990 TFLOP/s in bfloat16, 67 in float64 and 3.3 TB/s: about half of that, and less where
factors and decompositions are made."""
SHARED = ("gemm", "grams", "single", "moved", "reduced", "calls")
"""Of `machine.Rates`: what samples take that go through a block, of which every process has its share."""
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
COLLECT: list[Collect] = ["moments", "gram", "fisher"]
JOBS: dict[str, list[str]] = {
    "fisher": ["calibrate", "--collect", ",".join(COLLECT), "--folds", str(FOLDS)],
    "ridge": ["prune", "--ratio", str(RATIO), "--recipe", "ridge"],
    "best": ["prune", "--ratio", str(RATIO), "--recipe", "best", "--set", "weigh_by=energy"],
}


def checkpoint(place: Path, shape: str, blocks: int) -> Path:
    """A checkpoint of so many blocks of a shape, made where it is not there."""
    folder = place / f"{shape}-{blocks}"
    if not folder.is_dir():
        script = Path(__file__).with_name("make_synthetic_llama.py")
        how = [*SHAPES[shape].options, "--layers", str(blocks)]
        subprocess.run([sys.executable, str(script), str(folder), *how], check=True)
    return folder


def stages(model: Path, job: str, samples: Mapping[str, Any]) -> list[Stage]:
    """What the tool takes a job to be made of."""
    if job == "fisher":
        return of_calibration(open_model(str(model)), samples["samples"], samples["window"], COLLECT, FOLDS)
    changes = {"set": ("weigh_by=energy",)} if job == "best" else {}
    return stages_of_prune(model, {"recipe": job, "ratio": RATIO, **changes, **samples})


def stages_of_prune(model: Path, given: Mapping[str, Any]) -> list[Stage]:
    """What the tool takes a prune to be made of, by its options."""
    options = checked(PruneOptions, {"model": str(model), "output": model.with_name("never"), "dry_run": True, **given})
    found = of_prune(preview_job(prune_request(read_asked(read_recipe(options)), lambda line: None)))
    assert found is not None
    return found[0]


def run(model: Path, job: str, samples: Mapping[str, Any]) -> dict[str, float]:
    """Run a job in a process of its own."""
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        name, *rest = JOBS[job]
        done = command(name, model, *rest, *as_options(samples), "-o", f"{folder}/out")
        return {"seconds": done.clock, "cpu_seconds": done.seconds, "peak_bytes": done.gibibytes * 2**30}


def together(rates: Rates, processes: int) -> Rates:
    """Those of several machines that share the samples, while the first one solves."""
    return replace(rates, **{name: processes * getattr(rates, name) for name in SHARED})


def measure(
    place: Path, shape: str, job: str, samples: Mapping[str, Any], processes: int, estimate: bool
) -> dict[str, Any]:
    """One line of results; with `estimate` nothing is run."""
    one, two = checkpoint(place, shape, 1), checkpoint(place, shape, 2)
    rates = measured_rates(torch.device("cpu"), torch.bfloat16)

    def told(machine: Rates) -> tuple[float, float]:
        first, second = (sum(s.work.seconds(machine) for s in stages(each, job, samples)) for each in (one, two))
        return first, first + (SHAPES[shape].blocks - 1) * (second - first)

    (estimated, whole), (_, gpu), (_, several) = told(rates), told(GPU), told(together(GPU, processes))
    found = {} if estimate else run(one, job, samples)
    scale = found.get("seconds", estimated) / estimated
    return {
        "shape": shape, "job": job, **{k: v for k, v in samples.items() if k != "text"}, **found,
        "estimated": estimated, "blocks": SHAPES[shape].blocks, "all_blocks": whole * scale, "gpu": gpu,
        "processes": processes, "gpus": several, "rates": asdict(rates),
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
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--estimate", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    samples = {"text": args.text, "samples": args.samples, "window": args.window}
    known = lines_of(args.out)
    for shape in args.shapes:
        for job in args.jobs:
            if any((line["shape"], line["job"]) == (shape, job) for line in known):
                continue
            found = measure(args.work, shape, job, samples, args.processes, args.estimate)
            add_line(args.out, found)
            took = "not run"
            if not args.estimate:
                took = f"{found['seconds']:.0f} s ({found['cpu_seconds']:.0f} of processors), "
                took += f"{found['peak_bytes'] / 2**30:.1f} GiB"
            print(
                f"{shape} {job}: {took}, estimated {found['estimated']:.0f} s; {found['blocks']} blocks "
                f"{found['all_blocks'] / 3600:.1f} h, on a GPU {found['gpu'] / 60:.0f} min, "
                f"on {args.processes} {found['gpus'] / 60:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
