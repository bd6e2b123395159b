"""Norms and rotations folded into a block: by definition on small blocks, and as identities of moments."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.model.descriptions import load_family
from ckpt_prune.stages.rotation.absorbing import (
    fuse_norms,
    residual_of,
    rotate_block,
    rotate_moments,
    undo_gains,
)
from tests.oracles import rotation_entropy
from tests.oracles.rotation_entropy import full_rotation
from tests.problems import orthogonal

HIDDEN, HEADS, KV, HEAD_DIM, MLP = 10, 4, 2, 3, 7
OPT_HEADS, OPT_DIM = 2, 5

LLAMA = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN, None, "residual"),
    "self_attn.k_proj": (KV * HEAD_DIM, HIDDEN, None, "residual"),
    "self_attn.v_proj": (KV * HEAD_DIM, HIDDEN, "heads", "residual"),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM, "residual", "heads"),
    "mlp.gate_proj": (MLP, HIDDEN, None, "residual"),
    "mlp.up_proj": (MLP, HIDDEN, None, "residual"),
    "mlp.down_proj": (HIDDEN, MLP, "residual", None),
}
OPT = {
    "self_attn.q_proj": (HIDDEN, HIDDEN, None, "residual"),
    "self_attn.k_proj": (HIDDEN, HIDDEN, None, "residual"),
    "self_attn.v_proj": (HIDDEN, HIDDEN, "heads", "residual"),
    "self_attn.out_proj": (HIDDEN, HIDDEN, "residual", "heads"),
    "fc1": (MLP, HIDDEN, None, "residual"),
    "fc2": (HIDDEN, MLP, "residual", None),
}
FAMILIES = {"llama": (LLAMA, (KV, HEAD_DIM)), "opt": (OPT, (OPT_HEADS, OPT_DIM))}
"""Rows, columns, left and right side of every linear; R2's heads and their width."""
NORMS = {
    "llama": {"input_layernorm": ["self_attn.q_proj"], "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"]},
    "opt": {"self_attn_layer_norm": ["self_attn.v_proj"], "final_layer_norm": ["fc1"]},
}
BLOCK = {"llama": "model.layers.1.", "opt": "model.decoder.layers.1."}
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def block(model_type: str, biases: bool) -> dict[str, Tensor]:
    """Tensors of block 1, float32."""
    tensors = {}
    for module, (rows, columns, *_) in FAMILIES[model_type][0].items():
        tensors[f"{module}.weight"] = normal(rows, columns)
        if biases:
            tensors[f"{module}.bias"] = normal(rows)
    for norm in NORMS[model_type]:
        tensors[f"{norm}.weight"] = 1 + 0.3 * normal(HIDDEN)
        if model_type == "opt":
            tensors[f"{norm}.bias"] = normal(HIDDEN)
    return {BLOCK[model_type] + name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("model_type", ["beit", "dinov2", "bert"])
def test_families_without_a_description(model_type):
    with pytest.raises(ValueError, match=f"{model_type} has no description of its residual stream"):
        residual_of(load_family(model_type))


# ---- fusing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_fused_norm_and_linear_compute_what_they_did(model_type, biases):
    """norm(x) Wᵀ + b, with the norm as PyTorch has it."""
    family, tensors = load_family(model_type), block(model_type, biases)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    fused, x = fuse_norms(family, 1, tensors), normal(20, HIDDEN).double()

    def through(values: dict[str, Tensor], norm: str, module: str) -> Tensor:
        def get(name: str, kind: str) -> Tensor | None:
            tensor = values.get(f"{BLOCK[model_type]}{name}.{kind}")
            return None if tensor is None else tensor.double()

        if model_type == "opt":
            hidden = functional.layer_norm(x, (HIDDEN,), get(norm, "weight"), get(norm, "bias"))
        else:
            hidden = functional.rms_norm(x, (HIDDEN,), get(norm, "weight"), 1e-6)
        return functional.linear(hidden, get(module, "weight"), get(module, "bias"))

    for norm, modules in NORMS[model_type].items():
        for module in modules:
            expected = through(before, norm, module)
            torch.testing.assert_close(through(fused, norm, module), expected, rtol=1e-10, atol=1e-10)
        gain, shift = (fused.get(f"{BLOCK[model_type]}{norm}.{kind}") for kind in ("weight", "bias"))
        assert torch.equal(gain, torch.ones(HIDDEN))
        assert shift is None or torch.equal(shift, torch.zeros(HIDDEN))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items()), "the source was changed"
    added = fused.keys() - before.keys()
    reads = [name for name, (*_, right) in FAMILIES[model_type][0].items() if right == "residual"]
    gets_bias = model_type == "opt" and not biases
    assert added == ({f"{BLOCK[model_type]}{name}.bias" for name in reads} if gets_bias else set())


def test_what_adds_to_the_stream_of_a_layer_norm_adds_to_its_mean_no_more():
    tensors = block("opt", True)
    fused = fuse_norms(load_family("opt"), 1, tensors)
    for module in ("self_attn.out_proj", "fc2"):
        for kind in ("weight", "bias"):
            name = f"{BLOCK['opt']}{module}.{kind}"
            before = tensors[name].double()
            torch.testing.assert_close(fused[name], before - before.mean(0), rtol=1e-12, atol=1e-12)
            assert float(before.mean(0).abs().max()) > 0.01
    llama = block("llama", True)
    kept = fuse_norms(load_family("llama"), 1, llama)
    assert torch.equal(kept[f"{BLOCK['llama']}mlp.down_proj.weight"], llama[f"{BLOCK['llama']}mlp.down_proj.weight"])


# ---- turning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_heads", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_linear_and_bias_is_turned_as_in_the_paper(model_type, with_residual, with_heads):
    """Lᵀ W R entry by entry, R2 written out for every query head; the bias with the rows."""
    linears, sizes = FAMILIES[model_type]
    tensors = block(model_type, True)
    residual = orthogonal(HIDDEN, HIDDEN, seed=1) if with_residual else None
    heads = orthogonal(sizes[0], sizes[1], sizes[1], seed=2) if with_heads else None
    rotated = rotate_block(load_family(model_type), 1, tensors, residual, heads)
    assert rotated.keys() == tensors.keys()
    R1, R2 = (None if rotation is None else rotation.numpy() for rotation in (residual, heads))
    for module, (rows, columns, left, right) in linears.items():
        L, R = full_rotation(left, rows, R1, R2), full_rotation(right, columns, R1, R2)
        name = f"{BLOCK[model_type]}{module}"
        W, b = (tensors[f"{name}.{kind}"].double().numpy() for kind in ("weight", "bias"))
        np.testing.assert_allclose(rotated[f"{name}.weight"], rotation_entropy.rotate(W, L, R), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(rotated[f"{name}.bias"], L.T @ b, rtol=1e-10, atol=1e-12)
        if np.array_equal(L, np.eye(rows)) and np.array_equal(R, np.eye(columns)):
            assert rotated[f"{name}.weight"] is tensors[f"{name}.weight"]
        else:
            assert rotated[f"{name}.weight"].dtype == torch.float64
    for norm in NORMS[model_type]:
        assert rotated[f"{BLOCK[model_type]}{norm}.weight"] is tensors[f"{BLOCK[model_type]}{norm}.weight"]


# ---- moments -----------------------------------------------------------------------------------------------------


def moments_of(x: Tensor) -> Moments:
    """In float64 throughout."""
    active = (x.abs() > 0).double().sum(0)
    return Moments(len(x), x.sum(0), x.square().sum(0), x.abs().sum(0), active, x.T @ x)


def assert_second_moments(moments: Moments, x: Tensor) -> None:
    expected = moments_of(x)
    assert moments.count == len(x)
    scale = max(1.0, float(expected.square.max()))
    for name in ("sum", "square", "gram"):
        ours = getattr(moments, name)
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, getattr(expected, name), rtol=1e-8, atol=1e-9 * scale)
    assert moments.absolute.isnan().all()
    assert moments.active.isnan().all()


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(1, 40),
    width=st.integers(1, 9),
    gain=st.booleans(),
    shift=st.booleans(),
    dead=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_moments_before_a_norms_gain_and_bias(tokens, width, gain, shift, dead, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    g = torch.rand(width, generator=generator) + 0.3 if gain else None
    b = torch.randn(width, generator=generator, dtype=torch.float64) if shift else None
    seen = hidden if g is None else hidden * g.double()
    if g is not None:
        g[:dead] = 0
        seen = hidden * g.double()
        # What a gain of zero hides was never seen.
        hidden = hidden.clone()
        hidden[:, :dead] = 0
    if b is not None:
        seen = seen + b.double()
    moments = undo_gains(moments_of(seen), g, b)
    if g is not None and dead:
        # Exactly, though sums of a bias are rounded.
        assert not moments.sum[:dead].any()
        assert not moments.gram[:dead].any()
        assert not moments.gram[:, :dead].any()
    assert_second_moments(moments, hidden)


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(1, 30),
    kv=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    right=st.sampled_from([None, "residual", "heads"]),
    seed=st.integers(0, 2**16),
)
def test_moments_after_a_rotation(tokens, kv, group, head_dim, right, seed):
    """Moments after a rotation are those of x R with R written out, R2 repeated over the query heads of its group."""
    width = kv * group * head_dim
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    residual, heads = orthogonal(width, width, seed=seed), orthogonal(kv, head_dim, head_dim, seed=seed)
    R = torch.from_numpy(full_rotation(right, width, residual.numpy(), heads.numpy()))
    before = moments_of(x)
    rotated = rotate_moments(before, right, residual, heads)
    assert_second_moments(rotated, x @ R)
    # A rotation keeps lengths.
    assert float(rotated.square.sum()) == pytest.approx(float(before.square.sum()), rel=1e-9)


def test_moments_without_a_gram():
    moments = Moments.zeros(4, gram=False)
    with pytest.raises(ValueError, match="moments without a Gram"):
        undo_gains(moments, None, None)
    with pytest.raises(ValueError, match="moments without a Gram"):
        rotate_moments(moments, None, None, None)
