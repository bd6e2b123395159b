"""Mask one block: zero weights of its linear modules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.common.zero_patterns import GroupPattern
from ckpt_prune.compensation.methods import derive_strength
from ckpt_prune.job.model_view import fill_biases
from ckpt_prune.measure.moment_sources import MomentSource
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import select_input_moments
from ckpt_prune.model.model import Model
from ckpt_prune.options.training import Part
from ckpt_prune.parallel.group import process_group
from ckpt_prune.sparsity import sparsegpt
from ckpt_prune.sparsity.damping import MOST_DAMP
from ckpt_prune.sparsity.masks import keep_groups, keep_share, magnitude, wanda
from ckpt_prune.stages.mask.keys import Mask
from ckpt_prune.stages.mask.records import MaskedLinear
from ckpt_prune.stages.shared.overflow import check_overflow


@dataclass(frozen=True)
class Masker:
    """Zeroes weights of every linear module of a block that spaces lie on (sparsity/README.md).

    Args:
        ratio: share of weights to zero, if the pattern is unstructured.
        groups: N:M; None if unstructured.
        biases: linear modules of a block that have a bias in the output container.
        device: where scores and updates are computed, in float64.
        diagnostics: also compute the error at every linear's output, if there are Grams.
        shares: share of weights to zero of every block, if they differ; for N:M it gives N.
    """

    model: Model
    mask: Mask
    ratio: float
    groups: GroupPattern | None
    biases: frozenset[str]
    device: torch.device
    diagnostics: bool = False
    shares: Sequence[float] | None = None

    record = MaskedLinear

    def block(
        self, block: int, tensors: Mapping[str, Tensor], source: MomentSource
    ) -> tuple[dict[str, Tensor], list[MaskedLinear]]:
        """Mask one block, one group of linears that read the same input after the other.

        Args:
            source: of moments; telling it the result is up to the caller.

        Returns:
            The block's new tensors, names, shapes and dtypes as before, with missing biases, and what was done to each
            linear.
        """
        if self.shares is not None:
            groups = None if self.groups is None else self.groups.keeping(self.shares[block])
            return replace(self, ratio=self.shares[block], groups=groups, shares=None).block(block, tensors, source)
        current = dict(tensors)
        fill_biases(self.model.family, block, self.biases, current)
        masked: list[MaskedLinear] = []
        readers = masked_inputs(self.model, block, self.mask.only)
        for stage in source.group_keys(list(readers)):
            with phase("calibration"):
                moments = source.moments(block, current, stage)
            for first in stage:
                folds = select_input_moments(moments.get(first))
                summed = sum_folds(folds).to(self.device) if folds else None
                for module in readers[first]:
                    name = self.model.tensor(block, module)
                    # Of several processes, the first one has the moments.
                    current[name], record = process_group().once(
                        partial(self.mask_linear, block, module, current[name], summed)
                    )
                    masked.append(record)
        check_overflow(tensors, current)
        return current, masked

    def mask_linear(
        self, block: int, module: str, tensor: Tensor, moments: Moments | None
    ) -> tuple[Tensor, MaskedLinear]:
        """Return a masked weight as it is stored, and its record."""
        new, record = self.linear(block, module, tensor, moments)
        return new.to(tensor.dtype).cpu(), record

    def linear(self, block: int, module: str, tensor: Tensor, moments: Moments | None) -> tuple[Tensor, MaskedLinear]:
        """Return a masked weight, float64, and its record."""
        name = self.model.tensor(block, module)
        weight = tensor.to(self.device)
        damp, dead = None, None
        if self.mask.method == "sparsegpt":
            if moments is None or moments.gram is None:
                raise ValueError("sparsegpt needs a Gram")
            try:
                with phase("compensation"):  # it chooses column by column, after what the ones before have cost
                    pruned = sparsegpt.prune_weight(
                        weight,
                        moments.gram,
                        pattern=self.groups,
                        ratio=self.ratio,
                        block=self.mask.block,
                        damp=self._damp(weight.shape[1], moments.count),
                    )
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
            new, keep, damp, dead = pruned.weight, pruned.keep, pruned.damp, pruned.dead
        else:
            keep = self._keep(weight, moments)
            new = weight.masked_fill(~keep, 0)
        gram = moments.gram if self.diagnostics and moments is not None else None
        return new, MaskedLinear(
            block=block,
            weight=name,
            kind=self.model.family.labels[module],
            rows=weight.shape[0],
            columns=weight.shape[1],
            zeros=int((~keep).sum()),
            error=None if gram is None else sparsegpt.relative_error(weight, new, gram),
            damp=damp,
            dead=dead,
        )

    def _damp(self, inputs: int, tokens: int) -> float:
        """Return SparseGPT's damping: a row is a ridge towards itself of the weights that stay (`derive_strength`)."""
        if self.mask.damp != "auto":
            return self.mask.damp
        ratio = self.ratio if self.groups is None else self.groups.ratio
        return min(derive_strength(round(inputs * (1 - ratio)), tokens), MOST_DAMP)

    @phase("ranking")
    def _keep(self, weight: Tensor, moments: Moments | None) -> Tensor:
        if self.mask.method == "wanda":
            if moments is None:
                raise ValueError("wanda needs moments")
            scores = wanda(weight, moments)
        else:
            scores = magnitude(weight)
        if self.groups is not None:
            return keep_groups(scores, self.groups)
        return keep_share(scores, self.ratio, self.mask.compared)


def masked_inputs(model: Model, block: int, only: Part | None) -> dict[str, list[str]]:
    """Return the linear modules that a mask is of, by the first of those that read the same input (`Model.inputs`)."""
    part = set(model.family.linears_of(only))
    inputs = {first: [each for each in modules if each in part] for first, modules in model.inputs(block).items()}
    return {first: modules for first, modules in inputs.items() if modules}


_USUAL = ("2:4", "4:8")
"""Patterns that runtimes or papers know."""


def masked_weights(model: Model, block: int, only: Part | None) -> list[str]:
    """Return the on-disk weights of a block that a mask is of."""
    return [model.tensor(block, module) for modules in masked_inputs(model, block, only).values() for module in modules]


def masked_blocks(model: Model, only: Part | None) -> list[int]:
    """Return the blocks that a mask is of."""
    return [block for block in range(model.blocks) if masked_weights(model, block, only)]


def check_widths(model: Model, mask: Mask) -> None:
    """Refuse a pattern that the weights of a block cannot have."""
    groups = mask.groups
    if groups is None:
        return
    for name in chain.from_iterable(masked_weights(model, block, mask.only) for block in range(model.blocks)):
        columns = model.checkpoint.tensors[name].shape[1]
        if columns % groups.of:
            fitting = ", ".join(text for text in _USUAL if columns % int(text.partition(":")[2]) == 0)
            raise UserError(
                f"{name} has {columns} inputs, which {groups} does not divide into groups of {groups.of}: "
                f"take {f'{fitting} or ' if fitting else ''}unstructured"
            )
