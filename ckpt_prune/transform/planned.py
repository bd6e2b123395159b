"""Making a plan: every site decided and predicted, without writing a tensor."""

from ckpt_prune.architectures.sites import Site
from ckpt_prune.errors import UserError
from ckpt_prune.planning.plan import Plan, SitePlan
from ckpt_prune.planning.records import StatisticsReference
from ckpt_prune.progress import track
from ckpt_prune.transform.checks import check_plannable
from ckpt_prune.transform.settle import Settled
from ckpt_prune.transform.solvers import solver_of


def make_plan(settled: Settled) -> Plan:
    """Decide and predict for every site.

    Raises:
        UserError: the recipe has a mask, or needs data to measure on.
    """
    request, model, recipe = settled.request, settled.model, settled.recipe
    check_plannable(recipe)
    if request.sequential:
        raise UserError("a plan is made from statistics: calibrate first, or let prune measure with --text")
    spaces = [space for space in model.family.spaces if space in recipe.spaces]
    solvers = {s: solver_of(model, recipe, s, request.device, diagnostics=request.diagnostics) for s in spaces}
    decisions, source = settled.decisions, settled.moments()
    sites: list[SitePlan] = []
    for block in track(range(model.blocks), "planning", total=model.blocks):
        moments = source.moments(block, {}, spaces)
        known = request.statistics
        metric = known.fisher(block) if known is not None and known.index.fisher else {}
        for space, solver in solvers.items():
            decision, tensors = decisions.of(model, Site(block, space)), solver.read(block)
            solved = solver.solve(block, tensors, moments.get(space), decision)
            fisher = metric.get(model.moments_name(block, space))
            if fisher is not None:
                solved[0].divergence = solver.divergence(block, tensors, moments.get(space, ()), solved, fisher)
            sites.append(solved[0])
    statistics = None
    if request.statistics is not None:
        path = str(request.statistics.folder.resolve())
        statistics = StatisticsReference(path=path, digest=request.statistics.index.digest)
    container = settled.output.container
    return Plan(
        model=model.checkpoint.fingerprint,
        model_path=str(model.checkpoint.path),
        recipe=recipe,
        recipe_digest=recipe.digest,
        statistics=statistics,
        container=container.model_type if container.remote_class is None else "remote",
        container_note=container.note,
        before=settled.before,
        after=settled.output.cost,
        sites=sites,
    )
