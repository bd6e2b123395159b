"""What commands print of prepared jobs and of plans, in lines."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord, HiddenRecord, SiteRecord
from ckpt_prune.model.containers.choosing import ANY
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import first_expert_spaces
from ckpt_prune.runner.messages import asked_size_of
from ckpt_prune.stages.depth.show import name_gone
from ckpt_prune.stages.depth.stage import Depth
from ckpt_prune.stages.hidden.show import dimensions_line
from ckpt_prune.stages.hidden.stage import Hidden
from ckpt_prune.stages.spaces.show import NO_PERPLEXITY, YARDSTICK, relative_floor


def kept_line(settled: Prepared) -> str:
    """Units kept per block, with the share that goes or the size that this is for."""
    recipe, shortened, narrowed = settled.recipe, settled.depth, settled.hidden
    if recipe.spaces:
        told = [] if shortened is None else [_blocks_gone(settled, shortened)]
        told += [] if narrowed is None else [_dimensions_left(settled, narrowed)]
        return "; ".join([*told, _kept_units(settled)])
    if shortened is not None and narrowed is not None:
        return f"{_blocks_gone(settled, shortened)}; {_hidden_line(settled, narrowed)}"
    if shortened is not None:
        return _depth_line(settled, shortened)
    return _kept_units(settled) if narrowed is None else _hidden_line(settled, narrowed)


def _blocks_gone(settled: Prepared, record: DepthRecord) -> str:
    """Which whole blocks go, where more than that does."""
    depth = settled.job.recipe.get(Depth)
    if settled.foreseen and depth is not None and depth.auto:
        return f"how many whole blocks go is measured first; were it {_fewest(record.blocks - len(record.kept))}"
    if not record.gaps:
        return "no whole block goes"
    return f"{len(record.kept)} of {record.blocks} blocks stay" if settled.foreseen else f"gone: {name_gone(record)}"


def _dimensions_left(settled: Prepared, record: HiddenRecord) -> str:
    """How many dimensions of the residual stream stay, where units of what reads it go besides."""
    hidden = settled.job.recipe.get(Hidden)
    gone = record.dimensions - record.kept
    if settled.foreseen and hidden is not None and hidden.auto:
        return f"how many dimensions of the residual stream go is measured first; were it {_fewest(gone)}"
    return f"residual stream: {dimensions_line(record)}"


def _fewest(gone: int) -> str:
    """How many go where what else does makes up for as much of the size as it can."""
    return f"{gone}, the fewest for this size" if gone else "none"


def _kept_units(settled: Prepared) -> str:
    """Units kept per block."""
    asked = asked_size_of(settled)
    model, recipe, widths = settled.model, settled.recipe, settled.spaced_widths
    if settled.foreseen:
        return _foreseen_line(settled)
    if asked is not None and all(width[space] == model.units(space) for width in widths for space in width):
        return f"nothing is dropped: the model is within {asked.words} as it is"
    kept = []
    for name, space in first_expert_spaces(recipe.spaces).items():
        counts = sorted({width[space] for width in widths})
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        told = f" (ratio {1 - fmean(width[space] for width in widths) / model.units(space):.3g})"
        if recipe.allocation == "least-error":
            told = ""
        kept.append(f"{name} {span}/{model.units(space)}{told}")
    if asked is not None:
        why = f" ({asked.words})" if recipe.allocation == "least-error" else f", for {asked.words}"
    else:
        why = f" (the size of ratio {recipe.ratio:g})" if recipe.allocation == "least-error" else ""
    return f"kept per block: {', '.join(kept)}{why}"


def _depth_line(settled: Prepared, record: DepthRecord) -> str:
    """How many whole blocks stay, and which where that is known."""
    size = settled.job.recipe.size
    why = "" if size is None else f", for {size.words}"
    if not record.gaps:
        return f"nothing is dropped: the model is within {'its size' if size is None else size.words} as it is"
    if settled.foreseen:
        what = "blocks stay" if record.part == "block" else f"blocks keep their {record.part}"
        return f"{len(record.kept)} of {record.blocks} {what}{why}: which ones is measured first"
    return f"gone: {name_gone(record)}{why}"


def _hidden_line(settled: Prepared, record: HiddenRecord) -> str:
    """How many dimensions of the residual stream stay."""
    size = settled.job.recipe.size
    if size is not None and record.kept == record.dimensions:
        return f"nothing is dropped: the model is within {size.words} as it is"
    return f"residual stream: {dimensions_line(record)}" + ("" if size is None else f", for {size.words}")


def _foreseen_line(settled: Prepared) -> str:
    """What one ratio everywhere keeps, where widths of about that size are found by measuring."""
    asked, recipe = settled.recipe.size, settled.recipe
    widths = settled.widths[-1]
    spaces = first_expert_spaces(widths).items()
    kept = ", ".join(f"{name} {widths[space]}/{settled.model.units(space)}" for name, space in spaces)
    size = f"ratio {recipe.ratio:g}" if asked is None else asked.words
    return (
        f"kept per block at one ratio everywhere: {kept} ({size}); measuring finds widths of that size that lose less"
    )


def ranks_line(settled: Prepared) -> str:
    """How many linears become two, and between which ranks."""
    ranks = [rank for own in settled.output.ranks for rank in own.values()]
    if settled.foreseen:
        return (
            f"to be factored: {len(ranks)} linears, at one share everywhere into ranks of "
            f"{_span(min(ranks), max(ranks))}; measuring finds ranks of that size that lose less"
        )
    return f"to be factored: {len(ranks)} linears, into ranks of {_span(min(ranks), max(ranks))}"


def container_line(settled: Prepared) -> str:
    """What an output that does not exist yet will be stored as."""
    container, uneven = settled.output.container, settled.recipe.widths == "per_layer"
    if settled.container_known:
        if container.remote_class is not None:
            return "to be stored with code of its own"
        other = ", or with code of its own where blocks differ in width" if uneven else ""
        return f"to be stored as {container.model_type}{other}"
    family = settled.job.model.family
    stock = f"{family.model_type}{' or one that computes the same' if family.stand_ins else ''}"
    own = ["there is none"] if settled.recipe.container == ANY else []
    own += ["blocks differ in width"] if uneven else []
    return f"to be stored as a stock class with the shape that measuring finds ({stock})" + (
        f", or with code of its own where {' or '.join(own)}" if own else ""
    )


def plan_legend(model: Model, sites: Sequence[SiteRecord], *, language: bool) -> Iterable[str]:
    """What the columns of a plan say: a line for each that holds a figure somewhere; `language` as in `error_lines`."""
    known = first_expert_spaces(model.family.spaces)
    named = {site.space: model.family.spaces[known[site.space]].unit for site in sites if site.space in known}
    units = ", ".join(f"{space}: {unit}s" for space, unit in named.items())
    yield f"kept: units that stay, of those there are ({units})"
    if any(site.error_uncompensated is not None for site in sites):
        logits = " (of q and k: of the attention logits)" if any(site.consumer is None for site in sites) else ""
        yield (
            f"error: the share of the energy of a site's output{logits} that is lost on the calibration samples, "
            "before and after compensation"
        )
    if any(relative_floor(site) is not None for site in sites):
        yield "floor: the least error that any weights and bias on the kept units can reach"
    if any(site.rho2 is not None for site in sites):
        yield "rho2: the share of the variance of what goes that the kept units predict; 1 is all of it"
    if any(site.error_held_out is not None for site in sites):
        yield "held out: the error after, on samples left out of the fit"
    if any(site.margin is not None for site in sites):
        yield "margin: how much larger, at least, the held-out error of the next best method is"
    if any(site.error_uncompensated is not None for site in sites):
        yield NO_PERPLEXITY + (YARDSTICK if language else "")


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
