"""Learning the rotations of a block, or one for all blocks, descending on entropy (DenoiseRotator section 3.3)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite
from ckpt_prune.job.names import Backbone, RetractionName
from ckpt_prune.stages.rotation.importance import Term, objective
from ckpt_prune.stages.rotation.orthogonal import (
    RETRACTIONS,
    Rotator,
    clip_slopes,
    identity,
    make_rotator,
    near_identity,
    orthonormalise,
)

Progress = Callable[[int, float], None]
"""Told the step and its entropy."""


@dataclass(frozen=True)
class DescentSettings:
    """How to descend.

    Attributes:
        steps: at most.
        method: a key of `orthogonal.METHODS`.
        learning_rate: None for what suits the method.
        patience: steps over which progress is judged. At full rate the entropy of SparseGPT's form goes up and down for
            tens of steps before it falls again: fewer would take that for the end.
        tolerance: training stops once the best entropy fell by less than this share of itself over `patience` steps;
            0 for never, short of no progress at all.
        clip: largest norm of the gradients of R1 and of all R2 together; None for no clipping.
        jitter: radians, about, by which a random start turns each pair of axes. Zero starts at the identity; only a
            block with no gradient there needs more.
        seed: of that start; of no effect without jitter. Nothing else is random.
    """

    steps: int = 200
    method: RetractionName = "cayley"
    learning_rate: float | None = None
    patience: int = 100
    tolerance: float = 1e-4
    clip: float | None = 1.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.patience < 1:
            raise ValueError(f"steps must be 0 or more and patience 1 or more, not {self.steps} and {self.patience}")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0: constant, or half a cosine down to zero where the method decays."""
        method = RETRACTIONS[self.method]
        peak = method.learning_rate if self.learning_rate is None else self.learning_rate
        return peak * 0.5 * (1 + math.cos(math.pi * step / self.steps)) if method.decays else peak


@dataclass(frozen=True)
class LearnedRotations:
    """Rotations and how they came about.

    Attributes:
        residual: R1 (d, d) float64 on CPU, orthogonal to rounding; None where none was asked for.
        heads: R2 (kv, head_dim, head_dim) float64 on CPU; of `learn_shared` (blocks, kv, head_dim, head_dim); or None.
        entropy_before: nats, in float64, without rotation.
        entropy_after: nats, in float64, of exactly these rotations; never more than before.
        steps: taken; fewer than asked for where training stopped early.
        curve: entropy at the start and after each step, in training's dtype.
    """

    residual: Tensor | None
    heads: Tensor | None
    entropy_before: float
    entropy_after: float
    steps: int
    curve: list[float] = field(repr=False)


def learn_rotations(
    terms: Sequence[Term],
    backbone: Backbone,
    *,
    hidden: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    training: DescentSettings,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    groups: int | None = None,
    preserve: Tensor | None = None,
    progress: Progress | None = None,
) -> LearnedRotations:
    """R1 and R2 of one block with the least entropy found: never more than without rotation.

    Args:
        terms: the block's linear layers; any floating dtype, any device.
        backbone: whose importance.
        hidden: d of R1, or None for no R1.
        kv_heads: how many R2, or None for none.
        head_dim: of R2.
        training: how.
        device: where to compute.
        dtype: to compute importances in; what is optimised is float32 at least, and what is returned is measured in
            float64.
        groups: M, to concentrate importance in the groups of an N:M pattern; None for lines (`objective`).
        preserve: a direction (d,) that R1 leaves where it is.
        progress: told of every step.

    Raises:
        ValueError: nothing to learn is asked for, or the terms do not fit.
    """
    on_device = [_moved(term, device, dtype) for term in terms]
    shapes = _shapes(1, hidden, kv_heads, head_dim)
    learned = _learn(
        shapes,
        _Loss(1, lambda _: on_device, backbone, groups, torch.device(device), dtype),
        # As given: the copy to learn on may have fewer digits.
        _Loss(1, lambda _: terms, backbone, groups, torch.device(device), torch.float64),
        training,
        preserve,
        progress,
    )
    return learned if learned.heads is None else replace(learned, heads=learned.heads[0])


def learn_shared_rotation(
    blocks: int,
    terms_of: Callable[[int], Sequence[Term]],
    backbone: Backbone,
    *,
    hidden: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    training: DescentSettings,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    groups: int | None = None,
    preserve: Tensor | None = None,
    progress: Progress | None = None,
) -> LearnedRotations:
    """One R1 for all blocks and own R2 for each, with the least sum of their entropies found.

    The gradient is that of the whole sum, gathered block by block and layer by layer: of one block the terms are held,
    of one linear layer the graph.

    Args:
        blocks: how many.
        terms_of: makes the linear layers of a block; called for each block at each step.
        backbone: whose importance.
        hidden: d of R1, or None for no R1.
        kv_heads: how many R2 in each block, or None for none.
        head_dim: of R2.
        training: how.
        device: where to compute.
        dtype: to compute importances in; what is optimised is float32 at least, and what is returned is measured in
            float64.
        groups: M, to concentrate importance in the groups of an N:M pattern; None for lines (`objective`).
        preserve: a direction (d,) that R1 leaves where it is.
        progress: told of every step.

    Raises:
        ValueError: nothing to learn is asked for, or the terms do not fit.
    """
    return _learn(
        _shapes(blocks, hidden, kv_heads, head_dim),
        _Loss(blocks, terms_of, backbone, groups, torch.device(device), dtype),
        _Loss(blocks, terms_of, backbone, groups, torch.device(device), torch.float64),
        training,
        preserve,
        progress,
    )


@dataclass(frozen=True)
class _Pair:
    """R1 (d, d) and the R2 of all blocks (blocks, kv, head_dim, head_dim)."""

    residual: Tensor | None
    heads: Tensor | None

    def to(self, device: torch.device) -> "_Pair":
        residual, heads = (None if rotation is None else rotation.to(device) for rotation in self.both())
        return _Pair(residual, heads)

    def both(self) -> tuple[Tensor | None, Tensor | None]:
        return self.residual, self.heads


Shapes = tuple[tuple[int, ...] | None, tuple[int, ...] | None]


def _shapes(blocks: int, hidden: int | None, kv_heads: int | None, head_dim: int | None) -> Shapes:
    if hidden is None and kv_heads is None:
        raise ValueError("neither a residual rotation nor rotations of heads are asked for")
    if (kv_heads is None) != (head_dim is None):
        raise ValueError("rotations of heads need both how many and their size")
    of_heads = None if kv_heads is None or head_dim is None else (blocks, kv_heads, head_dim, head_dim)
    return None if hidden is None else (hidden, hidden), of_heads


def _moved(term: Term, device: torch.device | str, dtype: torch.dtype) -> Term:
    inputs = None if term.inputs is None else term.inputs.to(device, dtype)
    return replace(term, weight=term.weight.to(device, dtype), inputs=inputs)


@dataclass(frozen=True)
class _Loss:
    """The entropy of some blocks as a function of their rotations, on a device and in a dtype."""

    blocks: int
    terms_of: Callable[[int], Sequence[Term]]
    backbone: Backbone
    groups: int | None
    device: torch.device
    dtype: torch.dtype

    def __call__(self, rotations: _Pair, *, backward: bool = False) -> float:
        """Sum over blocks; with `backward`, the rotations' gradients are added to theirs."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.set_grad_enabled(backward):
            for block in range(self.blocks):
                for term in self.terms_of(block):
                    # One linear layer at a time: graphs of all would hold several times the block.
                    of_block = None if rotations.heads is None else rotations.heads[block]
                    pair = (None if each is None else each.to(self.dtype) for each in (rotations.residual, of_block))
                    moved = _moved(term, self.device, self.dtype)
                    value = objective([moved], self.backbone, *pair, groups=self.groups)
                    if value.requires_grad:
                        torch.autograd.backward(value)
                    total += value.detach().to(self.device)
        return float(total)


def _learn(
    shapes: Shapes,
    loss: _Loss,
    exact: _Loss,
    training: DescentSettings,
    preserve: Tensor | None,
    progress: Progress | None,
) -> LearnedRotations:
    """Descend on `loss`, and take what it leads to only where `exact` agrees that it is better."""
    best, curve = _descend(_start(shapes, training, preserve, loss), loss, training, progress)
    start = _Pair(*(None if shape is None else identity(shape, dtype=torch.float64) for shape in shapes))
    found = start
    before = after = exact(start.to(exact.device))
    if best is not None:
        reached = _Pair(
            None if best.residual is None else orthonormalise(best.residual, preserve),
            None if best.heads is None else orthonormalise(best.heads),
        )
        entropy = exact(reached.to(exact.device))
        # What float32 takes for progress need not be any, and a random start may never come down to the identity.
        if entropy < before:
            found, after = reached, entropy
    return LearnedRotations(found.residual, found.heads, before, after, len(curve) - 1, curve)


def _start(
    shapes: Shapes, training: DescentSettings, preserve: Tensor | None, loss: _Loss
) -> tuple[Rotator | None, Rotator | None]:
    """Rotators of R1 and of all R2."""
    generator = torch.Generator().manual_seed(training.seed)
    rotators: list[Rotator | None] = []
    for shape, kept in zip(shapes, (preserve, None), strict=True):
        if shape is None:
            rotators.append(None)
            continue
        start = identity(shape, dtype=torch.float64)
        if training.jitter:
            start = near_identity(shape, training.jitter, generator, preserve=kept)
        # What is optimised keeps its digits: steps are too small for bfloat16.
        start = start.to(loss.device, torch.promote_types(loss.dtype, torch.float32))
        rotators.append(make_rotator(training.method, start, preserve=kept))
    residual, heads = rotators
    return residual, heads


def _descend(
    rotators: tuple[Rotator | None, Rotator | None], loss: _Loss, training: DescentSettings, progress: Progress | None
) -> tuple[_Pair | None, list[float]]:
    """The best rotations met, None where the loss is not even finite at the start, and the entropy at every step."""
    best: _Pair | None = None
    curve: list[float] = []
    lowest: list[float] = []
    for step in range(training.steps + 1):
        here = _Pair(*(None if r is None else r.rotation().clone().requires_grad_() for r in rotators))
        last = step == training.steps
        value = loss(here, backward=not last)
        curve.append(value)
        if progress is not None:
            progress(step, value)
        if not math.isfinite(value):
            break
        if best is None or value < lowest[-1]:
            best = here
        lowest.append(min(value, lowest[-1]) if lowest else value)
        if last or _stalled(lowest, training):
            break
        gradients = [None if rotation is None else rotation.grad for rotation in here.both()]
        if not all(all_finite(gradient) for gradient in gradients if gradient is not None):
            break
        moved = [(r, g) for r, g in zip(rotators, gradients, strict=True) if r is not None and g is not None]
        slopes = clip_slopes([one.slope(gradient) for one, gradient in moved], training.clip)
        for (one, _), slope in zip(moved, slopes, strict=True):
            one.step(slope, training.rate(step))
    return best, curve


def _stalled(lowest: list[float], training: DescentSettings) -> bool:
    """Whether the lowest entropy so far, step by step, has all but stopped falling."""
    if len(lowest) <= training.patience:
        return False
    return not lowest[-1 - training.patience] - lowest[-1] > training.tolerance * lowest[-1]
