"""Absorb norms and rotations in a block's tensors: another parametrisation of the same function.

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

from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.model.family import KINDS, Family
from ckpt_prune.model.family_keys import ResidualKeys
from ckpt_prune.stages.rotation.importance import Side, rotate_weight


def rotated_sides(family: Family, module: str, *, residual: bool) -> tuple[Side | None, Side | None]:
    """Return which rotation acts on the rows and which on the columns of a linear module's weight.

    `residual` says whether the residual stream is rotated, not only the values.
    """
    row_side: Side | None = None
    column_side: Side | None = None
    if residual and module in residual_of(family).writes:
        row_side = "residual"
    if residual and any(module in fed for fed in residual_of(family).reads.values()):
        column_side = "residual"
    if module == family.attention.value:
        row_side = "heads"
    if module == family.attention.output:
        column_side = "heads"
    return row_side, column_side


def residual_of(family: Family) -> ResidualKeys:
    """Return the description of a family's residual stream; recipes are checked before for one."""
    if family.residual is None:
        raise ValueError(f"{family.model_type} has no description of its residual stream")
    return family.residual


def norm_gains(family: Family, weight: Tensor | None) -> Tensor | None:
    """Return the factors of a norm with this weight, float64; None for ones."""
    return None if weight is None else weight.double() + family.norm_offset


def unit_gains(family: Family, weight: Tensor) -> Tensor:
    """Return the weight of a norm that multiplies by one."""
    return torch.full_like(weight, 1 - family.norm_offset)


def reading_norm(family: Family, module: str) -> str | None:
    """Return the norm of a block that feeds a linear module; None if none does."""
    return next((norm for norm, fed in residual_of(family).reads.items() if module in fed), None)


def subtract_mean(tensor: Tensor) -> Tensor:
    """Subtract the mean over the first axis: the result adds nothing to the mean of the stream."""
    return tensor - tensor.mean(0, keepdim=True)


def fuse_norms(family: Family, block: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Absorb gains and biases of a block's norms, so that it adds nothing to the stream's mean.

    All tensors of the block are returned, by on-disk name, those that changed in float64. A bias is added if a norm's
    has to go somewhere.
    """
    described = residual_of(family)
    fused = dict(tensors)
    for norm, modules in described.reads.items():
        stored, shift = (fused.get(family.tensor(block, norm, kind)) for kind in KINDS)
        gain = norm_gains(family, stored)
        for module in modules:
            name, bias = family.tensor(block, module), family.tensor(block, module, "bias")
            weight = fused[name].double()
            if shift is not None:
                fused[bias] = weight @ shift.double() + (fused[bias].double() if bias in fused else 0)
            fused[name] = weight if gain is None else weight * gain
        if stored is not None:
            fused[family.tensor(block, norm)] = unit_gains(family, stored)
        if shift is not None:
            fused[family.tensor(block, norm, "bias")] = torch.zeros_like(shift)
    if described.norm == "layer":
        for module in described.writes:
            for kind in KINDS:
                name = family.tensor(block, module, kind)
                if name in fused:
                    fused[name] = subtract_mean(fused[name].double())
    return fused


def rotate_block(
    family: Family, block: int, tensors: Mapping[str, Tensor], residual: Tensor | None, heads: Tensor | None
) -> dict[str, Tensor]:
    """Rotate a block's tensors; return all of them, those that changed in float64.

    Args:
        tensors: of the block, its norms fused if the residual stream is rotated.
        residual: R1, (d, d) float64 orthogonal, or None.
        heads: R2 of every KV head, (kv, head_dim, head_dim) float64 orthogonal, or None.
    """
    rotated = dict(tensors)
    for module in family.linears:
        left, right = rotated_sides(family, module, residual=residual is not None)
        if heads is None:
            left, right = (None if side == "heads" else side for side in (left, right))
        if left is None and right is None:
            continue
        name, bias = family.tensor(block, module), family.tensor(block, module, "bias")
        values_apart = left == "heads" and family.attention.values is not None
        rotated[name] = rotate_weight(rotated[name].double(), None if values_apart else left, right, residual, heads)
        if left is not None and bias in rotated:
            rotated[bias] = rotate_weight(
                rotated[bias].double()[:, None], None if values_apart else left, None, residual, heads
            )[:, 0]
        if values_apart:
            assert heads is not None
            lines = value_lines(family, block, rotated, len(heads)).to(heads.device)
            for stored in (name, bias):
                if stored in rotated:
                    values = rotated[stored].double().index_select(0, lines).view(len(lines), -1)
                    values = rotate_weight(values, left, None, residual, heads).view(-1, *rotated[stored].shape[1:])
                    rotated[stored] = rotated[stored].double().index_copy(0, lines, values)
    return rotated


def value_lines(family: Family, block: int, tensors: Mapping[str, Tensor], kv_heads: int) -> Tensor:
    """Return rows of the values among those of the module that makes them, int64, one KV head after the other."""
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
    """Return moments of a norm's output before its gains and biases: of x̂ if x = g x̂ + b was measured.

    An input whose gain is zero was never seen: its moments are zero. Count, sum, square and Gram are float64; absolute
    values and activity are unknown, NaN.

    Args:
        gain: g, (d,), or None for ones.
        shift: b, (d,), or None for zeros.
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
    """Return moments of a linear module's input before the gains and biases of the norm that feeds it, if one does.

    `tensors` are of the dense block, at least its norms; `moments` need a Gram if a norm feeds the module.
    """
    norm = reading_norm(family, module)
    if norm is None:
        return moments
    stored, shift = (tensors.get(family.tensor(block, norm, kind)) for kind in KINDS)
    return undo_gains(moments, norm_gains(family, stored), shift)


def rotate_moments(moments: Moments, right: Side | None, residual: Tensor | None, heads: Tensor | None) -> Moments:
    """Return moments of a linear's input, with a Gram, under the rotation on the right of its weight.

    Count, sum, square and Gram are float64; absolute values and activity are unknown, NaN.
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
