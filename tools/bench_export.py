"""ONNX graphs of the models in ../shared/data, dense and pruned: that they are right, how large, and how fast.

    PYTHONPATH=. python tools/bench_export.py graphs --out graphs.jsonl [--models NAME ...]
    PYTHONPATH=. python tools/bench_export.py speed --out speed.jsonl [--models NAME ...]
    PYTHONPATH=. python tools/bench_export.py widths --out widths.jsonl
    PYTHONPATH=. python tools/bench_export.py cost --out cost.jsonl --folders MODEL ... --text HELD_OUT.txt

Everything is done by the command line, as a user would. Each line of the output is one measurement; a run goes on where
the last one stopped, and ends by printing the table. `speed` times dense and pruned models in turns, in one run, two
threads each, in PyTorch and in onnxruntime; `widths` does it for one made-up Llama at MLP widths beside each other.
`cost` is what an export with its proof takes of processors and memory.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench_command import command
from tools.bench_lines import add_line, by_key, lines_of
from tools.bench_perplexity import SHARED, subjects

RATIOS = (0.3, 0.5)
GRAPHS = {"fp32": (), "fp32, fused for cpu": ("--optimize", "cpu"), "fp16": ("--dtype", "fp16")}
TEXT, IMAGES = "ridge", "corp"
"""Recipes: heads and MLP of a language model, the MLP and q and k of a ViT."""
WIDTHS = (2048, 1472, 1434, 1433, 1408)
"""Of an MLP: the dense one; 30 % dropped, rounded up to a multiple of 64, even and odd; and 22 times 64."""


@dataclass(frozen=True)
class Model:
    """A model, what it is pruned with and what its graph is proved on."""

    name: str
    folder: Path
    recipe: str
    calibration: tuple[str, ...]
    proof: tuple[str, ...]


def models() -> list[Model]:
    entries = []
    for subject in subjects().values():
        if subject.calibration:
            data = ("--text", subject.calibration, "--window", str(subject.window), "--samples", "32")
            proof = ("--text", subject.evaluation, "--window", str(subject.window), "--samples", "16")
        else:
            text = sorted(str(p) for p in (SHARED / "text-pystdlib").glob("*.txt"))
            data = ("--text", text[0], "--window", str(subject.window), "--samples", "32")
            proof = ("--window", str(subject.window), "--samples", "16")
        entries.append(Model(subject.name, subject.folder, TEXT, data, proof))
    plays = SHARED / "text-tinyshakespeare"
    entries.append(
        Model(
            "opt-shakespeare-char-0.8m",
            SHARED / "opt-shakespeare-char-0.8m",
            TEXT,
            ("--text", f"{plays}/calib_first90.txt", "--window", "64", "--samples", "64"),
            ("--text", f"{plays}/eval_last10.txt", "--window", "64", "--samples", "64"),
        )
    )
    images = str(SHARED / "imagenet-1per-class")
    entries.append(
        Model(
            "vit-tiny-imagenet",
            SHARED / "vit-tiny-imagenet",
            IMAGES,
            ("--images", images, "--samples", "128", "--no-diagnostics"),
            ("--images", images, "--samples", "256"),
        )
    )
    return entries


def ckpt_prune(*arguments: str) -> str:
    """Run a command of the package; what it printed."""
    printed = command(*arguments, ends=(0, 1)).printed
    if not printed:
        raise RuntimeError(f"{' '.join(arguments)}: nothing was printed")
    return printed


def checkpoint(model: Model, ratio: float, work: Path) -> Path:
    """The dense model, or it pruned; made once."""
    if not ratio:
        return model.folder
    out = work / f"{model.name}-{ratio:g}"
    if not out.exists():
        how = ("--recipe", model.recipe, "--ratio", str(ratio), "--container", "any")
        ckpt_prune("prune", str(model.folder), *how, *model.calibration, "-o", str(out))
    return out


def measure_graphs(model: Model, args: argparse.Namespace, done: set[str]) -> None:
    for ratio in (0.0, *RATIOS):
        for variant, options in GRAPHS.items():
            key = f"{model.name} | {ratio:g} | {variant}"
            if key in done:
                continue
            start = time.monotonic()
            out = args.work / "graph"
            printed = ckpt_prune(
                "export", str(checkpoint(model, ratio, args.work)), "-o", str(out), "--overwrite", "--json",
                *model.proof, *options,
            )  # fmt: skip
            report = json.loads(printed)
            # A graph that did not pass is a result too.
            (proved,) = report["validation"]["graphs"]
            cases = proved["cases"]
            line = {
                "key": key,
                "model": model.name,
                "ratio": ratio,
                "graph": variant,
                "written": report["written"],
                "bytes": sum(report["bytes"].values()),
                "seconds": time.monotonic() - start,
                "max_abs": largest(cases, "max_abs"),
                "mean_abs": largest(cases, "mean_abs"),
                "agreement": min((case["agreement"] for case in cases if case["agreement"] is not None), default=None),
                "metrics": proved["metrics"],
                "proof": model.proof,
            }
            record(args.out, line)


def largest(cases: list[dict[str, Any]], figure: str) -> float | None:
    """The largest figure of all cases; None if a case has none, as if its outputs are infinite."""
    values = [case[figure] for case in cases]
    return None if None in values else max(values, default=None)


def measure_speed(model: Model, args: argparse.Namespace, done: set[str]) -> None:
    for ratio in RATIOS:
        key = f"{model.name} | {ratio:g}"
        if key not in done:
            other = checkpoint(model, ratio, args.work)
            record(args.out, {"key": key, "model": model.name, "ratio": ratio} | time_models(model.folder, other, args))


def measure_widths(args: argparse.Namespace, done: set[str]) -> None:
    """The dense MLP against narrower ones, some of odd width."""
    script = Path(__file__).with_name("make_synthetic_llama.py")
    paths = {}
    for width in WIDTHS:
        paths[width] = args.work / f"llama-{width}"
        if not paths[width].exists():
            sizes = {"--layers": 6, "--hidden": 768, "--intermediate": width, "--heads": 12}
            options = [str(value) for pair in sizes.items() for value in pair]
            subprocess.run([sys.executable, str(script), str(paths[width]), *options, "--dtype", "float32"], check=True)
    for width in WIDTHS[1:]:
        key = f"synthetic | {width}"
        if key not in done:
            record(
                args.out,
                {"key": key, "width": width} | time_models(paths[WIDTHS[0]], paths[width], args, "--generate", "0"),
            )


def measure_cost(folder: Path, args: argparse.Namespace, done: set[str]) -> None:
    for proof in (("--text", args.text), ("--no-validate",)):
        key = f"{folder.name} | {proof[0]}"
        if key in done:
            continue
        out = args.work / "graph"
        took = command("export", folder, "-o", out, "--overwrite", "--json", *proof)
        size = sum(json.loads(took.printed)["bytes"].values())
        line = {"key": key, "seconds": took.seconds, "clock": took.clock, "gibibytes": took.gibibytes, "bytes": size}
        record(args.out, line)


def print_cost(lines: list[dict[str, Any]]) -> None:
    print("\n| model | CPU s | seconds | peak MiB | graph MiB |")
    print("|---|---|---|---|---|")
    for line in lines:
        peak, size = line["gibibytes"] * 1024, line["bytes"] / 2**20
        print(f"| {line['key']} | {line['seconds']:.1f} | {line['clock']:.1f} | {peak:.0f} | {size:.0f} |")


def time_models(dense: Path, pruned: Path, args: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Time two models by `benchmark`; return its result without every round's time."""
    options = ("--onnx", "--threads", "2", "--rounds", str(args.rounds), "--batch", "1,8", "--json", *more)
    printed = ckpt_prune("benchmark", str(dense), str(pruned), *options)
    comparison: dict[str, Any] = json.loads(printed)
    for block in comparison["blocks"]:
        for row in block["rows"]:
            del row["latencies_ms"]
    return {"benchmark": comparison}


def print_graphs(lines: list[dict[str, Any]]) -> None:
    print("\n| model | dropped | graph | MiB | largest difference | metric | PyTorch | onnxruntime |")
    print("|---|---|---|---|---|---|---|---|")
    for line in lines:
        size = f"{line['bytes'] / 2**20:.2f}" if line["written"] else "not written"
        difference = cell(line["max_abs"], ".1e")
        for metric in line["metrics"] or [{"name": "-", "pytorch": None, "onnxruntime": None}]:
            digits = ".2%" if metric["name"] == "top-1" else ".3f"
            values = (cell(metric[side], digits) for side in ("pytorch", "onnxruntime"))
            print(
                f"| {line['model']} | {line['ratio']:.0%} | {line['graph']} | {size} | {difference} | "
                f"{metric['name']} | {' | '.join(values)} |"
            )


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_speed(lines: list[dict[str, Any]]) -> None:
    print("\n| model | what | batch | FLOPs | PyTorch ms | | onnxruntime ms | |")
    print("|---|---|---|---|---|---|---|---|")
    for line in lines:
        what = f"{line['model']}, {line['ratio']:.0%}" if "ratio" in line else f"MLP {line['width']}"
        for block in line["benchmark"]["blocks"]:
            cells, share = [], ""
            for runtime in ("PyTorch", "onnxruntime"):
                dense, pruned = (row for row in block["rows"] if row["runtime"] == runtime)
                cells += [f"{dense['p50_ms']:.1f} -> {pruned['p50_ms']:.1f}", f"{pruned['p50_ratio']:.2f}"]
                share = f"{pruned['flops_ratio']:.2f}"
            print(f"| {what} | {block['phase']} | {block['batch']} | {share} | {' | '.join(cells)} |")


def record(out: Path, line: dict[str, Any]) -> None:
    add_line(out, line)
    print(json.dumps(line)[:300], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["graphs", "speed", "widths", "cost"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="Folder that pruned models are kept in.")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="Models that `cost` exports.")
    parser.add_argument("--text", help="What their graphs are proved on.")
    args = parser.parse_args()
    models_by_name = {model.name: model for model in models()}
    if unknown := set(args.models or ()) - set(models_by_name):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(models_by_name)}")
    chosen = [models_by_name[name] for name in args.models or models_by_name]
    args.work.mkdir(parents=True, exist_ok=True)
    done = set(by_key(args.out))
    if args.what == "widths":
        measure_widths(args, done)
    elif args.what == "cost":
        for folder in args.folders:
            measure_cost(folder, args, done)
    else:
        for model in chosen:
            (measure_graphs if args.what == "graphs" else measure_speed)(model, args, done)
    lines = lines_of(args.out)
    {"graphs": print_graphs, "cost": print_cost}.get(args.what, print_speed)(lines)


if __name__ == "__main__":
    main()
