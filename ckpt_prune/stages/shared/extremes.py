"""Lines on recipes that take nothing, or so much that the model is ruined."""

from collections.abc import Mapping

from ckpt_prune.recipe.recipe import Recipe

_RUINED, _RUINED_TOGETHER = 0.1, 0.25
"""A model is ruined with so small a share of one kind of its units, or of all kinds."""


def nothing_goes(recipe: Recipe) -> str | None:
    """Say that a stage takes nothing away at its ratio; None if other stages change or export something."""
    if sum(keys.changes_weights for keys in recipe.stages) > 1 or any(keys.writes for keys in recipe.stages):
        return None
    return (
        "a ratio of 0 takes nothing away, and the output is the dense model again: say a larger --ratio, such "
        "as 0.2, or how large the output may be, such as --target-params 80%"
    )


def ruined_line(shares: Mapping[str, float], usual: str) -> str | None:
    """Say that so little stays that the model is ruined; None if it is not.

    Args:
        shares: what → the share of it that stays.
        usual: the ratios that are usual, with their verb.
    """
    if not shares or (min(shares.values()) > _RUINED and max(shares.values()) > _RUINED_TOGETHER):
        return None
    stays = " and ".join(f"{share:.1%} of {name}" for name, share in shares.items())
    return (
        f"{stays} would stay: the model is ruined then, whatever makes up for it. {usual} usual; where a model has to "
        "be that small, take fewer bits (`ckpt-prune quantize`) or one trained at that size"
    )


def fewest(gone: int) -> str:
    """Say how many would go at the least for the size that is asked for."""
    return f"{gone}, the fewest for this size" if gone else "none"
