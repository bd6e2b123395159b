"""Perplexity of every recipe at several ratios, dense cache and sequential, on the models in ../shared/data.

    PYTHONPATH=. python tools/bench_perplexity.py --out perplexity.jsonl [--models NAME ...] [--recipes NAME ...]

Each line of the output is one measurement; a run goes on where the last one stopped, and ends by printing the table.
Figures depend on model, text, window and samples: all are in every line.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ckpt_prune.datasets import standard_library
from ckpt_prune.demo.run import model_folder
from ckpt_prune.evaluation.perplexity import perplexity
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.samples.text import (
    cut_windows,
    load_tokenizer,
    mix_windows,
    read_text,
    tokenise_text,
)
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.model.model import Model
from ckpt_prune.recipe.shipped import shipped_recipes
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages.recipe_files import load_recipe
from tools.bench_lines import add_line, by_key, lines_of

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Subject:
    """A model with its texts."""

    name: str
    window: int
    folder: Path
    calibration: str
    evaluation: str


def subjects() -> dict[str, Subject]:
    def share(name: str, window: int, calibration: str, evaluation: str) -> Subject:
        return Subject(name, window, SHARED / name, f"{SHARED}/{calibration}", f"{SHARED}/{evaluation}")

    entries = [
        Subject("embedded", 256, model_folder(), "", ""),
        share("llama-pystdlib-3m", 256, "text-pystdlib/calib.txt", "text-pystdlib/eval.txt"),
        share("llama-pycode-16m", 256, "text-pycode/calib.txt", "text-pycode/eval.txt"),
        share("llama-stories260k", 512, "text-tinystories/calib_bos.txt", "text-tinystories/eval_bos.txt"),
        share("llama-stories-char-1m", 256, "text-tinystories/calib_bos.txt", "text-tinystories/eval_bos.txt"),
    ]
    return {subject.name: subject for subject in entries}


def windows_of(subject: Subject, samples: int, evaluated: int, choose: str) -> tuple[Tensor, Tensor]:
    tokenizer = load_tokenizer(subject.folder)
    if subject.calibration:
        texts = [read_text([Path(subject.calibration)]), read_text([Path(subject.evaluation)])]
    else:
        texts = [standard_library.read_corpus(held_out=False), standard_library.read_corpus(held_out=True)]
    calibration, held_out = (tokenise_text(tokenizer, text, bos="never") for text in texts)
    chosen = mix_windows([calibration], samples=samples, window=subject.window, seed=0, choose=choose)[0]
    if subject.calibration:
        return chosen, cut_windows(held_out, window=subject.window, limit=evaluated)
    # As in the demo: held-out modules differ much in difficulty.
    return chosen, mix_windows([held_out], samples=evaluated, window=subject.window, seed=0)[0]


def run_subject(subject: Subject, args: argparse.Namespace, done: set[str]) -> None:
    calibration, held_out = windows_of(subject, args.samples, args.windows, args.choose)
    model = Model.open(subject.folder)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        statistics = None
        cells = [("dense", 0.0, "-")]
        cells += [(r, ratio, t) for r in args.recipes for ratio in args.ratios for t in ("dense cache", "sequential")]
        for recipe_name, ratio, target in cells:
            settings = [recipe_name, f"{ratio:g}", target, args.samples, args.windows, args.choose]
            key = " | ".join(map(str, [subject.name, *settings]))
            if key in done:
                continue
            recipe = load_recipe("magnitude" if recipe_name == "dense" else recipe_name, ratio=ratio)
            folds = min(4, args.samples) if recipe.needs_folds else 1
            live = LiveSamples(TokenWindows(calibration), folds, compute_dtype=torch.float32)
            if target == "sequential" and recipe.target != "sequential":
                continue
            start = time.monotonic()
            out = Path(scratch) / "out"
            note = {}
            if recipe_name == "dense":
                out = subject.folder
            else:
                request = Job(model, recipe, live=live, device=device)
                if target == "dense cache" and recipe.needs_moments:
                    if recipe.perplexity_grid:
                        request = replace(request, recipe=recipe.model_copy(update={"target": "dense"}))
                    if statistics is None:
                        statistics = measure_statistics(
                            model,
                            TokenWindows(calibration),
                            Path(scratch) / "statistics",
                            seed=0,
                            folds=min(4, args.samples),
                            collect=("moments", "gram"),
                            device=device,
                            compute_dtype=torch.float32,
                        )
                    request = replace(request, statistics=statistics)
                    if recipe.target == "sequential" and not recipe.perplexity_grid:
                        request = replace(request, live=None)
                report = run_job(request, out, overwrite=True).report.data()
                note = {
                    "parameters": report["after"]["parameters"],
                    "container": report["container"]["model_type"],
                    "kept": {s["space"]: f"{len(s['kept'])}/{s['units']}" for s in report["sites"]},
                    "lambda": (report["lambda_search"] or {}).get("chosen"),
                }
            seconds = time.monotonic() - start
            score = perplexity(load_model(out, device=device), held_out)
            line = {
                "key": key,
                "model": subject.name,
                "recipe": recipe_name,
                "ratio": ratio,
                "target": target,
                "perplexity": score.perplexity,
                "window": subject.window,
                "tokens": score.tokens,
                "samples": args.samples,
                "choose": args.choose,
                "seconds": round(seconds, 2),
                **note,
            }
            add_line(args.out, line)
            print(f"{key}: {score.perplexity:.3f} ({seconds:.1f} s)", flush=True)


def print_table(lines: list[dict[str, object]]) -> None:
    """Markdown: a row for each model, recipe and target, a column for each ratio."""
    ratios = sorted({float(str(line["ratio"])) for line in lines if line["recipe"] != "dense"})
    cells = {(x["model"], x["recipe"], x["target"], x["ratio"]): x["perplexity"] for x in lines}
    print("| model | recipe | target | " + " | ".join(f"{r:.0%}" for r in ratios) + " |")
    print("|---|---|---|" + "---|" * len(ratios))
    seen = list(dict.fromkeys((x["model"], x["recipe"], x["target"]) for x in lines))
    for model, recipe, target in seen:
        values = [cells.get((model, recipe, target, 0.0 if recipe == "dense" else r)) for r in ratios]
        shown = ["-" if v is None else f"{v:.3f}" for v in values]
        print(f"| {model} | {recipe} | {target} | " + " | ".join(shown) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file; measurements in it are not repeated")
    parser.add_argument("--models", nargs="+", default=list(subjects()))
    # The subjects rotate q and k by position: what prunes dimensions of a head is not for them. Masks: bench_masks.py.
    recipes = {name: load_recipe(name) for name in shipped_recipes()}
    fitting = [name for name, recipe in recipes.items() if recipe.mask is None and "qk" not in recipe.spaces]
    parser.add_argument("--recipes", nargs="+", default=fitting)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.2, 0.3])
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--windows", type=int, default=64, help="held-out windows")
    parser.add_argument("--choose", choices=["random", "first"], default="random")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for name in args.models:
        run_subject(subjects()[name], args, set(by_key(args.out)))
    print_table([line for line in lines_of(args.out) if line["model"] in args.models and line["choose"] == args.choose])


if __name__ == "__main__":
    main()
