import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.moments.routing import RoutingMoments
from ckpt_prune.scoring.expert_scores import EXPERT_SCORES
from ckpt_prune.scoring.logit_scores import logit_energy
from ckpt_prune.scoring.scores import SCORES, column_norms, wanda_sp_code
from ckpt_prune.scoring.unit_scores import UNIT_SCORES
from tests.oracles import scores as oracle


def tokens(seed: int, count: int, width: int) -> np.ndarray:
    """Columns of many sizes and means, some entries exactly zero, one column always zero, one constant."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, width)) * np.exp(rng.normal(size=width)) + rng.normal(size=width)
    x[rng.random(x.shape) < 0.3] = 0
    x[:, 0] = 0
    x[:, 1] = 2.5
    return x


def moments_of(x: np.ndarray) -> Moments:
    return Moments.zeros(x.shape[1], gram=False).accumulate(torch.from_numpy(x))


@pytest.mark.parametrize("name", SCORES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), d_out=st.integers(1, 9), width=st.integers(2, 12), count=st.integers(1, 40))
def test_scores_are_those_of_the_papers(name, seed, d_out, width, count):
    x = tokens(seed, count, width)
    weight = np.random.default_rng(seed).normal(size=(d_out, width)).astype(np.float32)
    scores = SCORES[name].function(torch.from_numpy(weight), moments_of(x))
    assert scores.shape == (width,)
    assert scores.dtype == torch.float64
    np.testing.assert_allclose(scores, oracle.SCORES[name](weight.astype(np.float64), x), rtol=1e-8, atol=1e-10)


def test_only_magnitude_needs_no_moments():
    assert {name for name, score in SCORES.items() if not score.needs_moments} == {"magnitude"}
    weight = torch.tensor([[3.0, 0.0], [4.0, 1.0]])
    assert SCORES["magnitude"].function(weight, None).tolist() == [5.0, 1.0]


@pytest.mark.parametrize("rows", [1, 1024, 1025, 2500])
def test_column_norms_of_any_number_of_rows(rows):
    weight = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    expected = np.linalg.norm(weight.astype(np.float64), axis=0)
    np.testing.assert_allclose(column_norms(torch.from_numpy(weight)), expected, rtol=1e-12)
    x = np.eye(3)
    means = np.abs(weight.astype(np.float64)).mean(0)
    np.testing.assert_allclose(wanda_sp_code(torch.from_numpy(weight), moments_of(x)), means, rtol=1e-12)


def test_half_precision_weights_are_widened_before_they_are_squared():
    assert column_norms(torch.full((2, 1), 3e4, dtype=torch.float16)).item() == pytest.approx(30000 * 2**0.5)


def test_what_a_score_lacks_is_named():
    with pytest.raises(ValueError, match=r"^logit-energy needs moments$"):
        logit_energy(torch.ones(4, 4), torch.ones(4, 4), None, heads=2)
    without_gram = moments_of(np.ones((3, 4)))
    with pytest.raises(ValueError, match=r"^score obs needs second moments: collect statistics with a Gram$"):
        UNIT_SCORES["obs"].function(torch.ones(2, 4), without_gram, 2, centred=True)


def test_scores_of_experts_by_hand():
    """The first expert is given two tokens, the second one, the third none."""
    moments = RoutingMoments.zeros(3)
    # Outputs are weighted: of norms 5 and 10, then 2.
    # The first token has weights of 0.5 and 0.25, the second one of 1.
    moments.accumulate(
        0, torch.tensor([[0.5], [1.0]]), torch.tensor([[3.0, 4.0], [6.0, 8.0]]), torch.tensor([0.75, 1.0])
    )
    moments.accumulate(1, torch.tensor([[0.25]]), torch.tensor([[0.0, 2.0]]), torch.tensor([0.5]))
    scores = {name: score.function(moments).tolist() for name, score in EXPERT_SCORES.items()}
    renormalised = scores.pop("reap-renormalised")
    assert scores == {"routed-energy": [125.0, 4.0, 0.0], "frequency": [2.0, 1.0, 0.0], "reap": [7.5, 2.0, 0.0]}
    assert renormalised == pytest.approx([(5 / 0.75 + 10) / 2, 4.0, 0.0], rel=1e-7)
