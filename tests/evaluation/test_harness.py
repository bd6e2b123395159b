import json
import sys

import pytest
import yaml

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.choice_items import read_items
from ckpt_prune.evaluation.choices import answer
from ckpt_prune.evaluation.harness import check_tasks, run_tasks
from ckpt_prune.evaluation.whole_model import load_model
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.refusals import refusal


def test_without_lm_eval_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"^tasks need lm-eval \(.*\): pip install \"\.\[eval\]\" in the checkout"):
        run_tasks(tmp_path, ["arc_easy"], device="cpu")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["piqa", "arc_eazy"], "unknown task 'arc_eazy': did you mean 'arc_easy'?"),
        (["qqqq"], "unknown task 'qqqq': `lm_eval ls tasks` lists them"),
    ],
)
def test_unknown_tasks(tasks, message):
    assert refusal(check_tasks, tasks, ["piqa", "arc_easy", "boolq"]) == message


@pytest.mark.filterwarnings("default")  # lm-eval and what it imports warn of things that are theirs
def test_a_task_of_ones_own_is_scored_like_the_file_of_its_items(tmp_path):
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    folder, tasks = tmp_path / "model", tmp_path / "tasks"
    tiny_llama(max_position_embeddings=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tasks.mkdir()
    questions = [{"question": f"is it {letter}", "choices": [letter, "zz"], "answer": 0} for letter in "abcdef"]
    (tasks / "own.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": "ckpt_prune_own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "own.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "metadata": {"version": 1.0},
    }
    (tasks / "own.yaml").write_text(yaml.safe_dump(task))
    outcome = run_tasks(folder, ["ckpt_prune_own"], device="cpu", limit=4, include_path=tasks)
    assert outcome["n-samples"] == {"ckpt_prune_own": {"original": 6, "effective": 4}}
    own = answer(load_model(folder, device="cpu"), tiny_tokenizer(), read_items(tasks / "own.jsonl", 4), what="own")
    results = outcome["results"]["ckpt_prune_own"]
    assert (results["acc,none"], results["acc_norm,none"]) == (own.accuracy, own.accuracy_norm)
    json.dumps(outcome)
