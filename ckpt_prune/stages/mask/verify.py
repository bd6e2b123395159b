"""Whether masked weights have the zeros, and their groups the pattern, that the report says."""

from collections.abc import Set

import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Check, Finding, run_check
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.common.zero_patterns import GroupPattern, parse_pattern
from ckpt_prune.model.family import Family
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.sparsity.zeros import crowded_groups, find_zeros, pattern_of_all, share_of_all, weights_by_module
from ckpt_prune.stages.mask.records import MaskedLinear
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.equality import find_difference

_ONLY_ZEROING = {"magnitude", "wanda"}
"""Mask methods that leave the weights they keep as they were."""


def rewriting_method(report: Report) -> str | None:
    """Return the mask's method if it also changes the weights that it keeps."""
    return report.mask.method if report.mask and report.mask.method not in _ONLY_ZEROING else None


def _group_pattern(report: Report) -> GroupPattern | None:
    """Return N:M of the report's mask; None if unstructured or absent. Raises ValueError if it cannot be meant."""
    groups = parse_pattern(report.mask.pattern) if report.mask else None
    if groups is not None and report.mask is not None and report.mask.shares is not None:
        kept = report.mask.shares.kept or []
        if any(count > groups.of for count in kept) or any(linear.block >= len(kept) for linear in report.linears):
            raise ValueError("shares of a mask that are not those of its blocks")
    return groups


def _check_masks(checkpoint: Checkpoint, report: Report | None) -> Finding:
    """Count zeros in every masked weight, and look for groups that keep too many weights."""
    if report is None or report.mask is None or not report.linears:
        try:
            return None, f"no mask recorded; {_describe_zeros(*match_checkpoint(checkpoint))}"
        except UserError:  # as of a model in several stages, of which each has a description
            return None, "no mask recorded"
    checkpoint, family = match_checkpoint(checkpoint)
    faults: list[str] = []
    zeros = weights = 0
    for linear in track(report.linears, "checking masks", unit="tensor"):
        tensor = checkpoint.read([linear.weight])[linear.weight]
        count = int((tensor == 0).sum())
        zeros, weights = zeros + count, weights + tensor.numel()
        if fault := _find_fault(linear, tensor, count, _block_pattern(report, linear)):
            faults.append(f"{linear.weight} {fault}")
        elif report.mask.only is not None and _is_of_attention(linear, family) != (report.mask.only == "attention"):
            faults.append(f"{linear.weight} is not of the {report.mask.only}, which alone was masked")
    masked = plural(len(report.linears), "masked weight")
    if faults:
        return False, f"{faults[0]}; {len(faults)} of {masked} do not hold their mask"
    groups = _group_pattern(report)
    by_block = " with its block's N" if groups and report.mask.shares is not None else ""
    holds = f", {groups}{by_block} holds in every group" if groups else ""
    of = "" if report.mask.only is None else f" of the {report.mask.only}"
    return True, f"{masked}{of}: {100 * zeros / max(1, weights):.1f} % zeros{holds}"


def _is_of_attention(linear: MaskedLinear, family: Family) -> bool:
    return linear.weight in {family.tensor(linear.block, module) for module in family.linears_of("attention")}


def _block_pattern(report: Report, linear: MaskedLinear) -> GroupPattern | None:
    """Return N:M of one masked weight; None if it is unstructured, or its block has no zeros."""
    groups = _group_pattern(report)
    if groups is None or report.mask is None or report.mask.shares is None:
        return groups
    kept = (report.mask.shares.kept or [])[linear.block]
    return None if kept == groups.of else GroupPattern(kept, groups.of)


def _find_fault(linear: MaskedLinear, tensor: torch.Tensor, zeros: int, groups: GroupPattern | None) -> str | None:
    """Say how a masked weight differs from its record; None if it does not."""
    if tensor.shape != (linear.rows, linear.columns):
        return f"has shape {list(tensor.shape)}, its mask {[linear.rows, linear.columns]}"
    if zeros < linear.zeros:
        return f"has {zeros} zeros, its mask {linear.zeros}"
    if groups is None:
        return None
    if linear.columns % groups.of:
        return f"has rows of {linear.columns} weights, which are no groups of {groups.of}"
    crowded = crowded_groups(tensor, groups.kept, groups.of)
    return f"does not hold {groups} in {crowded} of its groups" if crowded else None


def _describe_zeros(checkpoint: Checkpoint, family: Family) -> str:
    """Say what share of the blocks' linear weights is zero, and which pattern all of them hold."""
    modules = weights_by_module(checkpoint.tensors, family.block, family.linears)
    zeros = list(find_zeros(checkpoint, [name for names in modules.values() for name in names]))
    share, pattern = share_of_all(zeros), pattern_of_all(zeros)
    holds = f", {pattern} holds in every group" if pattern else ""
    return f"{100 * share:.1f} % of block weights are zero{holds}"


def check_report(report: Report) -> None:
    """Raise ValueError if the mask of a report cannot be meant."""
    _group_pattern(report)


def checks(checkpoint: Checkpoint, report: Report | None) -> list[Check]:
    return [run_check("sparsity", lambda: _check_masks(checkpoint, report))]


def rewritten(checkpoint: Checkpoint, report: Report) -> set[str]:
    return set() if rewriting_method(report) is None else {linear.weight for linear in report.linears}


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report, changed: Set[str]) -> Finding | None:
    """Compare masked weights, unless their method rewrites them, and all others."""
    if not report.linears or report.sites or report.rotation is not None:
        return None
    dense, _ = match_checkpoint(dense)
    masked, method = {linear.weight for linear in report.linears}, rewriting_method(report)
    compared = checkpoint.tensors.keys() - changed - rewritten(checkpoint, report)
    if difference := find_difference(checkpoint, dense, sorted(compared), masked):
        return False, difference
    count = plural(len(report.linears), "masked weight")
    others = f"{len(compared - masked)} other tensors are the dense ones, bit for bit"
    if method is not None:
        return True, f"{others}; {count} rewritten by {method} and not compared"
    return True, f"{count}: what is not zero is the dense model's; {others}"
