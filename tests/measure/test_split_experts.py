"""Experts with linear modules of their own compute what a slow loop does, whatever their class stores."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, Llama4TextConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from ckpt_prune.measure.streams.experts import split_experts
from ckpt_prune.model.family_keys import DOWN, GATE, SHIFT, Experts
from tests.oracles import experts as oracle

HIDDEN, COLUMNS, EXPERTS, TOKENS = 12, 8, 3, 7
SAME = 1e-5
"""Sums of at most 16 float32 products of numbers near one: 16 · 2⁻²⁴ for each of two layers, and the activation."""
OSS = GptOssConfig(hidden_size=HIDDEN, intermediate_size=COLUMNS, num_local_experts=EXPERTS)
LLAMA = Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=COLUMNS, num_local_experts=EXPERTS)
NEMOTRON = NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=COLUMNS, n_routed_experts=EXPERTS)


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def experts_of(parameters, *, biased):
    """A block whose experts are split, with these weights, (E, outputs, inputs)."""

    def make(stock):
        block = Block(stock)
        gate, down = "experts.first.{expert}", "experts.down.{expert}"
        described = Experts(
            count="experts", router="r", gate=gate, up=gate, down=down, module="experts", chosen="k", biased=biased
        )
        split_experts(block, described, "any", EXPERTS)
        for number, expert in enumerate(block.experts):
            for role, name in ((GATE, "first"), (DOWN, "down")):
                linear = expert.get_submodule(role)
                linear.weight = nn.Parameter(parameters[name][number])
                if biased:
                    kind = SHIFT if role == DOWN else "bias"
                    linear.register_parameter(kind, nn.Parameter(parameters[f"{name}_bias"][number]))
        return block.experts

    return make


def random_parameters(rows: int, *, biased: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (EXPERTS, rows, HIDDEN), "down": (EXPERTS, HIDDEN, COLUMNS)}
    shapes |= {"first_bias": (EXPERTS, rows), "down_bias": (EXPERTS, HIDDEN)} if biased else {}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("stock", "rows", "biased", "inner"),
    [
        (partial(GptOssExperts, OSS), 2 * COLUMNS, True, partial(oracle.gated_with_limits, alpha=1.702, limit=7.0)),
        (partial(NemotronHExperts, NEMOTRON), COLUMNS, False, oracle.plain),
    ],
)
@torch.no_grad()
def test_routed_tokens(stock, rows, biased, inner):
    torch.manual_seed(1)
    parameters = random_parameters(rows, biased=biased)
    split = experts_of(parameters, biased=biased)(stock())
    tokens, weights = torch.randn(TOKENS, HIDDEN) * 3, torch.rand(TOKENS, 2)
    chosen = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
    expected = oracle.sum_of_experts(tokens, chosen, weights, parameters, inner)
    assert (split(tokens, chosen, weights) - expected).abs().max() <= SAME * expected.abs().max()


@torch.no_grad()
def test_tokens_that_were_weighed_before():
    """Every expert is handed all tokens, those that are not its own as zeros."""
    torch.manual_seed(1)
    parameters = random_parameters(2 * COLUMNS, biased=False)
    split = experts_of(parameters, biased=False)(Llama4TextExperts(LLAMA))
    tokens, weights = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS)
    chosen = torch.arange(TOKENS) % EXPERTS
    given = torch.zeros(EXPERTS, TOKENS, HIDDEN)
    given[chosen, torch.arange(TOKENS)] = tokens * weights[:, None]
    made = split(given.view(-1, HIDDEN)).view(EXPERTS, TOKENS, HIDDEN).sum(0)
    ones = torch.ones(TOKENS, 1)
    expected = oracle.sum_of_experts(tokens * weights[:, None], chosen[:, None], ones, parameters, oracle.gated)
    assert (made - expected).abs().max() <= SAME * expected.abs().max()
    assert {number: own.tolist() for number, own in split.routed.items()} == {
        number: (chosen == number).nonzero().flatten().tolist() for number in range(EXPERTS)
    }
