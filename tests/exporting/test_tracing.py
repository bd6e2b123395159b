"""What a model is traced with: no size that a tracer could take for a constant, and every axis that is dynamic."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.export import Dim
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_prune.errors import UserError
from ckpt_prune.exporting.tasks import Task
from ckpt_prune.exporting.tracing import example_of, image_size
from tests import encoders, families

from .exports import in_pytorch, made

GENERATION = Task("text-generation", "text", True)
DYNAMIC = {0: Dim.AUTO, 1: Dim.AUTO}


def small(**changes) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(families.SIZES | changes))).eval()


def shapes(inputs: dict[str, object]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(v.shape), v.dtype) for name, v in inputs.items() if isinstance(v, torch.Tensor)}


def test_a_decoder_with_a_cache():
    example = example_of(small(), GENERATION)
    assert shapes(example.inputs) == {
        "input_ids": ((2, 3), torch.int64),
        "attention_mask": ((2, 7), torch.int64),
        "position_ids": ((2, 3), torch.int64),
    }
    assert example.inputs["position_ids"].tolist() == [[4, 5, 6]] * 2
    cache = example.inputs["past_key_values"]
    assert [tuple(t.shape) for layer in cache.layers for t in (layer.keys, layer.values)] == [(2, 2, 4, 4)] * 6
    assert example.inputs["use_cache"] is True
    names = ("input_ids", "attention_mask", "position_ids")
    assert example.dynamic == dict.fromkeys(names, DYNAMIC) | {"past_key_values": [{0: Dim.AUTO, 2: Dim.AUTO}] * 6}


def test_a_decoder_without_one():
    example = example_of(small(), Task("text-generation", "text", False))
    assert shapes(example.inputs) == dict.fromkeys(
        ("input_ids", "attention_mask", "position_ids"), ((2, 3), torch.int64)
    )
    assert example.inputs["position_ids"].tolist() == [[0, 1, 2]] * 2
    assert example.inputs["use_cache"] is False
    assert "past_key_values" not in example.inputs


def test_features_of_a_decoder_count_their_own_positions():
    example = example_of(small().base_model, Task("feature-extraction", "text", False))
    assert set(shapes(example.inputs)) == {"input_ids", "attention_mask"}


def test_layers_of_different_widths(tmp_path_factory):
    """Two widths of keys, and keys narrower than values, as the cache of a real pass has them."""
    graphs = made(tmp_path_factory)
    for name, expected in (
        ("uneven-llama", [(2, 2, 4, 4), (2, 2, 4, 4), (2, 1, 4, 4), (2, 1, 4, 4)]),
        ("narrow-opt", [(2, 3, 4, 2), (2, 3, 4, 4)]),
    ):
        layers = example_of(in_pytorch(graphs(name)[0]), GENERATION).inputs["past_key_values"].layers
        assert [tuple(t.shape) for layer in layers for t in (layer.keys, layer.values)] == expected


def test_a_window_does_not_cut_the_cache():
    config = AutoConfig.for_model("mistral", **(families.SIZES | {"sliding_window": 2}))
    cache = example_of(AutoModelForCausalLM.from_config(config).eval(), GENERATION).inputs["past_key_values"]
    assert [layer.keys.shape[2] for layer in cache.layers] == [4, 4, 4]


def test_an_encoder_of_text(tmp_path):
    model = encoders.stock(encoders.make(tmp_path / "bert", "bert-mlm"), "bert-mlm")
    example = example_of(model, Task("fill-mask", "text", False))
    names = ("input_ids", "attention_mask", "token_type_ids")
    assert shapes(example.inputs) == dict.fromkeys(names, ((2, 3), torch.int64))
    assert example.dynamic == dict.fromkeys(names, DYNAMIC)
    assert not example.inputs["token_type_ids"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_images(tmp_path, dtype):
    model = encoders.stock(encoders.make(tmp_path / "vit", "vit"), "vit", dtype=dtype)
    example = example_of(model, Task("image-classification", "image", False))
    assert shapes(example.inputs) == {"pixel_values": ((2, 3, 12, 12), dtype)}
    assert example.dynamic == {"pixel_values": {0: Dim.AUTO}}


@pytest.mark.parametrize(("size", "expected"), [(224, (224, 224)), ([192, 256], (192, 256)), ((8, 4), (8, 4))])
def test_sizes_of_images(size, expected):
    assert image_size(SimpleNamespace(image_size=size)) == expected


@pytest.mark.parametrize("given", [{}, {"image_size": None}, {"image_size": "large"}, {"image_size": [1, 2, 3]}])
def test_a_config_without_a_size(given):
    with pytest.raises(UserError) as error:
        image_size(SimpleNamespace(model_type="levit", **given))
    assert str(error.value) == "config.json of this levit has no image_size: it cannot be traced"


@pytest.mark.parametrize(("cached", "needed"), [(True, 7), (False, 3)])
def test_a_context_too_short_to_trace(cached, needed):
    task = Task("text-generation", "text", cached)
    with pytest.raises(UserError) as error:
        example_of(small(max_position_embeddings=needed - 1), task)
    assert str(error.value) == (f"a context of {needed - 1} tokens is too short to trace: {needed} are needed")
    example_of(small(max_position_embeddings=needed), task)


class Recurrent(nn.Module):
    """Keeps something else than keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.config = small().config

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None):
        return input_ids


def test_a_model_without_keys_and_values():
    with pytest.raises(UserError) as error:
        example_of(Recurrent(), GENERATION)
    assert str(error.value) == "Recurrent keeps other things than keys and values of earlier tokens: say --no-cache"


class Broken(Recurrent):
    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None):
        raise RuntimeError("of this size not\nat all")


def test_a_model_that_fails_over_a_cache():
    with pytest.raises(UserError) as error:
        example_of(Broken(), GENERATION)
    assert str(error.value) == "Broken keeps other things than keys and values of earlier tokens: say --no-cache"
    # Without one it is not run before it is traced.
    example_of(Broken(), Task("text-generation", "text", False))
