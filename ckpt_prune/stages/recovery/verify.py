"""Check that the tensors which recovery does not train are the dense model's."""

from collections.abc import Set

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.skeleton import is_parameter, parse_config
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.equality import find_difference


def not_by_blocks(report: Report) -> str | None:
    return None if report.recovery is None and report.adapters is None else "its weights were trained"


def rewritten(checkpoint: Checkpoint, report: Report) -> set[str]:
    """Return the tensors that were trained: those of linear modules, or all of the blocks if norms were, too.

    Beside them are tables, and what pools tokens, that have lost units.
    """
    if report.recovery is None and report.adapters is None:
        return set()
    checkpoint, family = match_checkpoint(checkpoint)
    blocks = range(family.dimension(parse_config(checkpoint.config), "layers"))
    pooling = [module for space in family.pooling.values() for module in space.modules] if report.sites else []
    linears = [*family.linears, *pooling]
    trained = {family.tensor(block, module, kind) for block in blocks for module in linears for kind in KINDS}
    tables = [table.module for space in family.spaces.values() for table in space.tables] if report.sites else []
    trained |= {family.tensor(block, table, "itself") for block in blocks for table in tables}
    prefixes = tuple(family.block.format(block=block) for block in blocks) if _trains_norms(report) else ()
    return {name for name in checkpoint.tensors if name in trained or name.startswith(prefixes)}


def _trains_norms(report: Report) -> bool:
    return report.recovery is not None and bool(report.recovery.trained_norms)


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report, changed: Set[str]) -> Finding | None:
    """Compare what is not trained, unless the weights are in another basis as well."""
    if (report.recovery is None and report.adapters is None) or report.rotation or report.hidden:
        return None
    trained = rewritten(checkpoint, report) | changed
    compared = [name for name in filter(is_parameter, checkpoint.tensors) if name not in trained]
    if difference := find_difference(checkpoint, match_checkpoint(dense)[0], compared):
        return False, f"{difference}, and recovery does not change it"
    inside = "blocks" if _trains_norms(report) else "linear modules"
    return True, (
        f"{len(compared)} tensors outside the recovered {inside} are the dense ones, bit for bit; the weights that "
        "were recovered are not compared"
    )
