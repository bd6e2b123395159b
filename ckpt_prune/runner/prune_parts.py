"""`prune --part all`: one part of a model, and then the other behind it.

A vision language model has a tower and a text part, an encoder-decoder has two stacks.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.model_folder import resolve_model
from ckpt_prune.checkpoint.staging import partial_of
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.model.composites import both_parts
from ckpt_prune.model.supported import read_local_config
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.prune import Pruned, Tell, check_needed_pairs, foresee, prune_model
from ckpt_prune.runner.read_recipe import read_recipe


def prune_parts(options: PruneOptions, tell: Tell | None = None) -> Pruned:
    """Prune both parts into one output, which has the report of either.

    The part that is pruned first is in OUT.PART until the output is complete. What cannot work is refused for both
    before data is read.
    """
    out, parts = options.output, both_parts(read_local_config(str(resolve_model(options.model))))
    place = out.with_name(f"{out.name}.{parts[0]}")
    before = _of_tower(options, place) if parts[0] == "vision" else options.model_copy(update=_first(parts[0], place))
    after = options.model_copy(update={"part": parts[1], "images": (), "labels": None})
    first, second = read_recipe(before), read_recipe(after)
    check_needed_pairs(after, second)
    nothing = {"text": (), "images": (), "labels": None, "data": None, "dry_run": True}
    for each, chosen in ((before, first), (after, second)):
        foresee(each.model_copy(update=nothing), chosen)
    if options.dry_run:
        return replace(prune_model(after, second, goes_on=True), first=prune_model(before, first, goes_on=True))

    def tell_first(pruned: Pruned, following: str) -> None:
        if tell is not None:
            tell(replace(pruned, goes_on=True), following)

    begun = options.resume and (partial_of(place).exists() or place.exists())
    before = before.model_copy(update={"resume": begun, "overwrite": not begun})
    prune_model(before, first, tell_first, goes_on=True)
    begun = options.resume and (partial_of(out).exists() or out.exists())
    after = after.model_copy(update={"model": str(place), "resume": begun})
    try:
        return prune_model(after, second, tell, dense=options.model)
    finally:
        if (out / REPORT).is_file() and not partial_of(out).exists():
            process_group().on_first(lambda: shutil.rmtree(place, ignore_errors=True))


def _first(part: str, place: Path) -> dict[str, Any]:
    """Return options of what is pruned first: it is neither measured nor pushed by itself."""
    nothing = {"vocabulary": None, "push": None, "public": False, "evaluate": (), "evaluate_samples": 0}
    return {"part": part, "output": place, **nothing}


def _of_tower(options: PruneOptions, place: Path) -> PruneOptions:
    """Return the options for the tower: its images, its recipe, and a folder in which it waits."""
    changes = {
        **_first("vision", place),
        "data": None if options.images else options.data,
        "choose": options.choose if options.choose == "first" else "random",
        **{"text": (), "window": None, "bos": "auto", "samples": None},
    }
    if options.vision_recipe is not None:
        changes |= {"recipe": options.vision_recipe, "overrides": ()}
    if options.vision_ratio is not None:
        changes["ratio"] = options.vision_ratio
    return options.model_copy(update=changes)
