"""Drift of the residual stream, against residual streams that norms of whole models see."""

from typing import Any

import numpy as np
import pytest
import torch

from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.logits import LogitMoments
from ckpt_prune.measure.streams import hidden_stream as streams
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.drift import observe_drift
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from tests.oracles import drift, laco
from tests.pairs import one_of
from tests.stages.recovery.twins import BLOCKS, Twins, written_once

FOLDS = 2
VARIANTS = {
    "llama-biases": "llama",
    "llama-gqa-tied": "llama",
    "opt": "opt",
    "opt-350m-like": "opt-350m-like",
    "bert-mlm": "bert",
    "vit": "vit",
    "dinov2-model": "dinov2",
    "dinov2-swiglu": "dinov2-swiglu",
}
"""Variant → what the oracle calls its sites."""
WITH_QK = {"opt", "bert-mlm", "dinov2-swiglu"}
BOTH = {"heads": True, "mlp": True}


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return written_once(tmp_path_factory)


def stream_of(pair: Twins, tensors, *, folds: int = FOLDS, samples=None) -> HiddenStream:
    """In float64, at the first block."""
    factory = BlockFactory(pair.model, device=torch.device("cpu"), dtype=torch.float64)
    read = lambda names: {name: tensors[name] for name in names}  # noqa: E731
    return HiddenStream(factory, list(tensors), read, samples or pair.data, folds=folds)


def streams_of(pair: Twins, pruned, **options):
    """Dense and pruned streams, their tensors, and how to let both past a block."""
    before, after = pair.disk(), pair.disk(pruned)
    return stream_of(pair, before, **options), stream_of(pair, after, **options), before, after


@pytest.mark.parametrize("variant", one_of(4, VARIANTS))
def test_whole_sites_on_a_pruned_prefix(twins, variant, monkeypatch):
    """At every block, its own linears still dense; two samples a batch, one in the last of a fold."""
    pair, sites = twins(variant), drift.SITES[VARIANTS[variant]]
    tokens = pair.stream(pair.disk()).states.shape[1]
    monkeypatch.setattr(streams, "TOKENS_PER_BATCH", 2 * tokens)
    model, pruned = pair.dense(), pair.dense()
    altered = pair.pruned()
    dense, stream, before, after = streams_of(pair, altered)
    for block in range(BLOCKS):
        tensors = pair.block(block, before)
        if block > 0:
            drift_folds, _ = observe_drift(dense, stream, block, tensors, tensors, BOTH)
            assert {space: len(folds) for space, folds in drift_folds.items()} == {"heads": FOLDS, "mlp": FOLDS}
            for space, site in sites.items():
                drift.assert_measured(drift_folds[space], drift.target(model, pruned, block, site, pair.data))
        dense.advance(block, tensors)
        stream.advance(block, pair.block(block, after))
        laco.put(pruned, block, laco.copy_weights(altered, block))


@pytest.mark.parametrize("variant", one_of(4, VARIANTS))
def test_the_mlp_is_measured_on_its_own_blocks_pruned_attention(twins, variant):
    """In the first block: nothing before it is pruned, so all drift is that of the attention."""
    pair, site = twins(variant), drift.SITES[VARIANTS[variant]]["mlp"]
    altered, pruned = pair.pruned(), pair.dense()
    attention = {
        pair.family.tensor(0, m, kind) for m in pair.family.spaces["heads"].modules for kind in ("weight", "bias")
    }
    changed = {name: tensor for name, tensor in laco.copy_weights(altered, 0).items() if name in attention}
    assert changed
    laco.put(pruned, 0, changed)
    dense, stream, before, _ = streams_of(pair, pair.dense())
    tensors = pair.block(0, before)
    drift_folds, _ = observe_drift(dense, stream, 0, tensors, tensors | changed, {"mlp": True})
    drift.assert_measured(drift_folds["mlp"], drift.target(pair.dense(), pruned, 0, site, pair.data))


@pytest.mark.parametrize("variant", one_of(4, VARIANTS))
def test_an_unpruned_prefix_does_not_drift(twins, variant):
    pair = twins(variant)
    dense, stream, before, _ = streams_of(pair, pair.dense())
    dense.advance(0, pair.block(0, before))
    stream.advance(0, pair.block(0, before))
    tensors = pair.block(1, before)
    drift_folds, _ = observe_drift(dense, stream, 1, tensors, tensors, BOTH)
    for space, folds in drift_folds.items():
        alone = stream.observe(1, tensors, {space: True})[space]
        for moments, expected in zip(folds, alone, strict=True):
            assert moments.drift.energy == 0.0
            assert not moments.drift.sum.any()
            assert not moments.drift.cross.any()
            assert torch.equal(moments.gram, expected.gram)


def test_folds_sum_to_the_whole(twins):
    pair = twins("opt")
    sums = {}
    for folds in (1, 4):
        dense, stream, before, after = streams_of(pair, pair.pruned(), folds=folds)
        dense.advance(0, pair.block(0, before))
        stream.advance(0, pair.block(0, after))
        tensors = pair.block(1, before)
        parts = observe_drift(dense, stream, 1, tensors, tensors, {"mlp": True})[0]["mlp"]
        assert len(parts) == folds
        sums[folds] = sum_folds(parts).drift
    assert sums[4].energy == pytest.approx(sums[1].energy, rel=1e-9)
    torch.testing.assert_close(sums[4].sum, sums[1].sum, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sums[4].cross, sums[1].cross, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("space", ["heads", "mlp"])
def test_a_layer_scale_of_zero_leaves_nothing_to_correct(twins, space):
    """In the pruned model alone: the dense one scales by 1 there, and by other numbers elsewhere."""
    pair = twins("dinov2-model")
    site = drift.SITES["dinov2"][space]
    model, pruned, altered = pair.dense(), pair.dense(), pair.pruned()
    with torch.no_grad():
        pruned.model.get_submodule(f"{pruned.layers}.1").get_parameter(site.scale)[3] = 0
    laco.put(pruned, 0, laco.copy_weights(altered, 0))
    dense, stream, before, after = streams_of(pair, altered)
    dense.advance(0, pair.block(0, before))
    stream.advance(0, pair.block(0, after))
    tensors = pair.block(1, before)
    name = pair.family.scale(1, space)
    scaled = tensors | {name: tensors[name].clone()}
    scaled[name][3] = 0
    drift_sums = sum_folds(observe_drift(dense, stream, 1, tensors, scaled, {space: True})[0][space]).drift
    tokens = drift.target(model, pruned, 1, site, pair.data)
    D = np.nan_to_num((tokens.targets - tokens.outputs).reshape(-1, tokens.targets.shape[2]), nan=0.0)
    assert drift_sums.sum[3] == 0
    assert not drift_sums.cross[3].any()
    np.testing.assert_allclose(drift_sums.sum, D.sum(0), rtol=1e-9, atol=1e-9 * np.abs(D).sum(0).max())
    assert drift_sums.energy == pytest.approx((D**2).sum(), rel=1e-9)


def numbers(moments: LogitMoments) -> dict[str, Any]:
    return {name: value for name, value in vars(moments).items() if value is not None and not isinstance(value, str)}


@pytest.mark.parametrize("variant", sorted(WITH_QK))
def test_queries_and_keys_have_no_drift(twins, variant):
    """Their moments, alone or with others, are those of the pruned stream."""
    pair = twins(variant)
    dense, stream, before, after = streams_of(pair, pair.pruned())
    dense.advance(0, pair.block(0, before))
    stream.advance(0, pair.block(0, after))
    theirs, ours = pair.block(1, before), pair.block(1, after)
    expected = stream.observe(1, ours, {"qk": True})["qk"]
    alone = observe_drift(dense, stream, 1, theirs, ours, {"qk": True})[0]["qk"]
    together, _ = observe_drift(dense, stream, 1, theirs, ours, {"qk": True, "heads": False})
    assert list(together) == ["qk", "heads"]
    assert all(m.gram is None and m.drift is not None for m in together["heads"])
    for folds in (alone, together["qk"]):
        for a, b in zip(folds, expected, strict=True):
            assert a.form == b.form
            torch.testing.assert_close(numbers(a), numbers(b), rtol=0, atol=0)


def test_streams_stay_where_they_are(twins):
    pair = twins("opt")
    dense, stream, before, after = streams_of(pair, pair.pruned())
    states = dense.states.clone(), stream.states.clone()
    observe_drift(dense, stream, 0, pair.block(0, before), pair.block(0, after), BOTH)
    assert torch.equal(dense.states, states[0])
    assert torch.equal(stream.states, states[1])


def test_streams_of_other_folds_are_refused(twins):
    pair = twins("llama-biases")
    tensors = pair.disk()
    dense, stream = stream_of(pair, tensors, folds=1), stream_of(pair, tensors, folds=2)
    block = pair.block(0, tensors)
    with pytest.raises(ValueError, match="same samples in the same folds"):
        observe_drift(dense, stream, 0, block, block, BOTH)
