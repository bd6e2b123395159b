"""How many blocks go, placeholders for the choice before it is made, and what cannot go."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpt_prune.common.block_range import runs_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.job.plan import Plan
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord, GapRecord
from ckpt_prune.model.containers.no_attention import absent_modules, without_attention
from ckpt_prune.model.depth import can_shorten, check_shortened, shorten_model
from ckpt_prune.model.family import DATA_OPTIONS, Family
from ckpt_prune.model.model import Model
from ckpt_prune.model.runtimes import read_target
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.spaces.size_search import (
    at_own_size,
    check_reachable,
    dense_size,
    fewest_reachable,
    limit_of,
    out_of_reach,
)


@dataclass(frozen=True)
class Wanted:
    """How many blocks are to go, and among which.

    Attributes:
        count: blocks that go; the most that may where how many is found by measuring.
        allowed: blocks that may; where they are given, these alone.
    """

    count: int
    allowed: list[int]


def _left_to_do(recipe: Recipe) -> Recipe:
    """Return the recipe without this stage. A size stays if spaces or the residual stream have to meet it."""
    others = bool(recipe.spaces) or recipe.has("hidden")
    return recipe.without_stages(Depth.key).model_copy(update={"size": recipe.size if others else None})


def wanted_depth(prepared: Prepared) -> Wanted:
    """Find how many blocks are to go, and among which."""
    model, recipe, depth = prepared.model, prepared.recipe, prepared.stage(Depth)
    blocks, name = model.blocks, recipe.name
    if depth.blocks is not None:
        beyond = [block for block in depth.blocks if block >= blocks]
        if beyond:
            raise UserError(f"recipe {name} drops block {beyond[0]}: the model has blocks 0 to {blocks - 1}")
        _check_some_stay(name, len(depth.blocks), blocks)
        return Wanted(len(depth.blocks), depth.blocks)
    allowed = allowed_blocks(prepared)
    if depth.auto:
        return Wanted(_most(prepared, allowed), allowed)
    if recipe.size is not None and depth.part != "block" and not depth.leaves_out(recipe):
        instead = "--container remote, " if depth.part == "attention" else ""
        raise UserError(
            f"depth.part: {depth.part} leaves zeros, which save nothing: say {instead}--ratio, or part: block"
        )
    if recipe.size is not None and not recipe.spaces and not recipe.has("hidden"):
        count = _count_for_size(prepared, allowed)
    else:
        assert depth.drop != "auto"
        count = depth.drop or round(recipe.ratio * blocks)
        if not count:
            raise UserError(
                f"recipe {name} drops none of {plural(blocks, 'block')} at ratio {recipe.ratio:g}: say --ratio "
                f"{1 / blocks:.2g} or more, or --set depth.drop=1"
            )
    _check_some_stay(name, count, blocks)
    if count > len(allowed):
        raise UserError(
            f"recipe {name} drops {count} of {plural(blocks, 'block')}, and {len(allowed)} of them may go: drop fewer"
        )
    return Wanted(count, allowed)


def _check_some_stay(name: str, count: int, blocks: int) -> None:
    if count >= blocks:
        raise UserError(f"recipe {name} drops {count} of {plural(blocks, 'block')}: one has to stay at the least")


def allowed_blocks(prepared: Prepared) -> list[int]:
    """Blocks that may go: those of the recipe's layers, without a first one that something hangs on."""
    model, recipe = prepared.model, prepared.recipe
    blocks, depth = list(recipe.blocks(model.blocks)), prepared.stage(Depth)
    if depth.part != "block":
        targets = [read_target(text) for text in recipe.runs_on or []] if depth.leaves_out(recipe) else []
        first_stays = any("first attention" not in target.runtime.changes for target in targets)
        return [block for block in blocks if block or not first_stays]
    first_stays = depth.compensation.linear or not can_shorten(model, range(1, model.blocks))
    return [block for block in blocks if block or not first_stays]


def _count_for_size(prepared: Prepared, allowed: Sequence[int]) -> int:
    """Return the fewest blocks without which a model is within the recipe's size."""
    count, reached = _fewest(prepared, allowed)
    if count is not None:
        return count
    raise UserError(out_of_reach(prepared, "whose blocks leave", reached))


def _fewest(prepared: Prepared, allowed: Sequence[int]) -> tuple[int | None, int]:
    """Return the fewest blocks without which a model is within the recipe's size, or None, and the size reached."""
    model, size = prepared.model, prepared.recipe.size
    assert size is not None
    limit, reached = limit_of(prepared), 0
    for count in range(min(len(allowed), model.blocks - 1) + 1):
        record = depth_record(prepared, allowed[:count])
        reached = dense_size(replace(prepared, model=without(model, record)), size.kind)
        if reached <= limit:
            return count, reached
    return None, reached


def _most(prepared: Prepared, allowed: Sequence[int]) -> int:
    """Return the most blocks that may go if their number is found by measuring: then nothing else has to."""
    count, _ = _fewest(at_own_size(prepared), allowed)
    return prepared.model.blocks - 1 if count is None else count


def without(model: Model, record: DepthRecord) -> Model:
    """Return a model without what goes, unless that leaves zeros."""
    if record.part == "block":
        return shorten_model(model, record.kept)
    return without_attention(model, record.gone) if record.left_out else model


def check_depth(prepared: Prepared) -> None:
    """Refuse blocks that cannot be dropped, before anything is measured."""
    model, recipe, depth = prepared.model, prepared.recipe, prepared.stage(Depth)
    family = model.family
    data = DATA_OPTIONS[family.modality]
    if prepared.statistics is not None and depth.choice == "loss":
        raise UserError(f"recipe {recipe.name} runs the model itself: give {data} in place of --statistics")
    if prepared.statistics is not None and depth.choice is not None and prepared.statistics.index.stream is None:
        raise UserError(
            f"{prepared.statistics.folder} does not say what blocks do, by which recipe {recipe.name} "
            f"chooses them: run "
            f"`{recipe.calibration}` again"
        )
    if model.checkpoint.within is not None and not family.can_be_shorter_inside:
        raise UserError(
            f"recipe {recipe.name} drops whole blocks, and --part {model.checkpoint.within.part} of a composite keeps "
            "all of its own: choose a recipe with spaces"
        )
    if depth.auto and family.experts is not None:
        raise UserError(
            f"recipe {recipe.name} compares numbers of blocks beside what spaces lose, and experts are not tried out "
            "so: say a number, depth.drop, or --set depth=null"
        )
    if depth.compensation.linear and not find_map_spaces(family):
        shared = any(space.gate is not None or name == "shared" for name, space in family.part_spaces("mlp").items())
        reason = "experts that all tokens share add to it" if shared else "it may be one mlp or experts"
        raise UserError(
            f"recipe {recipe.name} maps what the mlp gives, and in a block of {family.model_type} {reason}: say --set "
            "depth.compensation.method=none"
        )
    several = depth.part == "mlp" and any(space.experts for space in family.consumers.values())
    if several and depth.choice in ("influence", "divergence"):
        raise UserError(
            f"recipe {recipe.name} measures what one projection gives, and a block of {family.model_type} ends in "
            "several (experts): choose loss, or give blocks"
        )
    if prepared.statistics is not None and depth.part != "block" and depth.choice is not None:
        raise UserError(f"statistics do not say what the {depth.part} of a block does: give {data} in their place")
    if depth.choice == "loss" and not family.causal:
        raise UserError("depth.choose: loss is for causal language models: choose: cosine, or divergence")
    if prepared.plan is not None:
        _check_planned(model, prepared.plan)
        return
    if depth.leaves_out(recipe):
        absent_modules(model, ())
    wanted_blocks = wanted_depth(prepared)
    if depth.part != "block":
        return
    if recipe.joint:
        check_reachable(shortest(prepared))
    check_shortened(model, range(model.blocks))
    if depth.blocks is not None:
        if depth.compensation.linear and 0 in depth.blocks:
            raise UserError(
                f"recipe {recipe.name} drops block 0, and no block before it could make up for it: say --set "
                "depth.compensation.method=none, or keep it"
            )
        check_shortened(model, [block for block in range(model.blocks) if block not in wanted_blocks.allowed])


def keeps_own_blocks(depth: DepthRecord, model: Model) -> bool:
    """Return whether the blocks that a record keeps are some of the model's, in order."""
    kept = depth.kept
    return depth.blocks == model.blocks and bool(kept) and kept == sorted(set(kept)) and kept[-1] < model.blocks


def _check_planned(model: Model, plan: Plan) -> None:
    """Refuse a plan whose blocks are not the model's."""
    depth = plan.depth
    if depth is None or not keeps_own_blocks(depth, model):
        raise UserError(
            f"the plan keeps blocks that are not among the model's {plural(model.blocks, 'block')}: plan again "
            "instead of editing it"
        )
    gone = [block for block in range(model.blocks) if block not in set(depth.kept)]
    if [(gap.first, gap.blocks) for gap in depth.gaps] != [
        (gap.first, gap.blocks) for gap in gaps_of(gone, depth.part)
    ]:
        raise UserError("the plan's gaps are not the blocks that it drops: plan again instead of editing it")
    if depth.part == "block":
        check_shortened(model, depth.kept)


def gaps_of(gone: Sequence[int], part: str = "block") -> list[GapRecord]:
    """Return a record for every run of blocks that goes, or every block that loses a part, without figures."""
    if part != "block":
        return [GapRecord(first=block, blocks=1) for block in sorted(gone)]
    return [GapRecord(first=run.start, blocks=len(run)) for run in runs_of(sorted(gone))]


def shortest(prepared: Prepared) -> Prepared:
    """Return the state in which as many blocks are gone as may go."""
    return last_blocks(prepared, wanted_depth(prepared).count)


def last_blocks(prepared: Prepared, count: int) -> Prepared:
    """Return the state in which `count` blocks are gone: the last ones, as placeholders."""
    allowed = wanted_depth(prepared).allowed
    gone = allowed[len(allowed) - count :]
    return at_depth(prepared, depth_record(prepared, gone))


def drop_any_blocks(prepared: Prepared) -> Prepared:
    """Return the state in which as many blocks are gone as will go: the last ones, until measuring chooses.

    If measuring also decides how many, none are gone, or as few as let spaces meet the size.
    """
    if prepared.plan is not None and prepared.plan.depth is not None:
        return at_depth(prepared, prepared.plan.depth)
    depth, count = prepared.stage(Depth), wanted_depth(prepared).count
    if depth.auto:
        count = fewest_reachable(count, lambda gone: last_blocks(prepared, gone))
    shortened = last_blocks(prepared, count)
    return replace(shortened, foreseen=shortened.foreseen or prepared.recipe.joint or depth.choice is not None)


def depth_record(prepared: Prepared, gone: Sequence[int]) -> DepthRecord:
    """Return the record of blocks that go, without figures."""
    depth, blocks = prepared.stage(Depth), prepared.model.blocks
    return DepthRecord(
        blocks=blocks,
        kept=[block for block in range(blocks) if block not in set(gone)],
        part=depth.part,
        left_out=depth.leaves_out(prepared.recipe) or None,
        choose=depth.choice,
        gaps=gaps_of(gone, depth.part),
    )


def at_depth(prepared: Prepared, record: DepthRecord, model: Model | None = None) -> Prepared:
    """Return the state of a model without the blocks that are gone.

    Args:
        model: what stays; its tensors are the dense model's by default.
    """
    return replace(
        prepared,
        start=prepared.whole,
        model=without(prepared.model, record) if model is None else model,
        recipe=_left_to_do(at_own_size(prepared).recipe if prepared.stage(Depth).auto else prepared.recipe),
        statistics=None,
        plan=None,
    ).knowing(record)


def check_samples(prepared: Prepared) -> None:
    """Refuse maps, or numbers of blocks to compare, without samples to run the model on."""
    is_measured = prepared.statistics is not None or prepared.plan is not None
    depth = prepared.stage(Depth)
    if depth.runs_model and is_measured and prepared.live is None:
        data = DATA_OPTIONS[prepared.model.family.modality]
        what = "compares numbers of blocks by running" if depth.auto else "fits maps on"
        raise UserError(f"recipe {prepared.recipe.name} {what} the model itself: give {data} as well")


def find_map_spaces(family: Family) -> list[SpaceName]:
    """Return the spaces in whose consumers a map can be absorbed: a block's mlp, or those of all its experts.

    Experts' outputs are added up, each token's with the router's weights, so that T Σ g_e W_e x = Σ g_e (T W_e) x.
    There are none if something else adds to the sum, or stands behind it: experts that all tokens share, with a factor.
    """
    spaces = family.part_spaces("mlp")
    routed = all(space.experts and space.gate is None and space.norm is None for space in spaces.values())
    plain = [space.gate for space in spaces.values()] == [None]
    return list(spaces) if routed or plain else []
