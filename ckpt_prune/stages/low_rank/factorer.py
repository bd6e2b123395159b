"""Factor one block: two thin linear modules replace each of its linear modules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.common.progress import track
from ckpt_prune.compensation.factoring import direction_energies, factor, refit_factors
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moment_sources import CachedMoments, MomentSource
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.containers.container import Ranks
from ckpt_prune.model.factors import factor_names
from ckpt_prune.model.family import Family
from ckpt_prune.parallel.group import process_group
from ckpt_prune.stages.low_rank.keys import LowRank
from ckpt_prune.stages.low_rank.ranks import Thin, ranks_by_energy, uniform_ranks
from ckpt_prune.stages.low_rank.records import FactoredRecord
from ckpt_prune.stages.shared.overflow import check_overflow


@dataclass(frozen=True)
class Factorer:
    """Replaces every linear module of a block by two thin ones.

    Args:
        ranks: of each block, module → rank; modules that are not there stay.
        device: where they are found, in float64.
        dense: of moments of the dense model, by which the first linear of each is found where the second is fitted to
            what reaches it; None where the moments that a block is given are for both.
    """

    family: Family
    ranks: Ranks
    device: torch.device
    dense: MomentSource | None = None

    record = FactoredRecord

    def block(
        self, block: int, tensors: Mapping[str, Tensor], source: MomentSource
    ) -> tuple[dict[str, Tensor], list[FactoredRecord]]:
        """Factor one block, one group of linears that read the same input after the other.

        Args:
            source: of moments; telling it the result is up to the caller.

        Returns:
            The block's new tensors, with two factors in the place of a weight, and what was done to each linear.
        """
        running, factors = dict(tensors), {}
        factored: list[FactoredRecord] = []
        ranks = self.ranks[block]
        groups = {first: [m for m in modules if m in ranks] for first, modules in self.family.inputs.items()}
        for stage in source.group_keys([first for first, modules in groups.items() if modules]):
            with phase("calibration"):
                moments = source.moments(block, running, stage)
                unpruned = None if self.dense is None else self.dense.moments(block, tensors, stage)
            for first in stage:
                gram = _gram(moments.get(first), self.device)
                dense_gram = gram if unpruned is None else _gram(unpruned.get(first), self.device)
                for module in groups[first]:
                    name = self.family.tensor(block, module)
                    # Of several processes, the first one has the moments.
                    (down, up), record = process_group().once(
                        partial(self._factor_linear, block, module, tensors[name], dense_gram, gram)
                    )
                    # What comes behind it is measured with the factors as they are stored.
                    running[name] = up.float() @ down.float()
                    factors[name] = dict(zip(factor_names(name), (down, up), strict=True))
                    factored.append(record)
        new = {name: tensor for name, tensor in tensors.items() if name not in factors}
        for pair in factors.values():
            new |= pair
        check_overflow(tensors, new)
        return new, factored

    @phase("compensation")
    def _factor_linear(
        self, block: int, module: str, tensor: Tensor, gram: Tensor | None, reaches: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], FactoredRecord]:
        weight = tensor.to(self.device, torch.float64)
        rank = self.ranks[block][module]
        factors = factor(weight, gram, rank)
        if self.dense is not None and reaches is not None:
            factors = refit_factors(weight, reaches, factors.down)
        down, up = (each.to(tensor.dtype).cpu() for each in (factors.down, factors.up))
        away = torch.linalg.norm(up.double() @ down.double() - tensor.double()) / torch.linalg.norm(weight).cpu()
        rows, columns = weight.shape
        record = FactoredRecord(
            block=block,
            weight=self.family.tensor(block, module),
            kind=self.family.labels[module],
            rows=rows,
            columns=columns,
            rank=rank,
            error=None if gram is None else factors.error,
            change=away.item(),
        )
        return (down, up), record


def ranks_of(prepared: Prepared, recipe: LowRank) -> Ranks:
    """Return the rank of every linear module that becomes two."""
    family, tensors = prepared.model.family, prepared.model.checkpoint.tensors
    # What transformers holds as several modules (DINOv2's gate and up) stays: none of them is the weight on disk.
    modules = [module for module in family.linears_of(recipe.only) if len(module_paths(family)[module]) == 1]
    places = [(block, module) for block in range(prepared.model.blocks) for module in modules]
    shapes = {place: tensors[family.tensor(*place)].shape for place in places}
    linears = {place: Thin(rows, columns) for place, (rows, columns) in shapes.items()}
    if recipe.allocation == "energy":
        rank_of = ranks_by_energy(dict(_measure_energies(prepared, linears)), prepared.recipe.ratio, recipe.multiple_of)
    else:
        rank_of = uniform_ranks(linears, prepared.recipe.ratio, recipe.multiple_of)
    if not rank_of:
        raise UserError(
            f"ratio {prepared.recipe.ratio:g} leaves every linear as it is: with ranks that are multiples of "
            f"{recipe.multiple_of} two thin ones are no smaller; say a larger ratio"
        )
    ranks: list[dict[str, int]] = [{} for _ in range(prepared.model.blocks)]
    for (block, module), rank in rank_of.items():
        ranks[block][module] = rank
    return tuple(ranks)


def _measure_energies(
    prepared: Prepared, linears: Mapping[tuple[int, str], Thin]
) -> Iterator[tuple[tuple[int, str], Thin]]:
    """Yield the linear modules with their energies, by Grams of the dense model if there are any."""
    model = prepared.model
    source = None if prepared.statistics is None else CachedMoments(prepared.statistics, model)
    first_of = {module: first for first, modules in model.family.inputs.items() for module in modules}
    for block in track(range(model.blocks), "comparing linears", total=model.blocks):
        tensors = model.read_block(block)
        modules = [module for at, module in linears if at == block]
        moments = {} if source is None else source.moments(block, tensors, list({first_of[m]: None for m in modules}))
        for module in modules:
            weight = tensors[model.family.tensor(block, module)].to(prepared.device, torch.float64)
            gram = _gram(moments.get(first_of[module]), prepared.device)
            thin = linears[block, module]
            yield (block, module), Thin(thin.rows, thin.columns, direction_energies(weight, gram).tolist())


def _gram(folds: SpaceMoments | None, device: torch.device) -> Tensor | None:
    """Return the Gram of all folds, float64; None without moments."""
    input_folds = select_input_moments(folds)
    if not input_folds:
        return None
    gram = sum_folds(input_folds).to(device).gram
    return None if gram is None else gram.double()
