"""What commands print of settled requests, plans and reports: lines and rows; `report.figures` has the figures."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from ckpt_prune.cli.command import table
from ckpt_prune.common.formatting import human_bytes, human_count, plural
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import Cost, DepthRecord, HiddenRecord, SiteRecord
from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import Adapters, Report
from ckpt_prune.model.containers.choosing import ANY
from ckpt_prune.model.family_keys import GROUPED
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import ENDS, expert_space, first_expert_spaces, recipe_space
from ckpt_prune.report.adapters import loss_name, measured_on, trained_on
from ckpt_prune.report.depth import depth_lines, named_all
from ckpt_prune.report.figures import (
    cost_changes,
    factor_figures,
    held_out_errors,
    mask_figures,
    recovery_figures,
    relative_floor,
    rotation_figures,
    shares_line,
    space_errors,
    unsolved,
    worse_on_held_out,
)
from ckpt_prune.report.hidden import dimensions_line, hidden_lines
from ckpt_prune.report.latency import latency_line
from ckpt_prune.report.tried import tried_table
from ckpt_prune.runner.messages import asked_size_of
from ckpt_prune.sparsity.patterns import describe_mask
from ckpt_prune.stages.depth.stage import Depth
from ckpt_prune.stages.hidden.stage import Hidden

COST_HEADERS = ["", "before", "after", "share"]
LAYER_HEADERS = ["block", "MSE before", "start", "after", "CKA before", "after", "epochs", "kept"]
NO_PERPLEXITY = "errors are of each site's output, no perplexity or accuracy"
YARDSTICK = ": 0.18 (heads) and 0.09 (mlp) came with 1.5 times the perplexity on a small llama"
"""llama-pystdlib-3m, ridge at 50 %, 32 windows: 14.873 against 10.066. Errors that hold earlier ones are larger."""
DRIFT = ", of what the dense model's residual stream asks for (target drift), all that came before included"


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
    return f"{len(record.kept)} of {record.blocks} blocks stay" if settled.foreseen else f"gone: {named_all(record)}"


def _dimensions_left(settled: Prepared, record: HiddenRecord) -> str:
    """How many dimensions of the residual stream stay, where units of what reads it go besides."""
    hidden = settled.job.recipe.get(Hidden)
    gone = record.dimensions - record.kept
    if settled.foreseen and hidden is not None and hidden.auto:
        return f"how many dimensions of the residual stream go is measured first; were it {_fewest(gone)}"
    return dimensions_line(record)


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
    return f"gone: {named_all(record)}{why}"


def _hidden_line(settled: Prepared, record: HiddenRecord) -> str:
    """How many dimensions of the residual stream stay."""
    size = settled.job.recipe.size
    if size is not None and record.kept == record.dimensions:
        return f"nothing is dropped: the model is within {size.words} as it is"
    return dimensions_line(record) + ("" if size is None else f", for {size.words}")


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


def report_lines(report: Report) -> Iterable[str]:
    """All that is said of an output below its costs and widths, a line or a table each."""
    if report.depth is not None:
        yield from depth_lines(report.depth)
    if report.hidden is not None:
        yield from hidden_lines(report.hidden)
    tried = tried_table(report.depth, report.hidden)
    if tried is not None:
        yield f"{tried.title}:"
        yield table(tried.headers, tried.rows)
    yield from error_lines(report.sites, language=report.before.cache is not None)
    yield from mask_lines(report)
    yield from factor_lines(report)
    yield from warning_lines(report.sites)
    yield from recovery_lines(report)
    if report.adapters is not None:
        if any(site.error_uncompensated is not None for site in report.sites):
            yield "these errors are from before recovery:"
        yield from adapter_lines(report.adapters)
    if report.lambda_search is not None:
        yield f"lambda {report.lambda_search.chosen:g}, of least calibration perplexity"
    told = None if report.latency is None else latency_line(report.latency)
    if told is not None:
        yield told


def cost_rows(before: Cost, after: Cost) -> list[list[str]]:
    """Parameters, bytes, FLOPs and a cache that shrinks, before and after, for a table."""
    rows = []
    for cost in cost_changes(before, after):
        show = human_bytes if cost.key in ("bytes", "cache") else human_count
        names = {"flops": f"FLOPs / {before.tokens} tokens", "cache": "KV cache / token"}
        rows.append([names.get(cost.key, cost.key), show(cost.before), show(cost.after), f"{cost.share:.1%}"])
    return rows


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


def error_lines(sites: Sequence[SiteRecord], *, language: bool) -> Iterable[str]:
    """Mean errors of every space on the calibration samples, and what they are not.

    Args:
        sites: of the report.
        language: whether the model generates text: how far errors come with a perplexity is known of such a one.
    """
    found = space_errors(sites)
    for errors in found:
        what = "logits" if ENDS[recipe_space(errors.space)] in ("logits", "rotary") else "outputs"
        yield (
            f"{errors.space}: mean error of the {what} on the calibration samples {errors.uncompensated:.4f} bare, "
            f"{errors.compensated:.4f} compensated{DRIFT if errors.drift else ''}"
        )
    if found:
        yield NO_PERPLEXITY + (YARDSTICK if language and not any(errors.drift for errors in found) else "")


def warning_lines(sites: Sequence[SiteRecord]) -> Iterable[str]:
    """What a user should know of single sites: solves that stopped short, and compensation that does not help.

    The latter is what cross-validation over folds says: on samples that the fit has not seen.
    """
    few = [site for site in sites if site.few is not None]
    if few:
        named = ", ".join(f"{site.expert} of block {site.block} ({site.few})" for site in few[:5])
        more = f" and {len(few) - 5} more" if len(few) > 5 else ""
        yield (
            f"the router sent too few tokens to expert {named}{more}: they were measured on all tokens of their layer; "
            "use more samples"
        )
    odd = sorted({len(site.kept) for site in sites if site.expert is not None and len(site.kept) % GROUPED})
    if any(len(site.kept) < site.units for site in sites if site.expert is not None) and odd:
        yield (
            f"experts of {odd[0]} columns do not run by transformers' default, which wants a multiple of {GROUPED}: "
            f"say --set spaces.mlp.multiple_of={GROUPED}, or load them by ckpt_prune.load or with "
            'experts_implementation="eager"'
        )
    for site, residual in unsolved(sites):
        yield (
            f"the logits of block {site.block} are not solved to the end (relative residual {residual:.1g}): "
            "use more samples or a larger lambda"
        )
    for space, error in held_out_errors(sites).items():
        yield f"{space}: mean error on held-out folds, compensated, {error:.4f}"
    worse = [f"{expert_space(site.space, site.expert)} of block {site.block}" for site in worse_on_held_out(sites)]
    if worse:
        named = ", ".join(worse[:5]) + (f" and {len(worse) - 5} more" if len(worse) > 5 else "")
        yield f"compensation does not help on held-out samples at {named}: use more samples or a larger lambda"


def mask_lines(report: Report) -> Iterable[str]:
    """What a mask did, and the rotations before it."""
    rotation, mask = report.rotation, mask_figures(report.linears, report.recipe.damp)
    entropy = rotation_figures(rotation.learned) if rotation is not None else None
    if rotation is not None and entropy is not None:
        change = "" if entropy.change is None else f" ({entropy.change:+.1%})"
        steps = "" if entropy.steps is None else f", {_span(*entropy.steps)} steps"
        yield (
            f"rotation {rotation.kind}: entropy of {rotation.importance} importance {entropy.before:.0f} -> "
            f"{entropy.after:.0f} nats{change}{steps}"
        )
    if mask is None or report.mask is None:
        return
    how = describe_mask(report.mask.method, report.mask.pattern)
    yield f"masked by {how}: {mask.share:.2%} zeros in {mask.linears} weights of {human_count(mask.size)}"
    shared = shares_line(report.mask)
    if shared is not None:
        yield shared
    if mask.mean_error is not None:
        yield f"mean error of the outputs on the calibration samples {mask.mean_error:.4f}"
    if mask.damped:
        weights = [linear.weight for linear, _ in mask.damped]
        named = ", ".join(weights[:3]) + (", ..." if len(weights) > 3 else "")
        yield (
            f"{len(weights)} of {mask.linears} Hessians were singular with damping {mask.asked:g} and took up to "
            f"{max(damp for _, damp in mask.damped):g}: use more samples ({named})"
        )


def factor_lines(report: Report) -> Iterable[str]:
    """What two thin linears in the place of one cost."""
    found = factor_figures(report.factored)
    if found is None:
        return
    yield (
        f"factored {found.linears} linears into ranks of {_span(found.least, found.most)}: {human_count(found.left)} "
        f"of their {human_count(found.size)} parameters are left ({found.left / found.size:.1%})"
    )
    if found.mean_error is not None:
        yield f"mean error of the outputs on the calibration samples {found.mean_error:.4f}"


def recovery_lines(report: Report) -> Iterable[str]:
    """What recovery did."""
    figures = recovery_figures(report.recovery, report.layers)
    if figures is None or not report.layers:
        return

    def mean(key: str, form: str) -> str:
        value = figures.complete[key]
        return "not finite" if value is None else format(value, form)

    yield (
        f"recovered {figures.recovered} of {figures.blocks} blocks; means over blocks on "
        f"{plural(figures.measured, f'{figures.tried_on} sample')}: squared error "
        f"{mean('mse_before', '.4g')} -> {mean('mse_after', '.4g')}, CKA {mean('cka_before', '.4f')} -> "
        f"{mean('cka_after', '.4f')}"
    )
    if figures.broken:
        yield f"the hidden states after block {figures.broken[0]} are not finite: what follows cannot be recovered"
    if figures.idle:
        yield (
            f"no epoch was better than the old weights in {_blocks(figures.idle)}, with lr {figures.lr:.3g} and less: "
            "use more samples or epochs"
        )
    if figures.worse:
        yield (
            "after the last block the squared error is larger than without recovery: measure what it is worth with "
            "`ckpt-prune evaluate`, or use more samples"
        )
    if figures.diverged:
        yield (
            f"training diverged in {_blocks(figures.diverged)} and was taken back there: use a smaller lr than "
            f"{figures.lr:.3g}"
        )
    if figures.perplexities:
        curve = ", ".join(f"{_perplexity(entry.perplexity)} with {entry.blocks}" for entry in figures.perplexities)
        yield (
            f"perplexity on {plural(figures.measured, f'{figures.tried_on} window')} of {figures.window} tokens: "
            f"{curve} blocks gone through"
        )


def adapter_lines(adapters: Adapters) -> Iterable[str]:
    """What adapters or scales were trained, and what they gave."""
    what = "scales of inputs and outputs" if adapters.method == "scales" else f"parameters of rank {adapters.rank}"
    epochs = adapters.epochs or 0
    passes = f"{epochs:.1f} epoch{'' if epochs == 1 else 's'} of {trained_on(adapters)}"
    yield f"{adapters.parameters} {what}, {plural(adapters.steps, 'step')}, {passes} in {adapters.seconds or 0:.1f} s"
    yield f"{adapters.modules} modules have new weights; zeros stay zero"
    if adapters.loss_before is not None and adapters.loss_after is not None:
        gained = f"{adapters.loss_before:.4f} -> {adapters.loss_after:.4f}"
        yield f"{loss_name(adapters)} on {measured_on(adapters)} {gained}"
        if adapters.modules and not adapters.settings.get("held_out"):
            yield "other samples may gain less: `evaluate --against MODEL` tells"


def layer_rows(layers: Sequence[RecoveredLayer]) -> list[list[str]]:
    """What recovery did to every block, for a table with `LAYER_HEADERS`."""
    return [
        [
            str(layer.block),
            *(_figure(value, "g") for value in (layer.mse_before, layer.mse_start, layer.mse_after)),
            *(_figure(value, "f") for value in (layer.cka_before, layer.cka_after)),
            str(layer.epochs),
            f"epoch {layer.best_epoch}" if layer.recovered else "old",
        ]
        for layer in layers
    ]


def _figure(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, f".4{form}")


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _blocks(numbers: Sequence[int]) -> str:
    return f"{plural(len(numbers), 'block')} ({', '.join(map(str, numbers))})"


def _perplexity(value: float | None) -> str:
    return "inf" if value is None else f"{value:.3f}"
