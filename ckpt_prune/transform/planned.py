"""Making a plan: every site decided and predicted, without writing a tensor."""

from ckpt_prune.errors import UserError
from ckpt_prune.planning.plan import Plan, SitePlan
from ckpt_prune.planning.records import StatisticsReference
from ckpt_prune.progress import track
from ckpt_prune.transform.checks import check_plannable
from ckpt_prune.transform.settle import Settled
from ckpt_prune.transform.shifts import Shifting
from ckpt_prune.transform.solvers import solver_of


def make_plan(settled: Settled, shifting: Shifting | None = None) -> Plan:
    """Decide and predict for every site.

    Args:
        settled: the job.
        shifting: what asks how sites do on other statistics, if anything.

    Raises:
        UserError: the recipe has a mask, or needs data to measure on.
    """
    request, model, recipe = settled.request, settled.model, settled.recipe
    check_plannable(recipe)
    if request.sequential:
        raise UserError("a plan is made from statistics: calibrate first, or let prune measure with --text")
    solvers = [solver_of(model, recipe, space, request.device) for space in recipe.spaces]
    engine, source = settled.unit_engine(), settled.moments()
    sites: list[SitePlan] = []
    for block in track(model.spaced, "planning", total=len(model.spaced)):
        known = request.statistics
        metric = known.fisher(block) if known is not None and known.index.fisher else {}
        read = {name: tensor for solver in solvers for name, tensor in solver.read(block).items()}
        for at in engine.sites(block, read, source, None if shifting is None else shifting.source):
            solver, plan = at.solver, at.solved[0]
            fisher = metric.get(model.moments_name(block, plan.site.space))
            if fisher is not None:
                plan.divergence = solver.divergence(block, at.tensors, at.moments or (), at.solved, fisher)
            if shifting is not None:
                shifting.see(block, at)
            sites.append(plan)
    statistics = None
    whole = request.whole
    if whole.statistics is not None:
        # As it was given: a plan is shown to others, who need not know where its maker keeps things.
        path = str(whole.statistics.folder)
        statistics = StatisticsReference(path=path, digest=whole.statistics.index.digest)
    container = settled.output.container
    return Plan(
        model=whole.model.checkpoint.fingerprint,
        model_path=model.checkpoint.name,
        recipe=whole.recipe,
        recipe_digest=whole.recipe.digest,
        origin=whole.origin,
        statistics=statistics,
        container=container.model_type if container.remote_class is None else "remote",
        container_note=container.note,
        before=settled.before,
        after=settled.output.cost,
        depth=None if request.shortened is None else request.shortened.record,
        sites=sites,
    )
