"""Gradients of labels' log-probabilities at the states behind the last block, a slice of the vocabulary at a time.

Softmax, draw and gradient take one pass over the classes, as in an online softmax (Milakov & Gimelshein, 2018): all
sums are relative to the greatest logit so far. No tensor has an axis of all classes but the head's own weight.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 2048
"""Classes of a slice: with 512 tokens their logits stay in a cache."""


class LabelDraw:
    """Draws a class for each of `count` predictions from their probabilities, while the classes come by in slices.

    A slice takes the place of what was drawn before with the chance of its share of all that was seen, so that every
    class is drawn with its probability. The generator is on CPU, and gives two numbers a prediction, in order.
    """

    def __init__(self, count: int, generator: torch.Generator, device: torch.device) -> None:
        drawn = torch.rand(count, 2, dtype=torch.float64, generator=generator).to(device)
        self._among_slices, self._within = drawn.unbind(1)
        self.labels = torch.zeros(count, dtype=torch.int64, device=device)

    def see(self, start: int, weights: Tensor, mass: Tensor, total: Tensor) -> None:
        """Take the classes from `start` on. Their weights (count, classes) are proportional to probabilities.

        `mass` (count,) float64 is their sum, and `total` that of all classes so far.
        """
        share = mass / total
        taken = self._among_slices >= 1 - share
        chances = torch.where(taken, self._among_slices - (1 - share), self._among_slices)
        self._among_slices = chances / torch.where(taken, share, 1 - share)  # uniform again
        rows = taken.nonzero().squeeze(1)
        sums = weights[rows].cumsum(1)
        reached = (self._within[rows].to(sums.dtype) * sums[:, -1]).unsqueeze(1)
        places = torch.searchsorted(sums, reached, right=True).squeeze(1)
        self.labels[rows] = start + places.clamp_max(sums.shape[1] - 1)


class _HeadRun(NamedTuple):
    """A run of the model with some classes of its head.

    Attributes:
        entering: what reaches the head, (B, T, hidden).
        leaf: the same, at which the gradient is asked for.
        made: what the head makes of it.
        outputs: of the model.
    """

    entering: Tensor
    leaf: Tensor
    made: Tensor
    outputs: Sequence[Tensor]


class SlicedHead:
    """The last linear module of a model that gives logits, of which some classes are computed at a time.

    Args:
        head: its weight is (classes, hidden). What follows it takes every class by itself, such as a scale or a cap.
        run: makes the model's outputs of states (B, T, hidden), by its own forward pass.
    """

    def __init__(self, head: nn.Linear, run: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._head, self._run = head, run

    def fits(self, states: Tensor) -> bool:
        """Return True if what the head makes is the only output of the model."""
        try:
            outputs = self._call(states, partial(self._multiply, slice(2)))
        except RuntimeError as error:  # a bias of all classes is added behind the head
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False
        return [output.shape[-1] for output in outputs] == [2]

    @torch.enable_grad()
    def log_p_gradients(self, states: Tensor, labels: Tensor | LabelDraw, share: Tensor | float) -> Tensor:
        """Return the gradients at states (B, T, hidden) of Σ share_s log p(label s) over S = B T predictions, float32.

        Labels are int64 (S,), or drawn from p. Shares are (S, 1), or one for all. Products are in the dtype of the
        states, and sums over classes in float32 or more.
        """
        greatest = total = slope = torch.empty(0)
        run: _HeadRun | None = None
        for start in range(0, self._head.out_features, CLASSES):
            part = slice(start, start + CLASSES)
            if run is None or run.outputs[0] is not run.made:
                run = self._run_with(states, partial(self._multiply, part))
                logits = run.outputs[0]
            else:  # nothing follows the head
                logits = self._multiply(part, run.leaf)
            rows = logits.detach().flatten(0, -2).float()
            rise = rows.amax(1, keepdim=True)
            rise = rise if start == 0 else torch.maximum(greatest, rise)
            weights = (rows - rise).exp_()
            mass = weights.sum(1, dtype=torch.float64)
            pull = _pull_back(logits, run.leaf, weights)
            if start == 0:
                total, slope = mass, pull
            else:
                fade = (greatest - rise).exp_()
                total, slope = total * fade.squeeze(1) + mass, slope.mul_(fade).add_(pull)
            greatest = rise
            if isinstance(labels, LabelDraw):
                labels.see(start, weights, mass, total)
        chosen = labels.labels if isinstance(labels, LabelDraw) else labels
        states = states.detach().requires_grad_(True)
        run = self._run_with(states, partial(self._multiply_rows, chosen))
        pull = _pull_back(run.outputs[0], run.leaf, torch.ones(len(chosen), 1, device=states.device))
        slope = (pull - slope / total.to(slope.dtype).unsqueeze(1)) * share
        (values,) = torch.autograd.grad(run.entering, states, slope.view(run.entering.shape).to(run.entering.dtype))
        return values.float()

    def _multiply(self, part: slice, x: Tensor) -> Tensor:
        """Return the logits of some classes, (B, T, classes)."""
        return functional.linear(x, self._head.weight[part], None if self._head.bias is None else self._head.bias[part])

    def _multiply_rows(self, labels: Tensor, x: Tensor) -> Tensor:
        """Return the logit of one class for each prediction, (B, T, 1)."""
        logits = (x * self._head.weight[labels].view(x.shape)).sum(-1, keepdim=True)
        return logits if self._head.bias is None else logits + self._head.bias[labels].view(logits.shape)

    def _run_with(self, states: Tensor, multiply: Callable[[Tensor], Tensor]) -> _HeadRun:
        """Run the model with another product in place of its head's."""
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def forward(x: Tensor) -> Tensor:
            leaf = x.detach().requires_grad_(True)
            seen.append((x, leaf, multiply(leaf)))
            return seen[-1][-1]

        outputs = self._call(states, forward)
        return _HeadRun(*seen[-1], outputs)

    def _call(self, states: Tensor, forward: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
        head: Any = self._head
        head.forward = forward
        try:
            return self._run(states)
        finally:
            del head.forward


def _pull_back(logits: Tensor, leaf: Tensor, slope: Tensor) -> Tensor:
    """Return the gradient at a head's input of logits with a slope (S, classes), (S, hidden) float32."""
    (gradient,) = torch.autograd.grad(logits, leaf, slope.view(logits.shape).to(logits.dtype))
    return gradient.flatten(0, -2).float()
