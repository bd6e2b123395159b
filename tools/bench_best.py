"""`best` against every published recipe, on every model of ../shared/data and the embedded; what each part is worth.

    PYTHONPATH=. python tools/bench_best.py --out FILE.jsonl [--models NAME ...] [--samples N ...] [--ratios R ...]
    PYTHONPATH=. python tools/bench_best.py --out FILE.jsonl --ablation ...
    PYTHONPATH=. python tools/bench_best.py --out FILE.jsonl --predicted
    PYTHONPATH=. python tools/bench_best.py --out FILE.jsonl --table

Every line of the output is one measurement; a run goes on where the last one stopped. All recipes of a cell see the
same calibration samples and are measured on the same held-out ones. Recipes that prune q and k (corp) leave another
size at the same ratio: there `best` is asked for the size that corp has (best @ corp).
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.compensation.fit import Solution, fit_from_moments, squared_error
from ckpt_prune.evaluation.perplexity import perplexity
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.samples.image_files import ImageFiles, choose_images, find_images
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.statistics.folder import Statistics, record_effects
from ckpt_prune.measure.statistics.measurement import list_collected_by_default, measure_statistics
from ckpt_prune.model.model import Model
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.spaces.effects.gradients import add_gradients
from ckpt_prune.stages.spaces.effects.measured import SHALLOW, measure_effects
from tools.bench_corp import Pixels, compare, images, logits
from tools.bench_lines import add_line, by_key
from tools.bench_perplexity import SHARED, Subject, subjects, windows_of

PUBLISHED = (
    "magnitude",
    "wanda-sp",
    "flap",
    "flap-global",
    "vbp",
    "rcpu",
    "rcpu-scale",
    "rcpu-v1-least-squares",
    "ridge",
    "grail",
)
OURS = ("best-uniform", "best")
UNIFORM = ("allocation=uniform", "widths=uniform", "spaces.heads.score=obs", "spaces.mlp.score=obs")
ABLATION: dict[str, tuple[str, tuple[str, ...]]] = {
    "ridge (RCPU's)": ("ridge", ()),
    "+ selection": ("ridge", ("spaces.heads.score=obs", "spaces.mlp.score=obs")),
    "+ choice": ("best", (*UNIFORM, "target=sequential")),
    "+ drift": ("best", UNIFORM),
    "+ budget, one width per space": ("best", ("widths=uniform",)),
    "+ budget per layer, by energy": ("best", ("weigh_by=energy",)),
    "+ budget per layer, by effect (best)": ("best", ()),
    "best without drift": ("best", ("target=sequential",)),
    "best on the dense cache": ("best", ("target=dense",)),
}


@dataclass(frozen=True)
class Bench:
    """A model, what it is calibrated on, and how an output is measured."""

    name: str
    folder: Path
    samples: Callable[[int], Samples]
    score: Callable[[Path], dict[str, float]]
    fresh: Callable[[], Samples]
    window: int
    evaluated: int


def of_text(subject: Subject, evaluated: int) -> Bench:
    def score(folder: Path) -> dict[str, float]:
        _, held_out = windows_of(subject, 2, evaluated, "random")
        result = perplexity(load_model(folder, device="cpu"), held_out)
        return {"perplexity": result.perplexity}

    def samples(count: int) -> Samples:
        return TokenWindows(windows_of(subject, count, evaluated, "random")[0])

    def fresh() -> Samples:
        return TokenWindows(windows_of(subject, 2, evaluated, "random")[1])

    return Bench(subject.name, subject.folder, samples, score, fresh, subject.window, evaluated)


def of_images(folder: Path, place: Path) -> Bench:
    """Half of the 1000 images to calibrate on at most, the other half to measure."""
    names = {int(k): v for k, v in Checkpoint.open(folder).config["id2label"].items()}
    both = [find_images(place, split=split, id2label=names) for split in ("calib", "eval")]
    paths = both[0].paths + both[1].paths
    labels = (both[0].labels or ()) + (both[1].labels or ())
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    pool = ImageFiles(tuple(paths[i] for i in order[:500]), None)
    held_out_files = ImageFiles(tuple(paths[i] for i in order[500:]), tuple(labels[i] for i in order[500:]))

    @cache
    def held_out() -> Pixels:
        return images(folder, held_out_files)

    @cache
    def dense() -> torch.Tensor:
        return logits(folder, held_out())

    @cache
    def samples(count: int) -> Samples:
        return images(folder, choose_images(pool, samples=count, seed=1))

    def score(output: Path) -> dict[str, float]:
        truth = held_out().labels
        assert truth is not None
        top, agreement, kl = compare(logits(output, held_out()), dense(), truth)
        return {"top1": top, "agreement": agreement, "kl": kl}

    return Bench(folder.name, folder, samples, score, held_out, 0, 500)


def benches(evaluated: int) -> dict[str, Bench]:
    benches_by_name = {name: of_text(subject, evaluated) for name, subject in subjects().items()}
    texts = [f"{SHARED}/text-tinyshakespeare/{part}" for part in ("calib_first90.txt", "eval_last10.txt")]
    opt = Subject("opt-shakespeare-char-0.8m", 64, SHARED / "opt-shakespeare-char-0.8m", *texts)
    benches_by_name[opt.name] = of_text(opt, 4 * evaluated)
    benches_by_name["vit-tiny-imagenet"] = of_images(SHARED / "vit-tiny-imagenet", SHARED / "imagenet-1per-class")
    return benches_by_name


@dataclass
class Entrants:
    """Everything of one model and one number of samples that several recipes share."""

    bench: Bench
    count: int
    scratch: Path

    def __post_init__(self) -> None:
        self.model = Model.open(self.bench.folder)
        self.samples = self.bench.samples(self.count)
        self.folds = min(4, self.count)
        self._statistics: Statistics | None = None
        self.seconds = 0.0

    @property
    def statistics(self) -> Statistics:
        """Statistics of the dense model, with effects; measured when first asked for."""
        if self._statistics is None:
            start = time.monotonic()
            run = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
            statistics = measure_statistics(
                self.model,
                self.samples,
                self.scratch / f"statistics-{self.count}",
                seed=0,
                folds=self.folds,
                collect=list_collected_by_default(self.model),
                **run,  # type: ignore[arg-type]
            )
            statistics = add_gradients(self.model, statistics, self.samples, **run)  # type: ignore[arg-type]
            if self.model.blocks <= SHALLOW:
                spaces = list(load_recipe("best").at(self.model.family).spaces)
                effects = measure_effects(self.model, statistics, self.samples, spaces=spaces, **run)  # type: ignore[arg-type]
                statistics = record_effects(statistics, effects)
            self._statistics = statistics
            self.seconds = time.monotonic() - start
        return self._statistics

    def run(self, recipe: str, overrides: tuple[str, ...], ratio: float | None, size: int | None) -> dict[str, Any]:
        """Prune by a recipe, at its ratio or to a size in parameters, and measure the output."""
        loaded = load_recipe(recipe, overrides, ratio, None if size is None else {"params": str(size)})
        folds = self.folds if loaded.needs_folds else 1
        live = LiveSamples(self.samples, folds, compute_dtype=torch.float32) if loaded.target != "dense" else None
        dense = live is None or loaded.allocation == "least-error"
        statistics = self.statistics if dense and loaded.needs_moments else None
        start = time.monotonic()
        out = self.scratch / "out"
        done = run_job(Job(self.model, loaded, statistics, live), out, overwrite=True)
        report = done.report.data()
        seconds = time.monotonic() - start
        held_out = [s["error_held_out"] for s in report["sites"] if s["error_held_out"] is not None]
        return {
            **self.bench.score(out),
            "parameters": report["after"]["parameters"],
            "seconds": round(seconds, 2),
            "widths": [dict(w) for w in done.prepared.widths],
            "chosen": [
                [s["block"], s["space"], s["method"], s["strength"], s["share"], s["error_held_out"]]
                for s in report["sites"]
            ]
            if held_out
            else None,
        }


def cells(args: argparse.Namespace, entrants: Entrants) -> Iterable[tuple[str, str, tuple[str, ...], float, str]]:
    """Label, recipe, overrides, ratio, and the label of the entry whose size is to be met."""
    for ratio in args.ratios:
        if args.ablation:
            for label, (recipe, overrides) in ABLATION.items():
                yield label, recipe, overrides, ratio, ""
            continue
        anywhere = ("container=any",)
        for recipe in (*PUBLISHED, *OURS):
            yield recipe, recipe, anywhere, ratio, ""
        if entrants.model.family.logits:
            yield "corp", "corp", anywhere, ratio, ""
            yield "corp-mlp", "corp-mlp", anywhere, ratio, ""
            yield "best @ corp", "best", anywhere, ratio, "corp"
            yield "best @ corp-mlp", "best", anywhere, ratio, "corp-mlp"


def run_bench(bench: Bench, args: argparse.Namespace, lines: dict[str, dict[str, Any]]) -> None:
    def record(key: str, values: dict[str, Any]) -> None:
        lines[key] = {"key": key, "model": bench.name, "window": bench.window, "evaluated": bench.evaluated, **values}
        add_line(args.out, lines[key])
        metric = next(f"{name} {values[name]:.4f}" for name in ("perplexity", "top1") if name in values)
        print(f"{key}: {metric} ({values.get('seconds', 0)} s)", flush=True)

    dense = f"{bench.name} | dense"
    if dense not in lines:
        record(dense, {"recipe": "dense", **bench.score(bench.folder)})
    for count in args.samples:
        with tempfile.TemporaryDirectory() as scratch:
            entrants = Entrants(bench, count, Path(scratch))
            for label, recipe, overrides, ratio, like in cells(args, entrants):
                key = f"{bench.name} | {count} | {ratio:g} | {label}"
                if key in lines:
                    continue
                size = lines[f"{bench.name} | {count} | {ratio:g} | {like}"]["parameters"] if like else None
                values = entrants.run(recipe, overrides, None if like else ratio, size)
                record(key, {"recipe": label, "samples": count, "ratio": ratio, **values})


def compare_predictions(bench: Bench, args: argparse.Namespace) -> None:
    """Print how the errors that folds predict compare with those on fresh samples, site by site.

    `best` on the dense cache with one ratio everywhere: the error of a written consumer on the moments of the held-out
    samples, beside the one that cross-validation on the calibration samples said.
    """
    model = Model.open(bench.folder)
    checkpoint = model.checkpoint
    with tempfile.TemporaryDirectory() as scratch:
        fresh = measure_statistics(
            model,
            bench.fresh(),
            Path(scratch) / "fresh",
            seed=0,
            folds=1,
            collect=("moments", "gram"),
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
        )
        for count in args.samples:
            entrants = Entrants(bench, count, Path(scratch))
            pairs: list[tuple[float, float, float]] = []
            for ratio in args.ratios:
                loaded = load_recipe("best", (*UNIFORM, "target=dense", "container=any"), ratio)
                out = Path(scratch) / "out"
                report = run_job(Job(model, loaded, entrants.statistics), out, overwrite=True).report.data()
                written = Checkpoint.open(out)
                for site in report["sites"]:
                    if site["error_held_out"] is None:
                        continue
                    name = site["consumer"]
                    bias = name.removesuffix("weight") + "bias"
                    (moments,) = fresh.read_moments(site["block"], {name})[name]
                    assert isinstance(moments, Moments)
                    dense, new = checkpoint.read([name])[name], written.read([name])[name].double()
                    shift = None
                    if bias in written.tensors:
                        new_bias = written.read([bias])[bias].double()
                        shift = (
                            new_bias - checkpoint.read([bias])[bias].double()
                            if bias in checkpoint.tensors
                            else new_bias
                        )
                    kept = model.consumer_columns(site["space"], torch.tensor(site["kept"]))
                    fit = fit_from_moments(dense, moments, kept)
                    assert fit.target_energy is not None
                    fresh_error = squared_error(Solution(new, shift), fit) / fit.target_energy
                    pairs.append((site["error_held_out"], site["error_compensated"], fresh_error))
            predicted, fitted, measured = (torch.tensor(column).log() for column in zip(*pairs, strict=True))
            correlation = torch.corrcoef(torch.stack([predicted, measured]))[0, 1].item()
            naive = torch.corrcoef(torch.stack([fitted, measured]))[0, 1].item()
            line = {
                "key": f"{bench.name} | {count} | predicted",
                "sites": len(pairs),
                "correlation": correlation,
                "measured / held out": (measured - predicted).mean().exp().item(),
                "correlation of the fit's own error": naive,
                "measured / fit's own": (measured - fitted).mean().exp().item(),
            }
            add_line(args.out, line)
            print(line, flush=True)


def table(lines: dict[str, dict[str, Any]], ablation: bool) -> None:
    """Markdown: per model and number of samples, a row for each recipe and a column for each ratio."""
    measured = [line for line in lines.values() if "model" in line]
    for model in dict.fromkeys(line["model"] for line in measured):
        model_lines = [line for line in measured if line["model"] == model]
        metric = "perplexity" if "perplexity" in model_lines[0] else "top1"
        form = (lambda v: f"{v:.3f}") if metric == "perplexity" else (lambda v: f"{v:.1%}")
        dense = next(line[metric] for line in model_lines if line["recipe"] == "dense")
        print(f"\n## {model}\n\nDense {form(dense)}.")
        for count in sorted({line["samples"] for line in model_lines if "samples" in line}):
            rows = [line for line in model_lines if line.get("samples") == count]
            ratios = sorted({line["ratio"] for line in rows})
            names = [n for n in dict.fromkeys(x["recipe"] for x in rows) if (n in ABLATION) == ablation]
            if not names:
                continue
            print(f"\n{count} samples\n\n| recipe | " + " | ".join(f"{r:.0%}" for r in ratios) + " |")
            print("|---|" + "---|" * len(ratios))
            value = {(line["recipe"], line["ratio"]): line[metric] for line in rows}
            for name in names:
                shown = [form(value[name, r]) if (name, r) in value else "-" for r in ratios]
                print(f"| {name} | " + " | ".join(shown) + " |")
            if ablation:
                continue
            shown = []
            for ratio in ratios:
                scores = [value[n, ratio] for n in PUBLISHED if (n, ratio) in value]
                if not scores or ("best", ratio) not in value:
                    shown.append("-")
                    continue
                published = min(scores) if metric == "perplexity" else max(scores)
                gap = published - dense
                shown.append(f"{(value['best', ratio] - dense) / gap:.2f}" if gap else "-")
            print("| gap of best / gap of the best published | " + " | ".join(shown) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file; measurements in it are not repeated")
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--samples", nargs="+", type=int, default=[2, 8, 32, 128])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    parser.add_argument("--evaluated", type=int, default=64, help="held-out windows (four times as many for OPT)")
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument(
        "--predicted", action="store_true", help="held-out errors that folds predict against fresh ones"
    )
    parser.add_argument("--table", action="store_true", help="only print the tables of what is in the file")
    args = parser.parse_args()
    lines = by_key(args.out)
    if not args.table:
        benches_by_name = benches(args.evaluated)
        for name in args.models or list(benches_by_name):
            if args.predicted:
                compare_predictions(benches_by_name[name], args)
            else:
                run_bench(benches_by_name[name], args, lines)
    if args.predicted:
        return
    table(lines, args.ablation)


if __name__ == "__main__":
    main()
