"""The work of the stage `low_rank`: two thin linear modules take the place of each (SVD-LLM)."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.job.step import Step
from ckpt_prune.measure.moment_sources import CachedMoments
from ckpt_prune.model.family import DATA_OPTIONS
from ckpt_prune.show.section import format_span
from ckpt_prune.stages.low_rank.factorer import Factorer
from ckpt_prune.stages.low_rank.keys import LowRank
from ckpt_prune.stages.shared.measure_dense import measure_and_choose, preview_choice
from ckpt_prune.stages.shared.moments import check_collected, prune_step
from ckpt_prune.stages.shared.output import plan_output
from ckpt_prune.stages.shared.tokens import INPUTS, check_linears, widest_linear


class LowRankStage(Stage[LowRank]):
    """Makes the linear modules of every block products of two.

        version: 1
        name: thin
        ratio: 0.2
        low_rank: {method: whitened, allocation: energy}

    In order: `check` refuses mixtures and data without Grams. `preview` and `run` choose the ranks, by placeholders or
    by measured energies. `step` factors a block, by its `pruner` on the moments that `grams` asks for. `report` lists
    ranks.
    """

    of = LowRank
    measured_words = INPUTS

    def check(self, prepared: Prepared) -> None:
        """Refuse models whose linear modules cannot be factored, and data that the method cannot use."""
        family, name = prepared.model.family, prepared.recipe.name
        check_linears(prepared.model, "factored")
        if family.experts is not None:
            raise UserError(
                f"recipe {name} factors linear modules, and experts of a {family.model_type} have none of their own in "
                "transformers: prune their columns (spaces.mlp)"
            )
        if self.keys.update and prepared.live is None:
            raise UserError(
                f"recipe {name} fits factors to what reaches them behind factored blocks: give "
                f"{DATA_OPTIONS[family.modality]} in place of --statistics"
            )
        if prepared.statistics is not None:
            check_collected(prepared, prepared.statistics)

    def preview(self, prepared: Prepared) -> Prepared:
        return preview_choice(prepared, plan_output)

    def plan_lines(self, prepared: Prepared) -> list[str]:
        ranks = [rank for block in prepared.output.ranks for rank in block.values()]
        if prepared.foreseen:
            return [
                f"to be factored: {len(ranks)} linears, at one share everywhere into ranks of {format_span(ranks)}; "
                "measuring finds ranks of that size that lose less"
            ]
        return [f"to be factored: {len(ranks)} linears, into ranks of {format_span(ranks)}"]

    def widest_fit(self, prepared: Prepared) -> int:
        return widest_linear(prepared) if self.keys.whitens else 0

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        return measure_and_choose(prepared, run, plan_output)

    def pruner(self, prepared: Prepared) -> Factorer:
        dense = None
        if self.keys.update and prepared.statistics is not None:
            dense = CachedMoments(prepared.statistics, prepared.model)
        return Factorer(prepared.model.family, prepared.output.ranks, prepared.device, dense)

    def grams(self, prepared: Prepared) -> dict[str, bool] | None:
        return dict.fromkeys(prepared.model.family.inputs, True) if self.keys.whitens else None

    def step(self, prepared: Prepared, run: Run) -> Step:
        return prune_step(self.pruner(prepared), self.grams(prepared), prepared)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        return {"factored": list(records)}
