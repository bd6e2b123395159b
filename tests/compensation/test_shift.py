from dataclasses import asdict, replace

import pytest
import torch
from oracles import shift as oracle

from ckpt_prune.compensation import head_shift as heads
from ckpt_prune.compensation.head_shift import HeadEquations, measure_head_shift
from ckpt_prune.compensation.logit import diagnose_logit, logit_system
from ckpt_prune.compensation.low_rank import pair_errors
from ckpt_prune.compensation.methods import METHODS
from ckpt_prune.compensation.mixing import mix_dimensions
from ckpt_prune.compensation.rotary import factor_freedom, rotary_system
from ckpt_prune.compensation.shift import degrees_of_freedom, measure_shift

from .sites import SHAPES, make_site
from .test_logit import FORMS, attention
from .test_rotary import drawn, moments_of


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_equals_the_proposition_from_tokens(shape, strength):
    site, other = make_site(*shape), make_site(*shape, seed=7)
    shift = measure_shift(site.weight, site.moments, other.moments, site.kept, strength)
    arrays = (site.weight.numpy(), site.tokens.numpy(), other.tokens.numpy())
    expected = oracle.terms(*arrays, site.kept.tolist(), strength)
    assert asdict(shift) == pytest.approx(expected, rel=1e-6)
    assert shift.bound == pytest.approx(2 * expected["floor"] + expected["sampling"] + expected["shifting"], rel=1e-6)


def test_without_spectra_only_what_they_give_is_missing():
    site, other = make_site(4, 9, 6, 60), make_site(4, 9, 6, 60, seed=7)
    full = measure_shift(site.weight, site.moments, other.moments, site.kept, 1.0)
    reduced = measure_shift(site.weight, site.moments, other.moments, site.kept, 1.0, spectra=False)
    assert reduced == replace(full, covariances=None, smallest=None, sampling=None, shifting=None)
    assert reduced.bound is None


def test_a_singular_fit_has_no_bound():
    site = make_site(4, 9, 6, 60)
    site = replace(site, tokens=site.tokens.index_fill(1, site.kept[:1], 0.0))
    shift = measure_shift(site.weight, site.moments, site.moments, site.kept, 0.0)
    assert (shift.smallest, shift.sampling, shift.bound) == (pytest.approx(0, abs=1e-12), float("inf"), float("inf"))


def test_grams_are_needed():
    site = make_site(4, 9, 6, 60)
    bare = replace(site.moments, gram=None)
    for pair in ((bare, site.moments), (site.moments, bare)):
        with pytest.raises(ValueError, match="Gram"):
            measure_shift(site.weight, *pair, site.kept, 0.0)


@pytest.mark.parametrize("strength", [0.0, 3.0, 500.0])
def test_degrees_of_freedom(strength):
    """Every method has the expected degrees of freedom: a rotation of 5 axes has one for each pair of them."""
    site = make_site(5, 9, 3, 60)
    expected = {"none": 0, "bias": 5, "rotation": 10, "rotation-scale": 11, "centred-rotation": 15, "least-squares": 25}
    plain, centred = (oracle.freedom(site.inputs.numpy(), 5, strength, flag) for flag in (False, True))
    expected |= {"ridge": plain, "affine": centred, "grail": plain}
    for name, freedom in expected.items():
        computed = degrees_of_freedom(METHODS[name], 5, site.moments, site.kept, strength)
        assert computed == pytest.approx(freedom, rel=1e-9)
    assert (plain, centred) == (15, 20) if strength == 0 else plain < 15


def test_a_new_method_is_counted_by_its_numbers():
    site = make_site(5, 9, 3, 60)
    lent = replace(METHODS["ridge"], name="new", ridge_towards=None)
    assert degrees_of_freedom(lent, 5, site.moments, site.kept, 3.0) == 15
    assert degrees_of_freedom(replace(lent, adds_bias=True), 5, site.moments, site.kept, 3.0) == 20


def test_degrees_of_freedom_of_factors():
    system = rotary_system(moments_of(*drawn(3)), torch.tensor([[0, 2], [1, 2]]))
    strength = torch.arange(4, dtype=torch.float64)
    expected = sum(
        float((N @ torch.linalg.pinv(N + s * torch.eye(4))).trace())
        for N, s in zip(system.normal, strength, strict=True)
    )
    assert factor_freedom(system, strength) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strength", [0.0, 50.0])
def test_of_logits_it_equals_the_proposition_from_tokens(form, strength):
    a, b = attention(d=4, size=3, samples=12, tokens=5), attention(d=4, size=3, samples=7, tokens=5, seed=3)
    texts = a.moments(form), b.moments(form)
    systems = [logit_system(moments, a.kept) for moments in texts]
    equations, others = (HeadEquations.of_logits(*pair) for pair in zip(texts, systems, strict=True))
    values = torch.tensor([strength, 2 * strength], dtype=torch.float64)
    shift = measure_head_shift(equations, others, diagnose_logit(systems[1]).floor, values)
    samples = [[source.samples(head) for head in range(2)] for source in (a, b)]
    expected = oracle.head_terms(*samples, a.kept.tolist(), values.tolist())
    assert asdict(shift) == pytest.approx(expected, rel=1e-6)
    unbounded = replace(shift, smallest=None, sampling=None, shifting=None)
    assert measure_head_shift(equations, others, diagnose_logit(systems[1]).floor, None) == unbounded


def test_too_many_unknowns_leave_eigenvalues_out(monkeypatch):
    moments = moments_of(*drawn(3))
    equations = HeadEquations.of_pairs(moments, rotary_system(moments, torch.tensor([[0, 2], [1, 2]])))
    zeros = torch.zeros(moments.heads, dtype=torch.float64)
    full = measure_head_shift(equations, equations, zeros, zeros)
    assert (full.covariances, full.means, full.shifting) == (0, 0, 0)
    assert full.sampling is not None
    monkeypatch.setattr(heads, "EXACT_WIDTH", 6)
    reduced = measure_head_shift(equations, equations, zeros, zeros)
    assert reduced == replace(full, covariances=None, smallest=None, sampling=None, shifting=None)


def test_of_pairs_the_bound_speaks_of_two_unknowns_a_pair():
    """Two samples of the same pairs, one of them twice as large: G and h grow fourfold."""
    queries, keys = drawn(3)
    kept = torch.tensor([[0, 2], [1, 2]])
    texts = moments_of(queries, keys), moments_of(2 * queries, keys)
    equations, others = (HeadEquations.of_pairs(moments, rotary_system(moments, kept)) for moments in texts)
    shift = measure_head_shift(equations, others, torch.zeros(4), torch.full((4,), 1e9, dtype=torch.float64))
    assert (shift.covariances, shift.means) == (pytest.approx(3), pytest.approx(9))
    radius = sum(float(gram.diagonal().max()) for gram in texts[0].gram) / 3
    spread = 4 * torch.tensor(4 / 0.05).log() / 3 / (1e9 / 3) ** 2
    assert shift.sampling == pytest.approx(radius * float(spread), rel=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_errors_of_mixed_dimensions_are_those_of_explicit_logits(form):
    a, b = attention(samples=8, tokens=5), attention(samples=8, tokens=5, seed=3)
    M = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors = pair_errors(b.moments(form), *mix_dimensions(M, a.kept, 6))
    expected = [oracle.logits.error(b.samples(h), a.kept[h].tolist(), M[h].numpy()) for h in range(2)]
    assert errors.tolist() == pytest.approx(expected, rel=1e-6)
