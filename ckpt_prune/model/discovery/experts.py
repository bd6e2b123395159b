"""The experts of a block: one weight for all in memory, and on disk one for each, or stacked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.model.skeleton import Names

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


@dataclass(frozen=True)
class FoundExperts:
    """Experts as a description has them.

    Attributes:
        path: of the module in a block that stands for all.
        gate, up, down: linear modules on disk, with `{expert}`.
        router: linear module on disk that chooses among them.
        tables: tensors of one number for each expert.
        stacked: files hold each linear module of all experts in one tensor.
    """

    path: str
    gate: str
    up: str
    down: str
    router: str
    tables: tuple[str, ...]
    stacked: bool


def packed_modules(block: nn.Module, count: int) -> list[str]:
    """Return paths of modules whose own parameters have one weight for each of `count` experts."""
    return [
        path
        for path, module in block.named_modules()
        if path and any(each.dim() == 3 and each.shape[0] == count for each in module.parameters(recurse=False))
    ]


def find_experts(
    block: nn.Module, path: str, names: Names, prefix: str, place: str, count: int, columns: int
) -> FoundExperts | str:
    """Return the experts of a block, or why they cannot be described.

    Args:
        path: of the module of all experts in the block.
        names: of the model.
        prefix: of the block's tensors on disk.
        place: path of the block in the model.
        columns: of an expert.
    """
    module: Any = block.get_submodule(path)
    weights: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    if {each.dim() for each in weights.values()} != {3} or len(weights) != 2:
        return "its experts have more than two weights each, such as biases"
    first, last = weights
    if not _computes_products(module, weights[first], weights[last], columns):
        return "its experts are not an activation of one projection times another"
    disk: dict[str, list[str]] = {}
    for parameter in (first, last):
        full = f"{place}.{path}.{parameter}"
        disk[parameter] = [each.removeprefix(prefix) for each in names.shapes if full in names.parameters(each)]
    if [*disk[first], *disk[last]] == [f"{path}.{first}", f"{path}.{last}"]:
        return "its files hold all experts in one tensor under a name that is not of a linear module"
    stacked = all(len(each) == 1 for each in disk.values())
    if stacked:
        modules = [f"{disk[each][0].removesuffix('.weight')}.{{expert}}" for each in (first, first, last)]
    else:
        gates, downs = (_generic(disk[each]) for each in (first, last))
        if len(gates) != 2 or len(downs) != 1:
            return "its files hold experts in a way that is not described"
        modules = [*gates, *downs]
    gate, up, down = modules
    router = _find_router(block, path, count)
    if router is None:
        return "no linear module chooses among its experts"
    weight = names.saved_as(f"{place}.{router}").removeprefix(prefix)
    tables = [
        names.saved_as(f"{place}.{name}").removeprefix(prefix)
        for name in _of_each(block, path, count)
        if name.rpartition(".")[2] != "bias" and name in {*dict(block.named_parameters()), *_kept_buffers(block)}
    ]
    return FoundExperts(path, gate, up, down, weight.removesuffix(".weight"), tuple(tables), stacked)


def _generic(disk: list[str]) -> list[str]:
    """Return the linear modules of one expert with `{expert}` for its number, in the order of their rows."""
    generic = (re.sub(r"\.(\d+)\.(?!.*\.\d+\.)", ".{expert}.", f".{name}")[1:] for name in disk)
    return [name.removesuffix(".weight") for name in dict.fromkeys(generic)]


def _of_each(block: nn.Module, path: str, count: int) -> list[str]:
    """Return tensors outside the experts with one number for each of them."""
    tensors: Mapping[str, Tensor] = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    return [
        n
        for n, each in tensors.items()
        if each.dim() and each.shape[-1] == each.numel() == count and not n.startswith(f"{path}.")
    ]


def _kept_buffers(block: nn.Module) -> set[str]:
    stored = block.state_dict()
    return {name for name, _ in block.named_buffers() if name in stored}


def _find_router(block: nn.Module, path: str, count: int) -> str | None:
    found = [
        name
        for name, each in block.named_parameters()
        if each.dim() == 2 and each.shape[0] == count and name.endswith(".weight") and not name.startswith(f"{path}.")
    ]
    return found[0] if len(found) == 1 else None


@torch.no_grad()
def _computes_products(module: Any, first: Tensor, last: Tensor, columns: int) -> bool:
    """Return whether experts add up weight × down(activation(gate) × up), the gate's rows first."""
    count, hidden = last.shape[0], last.shape[1]
    is_usual = first.shape == (count, 2 * columns, hidden) and last.shape == (count, hidden, columns)
    arguments = tuple(signature(module.forward).parameters)
    if not is_usual or arguments != _ARGUMENTS or not hasattr(module, "act_fn"):
        return False
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(5, hidden, generator=generator)
    chosen = torch.randint(count, (5, 2), generator=generator)
    chosen[:, 1] = (chosen[:, 0] + 1) % count
    weights = torch.rand(5, 2, generator=generator)
    expected = torch.zeros_like(tokens)
    for token in range(5):
        for place in range(2):
            expert = int(chosen[token, place])
            gate, up = (first[expert] @ tokens[token]).chunk(2)
            expected[token] += weights[token, place] * (last[expert] @ (module.act_fn(gate) * up))
    given: Tensor = module(tokens, chosen, weights)
    return bool(torch.allclose(given, expected, atol=1e-4 * float(expected.abs().max())))
