"""Pruning of attention: heads, query heads, value directions, rotary pairs or q/k dimensions, against the mlp.

    PYTHONPATH=. python tools/bench_attention.py shares --out FILE.jsonl [--models NAME ...] [--ratios R ...]
    PYTHONPATH=. python tools/bench_attention.py best   --out FILE.jsonl [--models NAME ...] [--ratios R ...]
    PYTHONPATH=. python tools/bench_attention.py qk     --out FILE.jsonl [--models NAME ...] [--ratios R ...]
    PYTHONPATH=. python tools/bench_attention.py speed  --out FILE.jsonl [--models NAME ...] [--ratios R ...]

shares: R of the parameters of all attentions go, from each space alone, from all in one budget, and from the mlp.
best: R of the parameters go by `best`, with the spaces of attention and without.
qk: R of the dimensions of q and k go, alone and with as much of the mlp.
speed: `benchmark` of outputs of equal parameters, to be run on an idle machine.

Every line of the output is one measurement; a run goes on where the last one stopped, and prints its table.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

import ckpt_prune
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.statistics.folder import Statistics, record_effects
from ckpt_prune.measure.statistics.measurement import list_collectable, measure_statistics
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.model import Model
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.spaces.effects.gradients import add_gradients
from ckpt_prune.stages.spaces.effects.measured import measure_effects, measured_singly
from tools.bench_best import Bench, benches, of_text
from tools.bench_lines import add_line, by_key
from tools.bench_perplexity import SHARED, Subject

REAL = SHARED.parents[1] / "models"
"""Where models are that are too large for ../shared/data."""
WIKITEXT = tuple(f"{SHARED}/text-wikitext2/{part}" for part in ("wiki.train.first1MB.raw.txt", "wiki.test.raw"))
RIDGE = {"method": "ridge", "lambda": 0.01}
FIXED: dict[str, dict[str, Any]] = {
    "heads": {"score": "auto", "compensation": RIDGE},
    "queries": {"score": "auto", "compensation": RIDGE},
    "values": {"score": "principal", "compensation": RIDGE},
    "rotary": {"score": "obs", "compensation": {"method": "factors", "lambda": 0.0001}},
    "qk": {"score": "logit-energy", "compensation": {"method": "low-rank", "lambda": 0.001}},
    "mlp": {"score": "auto", "compensation": RIDGE},
}
"""How each space is pruned where the spaces are compared: as cheaply as it goes."""
QK = {
    "bare": {"score": "logit-energy"},
    "CORP": {"score": "logit-energy", "compensation": {"method": "logit", "lambda": 0.001}},
    "low rank": FIXED["qk"],
}
MLP = {"score": "corp", "compensation": {"method": "affine", "lambda": 0.001}}

Cell = tuple[str, FullRecipe]
"""Label and recipe."""


def every_bench(evaluated: int, texts: tuple[str, ...] = WIKITEXT) -> dict[str, Bench]:
    """Those of bench_best, and the real models there are, on texts to calibrate and to test with."""
    benches_by_name = benches(64)
    for name, window in (("minimind2-26m", 512), ("smollm2-135m", 512), ("gemma3-270m", 512)):
        if (REAL / name).is_dir():
            benches_by_name[name] = of_text(Subject(name, window, REAL / name, *texts), evaluated)
    return benches_by_name


def make_recipe(name: str, spaces: dict[str, Any], **keys: Any) -> FullRecipe:
    """A recipe of some spaces."""
    return FullRecipe.model_validate({"version": 1, "name": name, "container": "any", "spaces": spaces, **keys})


def make_budget(name: str, spaces: list[str], parameters: int) -> FullRecipe:
    """Widths per block, by the least predicted error, for a size."""
    chosen = {space: FIXED[space] for space in FIXED if space in spaces}
    how = {"allocation": "least-error", "widths": "per_layer", "size": {"params": str(parameters)}}
    return make_recipe(name, chosen, **how)


def attention_parameters(model: Model) -> int:
    """Weights and biases of q, k, v and o of all blocks."""
    modules = set(model.family.attention.modules)
    names = [model.tensor(block, module, kind) for block in range(model.blocks) for module in modules for kind in KINDS]
    return sum(prod(model.shapes[name][1]) for name in names if name in model.shapes)


def attention_spaces(model: Model) -> list[str]:
    """Spaces of a model's attention."""
    return [space for space in FIXED if space in model.family.spaces and space != "mlp"]


def list_share_cells(model: Model, ratios: list[float]) -> Iterator[Cell]:
    """Parameters of attention, from one space after the other."""
    total, in_attention = cost_of(model).parameters, attention_parameters(model)
    for ratio in ratios:
        parameters = int(total - ratio * in_attention)
        for space in (*attention_spaces(model), "mlp"):
            yield f"{ratio:g} | {space}", make_budget(space, [space], parameters)
        yield f"{ratio:g} | all of attention", make_budget("attention", attention_spaces(model), parameters)
        yield f"{ratio:g} | all and mlp", make_budget("all", [*attention_spaces(model), "mlp"], parameters)


def list_best_cells(model: Model, ratios: list[float]) -> Iterator[Cell]:
    """`best`, with each space that `best-attention` adds to it, and that, at one size."""
    for ratio in ratios:
        size = {"params": str(int((1 - ratio) * cost_of(model).parameters))}
        plain, with_attention = (load_recipe(name, size=size).at(model.family) for name in ("best", "best-attention"))
        yield f"{ratio:g} | best", plain
        for space, settings in with_attention.spaces.items():
            if space not in plain.spaces:
                added = with_attention.model_copy(
                    update={"name": f"with {space}", "spaces": {space: settings} | plain.spaces}
                )
                yield f"{ratio:g} | with {space}", added
        yield f"{ratio:g} | best-attention", with_attention


def list_qk_cells(model: Model, ratios: list[float]) -> Iterator[Cell]:
    """Dimensions of q and k: which stay, what makes up for the others, and how many each block keeps."""
    if "qk" not in model.family.spaces:
        return
    spread = {"allocation": "least-error", "widths": "per_layer"}
    for ratio in ratios:
        for label, settings in QK.items():
            yield f"{ratio:g} | {label}", make_recipe(label, {"qk": settings}, ratio=ratio)
            yield f"{ratio:g} | {label}, and mlp", make_recipe(label, {"qk": settings, "mlp": MLP}, ratio=ratio)
        for weigh in ("effect", "energy"):
            more: dict[str, Any] = {"ratio": ratio, **spread, "weigh_by": weigh}
            yield f"{ratio:g} | low rank, budget by {weigh}", make_recipe("budget", {"qk": FIXED["qk"]}, **more)
        more = {"ratio": ratio, **spread}
        yield (
            f"{ratio:g} | low rank and mlp in one budget",
            make_recipe("budget", {"qk": FIXED["qk"], "mlp": MLP}, **more),
        )


def list_speed_cells(model: Model, ratios: list[float]) -> Iterator[Cell]:
    """The parameters of `list_share_cells`, from each space alone and as much from every block."""
    total, in_attention = cost_of(model).parameters, attention_parameters(model)
    for ratio in ratios:
        for space in (*attention_spaces(model), "mlp"):
            score = "obs" if FIXED[space]["score"] == "auto" else FIXED[space]["score"]
            size = {"params": str(int(total - ratio * in_attention))}
            yield f"{ratio:g} | {space}", make_recipe(space, {space: FIXED[space] | {"score": score}}, size=size)


CELLS = {"shares": list_share_cells, "best": list_best_cells, "qk": list_qk_cells, "speed": list_speed_cells}


class DenseModel:
    """A dense model with statistics that all its cells share, measured when first asked for.

    Args:
        bench: says where the model is, and on what it is calibrated.
        count: calibration samples.
        folder: to write into.
    """

    def __init__(self, bench: Bench, count: int, folder: Path) -> None:
        self.model, self.samples = Model.open(bench.folder), bench.samples(count)
        self.folds, self._folder = min(4, count), folder
        self._statistics: Statistics | None = None

    def statistics(self, spaces: list[str]) -> Statistics:
        """Moments, the metric, and effects of these spaces."""
        if self._statistics is None:
            how: dict[str, Any] = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
            kinds = {
                "moments",
                "gram",
                "fisher",
                *({"qk": "logits", "rotary": "rotary"}.get(space) for space in spaces),
            }
            collect = tuple(kind for kind in list_collectable(self.model) if kind in kinds)
            statistics = measure_statistics(
                self.model, self.samples, self._folder, seed=0, folds=self.folds, collect=collect, **how
            )
            statistics = add_gradients(self.model, statistics, self.samples, spaces=spaces, **how)
            if measured_singly(self.model):
                statistics = record_effects(
                    statistics, measure_effects(self.model, statistics, self.samples, spaces=spaces, **how)
                )
            self._statistics = statistics
        return self._statistics


def prune_to(dense: DenseModel, recipe: FullRecipe, spaces: list[str], out: Path) -> dict[str, Any]:
    """Prune by a recipe, and return what is left."""
    live = None
    if recipe.target != "dense":
        live = LiveSamples(dense.samples, dense.folds, compute_dtype=torch.float32)
    start = time.process_time()
    statistics = dense.statistics(spaces)
    result = run_job(Job(dense.model, recipe, statistics, live), out, overwrite=True)
    kept: dict[str, list[int]] = {}
    for site in result.report.sites:
        kept.setdefault(site.space, []).append(len(site.kept))
    return {
        "parameters": result.report.after.parameters,
        "cache": result.report.after.cache,
        "kept": kept,
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def run_bench(what: str, bench: Bench, args: argparse.Namespace, lines: dict[str, dict[str, Any]]) -> None:
    def record(key: str, values: dict[str, Any]) -> None:
        lines[key] = {"key": key, "model": bench.name, "samples": args.samples, **values}
        add_line(args.out, lines[key])
        print(key, {name: value for name, value in values.items() if name != "kept"}, flush=True)

    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        dense = DenseModel(bench, args.samples, Path(scratch) / "statistics")
        dense_cost = cost_of(dense.model)
        if f"{bench.name} | dense" not in lines:
            sizes = {"parameters": dense_cost.parameters, "cache": dense_cost.cache}
            record(f"{bench.name} | dense", {**sizes, **bench.score(bench.folder)})
        cells = list(CELLS[what](dense.model, args.ratios))
        spaces = sorted({space for _, recipe in cells for space in recipe.spaces})
        for label, recipe in cells:
            key = f"{bench.name} | {what} | {args.samples} | {label}"
            if key in lines or not (args.only is None or args.only in label):
                continue
            try:
                figures = prune_to(dense, recipe, spaces, Path(scratch) / "out")
            except ckpt_prune.UserError as error:
                record(key, {"refused": str(error)})
                continue
            scores = (
                time_models(bench.folder, Path(scratch) / "out", args)
                if what == "speed"
                else bench.score(Path(scratch) / "out")
            )
            if args.kl:
                scores |= {"kl": divergence(bench, Path(scratch) / "out", args.texts[1])}
            record(key, {**figures, **scores})


def divergence(bench: Bench, out: Path, text: str) -> float:
    """Mean KL divergence of an output from its dense model, in nats a token of a text."""
    how: dict[str, Any] = {"text": text, "window": bench.window, "samples": bench.evaluated, "progress": False}
    return float(ckpt_prune.evaluate(out, against=bench.folder, **how).data()["kl"])


def time_models(dense: Path, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians in ms, and their ratio to the dense model's, which takes turns, by phase and runtime."""
    how: dict[str, Any] = {"tokens": args.tokens, "generate": args.generate, "rounds": args.rounds, "progress": False}
    comparison = ckpt_prune.benchmark(dense, out, onnx=True, **how)
    rows = [(block.phase, row) for block in comparison.blocks for row in block.rows if row.label == "B"]
    return {f"{phase}, {row.runtime}": [round(row.p50_ms, 3), row.p50_ratio] for phase, row in rows}


def table(what: str, lines: dict[str, dict[str, Any]]) -> None:
    """Markdown: a row for each measurement, with the units of each space that stay in all blocks together."""
    shown = [line for key, line in lines.items() if f"| {what} |" in key]
    for model in dict.fromkeys(line["model"] for line in shown):
        rows = [lines[f"{model} | dense"], *(line for line in shown if line["model"] == model)]
        metrics = [name for name in rows[-1] if name not in ("key", "model", "samples", "kept", "parameters", "cache")]
        print(f"\n## {model}\n\n| | kept | parameters | cache | {' | '.join(metrics)} |")
        print("|---" * (4 + len(metrics)) + "|")
        for line in rows:
            kept = ", ".join(f"{space} {sum(counts)}" for space, counts in line.get("kept", {}).items())
            values = [line.get("refused", kept), *(line.get(name, "") for name in ("parameters", "cache", *metrics))]
            label = line["key"].partition(" | ")[2].replace(" | ", ", ")
            print(f"| {label} | {' | '.join(map(str, values))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=CELLS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["llama-pystdlib-3m"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.4])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--evaluated", type=int, default=16, help="windows of the real models")
    parser.add_argument("--texts", nargs=2, default=WIKITEXT, help="to calibrate and to test the real models with")
    parser.add_argument("--kl", action="store_true", help="also the divergence of the real models on the test's text")
    parser.add_argument("--only", help="cells with this in their label")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--generate", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    lines = by_key(args.out)
    benches_by_name = every_bench(args.evaluated, tuple(args.texts))
    for name in args.models:
        run_bench(args.what, benches_by_name[name], args, lines)
    table(args.what, lines)


if __name__ == "__main__":
    main()
