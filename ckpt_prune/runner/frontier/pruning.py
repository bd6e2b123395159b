"""Pruning a candidate of a frontier by its recipe, as `prune` does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.options.commands import FrontierOptions, PruneOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.runner.prune import prune_model
from ckpt_prune.runner.read_recipe import read_recipe

SAME = ("model", "text", "seed", "choose", "bos", "compute_dtype", "device", "trust_remote_code", "progress")
"""Options that `prune` has, too."""


def prune_by(recipe: Mapping[str, Any], options: FrontierOptions, samples: Samples, out: Path) -> None:
    """Prune MODEL by a recipe into a folder, on the samples that `frontier` has chosen, unless an earlier run has."""
    if out.is_dir():
        return
    out.parent.mkdir(exist_ok=True)
    file = out.with_name(f"{out.name}-recipe.yaml")
    file.write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
    given: dict[str, Any] = {name: getattr(options, name) for name in SAME}
    given |= {"samples": len(samples), "window": samples.tokens, "evaluate_samples": 0}
    given |= {"recipe": str(file), "output": str(out), "resume": out.with_name(f"{out.name}.partial").exists()}
    pruning = check_options(PruneOptions, given)
    prune_model(pruning, read_recipe(pruning))
