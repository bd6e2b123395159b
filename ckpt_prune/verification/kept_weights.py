"""Comparing the weights that an output keeps with the dense model's, as far as its report says they are unchanged."""

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.records import SiteRecord
from ckpt_prune.model.cuts import list_cuts, positions_among
from ckpt_prune.model.factors import factor_names
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import is_parameter, parse_config
from ckpt_prune.model.spaces import SpaceName, expert_space
from ckpt_prune.stages.low_rank.records import FactoredRecord
from ckpt_prune.stages.report import Report
from ckpt_prune.verification.equality import (
    check_kept_blocks,
    check_outside_blocks,
    find_difference,
    is_same,
    list_mapped_tensors,
)
from ckpt_prune.verification.kept_stream import check_head, check_kept_stream
from ckpt_prune.verification.masks import rewriting_method

Sites = dict[SpaceName, SiteRecord]
"""The sites of one block by their spaces."""


def check_kept_rows(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool, str]:
    """Check that producers of pruned spaces hold exactly the dense rows of the kept units."""
    model = Model.of(dense)
    compared, refits = 0, 0
    absorbing: dict[str, int] = {}
    for block in track(sorted({site.block for site in report.sites}), "comparing", unit="block"):
        sites = _read_sites(model, report, block)
        refitted = {
            module
            for space, site in sites.items()
            if space in model.family.expert_spaces and model.family.experts is not None
            for module in model.family.experts.list_rewritten(site.method)
        }
        if fault := _find_fault(checkpoint, model, report, block, sites, refitted):
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
    if method := rewriting_method(report):
        uncompared.append(f"{plural(len(report.linears), 'masked weight')} rewritten by {method}")
    more = "".join(f"; {what} and not compared" for what in uncompared)
    return True, f"producers of {compared} pruned spaces hold the dense rows, bit for bit{more}"


def _read_sites(model: Model, report: Report, block: int) -> Sites:
    """Return the sites of a block by their spaces. Raises UserError if the dense model has not such units."""
    sites: Sites = {}
    for site in report.sites:
        if site.block != block:
            continue
        space = expert_space(site.space, site.expert)
        if space not in model.family.spaces:
            raise UserError(f"{REPORT} keeps units of {space}, which the dense model has not")
        units = model.site_units(space)
        if site.units != units or not all(0 <= unit < units for unit in site.kept):
            raise UserError(f"{REPORT} keeps units of {space} in block {block} that the dense model has not")
        sites[space] = site
    return sites


def _find_fault(
    checkpoint: Checkpoint, model: Model, report: Report, block: int, sites: Sites, refitted: set[str]
) -> str | None:
    """Say which tensor of a block is the first that does not hold the dense one's rows; None if all do."""
    kept = {space: torch.tensor(site.kept, dtype=torch.int64) for space, site in sites.items()}
    stored = {space: units for space, units in kept.items() if space not in report.container.padded}
    narrow = model.remaining_lines(stored)
    rewritten = {m for space, site in sites.items() for m in model.family.spaces[space].list_rewritten(site.method)}
    masked = {linear.weight for linear in report.linears}
    skipped = list_mapped_tensors(report.depth, checkpoint.tensors) | (masked if rewriting_method(report) else set())
    for module, kind, dim, lines in list_cuts(model.remaining_lines(kept)):
        name = model.tensor(block, module, kind)
        if module in rewritten or name in skipped or name not in model.checkpoint.tensors:
            continue
        stored_lines = narrow[module, dim][1] if (module, dim) in narrow else model.line_numbers(module, dim)
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


_PRODUCT_TOLERANCE = 1e-6
"""Of a weight's norm: sums of the same numbers in another order differ by far less."""


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool | None, str]:
    """Check that what the output keeps of the dense model, as `read_dense_at_depth` gives it, is unchanged.

    None if nothing can be compared.
    """
    if report.rotation is not None:
        return None, "the weights are rotated: they are not compared with the dense model's"
    passed, detail = _check_blocks(match_checkpoint(checkpoint)[0], dense, report)
    if passed is False or report.hidden is not None:
        return passed, detail
    head_passed, head_detail = check_head(checkpoint, dense, report)
    return (passed, detail) if head_passed is not False else (False, head_detail)


def _check_blocks(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool | None, str]:
    rewriting = [kind.key for kind in Recipe.full.kinds if kind.rewrites and kind.key in report.entries]
    if rewriting:
        return (
            None,
            f"{' and '.join(rewriting)} changed weights that stay: they are not compared with the dense model's",
        )
    hidden = report.hidden
    if report.recovery is not None or report.adapters is not None:
        if hidden is not None:
            return None, "the stream has another basis: the weights are not compared with the dense model's"
        norms = report.recovery is not None and report.recovery.trained_norms
        return _check_untrained(checkpoint, dense, norms_trained=norms)
    if hidden is not None and hidden.energy and hidden.kind == "shared":
        return check_kept_stream(checkpoint, dense, report, hidden)
    if hidden is not None and hidden.energy:
        passed, detail = check_outside_blocks(checkpoint, Model.of(dense))
        return passed, f"{detail}; those inside have absorbed bases and are not compared" if passed else detail
    if report.depth is not None and not report.sites:
        return check_kept_blocks(checkpoint, dense, report.depth)
    if report.factored:
        return _check_factors(checkpoint, dense, report)
    if report.linears and not report.sites:
        return _check_masked(checkpoint, dense, report)
    return check_kept_rows(checkpoint, dense, report)


def _check_untrained(checkpoint: Checkpoint, dense: Checkpoint, *, norms_trained: bool) -> tuple[bool, str]:
    """Compare what recovery does not train: what is outside linear modules, or outside blocks if it trains norms."""
    dense, family = match_checkpoint(dense)
    blocks = range(family.dimension(parse_config(dense.config), "layers"))
    trained = {family.tensor(block, module, kind) for block in blocks for module in family.linears for kind in KINDS}
    prefixes = tuple(family.block.format(block=block) for block in blocks) if norms_trained else ()
    compared = [name for name in filter(is_parameter, checkpoint.tensors) if name not in trained]
    compared = [name for name in compared if not name.startswith(prefixes)]
    if difference := find_difference(checkpoint, dense, compared):
        return False, f"{difference}, and recovery does not change it"
    return True, (
        f"{len(compared)} tensors outside the recovered {'blocks' if norms_trained else 'linear modules'} are the "
        "dense ones, bit for bit; the weights that were recovered are not compared"
    )


def _check_masked(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool, str]:
    """Compare masked weights, unless their method rewrites them, and all others."""
    dense, _ = match_checkpoint(dense)
    masked, method = {linear.weight for linear in report.linears}, rewriting_method(report)
    compared = [name for name in checkpoint.tensors if method is None or name not in masked]
    if difference := find_difference(checkpoint, dense, compared, masked):
        return False, difference
    count = plural(len(report.linears), "masked weight")
    others = f"{len(checkpoint.tensors) - len(masked)} other tensors are the dense ones, bit for bit"
    if method is not None:
        return True, f"{others}; {count} rewritten by {method} and not compared"
    return True, f"{count}: what is not zero is the dense model's; {others}"


def _check_factors(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool, str]:
    """Compare products of factors with the dense weights, and all other tensors."""
    dense, _ = match_checkpoint(dense)
    factors = {name for linear in report.factored for name in factor_names(linear.weight)}
    others = [name for name in checkpoint.tensors if name not in factors]
    if difference := find_difference(checkpoint, dense, others):
        return False, difference
    for linear in track(report.factored, "comparing factors", unit="tensor"):
        if fault := _find_factor_fault(linear, checkpoint, dense):
            return False, f"{linear.weight} {fault}"
    return True, (
        f"{len(report.factored)} products of two factors are as far from the dense weights as {REPORT} says; "
        f"{len(others)} other tensors are the dense ones, bit for bit"
    )


def _find_factor_fault(linear: FactoredRecord, checkpoint: Checkpoint, dense: Checkpoint) -> str | None:
    """Say how the factors of a weight differ from its record; None if they do not."""
    down, up = factor_names(linear.weight)
    if not {down, up} <= checkpoint.tensors.keys():
        return "has no two factors"
    if linear.weight not in dense.tensors or dense.tensors[linear.weight].shape != (linear.rows, linear.columns):
        return f"of the dense model has not the shape {[linear.rows, linear.columns]}"
    factors = checkpoint.read([down, up])
    shapes = [list(factors[name].shape) for name in (up, down)]
    if shapes != [[linear.rows, linear.rank], [linear.rank, linear.columns]]:
        return f"has factors of {shapes[0]} and {shapes[1]}, its report of rank {linear.rank}"
    weight = dense.read([linear.weight])[linear.weight].double()
    error = torch.linalg.norm(factors[up].double() @ factors[down].double() - weight) / torch.linalg.norm(weight)
    if linear.change is not None and abs(error.item() - linear.change) > _PRODUCT_TOLERANCE:
        return f"is {error:.4g} of its norm away from the product of its factors, {REPORT} says {linear.change:.4g}"
    return None
