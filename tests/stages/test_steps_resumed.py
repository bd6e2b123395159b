"""Every pair of steps that go together, stopped between two blocks: a resumed run writes the bytes of one go."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from ckpt_prune.job.job import RecoverySamples
from ckpt_prune.job.step import Step
from ckpt_prune.runner import run_job as running
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.shared import walk as module
from tests.families import contents, job_on, prune, recipe, windows
from tests.interrupting import stop_before
from tests.reports import recover
from tests.stages.recovering import QUICK, recovery_job, training_data

MASK = {"version": 1, "name": "test", "target": "sequential", "ratio": 0.5, "mask": {"method": "wanda"}}
RECOVERY = {"recovery": QUICK}
PUPIL = {"recovery": QUICK | {"teacher": "pruned"}}
ROTATION = {"rotation": {"kind": "per-layer", "steps": 2, "measured": "pruned"}}
BY_PERPLEXITY = {"lambda_by": "perplexity", "lambda_grid": [0.01, 1.0]}
DEPTH = {"depth": {"drop": 1, "choose": "cosine"}}


def pruning(**top: Any) -> dict[str, Any]:
    return recipe("ridge", lam=0.1).model_dump(mode="json", by_alias=True) | {"target": "sequential"} | top


RECIPES: dict[str, dict[str, Any]] = {
    "mask": MASK,
    "mask on the dense model": MASK | {"target": "dense"},
    "mask and recovery": MASK | RECOVERY,
    "mask and recovery towards what is left": MASK | PUPIL,
    "rotations in turn": MASK | ROTATION,
    "rotations in turn and recovery": MASK | ROTATION | RECOVERY,
    "units": pruning(),
    "units, one space after the other": pruning(true_sequential=True),
    "units of a strength by perplexity": recipe("ridge", search=BY_PERPLEXITY).model_dump(mode="json", by_alias=True),
    "units and recovery": pruning(**RECOVERY),
    "units by drift and recovery": pruning(target="drift", **RECOVERY),
    "units and scales": pruning(recovery=QUICK | {"method": "scales"}),
    "blocks and units": pruning(**DEPTH),
    "blocks, units and scales": pruning(**DEPTH, recovery=QUICK | {"method": "scales"}),
    "a narrower stream and units": pruning(hidden={"drop": 8, "kind": "shared"}),
    "factors": {"version": 1, "name": "test", "target": "sequential", "ratio": 0.3, "low_rank": {"method": "whitened"}},
}


class Rounding(Step):
    """A step for these tests: rounds every matrix of a block coarsely, so that what is written is not what was left."""

    record = BaseModel

    def act(self, block: int, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], list[BaseModel]]:
        return {name: (8 * tensor).round() / 8 if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}, []

    def advance(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        pass


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every walk end with rounding."""
    monkeypatch.setattr(
        running, "walk", lambda view, steps, *args, **more: module.walk(view, with_rounding(steps), *args, **more)
    )
    monkeypatch.setattr(
        running, "read_records", lambda model, steps, store: module.read_records(model, with_rounding(steps), store)
    )


def with_rounding(steps: Mapping[str, Step]) -> dict[str, Step]:
    return {**steps, "rounded": Rounding()}


def job(sources: Any, name: str) -> Any:
    full_recipe = FullRecipe.model_validate(RECIPES[name])
    training = RecoverySamples(training_data("llama"), torch.float32, after=frozenset({1}))
    options = {} if full_recipe.recovery is None else {"training": training}
    return job_on(sources.folder("llama"), full_recipe, live=windows(4, 16), **options)


@pytest.mark.parametrize("name", RECIPES)
def test_steps_of_a_recipe(sources, tmp_path, name):
    prune(job(sources, name), tmp_path / "whole")
    stop = "block 1" if name.startswith("blocks") else "block 2"  # one block fewer
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            prune(job(sources, name), tmp_path / "out")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out.partial", "whole"]
    prune(job(sources, name), tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_steps_of_recover(sources, tmp_path):
    def again(out: Path, **options: Any) -> None:
        recover(recovery_job(tmp_path / "pruned", sources.folder("llama"), training_data("llama")), out, **options)

    prune(job(sources, "mask"), tmp_path / "pruned")
    again(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, "block 2")
        with pytest.raises(KeyboardInterrupt):
            again(tmp_path / "out")
    again(tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
