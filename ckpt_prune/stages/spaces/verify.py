"""Whether producers of pruned spaces hold the dense model's rows of the units that stay."""

from collections.abc import Set

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.records import SiteRecord
from ckpt_prune.model.cuts import list_cuts, positions_among
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName, expert_space
from ckpt_prune.stages.mask.verify import rewriting_method
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.equality import is_same

Sites = dict[SpaceName, SiteRecord]
"""The sites of one block by their spaces."""


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report, changed: Set[str]) -> Finding | None:
    """Check that producers of pruned spaces hold exactly the dense rows of the kept units."""
    if not report.sites or report.rotation or (report.hidden and report.hidden.energy):
        return None
    model = Model.of(dense)
    compared, refits = 0, 0
    absorbing: dict[str, int] = {}
    if differing := next((space for space in model.family.spaces if _differs(model, report, space)), None):
        return False, f"{REPORT} keeps different {differing} in different blocks, which have one table for all"
    for block in track(sorted({site.block for site in report.sites}), "comparing", unit="block"):
        sites = _read_sites(model, report, block)
        refitted = {
            module
            for space, site in sites.items()
            if space in model.family.expert_spaces and model.family.experts is not None
            for module in model.family.experts.list_rewritten(site.method)
        }
        if fault := _find_fault(checkpoint, model, report, block, sites, refitted, changed):
            return False, fault
        refits += bool(refitted)
        for space, site in sites.items():
            spec = model.family.spaces[space]
            if makers := set(spec.readers) & set(spec.list_rewritten(site.method)):
                names = " and ".join(sorted((model.family.labels[module] for module in makers), key="qkv".index))
                absorbing[names] = absorbing.get(names, 0) + 1
            else:
                compared += len(site.kept) < site.units
    uncompared = [f"{names} of {blocks} blocks are rewritten" for names, blocks in absorbing.items()]
    if refits:
        uncompared.append(f"last projections of the experts of {plural(refits, 'block')} are refitted")
    others = changed - {linear.weight for linear in report.linears}
    if model.family.is_stack:  # those outside its blocks are other stacks'
        blocks = model.family.blocks_prefix
        others = {name for name in others if name.startswith(blocks)}
    if others:
        uncompared.append(f"{plural(len(others), 'tensor')} that other stages changed")
    if method := rewriting_method(report):
        uncompared.append(f"{plural(len(report.linears), 'masked weight')} rewritten by {method}")
    more = "".join(f"; {what} and not compared" for what in uncompared)
    return True, f"producers of {compared} pruned spaces hold the dense rows, bit for bit{more}"


def _differs(model: Model, report: Report, space: SpaceName) -> bool:
    """Return whether blocks keep different units of a space of which all are to keep the same."""
    kept = {tuple(site.kept) for site in report.sites if site.space == space}
    return model.family.spaces[space].same_units and len(kept) > 1


def _read_sites(model: Model, report: Report, block: int) -> Sites:
    """Return the sites of a block by their spaces. Raises UserError if the dense model has not such units."""
    sites: Sites = {}
    for site in report.sites:
        if site.block != block:
            continue
        space = expert_space(site.space, site.expert)
        if space not in model.spaces(block):
            raise UserError(f"{REPORT} keeps units of {space}, which the dense model has not")
        units = model.site_units(space, block)
        if site.units != units or not all(0 <= unit < units for unit in site.kept):
            raise UserError(f"{REPORT} keeps units of {space} in block {block} that the dense model has not")
        sites[space] = site
    return sites


def _find_fault(
    checkpoint: Checkpoint,
    model: Model,
    report: Report,
    block: int,
    sites: Sites,
    refitted: set[str],
    changed: Set[str],
) -> str | None:
    """Say which tensor of a block is the first that does not hold the dense one's rows; None if all do."""
    kept = {space: torch.tensor(site.kept, dtype=torch.int64) for space, site in sites.items()}
    stored = {space: units for space, units in kept.items() if space not in report.container.padded}
    narrow = model.remaining_lines(stored)
    rewritten = {m for space, site in sites.items() for m in model.family.spaces[space].list_rewritten(site.method)}
    masked = {linear.weight for linear in report.linears}
    for module, kind, dim, lines in list_cuts(model.remaining_lines(kept)):
        name = model.tensor(block, module, kind)
        if module in rewritten or name in changed or name not in model.checkpoint.tensors:
            continue
        stored_lines = narrow[module, dim][1] if (module, dim) in narrow else model.line_numbers(block, module, dim)
        rows = _read_lines(checkpoint, name, dim, stored_lines, lines)
        dense_rows = model.checkpoint.read([name])[name].index_select(dim, lines)
        if rows is None or not is_same(rows, dense_rows, or_zero=name in masked):
            return f"{name} does not hold the dense model's rows of the kept units"
    pairs = model.kept_pairs({space: units for space, units in stored.items() if len(units) < sites[space].units})
    name = model.pairs_name(block)
    if pairs is not None and not torch.equal(checkpoint.read([name])[name], pairs):
        return f"{name} does not name the rotary pairs that are kept"
    for name, before in model.map_experts(block, kept, refitted).items():
        if not is_same(checkpoint.read([name])[name], model.checkpoint.read([before])[before]):
            return f"{name} is not the dense model's {before}"
    return None


def _read_lines(checkpoint: Checkpoint, name: str, dim: int, held: Tensor, lines: Tensor) -> Tensor | None:
    """Read those of the lines `held` that are `lines`; None if the tensor has not as many as it should hold."""
    tensor = checkpoint.read([name])[name]
    return tensor.index_select(dim, positions_among(lines, held)) if tensor.shape[dim] == len(held) else None
