"""Perplexity of a sliced residual stream beside columns and heads that go, at the same number of parameters.

    PYTHONPATH=. python tools/bench_slicing.py --out slicing.jsonl --model MODEL --text CALIB --held-out TEXT

Sizes are the dense model's without a share of its blocks' parameters. Each line of the output is one measurement; a run
goes on where the last one stopped, and ends by printing the table.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import ckpt_prune as cp
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from tools.bench_lines import add_line, lines_of

RECIPES = ["slicegpt", "slicegpt-code", "slicegpt-shared", "ridge", "best-uniform"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines to write, or to go on with")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="to calibrate on")
    parser.add_argument("--held-out", type=Path, required=True, help="to measure on")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2, 0.3], help="of the blocks' parameters")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--held-out-samples", type=int, default=64)
    given = parser.parse_args()
    lines = lines_of(given.out)
    model = Model.open(given.model)
    inside = sum(model.checkpoint.tensors[n].numel for block in range(model.blocks) for n in model.block_names(block))
    for share in given.shares:
        for recipe in given.recipes:
            key = {"model": given.model.name, "recipe": recipe, "share": share, "window": given.window}
            key |= {"samples": given.samples, "held_out_samples": given.held_out_samples}
            if any(key.items() <= line.items() for line in lines):
                continue
            target = cost_of(model).parameters - round(share * inside)
            same = {name: value for name, value in key.items() if name not in ("recipe", "share")}
            dense = next((line["dense"] for line in lines if same.items() <= line.items()), None)
            line = key | measure_model(given, recipe, target, dense)
            lines.append(line)
            add_line(given.out, line)
    print("| model | share | recipe | parameters | perplexity | s |\n|---|---|---|---|---|---|")
    for line in lines:
        print(
            f"| {line['model']} (dense {line['dense']:.3f}) | {line['share']:.0%} | {line['recipe']} | "
            f"{line['parameters'] / 1e6:.2f} M | {line['perplexity']:.3f} | {line['seconds']:.0f} |"
        )


def perplexity(given: argparse.Namespace, model: str) -> float:
    """On the held-out text."""
    data: dict[str, Any] = {"text": str(given.held_out), "window": given.window, "samples": given.held_out_samples}
    return float(cp.evaluate(model, progress=False, **data).data()["perplexity"])


def measure_model(given: argparse.Namespace, recipe: str, target: int, dense: float | None) -> dict[str, Any]:
    """One model pruned to so many parameters, and what it loses; the dense model's figure where it is not known."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        data: dict[str, Any] = {"text": str(given.text), "samples": given.samples, "window": given.window}
        data |= {"target_params": str(target), "evaluate_samples": 0, "progress": False}
        result = cp.prune(str(given.model), recipe=recipe, output=f"{folder}/out", **data)
        seconds = time.monotonic() - start
        report = result.report
        assert report is not None
        return {
            "parameters": report.after.parameters,
            "flops": report.after.flops,
            "hidden": None if report.hidden is None else report.hidden.kept,
            "perplexity": perplexity(given, str(result.path)),
            "dense": perplexity(given, str(given.model)) if dense is None else dense,
            "seconds": round(seconds, 1),
        }


if __name__ == "__main__":
    main()
