"""Predict how much rounding each matrix of a model adds to the divergence of its output, by type.

Let y = W x be the output of a matrix at a token, g the gradient there of the log-likelihood of labels drawn from the
model's own predictions (`measure.statistics.fisher`), and D = Ŵ − W what rounding changes. To second order

    KL ≈ ½ E[(Σ_t g_t · D x_t)²] ≈ ½ E[Σ_o (Σ_t g_to D_o · x_t)²],

since errors of different rows are rounded apart from each other. So a few rows of a matrix, drawn at random, tell of
all. Errors of a row at different tokens have what the tokens have in common, and attention adds them up. Gradient and
input are those of the same token: the few tokens with huge states have tiny gradients. Divergences of all matrices add
up. A runtime that rounds what a matrix reads adds W (x̂ − x) in place of D x.

A matrix of an expert has the tokens alone that the router sends it. Where its input or output bears the router's weight
(`measure.streams.experts`), so does the gradient, and the sum is the same. What routers choose otherwise has no
gradient, and is measured (`measure_rerouting`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.checkpoint.block_thread import read_ahead
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import Samples, split_batches
from ckpt_prune.measure.streams.backward import BackwardBatch, draw_end_gradients, pass_back, states_at_ends
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream
from ckpt_prune.measure.streams.readout import READOUT_TOKENS, DrawnGradients
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.model import Model

ROWS = 128
"""Rows of a matrix that are rounded. The matrices of all experts of a block share them."""
LEAST_ROWS = 4
"""Rows of a matrix of an expert that are rounded at least."""
HEAD_ROWS = 4096
"""Classes of a head that are rounded: so many of the likeliest, and as many of the others."""
EMBEDDED = 2
"""Samples that are run with each type of the embedding that is not plain, if any is, and with one that is."""
HEAD_TOKENS = 256
"""Tokens at which the head's predictions are looked at."""
FED = " by error feedback"
"""Ends the name of a type that is rounded so."""

RoundRows = Callable[[str, Tensor], Mapping[str, Tensor]]
"""On-disk name of a weight, and some of its rows, (n, d_in) float32 → name of a type → the same rows, rounded."""
RoundInputs = Mapping[str, Callable[[Tensor], Tensor]]
"""Name of a way → inputs of a matrix, (…, d_in) float32 → the same, rounded as a runtime does before it multiplies."""
Losses = dict[str, dict[str, float]]
"""On-disk name of a weight → name of a type → divergence that it adds, in nats a prediction."""
Noise = dict[str, tuple[str, Tensor]]
"""On-disk name of a weight of a block → one of its types, and how that changes some of its rows, (n, d_in) float32."""


def predict_losses(
    model: Model,
    samples: Samples,
    round_rows: RoundRows,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
    round_inputs: RoundInputs | None = None,
    outside: bool = True,
    noise: Noise | None = None,
) -> Losses:
    """Predict what rounding adds, for all linear modules of the blocks, the embedding and the head.

    Time: as for the Fisher metric with one draw of labels (three runs of every block and their gradients), and for
    every type `ROWS` rows of every matrix rounded. Memory: a block with its activations, everything outside the blocks,
    and hidden states at the end of every block.

    Args:
        model: one that reads tokens. If it has no head, losses are shares of its last hidden states' energy, not nats.
        samples: a few; all of them are run.
        round_rows: rounds rows to every type that is in question for a weight; no type leaves a weight out. Names of
            types end in `FED` that do not round every row by itself, so that errors have something in common.
        round_inputs: ways to round what matrices of the blocks read; the result has a loss for each.
        outside: whether the embedding and the head are rounded, too.
        noise: gets the change of each weight of the blocks by a type that is neither fine nor coarse.
    """
    few = [min(EMBEDDED, len(samples))]
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate, sizes=few)
    states = states_at_ends(model, stream, allocate)
    losses: Losses = {}
    if outside:
        _add(losses, _head_losses(stream, model, samples, states[-1], round_rows))
    end = states[-1][: few[0]]
    gradients = draw_end_gradients(stream.readout(), samples, states.pop(), allocate)
    backward = read_ahead(model.read_block, range(model.blocks - 1, -1, -1))
    ways, kept = round_inputs or {}, {} if noise is None else noise
    for block, tensors in track(backward, "what rounding costs", total=model.blocks):
        module = stream.factory.build_block(block, tensors).requires_grad_(False)
        _add(losses, _block_losses(stream, module, block, tensors, states.pop(), gradients, round_rows, ways, kept))
    if outside:
        _add(losses, _embedding_losses(stream, model, samples, end, gradients, round_rows))
    return losses


@torch.no_grad()
def measure_rerouting(
    model: Model,
    samples: Samples,
    losses: Losses,
    noise: Noise,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
) -> float:
    """Return c of what a mixture of experts loses where K is predicted without changes of its routing: K + c √K.

    A router chooses otherwise where two experts nearly tie: about as often as errors there are large, and what the
    model then loses does not depend on how large they are. K grows with their squares. So that is measured once, with
    all rows of the blocks changed as some were in `noise`, in random places and with random signs.

    Args:
        losses, noise: of the model, by `predict_losses` on these samples.

    Returns:
        0 of models without experts.
    """
    if model.family.experts is None:
        return 0.0
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate)
    generator, states = torch.Generator().manual_seed(0), stream.states.clone()
    for block, tensors in track(read_ahead(model.read_block, range(model.blocks)), "routing", total=model.blocks):
        module = stream.factory.build_block(block, tensors)
        stream.states = stream.pass_through(module, block, stream.states, stream.states)
        for name in filter(noise.__contains__, tensors):
            weight, (_, change) = module.get_parameter(stream.factory.find_paths(block, name)[0]), noise[name]
            drawn = torch.randint(len(change), (len(weight),), generator=generator)
            signs = torch.randint(2, (len(weight), 1), generator=generator) * 2 - 1
            weight.add_((change[drawn] * signs).to(weight))
        states = stream.pass_through(module, block, states, states)
    readout, lost = stream.readout(), 0.0
    for rows in split_batches(samples, READOUT_TOKENS):
        dense, other = (readout.outputs(samples.batch(rows), each[rows]) for each in (stream.states, states))
        lost += readout.divergence(dense, other)
    predicted = sum(losses[name][kind] for name, (kind, _) in noise.items())
    more = max(0.0, lost / len(samples) - predicted)
    return more / math.sqrt(predicted) if predicted > 0 else 0.0


def _is_plain(name: str) -> bool:
    return not name.endswith(FED)


def left_by_feedback(model: Model, losses: Losses) -> Losses:
    """Return for every weight and type the share of the loss that error feedback leaves, 1 at most.

    A weight that it was tried on keeps its own share. Others take the mean share of weights in the same place of their
    blocks, of all experts. All of these count alike, since otherwise a block that loses far more would speak for all.
    In q3_k in down of SmolLM2-135M block 11 loses ten times as much. Of that 0.12 is left, where others keep 0.75 and
    more.
    """
    family = model.family
    places: dict[str, list[str]] = {}
    for linear in family.linears:
        _, place = family.expert_modules.get(linear, (None, linear))
        places.setdefault(place, []).extend(family.tensor(block, linear) for block in range(model.blocks))
    shares: Losses = {}
    for names in (*places.values(), [name_of_head(model)]):
        by_weight = {name: _left_of(losses.get(name, {})) for name in names}
        by_kind: dict[str, list[float]] = {}
        for of_kinds in by_weight.values():
            for kind, share in of_kinds.items():
                by_kind.setdefault(kind, []).append(share)
        mean = {kind: sum(several) / len(several) for kind, several in by_kind.items()}
        shares |= {name: mean | of_kinds for name, of_kinds in by_weight.items()}
    return shares


def _left_of(losses: Mapping[str, float]) -> dict[str, float]:
    """Return the share of the loss of each type that error feedback leaves of a weight that it was tried on."""
    both = {kind: (losses[kind], losses.get(kind + FED)) for kind in losses}
    return {kind: min(1.0, fed / plain) for kind, (plain, fed) in both.items() if fed is not None and plain}


def _add(losses: Losses, more: Losses) -> None:
    """Add what several places lose by one weight, such as an embedding that is the head, too."""
    for name, by_type in more.items():
        loss_of = losses.setdefault(name, {})
        for kind, value in by_type.items():
            loss_of[kind] = loss_of.get(kind, 0.0) + value


def _block_losses(
    stream: HiddenStream,
    module: Any,
    block: int,
    tensors: Mapping[str, Tensor],
    entering: Tensor,
    gradients: Sequence[DrawnGradients],
    round_rows: RoundRows,
    round_inputs: RoundInputs,
    noise: Noise,
) -> Losses:
    factory = stream.factory
    family = factory.family
    names = {family.tensor(block, linear): linear for linear in family.linears}
    paths = {name: factory.module_path(block, linear) for name, linear in names.items() if name in tensors}
    experts = factory.find_experts(module)
    numbers = {path: factory.find_expert(names[name]) for name, path in paths.items()}
    generator = torch.Generator().manual_seed(block)
    drawn_rows: dict[str, Tensor] = {}
    errors: dict[str, _Errors] = {}
    for name, path in paths.items():
        weight = module.get_submodule(path).weight
        most = ROWS if experts is None or numbers[path] is None else max(LEAST_ROWS, ROWS // len(experts))
        rows = drawn_rows[name] = torch.randperm(weight.shape[0], generator=generator)[:most]
        some = weight[rows.to(weight.device)].float()
        kinds, change = _changes(name, some, round_rows)
        errors[name] = _Errors([*kinds, *round_inputs], change, some, list(round_inputs.values()))
        plain = sorted(filter(_is_plain, kinds), key=lambda kind: float(change[kinds.index(kind)].square().sum()))
        middle = plain[len(plain) // 2]
        noise[name] = middle, change[kinds.index(middle)].cpu()
    sums = {name: torch.zeros(len(own.names), dtype=torch.float64) for name, own in errors.items()}
    values = [drawn.values for drawn in gradients]
    for batch in pass_back(stream, module, block, entering, values, paths.values()):
        for name, path in paths.items():
            if path in batch.gradients:
                rows, number = drawn_rows[name], numbers[path]
                routed = None if experts is None or number is None else experts.routed[number] // entering.shape[1]
                moved = _squares(batch, path, rows, errors[name], gradients[batch.index], routed)
                sums[name] += moved * (module.get_submodule(path).weight.shape[0] / len(rows))
    scale = 0.5 / len(stream.samples)
    return {name: dict(zip(own.names, (sums[name] * scale).tolist(), strict=True)) for name, own in errors.items()}


@dataclass(frozen=True)
class _Errors:
    """Errors of some of a matrix's outputs, by each type and by each way to round inputs.

    Attributes:
        names: of the types, and then of the ways to round inputs.
        change: of the rows by each type, (types, n, d_in) float32.
        rows: themselves, (n, d_in) float32.
        round_inputs: the ways.
    """

    names: list[str]
    change: Tensor
    rows: Tensor
    round_inputs: Sequence[Callable[[Tensor], Tensor]]

    def squares(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        """Return Σ_o (Σ_t g_to δ_to)² of one sample for each name, which moves its outputs by δ, (names,) float64.

        A type moves outputs x_t by Δ x_t, so that Σ_t g_to δ_to is row o of Gᵀ X times row o of Δ: tokens are added up
        once for all types.

        Args:
            inputs: (T, d_in) float32.
            gradient: at the outputs that the rows give, (T, n) float32.
        """
        moved = torch.einsum("kod,od->ko", self.change, gradient.T @ inputs)
        others = [(self.rows * (gradient.T @ (rounded(inputs) - inputs))).sum(1) for rounded in self.round_inputs]
        return torch.cat([moved, *(each[None] for each in others)]).square_().sum(1).double()


def _changes(name: str, rows: Tensor, round_rows: RoundRows) -> tuple[list[str], Tensor]:
    """Return the types of a weight, and how each changes its rows, (types, n, d_in) float32."""
    rounded = round_rows(name, rows.cpu())
    return list(rounded), torch.stack([each.to(rows) - rows for each in rounded.values()])


def _squares(
    batch: BackwardBatch, path: str, rows: Tensor, errors: _Errors, drawn: DrawnGradients, routed: Tensor | None
) -> Tensor:
    """Return Σ (Σ_t g_to δ_to)² over samples and rows o for everything that moves outputs, (names,) float64.

    Args:
        routed: sample of each token of an expert, ascending; None: the module has all tokens of each sample.
    """
    total = torch.zeros(len(errors.names), dtype=torch.float64)
    inputs, gradient = batch.inputs[path].float(), batch.gradients[path][..., rows].float()
    # Some modules read the tokens of all samples behind each other.
    inputs, gradient = inputs.flatten(0, -2), gradient.flatten(0, -2)
    if routed is None:
        routed = torch.arange(batch.samples).repeat_interleave(len(inputs) // batch.samples)
    sizes = torch.bincount(routed, minlength=batch.samples).tolist()
    for x, g in zip(torch.split(inputs, sizes), torch.split(gradient, sizes), strict=True):
        if len(x):  # an expert may have no token of a sample
            total += errors.squares(x, g).cpu()
    return drawn.weight * total


# ---- outside the blocks ----------------------------------------------------------------------------------------------


@torch.no_grad()
def _embedding_losses(
    stream: HiddenStream,
    model: Model,
    samples: Samples,
    leaving: Tensor,
    gradients: Sequence[DrawnGradients],
    round_rows: RoundRows,
) -> Losses:
    """Predict what rounding the rows of the tokens that are read does.

    Gradients at the first block tell it of plain types, on all samples. What other types lose beside the coarsest of
    these is measured: a few samples go through the blocks with each. Their errors have much in common, which gradients
    of single tokens do not tell (Gemma 3 270M, iq4_nl, alone: to nearest 0.104 nats and 0.096 by gradients, by error
    feedback 0.073 and 0.12).
    """
    name = model.family.embedding_weight
    if name not in model.checkpoint.tensors:
        return {}
    used, places = torch.unique(samples.batch(slice(0, len(samples)))["input_ids"], return_inverse=True)
    weight = model.checkpoint.read([name])[name][used].float()
    kinds, change = _changes(name, weight, round_rows)
    # Some models multiply the embedding before the first block.
    entering, own = stream.states.float(), weight[places]
    change = change * float((entering * own).sum() / own.square().sum())
    squares = [sum(_squares_of_tokens(drawn, each, places) for drawn in gradients) for each in change]
    losses = {kind: total / 2 / len(samples) for kind, total in zip(kinds, squares, strict=True)}
    if not all(map(_is_plain, kinds)):
        few = slice(0, len(leaving))
        coarsest = max(filter(_is_plain, kinds), key=lambda kind: losses[kind])
        tried = [kind for kind in kinds if kind == coarsest or not _is_plain(kind)]
        shifts = [change[kinds.index(kind)][places[few]] for kind in tried]
        measured = dict(zip(tried, _measure_shifts(stream, model, samples, leaving, shifts), strict=True))
        level = losses[coarsest] / measured.pop(coarsest)
        losses |= {kind: level * value for kind, value in measured.items()}
    return {name: losses}


def _squares_of_tokens(drawn: DrawnGradients, change: Tensor, places: Tensor) -> float:
    """Return Σ (Σ_t g_t · δ_t)² over samples and tokens of the vocabulary, whose rows are rounded apart.

    Args:
        change: of the rows that occur, (rows, hidden).
        places: row of every token, (N, T).
    """
    shift = (drawn.values * change[places]).sum(-1).double()
    by_row = shift.new_zeros(len(shift), len(change)).scatter_add_(1, places, shift)
    return drawn.weight * float(by_row.square().sum())


def _measure_shifts(
    stream: HiddenStream, model: Model, samples: Samples, leaving: Tensor, shifts: Sequence[Tensor]
) -> list[float]:
    """Return the divergence of the first samples with each shift of what enters the first block, in nats a token."""
    rows = slice(0, len(leaving))
    states = [(stream.states[rows].float() + shift).to(stream.states) for shift in shifts]
    for block, tensors in read_ahead(model.read_block, range(model.blocks)):
        module = stream.factory.build_block(block, tensors)
        states = [stream.run(module, block, own, rows).cpu() for own in states]
    batch, readout = samples.batch(rows), stream.readout()
    spacing = max(1, leaving[..., 0].numel() // HEAD_TOKENS)

    dense, *others = (readout.at_head(batch, each, spacing)[2].log_softmax(-1) for each in (leaving, *states))
    how: dict[str, Any] = {"reduction": "batchmean", "log_target": True}
    return [float(functional.kl_div(each, dense, **how)) for each in others]


def name_of_head(model: Model) -> str:
    """Return the on-disk name of the head's weight, which may be the embedding."""
    head = f"{model.family.head}.weight"
    return head if head in model.checkpoint.tensors else model.family.embedding_weight


@torch.no_grad()
def _head_losses(
    stream: HiddenStream, model: Model, samples: Samples, leaving: Tensor, round_rows: RoundRows
) -> Losses:
    """Predict what rounding the head does: half the variance that its errors give the logits, under the predictions."""
    readout = stream.readout()
    linear = readout.head
    name = name_of_head(model)
    if linear is None or name not in model.checkpoint.tensors:
        return {}
    spacing = max(1, len(samples) * samples.tokens // HEAD_TOKENS)
    inputs, chances, factors = [], [], []
    for rows in split_batches(samples, READOUT_TOKENS):
        x, made, logits = readout.at_head(samples.batch(rows), leaving[rows], spacing)
        inputs.append(x)
        chances.append(logits.softmax(-1))
        factors.append(float((logits * made).sum() / made.square().sum()))
    x, p = torch.cat(inputs), torch.cat(chances)
    chosen, weights = _choose_classes(p.sum(0))
    kinds, change = _changes(name, linear.weight[chosen].float(), round_rows)
    own, likeliest, factor = p[:, chosen], weights == 1, sum(factors) / len(factors)
    losses = {}
    for kind, each in zip(kinds, change, strict=True):
        moved = (x @ each.T) * factor
        mean = (own * moved)[:, likeliest].sum(1)
        square = (own * weights * moved.square()).sum(1)
        losses[kind] = float((square - mean.square()).clamp_min(0).double().mean()) / 2
    return {name: losses}


def _choose_classes(mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest classes and some of the others, int64, and how many each of them stands for."""
    order = mass.argsort(descending=True)
    first, others = order[:HEAD_ROWS], order[HEAD_ROWS:]
    drawn = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[:HEAD_ROWS].to(mass.device)]
    share = len(others) / max(1, len(drawn))
    weights = torch.cat([torch.ones(len(first)), torch.full((len(drawn),), share)])
    return torch.cat([first, drawn]), weights.to(mass)
