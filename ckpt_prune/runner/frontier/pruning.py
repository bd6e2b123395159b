"""Pruning a candidate of a frontier, as `prune` does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.composites import takes_all
from ckpt_prune.model.supported import read_model_config
from ckpt_prune.options.commands import FrontierOptions, PruneOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.runner.frontier.asked import INPUTS
from ckpt_prune.runner.prune import prune_model
from ckpt_prune.runner.prune_parts import prune_parts
from ckpt_prune.runner.read_recipe import read_recipe

_SAME = (*INPUTS, "seed", "choose", "bos", "compute_dtype", "device", "trust_remote_code")
"""Options that `prune` has, too."""


def same_options(options: FrontierOptions) -> dict[str, Any]:
    """Return the options that `prune` has, too, but for those of the number and length of samples."""
    return {name: getattr(options, name) for name in _SAME}


def prune_by(recipe: Mapping[str, Any], options: FrontierOptions, samples: Samples, out: Path) -> None:
    """Prune MODEL by a recipe into a folder, on the samples that `frontier` has chosen, unless an earlier run has."""
    out.parent.mkdir(exist_ok=True)
    file = out.with_name(f"{out.name}-recipe.yaml")
    file.write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
    given = {"recipe": str(file), "samples": len(samples), "window": samples.tokens, "evaluate_samples": 0}
    prune_into(out, same_options(options) | given, progress=options.progress)


def prune_into(out: Path, given: Mapping[str, Any], *, progress: Any) -> PruneOptions:
    """Prune by options of `prune` into a folder, unless an earlier run has, and return the options."""
    out.parent.mkdir(exist_ok=True)
    run = {"output": out, "resume": out.with_name(f"{out.name}.partial").exists(), "progress": progress}
    options = check_options(PruneOptions, {**given, **run})
    if not out.is_dir() and takes_all(read_model_config(options.model)):
        prune_parts(options.model_copy(update={"part": "all"}))
    elif not out.is_dir():
        prune_model(options, read_recipe(options), foresees=False)
    return options
