import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation import batches
from ckpt_prune.evaluation.masked import MaskedScore, TokenComparison, choose_masked, fill_in
from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.encoders import make, randomise, stock
from tests.evaluation.tiny import VOCAB, random_windows

MASK = 3
WINDOWS = random_windows(7, 12, seed=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A masked language model, a reference of other weights, and the same with the second head of pretraining."""
    folder = tmp_path_factory.mktemp("bert")
    with quiet_transformers():
        model = stock(make(folder / "mlm", "bert-mlm"), "bert-mlm")
        pretraining = stock(make(folder / "pretraining", "bert-pretraining"), "bert-pretraining")
    reference, other = copy.deepcopy(model), copy.deepcopy(model)
    randomise(other, 77)
    with torch.no_grad():
        for ours, theirs in zip(reference.parameters(), other.parameters(), strict=True):
            ours.lerp_(theirs, 0.05)
    pretraining.load_state_dict(model.state_dict(), strict=False)
    return model, reference, pretraining


@pytest.fixture(scope="module")
def chosen():
    return choose_masked(WINDOWS, {0, 1, 2})


def oracle_distributions(model, windows, masked) -> list[list[float]]:
    """Log-probabilities at each masked position, window by window, in float64 with the softmax written out."""
    wide = copy.deepcopy(model).double().eval()
    distributions = []
    for ids, hidden in zip(windows.tolist(), masked.tolist(), strict=True):
        seen = [MASK if gone else token for token, gone in zip(ids, hidden, strict=True)]
        with torch.no_grad():
            output = wide(input_ids=torch.tensor([seen]))
        logits = (output.prediction_logits if "prediction_logits" in output else output.logits)[0].tolist()
        for row, gone in zip(logits, hidden, strict=True):
            if gone:
                total = math.log(math.fsum(math.exp(x) for x in row))
                distributions.append([x - total for x in row])
    return distributions


def oracle_targets(windows, masked) -> list[int]:
    return [
        token
        for ids, hidden in zip(windows.tolist(), masked.tolist(), strict=True)
        for token, gone in zip(ids, hidden, strict=True)
        if gone
    ]


def top(distribution: list[float]) -> int:
    return max(range(len(distribution)), key=lambda token: distribution[token])


def oracle_score(distributions: list[list[float]], targets: list[int]) -> tuple[float, float]:
    """Perplexity and accuracy."""
    nll = -math.fsum(row[token] for row, token in zip(distributions, targets, strict=True)) / len(targets)
    right = sum(top(row) == token for row, token in zip(distributions, targets, strict=True))
    return math.exp(nll), right / len(targets)


def likely_targets(model, windows, masked):
    """Windows where the model is right at every second masked position, so that an accuracy is not 0."""
    windows = windows.clone()
    best = [top(row) for row in oracle_distributions(model, windows, masked)]
    for number, (row, column) in enumerate(masked.nonzero().tolist()):
        if number % 2:
            windows[row, column] = best[number]  # masked, so the predictions stay as they are
    return windows


class TestFillIn:
    @pytest.mark.parametrize("batch_tokens", [8192, 12])
    def test_one_model_equals_the_oracle(self, models, chosen, batch_tokens, monkeypatch):
        monkeypatch.setattr(batches, "BATCH_TOKENS", batch_tokens)
        model = models[0]
        windows = likely_targets(model, WINDOWS, chosen)
        targets = oracle_targets(windows, chosen)
        perplexity, accuracy = oracle_score(oracle_distributions(model, windows, chosen), targets)
        assert 0.3 < accuracy < 0.7
        score = fill_in(model, windows, chosen, MASK)
        assert isinstance(score, MaskedScore)
        assert score.perplexity == pytest.approx(perplexity, rel=1e-5)
        assert score.accuracy == accuracy
        assert (score.tokens, score.window, score.windows) == (int(chosen.sum()), 12, 7)

    def test_two_models_equal_the_oracle(self, models, chosen):
        model, reference, _ = models
        comparison = fill_in(model, WINDOWS, chosen, MASK, reference)
        assert isinstance(comparison, TokenComparison)
        q, p = (oracle_distributions(network, WINDOWS, chosen) for network in (model, reference))
        kl = math.fsum(math.exp(x) * (x - y) for a, b in zip(p, q, strict=True) for x, y in zip(a, b, strict=True))
        assert comparison.kl == pytest.approx(kl / len(p), rel=1e-4)
        assert 0 < comparison.top1_agreement < 1
        assert comparison.top1_agreement == sum(top(a) == top(b) for a, b in zip(p, q, strict=True)) / len(p)
        assert comparison.score == fill_in(model, WINDOWS, chosen, MASK)
        assert comparison.reference_score == fill_in(reference, WINDOWS, chosen, MASK)

    def test_pretraining_is_scored_by_its_prediction_logits(self, models, chosen):
        model, reference, pretraining = models
        perplexity, accuracy = oracle_score(
            oracle_distributions(pretraining, WINDOWS, chosen), oracle_targets(WINDOWS, chosen)
        )
        score = fill_in(pretraining, WINDOWS, chosen, MASK)
        assert (score.perplexity, score.accuracy) == (pytest.approx(perplexity, rel=1e-5), accuracy)
        assert score.perplexity == pytest.approx(fill_in(model, WINDOWS, chosen, MASK).perplexity, rel=1e-6)
        mixed = fill_in(pretraining, WINDOWS, chosen, MASK, reference)
        assert mixed.kl == pytest.approx(fill_in(model, WINDOWS, chosen, MASK, reference).kl, rel=1e-5)


def test_refusals(models, chosen):
    broken = copy.deepcopy(models[0])
    broken.cls.predictions.bias.data[4] = math.nan
    with pytest.raises(UserError, match=r"token id \d+ is outside"):
        fill_in(models[0], WINDOWS + VOCAB, chosen, MASK)
    with pytest.raises(UserError, match=r"^the model's logits are not numbers \(NaN\)"):
        fill_in(models[0], WINDOWS, chosen, MASK, broken)
    with pytest.raises(UserError, match="a window holds nothing but special tokens: there is nothing to mask"):
        choose_masked(torch.tensor([[0, 5, 1], [0, 2, 1]]), {0, 1, 2})


class TestChooseMasked:
    @given(st.integers(1, 6), st.integers(2, 60), st.sets(st.integers(0, 5), max_size=3), st.integers(0, 2**63 - 1))
    def test_a_share_of_the_ordinary_tokens_of_each_window(self, count, window, special, seed):
        windows = random_windows(count, window, vocab=6, seed=seed % 1000)
        windows[:, 0] = 5 if 5 not in special else next(i for i in range(6) if i not in special)
        masked = choose_masked(windows, special, seed=seed)
        assert (masked.dtype, masked.shape) == (torch.bool, windows.shape)
        for ids, gone in zip(windows.tolist(), masked.tolist(), strict=True):
            ordinary = sum(token not in special for token in ids)
            assert not any(hidden and token in special for token, hidden in zip(ids, gone, strict=True))
            assert sum(gone) >= 1
            assert sum(gone) == 1 or abs(sum(gone) - 0.15 * ordinary) <= 0.5 + 1e-6
        assert torch.equal(masked, choose_masked(windows, special, seed=seed))
