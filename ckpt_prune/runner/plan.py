"""Making a plan: every site decided and predicted, without writing a tensor."""

from collections.abc import Mapping, Sequence

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.job.job import Job
from ckpt_prune.job.plan import Plan, SitePlan
from ckpt_prune.job.prepared import Prepared, RankedSites, RankedUnits, begin
from ckpt_prune.job.records import DepthRecord, StatisticsReference
from ckpt_prune.model.spaces import Site
from ckpt_prune.runner.checks import check_data, check_fit
from ckpt_prune.runner.plannable import check_plannable
from ckpt_prune.stages.depth.choice import drop_planned_blocks
from ckpt_prune.stages.shared.moments import open_moments
from ckpt_prune.stages.shared.output import plan_output
from ckpt_prune.stages.spaces.run import choose_widths, grams_of, pruner_of
from ckpt_prune.stages.spaces.solvers import solver_of


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
    solvers = [solver_of(model, recipe, space, prepared.device) for space in recipe.spaces]
    engine = pruner_of(prepared)
    source = open_moments(prepared, grams_of(prepared) if recipe.spaces else None)
    sites: list[SitePlan] = []
    for block in track(model.spaced_blocks, "planning", total=len(model.spaced_blocks)):
        given = prepared.statistics
        metric = given.read_fisher(block) if given is not None and given.index.fisher else {}
        read = {name: tensor for solver in solvers for name, tensor in solver.read(block).items()}
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
