"""`evaluate --tasks FILE.jsonl` and `evaluate --generate`."""

import json
from pathlib import Path

import pytest

from tests.cli.running import ok

ITEMS = [
    {"question": "the cat", "choices": ["sat on a mat", "ran"], "answer": 0},
    {"question": "the dog", "choices": ["sat", "ran"], "answer": 1},
    {"question": "then", "choices": ["far away", "on"], "answer": 1},
    {"question": "and then", "choices": ["sat", "on"], "answer": 1},
]


@pytest.fixture
def tasks(place: Path) -> Path:
    for name in ("pets", "toys"):
        (place / f"{name}.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in ITEMS))
    return place


def test_files_of_items(tasks):
    figures = json.loads(ok("evaluate", "pruned", "--against", "dense", "--tasks", "pets.jsonl,toys.jsonl", "--json"))
    repeated = ("--tasks", "pets.jsonl", "--tasks", "toys.jsonl")
    assert json.loads(ok("evaluate", "pruned", "--against", "dense", *repeated, "--json")) == figures
    assert (figures["model"], figures["against"]) == ("pruned", "dense")
    assert list(figures["tasks"]) == ["pets", "toys"]
    pets = figures["tasks"]["pets"]
    assert pets == figures["tasks"]["toys"]
    assert (pets["items"], pets["chance"]) == (4, 0.5)
    assert pets["accuracy"] in {0, 0.25, 0.5, 0.75, 1}
    lines = ok("evaluate", "pruned", "--against", "dense", "--tasks", "pets.jsonl").splitlines()
    assert lines[0].split() == ["task", "model", "accuracy", "+/-", "norm.", "chance", "items"]
    assert [line.split()[:2] for line in lines[1:3]] == [["pets", "pruned"], ["pets", "dense"]]
    assert lines[1].split()[2:] == [
        *(f"{pets[key]:.1%}" for key in ("accuracy", "stderr", "accuracy_norm", "chance")),
        "4",
    ]
    assert pets["difference"] == pets["accuracy"] - pets["against"]["accuracy"]
    assert [line.split() for line in lines[3:]] == [
        [],
        ["task", "difference", "+/-", "both", "choose", "the", "same"],
        ["pets", f"{pets['difference']:+.1%}", f"{pets['difference_stderr']:.1%}", f"{pets['agreement']:.1%}"],
    ]


def test_without_a_reference(tasks):
    figures = json.loads(ok("evaluate", "dense", "--generate", "the cat", "--generate-tokens", "3", "--json"))
    assert figures["against"] is None
    assert [sorted(row) for row in figures["generated"]] == [["prompt", "repeated", "text", "tokens"]]


def test_what_a_terminal_would_obey_is_not_printed(tasks, monkeypatch):
    from ckpt_prune.evaluation.generation import GeneratedText

    monkeypatch.setattr(
        "ckpt_prune.evaluation.answers.continue_prompts", lambda *_a, **_k: [GeneratedText("a\x1b[2Jb\nc", 3, 0.0)]
    )
    assert ok("evaluate", "dense", "--generate", "x").endswith("\na\ufffd[2Jb\nc\n")


def test_tasks_of_lm_eval_stand_side_by_side(tasks, monkeypatch):
    """lm-eval itself is not needed for how its tables are put together."""

    def run_tasks(folder, names, **_):
        value = {"pruned": 0.25, "dense": 0.75}[folder.name]
        return {"results": {name: {"acc,none": value, "acc_stderr,none": 0.1} for name in names}, "versions": {}}

    monkeypatch.setattr("ckpt_prune.evaluation.harness.run_tasks", run_tasks)
    lines = ok("evaluate", "pruned", "--tasks", "piqa", "--against", "dense").splitlines()
    assert [line.split() for line in lines] == [
        ["task", "metric", "pruned", "dense", "difference"],
        ["piqa", "acc,none", "0.2500", "0.7500", "-0.5000"],
    ]
    figures = json.loads(ok("evaluate", "pruned", "--tasks", "piqa", "--against", "dense", "--json"))
    assert figures["differences"] == {"piqa": {"acc,none": -0.5}}
    assert (figures["results"]["piqa"]["acc,none"], figures["against"]["results"]["piqa"]["acc,none"]) == (0.25, 0.75)
