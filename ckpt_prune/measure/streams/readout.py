"""A model's outputs for given hidden states behind its last block, and how far two such outputs are apart."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_prune.measure.samples.samples import Samples, move_batch, scored_tokens, split_batches
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.outside import ReadTensors, load_outside, make_recorders
from ckpt_prune.measure.streams.recorders import sample_axis, token_axis
from ckpt_prune.measure.streams.sliced_head import LabelDraw, SlicedHead
from ckpt_prune.model.skeleton import base_model_of

CHUNK = 2**20
"""Logits that are compared at once: 4 MiB in each of a few float32 tensors, which stay in a cache."""
READOUT_TOKENS = 512
"""Tokens whose outputs are held together: the vocabulary is what makes these large."""
DRAWS = 8
"""Draws of labels if a sample has one prediction: a text has hundreds, which are drawn apart."""


@dataclass(frozen=True)
class DrawnGradients:
    """Gradients of one draw of labels for one output, at the states that leave a block.

    Attributes:
        values: (B, T, hidden) float32.
        whole: whether a sample has one prediction, which errors of all its tokens move together; else every token's
            error is taken to move the predictions apart from the others'.
        weight: of this draw among those of its output.
        draw: number of the draw, the same for all outputs.
    """

    values: Tensor
    whole: bool
    weight: float
    draw: int = 0

    def measure_shift(self, gradient: Tensor, error: Tensor) -> float:
        """Return Σ (g·δ)², weighted: over all tokens of a sample if it has one prediction, else token by token.

        Both `gradient` (some samples of `values`) and `error` (their δ) are (B, T, hidden) on one device.
        """
        shift = (gradient * error).sum(-1).double()
        shift = shift.sum(-1) if self.whole else shift
        return self.weight * float(shift.square().sum())


class _HeadReachedError(Exception):
    """Raised before the head computes anything."""


class Readout:
    """The model's own forward pass, with given hidden states in place of what its blocks would make.

    Every head is thus the model's own: its final norm, pooler, projections, and weights tied as it ties them. Memory,
    on the factory's device: everything outside the blocks but an embedding that no head shares, for as long as this
    lives, and the outputs of the samples that are asked for together (of a causal language model tokens x vocabulary).

    Args:
        factory: of the model's blocks; its skeleton is copied, not changed.
        tensors: on-disk names of the checkpoint.
        read: reads on-disk tensors by name; asked for those outside the blocks only.

    Attributes:
        logits: whether the model's purpose is read from logits, or else from its last hidden states.

    Raises:
        ValueError: a parameter outside the blocks has no tensor.
    """

    def __init__(self, factory: BlockFactory, tensors: Iterable[str], read: ReadTensors) -> None:
        self.factory = factory
        self.logits = factory.family.gives_logits
        # What tokens look up, the last block's states take the place of: it needs room only if a head shares it.
        embedding, ties = f"{factory.family.embedding}.weight", factory.names.ties
        looked_up = {embedding, *factory.names.parameters(embedding)} - ties.keys() - set(ties.values())
        self._model: Any = load_outside(factory, tensors, read, looked_up)
        if factory.family.reads_tokens:
            allow_several_texts(self._model)
        self._sliced: bool | None = None
        self._recorders = make_recorders(factory, self._model)

    def gradients(
        self, batch: Mapping[str, Tensor], states: Tensor, generator: torch.Generator, scored: Tensor | None = None
    ) -> list[DrawnGradients]:
        """Return the gradients at the last states of what labels drawn from the model's own predictions cost it.

        Let ℓ = Σ_s log p(ŷ_s) / √S over a sample's S predictions, with ŷ_s drawn from p. An error δ of the states moves
        the predictions by KL ≈ ½ E[(∂ℓ·δ)²], the mean over them (measure/README.md, section 5). Without a head
        ℓ = √2 vᵀh / ‖h‖, v ~ N(0, I), which gives ‖δh‖² / ‖h‖² in place of KL. For every output, in the model's order,
        there is one draw if a sample has many predictions, `DRAWS` if it has one; the generator is on CPU. `batch` and
        `states` are as in `outputs`. `scored`, (B, T) bool, says which tokens are worth predicting from those before
        them, by default all: a causal language model's predictions of others count nothing.
        """
        shares = None
        if scored is not None:
            # What comes behind a text's window is worth predicting, too; behind a target nothing comes.
            last = torch.full_like(scored[:, :1], self.factory.family.causal)
            counted = torch.cat([scored[:, 1:], last], 1).to(self.factory.device).float()
            shares = counted / counted.sum(1, keepdim=True).sqrt()
        # An encoder's states are others than those that predictions are made of.
        alike = shares is None or shares.shape == (len(states), count_tokens(batch, states))
        head = self._slice_head(batch, states) if alike else None
        if head is not None:
            tokens = count_tokens(batch, states)
            draw = LabelDraw(len(states) * tokens, generator, self.factory.device)
            share: Tensor | float = tokens**-0.5 if shares is None else shares.view(-1, 1)
            return [DrawnGradients(head.log_p_gradients(self._place(states), draw, share), False, 1.0)]
        entering, outputs = self._run_with_gradients(batch, states)
        drawn = []
        for output in outputs:
            values, whole = output.detach(), self.logits and output[0].numel() == output.shape[-1]
            slopes = _draw_likelihoods(values, whole, generator) if self.logits else _draw_features(values, generator)
            for number, slope in enumerate(slopes):
                if shares is not None:
                    slope = slope * (shares * shares.shape[1] ** 0.5)[..., None].to(slope)
                (gradient,) = torch.autograd.grad(output, entering, slope, retain_graph=True)
                drawn.append(DrawnGradients(gradient.float(), whole, 1 / DRAWS if whole else 1.0, number))
        return drawn

    def loss_gradients(self, batch: Mapping[str, Tensor], states: Tensor) -> Tensor:
        """Return the gradients of the loss of a causal language model's own text at the last states.

        The loss of a sample is the mean over its predictions of −log p(next token). `batch` holds `input_ids` of B
        samples. States (B, T, hidden) have any floating dtype; the gradients are float32.
        """
        head = self._slice_head(batch, states)
        assert head is not None
        tokens = batch["input_ids"].to(self.factory.device)
        share = torch.full(tokens.shape, -1 / (tokens.shape[1] - 1), device=tokens.device)
        share[:, -1] = 0  # nothing comes after the last token
        return head.log_p_gradients(self._place(states), tokens.roll(-1, 1).flatten(), share.view(-1, 1))

    def divergence_gradients(self, batch: Mapping[str, Tensor], states: Tensor, reference: Sequence[Tensor]) -> Tensor:
        """Return the gradients of `divergence` at the last states, (B, T, hidden) float32, on CPU.

        `reference` is another model's `outputs` for these samples; `batch` and `states` are as in `outputs`.
        """
        entering, outputs = self._run_with_gradients(batch, states)
        slope = _divergence_slope if self.logits else _relative_error_slope
        pairs = zip(reference, outputs, strict=True)
        slopes = [slope(self._with_classes(theirs), ours.detach()) for theirs, ours in pairs]
        (values,) = torch.autograd.grad(outputs, entering, slopes)
        return values.float().cpu()

    def _place(self, states: Tensor) -> Tensor:
        return states.to(self.factory.device, self.factory.dtype)

    def _slice_head(self, batch: Mapping[str, Tensor], states: Tensor) -> SlicedHead | None:
        """Return the head if its classes can be computed a slice at a time: it is linear, and makes all the output."""
        if self.head is None:
            return None
        head = SlicedHead(self.head, partial(self._outputs, batch))
        if self._sliced is None:
            self._sliced = head.fits(self._place(states))
        return head if self._sliced else None

    def _run_with_gradients(self, batch: Mapping[str, Tensor], states: Tensor) -> tuple[Tensor, list[Tensor]]:
        entering = self._place(states).detach().requires_grad_(True)
        with torch.enable_grad():
            return entering, [self._with_classes(output) for output in self._outputs(batch, entering)]

    @property
    def model(self) -> nn.Module:
        """The model that runs, of which all that is outside the blocks may be watched."""
        model: nn.Module = self._model
        return model

    @property
    def head(self) -> nn.Linear | None:
        """The linear module that makes the logits, if there is one."""
        linear = self._model.get_output_embeddings() if self.logits else None
        return linear if isinstance(linear, nn.Linear) else None

    @torch.no_grad()
    def at_head(self, batch: Mapping[str, Tensor], states: Tensor, spacing: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `head` reads and makes, and the logits, at one of every `spacing` tokens, (tokens, …) float32."""
        assert self.head is not None
        seen: list[Tensor] = []
        # Before the product with the vocabulary, which would be made at every token.
        thin = self.head.register_forward_pre_hook(lambda _module, args: (args[0].flatten(0, -2)[None, ::spacing],))
        hook = self.head.register_forward_hook(lambda _module, args, made: seen.extend((args[0], made)))
        try:
            (logits,) = self._outputs(batch, states)
        finally:
            hook.remove()
            thin.remove()
        read, made, logits = (each.flatten(0, -2).float() for each in (*seen, logits))
        return read, made, logits

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor], states: Tensor) -> list[Tensor]:
        """Return the model's outputs for some samples whose states behind the last block are `states`.

        `batch` is what the model is called with for B samples (`Samples.batch`), and `states` are (B, T, hidden), of
        any floating dtype; both on any device. Returned are, in the factory's dtype and on its device, all outputs
        whose name ends in "logits", (B, ..., classes), or of a model without a head its last hidden states alone,
        (B, T, hidden).
        """
        return self._outputs(batch, states)

    def _outputs(self, batch: Mapping[str, Tensor], states: Tensor) -> list[Tensor]:
        factory = self.factory
        inputs = move_batch(batch, factory.device, factory.dtype)
        options = {"use_cache": False} if factory.family.reads_tokens else {}
        leaving, model = self._place(states), self._model if self.logits else base_model_of(self._model)
        flat = False

        def leave(entering: Tensor) -> Tensor:
            nonlocal flat
            if entering.dim() < 4 and len(states) == 1 and entering.shape != leaving.shape:
                flat = True  # of one image, perhaps in tiles, which has as many tokens as it needs
                return leaving[0, : entering[..., 0].numel()].view(entering.shape)
            axis = sample_axis(entering.shape, count_tokens(batch, states))
            flat = axis is None
            return leaving.flatten(0, 1) if axis is None else leaving.movedim(0, axis)

        self._recorders.leave = leave
        try:
            result = self._recorders.run(lambda: model(**inputs, **options))
        finally:
            self._recorders.leave = lambda entering: entering
        outputs = select_outputs(result, logits=self.logits)
        return [output.reshape(len(states), -1, output.shape[-1]) for output in outputs] if flat else outputs

    @torch.no_grad()
    def head_inputs(self, batch: Mapping[str, Tensor], states: Tensor) -> Tensor:
        """Return what the head's weight is multiplied with, (B, T, hidden) on CPU; arguments as in `outputs`.

        Of a part without a head these are its last hidden states, which the head of the whole reads.

        Raises:
            ValueError: the model has a head that is not linear.
        """
        if not self.logits:
            return self._outputs(batch, states)[0].cpu()
        if self.head is None:
            raise ValueError("the model has no linear head")
        seen: list[Tensor] = []

        def see(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0])
            raise _HeadReachedError

        handle = self.head.register_forward_pre_hook(see)
        try:
            with suppress(_HeadReachedError):  # the product with the vocabulary is not needed
                self._outputs(batch, states)
        finally:
            handle.remove()
        return seen[0].cpu()

    def divergence(self, reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
        """Return how far outputs are from those of a reference, summed over samples.

        A sample counts with the mean over its positions of KL(reference ‖ outputs) in nats, added up over several
        logits; a head of one number (a reranker's, ELECTRA's discriminator's) tells two classes apart. Without a head
        it counts with ‖h′ − h‖² / ‖h‖² of the last hidden states. Both arguments are as `outputs` returns them.
        """
        measure = kl_divergence if self.logits else relative_error
        pairs = zip(reference, outputs, strict=True)
        return sum(measure(self._with_classes(theirs), self._with_classes(ours)) for theirs, ours in pairs)

    def _with_classes(self, output: Tensor) -> Tensor:
        """Return logits with an axis of classes: a single number says how much likelier one of two classes is."""
        if self.logits and self.factory.family.binary:
            return as_two_classes(output)
        return as_two_classes(output.squeeze(-1)) if self.logits and output.shape[-1] == 1 else output


def select_outputs(result: Any, *, logits: bool) -> list[Tensor]:
    """Return every output of a transformers model whose name ends in "logits", or else the last hidden states alone."""
    if not logits:
        return [result.last_hidden_state]
    return [value for name, value in result.items() if name.endswith("logits")]


def allow_several_texts(model: Any, pad: int = -1) -> None:
    """Let a model read several texts at once even if its config, which is changed in place, names no padding token.

    A classifier of a causal family looks at the last token of a text that is not padding, and refuses several texts
    if it does not know which tokens are. `pad` is the padding token; -1, which is no token, for texts without padding.
    """
    config = model.config.get_text_config()
    if getattr(config, "pad_token_id", pad) is None:
        config.pad_token_id = pad


def measure_divergences(
    reference: Readout,
    states: Tensor,
    samples: Samples,
    others: Sequence[tuple[Readout, Tensor]],
    *,
    positions: int | None = None,
) -> list[float]:
    """Measure the other models' divergences from a reference, whose last block made `states`: the mean over samples.

    `others` holds the readout and the states (N, T, hidden) of each. If texts are predicted token by token, about
    `positions` of all their positions are looked at, as far apart as can be; None for all.
    """
    sums, step = [0.0] * len(others), 1
    if positions is not None and reference.factory.family.causal:
        step = max(1, len(samples) * samples.tokens // positions)
    for rows in split_batches(samples, READOUT_TOKENS * step):
        batch, of_batch = (
            samples.batch(rows),
            [own_states[rows] for own_states in (states, *(own for _, own in others))],
        )
        if step > 1:
            # Each sample begins at another position.
            starts = torch.arange(len(samples))[rows] % step
            at = starts[:, None] + step * torch.arange(samples.tokens // step)
            batch = {name: value.take_along_dim(at, 1) for name, value in batch.items()}
            axis = token_axis(states.shape, samples.tokens)
            where = at.view(len(at), *[1] * (axis - 1), -1, *[1] * (states.dim() - axis - 1))
            of_batch = [own.take_along_dim(where, axis) for own in of_batch]
        expected, scored = reference.outputs(batch, of_batch[0]), None
        if reference.factory.family.modality == "pairs":
            scored = scored_tokens(samples, rows)
        for index, (readout, _) in enumerate(others):
            outputs = readout.outputs(batch, of_batch[index + 1])
            if scored is not None:  # nothing is lost where nothing is predicted
                padding = ~scored.roll(-1, 1)[..., None].to(outputs[0].device)
                outputs = [torch.where(padding, theirs, ours) for theirs, ours in zip(expected, outputs, strict=True)]
            sums[index] += reference.divergence(expected, outputs)
    return [total / len(samples) for total in sums]


def count_tokens(batch: Mapping[str, Tensor], states: Tensor) -> int:
    """Return the tokens of a sample of states (B, T, hidden), or with several streams of them, (B, …, T, …, hidden)."""
    return batch["input_ids"].shape[1] if states.dim() > 3 and "input_ids" in batch else states.shape[1]


def as_two_classes(logits: Tensor) -> Tensor:
    """Return the logits of two classes, (..., 2), from numbers (...) that say how much likelier the second is."""
    return torch.stack((torch.zeros_like(logits), logits), -1)


def draw_labels(log_p: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` classes for each row of log-probabilities (S, classes): int64 (S, count)."""
    return torch.multinomial(log_p.exp().cpu(), count, replacement=True, generator=generator).to(log_p.device)


def _rows_of_chunk(classes: int) -> int:
    return max(1, CHUNK // classes)


def _draw_likelihoods(logits: Tensor, whole: bool, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield for each draw the gradient at logits (B, ..., classes) of Σ log p(ŷ) / √S, S predictions of each sample.

    One more tensor of that size is held, and pieces of `CHUNK` elements.
    """
    classes = logits.shape[-1]
    flat = logits.reshape(-1, classes)
    # Row by row, so that it does not matter which samples are asked for together.
    labels = [
        draw_labels(functional.log_softmax(part.float(), -1), DRAWS if whole else 1, generator)
        for part in torch.split(flat, _rows_of_chunk(classes))
    ]
    share = math.sqrt(len(logits) / len(flat))
    for draw in torch.cat(labels).unbind(1):
        yield _log_p_slope(flat, draw, share).view_as(logits)


def _log_p_slope(flat: Tensor, labels: Tensor, share: float) -> Tensor:
    """Return the gradient at logits (S, classes) of `share` Σ_s log p(label s), labels int64 (S,)."""
    rows = _rows_of_chunk(flat.shape[-1])
    gradient = torch.empty_like(flat)
    for start in range(0, len(flat), rows):
        part = functional.softmax(flat[start : start + rows].float(), -1).neg_()
        part[torch.arange(len(part), device=part.device), labels[start : start + rows]] += 1
        gradient[start : start + rows] = part.mul_(share)
    return gradient


def _divergence_slope(reference: Tensor, logits: Tensor) -> Tensor:
    """Return the gradient of `kl_divergence` at its logits, (B, ..., classes): (q − p) over a sample's positions."""
    classes = reference.shape[-1]
    p, q = reference.reshape(-1, classes), logits.reshape(-1, classes)
    rows, share = _rows_of_chunk(classes), len(logits) / len(q)
    gradient = torch.empty_like(q)
    for start in range(0, len(p), rows):
        p_, q_ = (functional.softmax(part[start : start + rows].float(), -1) for part in (p, q))
        gradient[start : start + rows] = q_.sub_(p_).mul_(share)
    return gradient.view_as(logits)


def _relative_error_slope(reference: Tensor, states: Tensor) -> Tensor:
    """Return the gradient of `relative_error` at its states, (B, T, hidden): 2 (h′ − h) / ‖h‖²."""
    wide = reference.float().flatten(1)
    lost = states.float().flatten(1) - wide
    gradient: Tensor = 2 * lost / wide.square().sum(1, keepdim=True)
    return gradient.view(states.shape).to(states.dtype)


def _draw_features(states: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the gradient of √2 Σ vᵀh / ‖h‖ over samples, ‖h‖ held fixed, at states (B, T, hidden)."""
    wide = states.float().flatten(1)
    drawn = torch.randn(wide.shape, generator=generator).to(wide.device)
    gradient: Tensor = drawn / wide.norm(dim=1, keepdim=True) * math.sqrt(2)
    yield gradient.view(states.shape).to(states.dtype)


def kl_divergence(reference: Tensor, logits: Tensor) -> float:
    """Return the mean over a sample's positions of KL(reference ‖ model) in nats, summed over samples.

    Summed as Σ (q − p − p log(q / p)), whose terms are never negative, and which is KL since p and q add up to one.
    Rounding of the logarithms only enters its terms squared; it would swamp a small Σ p log(p / q). The log-softmax is
    taken in float32, sums in float64. Both logits are (B, ..., classes), of any floating dtype.
    """
    samples, classes = reference.shape[0], reference.shape[-1]
    p, q = reference.reshape(-1, classes), logits.reshape(-1, classes)
    rows, total = _rows_of_chunk(classes), 0.0
    for start in range(0, len(p), rows):
        log_p, log_q = (functional.log_softmax(part[start : start + rows].float(), -1) for part in (p, q))
        ratio = log_q - log_p
        # The first form keeps its digits near 0, the second does not overflow.
        near, far = log_p.exp() * (ratio.expm1() - ratio), log_q.exp() - log_p.exp() * (1 + ratio)
        total += float(torch.where(ratio < 1, near, far).sum(dtype=torch.float64).clamp_min(0))
    return total / (len(p) / samples)


def relative_error(reference: Tensor, states: Tensor) -> float:
    """Return ‖h′ − h‖² / ‖h‖² of each sample, summed over samples, in float64; h and h′ are (B, T, hidden)."""
    wide = reference.double().flatten(1)
    lost = (states.double().flatten(1) - wide).square().sum(1)
    return float((lost / wide.square().sum(1)).sum())
