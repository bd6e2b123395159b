"""Prunes the spaces of one block: its tensors in, its pruned and compensated tensors out. It touches no files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt_prune.common.phases import phase
from ckpt_prune.job.decisions import Decisions
from ckpt_prune.job.model_view import fill_biases
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moment_sources import MomentSource
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.model.cuts import list_cuts, positions_among
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site, SpaceName, axis_dim
from ckpt_prune.parallel.group import process_group
from ckpt_prune.stages.shared.overflow import check_overflow
from ckpt_prune.stages.spaces.solvers import solver_of
from ckpt_prune.stages.spaces.solvers.base import SolvedSite, Solver

SWEEPS = 2
"""How often the experts that stay are refitted, each to its share of what all of them still lack."""
KeptUnits = Mapping[SpaceName, Tensor]


@dataclass(frozen=True)
class Pruner:
    """Prunes the blocks of one model.

    Args:
        decisions: how many units stay, and what else is decided for each site.
        biases: linear modules of a block that have a bias in the output container.
        device: where the closed forms are solved, in float64.
        diagnostics: also compute CORP's errors, spectra and held-out errors per site.
        padded: spaces that the output container holds at their dense width, with zeros.
    """

    model: Model
    decisions: Decisions
    biases: frozenset[str]
    device: torch.device
    diagnostics: bool = False
    padded: frozenset[SpaceName] = frozenset()

    record = SitePlan

    def block(self, block: int, tensors: Tensors, source: MomentSource) -> tuple[dict[str, Tensor], list[SitePlan]]:
        """Prune one block; the caller moves `source` on.

        Returns:
            The block's new tensors, names and dtypes as before with biases added, and the plan of each site.
        """
        current = dict(tensors)
        plans = [each.solved[0] for each in self.sites(block, current, source)]
        kept = {plan.site.space: torch.tensor(plan.kept) for plan in plans if len(plan.kept) < plan.units}
        fill_biases(self.model.family, block, self.biases, current)
        self._pad(block, kept, current)
        pruned = self.model.drop_experts(block, current, kept)
        plans = [self._refit(tensors, pruned, plan, source) for plan in plans]
        check_overflow(tensors, pruned)
        return pruned, plans

    def _refit(self, dense: Tensors, tensors: dict[str, Tensor], plan: SitePlan, source: MomentSource) -> SitePlan:
        """Fit what stays to what the block lacks. Experts must be gone, since that decides which tokens they get."""
        solver = solver_of(self.model, self.decisions.recipe, plan.site.space, self.device)
        spaces = solver.list_refitted(len(plan.kept)) if len(plan.kept) < plan.units else []
        sweeps: list[dict[str, Any]] = []
        for _ in range(SWEEPS if spaces else 0):
            with phase("calibration"):
                moments = source.measure_shortfall(plan.block, dense, tensors, spaces)
            with phase("compensation"):
                new, figures = process_group().once(partial(solver.refit, plan.block, tensors, moments))
            tensors |= {name: tensor.to(tensors[name].dtype) for name, tensor in new.items()}
            sweeps.append(figures)
        if not sweeps:
            return plan
        return plan.model_copy(update=sweeps[-1] | {"error_uncompensated": sweeps[0]["error_uncompensated"]})

    def sites(self, block: int, tensors: dict[str, Tensor], source: MomentSource) -> Iterator["AtSite"]:
        """Solve the sites of a block one after the other.

        Args:
            tensors: on-disk tensors of the block, at least those that its sites are solved from; they are pruned in
                place after each site is yielded.
            source: of moments.
        """
        kept: dict[SpaceName, Tensor] = {}
        recipe = self.decisions.recipe
        # The order of the description is the order of computation: q and k, then what they weigh, then the mlp.
        spaces = self.model.spaces(block)
        decided = {s: self.decisions.of(self.model, Site(block, s)) for s in spaces if s in recipe.spaces}
        # What stays whole is not measured again: it is most of what a budget leaves of attention.
        measured = [s for s, d in decided.items() if d.scores is None or d.keep != self.model.units(s, block)]
        groups = {group[0]: group for group in source.group_keys(measured) if group}
        of_group: Mapping[SpaceName, SpaceMoments] = {}
        for space, decision in decided.items():
            if space in groups:
                with phase("calibration"):
                    of_group = source.moments(block, tensors, groups[space])
            model, moments = self._behind(space, kept, of_group.get(space))
            solver = solver_of(model, recipe, space, self.device, diagnostics=self.diagnostics)
            # The first of several processes alone has the moments of all samples, and its numbers are everyone's.
            with phase("compensation"):  # in which the solver ranks units first
                solved = process_group().once(partial(solver.solve, block, tensors, moments, decision))
            if solved[0].units != self.model.site_units(space, block):
                solved = self._in_dense(solved[0], kept), solved[1]
            yield AtSite(solver, tensors, moments, solved)
            plan, new = solved
            if new is not None:
                before = dict(kept)
                kept[space] = torch.tensor(plan.kept)
                self._cut(block, before, kept, tensors, new)
                self._note(block, kept, tensors)

    def _behind(
        self, space: SpaceName, kept: KeptUnits, moments: SpaceMoments | None
    ) -> tuple[Model, SpaceMoments | None]:
        """Return the model and the moments of a space as earlier spaces of the same consumer have left them."""
        columns = self.model.family.columns
        consumer = columns[space].consumer if space in columns else None
        earlier = [each for each in kept if each in columns and columns[each].consumer == consumer]
        if not earlier:
            return self.model, moments
        model = self.model.with_widths({each: len(kept[each]) // self.model.copies(each) for each in earlier})
        if moments is None or consumer is None:
            return model, moments
        _, lines = self.model.remaining_lines({each: kept[each] for each in earlier})[consumer, axis_dim("columns")]
        # Moments that were taken before are of all inputs.
        inputs = select_input_moments(moments)
        return model, tuple(m.select_inputs(lines) if m.width > len(lines) else m for m in inputs)

    def _in_dense(self, plan: SitePlan, kept: KeptUnits) -> SitePlan:
        """Return a plan in units of the dense model, if some units that stand side by side went with others before.

        Those that went are listed like the first ones that are there, with scores of zero: as many stay in each.
        """
        space = self.model.family.spaces[plan.space]
        count, copies = space.count(self.model.dimension), space.copies(self.model.dimension)
        within = next(units for name, units in kept.items() if self.model.family.spaces[name].units == space.for_each)
        scores, first = torch.zeros(copies, count, dtype=torch.float64), plan.kept[: len(plan.kept) // len(within)]
        scores[within] = torch.tensor(plan.scores, dtype=torch.float64).view(len(within), count)
        stays = torch.tensor(first).repeat(copies, 1)
        stays[within] = torch.tensor(plan.kept).view(len(within), -1) - torch.arange(len(within))[:, None] * count
        stays += torch.arange(copies)[:, None] * count
        new = {"units": count * copies, "kept": stays.flatten().tolist(), "scores": scores.flatten().tolist()}
        return plan.model_copy(update=new)

    def _note(self, block: int, kept: KeptUnits, tensors: dict[str, Tensor]) -> None:
        widths = {space: len(units) // self.model.copies(space) for space, units in kept.items()}
        tensors |= self.model.note_widths(block, tensors, widths)

    def _cut(self, block: int, before: KeptUnits, kept: KeptUnits, tensors: dict[str, Tensor], new: Tensors) -> None:
        """Drop lines of a site, besides those that went before, and put in what compensation has rewritten."""
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        earlier = self.model.remaining_lines(before)
        for module, kind, dim, lines in list_cuts(self.model.remaining_lines(kept)):
            name = self.model.tensor(block, module, kind)
            if name in new or name not in tensors or len(lines) == tensors[name].shape[dim]:
                continue
            cut = earlier.get((module, dim))
            places = lines if cut is None else positions_among(lines, cut[1])
            tensors[name] = tensors[name].index_select(dim, places)
        pairs = self.model.kept_pairs(kept)
        if pairs is not None:
            tensors[self.model.pairs_name(block)] = pairs
        for name, tensor in new.items():
            # A bias that is new has the type of its weight.
            tensors[name] = tensor.to(dtypes.get(name, dtypes[f"{name.rpartition('.')[0]}.weight"]))

    def _pad(self, block: int, kept: KeptUnits, tensors: dict[str, Tensor]) -> None:
        """Put what stayed back in its dense place, with zeros for dropped units: what they held has no effect."""
        if not self.padded & kept.keys():
            return
        if self.padded & self.model.family.rotary_spaces.keys():
            tensors.pop(self.model.pairs_name(block), None)
        narrow = {space: units for space, units in kept.items() if space not in self.padded}
        narrow_lines = self.model.remaining_lines(narrow)
        for module, kind, dim, lines in list_cuts(self.model.remaining_lines(kept)):
            name = self.model.tensor(block, module, kind)
            if name not in tensors:
                continue
            cut = narrow_lines.get((module, dim))
            old_lines = self.model.line_numbers(block, module, dim) if cut is None else cut[1]
            if len(old_lines) > len(lines):
                shape = list(tensors[name].shape)
                shape[dim] = len(old_lines)
                zeros = tensors[name].new_zeros(shape)
                tensors[name] = zeros.index_copy_(dim, positions_among(lines, old_lines), tensors[name])
        self._note(block, narrow, tensors)


class AtSite(NamedTuple):
    """A site as it is solved.

    Attributes:
        solver: of the space, on the model as earlier sites of the block have left it.
        tensors: what it was solved from; they change when the next site is asked for.
        moments: one for each fold, or None if the recipe needs none.
        solved: as `Solver.solve` returns it.
    """

    solver: Solver
    tensors: Tensors
    moments: SpaceMoments | None
    solved: SolvedSite
