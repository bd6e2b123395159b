"""Statistics of every linear's input, against hooks on whole models of every family."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.moment_sources import CachedMoments
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.statistics.files import INDEX
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import (
    add_statistics,
    check_addable,
    count_statistics_bytes,
    measure_statistics,
)
from ckpt_prune.measure.streams.hidden_stream import split_folds
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.model.model import Model
from tests import families
from tests.encoders import calibrate
from tests.families import BLOCKS
from tests.pairs import one_of
from tests.stages.whole import data_of, sources_of_all, stock, whole

LINEARS = ("moments", "gram", "linears")
ALL = [
    *("llama", "llama-gqa-tied", "llama-biases", "mistral", "qwen2-mha", "qwen3", "seed_oss-biases-mha"),
    *("opt", "opt-model", "opt-350m-like", "opt-no-prefix", "vit", "vit-model", "deit-teacher", "deit-model"),
    *("dinov2-classifier", "dinov2-swiglu", "bert-mlm", "bert-model", "bert-old-names", "bert-no-prefix"),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return sources_of_all(tmp_path_factory.mktemp("dense"))


def assert_moments_of(moments: Moments, tokens: np.ndarray) -> None:
    assert moments.count == len(tokens)
    expected = {
        "sum": tokens.sum(0),
        "square": (tokens**2).sum(0),
        "absolute": np.abs(tokens).sum(0),
        "gram": tokens.T @ tokens,
    }
    for name, value in expected.items():
        statistic = getattr(moments, name).numpy()
        np.testing.assert_allclose(statistic, value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("variant", one_of(4, ALL))
def test_every_input_is_that_of_the_whole_model(dense, tmp_path, variant):
    """One entry for linears that read the same, under the first; those of consumers stand where they always did."""
    folder, data = dense.folder(variant), data_of(variant)
    statistics = calibrate(folder, tmp_path / "statistics", data, folds=2, collect=LINEARS)
    model = whole(stock(folder, variant), variant)
    sites = [(block, at) for block in range(BLOCKS) for at in range(len(model.inputs))]
    seen = model.tokens(data, sites)
    per_sample = {site: len(tokens) // len(data) for site, tokens in seen.items()}
    opened = Model.open(folder)
    source = CachedMoments(statistics, opened)
    for block in range(BLOCKS):
        prefix = model.prefix.format(block)
        firsts = [group[0].disk for group in model.inputs]
        consumers = {space.consumer for space in opened.family.columns.values()}
        names = {f"{prefix}{first}.weight{'' if first in consumers else '/input'}" for first in firsts}
        assert statistics.read_moments(block).keys() == names
        moments_by_input = source.moments(block, {}, firsts)
        assert list(moments_by_input) == firsts
        for at, first in enumerate(firsts):
            assert len(moments_by_input[first]) == 2
            for moments, run in zip(moments_by_input[first], split_folds(len(data), 2), strict=True):
                per = per_sample[block, at]
                tokens = seen[block, at][run.start * per : run.stop * per].numpy()
                assert_moments_of(moments, tokens)


def test_vectors_alone(dense, tmp_path):
    """Statistics as Wanda needs them have no Gram anywhere, and the same vectors as full ones."""
    folder, data = dense.folder("qwen3"), data_of("qwen3")
    plain = calibrate(folder, tmp_path / "plain", data, collect=("moments", "linears"))
    full = calibrate(folder, tmp_path / "full", data, collect=LINEARS)
    for name, (moments,) in plain.read_moments(1).items():
        assert moments.gram is None
        torch.testing.assert_close(moments.square, full.read_moments(1)[name][0].square, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("blocks", "collect"), [(None, ("moments", "taylor")), (None, LINEARS), ("1:2", LINEARS)])
def test_the_size_is_known_before(dense, tmp_path, blocks, collect):
    """The bytes of the tensors are known before measuring, except for counts; headers come on top."""
    folder = dense.folder("opt")
    if blocks is not None:  # the others stay as wide as they are
        recipe = families.recipe(
            score="magnitude", heads=None, mlp=0.5, layers=blocks, widths="per_layer", container="any"
        )
        families.prune(families.job_on(folder, recipe), tmp_path / "uneven")
        folder = tmp_path / "uneven"
    model, data = open_model(str(folder)), data_of("opt")
    assert model.widest_consumer == 22
    expected = count_statistics_bytes(model, collect=collect, folds=2, samples=len(data))
    how = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    how["skeleton"] = container_of(model).skeleton() if blocks else None
    statistics = measure_statistics(model, data, tmp_path / "statistics", seed=0, folds=2, collect=collect, **how)
    tensors = 0
    for name in statistics.index.files:
        raw = (statistics.folder / name).read_bytes()
        tensors += len(raw) - 8 - int.from_bytes(raw[:8], "little")
    inputs = model.family.inputs if "linears" in collect else model.family.consumers
    counts = BLOCKS * len(inputs) * 2 * 8
    assert tensors == expected + counts


def test_two_halves_add_up(dense, tmp_path):
    folder = dense.folder("llama-gqa-tied")
    ids = families.windows(6, 24)
    first, second, both = (
        families.calibrate(folder, tmp_path / name, rows, collect=LINEARS)
        for name, rows in (("first", ids[:2]), ("second", ids[2:]), ("both", ids))
    )
    added = add_statistics([first, second], tmp_path / "added")
    assert added.index.linears == both.index.linears
    for block in range(BLOCKS):
        expected = both.read_moments(block)
        moments_by_name = added.read_moments(block)
        assert moments_by_name.keys() == expected.keys()
        assert sum(name.endswith("/input") for name in moments_by_name) == 2
        for name, (moments,) in moments_by_name.items():
            (whole_,) = expected[name]
            assert moments.count == whole_.count == 6 * 24
            for field in ("sum", "square", "absolute", "active", "gram"):
                torch.testing.assert_close(getattr(moments, field), getattr(whole_, field), rtol=1e-5, atol=1e-4)


def test_statistics_of_before_there_were_linears(dense, tmp_path):
    """Their index has no such key; they open, hold what they held, and serve recipes that prune spaces."""
    folder = dense.folder("qwen3")
    statistics = families.calibrate(folder, tmp_path / "statistics")
    old = Path(shutil.copytree(statistics.folder, tmp_path / "old"))
    index = json.loads((old / INDEX).read_text())
    assert index.pop("linears") == {}
    (old / INDEX).write_text(json.dumps(index))
    opened = Statistics(old)
    assert opened.index.linears == {}
    consumers = {f"model.layers.1.{module}.weight" for module in ("self_attn.o_proj", "mlp.down_proj")}
    assert opened.read_moments(1).keys() == statistics.read_moments(1).keys() == consumers
    families.job_on(folder, families.recipe("ridge", lam=0.1), opened)
    check_addable(opened, families.calibrate(folder, tmp_path / "more", families.windows(4, 24, seed=9)))


def test_linears_of_another_model_are_refused(dense, tmp_path):
    """An index that lists other inputs than the model has."""
    folder = dense.folder("qwen3")
    statistics = families.calibrate(folder, tmp_path / "statistics", collect=LINEARS)
    path = statistics.folder / INDEX
    index = json.loads(path.read_text())
    index["linears"].popitem()
    del index["digest"]
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match="does not list this model's blocks and consumers"):
        families.job_on(folder, families.recipe("ridge", lam=0.1), Statistics(statistics.folder))
