"""`prune --part all`: one part of a model, and then the next behind it.

A vision language model has a tower and a text part, an encoder-decoder has two stacks, a model of images in stages one
for each.
"""

import shutil
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.model_folder import resolve_model
from ckpt_prune.checkpoint.staging import partial_of
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.progress import Notices
from ckpt_prune.model.composites import all_parts
from ckpt_prune.model.supported import read_local_config
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.prune import Pruned, Tell, check_needed_pairs, foresee, prune_model
from ckpt_prune.runner.read_recipe import read_recipe
from ckpt_prune.runner.resuming import NOTHING_BEGUN


def prune_parts(options: PruneOptions, tell: Tell | None = None) -> Pruned:
    """Prune all parts into one output, which has the report of each.

    Parts that are pruned first are in OUT.PART until the output is complete. What cannot work is refused for all
    before data is read.
    """
    out, parts = options.output, all_parts(read_local_config(str(resolve_model(options.model))))
    places = [out.with_name(f"{out.name}.{part}") for part in parts[:-1]]
    without_images = {} if "vision" not in parts else {"images": (), "labels": None}
    each_options = [
        _of_tower(options, place) if part == "vision" else options.model_copy(update=_first(part, place))
        for part, place in zip(parts, places, strict=False)
    ]
    each_options.append(options.model_copy(update={"part": parts[-1], **without_images}))
    chosen = [read_recipe(each) for each in each_options]
    check_needed_pairs(each_options[-1], chosen[-1])
    nothing = {"text": (), "images": (), "labels": None, "data": None, "dry_run": True}
    foreseen = [
        foresee(each.model_copy(update=nothing), recipe, last=each is each_options[-1])
        for each, recipe in zip(each_options, chosen, strict=True)
    ]
    if "vision" in parts and options.data is not None:
        from ckpt_prune.measure.samples.image_text import Reader

        whole = foreseen[-1].job.model.checkpoint.within
        assert whole is not None
        Reader(whole.whole, trust=options.trust_remote_code)
    if options.dry_run:
        pruned = [prune_model(each, recipe, goes_on=True) for each, recipe in zip(each_options, chosen, strict=True)]
        return reduce(lambda first, second: replace(second, first=first), pruned)

    def tell_first(pruned: Pruned, following: str) -> None:
        if tell is not None:
            tell(replace(pruned, goes_on=True), following)

    if options.resume and not any(each.exists() or partial_of(each).exists() for each in (*places, out)):
        Notices()(NOTHING_BEGUN)
    model = options.model
    for each, recipe, place in zip(each_options, chosen, places, strict=False):
        begun = options.resume and (partial_of(place).exists() or place.exists())
        changes = {"model": model, "resume": begun, "overwrite": not begun}
        prune_model(each.model_copy(update=changes), recipe, tell_first, goes_on=True)
        model = str(place)
    begun = options.resume and (partial_of(out).exists() or out.exists())
    after = each_options[-1].model_copy(update={"model": model, "resume": begun})
    try:
        return prune_model(after, chosen[-1], tell, dense=options.model)
    finally:
        if (out / REPORT).is_file() and not partial_of(out).exists():
            for place in places:
                process_group().on_first(partial(shutil.rmtree, place, ignore_errors=True))


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
