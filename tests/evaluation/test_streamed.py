"""Models run block by block measure what transformers' whole models do."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_prune
from ckpt_prune.evaluation import perplexity as module
from ckpt_prune.evaluation import streamed
from ckpt_prune.evaluation.perplexity import compare, perplexity
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.model.skeleton import quiet_transformers
from tests.evaluation.tiny import random_windows, tiny_llama
from tests.families import BLOCKS, SIZES, make

CPU = torch.device("cpu")
WINDOWS = random_windows(5, 12, seed=3)
ROUNDING = 2**-23 * 8 * BLOCKS * (SIZES["hidden_size"] + SIZES["intermediate_size"])
"""Two orders of the same sums in float32: a unit in the last place for every term of the sums of eight layers a block.
Logits are of the size of 1."""


def stream(folder):
    model = StreamedModel.open(folder, CPU, torch.float32)
    assert model is not None
    return model


def assert_same(ours, theirs):
    assert ours.score.nll == pytest.approx(theirs.score.nll, abs=ROUNDING)
    assert ours.reference_score.nll == pytest.approx(theirs.reference_score.nll, abs=ROUNDING)
    assert ours.kl == pytest.approx(theirs.kl, abs=ROUNDING)
    assert (ours.score.tokens, ours.top1_agreement) == (theirs.score.tokens, theirs.top1_agreement)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A dense model, and an output whose blocks differ in width, which brings code of its own."""
    folder = tmp_path_factory.mktemp("pair")
    uneven = {"widths": "per_layer", "allocation": "across-layers", "container": "remote", "ratio": 0.3}
    make(folder / "dense")
    ckpt_prune.prune(folder / "dense", recipe="magnitude", overrides=uneven, output=folder / "out", progress=False)
    return folder


@pytest.mark.parametrize("variant", ["llama", "llama-gqa-tied", "llama-biases", "qwen3"])
def test_a_pair_run_block_by_block_is_what_it_is_whole(tmp_path, variant):
    first = make(tmp_path / "first", variant)
    second = make(tmp_path / "second", variant, dtype=torch.bfloat16)
    whole = compare(load_model(second, device="cpu"), load_model(first, device="cpu"), WINDOWS)
    assert whole.kl > 0
    assert_same(compare(stream(second), stream(first), WINDOWS), whole)


def test_blocks_that_differ_in_width_are_run(pruned):
    out, dense = pruned / "out", pruned / "dense"
    whole = compare(load_model(out, device="cpu"), load_model(dense, device="cpu"), WINDOWS)
    assert_same(compare(stream(out), stream(dense), WINDOWS), whole)
    # one of the two in memory
    assert_same(compare(stream(out), load_model(dense, device="cpu"), WINDOWS), whole)


def test_strips_and_states_on_disk_change_nothing(pruned, monkeypatch):
    at_once = compare(stream(pruned / "out"), stream(pruned / "dense"), WINDOWS)
    monkeypatch.setattr(module, "STRIP_BYTES", 3 * SIZES["vocab_size"] * 4)
    monkeypatch.setattr(module, "CHUNK", 2 * SIZES["vocab_size"])
    monkeypatch.setattr(streamed, "available_bytes", lambda: 0)
    assert_same(compare(stream(pruned / "out"), stream(pruned / "dense"), WINDOWS), at_once)


def test_what_a_class_leaves_out_is_left_out(tmp_path):
    """Transformers has no place for these biases, and neither has what its users run."""
    folder = make(tmp_path / "model")
    expected = perplexity(stream(folder), WINDOWS)
    tensors = load_file(folder / "model.safetensors")
    width = len(tensors["model.layers.0.mlp.down_proj.weight"])
    tensors["model.layers.0.mlp.down_proj.bias"] = torch.full((width,), 3.0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert StreamedModel.open(folder, CPU, torch.float32) is None
    assert perplexity(load_model(folder, device="cpu"), WINDOWS).nll == pytest.approx(expected.nll, abs=ROUNDING)


def test_weights_of_few_bits_are_what_transformers_makes_of_them(tmp_path):
    with quiet_transformers():
        tiny_llama().save_pretrained(tmp_path / "dense")
    ckpt_prune.quantize(tmp_path / "dense", format="int8", output=tmp_path / "int8", progress=False)
    whole = perplexity(load_model(tmp_path / "int8", device="cpu"), WINDOWS)
    dense = perplexity(stream(tmp_path / "dense"), WINDOWS)
    assert abs(whole.nll - dense.nll) > 2 * ROUNDING
    assert perplexity(stream(tmp_path / "int8"), WINDOWS).nll == pytest.approx(whole.nll, abs=ROUNDING)
