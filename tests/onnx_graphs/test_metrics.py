"""A task without a metric says so; `test_validation` has the figures of those that have one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig

from ckpt_prune.onnx.metrics import Allowance, measure_image_metric, measure_text_metric
from tests.evaluation.tiny import tiny_tokenizer

GRAPH: Any = None
REFERENCE: Any = SimpleNamespace(model=None)
WINDOWS = torch.ones(2, 3, dtype=torch.int64)


class Says:
    """A model that says the same whatever it reads."""

    device, dtype, config = torch.device("cpu"), torch.float32, BertConfig(vocab_size=9)

    def __init__(self, **logits: torch.Tensor) -> None:
        self._logits = logits

    def eval(self) -> "Says":
        return self

    def __call__(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._logits


def metric_of(task: Any, graph: Any, reference: Any, tmp_path: Path) -> Any:
    return measure_text_metric(graph, SimpleNamespace(model=reference), task, WINDOWS, tmp_path, Allowance(1e-4))  # type: ignore[arg-type]


def test_texts_that_are_put_into_another_class_are_told_by_how_near_the_two_were(tmp_path) -> None:
    theirs = Says(logits=torch.tensor([[2.0, 1.0], [1.0, 0.9999]]))
    near = metric_of("text-classification", Says(logits=torch.tensor([[2.0, 1.0], [0.9999, 1.0]])), theirs, tmp_path)
    assert (near.name, near.onnxruntime, near.pytorch, near.difference, near.passed) == (
        "agreement",
        0.5,
        None,
        0.5,
        True,
    )
    assert near.of == "2 predictions in 2 windows of 3 tokens"
    far = metric_of("text-classification", Says(logits=torch.tensor([[1.0, 2.0], [1.0, 0.9]])), theirs, tmp_path)
    assert (far.onnxruntime, far.difference, far.tolerance, far.passed) == (0.5, 0.5, 0.0, False)


def test_both_ends_of_an_answer_and_tokens_of_two_classes_count(tmp_path) -> None:
    ends = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    theirs, ours = Says(start_logits=ends, end_logits=ends), Says(start_logits=ends, end_logits=ends.flip(1))
    assert metric_of("question-answering", ours, theirs, tmp_path).onnxruntime == 0.5
    metric = metric_of("token-classification", Says(logits=ends - 1.5), Says(logits=ends - 0.5), tmp_path)
    assert (metric.onnxruntime, metric.passed) == (pytest.approx(4 / 6), False)


def test_single_numbers_of_texts_have_no_metric(tmp_path) -> None:
    scores = Says(logits=torch.tensor([[1.0], [2.0]]))
    scores.config = BertConfig(vocab_size=9, num_labels=1)
    metric = metric_of("text-classification", scores, scores, tmp_path)
    assert metric == "text-classification by single numbers has none"


def test_nothing_can_be_masked_without_a_token_for_it(tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path)
    metric = measure_text_metric(GRAPH, REFERENCE, "fill-mask", WINDOWS, tmp_path, Allowance(1e-4))
    assert metric == "its tokenizer has no mask token, so nothing can be masked"


@pytest.mark.parametrize("task", ["fill-mask", "text-generation"])
def test_tasks_that_are_not_of_images(task) -> None:
    images: Any = [None, None]
    assert measure_image_metric(GRAPH, REFERENCE, task, images, Allowance(1e-4)) == f"{task} of images has none"
