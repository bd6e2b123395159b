"""The work of the stage `low_rank`: check models, and factor blocks."""

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moment_sources import CachedMoments
from ckpt_prune.model.family import DATA_OPTIONS
from ckpt_prune.stages.low_rank.factorer import Factorer
from ckpt_prune.stages.low_rank.stage import LowRank
from ckpt_prune.stages.moments import check_collected


def check_low_rank(low_rank: LowRank, prepared: Prepared) -> None:
    """Refuse models whose linear modules cannot be factored, and data that the method cannot use."""
    family, name = prepared.model.family, prepared.recipe.name
    if family.experts is not None:
        raise UserError(
            f"recipe {name} factors linear modules, and experts of a {family.model_type} have none of their own in "
            "transformers: prune their columns (spaces.mlp)"
        )
    if low_rank.update and prepared.live is None:
        raise UserError(
            f"recipe {name} fits factors to what reaches them behind factored blocks: give "
            f"{DATA_OPTIONS[family.modality]} in place of --statistics"
        )
    if prepared.statistics is not None:
        check_collected(prepared, prepared.statistics)


def factorer_of(low_rank: LowRank, prepared: Prepared) -> Factorer:
    """Return what factors the linear modules of a block."""
    dense = None
    if low_rank.update and prepared.statistics is not None:
        dense = CachedMoments(prepared.statistics, prepared.model)
    return Factorer(prepared.model.family, prepared.output.ranks, prepared.device, dense)
