"""What `inspect` tells of a family by its description alone is what it tells by transformers' class."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.inspection.describe import describe
from ckpt_prune.model.config_only import checkpoint_of_config
from ckpt_prune.model.containers.checking import check_source
from ckpt_prune.model.matching import is_described
from ckpt_prune.model.model import Model

from .models import CASES, Case

DESCRIBED = [
    case for case in CASES if is_described({"model_type": case.model_type, "architectures": [case.architecture]})
]


def headers_of(case: Case, **changes: Any) -> Checkpoint:
    config = case.published_config | changes
    return replace(checkpoint_of_config(Path(case.model_type), config), by_class=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", DESCRIBED, ids=str)
def test_the_answer_is_that_of_the_class(case, tied):
    told = headers_of(case, tie_word_embeddings=tied)
    asked = replace(told, by_class=True)
    answers = [
        describe(each, weights=False, recipe="corp-mlp", ratios=[0.5], sparsity=False).data() for each in (told, asked)
    ]
    assert answers[0] == answers[1]


def test_the_best_known_families_need_no_class():
    alone = {case.model_type for case in DESCRIBED if not Model.of(headers_of(case)).checkpoint.by_class}
    assert alone >= {"llama", "mistral", "qwen2", "gemma", "phi3", "granite", "starcoder2"}
    assert "qwen3" not in alone  # no description names the norms of queries and keys


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_a_config_opens_are_known(key):
    case = next(case for case in DESCRIBED if case.model_type == "llama")
    assert not Model.of(headers_of(case, **{key: True})).checkpoint.by_class


@pytest.mark.parametrize(
    "change",
    [
        {"model.norm.weight": None},
        {"model.layers.1.input_layernorm.weight": None},
        {"model.layers.0.mlp.up_proj.weight": (21, 16)},
        {"model.embed_tokens.weight": (7, 16)},
        {"model.layers.0.mlp.up_proj.bias": (22,)},
        {"model.more.weight": (1,)},
    ],
)
def test_the_class_is_asked_of_whatever_differs(change):
    """It says what is wrong, in the words that a run says it in."""
    given = headers_of(next(case for case in DESCRIBED if case.model_type == "llama"))
    ((name, shape),) = change.items()
    tensors = dict(given.tensors)
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = replace(tensors["model.norm.weight"], name=name, shape=shape)
    assert Model.of(given).checkpoint.by_class is False
    assert Model.of(replace(given, tensors=tensors)).checkpoint.by_class is True


@pytest.mark.parametrize("change", [{"hidden_act": "none"}, {"pad_token_id": 10**6}])
def test_the_class_is_asked_of_settings_that_it_looks_up(change):
    given = headers_of(next(case for case in DESCRIBED if case.model_type == "llama"))
    with pytest.raises(UserError, match="transformers refuses this config"):
        check_source(Model.of(replace(given, config=given.config | change)))
