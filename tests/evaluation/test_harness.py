import json
import sys

import pytest
import yaml

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.harness import check_tasks, run_tasks
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer


def test_without_lm_eval_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"^tasks need lm-eval \(.*\): pip install 'ckpt-prune\[eval\]'$"):
        run_tasks(tmp_path, ["arc_easy"], device="cpu")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["piqa", "arc_eazy"], "unknown task 'arc_eazy': did you mean 'arc_easy'?"),
        (["qqqq"], "unknown task 'qqqq': `lm_eval ls tasks` lists them"),
    ],
)
def test_unknown_tasks(tasks, message):
    with pytest.raises(UserError) as caught:
        check_tasks(tasks, ["piqa", "arc_easy", "boolq"])
    assert str(caught.value) == message


@pytest.mark.filterwarnings("default")  # lm-eval and what it imports warn of things that are theirs
def test_a_task_of_ones_own(tmp_path):
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    folder, tasks = tmp_path / "model", tmp_path / "tasks"
    tiny_llama(max_position_embeddings=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tasks.mkdir()
    questions = [{"question": f"what is {letter}", "choices": [letter, "zz"], "answer": 0} for letter in "abcdef"]
    (tasks / "own.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": "ckpt_prune_own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "own.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    (tasks / "own.yaml").write_text(yaml.safe_dump(task))
    outcome = run_tasks(folder, ["ckpt_prune_own"], device="cpu", limit=4, include_path=tasks)
    assert outcome["n-samples"] == {"ckpt_prune_own": {"original": 6, "effective": 4}}
    assert outcome["results"]["ckpt_prune_own"]["acc,none"] in {0, 0.25, 0.5, 0.75, 1}
    json.dumps(outcome)
