"""Commands that write, on a tiny model: the inputs and the output of each."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.running import ok
from tests.conversion.test_convert import timm
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.gguf_files.tiny import save

IN = "../inputs"
TEXT = ("--text", f"{IN}/calib.txt", "--samples", "4", "--window", "16")
THEIRS = "notes-of-mine.txt"
"""A file in an old output that this tool did not write."""
_WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "dog", "ran", "far", "away"]


@dataclass(frozen=True)
class Job:
    """A command that makes `out`.

    Attributes:
        arguments: all of it.
        resumable: whether another run can go on with it.
        old: folder or file of the inputs that lies at `out` before, and is to be replaced.
        fixed: whether it never replaces what it made.
        graph: whether it traces a model: that is done before and once.
        out: name of what it makes.
        repo: repository on the Hub whose files count as what it makes, in `out`.
    """

    arguments: tuple[str, ...]
    resumable: bool = False
    old: str | None = None
    fixed: bool = False
    graph: bool = False
    out: str = "out"
    repo: str | None = None


def _prune(recipe: str, *more: str, old: bool = False, graph: bool = False, given: tuple[str, ...] = TEXT) -> Job:
    arguments = ("prune", f"{IN}/dense", "--recipe", recipe, *given, *more, "-o", "out")
    return Job(
        arguments + (("--overwrite",) if old else ()), resumable=True, old="pruned" if old else None, graph=graph
    )


_HALF = ("--ratio", "0.5")
_STATS = ("--statistics", f"{IN}/stats")
_FEW = ("--samples", "4", "--window", "16")
_GGUF = ("export", f"{IN}/to-gguf", "--format", "gguf", "--no-validate")
JOBS = {
    "calibrate": Job(("calibrate", f"{IN}/dense", *TEXT, "--collect", "moments,gram", "-o", "out")),
    "calibrate-fisher": Job(("calibrate", f"{IN}/dense", *TEXT, "--folds", "2", "-o", "out")),
    "calibrate-again": Job(
        ("calibrate", f"{IN}/dense", *TEXT, "--collect", "moments,gram", "-o", "out", "--overwrite"), old="stats"
    ),
    "add": Job(("statistics", "add", f"{IN}/stats", f"{IN}/more", "-o", "out")),
    "plan": Job(("plan", f"{IN}/dense", "--recipe", "ridge", *_HALF, *_STATS, "-o", "out.json"), out="out.json"),
    "recipe": Job(("recipe", "copy", "ridge", "out.yaml"), fixed=True, out="out.yaml"),
    "dense": _prune("ridge", *_HALF, "--set", "target=dense", given=_STATS),
    "planned": Job(("prune", f"{IN}/dense", "--plan", f"{IN}/plan.json", "-o", "out"), resumable=True),
    "sequential": _prune("rcpu", *_HALF),
    "sharded": Job(
        ("prune", f"{IN}/sharded", "--recipe", "magnitude", *_HALF, "-o", "out"),
        resumable=True,
    ),
    "drift": _prune("best", *_HALF),
    "masks": _prune("sparsegpt-2-4"),
    "rotations": _prune("cayley-rotator-shared-wanda-2-4", "--set", "rotation.steps=3"),
    "recovery": _prune("laco-wanda-50", "--set", "recovery.epochs=2"),
    "scales": _prune("ridge", *_HALF, "--set", "recovery.method=scales"),
    "scales-again": _prune("best-scaled", *_HALF, old=True),
    "again": _prune("rcpu", *_HALF, old=True),
    "graph": _prune("rcpu", *_HALF, "--set", "export.format=onnx", graph=True),
    "recover": Job(
        ("recover", f"{IN}/pruned", "--dense", f"{IN}/dense", *TEXT, "--epochs", "2", "-o", "out"), resumable=True
    ),
    "export": Job(("export", f"{IN}/pruned", "-o", "out", *TEXT), graph=True),
    "export-again": Job(("export", f"{IN}/pruned", "-o", "out", *TEXT, "--overwrite"), old="onnx", graph=True),
    "export-int8": Job(
        ("export", f"{IN}/pruned", "-o", "out", *TEXT, "--dtype", "int8", "--max-loss", "99%"), graph=True
    ),
    "depth": _prune("replaceme", "--set", "depth.drop=1"),
    "sliced": _prune("slicegpt-shared", "--set", "hidden.drop=4"),
    "sliced-blocks": _prune("slicegpt", "--set", "hidden.drop=4"),
    "narrow": _prune("best-narrow", "--ratio", "0.3", "--folds", "2"),
    "axes": _prune("best-narrow", "--set", "depth.drop=1", "--ratio", "0.3", "--folds", "2"),
    "values": _prune("values", *_HALF),
    "factored": _prune("low-rank", "--ratio", "0.3"),
    "depth-alone": _prune("shortgpt", "--set", "depth.drop=1"),
    "lora": Job(
        ("recover", f"{IN}/pruned", "--method", "lora", *TEXT, "--epochs", "1", "--batch", "2", "-o", "out"),
        resumable=True,
    ),
    "recover-scales": Job(
        ("recover", f"{IN}/pruned", "--dense", f"{IN}/dense", "--method", "scales", *TEXT, "-o", "out"), resumable=True
    ),
    "quantize": Job(("quantize", f"{IN}/wide", "--format", "int8", "-o", "out"), resumable=True),
    "quantize-gptq": Job(
        ("quantize", f"{IN}/wide", "--format", "int4", "--statistics", f"{IN}/wide-stats", "-o", "out", "--overwrite"),
        resumable=True,
        old="eight-bits",
    ),
    "quantize-text": Job(("quantize", f"{IN}/wide", "--format", "int4", *TEXT, "-o", "out"), resumable=True),
    "push": Job(("push", f"{IN}/pruned", "team/small"), repo="team/small"),
    "report": Job(("report", f"{IN}/pruned", "-o", "out.html"), out="out.html"),
    "convert": Job(("convert", f"{IN}/timm", "-o", "out"), resumable=True),
    "convert-gguf": Job(("convert", f"{IN}/model.gguf", "--no-validate", "-o", "out"), resumable=True),
    "gguf": Job((*_GGUF, "--dtype", "q8_0", "-o", "out.gguf"), out="out.gguf"),
    "gguf-again": Job((*_GGUF, "-o", "out.gguf", "--overwrite"), old="model.gguf", out="out.gguf"),
    "gguf-recipe": Job(
        (
            *("prune", f"{IN}/to-gguf", "--recipe", "magnitude", *_HALF, "-o", "out"),
            *("--set", "export.format=gguf", "--set", "export.validate=false"),
        ),
        resumable=True,
    ),
}


def make_inputs(folder: Path, *, graphs: bool = True) -> Path:
    """Make what the jobs are given, in `folder/inputs`; tracing takes seconds, and only jobs with `graph` need it."""
    here = folder / "inputs"
    here.mkdir()
    work = folder / "work"
    work.mkdir()
    rng = random.Random(0)
    for name, words in (("calib.txt", 400), ("more.txt", 300)):
        (here / name).write_text(" ".join(rng.choice(_WORDS) for _ in range(words)))
    with quiet_transformers():
        model = tiny_llama(max_position_embeddings=32)
        model.save_pretrained(here / "dense")
        model.save_pretrained(here / "sharded", max_shard_size="10KB")
        # As narrow as groups of 4 bits may be.
        tiny_llama(max_position_embeddings=32, hidden_size=32, intermediate_size=64).save_pretrained(here / "wide")
    for name in ("dense", "sharded", "wide"):
        tiny_tokenizer("<s> $A").save_pretrained(here / name)
    save(here / "to-gguf", "llama", num_hidden_layers=2)
    moments = ("--collect", "moments,gram")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        ok("calibrate", f"{IN}/dense", *TEXT, *moments, "-o", f"{IN}/stats")
        ok("calibrate", f"{IN}/dense", "--text", f"{IN}/more.txt", *_FEW, *moments, "-o", f"{IN}/more")
        ok(*_GGUF, "--dtype", "f16", "-o", f"{IN}/model.gguf")
        ok("prune", f"{IN}/dense", "--recipe", "wanda-sp", *_HALF, *_STATS, "-o", f"{IN}/pruned")
        ok("plan", f"{IN}/dense", "--recipe", "ridge", *_HALF, *_STATS, "-o", f"{IN}/plan.json")
        ok("calibrate", f"{IN}/wide", *TEXT, "--collect", "moments,gram,linears", "-o", f"{IN}/wide-stats")
        ok("quantize", f"{IN}/wide", "--format", "int8", "-o", f"{IN}/eight-bits")
        if graphs:
            ok("export", f"{IN}/pruned", "-o", f"{IN}/onnx")
    work.rmdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        timm(Path("timm"))
    return here


def lay(job: Job, inputs: Path, place: Path) -> None:
    """Put in place what is there before a job begins."""
    place.mkdir(exist_ok=True)
    if job.old and (inputs / job.old).is_file():
        shutil.copy(inputs / job.old, place / job.out)
    elif job.old:
        shutil.copytree(inputs / job.old, place / job.out)
        (place / job.out / THEIRS).write_text("mine")
