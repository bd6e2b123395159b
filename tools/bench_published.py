"""Published recipes and `best` on one model: perplexity, tasks, parameters, processor time and peak memory.

    PYTHONPATH=. python tools/bench_published.py --out F.jsonl --model MODEL --text CALIB --held-out TEXT --work DIR

Everything is done by the command line, as a user would. Statistics are measured once, and every recipe but the default
ones prunes from them (dense cache). Each line of the output is one measurement; a run goes on where the last one
stopped, and ends by printing the table. With --tasks, `evaluate` also answers so many items of each file.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tools.bench_best import OURS, PUBLISHED
from tools.bench_command import as_options, command
from tools.bench_lines import add_line, by_key

FROM_TEXT = (*OURS, "best-scaled")
RECIPES = (*PUBLISHED, "llm-pruner-taylor1", *FROM_TEXT)
DENSE = "dense"


def statistics(args: argparse.Namespace) -> Path:
    """Statistics of the dense model; measured once."""
    place: Path = args.work / f"{args.model.name}-{args.samples}-statistics"
    if not place.exists():
        took = command("calibrate", str(args.model), *calibration(args), "--folds", "4",
                       "--collect", "moments,gram,taylor", "-o", str(place))  # fmt: skip
        print(f"calibrate: {took.seconds:.0f} CPU s, {took.gibibytes:.2f} GiB", flush=True)
    return place


def calibration(args: argparse.Namespace) -> list[str]:
    """Options that say what a run calibrates on."""
    return as_options({"text": args.text, "samples": args.samples, "window": args.window})


def measure_recipe(args: argparse.Namespace, recipe: str, ratio: float, size: int | None) -> dict[str, Any]:
    """One recipe at one ratio, or at a size in parameters."""
    with tempfile.TemporaryDirectory(dir=args.work) as scratch:
        out, line = args.model, {}
        if recipe != DENSE:
            out = Path(scratch) / "out"
            data = calibration(args) if recipe in FROM_TEXT else ["--statistics", str(statistics(args))]
            amount = ["--ratio", f"{ratio:g}"] if size is None else ["--target-params", str(size)]
            how = ["--recipe", recipe, *amount, "--container", "any", "-o", str(out), "--json"]
            how += ["--evaluate-samples", "0"]
            took = command("prune", str(args.model), *how, *data)
            line = {"seconds": round(took.seconds), "gibibytes": took.gibibytes}
            line["parameters"] = json.loads(took.printed)["after"]["parameters"]
        common = ["evaluate", str(out), "--json"]
        held_out = as_options({"text": args.held_out, "window": args.window, "samples": args.held_out_samples})
        against = ["--against", str(args.model)] if args.kl and recipe != DENSE else []
        scores = json.loads(command(*common, *held_out, *against).printed)
        line["perplexity"] = scores["perplexity"]
        if against:
            line["kl"] = scores["kl"]
        if args.tasks:
            task_options = [word for task in args.tasks for word in ("--tasks", str(task))]
            answers = command(*common, *task_options, "--samples", str(args.items))
            line["tasks"] = json.loads(answers.printed)
        return line


def show(lines: dict[str, dict[str, Any]], model: str) -> None:
    """The table."""
    print("| ratio | recipe | parameters | perplexity | KL | CPU s | GiB |\n|---|---|---|---|---|---|---|")
    for line in lines.values():
        if line["model"] == model:
            millions = f"{line['parameters'] / 1e6:.1f} M" if "parameters" in line else "all"
            took = f"{line.get('seconds', '')} | {line.get('gibibytes', '')}"
            scores = f"{line['perplexity']:.2f} | {line['kl']:.4f}" if "kl" in line else f"{line['perplexity']:.2f} |"
            print(f"| {line['ratio']:.0%} | {line['recipe']} | {millions} | {scores} | {took} |")


def main() -> None:
    """Measure what is missing, and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines to write, or to go on with")
    parser.add_argument("--work", type=Path, required=True, help="folder for statistics and outputs")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="to calibrate on")
    parser.add_argument("--held-out", type=Path, required=True, help="to measure on")
    parser.add_argument("--recipes", nargs="+", default=[DENSE, *RECIPES])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--held-out-samples", type=int, default=32)
    parser.add_argument("--kl", action="store_true", help="also the divergence from the dense model, nats a token")
    parser.add_argument("--tasks", nargs="*", help="files of tasks, or names, as `evaluate --tasks` takes them")
    parser.add_argument("--items", type=int, default=100, help="of each task")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    lines = by_key(args.out)
    about = f"{args.samples} of {args.window}, {args.held_out_samples}"
    for ratio in args.ratios:
        for recipe in args.recipes:
            part = 0.0 if recipe == DENSE else ratio
            key = f"{args.model.name} | {part:g} | {recipe} | {about}{' | tasks' if args.tasks else ''}"
            if key in lines:
                continue
            # LLM-Pruner leaves blocks whole: it is asked for the size that the ratio leaves elsewhere.
            ridge_size = lines.get(key.replace(recipe, "ridge"), {}).get("parameters")
            size = ridge_size if recipe.startswith("llm-pruner") else None
            entry = {"key": key, "model": args.model.name, "ratio": part, "recipe": recipe}
            lines[key] = entry | measure_recipe(args, recipe, part, size)
            add_line(args.out, lines[key])
            print(json.dumps(lines[key]), flush=True)
    show(lines, args.model.name)


if __name__ == "__main__":
    main()
