"""Whether an output with bare blocks has their shapes, and the dense model's tensors where nothing was trained."""

from collections.abc import Set

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.model.model import Model
from ckpt_prune.stages.bare.preview import bare_model
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.equality import find_difference


def not_by_blocks(report: Report) -> str | None:
    return None if report.bare is None else "its blocks were trained together"


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report, changed: Set[str]) -> Finding | None:
    """Check the shapes of all tensors, and that those that were not trained are the dense ones."""
    bare = report.bare
    if bare is None:
        return None
    model = Model.of(dense)
    expected = bare_model(model, {each.block: each.columns for each in bare.replaced})
    if checkpoint.tensors.keys() != expected.checkpoint.tensors.keys():
        return False, "the tensors are not those of the dense model without these attentions"
    for name, info in expected.checkpoint.tensors.items():
        if checkpoint.tensors[name].shape != info.shape:
            return False, f"{name} has not the columns that the report names"
    trained = {name for block in range(bare.trained) for name in model.block_names(block)}
    untrained = [name for name in checkpoint.tensors if name not in trained and name not in changed]
    if difference := find_difference(checkpoint, dense, untrained):
        return False, difference
    return True, (
        f"{len(bare.replaced)} blocks have no attention; {len(untrained)} tensors outside the {bare.trained} blocks "
        "that were trained are the dense ones, bit for bit"
    )
