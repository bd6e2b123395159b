"""Check that the tensors which recovery does not train are the dense model's."""

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.skeleton import is_parameter, parse_config
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.equality import find_difference


def not_by_blocks(report: Report) -> str | None:
    return None if report.recovery is None and report.adapters is None else "its weights were trained"


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> Finding | None:
    """Compare what is not trained, unless the weights are in another basis as well."""
    if (report.recovery is None and report.adapters is None) or report.rotation or report.hidden:
        return None
    norms = report.recovery is not None and report.recovery.trained_norms
    return _check_untrained(checkpoint, dense, norms_trained=norms)


def _check_untrained(checkpoint: Checkpoint, dense: Checkpoint, *, norms_trained: bool) -> Finding:
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
