"""Moments of live streams against hooks on whole models, whose earlier blocks are pruned already."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, MistralForCausalLM, PreTrainedModel

from ckpt_prune.measure.moment_sources import SequentialMoments
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.streams import hidden_stream as streams
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.model import Model
from tests.families import BLOCKS, SIZES, job_on, one_group, prune, recipe, stock, windows
from tests.oracles.streams import inputs_of
from tests.pairs import dealt
from tests.stages.spaces.oracle import CONSUMERS


def assert_moments_of(moments: Moments, tokens: np.ndarray) -> None:
    assert moments.count == len(tokens)
    expected = {
        "sum": tokens.sum(0),
        "square": (tokens**2).sum(0),
        "absolute": np.abs(tokens).sum(0),
        "active": (np.abs(tokens) > 1e-6).sum(0),
        "gram": tokens.T @ tokens,
    }
    for name, value in expected.items():
        actual = getattr(moments, name).numpy()
        np.testing.assert_allclose(actual, value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


def consumer_path(block: int, space: str) -> str:
    return f"model.layers.{block}.{CONSUMERS[space]}"


@pytest.mark.parametrize("tokens", [24, 60, 4096])
def test_batches_change_nothing(sources, monkeypatch, tokens):
    """Batches of 1, of 2 with a remainder in odd folds, of a whole fold."""
    monkeypatch.setattr(streams, "TOKENS_PER_BATCH", tokens)
    stream = stream_on(sources.folder("mistral"), folds=3)
    paths = [consumer_path(0, space) for space in CONSUMERS]
    inputs = inputs_of(stock(sources.folder("mistral")), paths, windows()[2:5])
    observed = stream.observe(0, stream.block_tensors(0), dict.fromkeys(CONSUMERS, True))
    for space, path in zip(CONSUMERS, paths, strict=True):
        assert_moments_of(observed[space][1], inputs[path])


class Stream(HiddenStream):
    """A stream that can read its own checkpoint's blocks."""

    def block_tensors(self, block: int) -> dict[str, torch.Tensor]:
        return self.factory.model.read_block(block)


def stream_on(folder, *, folds: int = 1, ids=None) -> Stream:
    model = Model.open(folder)
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float32)
    samples = TokenWindows(windows() if ids is None else ids)
    return Stream(factory, model.checkpoint.tensors, model.checkpoint.read, samples, folds=folds)


@pytest.mark.parametrize("window", [3, 24])
def test_a_sliding_window_is_seen_by_the_stream(tmp_path, window):
    """A window of 3 changes what block 0 sees at 10 tokens; one of 24 does not."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("mistral", **SIZES, sliding_window=window)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    ids = windows(4, 10)
    stream = stream_on(tmp_path, ids=ids)
    moments = stream.observe(0, stream.block_tensors(0), {"heads": True})["heads"][0]
    path = consumer_path(0, "heads")
    assert_moments_of(moments, inputs_of(stock(tmp_path), [path], ids)[path])
    full = stock(tmp_path, sliding_window=None)
    unlimited = inputs_of(full, [path], ids)[path].sum(0)
    assert np.allclose(moments.sum.numpy(), unlimited, rtol=1e-4, atol=1e-4) == (window == 24)


def mix_blocks(
    pruned: PreTrainedModel, dense: PreTrainedModel, block: int, *, attention_pruned: bool
) -> PreTrainedModel:
    """Blocks before `block` pruned, it and those after dense; its attention pruned already on request."""
    for index in range(block, BLOCKS):
        pruned.model.layers[index] = dense.model.layers[index]
    if attention_pruned:
        pruned.model.layers[block].self_attn = stock(pruned.name_or_path).model.layers[block].self_attn
    return pruned


@pytest.mark.parametrize(
    ("variant", "true_sequential"),
    dealt(["llama", "llama-gqa-tied", "qwen2", "seed_oss-biases-mha"], [False, True]),
)
def test_sequential_moments_are_of_the_pruned_prefix(sources, variant, true_sequential, tmp_path, monkeypatch):
    seen = {}
    original = SequentialMoments.moments

    def recording(self, block, tensors, spaces):
        by_space = original(self, block, tensors, spaces)
        seen.update({(block, space): folds[0] for space, folds in by_space.items()})
        return by_space

    monkeypatch.setattr(SequentialMoments, "moments", recording)
    folder, ids = sources.folder(variant), windows()
    full_recipe = recipe(
        "ridge", heads=one_group(variant), lam=0.1, target="sequential", true_sequential=true_sequential
    )
    prune(job_on(folder, full_recipe, live=ids), tmp_path / "out")
    assert set(seen) == {(block, space) for block in range(BLOCKS) for space in CONSUMERS}
    for (block, space), moments in seen.items():
        mixed = mix_blocks(
            stock(tmp_path / "out"), stock(folder), block, attention_pruned=true_sequential and space == "mlp"
        )
        path = consumer_path(block, space)
        assert_moments_of(moments, inputs_of(mixed, [path], ids)[path])
