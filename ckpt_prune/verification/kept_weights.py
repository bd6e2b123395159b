"""Comparing the weights that an output keeps with the dense model's, as far as its report says they are unchanged."""

import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.records import FactoredLinear
from ckpt_prune.job.report import Report
from ckpt_prune.model.factors import factor_names
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import parse_config
from ckpt_prune.verification.equality import check_outside_blocks, find_difference
from ckpt_prune.verification.kept_blocks import check_kept_blocks
from ckpt_prune.verification.kept_head import check_head
from ckpt_prune.verification.kept_rows import check_kept_rows
from ckpt_prune.verification.kept_stream import check_kept_stream
from ckpt_prune.verification.masks import rewriting_method

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
    compared = [name for name in checkpoint.tensors if name not in trained and not name.startswith(prefixes)]
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


def _find_factor_fault(linear: FactoredLinear, checkpoint: Checkpoint, dense: Checkpoint) -> str | None:
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
