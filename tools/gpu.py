"""Compare this tool on a GPU with the CPU: time, memory, and how far the outputs are apart.

    tools/gpu.sh [--here] [--small] [--limit SECONDS] [--out FILE.json] [--data DIR] [--only WORDS]

Every command runs once on each device, on the model that the package carries. If `shared/data` lies beside or in the
checkout, it also runs on a vision and a language model there. Then the mathematics of each stage runs on layers as
large as those of a 7B and a 70B model. A step that fails is recorded with its error, and the rest goes on. Without a
GPU the steps that need one are recorded as skipped. One line a step goes to stdout, and all of it to the JSON file
after every step.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tools.gpu_running import Device, Outcome, Step, Workers, run

ROOT = Path(__file__).resolve().parents[1]
DATA = (ROOT / "shared" / "data", ROOT.parent / "shared" / "data")
DEMO = ROOT / "ckpt_prune" / "demo" / "model"
NO_GPU = "PyTorch sees no CUDA device here"
NO_DATA = "there is no shared/data in or beside this checkout"
DEVICES: tuple[Device, ...] = ("cpu", "cuda")
SIZES = {"7B": (4096, 11008, 32), "70B": (8192, 28672, 64)}
"""Hidden size, width of the MLP and heads."""

# Recipe, its options, and which step's output has to be there before it.
BY_STATISTICS = {"statistics": "calibrate"}
PRUNINGS: dict[str, dict[str, Any]] = {
    "ridge, dense cache": {"recipe": "ridge", "ratio": 0.3, "overrides": {"target": "dense"}, **BY_STATISTICS},
    "rcpu-scale, dense cache": {
        "recipe": "rcpu-scale",
        "ratio": 0.3,
        "overrides": {"target": "dense"},
        **BY_STATISTICS,
    },
    "ridge, sequential": {"recipe": "ridge", "ratio": 0.3},
    "best": {"recipe": "best", "ratio": 0.3},
    "wanda-2-4": {"recipe": "wanda-2-4"},
    "sparsegpt-2-4": {"recipe": "sparsegpt-2-4"},
    "denoise-rotator-wanda-2-4": {"recipe": "denoise-rotator-wanda-2-4", "overrides": {"rotation.steps": 20}},
    "cayley-rotator-shared-sparsegpt-2-4": {
        "recipe": "cayley-rotator-shared-sparsegpt-2-4",
        "overrides": {"rotation.steps": 20},
    },
    "corp": {"recipe": "corp", "ratio": 0.3, **BY_STATISTICS},
}
RECOVERED, EXPORTED = "wanda-2-4", "ridge, sequential"
GRAPHS_OF = ("embedded", "vit-tiny-imagenet")
ON_THE_DEMO = tuple(name for name in PRUNINGS if name != "corp")
ON_IMAGES = ("ridge, sequential", "best", "wanda-2-4", "corp")
ON_THE_LANGUAGE_MODEL = ("ridge, dense cache", "ridge, sequential", "wanda-2-4", "sparsegpt-2-4")


def find_data(named: str | None) -> Path | None:
    """Return the folder of models and texts, if there is one."""
    folders = [Path(named)] if named else DATA
    return next((folder.resolve() for folder in folders if folder.is_dir()), None)


def plan(work: Path, *, data: Path | None, gpu: bool, small: bool) -> list[Step]:
    """All steps, those that tell most first.

    Args:
        work: folder for all that is written.
        data: folder of models and texts, or None.
        gpu: whether there is one.
        small: few samples, and large layers at a tenth of their width on the CPU as well.
    """
    from tools.gpu_models import Subject, of_images, of_text

    steps = [
        Step("tests marked cuda", "tools.gpu_models:suite", {"seconds": 110}, "cuda", most=115, least=20),
        *_semi_structured(small),
    ]
    characters, window = (60_000, 64) if small else (400_000, 256)
    samples = 4 if small else 16
    texts = work / "texts"
    steps.append(Step("texts", "tools.gpu_models:demo_texts", {"folder": str(texts), "characters": characters}))
    calibration, held_out = texts / "calibration.txt", texts / "held_out.txt"
    demo = of_text("embedded", DEMO, calibration, held_out, samples, window)
    steps += _on_model(work, demo, ON_THE_DEMO, ("texts, cpu",), gpu)
    steps += _on_layers("7B", small)

    def steps_beside(subject: Subject, prunings: Collection[str]) -> list[Step]:
        missing = None if data is not None else NO_DATA
        return [_unless(missing, step) for step in _on_model(work, subject, prunings, (), gpu)]

    folder = data or DATA[0]
    pictures = folder / "imagenet-1per-class"
    vit = of_images(
        "vit-tiny-imagenet",
        folder / "vit-tiny-imagenet",
        pictures / "images",
        pictures / "labels.csv",
        4 if small else 16,
    )
    steps += steps_beside(vit, ON_IMAGES)
    language = of_text(
        "llama-pycode-16m",
        folder / "llama-pycode-16m",
        folder / "text-pycode" / "calib.txt",
        folder / "text-pycode" / "eval.txt",
        samples,
        window,
    )
    steps += steps_beside(language, ON_THE_LANGUAGE_MODEL)
    steps += _on_layers("70B", small)
    return [step if gpu or step.device == "cpu" else _unless(NO_GPU, step) for step in steps]


def _on_model(work: Path, subject: Any, prunings: Collection[str], after: tuple[str, ...], gpu: bool) -> list[Step]:
    """Every command on a model, on both devices, and the comparisons of what they made."""
    steps: list[Step] = []

    def both(name: str, function: str, needs: dict[Device, tuple[str, ...]], **arguments: Any) -> None:
        for device in DEVICES:
            own_arguments = {key: _choose_for_device(value, device) for key, value in arguments.items()}
            given = {"subject": subject, "device": device, **own_arguments}
            label = f"{subject.name}: {name}"
            steps.append(Step(label, f"tools.gpu_models:{function}", given, device, after + needs.get(device, ())))

    def out(name: str) -> dict[Device, str]:
        return {device: str(work / f"{subject.name}-{name}-{device}".replace(", ", "-")) for device in DEVICES}

    def add_comparison(name: str, measured: bool) -> None:
        label, folders = f"{subject.name}: {name}", out(name)
        # Without a GPU what the CPU made is measured all the same.
        needs = tuple(f"{label}, {device}" for device in (DEVICES if gpu else ("cpu",)))
        given = {"subject": subject, "cpu": folders["cpu"], "cuda": folders["cuda"] if gpu else None}
        steps.append(
            Step(f"{label} compared", "tools.gpu_models:compare", given | {"measured": measured}, "cpu", needs)
        )

    def of(name: str, device: Device) -> str:
        return f"{subject.name}: {name}, {device}"

    both("evaluate the dense model", "evaluate", {})
    both("calibrate", "calibrate", {}, out=out("calibrate"))
    add_comparison("calibrate", measured=False)
    for name in prunings:
        given = dict(PRUNINGS[name])
        needs: dict[Device, tuple[str, ...]] = {}
        if given.pop("statistics", None):
            given["statistics"] = out("calibrate")
            needs = {device: (of("calibrate", device),) for device in DEVICES}
        both(name, "prune", needs, out=out(name), **given)
        add_comparison(name, measured=True)
    # Both devices recover and export what the CPU made, so that nothing else differs.
    first = {device: (of(RECOVERED, "cpu"),) for device in DEVICES}
    both("recover", "recover", first, out=out("recover"), pruned=out(RECOVERED)["cpu"], epochs=2)
    add_comparison("recover", measured=True)
    if subject.name not in GRAPHS_OF:
        return steps
    first = {device: (of(EXPORTED, "cpu"),) for device in DEVICES}
    both("export", "export", first, out=out("export"), model=out(EXPORTED)["cpu"])
    return steps


def _choose_for_device(value: Any, device: Device) -> Any:
    """Return an argument, or its value for this device if it has one for each."""
    return value[device] if isinstance(value, dict) and value.keys() == set(DEVICES) else value


def _semi_structured(small: bool) -> list[Step]:
    function, tokens = "tools.gpu_blocks:semi_structured", 256 if small else 4096
    return [
        Step(
            f"2:4 as a sparse tensor, {outputs} x {inputs}",
            function,
            {"outputs": outputs, "inputs": inputs, "tokens": tokens, "repeats": 20},
            "cuda",
        )
        for outputs, inputs in ((4096, 11008), (11008, 4096))
    ]


def _on_layers(size: str, small: bool) -> list[Step]:
    """Each stage on the output projections of a block of this size; on a CPU at a tenth of the width, if at all."""
    steps = []
    for device in DEVICES:
        hidden, mlp, heads = (number // 10 if device == "cpu" and number > 100 else number for number in SIZES[size])
        mlp -= mlp % 4
        hidden -= hidden % heads
        layer = {"outputs": hidden, "inputs": mlp, "device": device}
        square = {"outputs": hidden, "inputs": hidden, "device": device}
        stages: list[tuple[str, str, dict[str, Any]]] = [
            ("moments", "moments", layer),
            ("OBS over the columns", "obs", layer),
            ("refit by ridge", "refit", layer | {"method": "ridge"}),
            ("rotation", "refit", layer | {"method": "rotation"}),
            ("wanda 2:4", "mask", layer | {"method": "wanda"}),
            ("sparsegpt 2:4", "mask", layer | {"method": "sparsegpt"}),
            ("choice on folds", "choice", layer),
            ("OBS over the heads", "obs", square | {"per_unit": hidden // heads}),
        ]
        why = None if device == "cuda" or small else "layers of this size are for a GPU; --small makes a tenth of them"
        for name, function, given in stages:
            label = f"{size} layer{' at a tenth of the width' if device == 'cpu' else ''}: {name}"
            most = 150 if name == "choice on folds" else 90
            steps.append(Step(label, f"tools.gpu_blocks:{function}", given, device, skip=why, most=most))
    return steps


def _unless(reason: str | None, step: Step) -> Step:
    """The step, skipped for a reason if there is one."""
    from dataclasses import replace

    return step if reason is None or step.skip is not None else replace(step, skip=reason)


def row(outcome: Outcome) -> str:
    """A line of the table."""
    gib = [None if size is None else f"{size / 2**30:.2f}" for size in (outcome.rss_bytes, outcome.gpu_bytes)]
    seconds = None if outcome.seconds is None else f"{outcome.seconds:.2f}"
    cells = [cell or "-" for cell in (seconds, *gib)]
    note = outcome.reason or _describe(outcome.values)
    return (
        f"{outcome.name:<62} {outcome.device:<5} {outcome.status:<8} {cells[0]:>8} {cells[1]:>8} {cells[2]:>8}  {note}"
    ).rstrip()


def _describe(values: dict[str, Any]) -> str:
    """Describe the result of a step, in short."""
    parts = []
    for device, scores in values.get("measured", {}).items():
        parts += [f"{name} ({device}) {value:.4f}" for name, value in scores.items() if value is not None]
    difference = values.get("difference")
    if difference is not None:
        far = difference["relative"]
        parts.append("nothing to compare" if far is None else f"apart {far:.1e}")
        if difference["zeros"]:
            parts.append(f"zeros elsewhere {difference['zeros']:.1e}")
        parts += [f"{len(difference[key])} tensors {key}" for key in ("other_shape", "only_in_one") if difference[key]]
    if "same_units" in values:
        parts.append(f"units {'equal' if values['same_units'] else 'NOT equal'}")
    parts += [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
        if isinstance(value, (int, float, str)) and key != "same_units"
    ]
    return ", ".join(parts)


HEADER = f"{'step':<62} {'on':<5} {'status':<8} {'s':>8} {'RSS GiB':>8} {'GPU GiB':>8}"


def measure(out: Path, *, limit: float, small: bool, data: Path | None, words: str | None) -> list[Outcome]:
    """Make all steps and write them down; the outcomes."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckpt-prune-gpu-") as folder:
        work = Path(folder)
        (work / "texts").mkdir()
        outcomes: list[Outcome] = []
        with Workers(work / "log.txt") as workers:
            first = next(run([Step("environment", "tools.gpu_models:environment")], workers.do, until=start + limit))
            outcomes.append(first)
            print(HEADER)
            print(row(first), flush=True)
            gpu = first.values.get("gpu") is not None
            for outcome in run(
                choose_steps(words, plan(work, data=data, gpu=gpu, small=small)), workers.do, until=start + limit
            ):
                outcomes.append(outcome)
                if outcome.reason != NO_GPU:
                    print(row(outcome), flush=True)
                _write(out, outcomes, start, limit, small)
    return outcomes


def choose_steps(words: str | None, steps: list[Step]) -> list[Step]:
    """The steps whose label has the words, and what they need."""
    labels = {step.label for step in steps if words is None or words in step.label}
    for step in reversed(steps):
        if step.label in labels:
            labels |= set(step.after)
    return [step for step in steps if step.label in labels]


def _write(out: Path, outcomes: list[Outcome], start: float, limit: float, small: bool) -> None:
    record = {
        "version": 1,
        "environment": outcomes[0].values,
        "small": small,
        "limit": limit,
        "seconds": round(time.monotonic() - start, 1),
        "steps": [outcome.data() for outcome in outcomes],
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON file")
    parser.add_argument("--limit", type=float, default=540, help="seconds; what no longer fits is left out")
    parser.add_argument("--small", action="store_true", help="few samples; large layers on the CPU at a tenth")
    parser.add_argument("--data", help="folder of models and texts, in place of shared/data beside or in the checkout")
    parser.add_argument("--only", metavar="WORDS", help="only steps whose line has these words, and what they need")
    given = parser.parse_args()
    outcomes = measure(given.out, limit=given.limit, small=given.small, data=find_data(given.data), words=given.only)
    counts = {
        status: sum(outcome.status == status for outcome in outcomes)
        for status in ("ok", "failed", "skipped", "left out")
    }
    without = sum(outcome.reason == NO_GPU for outcome in outcomes)
    if without:
        print(f"\n{without} more steps skipped: {NO_GPU}")
    print(f"\n{', '.join(f'{count} {status}' for status, count in counts.items())}; all of it is in {given.out}")
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
