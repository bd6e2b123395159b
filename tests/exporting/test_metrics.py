"""Where a task has no metric, that is said; `test_validation` has the figures of those that have one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt_prune.exporting.metrics import image_metric, text_metric
from tests.evaluation.tiny import tiny_tokenizer

GRAPH: Any = None
REFERENCE: Any = SimpleNamespace(model=None)
WINDOWS = torch.ones(2, 3, dtype=torch.int64)


def test_labels_of_texts_are_not_there(tmp_path) -> None:
    found = text_metric(GRAPH, REFERENCE, "text-classification", WINDOWS, tmp_path, 1e-4)
    assert found == "text-classification has none without labelled texts"


def test_nothing_can_be_masked_without_a_token_for_it(tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path)
    found = text_metric(GRAPH, REFERENCE, "fill-mask", WINDOWS, tmp_path, 1e-4)
    assert found == "its tokenizer has no mask token, so nothing can be masked"


@pytest.mark.parametrize("task", ["fill-mask", "text-generation"])
def test_tasks_that_are_not_of_images(task) -> None:
    images: Any = [None, None]
    assert image_metric(GRAPH, REFERENCE, task, images, 1e-4) == f"{task} of images has none"
