"""Whole blocks against units of spaces, and both under one size: perplexity or top-1, size, and measured latency.

    PYTHONPATH=. python tools/bench_depth.py --out depth.jsonl --models llama-pystdlib-3m [--shares 0.2 0.4]
    PYTHONPATH=. python tools/bench_depth.py --out depth.jsonl --models FOLDER --text CALIB --held-out TEXT --window 512
    PYTHONPATH=. python tools/bench_depth.py --out depth.jsonl --table     # print what is there, measure nothing

A share is of the blocks' parameters. `depth` entrants drop so many blocks, by each choice, with a map and without one.
`width` and `joint` come down to the parameters, or with --latency to the time, that blocks of that share leave.
--timed measures every output beside the dense model, in PyTorch and onnxruntime, in one run: on a machine with nothing
else to do. Each line of the output is one measurement; a run goes on where the last one stopped.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.stages.depth.preview import without
from tools.bench_lines import add_line, by_key
from tools.bench_perplexity import SHARED, subjects

CHOICES = ("influence", "cosine", "divergence", "loss")
MAPS = {"none": {"method": "none"}, "linear": {"method": "linear"}}
WIDTHS = ("ridge", "best-uniform", "best")
BUDGET = {"depth.under": None}
"""What makes `best` hold blocks against units under any size."""


def entrants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → recipe and changes of it; of depth recipes how many blocks go is added."""
    recipes: dict[str, tuple[str, dict[str, Any]]] = {}
    for choice in CHOICES:
        for name, compensation in MAPS.items():
            changes = {"depth.choose": choice, "depth.compensation": compensation}
            recipes[f"depth-{choice}-{name}"] = ("depth", changes)
    recipes |= {f"width-{recipe}": (recipe, {}) for recipe in WIDTHS}
    return recipes | {"joint-best": ("best", BUDGET)}


def data_of(args: argparse.Namespace, model: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A model's folder, and what it is calibrated and evaluated on."""
    if args.text is not None:
        common = {"window": args.window}
        return (
            Path(model),
            {"text": args.text, "samples": args.samples, **common},
            {"text": args.held_out, "samples": args.windows, **common},
        )
    if model.startswith("vit"):
        images = {"images": str(SHARED / "imagenet-1per-class")}
        labels = {"labels": str(SHARED / "imagenet-1per-class" / "labels.csv")}
        return SHARED / model, {**images, **labels, "samples": args.samples}, {**images, **labels}
    subject = subjects()[model]
    common = {"bos": "never", "window": subject.window}
    return (
        subject.folder,
        {"text": subject.calibration, "samples": args.samples, **common},
        {"text": subject.evaluation, "samples": args.windows, **common},
    )


def score(folder: Path, held_out: dict[str, Any]) -> dict[str, float]:
    figures = ckpt_prune.evaluate(folder, **held_out, progress=False).data()
    key = "top1" if "top1" in figures else "perplexity"
    return {key: figures[key]}


def timings(dense: Path, out: Path, rounds: int) -> dict[str, float]:
    """Share of the dense model's median time, by runtime and phase."""
    comparison = ckpt_prune.benchmark(dense, out, onnx=True, rounds=rounds, progress=False)
    return {
        f"{row.runtime} {block.phase}": round(row.p50_ratio, 4)
        for block in comparison.blocks
        for row in block.rows
        if row.label == "B" and row.p50_ratio is not None
    }


def measure_point(args: argparse.Namespace, model: str, share: float, name: str) -> dict[str, Any]:
    folder, calibration, held_out = data_of(args, model)
    recipe, changes = entrants()[name]
    dense = Model.open(folder)
    gone = max(1, round(share * dense.blocks))
    size: dict[str, Any] = {}
    if recipe == "depth":
        changes = changes | {"depth.drop": gone}
    elif args.latency is not None:
        size = {"target_latency": f"{100 * (1 - share):g}%{args.latency}"}
    else:
        size = {"target_params": str(cost_of(without(dense, range(gone))).parameters)}
    with tempfile.TemporaryDirectory() as scratch:
        out, start = Path(scratch) / "out", time.monotonic()
        size |= {"evaluate_samples": 0, "progress": False}
        ckpt_prune.prune(folder, output=out, recipe=recipe, overrides=changes, **calibration, **size)
        seconds = round(time.monotonic() - start, 1)
        report = json.loads((out / REPORT).read_text())
        line: dict[str, Any] = {
            "parameters": report["after"]["parameters"],
            "share_left": round(report["after"]["parameters"] / report["before"]["parameters"], 4),
            "gone": dense.blocks - len(report["depth"]["kept"]) if report.get("depth") else 0,
            "tried": {trial["blocks"]: trial["measured"] for trial in (report.get("depth") or {}).get("tried", [])},
            "seconds": seconds,
            **score(out, held_out),
        }
        if "latency" in report:
            line["latency"] = report["latency"]
        if args.timed:
            line["timed"] = timings(folder, out, args.rounds)
    return line


def table(lines: dict[str, dict[str, Any]]) -> None:
    print("| model | share | entrant | parameters | blocks gone | quality | timed |\n|---|---|---|---|---|---|---|")
    for line in lines.values():
        quality = line.get("perplexity", line.get("top1"))
        timed = ", ".join(f"{key} {value:.0%}" for key, value in line.get("timed", {}).items())
        print(
            f"| {line['model']} | {line['share']:g} | {line['entrant']} | {line['share_left']:.1%} | {line['gone']} | "
            f"{quality:.3f} | {timed} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["llama-pystdlib-3m"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.4])
    parser.add_argument("--entrants", nargs="+", choices=entrants(), default=list(entrants()))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--text", help="Calibration text, where models are folders.")
    parser.add_argument("--held-out", help="Text to evaluate them on.")
    parser.add_argument("--latency", nargs="?", const="", help="Come down to a time, of what is named: @512, @token.")
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    lines = by_key(args.out)
    for model in [] if args.table else args.models:
        for share in args.shares:
            for name in args.entrants:
                key = f"{Path(model).name} {share:g} {name} {args.samples} {args.latency}"
                if key in lines:
                    continue
                point = {"key": key, "model": Path(model).name, "share": share, "entrant": name}
                try:
                    lines[key] = point | measure_point(args, model, share, name)
                except UserError as error:
                    print(f"{key}: {error}", flush=True)
                    continue
                add_line(args.out, lines[key])
    table(lines)


if __name__ == "__main__":
    main()
