"""`evaluate --tasks suite:NAME`: a paper's tasks from files or by lm-eval, and the mean that its tables have."""

import json
from pathlib import Path

import pytest

from ckpt_prune.datasets.suites import SUITES
from ckpt_prune.evaluation.choice_items import read_items
from tests.cli.running import ok

CHOICES = {"choices": {"text": ["the cat", "a dog sat"], "label": ["A", "B"]}, "answerKey": "B"}
ROWS = {
    "arc_easy_test": [{"question": "Who?", **CHOICES}, {"question": "the cat", **CHOICES}],
    "arc_challenge_test": [{"question": "Where?", **CHOICES}],
    "piqa_valid": [{"goal": "sit", "sol1": "on a mat", "sol2": "far away", "label": 1}],
    "winogrande_dev": [{"sentence": "The _ ran.", "option1": "cat", "option2": "dog", "answer": "2"}],
    "hellaswag_val": [
        {"activity_label": "Pets", "ctx_a": "A cat.", "ctx_b": "it", "endings": ["sat", "ran off"], "label": "1"},
    ],
    "rte_validation": [{"sentence1": "A cat sat.", "sentence2": "A cat ran.", "label": 1}],
}


@pytest.fixture
def tasks(place: Path) -> Path:
    (place / "tasks").mkdir()
    for name, rows in ROWS.items():
        (place / "tasks" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


def test_shapes_of_hellaswag_and_rte_are_those_of_lm_eval(tmp_path: Path):
    """As `utils.py` of its hellaswag and the template of its rte write them, by hand."""
    path = tmp_path / "items.jsonl"
    first = {
        **{"activity_label": "Removing ice", "ctx_a": "Then, the man writes [step] over the snow.", "ctx_b": "he"},
        **{"endings": [" is [title] gone", "sits  down. [substeps] ok"], "label": "0"},
    }
    second = {"premise": "Rain fell.", "hypothesis": "It was wet.", "label": "entailment"}
    third = {"sentence1": "Rain fell.", "sentence2": "It was dry.", "label": 1}
    fourth = {"question": "is it wet", "title": "Rain", "answer": True, "passage": "Rain is wet."}
    path.write_text("\n".join(map(json.dumps, (first, second, third, fourth))))
    swag, yes, no, boolean = read_items(path)
    context = "Removing ice: Then, the man writes over the snow. He"
    assert swag.options == ((context, " is.  gone".replace(".  ", ". ")), (context, " sits down. ok"))
    assert swag.answer == 0
    premise = "Rain fell.\nQuestion: It was wet. True or False?\nAnswer:"
    assert yes.options == ((premise, " True"), (premise, " False"))
    assert (yes.answer, no.answer) == (0, 1)
    assert boolean.options[1] == ("Rain is wet.\nQuestion: is it wet?\nAnswer:", " yes")
    assert boolean.answer == 1


def test_the_mean_is_of_what_the_papers_tables_have(tasks):
    """LaCo's eight, of which three have no file here: plain accuracy of some, normalised of others."""
    args = ("evaluate", "pruned", "--against", "dense", "--tasks", "tasks/suite:laco")
    figures = json.loads(ok(*args, "--json"))
    found = ["piqa", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge"]
    assert set(figures["tasks"]) == set(found)
    metrics = figures["suite"]["metrics"]
    assert [metrics[name] for name in found] == ["accuracy"] * 2 + ["accuracy_norm", "accuracy"] + ["accuracy_norm"] * 2
    for own, mean in (
        (figures["tasks"], figures["suite"]["mean"]),
        ({name: task["against"] for name, task in figures["tasks"].items()}, figures["suite"]["against"]),
    ):
        assert mean == pytest.approx(sum(own[name][metrics[name]] for name in found) / 6)
    lines = ok(*args).splitlines()
    mean = f"{figures['suite']['mean']:.1%}"
    assert f"mean of laco's 6 of 8 tasks, pruned: {mean} (not measured: boolq, openbookqa)" in lines
    assert {name: len(of) for name, of in SUITES.items()} == {"rcpu": 7, "laco": 8, "denoise": 5}


def test_without_files_lm_eval_runs_the_suite(tasks, monkeypatch):
    def run_tasks(folder, names, **_):
        value = {"pruned": 0.25, "dense": 0.75}[folder.name]
        return {"results": {name: {"acc,none": value, "acc_norm,none": value + 0.2} for name in names}}

    monkeypatch.setattr("ckpt_prune.evaluation.harness.run_tasks", run_tasks)
    args = ("evaluate", "pruned", "--against", "dense", "--tasks", "suite:denoise")
    figures = json.loads(ok(*args, "--json"))
    assert list(figures["results"]) == list(SUITES["denoise"])
    assert figures["suite"]["mean"] == pytest.approx(0.25 + 0.2 * 4 / 5)
    assert figures["suite"]["against"] == pytest.approx(0.75 + 0.2 * 4 / 5)
    monkeypatch.setenv("CKPT_PRUNE_DATA", str(tasks))
    assert "tasks" in json.loads(ok(*args, "--json"))
