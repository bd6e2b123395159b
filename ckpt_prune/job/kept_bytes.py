"""Weights of few bits that an output stores as its source does, byte for byte: whole experts go, others stay."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint, read_tensors
from ckpt_prune.checkpoint.shard import Stack, TensorInfo, apply_scales
from ckpt_prune.model.model import TensorSpec

_NUMBERED = re.compile(r"(?P<before>.*\.)(?P<number>\d+)(?P<after>\..*)")


@dataclass(frozen=True, eq=False)
class KeptBytes:
    """Weights that an output has as its source stores them: elements and scales.

    Attributes:
        checkpoint: the source.
        weights: names in the output. Each is a weight of the source that has this number or a later one.
    """

    checkpoint: Checkpoint
    weights: frozenset[str]

    @property
    def stacks(self) -> dict[str, Stack]:
        """How tensors of the files hold several tensors of the output."""
        stacks = dict(self.checkpoint.stacks)
        for name, stack in self.checkpoint.stacks.items():
            if not self.weights.isdisjoint(stack.parts):
                for ending in self._endings(stack.parts[0]):
                    parts = tuple(part + ending for part in stack.parts)
                    stacks[name + ending] = replace(stack, parts=parts)
        return stacks

    def lay_out(self, layout: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, dict[str, TensorSpec]]:
        """Return the files with elements and scales in place of each weight."""
        stored: dict[str, dict[str, TensorSpec]] = {file: {} for file in layout}
        for file, tensors in layout.items():
            for name, spec in tensors.items():
                if name not in self.weights:
                    stored[file][name] = spec
                    continue
                for ending, part in zip(self._endings(name), self._stored(name), strict=True):
                    stored[file][name + ending] = part.dtype, part.shape
        return stored

    def pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the source's elements and scales in place of each weight.

        Raises:
            ValueError: a weight is none of the source: a fault of this tool.
        """
        packed, firsts = dict(tensors), dict[str, int]()
        for name in sorted(self.weights & tensors.keys(), key=_order):
            stored = self._find(name, packed.pop(name), firsts)
            packed |= {name + ending: part for ending, part in zip(self._endings(name), stored, strict=True)}
        return packed

    def unpack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with plain weights in place of elements and scales."""
        plain = dict(tensors)
        for name in self.weights:
            elements, scales = (name + ending for ending in self._endings(name))
            if scales in plain:
                scale = plain.pop(scales)
                plain[name] = self._plain(name, plain.pop(elements), scale)
        return plain

    def _plain(self, name: str, elements: Tensor, scale: Tensor) -> Tensor:
        """Return a weight of the source from its elements and scales as files have them."""
        info = self.checkpoint.tensors[name]
        assert info.scaled is not None
        return apply_scales(info, elements, scale.view(info.scaled.scale.dtype))

    def _endings(self, name: str) -> tuple[str, str]:
        scaled = self.checkpoint.tensors[name].scaled
        assert scaled is not None
        return scaled.endings

    def _stored(self, name: str) -> tuple[TensorInfo, TensorInfo]:
        """Return elements and scales of a weight of the source, as its file has them."""
        info = self.checkpoint.tensors[name]
        assert info.scaled is not None
        elements, scale = info.parts
        return elements, replace(scale, dtype=info.scaled.stored_as or scale.dtype)

    def _find(self, name: str, weight: Tensor, firsts: dict[str, int]) -> tuple[Tensor, Tensor]:
        """Return elements and scales of the weight of the source that has these values.

        Weights that stay are numbered anew, in order.
        """
        before, number, after = _numbered(name)
        place = max(number, firsts.get(before + after, 0))
        while (candidate := f"{before}{place}{after}") in self.checkpoint.tensors:
            place += 1
            infos = self._stored(candidate)
            read = read_tensors(self.checkpoint.path, infos)
            elements, scale = (read[info.name] for info in infos)
            if torch.equal(self._plain(candidate, elements, scale), weight.cpu()):
                firsts[before + after] = place
                return elements, scale
        raise ValueError(f"{name} has other values than any weight of the source that it may be")


def _numbered(name: str) -> tuple[str, int, str]:
    """Return what stands before the last number of a name, that number, and what follows; blocks have numbers."""
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return match["before"], int(match["number"]), match["after"]


def _order(name: str) -> tuple[str, int]:
    before, number, after = _numbered(name)
    return before + after, number
