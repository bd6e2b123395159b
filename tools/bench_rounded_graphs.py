"""Pruned and rounded graphs side by side: bytes, what is lost of the task's metric, and latency, in one run.

    PYTHONPATH=. python tools/bench_rounded_graphs.py --out rounded.jsonl --work DIR [--models NAME ...]

Everything but the timing is done by the command line, as a user would. Each line of the output is one measurement; a
run goes on where the last one stopped, and ends by printing the table. A star marks the best points: no other graph of
the model is as small and loses as little. `--external DIR` is where models lie that are not in ../shared/data.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_prune.benchmarking.participants import Participant
from ckpt_prune.benchmarking.run import take_turns
from ckpt_prune.benchmarking.runners import OnnxRunner
from ckpt_prune.benchmarking.workload import choose_workloads, read_model_inputs
from ckpt_prune.onnx.records import read_manifest
from tools.bench_export import Model, cell, checkpoint, ckpt_prune, models, record
from tools.bench_lines import by_key, lines_of
from tools.bench_perplexity import SHARED

RATIOS = (0.0, 0.2, 0.3)
DTYPES = ("fp32", "fp16", "int8", "int4")
RECIPE = "ridge"
WIDTHS = ("--set", "spaces.mlp.multiple_of=32")
"""So that blocks of 32 divide what is left."""
BATCHES = (1, 8)


def subjects(external: Path) -> dict[str, Model]:
    """Those of `bench_export.py`, pruned alike, and two larger ones."""
    wiki = SHARED / "text-wikitext2"
    text = ("--text", f"{wiki}/wiki.train.first1MB.raw.txt")
    held_out = ("--text", f"{wiki}/wiki.test.raw", "--samples", "16", "--window")
    entries = [
        Model(model.name, model.folder, RECIPE, (*model.calibration, *WIDTHS), model.proof) for model in models()
    ]
    for name, window in (("smollm2-135m", "512"), ("minilm-l6", "128")):
        calibration = (*text, "--samples", "32", "--window", window, *WIDTHS)
        entries.append(Model(name, external / name, RECIPE, calibration, (*held_out, window)))
    return {model.name: model for model in entries}


def measure_graphs(model: Model, ratio: float, args: argparse.Namespace, done: set[str]) -> None:
    """The graphs of one checkpoint, and what each loses against its model and against the dense one."""
    missing = [dtype for dtype in args.dtypes if f"{model.name} | {ratio:g} | {dtype}" not in done]
    if not missing:
        return
    source, out = checkpoint(model, ratio, args.work), folder_of(model, ratio, args.work)
    dtype_options = [word for dtype in args.dtypes for word in ("--dtype", dtype)]
    how = ("-o", str(out), "--overwrite", "--no-validate", "--json")
    written = json.loads(ckpt_prune("export", str(source), *how, *dtype_options, *model.proof))
    about = ("--against", str(source), "--dense", str(model.folder), "--json")
    measured = json.loads(ckpt_prune("validate", str(out), *about, *model.proof))
    entries = {entry["file"]: entry for entry in written["manifest"]["graphs"]}
    for graph in measured["graphs"]:
        against_source, against_dense = graph["metrics"]
        line = {
            "key": f"{model.name} | {ratio:g} | {graph['dtype']}",
            "model": model.name,
            "ratio": ratio,
            "dtype": graph["dtype"],
            "bytes": written["bytes"][graph["dtype"]],
            "metric": against_source["name"],
            "value": against_dense["onnxruntime"],
            "dense": against_dense["pytorch"],
            "kl": against_dense["kl"],
            "lost": against_dense["difference"],
            "lost_by_rounding": against_source["difference"] if graph["max_loss"] is not None else None,
            "within": graph["passed"],
            "quantization": entries[graph["file"]]["quantization"],
            "proof": model.proof,
        }
        if line["key"] not in done:
            record(args.out, line)


def folder_of(model: Model, ratio: float, work: Path) -> Path:
    """Return the folder of a checkpoint's graphs."""
    return work / f"{model.name}-{ratio:g}-onnx"


def measure_speed(model: Model, args: argparse.Namespace, done: set[str]) -> None:
    """All graphs of a model in turns, in this process."""
    key = f"{model.name} | speed"
    places = [folder_of(model, ratio, args.work) for ratio in args.ratios]
    if key in done or not all(place.is_dir() for place in places):
        return
    participants, inputs = [], []
    for ratio, place in zip(args.ratios, places, strict=True):
        for graph in read_manifest(place).split():
            name = f"{ratio:g} {graph.dtype}"
            participants.append(Participant("A", name, "onnxruntime", str(place), "cpu", args.threads, graph.dtype))
            inputs.append(read_model_inputs(place, graph))
    runners = [OnnxRunner(participant) for participant in participants]
    jobs = choose_workloads(
        inputs, [participant.model for participant in participants], batches=BATCHES, tokens=None, steps=None
    )
    timed: dict[str, dict[str, float]] = {participant.model: {} for participant in participants}
    for job in jobs:
        times = take_turns(runners, job, rounds=args.rounds, warmup=2, tick=lambda: None)
        for participant, rounds in zip(participants, times, strict=True):
            for phase in job.phases:
                seconds = [second for timing in rounds for second in timing[phase]]
                timed[participant.model][f"{phase} {job.batch}"] = 1e3 * float(np.percentile(seconds, 50))
    record(args.out, {"key": key, "model": model.name, "speed": timed, "threads": args.threads, "rounds": args.rounds})


def frontier(lines: list[dict[str, Any]]) -> set[str]:
    """Keys of the graphs that no other of their model beats: none is as small and loses as little.

    >>> a, b, c = ({"key": key, "model": "m", "bytes": size, "lost": lost} for key, size, lost in
    ...            (("a", 4, 0.0), ("b", 2, 0.1), ("c", 3, 0.2)))
    >>> sorted(frontier([a, b, c]))
    ['a', 'b']
    """

    def is_beaten(line: dict[str, Any]) -> bool:
        if line["lost"] is None:  # not finite
            return True
        size = line["bytes"], line["lost"]
        others = ((other["bytes"], other["lost"]) for other in lines if other["model"] == line["model"])
        return any(
            lost is not None and bytes_ <= size[0] and lost <= size[1] and (bytes_, lost) != size
            for bytes_, lost in others
        )

    return {line["key"] for line in lines if not is_beaten(line)}


def show(lines: list[dict[str, Any]]) -> None:
    """The table."""
    graphs_ = [line for line in lines if "dtype" in line]
    speeds = {line["model"]: line["speed"] for line in lines if "speed" in line}
    best = frontier(graphs_)
    for name in dict.fromkeys(line["model"] for line in graphs_):
        model_lines = sorted((line for line in graphs_ if line["model"] == name), key=lambda line: -line["bytes"])
        timed = speeds.get(name, {})
        phases = list(next(iter(timed.values()), {}))
        heads = [
            "dropped",
            "type",
            "MiB",
            model_lines[0]["metric"],
            "lost",
            "KL",
            *(f"{phase}, ms" for phase in phases),
            "",
        ]
        print(f"\n{name} (dense {cell(model_lines[0]['dense'], '.4g')})\n")
        print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
        for line in model_lines:
            took = timed.get(f"{line['ratio']:g} {line['dtype']}", {})
            cells = [
                f"{line['ratio']:.0%}",
                line["dtype"],
                f"{line['bytes'] / 2**20:.2f}",
                cell(line["value"], ".4f"),
                cell(line["lost"], ".2%"),
                cell(line["kl"], ".4f"),
                *(cell(took.get(phase), ".1f") for phase in phases),
                "*" if line["key"] in best else "",
            ]
            print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="Folder that pruned models and graphs are kept in.")
    parser.add_argument("--external", type=Path, default=SHARED.parents[1] / "models")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--ratios", nargs="*", type=float, default=list(RATIOS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    models_by_name = subjects(args.external)
    if unknown := set(args.models or ()) - set(models_by_name):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(models_by_name)}")
    args.work.mkdir(parents=True, exist_ok=True)
    done = set(by_key(args.out))
    for name in args.models or ["smollm2-135m", "llama-pycode-16m", "minilm-l6", "vit-tiny-imagenet"]:
        for ratio in args.ratios:
            measure_graphs(models_by_name[name], ratio, args, done)
        measure_speed(models_by_name[name], args, done)
    show(lines_of(args.out))


if __name__ == "__main__":
    main()
