"""LLM-Pruner's importances, against gradients of whole stock models; how they are kept; and refusals."""

import pytest
import torch
from torch import Tensor

from ckpt_prune.measure.moment_sources import CachedMoments
from ckpt_prune.measure.moments.inputs import Taylor
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.statistics import taylor as module
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import (
    add_statistics,
    list_collectable,
    list_collected_by_default,
)
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.model import Model
from tests import families
from tests.families import BLOCKS, windows
from tests.oracles import taylor as oracle
from tests.pairs import one_of
from tests.refusals import refusal
from tests.stages.whole import Sources, data_of, sources_of_all, stock

VARIANTS = ["llama-gqa-tied", "llama-biases", "qwen3", "opt", "opt-350m-like"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return sources_of_all(tmp_path_factory.mktemp("taylor"))


def ids_of(variant: str) -> Tensor:
    return data_of(variant).batch(slice(0, 5))["input_ids"]


def measure_sites(sources: Sources, variant: str, **options) -> dict[str, Taylor]:
    source = Model.open(sources.folder(variant))
    given = {"device": torch.device("cpu"), "compute_dtype": torch.float32} | options
    blocks = list(module.measure_taylor(source, TokenWindows(ids_of(variant)), **given))
    assert [block for block, _ in blocks] == list(reversed(range(BLOCKS)))
    return {name: taylor for _, sites in blocks for name, taylor in sites.items()}


def cut(count: int, size: int) -> list[slice]:
    return [slice(unit * size, (unit + 1) * size) for unit in range(count)]


def sites(source: Model) -> dict[str, list[tuple[str, int, list[slice]]]]:
    """List the lines of parameters that the units of a llama or an opt lie on, written out by hand."""
    config, opt = source.config, source.family.model_type == "opt"
    heads = config.num_attention_heads
    kv = heads if opt else config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    columns = cut(config.ffn_dim if opt else config.intermediate_size, 1)
    lines = {}
    for block in range(BLOCKS):
        start = f"model.decoder.layers.{block}." if opt else f"model.layers.{block}."
        queries, values = cut(kv, size * heads // kv), cut(kv, size)
        output, *makers = ("fc2", "fc1") if opt else ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj")
        own_output = "self_attn.out_proj" if opt else "self_attn.o_proj"
        lines[f"{start}{own_output}.weight"] = [
            (f"{start}self_attn.q_proj.weight", 0, queries),
            (f"{start}self_attn.k_proj.weight", 0, values),
            (f"{start}self_attn.v_proj.weight", 0, values),
            (f"{start}{own_output}.weight", 1, queries),
        ]
        lines[f"{start}{output}.weight"] = [
            *((f"{start}{maker}.weight", 0, columns) for maker in makers),
            (f"{start}{output}.weight", 1, columns),
        ]
    return lines


@pytest.mark.parametrize("variant", one_of(4, VARIANTS))
def test_they_are_those_of_the_whole_model(dense, variant):
    source = Model.open(dense.folder(variant))
    model = stock(dense.folder(variant), variant).double()
    ours = measure_sites(dense, variant)
    expected = sites(source)
    assert set(ours) == set(expected)
    for name, parts in expected.items():
        importance = oracle.importance(model, ids_of(variant), parts)
        for order, scores in importance.items():
            torch.testing.assert_close(getattr(ours[name], order), scores, rtol=1e-4, atol=1e-6)
        # The two orders differ by more than what is tolerated.
        assert not torch.allclose(importance["first"], importance["second"], rtol=1e-3)


def test_batches_and_where_states_are_change_nothing(dense, monkeypatch, tmp_path):
    in_one_batch = measure_sites(dense, "opt")
    tokens = data_of("opt").tokens
    # Five samples as 2 + 2 + 1 through blocks, one by one through the head, pieces of logits, states on disk.
    monkeypatch.setattr("ckpt_prune.measure.streams.hidden_stream.TOKENS_PER_BATCH", 2 * tokens)
    monkeypatch.setattr(module, "READOUT_TOKENS", tokens - 1)
    monkeypatch.setattr("ckpt_prune.measure.streams.sliced_head.CLASSES", 7)
    parted = measure_sites(dense, "opt", allocate=StateMemory(0, tmp_path))
    for name, taylor in in_one_batch.items():
        torch.testing.assert_close(parted[name].first, taylor.first, rtol=1e-4, atol=0)
        torch.testing.assert_close(parted[name].second, taylor.second, rtol=1e-4, atol=0)


def test_a_gradient_that_overflows_is_named(dense, monkeypatch):
    monkeypatch.setattr(module, "_sum_importances", lambda *_: Taylor(torch.zeros(2), torch.tensor([0.0, torch.inf])))
    assert refusal(measure_sites, dense, "llama-gqa-tied") == (
        f"the gradient at model.layers.{BLOCKS - 1}.self_attn.o_proj.weight is not finite: "
        "the model overflows in torch.float32"
    )


# ---- on disk -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(dense, tmp_path_factory) -> Statistics:
    out = tmp_path_factory.mktemp("measured") / "stats"
    return families.calibrate(dense.folder("llama-gqa-tied"), out, collect=("moments", "taylor"), folds=2)


def test_a_folder_has_them_beside_its_moments(dense, measured):
    source = Model.open(dense.folder("llama-gqa-tied"))
    assert measured.index.collect == ["moments", "taylor"]
    taylor_of_blocks = dict(
        module.measure_taylor(source, TokenWindows(windows()), device=torch.device("cpu"), compute_dtype=torch.float32)
    )
    for block, expected in taylor_of_blocks.items():
        kept = measured.read_taylor(block)
        assert set(kept) == set(expected)
        moments = CachedMoments(measured, source).moments(block, {}, ["heads", "mlp"])
        for space, folds in moments.items():
            taylor = expected[source.moments_name(block, space)]
            assert len(folds) == 2
            for fold in (*folds, folds[0] + folds[1], folds[0].to("cpu")):
                assert torch.equal(fold.taylor.first, taylor.first)
                assert torch.equal(fold.taylor.second, taylor.second)


def test_they_do_not_add(dense, measured, tmp_path):
    other = families.calibrate(
        dense.folder("llama-gqa-tied"),
        tmp_path / "other",
        windows(seed=9),
        collect=("moments", "taylor"),
        folds=2,
    )
    assert refusal(add_statistics, [measured, other], tmp_path / "sum") == (
        f"{measured.folder} and {other.folder} hold Taylor importances, absolute values of sums over samples, which do "
        "not add: calibrate once on all samples, or leave taylor out of --collect"
    )
    assert not (tmp_path / "sum").exists()


def test_only_a_causal_language_model_has_them_and_only_when_asked(dense):
    kinds = {variant: Model.open(dense.folder(variant)) for variant in ("opt", "vit")}
    assert "taylor" in list_collectable(kinds["opt"])
    assert "taylor" not in list_collected_by_default(kinds["opt"])
    assert "taylor" not in list_collectable(kinds["vit"])
