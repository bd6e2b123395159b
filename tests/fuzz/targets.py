"""Files that come from others, each with the commands that read it."""

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_prune.common.filenames import QUANTISED_RECORD
from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.checkpoint.test_adapters import adapt
from tests.cli.running import ok
from tests.cli.test_audio import make_sounds
from tests.faults.jobs import make_inputs
from tests.images import write_csv, write_images, write_processor, write_vit
from tests.sentence_folders import make_sentences

TEXT = ("--text", "calib.txt", "--samples", "4", "--window", "16")
_COMPARE = ("--text", "calib.txt", "--samples", "1", "--window", "8")
_MOMENTS = ("--collect", "moments", "-o", "out")
_MAGNITUDE = ("--recipe", "magnitude", "--ratio", "0.5")
_EMBED = ("evaluate", "sentences", "--against", "sentences", "--text", "calib.txt", *TEXT[2:])
_AUDIO = ("calibrate", "whisper", "--part", "encoder", "--audio", "sounds", *_MOMENTS)
_IMAGES = ("calibrate", "vit", "--images", "flat", "--samples", "3", *_MOMENTS)


@dataclass(frozen=True)
class Target:
    """A file, how it is changed (see `mutate.mutate_data`), and what reads it."""

    file: str
    kind: str
    commands: tuple[tuple[str, ...], ...]


_JOB = ("prune", "dense", *_MAGNITUDE)
_RECOVER = ("recover", "rotated", "--dense", "dense", *TEXT, "--epochs", "1", "-o", "out")
_FROM_GGUF = ("convert", "model.gguf", "--no-validate", "-o", "out")
_TO_GGUF = ("export", "to-gguf", "--format", "gguf", "--dtype", "q8_0", "--no-validate", "-o", "out.gguf")
TARGETS = {
    "config": Target(
        "dense/config.json",
        "json",
        (("inspect", "dense"), (*_JOB, "-o", "out", "--dry-run"), ("inspect", "dense", "--json")),
    ),
    "index": Target("sharded/model.safetensors.index.json", "json", (("inspect", "sharded"), ("verify", "sharded"))),
    "weights": Target("dense/model.safetensors", "safetensors", (("inspect", "dense"), (*_JOB, "-o", "out"))),
    "tokenizer": Target("dense/tokenizer.json", "json", (("calibrate", "dense", *TEXT, *_MOMENTS),)),
    "tokenizer settings": Target("dense/tokenizer_config.json", "json", (("calibrate", "dense", *TEXT, *_MOMENTS),)),
    "generation": Target("dense/generation_config.json", "json", ((*_JOB, "-o", "out"),)),
    "processor": Target("vit/preprocessor_config.json", "json", (_IMAGES,)),
    "recipe": Target(
        "recipe.json",
        "json",
        (("recipe", "validate", "recipe.json"), ("plan", "dense", "--recipe", "recipe.json", "--statistics", "stats")),
    ),
    "recipe text": Target(
        "recipe.yaml",
        "yaml",
        (
            ("recipe", "show", "recipe.yaml"),
            ("recipe", "validate", "recipe.yaml"),
            ("prune", "dense", "--recipe", "recipe.yaml", *TEXT, "-o", "out", "--dry-run"),
        ),
    ),
    "plan": Target(
        "plan.json",
        "json",
        (("prune", "dense", "--plan", "plan.json", "-o", "out", "--dry-run"), ("report", "plan.json", "-o", "out")),
    ),
    "statistics": Target(
        "stats/statistics.json",
        "json",
        (
            ("statistics", "show", "stats"),
            ("plan", "dense", "--recipe", "ridge", "--statistics", "stats"),
            ("statistics", "add", "stats", "more", "-o", "out"),
        ),
    ),
    "moments": Target(
        "stats/block-00000.safetensors",
        "safetensors",
        (("plan", "dense", "--recipe", "ridge", "--statistics", "stats"),),
    ),
    "report": Target(
        "pruned/ckpt_prune.json",
        "json",
        (("report", "pruned", "-o", "out"), ("verify", "pruned", "--against", "dense")),
    ),
    "rotations": Target("rotated/rotations.st", "safetensors", (_RECOVER,)),
    "labels": Target(
        "listed/labels.csv",
        "bytes",
        (("evaluate", "vit", "--images", "listed/images", "--labels", "listed/labels.csv", "--samples", "2"),),
    ),
    "items": Target("items.jsonl", "bytes", (("evaluate", "dense", "--tasks", "items.jsonl"),)),
    "modules": Target(
        "sentences/modules.json",
        "json",
        (
            ("inspect", "sentences"),
            ("prune", "sentences", *_MAGNITUDE, "--set", "spaces.heads.ratio=0", "-o", "out"),
            _EMBED,
        ),
    ),
    "pooling": Target(
        "sentences/1_Pooling/config.json",
        "json",
        (_EMBED,),
    ),
    "adapter": Target(
        "adapter/adapter_config.json", "json", (("inspect", "adapter"), ("convert", "adapter", "-o", "out"))
    ),
    "features": Target("sounds/3.npy", "npy", (_AUDIO,)),
    "sound": Target("sounds/1.wav", "bytes", (_AUDIO,)),
    "image": Target("flat/0.png", "bytes", (_IMAGES,)),
    "text": Target("calib.txt", "bytes", (("calibrate", "dense", *TEXT, *_MOMENTS),)),
    "lines": Target("calib.jsonl", "bytes", (("calibrate", "dense", "--text", "calib.jsonl", *TEXT[2:], *_MOMENTS),)),
    "quantised record": Target(
        f"eight-bits/{QUANTISED_RECORD}",
        "json",
        (("verify", "eight-bits", "--against", "wide"), ("inspect", "eight-bits")),
    ),
    "quantised config": Target(
        "eight-bits/config.json", "json", (("verify", "eight-bits"), ("inspect", "eight-bits", "--json"))
    ),
    "quantised weights": Target("eight-bits/model.safetensors", "safetensors", (("verify", "eight-bits"),)),
    "gguf": Target("model.gguf", "gguf", (_FROM_GGUF,)),
    "gguf keys": Target("model.gguf", "gguf keys", (_FROM_GGUF,)),
    "gguf tokenizer": Target("to-gguf/tokenizer.json", "json", (_TO_GGUF,)),
    "gguf tokenizer settings": Target("to-gguf/tokenizer_config.json", "json", (_TO_GGUF,)),
    "own code config": Target(
        "own/config.json",
        "json",
        (
            *(("validate", "own", "--runtime", runtime, *_COMPARE) for runtime in ("transformers", "mlx", "vllm")),
            ("inspect", "own"),
            ("export", "own", *_TO_GGUF[2:]),
            ("verify", "own"),
        ),
    ),
    "own code tokenizer settings": Target(
        "own/tokenizer_config.json", "json", (("validate", "own", "--runtime", "transformers", *_COMPARE),)
    ),
    "own code generation": Target(
        "own/generation_config.json", "json", (("validate", "own", "--runtime", "transformers", *_COMPARE),)
    ),
    "own code": Target(
        "own/modeling_pruned.py",
        "bytes",
        (("validate", "own", "--runtime", "transformers", *_COMPARE), ("inspect", "own"), ("verify", "own")),
    ),
    "MLX code": Target("own/mlx_pruned.py", "bytes", (("validate", "own", "--runtime", "mlx", *_COMPARE),)),
    "genai config": Target("onnx/genai_config.json", "json", (("validate", "onnx", "--runtime", "genai", *_COMPARE),)),
    "graph record": Target("onnx/ckpt_prune_onnx.json", "json", (("verify", "onnx"),)),
    "graph": Target("onnx/model.onnx", "bytes", (("verify", "onnx"),)),
}
GRAPHS = {"graph record", "graph", "genai config"}
"""Targets that take a traced model."""
RECIPE = {
    "version": 1,
    "name": "own",
    "summary": "One of everything.",
    "target": "sequential",
    "ratio": 0.5,
    "spaces": {
        "heads": {"score": "rcpu", "compensation": {"method": "ridge", "lambda": 0.01}},
        "mlp": {"score": "flap", "ratio": 0.25, "compensation": {"method": "rotation"}},
    },
    "recovery": {"epochs": 2, "layers": "0:1", "only": "mlp"},
    "export": {"format": "onnx", "dtype": "fp16"},
}


def make_place(folder: Path, *, graphs: bool = True) -> Path:
    """Every file of `TARGETS`, and what stands beside them."""
    place = make_inputs(folder, graphs=graphs)
    (place / "recipe.json").write_text(json.dumps(RECIPE))
    shutil.copy(Path(__file__).parents[2] / "recipes" / "best.yaml", place / "recipe.yaml")
    lines = [json.dumps({"text": line}) for line in (place / "calib.txt").read_text().split(" then ")]
    (place / "calib.jsonl").write_text("\n".join(lines))
    with quiet_transformers():
        write_vit(place / "vit", 0)
        make_sentences(place / "sentences")
    with warnings.catch_warnings(action="ignore"):  # of peft
        adapt(place / "dense", place / "adapter", ["q_proj", "down_proj"])
    write_processor(place / "vit")
    make_sounds(place)
    names = [f"{i}.png" for i in range(4)]
    write_images(place / "flat", names)
    write_images(place / "listed" / "images", names)
    write_csv(place / "listed" / "labels.csv", "file,label", *(f"images/{name},{i}" for i, name in enumerate(names)))
    items = [
        {"question": "the cat", "choices": {"text": ["sat", "ran far"], "label": ["A", "B"]}, "answerKey": "A"}
        for _ in range(3)
    ]
    (place / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        uneven = ("--set", "widths=per_layer", "--set", "allocation=across-layers", "--set", "container=remote")
        ok("prune", "to-gguf", *_MAGNITUDE, *uneven, "-o", "own")
        rotated_recipe = ("--recipe", "cayley-rotator-wanda-2-4", "--set", "rotation.steps=1")
        ok("prune", "dense", *rotated_recipe, *TEXT, "-o", "rotated")
    return place
