"""Any block of a stock class runs alone with what a recorder in its place was passed, and odd models are refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.streams.recorders import HandedArguments, Recorders, sample_axis, token_axis
from ckpt_prune.measure.streams.state_memory import allocate_in_memory
from tests.pairs import every
from tests.refusals import refusal
from tests.undescribed import CONFIGS, blocks_of, make_model

TOKENS = torch.randint(3, 64, (5, 6), generator=torch.Generator().manual_seed(1))
BATCHES = (slice(0, 2), slice(2, 4), slice(4, 5))


def record(
    model: Any, layers: Any, inputs: Tensor, shares: bool = False, batches: Sequence[slice] = BATCHES
) -> tuple[HandedArguments, list[Tensor]]:
    """Run a model with recorders, batch by batch: what its blocks were passed, and what entered the first."""
    outside = [module for module in model.modules() if not any(module is each for each in layers.modules())]
    recorders = Recorders(list(layers), outside, "toy")
    handed, entering = HandedArguments(len(inputs), allocate_in_memory, "toy", shares=shares), []
    for rows in batches:
        recorders.run(lambda rows=rows: model(inputs[rows], use_cache=False))
        handed.keep(rows, recorders.handed)
        entering.append(recorders.entering)
    for layer in layers:
        del layer.forward
    return handed, entering


@torch.no_grad()
def check_replay(
    model: Any, layers: Any, inputs: Tensor, shares: bool = False, batches: Sequence[slice] = BATCHES
) -> None:
    """Compare every block that runs alone with what it returns inside the model, to the bit."""
    own: list[Tensor] = []
    first = lambda value: value if isinstance(value, Tensor) else value[0]  # noqa: E731
    hooks = [each.register_forward_hook(lambda _m, _args, out: own.append(first(out).clone())) for each in layers]
    for rows in batches:
        model(inputs[rows], use_cache=False)
    for hook in hooks:
        hook.remove()
    handed, states = record(model, layers, inputs, shares, batches)
    for index, layer in enumerate(layers):
        for batch, rows in enumerate(batches):
            states[batch] = handed.call(layer, index, states[batch], rows, rows.stop - rows.start)
            assert torch.equal(states[batch], own[batch * len(layers) + index])


@pytest.mark.parametrize("model_type", every(3, sorted(CONFIGS)))
def test_blocks_of_classes_that_nobody_described_run_alone(model_type: str) -> None:
    model = make_model(model_type)
    shares = bool(getattr(model.config, "num_kv_shared_layers", 0))
    check_replay(model, blocks_of(model), TOKENS, shares)


class Toy(nn.Module):
    """Blocks that add what their kind says; `results`: how many things they return."""

    def __init__(self, blocks: int = 3, results: int = 0) -> None:
        super().__init__()
        self.results = results
        self.layers = nn.ModuleList([Block(results) for _ in range(blocks)])
        self.norm = nn.LayerNorm(4)

    def between(self, states: Tensor) -> Tensor:
        return states

    def order(self) -> list[int]:
        return list(range(len(self.layers)))

    def arguments(self, inputs: Tensor, index: int) -> dict[str, Any]:
        return {"shift": torch.ones(1), "nothing": None}

    def forward(self, inputs: Tensor, use_cache: bool) -> Tensor:
        states = inputs[..., None].float().expand(-1, -1, 4) * 1.0
        for number, index in enumerate(self.order()):
            result = self.layers[index](states, **self.arguments(inputs, number))
            states = self.take(result) if self.results else result
            states = self.between(states)
        return self.norm(states)

    def take(self, result: Any) -> Tensor:
        if self.results == 3:
            states, _, _ = result
            return states
        return result[0]


class Block(nn.Module):
    def __init__(self, results: int) -> None:
        super().__init__()
        self.results = results

    def forward(self, states: Tensor, shift: Tensor, nothing: Any = None) -> Any:
        states = states * 2 + (shift[..., None] if shift.dim() > 1 else shift)
        return (states, *[None] * (self.results - 1)) if self.results else states


@pytest.mark.parametrize("results", [0, 1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 3])
def test_what_blocks_return_is_found(blocks: int, results: int) -> None:
    model = Toy(blocks, results)
    check_replay(model, model.layers, TOKENS)


class OfTokens(Toy):
    """Every block is passed something of its own of every token, as Gemma 3n's are."""

    def arguments(self, inputs: Tensor, index: int) -> dict[str, Any]:
        return {"shift": inputs.float() * index}


def test_what_differs_between_samples_is_kept_for_each() -> None:
    model = OfTokens()
    check_replay(model, model.layers, TOKENS)
    handed, _ = record(model, model.layers, TOKENS)
    leaving = handed.call(model.layers[2], 2, torch.zeros(2, 6, 4), [4, 1], 2)
    assert torch.equal(leaving[..., 0], TOKENS[[4, 1]].float() * 2)


def test_what_differs_in_a_later_batch_alone_is_kept_for_each() -> None:
    model, inputs = OfTokens(), torch.cat([TOKENS[:1].expand(2, -1), TOKENS[2:3].expand(2, -1), TOKENS[4:]])
    check_replay(model, model.layers, inputs)


class Masked(nn.Module):
    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        return states + 1 if mask is None else (states + 1) * mask[..., None]


class Padded(Toy):
    """Blocks are passed which tokens count, or nothing where all do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Masked() for _ in range(3)])

    def arguments(self, inputs: Tensor, index: int) -> dict[str, Any]:
        counted = inputs.ne(0)
        return {"mask": None if bool(counted.all()) else counted}


@pytest.mark.parametrize("full", [(0, 1), (2,), (3, 4), (0, 1, 2), ()])
def test_samples_without_padding_are_passed_no_mask(full: tuple[int, ...]) -> None:
    """Batches of two sizes: what was passed with those of the one is not that of the other."""
    inputs = TOKENS.clone()
    for row in {0, 1, 2, 3, 4}.difference(full):
        inputs[row, 2 + row % 3 :] = 0
    model = Padded()
    check_replay(model, model.layers, inputs, batches=(slice(0, 2), slice(2, 3), slice(3, 5)))


class HandingOn(Toy):
    """Every block is passed what the one before has chosen (shared indexers, routers that remember)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Choosing(2) for _ in range(3)])

    def forward(self, inputs: Tensor, use_cache: bool) -> Tensor:
        states, chosen = inputs[..., None].float().expand(-1, -1, 4) * 1.0, None
        for layer in self.layers:
            states, chosen = layer(states, chosen)
        return self.norm(states)


class Choosing(Block):
    def forward(self, states: Tensor, chosen: Any = None) -> Any:
        chosen = states.argmax(1, keepdim=True) if chosen is None else chosen + 1
        return states + chosen, chosen


def test_what_a_block_returns_for_the_next_is_handed_on() -> None:
    model = HandingOn()
    check_replay(model, model.layers, TOKENS)
    handed, _ = record(model, model.layers, TOKENS)
    with pytest.raises(UserError, match="take a recipe without them"):  # the first block has not run
        handed.call(model.layers[1], 1, torch.zeros(2, 6, 4), slice(0, 2), 2)


class Between(Toy):
    def between(self, states: Tensor) -> Tensor:
        return states + 1


class Twice(Toy):
    def order(self) -> list[int]:
        return [0, 1, 0, 2]


class OfTheBatch(Toy):
    def arguments(self, inputs: Tensor, index: int) -> dict[str, Any]:
        return {"shift": inputs.float().mean().view(1)}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Between(), "something changes the hidden states between them, or they return more than the model names"),
        (Twice(), "block 0 runs where block 2 is due"),
        (OfTheBatch(), "what they are passed depends on all samples of a batch together"),
    ],
)
def test_blocks_that_do_not_run_one_by_one_are_refused(model: Toy, reason: str) -> None:
    assert refusal(record, model, model.layers, TOKENS) == f"blocks of toy cannot run one by one: {reason}"


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_keys_that_later_blocks_read_are_kept_for_each_sample(model_type: str) -> None:
    model = make_model(model_type, num_kv_shared_layers=2)
    check_replay(model, blocks_of(model), TOKENS, shares=True)


def test_blocks_that_hand_later_ones_more_are_refused() -> None:
    model = make_model("gemma3n_text", num_kv_shared_layers=2)
    with pytest.raises(UserError, match="block 2 reads more than hidden states of those before it"):
        check_replay(model, blocks_of(model), TOKENS)


def test_the_axis_of_tokens_may_stand_behind_that_of_streams() -> None:
    shapes = ((2, 6, 8), (2, 4, 6, 8), (2, 6, 4, 8), (6, 6, 8), (2, 9, 8))
    assert [token_axis(shape, 6) for shape in shapes] == [1, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("shape", "axis"), [((12, 8), None), ((2, 6, 8), 0), ((6, 6, 8), 0), ((4, 2, 6, 8), 1), ((2, 9, 8), 0)]
)
def test_the_axis_of_samples_stands_before_that_of_tokens(shape: tuple[int, ...], axis: int | None) -> None:
    assert sample_axis(shape, 6) == axis
