"""`evaluate --tasks` of models with a sequence-classification head: tasks of GLUE, and rows of one's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from sklearn.metrics import f1_score
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from ckpt_prune.datasets.files import DATA_VARIABLE
from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests import encoders
from tests.cli.running import edit_weights, ok, read_refusal
from tests.cli.test_evaluate_encoder import WORDS, bert_tokenizer, nudge
from tests.hub_server import Hub, Repo

NAMES = {"id2label": {0: "not equivalent", 1: "Equivalent"}}


def make(folder: str, labels: int, **changes: Any) -> None:
    sizes = encoders.SIZES["bert"]
    model = BertForSequenceClassification(BertConfig(**sizes | {"num_labels": labels} | changes)).eval()
    encoders.randomise(model, 3)
    with quiet_transformers():
        model.save_pretrained(folder)
    tokenizer = bert_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)


def write(name: str, rows: list[dict]) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def pairs(count: int = 12) -> list[dict]:
    rng = np.random.default_rng(0)

    def text() -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(1, 4))))

    return [{"sentence1": text(), "sentence2": text(), "label": int(rng.integers(2)), "idx": i} for i in range(count)]


@torch.inference_mode()
def predict(folder: str, rows: list[dict]) -> np.ndarray:
    """Logits of every row, alone, by the stock class."""
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    most = min(model.config.max_position_embeddings, tokenizer.model_max_length)
    options: Any = {"return_tensors": "pt", "truncation": True, "max_length": most}
    batches = [tokenizer(row["sentence1"], row["sentence2"], **options) for row in rows]
    return np.concatenate([model(**batch).logits.double().numpy() for batch in batches])


def figures(*args: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(ok("evaluate", *args, "--json"))
    return report


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With `dense`, `near` (the same, moved a little), and MRPC's rows in `data`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    for name in ("dense", "near"):
        make(name, 2, **NAMES)
    edit_weights("near", nudge(0.2))
    write("data/glue/mrpc/validation.jsonl", pairs())
    return tmp_path


def test_beside_the_dense_model(here, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, "data")
    report = figures("near", "--against", "dense", "--tasks", "glue:mrpc")
    rows = pairs()
    ours, theirs = (predict(folder, rows) for folder in ("near", "dense"))
    true = [row["label"] for row in rows]
    expected = {}
    for name, logits in (("near", ours), ("dense", theirs)):
        picked = logits.argmax(1).tolist()
        right = np.mean(np.array(picked) == true)
        expected[name] = {"accuracy": pytest.approx(right), "f1": pytest.approx(f1_score(true, picked))}
    task = report["tasks"]["mrpc"]
    assert (report["model"], report["against"], task["items"], task["by_name"]) == ("near", "dense", 12, True)
    assert {key: task[key] for key in ("accuracy", "f1")} == expected["near"]
    assert task["against"] == expected["dense"]
    assert task["difference"] == {key: pytest.approx(task[key] - task["against"][key]) for key in ("accuracy", "f1")}
    assert task["agreement"] == pytest.approx(np.mean(ours.argmax(1) == theirs.argmax(1)))
    p, q = (torch.from_numpy(logits).log_softmax(-1) for logits in (theirs, ours))
    assert task["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-4)
    lines = ok("evaluate", "near", "--against", "dense", "--tasks", "glue:mrpc").splitlines()
    assert lines[0].split() == ["task", "metric", "near", "dense", "difference", "texts"]
    assert [line.split()[:2] for line in lines[1:3]] == [["mrpc", "accuracy"], ["mrpc", "f1"]]
    assert lines[4].startswith("mrpc: both put the same class first for ")
    assert len(lines) == 5


def test_a_folder_a_file_and_fewer_rows(here):
    expected = figures("dense", "--tasks", "data/glue:mrpc")["tasks"]["mrpc"]
    write("mrpc-mine.jsonl", pairs())
    assert figures("dense", "--tasks", "mrpc-mine.jsonl")["tasks"] == {"mrpc-mine": expected}
    write("first.jsonl", pairs()[:5])
    few = figures("dense", "--tasks", "mrpc-mine.jsonl", "--samples", "5")["tasks"]["mrpc-mine"]
    # Of two classes accuracy and F1 are told also where the task is not known.
    assert figures("dense", "--tasks", "first.jsonl")["tasks"]["first"] | {"by_name": True} == few


def test_classes_go_by_name_where_the_model_names_them(here):
    make("turned", 2, id2label={0: "EQUIVALENT", 1: "not-equivalent"})
    make("unnamed", 2)
    tasks = [figures(name, "--tasks", "data/glue:mrpc")["tasks"]["mrpc"] for name in ("dense", "turned", "unnamed")]
    assert tasks[1]["accuracy"] == pytest.approx(1 - tasks[0]["accuracy"])
    assert tasks[2] == tasks[0] | {"by_name": False}
    assert ok("evaluate", "unnamed", "--tasks", "data/glue:mrpc").splitlines()[-1] == (
        "mrpc: the model does not name its classes as the task does; they are taken by number"
    )
    write("named.jsonl", [row | {"label": ("not_equivalent", "equivalent")[row["label"]]} for row in pairs()])
    named = figures("turned", "--tasks", "named.jsonl")["tasks"]["named"]
    assert named["accuracy"] == tasks[1]["accuracy"]


def test_numbers(here):
    make("graded", 1)
    make("other", 1)
    edit_weights("other", nudge(0.2))
    rows = [row | {"label": 0.5 * i} for i, row in enumerate(pairs(6))]
    write("data/glue/stsb/validation.jsonl", rows)
    task = figures("graded", "--against", "other", "--tasks", "data/glue:stsb")["tasks"]["stsb"]
    numbers = predict("graded", rows)[:, 0].tolist()
    assert task["pearson"] == pytest.approx(pearsonr(numbers, [row["label"] for row in rows]).statistic, abs=1e-5)
    assert (task["kl"], task["agreement"]) == (None, None)
    assert -1 <= task["rank_correlation"] <= 1
    lines = ok("evaluate", "graded", "--against", "other", "--tasks", "data/glue:stsb").splitlines()
    assert lines[-1] == f"stsb: rank correlation of the two models' numbers {task['rank_correlation']:.4f}"


def test_from_the_hub(here, hub: Hub):
    repo = hub.repos["datasets/nyu-mll/glue"] = Repo(private=False)
    repo.commit({"mrpc/validation-00000-of-00001.parquet": b"PAR1"}, "data")
    message = read_refusal("evaluate", "dense", "--tasks", "glue:mrpc")
    file, _, fault = message.partition(".parquet: ")
    assert file.endswith("mrpc/validation-00000-of-00001")
    assert fault.startswith(("reading parquet needs pyarrow", "cannot be read as labelled texts: Parquet"))


def test_bad_input(here):
    make("many", 3)
    make("graded", 1)
    write("hidden/mrpc.jsonl", [row | {"label": -1} for row in pairs(2)])
    write("odd.jsonl", [{"text": "the cat", "label": 7}])
    write("said.jsonl", [{"text": "the cat", "label": "maybe"}])
    write("bare.jsonl", [{"words": "the cat", "label": 1}])
    for args, message in {
        ("dense", "nowhere/glue:mrpc"): "nowhere/glue:mrpc: nowhere has no mrpc.jsonl or mrpc/validation.jsonl or mrpc/"
        "validation-*.parquet",
        (
            "dense",
            "hidden/glue:mrpc",
        ): "hidden/mrpc.jsonl, row 1: label -1 stands for one that is not public, as in "
        "GLUE's test splits: give the validation split",
        ("many", "data/glue:mrpc"): "many has 3 classes, and mrpc has 2: not its task",
        ("graded", "data/glue:mrpc"): "graded gives numbers, and mrpc is scored by accuracy and f1: not its task",
        ("dense", "odd.jsonl"): "odd has the label 7: 2 classes are numbered from 0",
        ("dense", "said.jsonl"): "said has the label 'maybe'; known are not_equivalent, equivalent",
        ("graded", "said.jsonl"): "graded gives numbers, and said has the label 'maybe': not its task",
        ("dense", "data/glue:mrpc,arc_easy"): "--tasks: tasks of GLUE and lm-eval's own are run in calls of their own",
        ("dense", "data/glue:mrpc,a/mrpc.jsonl"): "a/mrpc.jsonl: no such file of items",
        ("dense", "data/glue:mrpc,data/glue:mrpc"): "--tasks: two have the same name: figures could not be told apart",
    }.items():
        assert read_refusal("evaluate", args[0], "--tasks", args[1]) == message
    error = read_refusal("evaluate", "dense", "--tasks", "bare.jsonl")
    assert error.startswith("bare.jsonl, row 1: no labelled text; expected label, and ")


def test_a_model_without_labels_is_refused(place):
    write("data/glue/mrpc/validation.jsonl", pairs(1))
    assert read_refusal("evaluate", "dense", "--tasks", "data/glue:mrpc") == (
        "dense gives no labels of texts: tasks of GLUE are for models with a sequence-classification head"
    )
