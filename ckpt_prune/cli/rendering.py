"""Lines that commands print about prepared jobs and plans."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord, HiddenRecord, SiteRecord
from ckpt_prune.model.containers.choosing import ANY
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import first_expert_spaces
from ckpt_prune.runner.messages import asked_size_of
from ckpt_prune.show.section import format_span
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.depth.show import name_gone
from ckpt_prune.stages.hidden.keys import Hidden
from ckpt_prune.stages.hidden.show import dimensions_line
from ckpt_prune.stages.spaces.show import NO_PERPLEXITY, relative_floor


def kept_line(prepared: Prepared) -> str:
    """Say how many units stay per block, which blocks go, and how many dimensions of the residual stream stay."""
    depth, hidden = prepared.depth, prepared.hidden
    if prepared.recipe.spaces:
        lines = [] if depth is None else [_blocks_line(prepared, depth)]
        lines += [] if hidden is None else [_dimensions_line(prepared, hidden)]
        return "; ".join([*lines, _units_line(prepared)])
    if depth is not None and hidden is not None:
        return f"{_blocks_line(prepared, depth)}; {_hidden_line(prepared, hidden)}"
    if depth is not None:
        return _depth_line(prepared, depth)
    return _units_line(prepared) if hidden is None else _hidden_line(prepared, hidden)


def _blocks_line(prepared: Prepared, record: DepthRecord) -> str:
    """Say which blocks go, beside something else that does."""
    depth = prepared.job.recipe.get(Depth)
    if prepared.foreseen and depth is not None and depth.auto:
        return f"how many whole blocks go is measured first; were it {_fewest(record.blocks - len(record.kept))}"
    if not record.gaps:
        return "no whole block goes"
    return f"{len(record.kept)} of {record.blocks} blocks stay" if prepared.foreseen else f"gone: {name_gone(record)}"


def _dimensions_line(prepared: Prepared, record: HiddenRecord) -> str:
    hidden, gone = prepared.job.recipe.get(Hidden), record.dimensions - record.kept
    if prepared.foreseen and hidden is not None and hidden.auto:
        return f"how many dimensions of the residual stream go is measured first; were it {_fewest(gone)}"
    return f"residual stream: {dimensions_line(record)}"


def _fewest(gone: int) -> str:
    return f"{gone}, the fewest for this size" if gone else "none"


def _units_line(prepared: Prepared) -> str:
    size, model, recipe = asked_size_of(prepared), prepared.model, prepared.recipe
    if prepared.foreseen:
        return _foreseen_line(prepared)
    widths = prepared.spaced_widths
    if size is not None and all(width[space] == model.units(space) for width in widths for space in width):
        return f"nothing is dropped: the model is within {size.words} as it is"
    uneven, kept = recipe.allocation == "least-error", []
    for name, space in first_expert_spaces(recipe.spaces).items():
        counts, units = [width[space] for width in widths], model.units(space)
        ratio = "" if uneven else f" (ratio {1 - fmean(counts) / units:.3g})"
        kept.append(f"{name} {format_span(counts)}/{units}{ratio}")
    if size is None:
        why = f" (the size of ratio {recipe.ratio:g})" if uneven else ""
    else:
        why = f" ({size.words})" if uneven else f", for {size.words}"
    return f"kept per block: {', '.join(kept)}{why}"


def _depth_line(prepared: Prepared, record: DepthRecord) -> str:
    """Say how many blocks stay if nothing else goes, and which if that is known."""
    size = prepared.job.recipe.size
    why = "" if size is None else f", for {size.words}"
    if not record.gaps:
        return f"nothing is dropped: the model is within {'its size' if size is None else size.words} as it is"
    if prepared.foreseen:
        what = "blocks stay" if record.part == "block" else f"blocks keep their {record.part}"
        return f"{len(record.kept)} of {record.blocks} {what}{why}: which ones is measured first"
    return f"gone: {name_gone(record)}{why}"


def _hidden_line(prepared: Prepared, record: HiddenRecord) -> str:
    size = prepared.job.recipe.size
    if size is not None and record.kept == record.dimensions:
        return f"nothing is dropped: the model is within {size.words} as it is"
    return f"residual stream: {dimensions_line(record)}" + ("" if size is None else f", for {size.words}")


def _foreseen_line(prepared: Prepared) -> str:
    """Say how much one ratio everywhere keeps; measuring will find the widths."""
    recipe, widths = prepared.recipe, prepared.widths[-1]
    spaces = first_expert_spaces(widths).items()
    kept = ", ".join(f"{name} {widths[space]}/{prepared.model.units(space)}" for name, space in spaces)
    size = f"ratio {recipe.ratio:g}" if recipe.size is None else recipe.size.words
    return (
        f"kept per block at one ratio everywhere: {kept} ({size}); measuring finds widths of that size that lose less"
    )


def ranks_line(prepared: Prepared) -> str:
    """Say how many linear modules become two, and of which ranks."""
    ranks = [rank for block in prepared.output.ranks for rank in block.values()]
    if prepared.foreseen:
        return (
            f"to be factored: {len(ranks)} linears, at one share everywhere into ranks of {format_span(ranks)}; "
            "measuring finds ranks of that size that lose less"
        )
    return f"to be factored: {len(ranks)} linears, into ranks of {format_span(ranks)}"


def container_line(prepared: Prepared) -> str:
    """Say what the output of a dry run will be stored as."""
    container, uneven = prepared.output.container, prepared.recipe.widths == "per_layer"
    if prepared.container_known:
        if container.remote_class is not None:
            return "to be stored with code of its own"
        other = ", or with code of its own where blocks differ in width" if uneven else ""
        return f"to be stored as {container.model_type}{other}"
    family = prepared.job.model.family
    stock = f"{family.model_type}{' or one that computes the same' if family.stand_ins else ''}"
    reasons = ["there is none"] if prepared.recipe.container == ANY else []
    reasons += ["blocks differ in width"] if uneven else []
    own_code = f", or with code of its own where {' or '.join(reasons)}" if reasons else ""
    return f"to be stored as a stock class ({stock}){own_code}; its shape is known after calibration"


def plan_legend(model: Model, sites: Sequence[SiteRecord]) -> Iterable[str]:
    """Explain the columns of a plan that hold a number."""
    spaces_by_name = first_expert_spaces(model.family.spaces)
    named = {
        site.space: model.family.spaces[spaces_by_name[site.space]].unit
        for site in sites
        if site.space in spaces_by_name
    }
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
        yield NO_PERPLEXITY
