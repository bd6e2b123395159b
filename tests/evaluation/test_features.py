import copy
import math
from functools import partial

import pytest
import torch
from transformers import BertConfig, BertModel

from ckpt_prune.evaluation import batches
from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.samples import TokenWindows
from tests import refusals
from tests.encoders import SIZES, make, randomise, samples, stock

VARIANTS = ["bert-model", "dinov2-model"]


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """A model, a reference not far from it, and what both read."""
    folder = tmp_path_factory.mktemp("base") / request.param
    with quiet_transformers():
        reference = stock(make(folder, request.param), request.param)
    model = copy.deepcopy(reference)
    other = copy.deepcopy(reference)
    randomise(other, 78)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.lerp_(theirs, 0.2)
    return model, reference, samples(request.param, count=6)


def oracle(model, reference, data) -> tuple[float, float, int]:
    """Mean cosine, relative error and tokens, sample by sample and token by token in float64."""
    cosines, errors, energies = [], [], []
    wide = [copy.deepcopy(network).double().eval() for network in (model, reference)]
    for index in range(len(data)):
        batch = data.batch(slice(index, index + 1))
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        with torch.no_grad():
            ours, theirs = (network(**batch).last_hidden_state[0].tolist() for network in wide)
        for a, b in zip(ours, theirs, strict=True):
            norms = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(y * y for y in b))
            cosines.append(math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms)
            errors.append(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
            energies.append(math.fsum(y * y for y in b))
    return math.fsum(cosines) / len(cosines), math.fsum(errors) / math.fsum(energies), len(cosines)


@pytest.mark.parametrize("batch_tokens", [25, 8192])
def test_equals_the_oracle(pair, batch_tokens, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_TOKENS", batch_tokens)
    comparison = compare_features(*pair)
    cosine, error, tokens = oracle(*pair)
    assert cosine < 0.99
    assert error > 0.01
    assert comparison.cosine == pytest.approx(cosine, rel=1e-5)
    assert comparison.relative_error == pytest.approx(error, rel=1e-5)
    assert (comparison.samples, comparison.tokens) == (6, tokens)
    assert tokens == 6 * pair[2].tokens


refusal = partial(refusals.refusal, compare_features)


def test_hidden_sizes_that_differ():
    data = samples("bert-model", count=2)
    assert isinstance(data, TokenWindows)
    narrow, wide = (BertModel(BertConfig(**SIZES["bert"] | {"hidden_size": size})).eval() for size in (16, 24))
    assert refusal(narrow, wide, data) == "the two models differ in hidden size: their features cannot be compared"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_a_number(pair, value):
    broken = copy.deepcopy(pair[1])
    next(iter(broken.parameters())).data.fill_(value)
    assert refusal(pair[0], broken, pair[2]) == (
        "the model's features are not finite numbers: the weights are damaged or overflow in this dtype"
    )
