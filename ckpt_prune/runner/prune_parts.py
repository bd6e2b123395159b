"""`prune --part all`: the tower of a vision language model, and then the text part behind the pruned tower."""

import shutil
from dataclasses import replace
from pathlib import Path

from ckpt_prune.checkpoint.staging import partial_of
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.prune import Pruned, Tell, foresee, prune_model
from ckpt_prune.runner.read_recipe import read_recipe


def prune_parts(options: PruneOptions, tell: Tell | None = None) -> Pruned:
    """Prune both parts into one output, which has the report of either.

    The pruned tower is in OUT.vision until the output is complete. What cannot work is refused for both before data is
    read.
    """
    out = options.output
    place = out.with_name(f"{out.name}.vision")
    tower, text = _of_tower(options, place), options.model_copy(update={"part": "text", "images": None, "labels": None})
    first, second = read_recipe(tower), read_recipe(text)
    nothing = {"text": (), "images": None, "labels": None, "data": None, "dry_run": True}
    for each, chosen in ((tower, first), (text, second)):
        foresee(each.model_copy(update=nothing), chosen)
    if options.dry_run:
        return replace(prune_model(text, second), tower=prune_model(tower, first))

    def tell_first(pruned: Pruned, following: str) -> None:
        if tell is not None:
            tell(replace(pruned, goes_on=True), following)

    begun = options.resume and (partial_of(place).exists() or place.exists())
    prune_model(tower.model_copy(update={"resume": begun, "overwrite": not begun}), first, tell_first)
    begun = options.resume and (partial_of(out).exists() or out.exists())
    text = text.model_copy(update={"model": str(place), "resume": begun})
    try:
        return prune_model(text, second, tell, dense=options.model)
    finally:
        if (out / REPORT).is_file() and not partial_of(out).exists():
            process_group().on_first(lambda: shutil.rmtree(place, ignore_errors=True))


def _of_tower(options: PruneOptions, place: Path) -> PruneOptions:
    """Return the options for the tower: its images, its recipe, and a folder in which it waits."""
    own = {
        "part": "vision",
        "output": place,
        "data": options.data if options.images is None else None,
        "choose": options.choose if options.choose == "first" else "random",
        **{"text": (), "window": None, "bos": "auto", "samples": None, "vocabulary": None, "push": None},
        **{"public": False, "evaluate": (), "evaluate_samples": 0},
    }
    if options.vision_recipe is not None:
        own |= {"recipe": options.vision_recipe, "overrides": ()}
    if options.vision_ratio is not None:
        own["ratio"] = options.vision_ratio
    return options.model_copy(update=own)
