"""What stages that work on every linear module, rather than on spaces, ask of statistics."""

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.statistics.folder import Statistics


def check_collected(prepared: Prepared, statistics: Statistics) -> None:
    """Refuse statistics that lack what a mask or factors are computed from.

    Raises:
        UserError: with what is lacking.
    """
    lacking = [kind for kind in prepared.recipe.collect if kind not in statistics.index.collect]
    if lacking and prepared.recipe.needs_moments:
        raise UserError(
            f"recipe {prepared.recipe.name} needs {' and '.join(prepared.recipe.collect)}, and {statistics.folder} has "
            f"no {' and no '.join(lacking)}: calibrate with --collect {','.join(prepared.recipe.collect)}"
        )
