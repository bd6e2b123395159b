"""Effects predicted: a site pruned alone, its block run, and the gradient there asked what follows from it."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.readout import Drawn, Readout
from ckpt_prune.calibration.samples import Samples
from ckpt_prune.calibration.states import Allocate, in_memory
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.progress import track
from ckpt_prune.transform.site_variants import (
    LIMITS,
    POINTS,
    READOUT_TOKENS,
    First,
    Variants,
    batches_of,
    check_finite,
    counts_of,
    run_through,
)

_SEED = 0
"""Of the labels that are drawn from the model's own predictions."""


def predict_effects(
    model: Model,
    statistics: Statistics,
    samples: Samples,
    *,
    spaces: Collection[SpaceName],
    device: torch.device,
    compute_dtype: torch.dtype,
    points: tuple[float, ...] = POINTS,
    limit: int | None = None,
    allocate: Allocate = in_memory,
) -> dict[str, list[tuple[int, float]]]:
    """Predict how far pruning one site of the dense model alone takes the model's own output (this project).

    Columns go in the order of `scoring.obs`, and what stays is refitted by ridge, or by affine where the consumer has
    a bias in the checkpoint; dimensions of q and k go by logit energy, compensated by logit. λ is fixed.

    The pruned block is run on the dense model's states, and what leaves it differs by δ. By the Fisher metric this
    moves the output by KL ≈ ½ E[(g·δ)²], g being the gradient of the log-probability of labels that are drawn from the
    model's own predictions (calibration/README.md, section 5). Nothing behind the block is run again.

    A model of L blocks has 3 + V of them run for each of its blocks, V being the points of all spaces, the gradient
    counted twice. Memory: a block, its moments, everything outside the blocks, the hidden states of `limit` samples at
    the end of every block, as much for the gradients, and the logits of `READOUT_TOKENS` tokens (at least of one
    sample) three times.

    Args:
        model: the dense model.
        statistics: of the same model, with Grams of consumers' inputs, and with logits where q and k are among the
            spaces. That they are this model's is up to the caller.
        samples: the first `limit` are run.
        spaces: whose sites are pruned; those that the family has.
        device: where blocks run and are refitted.
        compute_dtype: in which they run.
        points: shares of the units of a site to drop, nearest counts from 1 to all but one.
        limit: of samples; by default `LIMITS`.
        allocate: makes the tensors that hold hidden states.

    Returns:
        Site by `Model.moments_name` (on-disk weight of the consumer, or of the query) → units dropped,
        of q and k dimensions dropped in every head, ascending, and the mean over samples of what `Readout.divergence`
        from the dense model is predicted to be. A site of one unit is left out.

    Raises:
        UserError: statistics lack moments, or a block's output or the gradient is not finite.
    """
    family, checkpoint, blocks = model.family, model.checkpoint, model.blocks
    counts = counts_of(model, statistics, spaces, points)
    variants = [(space, count) for space, own in counts.items() for count in own]
    if not variants:
        return {}
    few = First(samples, LIMITS[family.modality] if limit is None else limit)
    factory = BlockFactory(model, device=device, dtype=compute_dtype)
    stream = HiddenStream(factory, checkpoint.tensors, checkpoint.read, few, allocate=allocate)
    sites = Variants(model, statistics, device, counts)
    states = [stream.states]
    for block in track(range(blocks), "effects: states", total=blocks):
        states.append(allocate(tuple(stream.states.shape), stream.states.dtype))
        run_through(stream, factory.block(block, model.read_block(block)), block, states[block], states[block + 1])
    gradients = _at_the_end(Readout(factory, checkpoint.tensors, checkpoint.read), few, states[-1], allocate)
    found: dict[str, list[tuple[int, float]]] = {}
    for block in track(range(blocks - 1, -1, -1), "effects: sites", total=blocks):
        tensors = model.read_block(block)
        given, dense = states[block], states.pop()
        for (space, count), new in zip(variants, sites.of(block, tensors), strict=True):
            name = model.moments_name(block, space)
            value = _effect(stream, factory.block(block, new), block, given, dense, gradients)
            check_finite(value, count, name, compute_dtype)
            found.setdefault(name, []).append((count, value))
        if block > 0:
            _backward(stream, factory.block(block, tensors), block, given, gradients)
    return {name: found[name] for block in range(blocks) for name in _names(model, block, counts) if name in found}


def _names(model: Model, block: int, spaces: Iterable[SpaceName]) -> list[str]:
    return [model.moments_name(block, space) for space in spaces]


def _at_the_end(readout: Readout, samples: Samples, states: Tensor, allocate: Allocate) -> list[Drawn]:
    """Gradients at the states that leave the last block."""
    generator = torch.Generator().manual_seed(_SEED)
    found: list[Drawn] = []
    for rows in batches_of(samples, READOUT_TOKENS):
        for index, own in enumerate(readout.gradients(samples.batch(rows), states[rows], generator)):
            if index == len(found):
                found.append(Drawn(allocate(tuple(states.shape), torch.float32), own.whole, own.weight))
            found[index].values[rows] = own.values.cpu()
    return found


@torch.no_grad()
def _effect(
    stream: HiddenStream,
    pruned: nn.Module,
    block: int,
    given: Tensor,
    dense: Tensor,
    gradients: Sequence[Drawn],
) -> float:
    """½ E[(g·δ)²] of a pruned block, the mean over samples."""
    total = 0.0
    for _, rows in stream.batches:
        error = stream.run(pruned, block, given[rows]).cpu().float() - dense[rows].float()
        for gradient in gradients:
            moved = (gradient.values[rows] * error).sum(-1).double()
            squares = moved.sum(1).square() if gradient.whole else moved.square().sum(1)
            total += gradient.weight * float(squares.sum())
    return total / 2 / len(given)


def _backward(stream: HiddenStream, module: nn.Module, block: int, given: Tensor, gradients: Sequence[Drawn]) -> None:
    """Turn gradients at the states that leave a block into those at the states that enter it."""
    module.requires_grad_(False)
    for _, rows in stream.batches:
        with torch.enable_grad():
            entering = given[rows].to(stream.factory.device).requires_grad_(True)
            leaving = stream.run(module, block, entering)
        for index, gradient in enumerate(gradients):
            more = index < len(gradients) - 1
            own = gradient.values[rows].to(leaving)
            (found,) = torch.autograd.grad(leaving, entering, own, retain_graph=more)
            gradient.values[rows] = found.float().cpu()
