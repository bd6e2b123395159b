"""Compute some blocks of an output again, and compare them."""

import random
from pathlib import Path

from pydantic import ValidationError

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.job import Job
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.runner.run_job import preview_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.folders import find_functions, stages_of
from ckpt_prune.stages.report import Report, find_report
from ckpt_prune.stages.shared.equality import BLOCKS, away
from ckpt_prune.stages.shared.moments import open_moments

_LIMIT = 1e-3
"""Allowed difference, as a share of a tensor's largest value. Other machines and numbers of threads cause far less."""


def recompute_blocks(folder: Path, dense: Path, statistics: Path) -> tuple[bool | None, str]:
    """Prune some blocks of the dense model again and hold them against the output's.

    Returns:
        Whether they are the same; None where an output of its kind cannot be made again block by block. And what was
        found.
    """
    report = find_report(folder)
    if report is None:
        raise UserError(f"{folder} has no {REPORT}: nothing says how it was made")
    measured = Statistics(statistics)
    made_from = report.data().get("calibration", {}).get("statistics")
    if why := _not_by_blocks(report, made_from):
        return None, f"not computed again: {why}"
    if made_from != measured.index.digest:
        raise UserError(f"{folder} was made from other statistics than {statistics}: give those")
    prepared = preview_job(Job(Model.open(dense), _recipe(report), measured))
    checkpoint = prepared.model.checkpoint
    out = Checkpoint.open(folder).rename(checkpoint.aliases).split(checkpoint.stacks).transpose(checkpoint.transposed)
    pruners = [(stage, stage.pruner(prepared)) for stage in stages_of(prepared.recipe)]
    stage, pruner = next((stage, pruner) for stage, pruner in pruners if pruner is not None)
    source = open_moments(prepared, stage.grams(prepared))
    count = prepared.model.blocks
    # An engine also tells whoever runs the block its widths, which are no tensors of a file.
    stored = {name for tensors in prepared.output.layout.values() for name in tensors}
    chosen = sorted(random.SystemRandom().sample(range(count), min(BLOCKS, count)))
    largest = 0.0
    for block in track(chosen, "computing again", unit="block"):
        pruned, _ = pruner.block(block, prepared.view.block(block), source)
        for name in sorted(pruned.keys() & stored):
            if name not in out.tensors:
                return False, f"{name} of block {block} is not there"
            off = away(out.read([name])[name], pruned[name])
            if off > _LIMIT:
                return False, f"{name} is not what the recipe makes of the source: {off:.2g} of its largest value away"
            largest = max(largest, off)
    same = "bit for bit" if largest == 0 else f"{largest:.2g} of a tensor's largest value away at most"
    return True, f"{plural(len(chosen), 'block')} of {count} computed again: {same}"


def _not_by_blocks(report: Report, made_from: object) -> str | None:
    """Return why an output cannot be made again from statistics, one block without the others."""
    if report.part is not None:
        return "it is a part of another model"
    for ask in find_functions("not_by_blocks", "verify"):
        if why := ask(report):
            return str(why)
    if made_from is None:
        return "it was measured on text or images as it was pruned, each block behind the pruned ones before it"
    return None


def _recipe(report: Report) -> Recipe:
    try:
        recipe = FullRecipe.model_validate(report.data()["recipe"])
    except ValidationError as error:
        raise UserError(f"{REPORT} holds a recipe that this version does not read: prune again") from error
    if recipe.digest != report.recipe_digest:
        raise UserError(f"{REPORT} holds another recipe than its digest is of: prune again")
    return recipe
