from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.stages.rotation import descent as module
from ckpt_prune.stages.rotation.descent import (
    LearnedRotations,
    RotationProblem,
    learn_rotations,
    learn_shared_rotation,
)
from ckpt_prune.stages.rotation.importance import Term, objective
from ckpt_prune.stages.rotation.keys import Rotation
from ckpt_prune.stages.rotation.orthogonal import RETRACTIONS
from tests.pairs import dealt
from tests.problems import BACKBONES, make_block, orthogonal

WHOLE = {"hidden": 10, "kv_heads": 2, "head_dim": 3}
R1_ONLY = {"hidden": 10, "kv_heads": None, "head_dim": None}
R2_ONLY = {"hidden": None, "kv_heads": 2, "head_dim": 3}
PLANTED = {"hidden": 24, "kv_heads": None, "head_dim": None}


def quick(steps=15, **options) -> Rotation:
    return Rotation(kind="per-layer", steps=steps, **options)


def problem(backbone: str, sizes: dict, **options) -> RotationProblem:
    return RotationProblem(backbone, **sizes, device=torch.device("cpu"), **options)


def learn(terms, backbone="wanda", sizes=WHOLE, settings=None, progress=None, **options) -> LearnedRotations:
    return learn_rotations(terms, problem(backbone, sizes, **options), settings or quick(), progress)


def defect(q) -> float:
    return float((q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).abs().amax())


def plant(d=24, seed=0) -> list[Term]:
    """Sparse weights seen through a random rotation: turned back, a tenth of each row is left."""
    g = torch.Generator().manual_seed(seed)
    turn = orthogonal(d, d, seed=seed)
    sparse = torch.randn(4 * d, d, generator=g).double() * (torch.rand(4 * d, d, generator=g) < 0.1)
    sparse[:, 0] += 0.1
    return [Term("w", sparse @ turn.T, None, None, "residual")], turn


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    backbone=st.sampled_from(BACKBONES),
    method=st.sampled_from(sorted(RETRACTIONS)),
    rate=st.sampled_from([None, 1e-3, 3.0]),
    jitter=st.sampled_from([0.0, 0.3]),
    sizes=st.sampled_from([WHOLE, R1_ONLY, R2_ONLY]),
)
def test_never_worse_than_no_rotation_and_says_what_it_returns(seed, backbone, method, rate, jitter, sizes):
    terms = make_block(seed).terms(backbone)
    learned = learn(terms, backbone, sizes, quick(8, retraction=method, learning_rate=rate, jitter=jitter, seed=seed))
    assert learned.entropy_after <= learned.entropy_before
    identities = (
        (None if learned.residual is None else torch.eye(10).double()),
        (None if learned.heads is None else torch.eye(3).double().expand(2, 3, 3)),
    )
    assert learned.entropy_before == pytest.approx(float(objective(terms, backbone, *identities)), rel=1e-12)
    assert learned.entropy_after == pytest.approx(
        float(objective(terms, backbone, learned.residual, learned.heads)), rel=1e-12
    )
    # The best of what was met, or the identity.
    assert learned.entropy_after == pytest.approx(min(*learned.curve, learned.entropy_before), rel=1e-4)
    for rotation, size_name, shape in ((learned.residual, "hidden", (10, 10)), (learned.heads, "kv_heads", (2, 3, 3))):
        assert (rotation is None) == (sizes[size_name] is None)
        if rotation is not None:
            assert rotation.shape == shape
            assert rotation.dtype == torch.float64
            assert defect(rotation) < 1e-12


@pytest.mark.parametrize(("backbone", "method"), dealt(list(BACKBONES), list(RETRACTIONS)))
def test_lowers_the_entropy(backbone, method):
    terms = make_block().terms(backbone)
    seen = []
    learned = learn(terms, backbone, WHOLE, quick(40, retraction=method), lambda *at: seen.append(at))
    assert learned.entropy_after < 0.95 * learned.entropy_before
    assert learned.steps == 40
    assert seen == list(enumerate(learned.curve))
    assert learned.curve[0] == pytest.approx(learned.entropy_before, rel=1e-5)
    assert min(learned.curve) == pytest.approx(learned.entropy_after, rel=1e-5)
    other = learn(terms, backbone, R2_ONLY, quick(40, retraction=method))
    assert other.entropy_before < learned.entropy_before
    assert other.entropy_after < other.entropy_before


def test_finds_a_planted_rotation_and_both_methods_agree():
    terms, turn = plant()
    planted_entropy = float(objective(terms, "magnitude", turn, None))
    by_method = {
        method: learn(terms, "magnitude", PLANTED, quick(steps, retraction=method, learning_rate=rate, patience=10**6))
        for method, steps, rate in (("cayley", 300, None), ("qr", 1000, None))
    }
    before = by_method["qr"].entropy_before
    assert planted_entropy < 0.6 * before
    for learned in by_method.values():
        assert learned.entropy_after < 1.05 * planted_entropy
    assert by_method["cayley"].entropy_after < 1.02 * by_method["qr"].entropy_after


@pytest.mark.parametrize("method", RETRACTIONS)
def test_preserves_a_direction_exactly(method):
    u = torch.ones(10)
    terms = make_block().terms("wanda")
    learned = learn(terms, settings=quick(retraction=method, jitter=0.1), preserve=u)
    assert learned.entropy_after < learned.entropy_before
    assert float((learned.residual @ u.double() - 1).abs().amax()) < 1e-13
    assert defect(learned.residual) < 1e-13


def test_jitter_leaves_a_start_without_a_gradient():
    """All weights are as important: the entropy is at its maximum, and would be zero turned by the matrix itself."""
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
    terms = [Term("w", torch.kron(pair, pair), None, None, "residual")]
    sizes = {"hidden": 4, "kv_heads": None, "head_dim": None}
    stuck = learn(terms, "magnitude", sizes, quick(60), dtype=torch.float64)
    free = learn(terms, "magnitude", sizes, quick(60, jitter=0.05), dtype=torch.float64)
    assert torch.equal(stuck.residual, torch.eye(4).double())
    assert free.entropy_after < 0.5 * stuck.entropy_after


def test_stops_early():
    terms = make_block().terms("wanda")
    one = learn(terms, settings=quick(200, patience=5, tolerance=0.9))
    assert one.steps == 5
    long = learn(terms, settings=quick(300, patience=20, tolerance=1e-4))
    assert 20 < long.steps < 300
    best_before = min(long.curve[: long.steps - 20 + 1])
    assert best_before - min(long.curve) <= 1e-4 * min(long.curve)


def test_a_loss_that_is_not_finite_stops_training(monkeypatch):
    terms = make_block().terms("wanda")
    calls = []

    def breaks(*arguments, **options):
        calls.append(1)
        return objective(*arguments, **options) * (float("nan") if len(calls) > 4 * len(terms) else 1)

    monkeypatch.setattr(module, "objective", breaks)
    monkeypatch.setattr(module._Loss, "__call__", _only_training(module._Loss.__call__, calls))
    learned = learn(terms)
    assert learned.steps == 4
    assert learned.curve[4] != learned.curve[4]
    assert learned.entropy_after == pytest.approx(min(learned.curve[:4]), rel=1e-5)
    assert learned.entropy_after < learned.entropy_before


def _only_training(call, calls):
    """Measuring in float64 is left whole."""

    def wrap(self, *args, **kwargs):
        before = list(calls)
        if self.dtype == torch.float64:
            calls.clear()
        result = call(self, *args, **kwargs)
        if self.dtype == torch.float64:
            calls[:] = before
        return result

    return wrap


def test_weights_that_are_not_finite_give_the_identity():
    terms = [replace(term, weight=term.weight * float("inf")) for term in make_block().terms("wanda")]
    learned = learn(terms)
    assert torch.equal(learned.residual, torch.eye(10).double())
    assert learned.steps == 0


def test_what_cannot_be_learned_is_refused():
    with pytest.raises(ValueError, match="neither"):
        problem("wanda", {"hidden": None, "kv_heads": None, "head_dim": None})
    with pytest.raises(ValueError, match="how many and their size"):
        problem("wanda", {"hidden": 10, "kv_heads": 2, "head_dim": None})


@pytest.mark.parametrize("method", RETRACTIONS)
def test_one_rotation_for_all_blocks(method):
    blocks = [make_block(seed) for seed in range(3)]
    learned = learn_shared_rotation(
        3, lambda i: blocks[i].terms("wanda"), problem("wanda", WHOLE), quick(40, retraction=method)
    )
    assert learned.residual.shape == (10, 10)
    assert learned.heads.shape == (3, 2, 3, 3)
    assert not torch.equal(learned.heads[0], learned.heads[1])
    total = sum(
        float(objective(block.terms("wanda"), "wanda", learned.residual, heads))
        for block, heads in zip(blocks, learned.heads, strict=True)
    )
    assert learned.entropy_after == pytest.approx(total, rel=1e-12)
    assert learned.entropy_after < 0.97 * learned.entropy_before


def test_shared_gradient_is_that_of_the_whole_sum(monkeypatch):
    """The same block twice, in one and in two: one R1 sees the same loss, twice."""
    block = make_block()
    monkeypatch.setattr(module, "CLIP", None)
    task = problem("wanda", R1_ONLY, dtype=torch.float64)
    one = learn_rotations(block.terms("wanda"), task, quick())
    two = learn_shared_rotation(2, lambda _: block.terms("wanda"), task, quick())
    assert two.entropy_after == pytest.approx(2 * one.entropy_after)
    torch.testing.assert_close(one.residual, two.residual, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", sorted(RETRACTIONS))
def test_bfloat16_learns_and_is_orthogonal_in_float64(method):
    """Learning in bfloat16 gains nearly as much as in float32 and is as orthogonal, as what is optimised stays wide."""
    terms, _ = plant()
    runs = [
        learn(terms, "magnitude", PLANTED, quick(60, retraction=method), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert defect(runs[1].residual) < 1e-12
    gained = [run.entropy_before - run.entropy_after for run in runs]
    assert gained[1] > 0.9 * gained[0] > 0
