"""Dense checkpoints of cases with their statistics, each made once, and what is pruned from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.job.job import Job, LiveSamples, RecoverySamples
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import list_collected_by_default, measure_statistics
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.recipe.space_kinds import FACTS
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from tests.encoders import DEFAULTS, STRENGTH

from .models import Case


class Dense:
    """Dense checkpoints and statistics.

    Args:
        root: where they are kept.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._statistics: dict[Case, Statistics] = {}
        self._models: dict[Case, Model] = {}

    def folder(self, case: Case) -> Path:
        folder = self.root / str(case)
        return folder if folder.exists() else case.write(folder)

    def model(self, case: Case) -> Model:
        if case not in self._models:
            self._models[case] = Model.open(self.folder(case))
        return self._models[case]

    def statistics(self, case: Case) -> Statistics:
        if case not in self._statistics:
            model, out = self.model(case), self.root / f"{case}.statistics"
            options: dict[str, Any] = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
            collect = (*list_collected_by_default(model), *(("rotary",) if model.family.rotary_spaces else ()))
            self._statistics[case] = measure_statistics(
                model, case.samples(), out, seed=0, folds=2, collect=collect, **options
            )
        return self._statistics[case]

    def request(self, case: Case, recipe: FullRecipe, live: Samples | None = None, **more: Any) -> Job:
        """On live samples, or on statistics where there are none."""
        if live is not None:
            return Job(self.model(case), recipe, live=LiveSamples(live, 2, torch.float32), **more)
        statistics = self.statistics(case) if recipe.needs_moments else None
        return Job(self.model(case), recipe, statistics, **more)

    def prune(
        self,
        case: Case,
        recipe: FullRecipe,
        out: Path,
        live: Samples | None = None,
        training: RecoverySamples | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """The report of an output."""
        job = self.request(case, recipe, live, training=training)
        return run_job(job, out, **options).report.data()


def spaces_recipe(case: Case, methods: Mapping[SpaceName, str], container: str = "any", **top: Any) -> FullRecipe:
    """Prune these spaces by the case's ratios."""
    spaces = {}
    for space, method in methods.items():
        strength = {"lambda": STRENGTH} if FACTS[method].uses_strength else {}
        compensation = {"method": method} | strength
        spaces[space] = DEFAULTS[space] | {"ratio": case.ratio(space), "compensation": compensation}
    return FullRecipe.model_validate({"version": 1, "name": "test", "container": container, "spaces": spaces, **top})
