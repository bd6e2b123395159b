"""Helpers for tests of dimensions and blocks that go together with units of spaces."""

from pathlib import Path
from typing import Any

import torch

from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.samples.samples import SampleRange
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from tests.cli.running import TEXT
from tests.families import stock

WIDTHS = """\
version: 1
name: mine
allocation: least-error
target: drift
container: any
spaces:
  heads: {score: rcpu, compensation: {method: ridge}}
  mlp: {score: rcpu, compensation: {method: ridge}}
"""
JOB = ("--recipe", "mine.yaml", *TEXT, "--folds", "2")


def divergence_on_the_second_fold(folder: str, **values: Any) -> float:
    """Measure how far a model pruned by these values on the first fold of `JOB` is from the dense one on the second."""
    options = PruneOptions.model_validate(
        {"model": folder, "output": "out", "text": ("calib.txt",), "samples": 8, "window": 16}
    )
    model = Model.open(folder)
    samples = choose_samples(model, options, trust=False, say=print)
    recipe = FullRecipe.model_validate({"version": 1, "name": "first", **values})
    live = LiveSamples(SampleRange(samples, 0, 4), 1, torch.float32)
    run_job(Job(model, recipe, live=live), Path("first"))
    return divergence(folder, "first", samples.batch(slice(4, 8))["input_ids"])


def divergence(folder: str, pruned: str, ids: torch.Tensor) -> float:
    """KL(dense ‖ pruned) of stock transformers, in float64, the mean over windows (n, T) of tokens."""
    with torch.no_grad():
        dense, short = (
            torch.log_softmax(stock(Path(name)).double()(input_ids=ids, use_cache=False).logits, -1)
            for name in (folder, pruned)
        )
    return float((dense.exp() * (dense - short)).sum(-1).mean())
