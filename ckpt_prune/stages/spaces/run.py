"""The work of the stage `spaces`: choose how many units stay, and prune blocks."""

import math
from dataclasses import replace
from functools import partial

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.decisions import decide_by_plan
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.stages.shared.moments import prune_step
from ckpt_prune.stages.shared.output import plan_output
from ckpt_prune.stages.shared.walk import walk
from ckpt_prune.stages.spaces.checks import check_enough_samples
from ckpt_prune.stages.spaces.keys import Spaces
from ckpt_prune.stages.spaces.pruner import Pruner
from ckpt_prune.stages.spaces.records import StrengthSearch
from ckpt_prune.stages.spaces.size_search import at_size
from ckpt_prune.stages.spaces.widths import decide, ranking_of

_MOST_NLL = 700.0
"""The exponential of a larger number is not finite."""


def choose_widths(prepared: Prepared) -> Prepared:
    """Decide how many units of every site stay, if that is known before anything else is measured."""
    if prepared.decided is not None:
        return plan_output(prepared)
    ranking = ranking_of(prepared)
    sized = at_size(prepared, ranking)
    if sized is not prepared:
        check_enough_samples(sized)  # what it asks depends on the ratio
    if not sized.widths_known:
        return sized
    decisions = decide_by_plan(sized.model, sized.plan) if sized.plan is not None else decide(sized, ranking)
    return plan_output(replace(sized, decided=decisions, planned=None))


def pruner_of(prepared: Prepared) -> Pruner:
    container, diagnostics = prepared.output.container, bool(prepared.diagnostics)
    return Pruner(prepared.model, prepared.decisions, container.biases, prepared.device, diagnostics, container.padded)


def grams_of(prepared: Prepared) -> dict[str, bool]:
    """Return for every space whether live moments of it hold more than the least."""
    return {space: prepared.recipe.measures_more(space) for space in prepared.recipe.spaces}


def choose_strength(prepared: Prepared, run: Run) -> Prepared:
    """Choose the strength of least calibration perplexity, if the recipe leaves it open."""
    if not prepared.recipe.perplexity_grid or prepared.job.plan is not None:
        return prepared

    def search() -> StrengthSearch:
        with run.timer.time("lambda search"):
            return search_strength(prepared)

    run.done["search"] = record = run.remember("search", StrengthSearch, search)
    return prepared.with_strength(record.chosen)


def search_strength(prepared: Prepared) -> StrengthSearch:
    """Choose the strength by the perplexity of the pruned model on the calibration text (RCPU 7.1).

    The model is pruned once per value, block by block, and nothing is written. If two are equal, the larger one
    is chosen, which stays nearer to the kept weights. A perplexity that is not finite is never chosen, and is None in
    the result; if none is finite, that is refused.
    """
    grid = prepared.recipe.perplexity_grid
    assert grid is not None
    perplexities: dict[float, float | None] = {}
    for strength in grid:
        trial = prepared.with_strength(strength)
        trial = replace(trial, job=replace(trial.job, diagnostics=False))
        step = prune_step(pruner_of(trial), grams_of(trial), trial)
        stream = step.prefix(partial(trial.live_stream, trial.view))
        walk(trial.view, {Spaces.key: step}, doing=f"trying lambda {strength:g}")
        nll = stream.measure_nll()
        perplexities[strength] = math.exp(nll) if nll < _MOST_NLL else None
    finite = {strength: value for strength, value in perplexities.items() if value is not None}
    if not finite:
        tried = ", ".join(f"{strength:g}" for strength in perplexities)
        raise UserError(
            f"no lambda of the grid ({tried}) gives a finite perplexity on the calibration text: "
            "drop less, or try other values with lambda_grid"
        )
    chosen = min(finite, key=lambda strength: (finite[strength], -strength))
    return StrengthSearch(chosen=chosen, perplexity={f"{strength:g}": ppl for strength, ppl in perplexities.items()})
