"""The examples of every `--help` run, on tiny models."""

import shlex
import shutil
from pathlib import Path

import pytest

from tests.cli.running import enter_copy, ok
from tests.cli.test_help import EVERY
from tests.pairs import every
from tests.test_guides import smaller, write_things

ELSEWHERE = {"export", "validate", "benchmark", "convert", "push", "recipe push", "demo"}
"""Commands that take long or need a network: guides and their own tests run them."""
ABSENT = {"arc_easy.jsonl,piqa.jsonl", "glue:sst2", "wikitext2"}
"""Data of others."""
LINES = [
    (name, line)
    for name in sorted(EVERY.keys() - ELSEWHERE)
    for line in EVERY[name].examples
    if ABSENT.isdisjoint(line.split())
]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that examples begin with, under the names that they give it."""
    folder = tmp_path_factory.mktemp("things")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_things()
        for seed, names in enumerate((["STATS", "CODE", "SHARD1"], ["MORE", "STORIES", "SHARD2"], ["SHARD3"])):
            given = ("--text", "calib.txt", "--samples", "8", "--window", "16", "--folds", "4", "--seed", str(seed))
            for name in names:
                ok("calibrate", "MODEL", *given, "-o", name)
        for model, out in (("MODEL", "PRUNED"), ("VIT", "PRUNED-VIT")):
            ok("prune", model, "--recipe", "magnitude", "--ratio", "0.5", "-o", out)
            shutil.copytree(out, out.replace("PRUNED", "OUT"))
        ok("plan", "MODEL", "--recipe", "ridge", "--statistics", "STATS", "-o", "plan.json")
        ok("recipe", "copy", "ridge", "mine.yaml")
        shutil.copy("mine.yaml", "yours.yaml")
        for name in ("train.txt", "test.txt"):
            shutil.copy("calib.txt", name)
        shutil.copy("photos/labels.csv", "labels.csv")
    return folder


@pytest.mark.parametrize(("name", "line"), every(2, LINES), ids=[line for _, line in LINES])
def test_an_example_runs(name, line, things, tmp_path, monkeypatch):
    place = enter_copy(things, tmp_path, monkeypatch)
    words = smaller(shlex.split(line.partition(" > ")[0]))
    if "VIT" in words:
        words = [f"{word}-VIT" if word in ("OUT", "PRUNED") else word for word in words]
    written = words[words.index("-o") + 1] if "-o" in words else None
    if name == "recipe copy":
        written = f"{Path(words[-1]).stem}.yaml"
    if written is not None and (place / written).exists():
        shutil.rmtree(place / written) if (place / written).is_dir() else (place / written).unlink()
    ok(*words)
    assert written is None or (place / written).exists()
