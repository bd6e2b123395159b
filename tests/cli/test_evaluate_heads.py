"""`evaluate` of heads without labels: classes of texts and tokens, ends of answers, and single numbers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig

from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests import encoders
from tests.cli.running import edit_weights, ok, read_refusal
from tests.cli.test_evaluate_encoder import WORDS, bert_tokenizer, nudge

DATA = ("--text", "some.txt", "--window", "12")
HEADS = {
    "texts": ("BertForSequenceClassification", 3),
    "tokens": ("BertForTokenClassification", 3),
    "answers": ("BertForQuestionAnswering", 2),
    "ranks": ("BertForSequenceClassification", 1),
    "replaced": ("ElectraForPreTraining", 2),
}


def make(folder: Path, head: str) -> None:
    name, labels = HEADS[head]
    model_type = "electra" if name.startswith("Electra") else "bert"
    config = AutoConfig.for_model(model_type, **encoders.SIZES["bert"] | {"num_labels": labels, "embedding_size": 8})
    model = getattr(transformers, name)(config).eval()
    encoders.randomise(model, 3)
    with quiet_transformers():
        model.save_pretrained(folder)
    bert_tokenizer().save_pretrained(folder)


@pytest.fixture(params=HEADS)
def head(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A working folder with `dense`, `near` (the same, moved a little) and `some.txt`."""
    monkeypatch.chdir(tmp_path)
    for name in ("dense", "near"):
        make(Path(name), request.param)
    edit_weights("near", nudge(0.1))
    rng = np.random.default_rng(0)
    Path("some.txt").write_text(" ".join(rng.choice(WORDS, 40)))
    return str(request.param)


def windows() -> torch.Tensor:
    ids = bert_tokenizer()(Path("some.txt").read_text(), add_special_tokens=False)["input_ids"]
    return torch.tensor([[0, *ids[at : at + 10], 1] for at in range(0, len(ids) - 9, 10)])


@torch.inference_mode()
def predict(folder: str, head: str) -> list[np.ndarray]:
    """Logits over classes (predictions, classes) of every output, by the stock class."""
    rows = windows()
    tokenizer = bert_tokenizer()
    rows[:, 0], rows[:, -1] = tokenizer.bos_token_id, tokenizer.eos_token_id
    model = getattr(transformers, HEADS[head][0]).from_pretrained(folder).eval().double()
    outputs = [value.numpy() for name, value in model(input_ids=rows).items() if name.endswith("logits")]
    if head == "replaced":
        return [np.stack([np.zeros_like(logits), logits], -1).reshape(-1, 2) for logits in outputs]
    return [logits.reshape(-1, logits.shape[-1]) for logits in outputs]


def test_figures(head: str) -> None:
    report: dict[str, Any] = json.loads(ok("evaluate", "near", "--against", "dense", *DATA, "--json"))
    ours, theirs = predict("near", head), predict("dense", head)
    texts = len(windows())
    assert (report["model"], report["against"], report["window"], report["windows"]) == ("near", "dense", 12, texts)
    if head == "ranks":
        ranks = [np.argsort(np.argsort(outputs[0][:, 0])) for outputs in (ours, theirs)]
        assert report["rank_correlation"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-6)
        assert (report["kl"], report["agreement"], report["predictions"]) == (None, None, texts)
        return
    kl, same = 0.0, []
    for a, b in zip(ours, theirs, strict=True):
        p, q = (logits - np.log(np.exp(logits).sum(1, keepdims=True)) for logits in (b, a))
        kl += (np.exp(p) * (p - q)).sum(1).mean()
        same.append(a.argmax(1) == b.argmax(1))
    assert report["kl"] == pytest.approx(kl, rel=1e-3)
    assert kl > 1e-3
    assert report["agreement"] == pytest.approx(np.concatenate(same).mean())
    assert report["predictions"] == texts * {"texts": 1, "tokens": 12, "answers": 2, "replaced": 12}[head]
    assert report["rank_correlation"] is None


def test_other_classes_and_broken_weights_are_refused(head: str) -> None:
    if head == "texts":
        config = json.loads(Path("near/config.json").read_text())
        ids = {"id2label": {str(i): str(i) for i in range(4)}, "label2id": {str(i): i for i in range(4)}}
        Path("near/config.json").write_text(json.dumps(config | ids))
        more = {"classifier.weight": torch.zeros(4, 16), "classifier.bias": torch.zeros(4)}
        edit_weights("near", lambda tensors: tensors.update(more))
        message = "the two heads differ in their classes: what they give cannot be compared"
    else:
        name = "electra" if head == "replaced" else "bert"
        broken = torch.full((16,), math.nan)
        edit_weights("near", lambda tensors: tensors.update({f"{name}.encoder.layer.0.output.dense.bias": broken}))
        message = "the model's logits are not finite numbers: the weights are damaged or overflow in this dtype"
    assert read_refusal("evaluate", "near", "--against", "dense", *DATA) == message
