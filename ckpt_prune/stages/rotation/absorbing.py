"""Absorbing norms and rotations in a block's tensors: another parametrisation of the same function.

Rows of activations are multiplied from the right: where the residual stream h becomes h R, a module that reads it gets
W R and one that adds to it Rᵀ W. An RMSNorm commutes with any rotation once its gains stand in the modules it feeds
(DenoiseRotator, section 3.3; SliceGPT, section 3.1). A LayerNorm subtracts the mean over coordinates first: the
subtraction is absorbed by everything that adds to the stream (SliceGPT, section 3.2), which leaves a stream whose mean
is zero, and the rotations used with it keep the direction of ones, R 1 = 1, so that it stays zero. The stock LayerNorm
then acts as an RMSNorm, and no class needs to change.

Everything is computed in float64; whoever stores the result casts it once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ckpt_prune.architectures.family import KINDS, Family
from ckpt_prune.architectures.parts import Residual
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.stages.rotation.importance import Side, rotate_weight


def rotated_sides(family: Family, module: str, *, residual: bool) -> tuple[Side | None, Side | None]:
    """Which rotation acts on the left (rows) and on the right (columns) of a linear module's weight.

    Args:
        family: with a description of its residual stream, where that is rotated.
        module: a linear module of a block.
        residual: whether the residual stream is rotated, beside the values.
    """
    left: Side | None = None
    right: Side | None = None
    if residual and module in residual_of(family).writes:
        left = "residual"
    if residual and any(module in fed for fed in residual_of(family).reads.values()):
        right = "residual"
    if module == family.attention.value:
        left = "heads"
    if module == family.attention.output:
        right = "heads"
    return left, right


def residual_of(family: Family) -> Residual:
    """The description of a family's residual stream.

    Raises:
        ValueError: it has none; recipes are checked before.
    """
    if family.residual is None:
        raise ValueError(f"{family.model_type} has no description of its residual stream")
    return family.residual


def norm_gains(family: Family, weight: Tensor | None) -> Tensor | None:
    """What a norm with this weight multiplies by, float64; None for ones."""
    return None if weight is None else weight.double() + family.norm_offset


def unit_gains(family: Family, weight: Tensor) -> Tensor:
    """The weight of a norm that multiplies by nothing."""
    return torch.full_like(weight, 1 - family.norm_offset)


def reading_norm(family: Family, module: str) -> str | None:
    """The norm of a block that feeds a linear module; None where none does."""
    return next((norm for norm, fed in residual_of(family).reads.items() if module in fed), None)


def subtract_mean(tensor: Tensor) -> Tensor:
    """A tensor minus its mean over the first axis: what adds to the stream no longer adds to its mean."""
    return tensor - tensor.mean(0, keepdim=True)


def fuse_norms(family: Family, block: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A block whose norms have no gains and no biases of their own, and which adds nothing to the stream's mean.

    Args:
        family: with a description of its residual stream.
        block: index.
        tensors: of the block, by on-disk name.

    Returns:
        All its tensors, those that changed in float64; a bias is added where a norm's has to go somewhere.
    """
    described = residual_of(family)
    found = dict(tensors)
    for norm, modules in described.reads.items():
        stored, shift = (found.get(family.tensor(block, norm, kind)) for kind in KINDS)
        gain = norm_gains(family, stored)
        for module in modules:
            name, bias = family.tensor(block, module), family.tensor(block, module, "bias")
            weight = found[name].double()
            if shift is not None:
                found[bias] = weight @ shift.double() + (found[bias].double() if bias in found else 0)
            found[name] = weight if gain is None else weight * gain
        if stored is not None:
            found[family.tensor(block, norm)] = unit_gains(family, stored)
        if shift is not None:
            found[family.tensor(block, norm, "bias")] = torch.zeros_like(shift)
    if described.norm == "layer":
        for module in described.writes:
            for kind in KINDS:
                name = family.tensor(block, module, kind)
                if name in found:
                    found[name] = subtract_mean(found[name].double())
    return found


def rotate_block(
    family: Family, block: int, tensors: Mapping[str, Tensor], residual: Tensor | None, heads: Tensor | None
) -> dict[str, Tensor]:
    """A block's tensors under its rotations.

    Args:
        family: with a description of its residual stream, where that is rotated.
        block: index.
        tensors: of the block, its norms fused where the residual stream is rotated.
        residual: R1, (d, d) float64 orthogonal, or None.
        heads: R2 of every KV head, (kv, head_dim, head_dim) float64 orthogonal, or None.

    Returns:
        All its tensors, those that changed in float64.
    """
    found = dict(tensors)
    for module in family.linears:
        left, right = rotated_sides(family, module, residual=residual is not None)
        if heads is None:
            left, right = (None if side == "heads" else side for side in (left, right))
        if left is None and right is None:
            continue
        name, bias = family.tensor(block, module), family.tensor(block, module, "bias")
        apart = left == "heads" and family.attention.values is not None
        found[name] = rotate_weight(found[name].double(), None if apart else left, right, residual, heads)
        if left is not None and bias in found:
            found[bias] = rotate_weight(found[bias].double()[:, None], None if apart else left, None, residual, heads)[
                :, 0
            ]
        if apart:
            assert heads is not None
            lines = value_lines(family, block, found, len(heads)).to(heads.device)
            for own in (name, bias):
                if own in found:
                    values = found[own].double().index_select(0, lines).view(len(lines), -1)
                    values = rotate_weight(values, left, None, residual, heads).view(-1, *found[own].shape[1:])
                    found[own] = found[own].double().index_copy(0, lines, values)
    return found


def value_lines(family: Family, block: int, tensors: Mapping[str, Tensor], kv_heads: int) -> Tensor:
    """Rows of the values among those of the module that makes them, int64, one KV head after the other.

    Args:
        family: whose `attention.values` says where they lie.
        block: index.
        tensors: of the dense block.
        kv_heads: how many KV heads there are.
    """
    values = family.attention.values
    assert values is not None
    rows = tensors[family.tensor(block, family.attention.value)].shape[0]
    width = tensors[family.tensor(block, family.attention.output)].shape[1]
    # What is no query in the one projection are as many keys as values.
    head_dim = (rows - width) // (2 * kv_heads)
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "query_heads": width // head_dim}
    sizes["group"] = sizes["query_heads"] // kv_heads
    return values.lines(torch.arange(kv_heads), kv_heads, sizes.__getitem__)


def undo_gains(moments: Moments, gain: Tensor | None, shift: Tensor | None) -> Moments:
    """Moments of a norm's output before its gains and biases: of x̂ where x = g x̂ + b was measured.

    An input whose gain is zero was never seen: its moments are zero.

    Args:
        moments: of x, with a Gram.
        gain: g, (d,), or None for ones.
        shift: b, (d,), or None for zeros.

    Returns:
        Count, sum, square and Gram of x̂, float64; absolute values and activity are unknown, NaN.
    """
    if moments.gram is None:
        raise ValueError("moments without a Gram")
    total, gram = moments.sum.double(), moments.gram.double()
    if shift is not None:
        b = shift.double().to(total.device)
        gram = gram - torch.outer(total, b) - torch.outer(b, total) + moments.count * torch.outer(b, b)
        total = total - moments.count * b
    if gain is not None:
        g = gain.double().to(total.device)
        inverse = torch.where(g == 0, torch.zeros_like(g), 1 / g)
        gram, total = gram * torch.outer(inverse, inverse), total * inverse
    return _second(moments.count, total, gram)


def undo_norm(family: Family, block: int, module: str, tensors: Mapping[str, Tensor], moments: Moments) -> Moments:
    """Moments of a linear module's input before the gains and biases of the norm that feeds it, where one does.

    Args:
        family: with a description of its residual stream.
        block: index.
        module: a linear module.
        tensors: of the dense block, at least its norms.
        moments: of the module's input; with a Gram, where a norm feeds it.
    """
    norm = reading_norm(family, module)
    if norm is None:
        return moments
    stored, shift = (tensors.get(family.tensor(block, norm, kind)) for kind in KINDS)
    return undo_gains(moments, norm_gains(family, stored), shift)


def rotate_moments(moments: Moments, right: Side | None, residual: Tensor | None, heads: Tensor | None) -> Moments:
    """Moments of a linear's input under the rotation on the right of its weight.

    Args:
        moments: of its input before, with a Gram.
        right: which rotation.
        residual: R1.
        heads: R2 of every KV head.

    Returns:
        Count, sum, square and Gram, float64; absolute values and activity are unknown, NaN.
    """
    if moments.gram is None:
        raise ValueError("moments without a Gram")
    total, gram = moments.sum.double(), moments.gram.double()
    if right is not None:
        total = rotate_weight(total[None], None, right, residual, heads)[0]
        gram = rotate_weight(rotate_weight(gram, None, right, residual, heads).T, None, right, residual, heads)
    return _second(moments.count, total, gram)


def _second(count: int, total: Tensor, gram: Tensor) -> Moments:
    unknown = torch.full_like(total, torch.nan)
    return Moments(count, total, gram.diagonal().clamp_min(0).clone(), unknown, unknown, gram)
