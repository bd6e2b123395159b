"""`plan`: every site is decided and predicted, and nothing is written but the plan."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices, track
from ckpt_prune.job.job import Job
from ckpt_prune.job.layout import find_shared_key
from ckpt_prune.job.plan import Plan, SitePlan
from ckpt_prune.job.prepared import Prepared, RankedSites, RankedUnits, begin
from ckpt_prune.job.records import DepthRecord, StatisticsReference
from ckpt_prune.model.spaces import Site, first_expert_spaces
from ckpt_prune.options.commands import PlanOptions
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.shipped import RecipeFile
from ckpt_prune.recipe.sizes import small_share_line
from ckpt_prune.runner.checks import check_data, check_fit
from ckpt_prune.runner.estimate import estimate_plan
from ckpt_prune.runner.latency import with_latencies
from ckpt_prune.runner.messages import wider_choice
from ckpt_prune.runner.plannable import check_plannable
from ckpt_prune.runner.read_job import check_plan_place, read_plan_job
from ckpt_prune.runner.runtimes import check_stored
from ckpt_prune.stages.depth.choice import drop_planned_blocks
from ckpt_prune.stages.shared.moments import open_moments
from ckpt_prune.stages.shared.output import plan_output
from ckpt_prune.stages.spaces.messages import multiples_line, size_lines
from ckpt_prune.stages.spaces.run import choose_widths, grams_of, pruner_of
from ckpt_prune.stages.spaces.same_units import choose_same_units
from ckpt_prune.stages.spaces.show import mean_errors, mean_held_out
from ckpt_prune.stages.spaces.solvers import solver_of


@dataclass(frozen=True)
class Planned:
    """A plan, which `prune(plan=…)` takes, and its job."""

    plan: Plan
    settled: Prepared = field(repr=False)
    path: Path | None

    @property
    def messages(self) -> list[str]:
        """Say which sizes units are too coarse for, what multiples cost, and what else would lose less."""
        others = wider_choice(self.settled), multiples_line(self.settled), self.stacks_line
        return [line for line in (*size_lines(self.settled), *others) if line]

    @property
    def stacks_line(self) -> str | None:
        """Say that other stacks keep as many units, if a config key counts those of all; None if it does not."""
        model = self.settled.model
        key = find_shared_key(model)
        if key is None:
            return None
        return (
            f"{key} of {model.family.model_type} states the width of all stacks of blocks: the others keep as many, "
            "and sizes are those with this stack alone pruned; `ckpt-prune prune` without --part prunes all of them"
        )

    @property
    def takes(self) -> str:
        """Say what a prune by the plan will take on this machine."""
        return f"pruning by it takes {estimate_plan(self.settled.job, self.plan).line}"

    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.plan.to_json())
        return data

    def comparison(self) -> dict[str, Any]:
        """Return what `--json` prints of a plan beside others of the same model and statistics.

        Errors are means over blocks after compensation, relative to each output's energy, by space; `held_out` those
        on folds that the fit has not seen. The divergence is the predicted KL of the model's output in nats (without a
        head, a share of the energy of its last hidden states). Each is None where the statistics do not tell it.
        """
        plan = self.plan
        sites = {
            name: [site for site in plan.sites if site.space == name]
            for name in first_expert_spaces(plan.recipe.spaces)
        }
        pairs = {name: mean_errors(records) for name, records in sites.items()}
        return {
            "recipe": plan.recipe.name,
            "after": plan.after.model_dump(),
            "container": "remote code" if plan.container == "remote" else plan.container,
            "errors": {name: None if pair is None else pair[1] for name, pair in pairs.items()},
            "held_out": {name: mean_held_out(records) for name, records in sites.items()},
            "divergence": plan.divergence,
            "messages": self.messages,
        }


def plan_model(options: PlanOptions, file: RecipeFile, recipe: Recipe) -> Planned:
    """Make a plan by a recipe, with the changes that options make to its file (`ckpt_prune.plan`)."""
    say = Notices()
    job = with_latencies(read_plan_job(options, file, recipe), say)
    settled = prepare_plan(job)
    check_stored(settled)
    job.model.checkpoint.check_finite()
    if (warning := small_share_line(options.sizes)) is not None:
        say(warning)
    plan = make_plan(settled)
    if options.output is not None:
        check_plan_place(options.output, overwrite=options.overwrite)  # planning takes time
        write_atomically(options.output, plan.to_json())
    return Planned(plan, settled, options.output)


def prepare_plan(job: Job, ranked: Mapping[Site, Sequence[RankedUnits]] | None = None) -> Prepared:
    """Decide which blocks and how many units stay, from statistics alone.

    Args:
        ranked: units of every site, if they were ranked already.
    """
    prepared = begin(job) if ranked is None else begin(job).knowing(RankedSites(ranked))
    check_fit(prepared)
    check_data(prepared)
    shortened = drop_planned_blocks(prepared)
    if shortened is not prepared:
        check_fit(shortened)
    return choose_widths(shortened) if shortened.recipe.spaces else plan_output(shortened)


def make_plan(prepared: Prepared) -> Plan:
    """Decide and predict for every site."""
    model, recipe = prepared.model, prepared.recipe
    check_plannable(recipe)
    if prepared.sequential:
        raise UserError("a plan is made from statistics: calibrate first, or let prune measure with --text")
    prepared = choose_same_units(prepared)
    solvers = [solver_of(model, recipe, space, prepared.device) for space in recipe.spaces]
    engine = pruner_of(prepared)
    source = open_moments(prepared, grams_of(prepared) if recipe.spaces else None)
    sites: list[SitePlan] = []
    for block in track(model.spaced_blocks, "planning", total=len(model.spaced_blocks)):
        measured = prepared.statistics
        metric = measured.read_fisher(block) if measured is not None and measured.index.fisher else {}
        present = [solver for solver in solvers if solver.space in model.spaces(block)]
        read = {name: tensor for solver in present for name, tensor in solver.read(block).items()}
        for at in engine.sites(block, read, source):
            solver, plan = at.solver, at.solved[0]
            fisher = metric.get(model.moments_name(block, plan.site.space))
            if fisher is not None:
                plan.divergence = solver.divergence(at.tensors, at.moments or (), at.solved, fisher)
            sites.append(plan)
    statistics = None
    dense_job = prepared.whole
    if dense_job.statistics is not None:
        # As it was given: a plan is shown to others, who need not know where its maker keeps things.
        path = str(dense_job.statistics.folder)
        statistics = StatisticsReference(path=path, digest=dense_job.statistics.index.digest)
    container = prepared.output.container
    return Plan(
        model=dense_job.model.checkpoint.fingerprint,
        model_path=model.checkpoint.name,
        recipe=dense_job.recipe,
        recipe_digest=dense_job.recipe.digest,
        origin=dense_job.job.origin,
        statistics=statistics,
        container=container.model_type if container.remote_class is None else "remote",
        container_note=container.note,
        before=prepared.before,
        after=prepared.output.cost,
        depth=prepared.facts(DepthRecord),
        sites=sites,
    )
