"""What a model makes of the hidden states that leave its last block, and how far two such outputs are apart."""

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_prune.architectures.skeleton import absent_pooler, base_of, is_stored_buffer
from ckpt_prune.measure.samples.samples import Samples, move_batch, split_batches
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.modules import ReadTensors, give_buffers

CHUNK = 2**20
"""Logits that are compared at once: 4 MiB in each of a few float32 tensors, which stay in a cache."""


READOUT_TOKENS = 512
"""Tokens whose outputs are held together: the vocabulary is what makes these large."""
DRAWS = 8
"""Draws of labels where a sample has one prediction: that of a text has hundreds, which are drawn apart."""


@dataclass(frozen=True)
class DrawnGradients:
    """Gradients of one draw of labels for one output, at the states that leave a block.

    Attributes:
        values: (B, T, hidden) float32.
        whole: whether a sample has one prediction, which errors of all its tokens move together; else every token's
            error is taken to move the predictions apart from the others'.
        weight: of this draw among those of its output.
    """

    values: Tensor
    whole: bool
    weight: float

    def moved(self, gradient: Tensor, error: Tensor) -> float:
        """Σ over samples of (g·δ)², weighted: over all tokens of a sample where it has one prediction, else by token.

        Args:
            gradient: `values` of some samples, (B, T, hidden), where `error` is.
            error: δ of the same samples.
        """
        found = (gradient * error).sum(-1).double()
        found = found.sum(-1) if self.whole else found
        return self.weight * float(found.square().sum())


class Readout:
    """The model's own forward pass, with given hidden states in place of what its blocks would make.

    Every head is thus the model's own: its final norm, pooler, projections, and weights tied as it ties them. Memory,
    on the factory's device: everything outside the blocks, for as long as this lives, and the outputs of the samples
    that are asked for together (of a causal language model tokens x vocabulary).

    Args:
        factory: of the model's blocks; its skeleton is copied, not changed.
        tensors: on-disk names of the checkpoint.
        read: reads on-disk tensors by name; asked for those outside the blocks only.

    Attributes:
        logits: whether what the model is for is read from logits, or else from its last hidden states.

    Raises:
        ValueError: a parameter outside the blocks has no tensor.
    """

    def __init__(self, factory: BlockFactory, tensors: Iterable[str], read: ReadTensors) -> None:
        self.factory = factory
        self.logits = factory.family.gives_logits
        layers: Any = factory.skeleton.get_submodule(factory.family.layers)
        # Blocks do not run here: what is inside them is not copied.
        hollow = {id(layer): _hollow(layer) for layer in layers}
        self._model: Any = copy.deepcopy(factory.skeleton, dict(hollow)).to("meta")
        if factory.family.modality == "text":
            allow_several_texts(self._model)
        self._binary = factory.family.binary
        self._states: Tensor | None = None
        self._fill(tensors, read)
        give_buffers(factory, self._model, self._outside)
        for index, layer in enumerate(hollow.values()):
            layer.forward = self._stand_in(last=index == len(layers) - 1)

    def gradients(self, batch: Mapping[str, Tensor], states: Tensor, generator: torch.Generator) -> list["Drawn"]:
        """Gradients, at the last block's states, of what labels drawn from the model's own predictions cost it.

        With ℓ = Σ_s log p(ŷ_s) / √S over a sample's S predictions, ŷ_s drawn from p, an error δ of the states moves
        them by KL ≈ ½ E[(∂ℓ·δ)²], the mean over predictions (measure/README.md, section 5). Without a head
        ℓ = √2 vᵀh / ‖h‖, v ~ N(0, I), which gives ‖δh‖² / ‖h‖² in place of KL.

        Args:
            batch: what the model is called with for B samples (`Samples.batch`), on any device.
            states: (B, T, hidden), any floating dtype, on any device.
            generator: of the draws, on CPU.

        Returns:
            For every output, in the model's order, one draw where a sample has many predictions, `DRAWS` where it has
            one.
        """
        entering = states.to(self.factory.device, self.factory.dtype).detach().requires_grad_(True)
        with torch.enable_grad():
            outputs = [self._classes(output) for output in self._outputs(batch, entering)]
        found = []
        for output in outputs:
            seen, whole = output.detach(), self.logits and output[0].numel() == output.shape[-1]
            draws = _of_labels(seen, whole, generator) if self.logits else iter([_of_features(seen, generator)])
            for own in draws:
                (values,) = torch.autograd.grad(output, entering, own, retain_graph=True)
                found.append(DrawnGradients(values.float(), whole, 1 / DRAWS if whole else 1.0))
        return found

    def loss_gradients(self, batch: Mapping[str, Tensor], states: Tensor) -> Tensor:
        """Gradients, at the last block's states, of the loss of a causal language model's own text.

        The loss of a sample is the mean over its predictions of −log p(next token).

        Args:
            batch: `input_ids` of B samples.
            states: (B, T, hidden), any floating dtype, on any device.

        Returns:
            (B, T, hidden) float32.
        """
        entering = states.to(self.factory.device, self.factory.dtype).detach().requires_grad_(True)
        with torch.enable_grad():
            (logits,) = self._outputs(batch, entering)
        tokens = batch["input_ids"].to(logits.device)
        share = -1 / (tokens.shape[1] - 1)
        own = _of_log_p(logits.detach().flatten(0, 1), tokens.roll(-1, 1).flatten(), share).view_as(logits)
        own[:, -1] = 0  # nothing comes after the last token
        (values,) = torch.autograd.grad(logits, entering, own)
        return values.float()

    def divergence_gradients(self, batch: Mapping[str, Tensor], states: Tensor, reference: Sequence[Tensor]) -> Tensor:
        """Gradients of `divergence` at the last block's states.

        Args:
            batch: what the model is called with for B samples (`Samples.batch`), on any device.
            states: (B, T, hidden), any floating dtype, on any device.
            reference: what another model makes of these samples, as `outputs` returns it.

        Returns:
            (B, T, hidden) float32, on CPU.
        """
        entering = states.to(self.factory.device, self.factory.dtype).detach().requires_grad_(True)
        with torch.enable_grad():
            outputs = [self._classes(output) for output in self._outputs(batch, entering)]
        slope = _of_divergence if self.logits else _of_relative_error
        own = [slope(self._classes(theirs), ours.detach()) for theirs, ours in zip(reference, outputs, strict=True)]
        (values,) = torch.autograd.grad(outputs, entering, own)
        return values.float().cpu()

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor], states: Tensor) -> list[Tensor]:
        """What the model returns for some samples when its last block makes `states` of them.

        Args:
            batch: what the model is called with for B samples (`Samples.batch`), on any device.
            states: (B, T, hidden), any floating dtype, on any device.

        Returns:
            Every output whose name ends in "logits", in the model's order, (B, ..., classes); of a model without a
            head its last hidden states alone, (B, T, hidden). In the factory's dtype, on its device.
        """
        return self._outputs(batch, states)

    def _outputs(self, batch: Mapping[str, Tensor], states: Tensor) -> list[Tensor]:
        factory = self.factory
        inputs = move_batch(batch, factory.device, factory.dtype)
        options = {"use_cache": False} if factory.family.modality == "text" else {}
        given, flat = states.to(factory.device, factory.dtype), factory.family.flat
        self._states = given.flatten(0, 1) if flat else given
        found = (self._model if self.logits else base_of(self._model))(**inputs, **options)
        self._states = None
        outputs = select_outputs(found, logits=self.logits)
        return [each.view(len(states), -1, *each.shape[1:]) for each in outputs] if flat else outputs

    def divergence(self, reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
        """How far outputs are from those of the reference, summed over samples.

        A sample counts with the mean over its positions of KL(reference ‖ outputs) in nats, added up over several
        logits; a head of one number (a reranker's, ELECTRA's discriminator's) tells two classes apart. Without a head
        it counts with ‖h′ − h‖² / ‖h‖² of the last hidden states.

        Args:
            reference: as `outputs` returns them.
            outputs: the same of other states of the same samples.
        """
        measure = kl_divergence if self.logits else relative_error
        pairs = zip(reference, outputs, strict=True)
        return sum(measure(self._classes(theirs), self._classes(ours)) for theirs, ours in pairs)

    def _classes(self, output: Tensor) -> Tensor:
        """Logits with an axis of classes: where they are single numbers, each is how much likelier one of two is."""
        if self.logits and self._binary:
            return as_two_classes(output)
        return as_two_classes(output.squeeze(-1)) if self.logits and output.shape[-1] == 1 else output

    def _outside(self, name: str) -> bool:
        """Whether a module or parameter of the model is outside its blocks."""
        layers = self.factory.family.layers
        return name != layers and not name.startswith(f"{layers}.")

    def _fill(self, tensors: Iterable[str], read: ReadTensors) -> None:
        factory, model = self.factory, self._model
        held = {name: factory.find_parameters(name) for name in tensors if not is_stored_buffer(name)}
        held = {name: own for name, own in held.items() if own and self._outside(own[0])}
        found = read(list(held))
        for name, own in held.items():
            for parameter, part in zip(own, found[name].chunk(len(own)), strict=True):
                place, _, attribute = parameter.rpartition(".")
                value = nn.Parameter(part.to(factory.device, factory.dtype), requires_grad=False)
                model.get_submodule(place).register_parameter(attribute, value)
        # As stock loading ties them: a head that is stored under either name, or under both and differs, is respected.
        missing = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.is_meta}
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
        if absent_pooler(model, missing):
            model.pooler = None
        for name, parameter in model.named_parameters():
            if parameter.is_meta and self._outside(name):
                raise ValueError(f"no tensor for {name}")

    def _stand_in(self, *, last: bool) -> Callable[..., Any]:
        """What runs in place of a block's own forward."""
        several = self.factory.returns_tuple
        # The model holds this function: if that held this readout, both and the embedding would stay when they are done
        # with, until Python's collector comes by.
        reading = weakref.ref(self)

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            own = reading()
            assert own is not None
            states = own._states if last else hidden_states
            return (states, None) if several else states

        return forward


def select_outputs(found: Any, *, logits: bool) -> list[Tensor]:
    """What counts of what a model of transformers returns.

    Args:
        found: as its forward pass returns it.
        logits: every output whose name ends so, in the model's order, or else the last hidden states alone.
    """
    if not logits:
        return [found.last_hidden_state]
    return [value for name, value in found.items() if name.endswith("logits")]


def allow_several_texts(model: Any, pad: int = -1) -> None:
    """Let a model read several texts at once though its config names no padding token.

    A classifier of a causal family looks at the last token of a text that is not padding, and refuses several texts
    where it does not know which tokens are.

    Args:
        model: of transformers; its config is changed in place.
        pad: the padding token; -1 for texts without padding, which is no token.
    """
    config = model.config.get_text_config()
    if getattr(config, "pad_token_id", pad) is None:
        config.pad_token_id = pad


def measure_divergences(
    reference: Readout, states: Tensor, samples: Samples, others: Sequence[tuple[Readout, Tensor]]
) -> list[float]:
    """Mean over samples of each one's divergence from the reference.

    Args:
        reference: of the model that the others are held against.
        states: that leave its last block, (N, T, hidden).
        samples: that these are of.
        others: the same of others.
    """
    sums = [0.0] * len(others)
    for rows in split_batches(samples, READOUT_TOKENS):
        batch = samples.batch(rows)
        expected = reference.outputs(batch, states[rows])
        for index, (readout, own) in enumerate(others):
            sums[index] += reference.divergence(expected, readout.outputs(batch, own[rows]))
    return [each / len(samples) for each in sums]


def _hollow(layer: nn.Module) -> Any:
    """A module without the modules, parameters and buffers that it has."""
    shell = copy.copy(layer)
    shell._modules, shell._parameters, shell._buffers = {}, {}, {}
    return shell


def as_two_classes(logits: Tensor) -> Tensor:
    """The logits of two classes, (..., 2), of those that say how much likelier the second is, (...)."""
    return torch.stack((torch.zeros_like(logits), logits), -1)


def draw_labels(log_p: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Classes for each row of log-probabilities (S, classes), drawn by them, int64 (S, count)."""
    return torch.multinomial(log_p.exp().cpu(), count, replacement=True, generator=generator).to(log_p.device)


def _of_labels(logits: Tensor, whole: bool, generator: torch.Generator) -> Iterator[Tensor]:
    """For each draw the gradient at logits (B, ..., classes) of Σ log p(ŷ) / √S, S predictions of each sample.

    One more tensor of that size is held, and pieces of `CHUNK` elements.
    """
    classes = logits.shape[-1]
    flat = logits.reshape(-1, classes)
    rows = max(1, CHUNK // classes)
    # Row by row, so that it does not matter which samples are asked for together.
    parts = [
        draw_labels(functional.log_softmax(part.float(), -1), DRAWS if whole else 1, generator)
        for part in torch.split(flat, rows)
    ]
    share = math.sqrt(len(logits) / len(flat))
    for drawn in torch.cat(parts).unbind(1):
        yield _of_log_p(flat, drawn, share).view_as(logits)


def _of_log_p(flat: Tensor, labels: Tensor, share: float) -> Tensor:
    """The gradient at logits (S, classes) of `share` Σ_s log p(label s), labels int64 (S,)."""
    rows = max(1, CHUNK // flat.shape[-1])
    gradient = torch.empty_like(flat)
    for start in range(0, len(flat), rows):
        own = functional.softmax(flat[start : start + rows].float(), -1).neg_()
        own[torch.arange(len(own), device=own.device), labels[start : start + rows]] += 1
        gradient[start : start + rows] = own.mul_(share)
    return gradient


def _of_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """The gradient of `kl_divergence` at its logits, (B, ..., classes): (q − p) over the positions of a sample."""
    classes = reference.shape[-1]
    p, q = reference.reshape(-1, classes), logits.reshape(-1, classes)
    rows, share = max(1, CHUNK // classes), len(logits) / len(q)
    gradient = torch.empty_like(q)
    for start in range(0, len(p), rows):
        p_, q_ = (functional.softmax(each[start : start + rows].float(), -1) for each in (p, q))
        gradient[start : start + rows] = q_.sub_(p_).mul_(share)
    return gradient.view_as(logits)


def _of_relative_error(reference: Tensor, states: Tensor) -> Tensor:
    """The gradient of `relative_error` at its states, (B, T, hidden): 2 (h′ − h) / ‖h‖²."""
    wide = reference.float().flatten(1)
    lost = states.float().flatten(1) - wide
    gradient: Tensor = 2 * lost / wide.square().sum(1, keepdim=True)
    return gradient.view(states.shape).to(states.dtype)


def _of_features(states: Tensor, generator: torch.Generator) -> Tensor:
    """The gradient of √2 Σ vᵀh / ‖h‖ over samples, ‖h‖ held fixed, at states (B, T, hidden)."""
    wide = states.float().flatten(1)
    drawn = torch.randn(wide.shape, generator=generator).to(wide.device)
    gradient: Tensor = drawn / wide.norm(dim=1, keepdim=True) * math.sqrt(2)
    return gradient.view(states.shape).to(states.dtype)


def kl_divergence(reference: Tensor, logits: Tensor) -> float:
    """Mean over a sample's positions of KL(reference ‖ model) in nats, summed over samples.

    Summed as Σ (q − p − p log(q / p)), whose terms are never negative, and which is KL since p and q add up to one.
    Rounding of the logarithms only enters its terms squared, where it would swamp a small Σ p log(p / q). The
    log-softmax is taken in float32, sums in float64.

    Args:
        reference: logits (B, ..., classes), any floating dtype.
        logits: of the model, of the same shape.
    """
    samples, classes = reference.shape[0], reference.shape[-1]
    p, q = reference.reshape(-1, classes), logits.reshape(-1, classes)
    rows, total = max(1, CHUNK // classes), 0.0
    for start in range(0, len(p), rows):
        log_p, log_q = (functional.log_softmax(each[start : start + rows].float(), -1) for each in (p, q))
        ratio = log_q - log_p
        # The first form keeps its digits near 0, the second does not overflow.
        near, far = log_p.exp() * (ratio.expm1() - ratio), log_q.exp() - log_p.exp() * (1 + ratio)
        total += float(torch.where(ratio < 1, near, far).sum(dtype=torch.float64).clamp_min(0))
    return total / (len(p) / samples)


def relative_error(reference: Tensor, states: Tensor) -> float:
    """‖h′ − h‖² / ‖h‖² of each sample, summed over samples, in float64.

    Args:
        reference: h, (B, T, hidden), any floating dtype.
        states: h′, of the same shape.
    """
    wide = reference.double().flatten(1)
    lost = (states.double().flatten(1) - wide).square().sum(1)
    return float((lost / wide.square().sum(1)).sum())
