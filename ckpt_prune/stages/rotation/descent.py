"""Learn the rotations of a block, or one for all blocks, by descending on entropy (DenoiseRotator section 3.3)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite
from ckpt_prune.recipe.names import Backbone
from ckpt_prune.stages.rotation.importance import Term, objective
from ckpt_prune.stages.rotation.keys import Rotation
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
CLIP: float | None = 1.0
"""Largest norm of the gradients of R1 and of all R2 together (DenoiseRotator's released code); None for any."""


@dataclass(frozen=True)
class LearnedRotations:
    """Rotations and the entropy they reach.

    Attributes:
        residual: R1 (d, d) float64 on CPU, orthogonal to rounding; None if none was asked for.
        heads: R2 (kv, head_dim, head_dim) float64 on CPU, with all blocks in front if R1 is shared; or None.
        entropy_before: nats, in float64, without rotation.
        entropy_after: nats, in float64, of exactly these rotations; never more than before.
        steps: taken; fewer than asked for if training stopped early.
        curve: entropy at the start and after each step, in training's dtype.
    """

    residual: Tensor | None
    heads: Tensor | None
    entropy_before: float
    entropy_after: float
    steps: int
    curve: list[float] = field(repr=False)


@dataclass(frozen=True)
class RotationProblem:
    """Which rotations are learned, by which importance.

    Attributes:
        backbone: whose importance is concentrated.
        hidden: d of R1, or None for no R1.
        kv_heads: how many R2 in each block, or None for none.
        dtype: to compute importances in. What is optimised is float32 at least, and the result is measured in float64.
        groups: M, to concentrate importance in the groups of an N:M pattern; None for lines (`objective`).
        preserve: a direction (d,) that R1 leaves where it is.
    """

    backbone: Backbone
    hidden: int | None
    kv_heads: int | None
    head_dim: int | None
    device: torch.device
    dtype: torch.dtype = torch.float32
    groups: int | None = None
    preserve: Tensor | None = None

    def __post_init__(self) -> None:
        if self.hidden is None and self.kv_heads is None:
            raise ValueError("neither a residual rotation nor rotations of heads are asked for")
        if (self.kv_heads is None) != (self.head_dim is None):
            raise ValueError("rotations of heads need both how many and their size")

    def shapes(self, blocks: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the shapes of R1 and of the R2 of all blocks."""
        heads = None
        if self.kv_heads is not None and self.head_dim is not None:
            heads = (blocks, self.kv_heads, self.head_dim, self.head_dim)
        return None if self.hidden is None else (self.hidden, self.hidden), heads


def learn_rotations(
    terms: Sequence[Term], problem: RotationProblem, recipe: Rotation, progress: Progress | None = None
) -> LearnedRotations:
    """Learn R1 and R2 of one block with the least entropy found: never more than without rotation.

    `terms` are the block's linear layers; any floating dtype, any device.
    """
    on_device = [_move(term, problem.device, problem.dtype) for term in terms]
    # Measured as given: the copy to learn on may have fewer digits.
    learned = _learn(1, problem, recipe, progress, lambda _: on_device, lambda _: terms)
    return learned if learned.heads is None else replace(learned, heads=learned.heads[0])


def learn_shared_rotation(
    blocks: int,
    terms_of: Callable[[int], Sequence[Term]],
    problem: RotationProblem,
    recipe: Rotation,
    progress: Progress | None = None,
) -> LearnedRotations:
    """Learn one R1 for all blocks and an R2 for each, with the least sum of their entropies found.

    The gradient is that of the whole sum, gathered block by block and layer by layer: the terms of one block and the
    graph of one linear layer are held. `terms_of` makes the linear layers of a block, for each block at each step.
    """
    return _learn(blocks, problem, recipe, progress, terms_of, terms_of)


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


def _move(term: Term, device: torch.device, dtype: torch.dtype) -> Term:
    inputs = None if term.inputs is None else term.inputs.to(device, dtype)
    return replace(term, weight=term.weight.to(device, dtype), inputs=inputs)


@dataclass(frozen=True)
class _Loss:
    """The entropy of some blocks as a function of their rotations, in a dtype."""

    blocks: int
    terms_of: Callable[[int], Sequence[Term]]
    problem: RotationProblem
    dtype: torch.dtype

    def __call__(self, rotations: _Pair, *, backward: bool = False) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.problem.device)
        with torch.set_grad_enabled(backward):
            for block in range(self.blocks):
                for term in self.terms_of(block):
                    # One linear layer at a time: graphs of all would hold several times the block.
                    heads = None if rotations.heads is None else rotations.heads[block]
                    pair = (
                        None if rotation is None else rotation.to(self.dtype)
                        for rotation in (rotations.residual, heads)
                    )
                    moved = _move(term, self.problem.device, self.dtype)
                    value = objective([moved], self.problem.backbone, *pair, groups=self.problem.groups)
                    if value.requires_grad:
                        torch.autograd.backward(value)
                    total += value.detach().to(self.problem.device)
        return float(total)


def _learn(
    blocks: int,
    problem: RotationProblem,
    recipe: Rotation,
    progress: Progress | None,
    terms_of: Callable[[int], Sequence[Term]],
    exact_terms_of: Callable[[int], Sequence[Term]],
) -> LearnedRotations:
    """Descend, and take the result only if it is better in float64 on the exact terms."""
    loss = _Loss(blocks, terms_of, problem, problem.dtype)
    exact = _Loss(blocks, exact_terms_of, problem, torch.float64)
    shapes = problem.shapes(blocks)
    best, curve = _descend(_start(shapes, recipe, problem), loss, recipe, progress)
    start = _Pair(*(None if shape is None else identity(shape, dtype=torch.float64) for shape in shapes))
    learned = start
    before = after = exact(start.to(problem.device))
    if best is not None:
        reached = _Pair(
            None if best.residual is None else orthonormalise(best.residual, problem.preserve),
            None if best.heads is None else orthonormalise(best.heads),
        )
        entropy = exact(reached.to(problem.device))
        # What float32 takes for progress need not be any, and a random start may never come down to the identity.
        if entropy < before:
            learned, after = reached, entropy
    return LearnedRotations(learned.residual, learned.heads, before, after, len(curve) - 1, curve)


def _start(
    shapes: tuple[tuple[int, ...] | None, ...], recipe: Rotation, problem: RotationProblem
) -> tuple[Rotator | None, Rotator | None]:
    """Make rotators of R1 and of all R2."""
    generator = torch.Generator().manual_seed(recipe.seed)
    rotators: list[Rotator | None] = []
    for shape, kept in zip(shapes, (problem.preserve, None), strict=True):
        if shape is None:
            rotators.append(None)
            continue
        start = identity(shape, dtype=torch.float64)
        if recipe.jitter:
            start = near_identity(shape, recipe.jitter, generator, preserve=kept)
        # What is optimised keeps its digits: steps are too small for bfloat16.
        start = start.to(problem.device, torch.promote_types(problem.dtype, torch.float32))
        rotators.append(make_rotator(recipe.retraction, start, preserve=kept))
    residual, heads = rotators
    return residual, heads


def _descend(
    rotators: tuple[Rotator | None, Rotator | None], loss: _Loss, recipe: Rotation, progress: Progress | None
) -> tuple[_Pair | None, list[float]]:
    """Return the best rotations met, None if the loss is not finite at the start, and the entropy at every step."""
    best: _Pair | None = None
    curve: list[float] = []
    lowest: list[float] = []
    for step in range(recipe.steps + 1):
        here = _Pair(*(None if r is None else r.rotation().clone().requires_grad_() for r in rotators))
        last = step == recipe.steps
        value = loss(here, backward=not last)
        curve.append(value)
        if progress is not None:
            progress(step, value)
        if not math.isfinite(value):
            break
        if best is None or value < lowest[-1]:
            best = here
        lowest.append(min(value, lowest[-1]) if lowest else value)
        if last or _has_stalled(lowest, recipe):
            break
        gradients = [None if rotation is None else rotation.grad for rotation in here.both()]
        if not all(all_finite(gradient) for gradient in gradients if gradient is not None):
            break
        moving = [(r, g) for r, g in zip(rotators, gradients, strict=True) if r is not None and g is not None]
        slopes = clip_slopes([rotator.slope(gradient) for rotator, gradient in moving], CLIP)
        for (rotator, _), slope in zip(moving, slopes, strict=True):
            rotator.step(slope, learning_rate(recipe, step))
    return best, curve


def learning_rate(recipe: Rotation, step: int) -> float:
    """Return the rate of a step, counted from 0: constant, or half a cosine down to zero if the method decays."""
    retraction = RETRACTIONS[recipe.retraction]
    peak = retraction.learning_rate if recipe.learning_rate is None else recipe.learning_rate
    return peak * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)) if retraction.decays else peak


def _has_stalled(lowest: list[float], recipe: Rotation) -> bool:
    """Return whether the lowest entropy so far, step by step, has all but stopped falling.

    At full rate the entropy of SparseGPT's form goes up and down for tens of steps before it falls again: with little
    patience that would be taken for the end.
    """
    if len(lowest) <= recipe.patience:
        return False
    return not lowest[-1 - recipe.patience] - lowest[-1] > recipe.tolerance * lowest[-1]
