"""The experts of a block: one weight for all in memory, and on disk one for each, or stacked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.model.discovery.trace import BlockRun
from ckpt_prune.model.expert_classes import find_inner
from ckpt_prune.model.skeleton import Names


@dataclass(frozen=True)
class FoundExperts:
    """Experts as a description has them.

    Attributes:
        path: of the module in a block that stands for all.
        gate, up, down: linear modules on disk, with `{expert}`.
        router: linear module on disk that chooses among them.
        tables: tensors of one number for each expert.
        stacked: files hold each linear module of all experts in one tensor.
        no_suffix: that tensor has the module's name.
        transposed: the weights of one are (inputs, outputs).
        biased: linear modules have biases.
        columns: of an expert.
        alone: the router has a row for each of them and no other, so that whole experts can go.
        gated: gate and up are two, whose rows lie one after the other, or `interleaved`.
    """

    path: str
    gate: str
    up: str
    down: str
    router: str
    tables: tuple[str, ...]
    stacked: bool
    no_suffix: bool
    transposed: bool
    biased: bool
    columns: int
    alone: bool
    gated: bool
    interleaved: bool

    @property
    def flags(self) -> dict[str, bool]:
        """Keys of a description that are true."""
        return {key: True for key in ("stacked", "no_suffix", "transposed", "biased") if getattr(self, key)}


def chooses_others(run: BlockRun, path: str, count: int) -> bool:
    """Return whether tokens of a block are sent to what is none of its experts (zero experts, or none at all)."""
    most = 0

    def see(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal most
        most = max([most, *(int(each.max()) for each in arguments if not torch.is_floating_point(each))])

    hook = run.block.get_submodule(path).register_forward_pre_hook(see)
    try:
        run.block(run.states, *run.arguments, **run.options)
    finally:
        hook.remove()
    return most >= count


def packed_modules(block: nn.Module, count: int) -> list[str]:
    """Return paths of modules whose own parameters have one weight for each of `count` experts."""
    return [
        path
        for path, module in block.named_modules()
        if path and any(each.dim() == 3 and each.shape[0] == count for each in module.parameters(recurse=False))
    ]


def find_experts(block: nn.Module, path: str, names: Names, prefix: str, place: str, count: int) -> FoundExperts | str:
    """Return the experts of a block, or why they cannot be described.

    Args:
        path: of the module of all experts in the block.
        names: of the model.
        prefix: of the block's tensors on disk.
        place: path of the block in the model.
    """
    module: Any = block.get_submodule(path)
    parameters: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    weights = {name: each for name, each in parameters.items() if each.dim() == 3}
    biases = [name for name in parameters if name not in weights]
    transposed, gated = bool(getattr(module, "is_transposed", False)), bool(getattr(module, "has_gate", True))
    interleaved = not getattr(module, "is_concatenated", True)
    if len(weights) != 2 or biases not in ([], [f"{name}_bias" for name in weights]):
        return "its experts have other tensors than two weights each and their biases"
    first, last = weights
    transposed = transposed or weights[first].shape[2] != weights[last].shape[1]  # some classes do not say so
    if not _computes_sums(module, parameters, transposed=transposed):
        return "its experts are not one linear module behind another, weighted by the router"
    disk: dict[str, list[str]] = {}
    for parameter in parameters:
        full = f"{place}.{path}.{parameter}"
        disk[parameter] = [each.removeprefix(prefix) for each in names.shapes if full in names.parameters(each)]
    stacked = all(len(each) == 1 for each in disk.values())
    no_suffix = stacked and not disk[first][0].endswith(".weight")
    if stacked:
        modules = [f"{disk[each][0].removesuffix('.weight')}.{{expert}}" for each in (first, first, last)]
        if biases and (not no_suffix or any(disk[f"{each}_bias"] != [f"{disk[each][0]}_bias"] for each in weights)):
            return "its files hold biases of experts in a way that is not described"
    else:
        gates, downs = (_generic(disk[each]) for each in (first, last))
        if len(gates) != 1 + gated or len(downs) != 1 or biases or transposed:
            return "its files hold experts in a way that is not described"
        modules = [gates[0], gates[-1], *downs]
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
    return FoundExperts(
        path,
        gate,
        up,
        down,
        weight.removesuffix(".weight"),
        tuple(tables),
        stacked=stacked,
        no_suffix=no_suffix,
        transposed=transposed,
        biased=bool(biases),
        columns=weights[last].shape[1 if transposed else 2],
        alone=block.get_parameter(router).shape[0] == count,
        gated=gated,
        interleaved=interleaved,
    )


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
    """Return the one weight of a row for each expert; of some classes it has those of shared experts, too."""
    weights = {
        name: each.shape[0]
        for name, each in block.named_parameters()
        if each.dim() == 2 and name.endswith(".weight") and not name.startswith(f"{path}.")
    }
    for rows in ({count}, {*range(count + 1, 2 * count)}):
        routers = [name for name, size in weights.items() if size in rows]
        if routers:
            return routers[0] if len(routers) == 1 else None
    return None


@torch.no_grad()
def _computes_sums(module: Any, parameters: Mapping[str, Tensor], *, transposed: bool) -> bool:
    """Return whether experts add up what their last linear module makes, weighted by the router as `streams` does it.

    A class may weigh tokens itself, and hand all of them to every expert.
    """
    inner = find_inner(module)
    if inner is None:
        return False
    first, last = (name for name, each in parameters.items() if each.dim() == 3)
    count, hidden = parameters[last].shape[0], parameters[last].shape[2 if transposed else 1]
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(5, hidden, generator=generator)
    chosen = torch.randint(count, (5, 2), generator=generator)
    chosen[:, 1] = (chosen[:, 0] + 1) % count
    weights = torch.rand(5, 2, generator=generator)

    def linear(name: str, expert: int, inputs: Tensor) -> Tensor:
        weight, bias = parameters[name][expert], parameters.get(f"{name}_bias")
        outputs = inputs @ weight if transposed else weight @ inputs
        return outputs if bias is None else outputs + bias[expert]

    def run(expert: int, token: Tensor) -> Tensor:
        return linear(last, expert, inner(linear(first, expert, token)))

    try:
        if len(signature(module.forward).parameters) == 1:
            given = module(tokens.repeat(count, 1)).view(count, 5, hidden)
            expected = torch.stack([torch.stack([run(expert, token) for token in tokens]) for expert in range(count)])
        else:
            given = module(tokens, chosen, weights)
            pairs = [zip(own.tolist(), share, strict=True) for own, share in zip(chosen, weights, strict=True)]
            expected = torch.stack(
                [sum(w * run(e, token) for e, w in own) for own, token in zip(pairs, tokens, strict=True)]
            )
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    near = 1e-4 * float(expected.abs().max())
    return given.shape == expected.shape and bool(torch.allclose(given, expected, atol=near))
