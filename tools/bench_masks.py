"""Perplexity under masks, with and without rotations learned before them, on the language models in ../shared/data.

    PYTHONPATH=. python tools/bench_masks.py --out masks.jsonl [--models NAME ...] [--steps N] [--rotations KIND ...]

Each line of the output is one measurement; a run goes on where the last one stopped, and ends by printing the table.
Rotations do not depend on the pattern: they are learned once for each model, method, kind and number of steps.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.perplexity import perplexity
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.model.model import Model
from ckpt_prune.runner.run_job import check_job, run_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.rotation import learner as rotations
from tools.bench_lines import add_line, by_key, lines_of
from tools.bench_perplexity import SHARED, Subject, subjects, windows_of

METHODS = ("magnitude", "wanda", "sparsegpt")
PATTERNS = ("50 %", "2:4", "4:8")
KINDS = ("plain", "values", "shared", "per-layer")


def models() -> dict[str, Subject]:
    text = f"{SHARED}/text-tinyshakespeare"
    name = "opt-shakespeare-char-0.8m"
    return subjects() | {name: Subject(name, 64, SHARED / name, f"{text}/calib_first90.txt", f"{text}/eval_last10.txt")}


def recipe_of(method: str, pattern: str, kind: str, args: argparse.Namespace) -> FullRecipe:
    how = {"ratio": 0.5} if pattern == "50 %" else {}
    mask = {"method": method} | ({} if pattern == "50 %" else {"pattern": pattern})
    values: dict[str, Any] = {"version": 1, "name": f"{method} {pattern} {kind}", "mask": mask, **how}
    if method != "magnitude":
        values["target"] = args.target
    if kind != "plain":
        values["rotation"] = {"kind": kind, "steps": args.steps, "tolerance": args.tolerance}
        if args.retraction:
            values["rotation"]["retraction"] = args.retraction
    return FullRecipe.model_validate(values)


class Remembered:
    """A function whose results are kept in the order of its calls, to be handed out again in that order."""

    def __init__(self, function: Any, results: list[Any]) -> None:
        self._function, self._results, self._calls = function, results, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the call that came at this place the first time."""
        if self._calls == len(self._results):
            self._results.append(self._function(*args, **kwargs))
        self._calls += 1
        return self._results[self._calls - 1]


def run_subject(subject: Subject, args: argparse.Namespace, done: set[str]) -> None:
    calibration, held_out = windows_of(subject, args.samples, args.windows, "random")
    model = Model.open(subject.folder)
    device = torch.device(args.device)
    learned: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {}

    def record(key: str, folder: Path, note: dict[str, Any]) -> None:
        score = perplexity(load_model(folder, device=device), held_out)
        line = {"key": key, "model": subject.name, "perplexity": score.perplexity, "window": subject.window}
        line |= {"tokens": score.tokens, "samples": args.samples, "target": args.target, **note}
        add_line(args.out, line)
        print(f"{key}: {score.perplexity:.3f}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        key = f"{subject.name} | dense | {args.windows}"
        if key not in done:
            record(key, subject.folder, {"method": "dense"})
        for method in args.methods:
            for kind in args.rotations:
                for pattern in args.patterns:
                    settings = [args.steps, args.tolerance, args.retraction] if kind != "plain" else []
                    parts = [subject.name, method, pattern, kind, args.samples, args.windows, args.target, *settings]
                    key = " | ".join(map(str, parts))
                    if key in done:
                        continue
                    recipe = recipe_of(method, pattern, kind, args)
                    live = LiveSamples(TokenWindows(calibration), 1, torch.float32) if recipe.needs_moments else None
                    one, all_ = learned.setdefault((method, kind), ([], []))
                    start = time.monotonic()
                    try:
                        job = Job(model, recipe, live=live, device=device)
                        checked = check_job(job)
                    except UserError as error:
                        print(f"{key}: {error}", flush=True)
                        continue
                    with (
                        mock.patch.object(rotations, "learn_rotations", Remembered(rotations.learn_rotations, one)),
                        mock.patch.object(
                            rotations, "learn_shared_rotation", Remembered(rotations.learn_shared_rotation, all_)
                        ),
                    ):
                        report = run_job(job, Path(scratch) / "out", start=checked, overwrite=True).report.data()
                    note: dict[str, Any] = {"method": method, "pattern": pattern, "rotation": kind}
                    note["seconds"] = round(time.monotonic() - start, 1)
                    if report["rotation"]:
                        entries = report["rotation"]["learned"]
                        note |= {k: sum(e[k] for e in entries) for k in ("entropy_before", "entropy_after")}
                        note |= {"steps": max(e["steps"] for e in entries), "asked": args.steps}
                    record(key, Path(scratch) / "out", note)


def print_table(lines: list[dict[str, Any]]) -> None:
    """Markdown: a row for each model, method and rotation, a column for each pattern."""
    print("| model | method | rotation | entropy | 50 % | 2:4 | 4:8 |")
    print("|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(line["model"] for line in lines):
        model_lines = [line for line in lines if line["model"] == name]
        for line in model_lines:
            if line["method"] == "dense":
                figures = " | ".join([f"{line['perplexity']:.3f}"] * 3)
                print(f"| {name} | dense | | | {figures} |")
        rows = [(x["method"], x["rotation"], x.get("asked")) for x in model_lines if x["method"] != "dense"]
        for method, kind, steps in dict.fromkeys(rows):
            cells = [
                x for x in model_lines if (x["method"], x.get("rotation"), x.get("asked")) == (method, kind, steps)
            ]
            by_pattern = {x["pattern"]: x["perplexity"] for x in cells}
            drop = ""
            if "entropy_before" in cells[0]:
                share = cells[0]["entropy_after"] / cells[0]["entropy_before"] - 1
                drop = f"{share:+.1%} in {cells[0]['steps']}"
            figures = " | ".join(f"{by_pattern[p]:.3f}" if p in by_pattern else "-" for p in PATTERNS)
            print(f"| {name} | {method} | {kind} | {drop} | {figures} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file; measurements in it are not repeated")
    parser.add_argument("--models", nargs="+", default=list(models()))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--rotations", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="0: no early stop")
    parser.add_argument("--retraction", default=None, help="qr or cayley; the recipe's default where left out")
    parser.add_argument("--target", choices=["dense", "sequential"], default="sequential")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--windows", type=int, default=64, help="held-out windows")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for name in args.models:
        run_subject(models()[name], args, set(by_key(args.out)))
    print_table([line for line in lines_of(args.out) if line["model"] in args.models])


if __name__ == "__main__":
    main()
