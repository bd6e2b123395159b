"""The work of the stage `spaces`: drop units of spaces in every block, and make up for them in closed form."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import SiteRecord
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.job.step import Step
from ckpt_prune.model.containers.choosing import unprunable_spaces
from ckpt_prune.stages.shared.measure_dense import measure_and_choose, preview_choice
from ckpt_prune.stages.shared.moments import prune_step
from ckpt_prune.stages.shared.tokens import INPUTS
from ckpt_prune.stages.spaces.checks import check_measured, check_sites
from ckpt_prune.stages.spaces.keys import Spaces
from ckpt_prune.stages.spaces.messages import (
    extreme_line,
    multiples_line,
    same_units_lines,
    size_lines,
    strength_line,
    units_line,
    untouched_line,
    widest_fit,
)
from ckpt_prune.stages.spaces.pruner import Pruner
from ckpt_prune.stages.spaces.run import choose_strength, choose_widths, grams_of, pruner_of
from ckpt_prune.stages.spaces.same_units import choose_same_units


class SpacesStage(Stage[Spaces]):
    """Drops units of spaces; shapes get smaller.

        version: 1
        name: mine
        ratio: 0.2
        target: sequential
        spaces: {heads: {score: rcpu}, mlp: {score: rcpu, compensation: {method: ridge}}}

    In order: `check` refuses sites and scores that the model does not have, `check_data` data without their moments.
    `preview` and `run` choose how many units stay, by one ratio or by measured effects. `before_blocks` chooses units
    that all blocks have in common, and a strength for all. `step` prunes and refits a block, by its `pruner` on the
    moments that `grams` asks for. `report` lists every site.
    """

    of = Spaces
    measured_words = INPUTS

    def check(self, prepared: Prepared) -> None:
        check_sites(prepared)

    def check_data(self, prepared: Prepared) -> None:
        check_measured(prepared)

    def preview(self, prepared: Prepared) -> Prepared:
        """Decide how many units stay; one ratio everywhere stands for widths that measuring will choose."""
        return preview_choice(prepared, choose_widths)

    def kept_words(self, prepared: Prepared) -> str:
        return units_line(prepared)

    def extreme_line(self, prepared: Prepared) -> str | None:
        return extreme_line(prepared)

    def messages(self, prepared: Prepared) -> list[str]:
        refused = unprunable_spaces(prepared.model)
        lines = [refused[space] for space in prepared.left_whole if space in refused]
        others = [multiples_line(prepared), untouched_line(prepared)]
        return [*lines, *size_lines(prepared), *same_units_lines(prepared), *filter(None, others)]

    def warnings(self, prepared: Prepared) -> list[str]:
        return list(filter(None, [strength_line(prepared)]))

    def widest_fit(self, prepared: Prepared) -> int:
        return widest_fit(prepared)

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        return measure_and_choose(prepared, run, choose_widths)

    def before_blocks(self, prepared: Prepared, run: Run) -> Prepared:
        return choose_strength(choose_same_units(prepared, run), run)

    def pruner(self, prepared: Prepared) -> Pruner:
        return pruner_of(prepared)

    def grams(self, prepared: Prepared) -> dict[str, bool]:
        return grams_of(prepared)

    def step(self, prepared: Prepared, run: Run) -> Step:
        return prune_step(pruner_of(prepared), grams_of(prepared), prepared)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        sites = [SiteRecord.model_validate(record.model_dump(exclude={"scores"})) for record in records]
        decided_on = prepared.statistics if prepared.recipe.weighed_by_effect and prepared.plan is None else None
        spread = None if decided_on is None else decided_on.index.spread
        return {"sites": sites, "lambda_search": run.done.get("search"), "spread": spread or None}
