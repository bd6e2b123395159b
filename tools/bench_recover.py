"""LaCo against LoRA: what recovery brings back of pruned models in ../shared/data, in which time and memory.

    PYTHONPATH=. python tools/bench_recover.py --out recover.jsonl [--models NAME ...] [--prunings NAME ...]
    PYTHONPATH=. python tools/bench_recover.py --out recover.jsonl --depth     # peak memory over the number of layers
    PYTHONPATH=. python tools/bench_recover.py --out recover.jsonl --table     # print what is there, measure nothing

Every step is a process of its own, so that its time and peak resident memory are its own; imports are in both. LoRA
(`recover --method lora`, needs the extra "lora") trains on the same samples. It has as many seconds as the whole
command of `recover` (of kind laco) took; its own imports and loading are not counted against it.
Each line of the output is one measurement; a run goes on where the last one stopped, and ends by printing the tables.
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.datasets import standard_library
from ckpt_prune.model.skeleton import quiet_transformers
from tools.bench_command import command
from tools.bench_lines import add_line, lines_of
from tools.bench_masks import models
from tools.bench_perplexity import SHARED, Subject

VIT = "vit-tiny-imagenet"
MASKS = ("wanda-50", "wanda-70", "sparsegpt-2-4")
SCALES = "scales"
RECOVERED = {
    "laco": (),
    "laco-mlp": ("--only", "mlp"),
    "laco-attention": ("--only", "attention"),
    SCALES: ("--method", "scales", "--epochs", "1", "--batch", "1"),
}
KINDS = {
    "pruned": "pruned",
    "laco": "LaCo",
    "laco-mlp": "LaCo mlp",
    "laco-attention": "LaCo attention",
    SCALES: "scales",
    "lora": "LoRA",
}
LR = 1e-3
"""Of LoRA. Of 1e-4, 1e-3, 3e-3 and 1e-2 the best on held-out text for a 3 M Llama under wanda-50, 60 s: a choice by the
text it is measured on, in LoRA's favour."""
ENDLESS = ("--method", "lora", "--epochs", "1000000", "--patience", "1000000")
"""LoRA that --seconds ends."""
DEPTHS = (4, 8, 16)
CHARACTERS = 1000
"""Of each stretch of the packaged model's text: a window of its 256 tokens is about 790."""


def prunings() -> dict[str, tuple[str, ...]]:
    """Options of `ckpt-prune prune`, by name. OPT's head count is in no stock config: remote code there."""
    options_by_name: dict[str, tuple[str, ...]] = {
        "wanda-50": ("--recipe", "wanda-50"),
        "wanda-70": ("--recipe", "wanda-50", "--ratio", "0.7"),
        "sparsegpt-2-4": ("--recipe", "sparsegpt-2-4"),
    }
    for recipe in ("flap", "rcpu-scale"):
        for ratio in (20, 50, 70):
            options_by_name[f"{recipe}-{ratio}"] = (
                "--recipe",
                recipe,
                "--ratio",
                str(ratio / 100),
                "--container",
                "any",
            )
    return options_by_name


@dataclass(frozen=True)
class Data:
    """A model with the options that say what it is calibrated on and evaluated on."""

    name: str
    model: Path
    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]


def stretches(text: str, count: int) -> str:
    """So many short pieces from all over a text, joined by newlines."""
    return "\n".join(text[i : i + CHARACTERS] for i in range(0, len(text) - CHARACTERS, len(text) // count))


def text_data(subject: Subject, scratch: Path, args: argparse.Namespace) -> Data:
    texts = [subject.calibration, subject.evaluation]
    if not subject.calibration:
        # Modules differ much in difficulty, so not their beginning; all of them would take a gigabyte to tokenise.
        written = {
            "calibration.txt": stretches(standard_library.read_corpus(held_out=False), 4 * args.samples),
            "evaluation.txt": stretches(standard_library.read_corpus(held_out=True), args.windows),
        }
        for name, text in written.items():
            (scratch / name).write_text(text, encoding="utf-8")
        texts = [str(scratch / name) for name in written]
    common = ("--bos", "never", "--window", str(subject.window))
    calibration = ("--text", texts[0], *common, "--samples", str(args.samples))
    evaluation = ("--text", texts[1], *common, "--samples", str(args.windows))
    return Data(subject.name, subject.folder, calibration, evaluation)


def data_of(name: str, scratch: Path, args: argparse.Namespace) -> Data:
    if name != VIT:
        return text_data(models()[name], scratch, args)
    images = ("--images", f"{SHARED}/imagenet-1per-class")
    return Data(VIT, SHARED / VIT, (*images, "--samples", str(args.samples)), images)


def tool(*options: str | Path) -> tuple[str, dict[str, float]]:
    """Run a command. Return what it prints, its seconds on the clock, and peak memory."""
    done = command(*options, "--device", "cpu", "--json")
    return done.printed, {"seconds": round(done.clock, 1), "peak_rss_gib": done.gibibytes}


def score(folder: Path, data: Data) -> dict[str, float]:
    """Perplexity, or of an image classifier top-1, on what is held out."""
    figures = json.loads(tool("evaluate", folder, *data.evaluation)[0])
    key = "top1" if "top1" in figures else "perplexity"
    return {key: figures[key]}


def likeness(out: Path) -> dict[str, Any]:
    """Means over the blocks of an output's report, before and after recovery, and how many of them were recovered."""
    layers = read_json_object(out / REPORT)["layers"]
    means = {k: sum(x[k] for x in layers) / len(layers) for k in ("mse_before", "mse_after", "cka_before", "cka_after")}
    return means | {"recovered": sum(x["recovered"] for x in layers), "blocks": len(layers)}


class Log:
    """The lines of the output, and how to add one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines = lines_of(file)

    def find(self, key: str) -> dict[str, Any] | None:
        """The measurement of this key, or None."""
        return next((line for line in self.lines if line["key"] == key), None)

    def add(self, key: str, **values: Any) -> dict[str, Any]:
        """Write a measurement."""
        line = {"key": key, **values}
        self.lines.append(line)
        add_line(self.file, line)
        figures = ", ".join(f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, float))
        print(f"{key}: {figures}", flush=True)
        return line


def run_model(name: str, log: Log, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = data_of(name, Path(folder), args)
        held_out = "all" if name == VIT else args.windows
        key = f"{name} | dense | {held_out}"
        if log.find(key) is None:
            log.add(key, model=name, pruning="", kind="dense", held_out=held_out, **score(data.model, data))
        for pruning in args.prunings:
            run_pruning(data, pruning, log, args, held_out)


def run_pruning(data: Data, pruning: str, log: Log, args: argparse.Namespace, held_out: int | str) -> None:
    """One model pruned in one way, then every kind of recovery that is asked for and not measured yet."""
    settings = {"samples": args.samples, "held_out": held_out, "epochs": args.epochs, "batch": args.batch}

    def key_of(kind: str) -> str:
        how = [args.epochs, args.batch] if kind != "pruned" else []
        rate = [args.lora_lr] if kind.startswith("lora") else []
        return " | ".join(map(str, [data.name, pruning, kind, args.samples, held_out, *how, *rate]))

    def record(kind: str, out: Path, cost: dict[str, float], **note: Any) -> None:
        subject = {"model": data.name, "pruning": pruning, "kind": kind}
        log.add(key_of(kind), **subject, **settings, **score(out, data), **cost, **note)

    kinds = [kind for kind in KINDS if kind in args.kinds]
    missing = [kind for kind in kinds if log.find(key_of(kind)) is None]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as scratch:
        pruned = Path(scratch) / "pruned"
        try:
            cost = tool(
                "prune", data.model, *prunings()[pruning], *data.calibration, "--evaluate-samples", "0", "-o", pruned
            )[1]
            if "pruned" in missing:
                record("pruned", pruned, cost)
            for kind in [kind for kind in missing if kind in RECOVERED]:
                out = Path(scratch) / kind
                training = ("--epochs", str(args.epochs), "--batch", str(args.batch), *RECOVERED[kind])
                cost = tool("recover", pruned, "--dense", data.model, *data.calibration, *training, "-o", out)[1]
                record(kind, out, cost, **likeness(out) if kind != SCALES else {})
            if "lora" in missing:
                budget = log.find(key_of("laco"))
                if budget is None:
                    raise RuntimeError("LoRA trains for as long as kind laco took, which is not measured")
                out = Path(scratch) / "lora"
                cost, note = run_lora(data, pruned, out, budget["seconds"], args)
                record("lora", out, cost, **note)
        except RuntimeError as error:  # the rest of the models and prunings is worth measuring all the same
            print(f"{data.name} | {pruning}: {error}", flush=True)


def run_lora(
    data: Data, pruned: Path, out: Path, seconds: float, args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """One training: what it cost, and how much of it there was."""
    training = (*ENDLESS, "--seconds", str(seconds), "--lr", str(args.lora_lr), "--batch", str(args.batch))
    printed, cost = tool("recover", pruned, *data.calibration, *training, "-o", out)
    adapters = json.loads(printed)["adapters"]
    note = {"trained_seconds": adapters["seconds"], "steps": adapters["steps"], "lora_epochs": adapters["epochs"]}
    return cost, note | {"lr": args.lora_lr}


def run_depths(log: Log) -> None:
    """Peak memory of recovering random Llamas of one width and growing depth; what they compute means nothing."""
    tokenizer = SHARED / "llama-stories260k"
    text = ("--text", f"{SHARED}/text-tinystories/calib_bos.txt", "--bos", "never")
    samples = (*text, "--samples", "16", "--window", "128")
    for layers in DEPTHS:
        keys = {kind: f"depth | {layers} | {kind}" for kind in ("laco", "lora")}
        missing = [kind for kind in keys if log.find(keys[kind]) is None]
        if not missing:
            continue
        config = LlamaConfig(
            hidden_size=512,
            intermediate_size=1408,
            vocab_size=512,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        with tempfile.TemporaryDirectory() as scratch:
            dense, pruned, out = (Path(scratch) / name for name in ("dense", "pruned", "out"))
            with quiet_transformers():
                LlamaForCausalLM(config).save_pretrained(dense)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(tokenizer / name, dense / name)
            size = sum(file.stat().st_size for file in dense.glob("*.safetensors")) / 2**30
            tool("prune", dense, "--recipe", "magnitude-50", "-o", pruned)
            for kind in missing:
                if kind == "laco":
                    training = ("--epochs", "1", "--batch", "8", "-o", out)
                    cost = tool("recover", pruned, "--dense", dense, *samples, *training)[1]
                else:
                    training = (*ENDLESS, "--seconds", "5", "--batch", "8", "-o", Path(scratch) / "lora")
                    cost = tool("recover", pruned, *samples, *training)[1]
                note = {"model": "depth", "pruning": "magnitude-50", "layers": layers, "checkpoint_gib": size}
                log.add(keys[kind], kind=kind, **note, **cost)


def print_scores(lines: list[dict[str, Any]]) -> None:
    """Markdown: for each model a row for each pruning, a column for each kind."""
    for name in dict.fromkeys(line["model"] for line in lines):
        model_lines = [line for line in lines if line["model"] == name]
        dense = next((_figure(line) for line in model_lines if line["kind"] == "dense"), "-")
        cells = {(line["pruning"], line["kind"]): _figure(line) for line in model_lines}
        metric = "top-1" if any("top1" in line for line in model_lines) else "perplexity"
        print(f"\n{name}, {metric}\n\n| pruning | dense | {' | '.join(KINDS.values())} |")
        print("|---|---|" + "---|" * len(KINDS))
        for pruning in dict.fromkeys(line["pruning"] for line in model_lines if line["pruning"]):
            print(f"| {pruning} | {dense} | {' | '.join(cells.get((pruning, kind), '-') for kind in KINDS)} |")


def _figure(line: dict[str, Any]) -> str:
    if "top1" in line:
        return f"{line['top1']:.1%}"
    if line["perplexity"] is None:  # infinite: JSON has no such number
        return "inf"
    return f"{line['perplexity']:.3f}" if line["perplexity"] < 1e5 else f"{line['perplexity']:.1e}"


def print_costs(lines: list[dict[str, Any]]) -> None:
    """Markdown: seconds and peak memory of both ways, of whole processes, and what LaCo did to the hidden states."""
    cells = {(x["model"], x["pruning"], x["kind"]): x for x in lines}
    print("\n| model | pruning | LaCo s | LaCo GiB | LoRA s | LoRA GiB | LoRA epochs | mean MSE | mean CKA | blocks |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model, pruning in dict.fromkeys((x["model"], x["pruning"]) for x in lines if x["kind"] == "laco"):
        laco, lora = cells[model, pruning, "laco"], cells.get((model, pruning, "lora"))
        shown = [f"{laco['seconds']:.0f}", f"{laco['peak_rss_gib']:.2f}"]
        shown += (
            [f"{lora['seconds']:.0f}", f"{lora['peak_rss_gib']:.2f}", f"{lora['lora_epochs']:.1f}"]
            if lora
            else ["-"] * 3
        )
        shown.append(f"{laco['mse_before']:.3g} -> {laco['mse_after']:.3g}")
        shown.append(f"{laco['cka_before']:.3f} -> {laco['cka_after']:.3f}")
        print(f"| {model} | {pruning} | {' | '.join(shown)} | {laco['recovered']}/{laco['blocks']} |")


def print_depths(lines: list[dict[str, Any]]) -> None:
    """Markdown: a row for each depth."""
    print("\n| layers | checkpoint GiB | LaCo peak GiB | LoRA peak GiB |\n|---|---|---|---|")
    cells = {(x["layers"], x["kind"]): x for x in lines}
    for layers, size in sorted({(x["layers"], x["checkpoint_gib"]) for x in lines}):
        entries = [cells.get((layers, kind)) for kind in ("laco", "lora")]
        peaks = [f"{x['peak_rss_gib']:.2f}" if x else "-" for x in entries]
        print(f"| {layers} | {size:.2f} | {' | '.join(peaks)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*models(), VIT]
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file; measurements in it are not repeated")
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--prunings", nargs="+", default=list(prunings()), choices=list(prunings()))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--samples", type=int, default=64, help="calibration windows or images")
    parser.add_argument("--epochs", type=int, default=5, help="of LaCo, for each block")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--windows", type=int, default=64, help="held-out windows; of images always all")
    parser.add_argument("--lora-lr", type=float, default=LR)
    parser.add_argument("--depth", action="store_true", help="measure memory over depth instead")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    log = Log(args.out)
    if args.depth and not args.table:
        run_depths(log)
    elif not args.table:
        for name in args.models:
            run_model(name, log, args)
    settings = {"samples": args.samples, "epochs": args.epochs, "batch": args.batch, "lr": args.lora_lr}
    lines = [
        line for line in log.lines if line["model"] in args.models and settings.items() <= (settings | line).items()
    ]
    lines = [line for line in lines if line["held_out"] in (args.windows, "all")]
    depths = [line for line in log.lines if line["model"] == "depth"]
    if lines and not args.depth:
        print_scores(lines)
        print_costs(lines)
    if depths:
        print_depths(depths)


if __name__ == "__main__":
    main()
