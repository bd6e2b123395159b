"""A plan on other statistics than it was made from: what every site loses there."""

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moment_sources import CachedMoments
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.stages.spaces.pruner import AtSite
from ckpt_prune.stages.spaces.solvers import SOLVERS

_WORDS = {
    "gram": "Grams",
    "logits": "moments of queries and keys",
    "centred": "moments of centred keys",
    "rotary": "moments of rotary pairs",
}


class Shifting:
    """Looks on while a plan is made, and asks of every site what it loses on other statistics.

    Args:
        statistics: of the same model on other text or images.

    Attributes:
        source: of the other moments, for `Pruner.sites`.
        left: spaces of which nothing is told: moments do not say what becomes of whole experts.
        same: whether both were measured on the same samples, so that nothing is held against others.
    """

    def __init__(self, prepared: Prepared, statistics: Statistics) -> None:
        if prepared.depth is not None:
            name = prepared.whole.recipe.name
            raise UserError(
                f"--test holds sites against other samples, and recipe {name} drops whole blocks: leave it out"
            )
        statistics.check_model(prepared.model)
        own = prepared.statistics
        if own is not None and own.index.digest == statistics.index.digest:
            raise UserError(
                f"--test {statistics.folder} holds the same statistics as --statistics: measure others, on other "
                "samples"
            )
        needed = _needed(prepared)
        for each in (own, statistics):
            if each is None:
                raise UserError("--test holds a plan against other statistics than it was made from: give --statistics")
            for kind in needed:
                if kind not in each.index.collect:
                    raise UserError(
                        f"--test needs {_WORDS[kind]}, and {each.folder} has none: calibrate with "
                        f"--collect moments,{','.join(needed)}"
                    )
        self.source = CachedMoments(statistics, prepared.model)
        self.left: list[str] = []
        self.same = own is not None and own.index.data == statistics.index.data

    def see(self, block: int, at: AtSite) -> None:
        """One site, solved: its plan gets what it loses on the others."""
        plan, new = at.solved
        if new is None:
            return
        plan.shift = at.solver.shift(at.tensors, at.moments or (), at.others or (), at.solved)
        if plan.shift is None and plan.space not in self.left:
            self.left.append(plan.space)


def _needed(prepared: Prepared) -> list[str]:
    """Kinds of moments that the sites of a recipe are held against other samples by, beside vectors."""
    recipe, spaces = prepared.recipe, prepared.model.family.spaces
    found = {SOLVERS[spaces[space].ends].collects for space in recipe.spaces}
    return [kind for kind in _WORDS if kind in found or (kind == "centred" and kind in recipe.collect)]
