"""The page itself: everything in one file, nothing to load, nothing to run."""

from collections.abc import Callable, Iterable, Sequence
from importlib import resources

from ckpt_prune.common.formatting import human_bytes, human_count
from ckpt_prune.job.records import FactoredLinear, HeadErrors, MaskedLinear, SiteRecord
from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import Learned, Perplexity, Stage
from ckpt_prune.report.depth import depth_lines, named
from ckpt_prune.report.figures import (
    cost_changes,
    factor_figures,
    kind_of,
    mask_figures,
    relative_change,
    relative_floor,
    rotation_figures,
    shares_line,
    verdict,
)
from ckpt_prune.report.hidden import dimensions_line, hidden_lines
from ckpt_prune.report.tried import tried_table
from ckpt_prune.reporting.charts import draw, swatch
from ckpt_prune.reporting.curves import curves
from ckpt_prune.reporting.document import Document
from ckpt_prune.reporting.escaping import text
from ckpt_prune.reporting.maps import map_figures
from ckpt_prune.reporting.place import MARKER
from ckpt_prune.reporting.plots import Figure, count_of_steps, figures, outcome, shown, words

# The browser itself then refuses whatever a page like this has no business loading or running.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MISSING = "–"


def page(document: Document) -> str:
    """The HTML of a report, the same for the same input."""
    perplexities = document.recovered.perplexities if document.recovered else []
    plots = figures(
        document.sites,
        document.layers,
        document.linears,
        document.learned,
        perplexities,
        factored=document.factored,
    )
    return shell(
        document.title,
        [
            *_header(document),
            *_depth(document),
            *_hidden(document),
            *_amounts(document),
            *(over_depth(plots) if plots else [_nothing(document)]),
            *_tried(document),
            *_site_tables(document.sites),
            *_linear_table(document.linears),
            *_factor_table(document.factored),
            *_rotation_table(document.learned),
            *_layer_table(document.layers),
            *_perplexity_table(perplexities),
            *_stage_table(document.stages),
        ],
    )


def shell(title: str, body: Iterable[str]) -> str:
    """A page with a title and a body, complete in itself."""
    style = resources.files("ckpt_prune.reporting").joinpath("style.css").read_text(encoding="utf-8")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        MARKER,
        f"<title>{text(title)}</title>",
        f"<style>\n{style}</style>\n</head>\n<body>",
        *body,
        "</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def over_depth(plots: Sequence[Figure], heading: str = "Over depth", maps: Sequence[str] = ()) -> Iterable[str]:
    """The part of a page that holds its plots, and maps as they are drawn."""
    yield f'<h2>{heading}</h2>\n<div class="plots">'
    yield from (_figure(plot) for plot in plots)
    yield from maps
    yield "</div>"


def _tried(document: Document) -> Iterable[str]:
    """Plots over what was tried or trained."""
    found, maps = curves(document.learned, document.search, document.layers), map_figures(document.learned)
    return over_depth(found, "While it was made", maps) if found or maps else ()


def _header(document: Document) -> Iterable[str]:
    yield f"<header>\n<h1>{text(document.title)}</h1>"
    if document.recipe.summary:
        yield f'<p class="soft">{text(document.recipe.summary)}</p>'
    sentences = [
        *(*_verdict(document.sites), *_masked(document), *_rotated(document), *_factored(document)),
        *(*_recovered(document), *document.adapters, *_perplexities(document)),
    ]
    yield from (f"<p>{text(sentence)}</p>" for sentence in sentences)
    facts = "\n".join(f"<dt>{text(label)}</dt><dd>{text(fact)}</dd>" for label, fact in document.facts)
    yield f'<div class="top">\n<div class="scroll costs">{_costs(document)}</div>'
    yield f"<dl>\n{facts}\n</dl>\n</div>\n</header>"


def _depth(document: Document) -> Iterable[str]:
    """Which whole blocks are gone: a sign for every block, and a row for every gap."""
    depth = document.depth
    if depth is None:
        return
    line, *_ = depth_lines(depth)
    yield f"<h2>Blocks</h2>\n<pre>{text(line)}</pre>"
    figures = ("distance", "divergence", "error_uncompensated", "error_compensated", "error_held_out")
    rows = [
        (named(gap), gap.into or _MISSING, gap.method, *(_cell(getattr(gap, figure)) for figure in figures))
        for gap in depth.gaps
    ]
    headers = ("gone", "map in", "form", "cosine distance", "predicted divergence", "error before", "after", "held out")
    if rows:
        yield f'<div class="scroll">{_table(headers, rows, left=3)}</div>'


def _hidden(document: Document) -> Iterable[str]:
    """How many dimensions of the residual stream are left, and what every basis keeps of its energy."""
    hidden = document.hidden
    if hidden is None:
        return
    lines = [dimensions_line(hidden), *hidden_lines(hidden)]
    yield f"<h2>Residual stream</h2>\n<pre>{text(chr(10).join(lines))}</pre>"
    if len(hidden.energy) > 1:
        rows = [(str(index), "" if share is None else f"{share:.4%}") for index, share in enumerate(hidden.energy)]
        yield details("Every basis", ("basis", "energy kept"), rows, left=1)


def _amounts(document: Document) -> Iterable[str]:
    """Numbers of blocks and dimensions that were held against each other."""
    found = tried_table(document.depth, document.hidden)
    if found is not None:
        yield f"<h2>What was tried</h2>\n<p>{text(found.title.capitalize())}.</p>"
        yield f'<div class="scroll">{_table(found.headers, found.rows, left=0)}</div>'


def _costs(document: Document) -> str:
    tokens = document.before.tokens
    names = {
        "parameters": "Parameters",
        "bytes": "Bytes",
        "flops": "FLOPs" if tokens is None else f"FLOPs of {tokens:,} tokens",
        "cache": "KV cache of a token",
    }
    rows = []
    for cost in cost_changes(document.before, document.after):
        show = human_bytes if cost.key in ("bytes", "cache") else human_count
        rows.append((names[cost.key], show(cost.before), show(cost.after), f"{cost.share:.1%}"))
    return _table(("", "before", "after", "share"), rows, left=1)


def _verdict(sites: Sequence[SiteRecord]) -> list[str]:
    """Whether compensation did what it is for, on the tokens it was fitted to and on others; where not, by name."""
    sentences = []
    for found, where in (
        (verdict(sites, "error_compensated"), "calibration data"),
        (verdict(sites, "error_held_out"), "held-out data"),
    ):
        if found is None:
            continue
        count = f"{found.sites - len(found.failed)} of {found.sites} sites"
        sentence = f"Compensation lowers the error on {where} at {count}"
        if found.failed:
            names = [f"{words(site.space).label} of block {site.block}" for site in found.failed]
            sentence += f"; not at {_listed(names)}"
        sentences.append(f"{sentence}.")
    return sentences


def _listed(names: Sequence[str]) -> str:
    """The first eight, and how many more."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"


def _masked(document: Document) -> Iterable[str]:
    """What a mask zeroed, what that did to outputs, and where the Hessian was singular as it was."""
    mask, found = document.mask, mask_figures(document.linears, document.recipe.damp)
    if found is None:
        return
    count = "1 linear" if found.linears == 1 else f"{found.linears:,} linears"
    how = f" ({mask.method}, {mask.pattern})" if mask else ""
    yield (
        f"{found.share:.2%} of {human_count(found.size)} weights in {count} were zeroed{how}. Shapes stay as they "
        "were: parameters, bytes and FLOPs count zeros like any other weight."
    )
    shared = shares_line(mask)
    if shared is not None:
        yield f"{shared.capitalize()}."
    if found.mean_error is not None and found.worst is not None:
        worst, most = found.worst
        yield (
            f"The error of their outputs on calibration data is {shown(found.mean_error)} on average, "
            f"{shown(most)} at most ({_place(worst)})."
        )
    elif mask and mask.method == "magnitude":
        yield "The error of their outputs was not measured: a magnitude mask looks at no calibration data."
    else:
        yield "The error of their outputs was not measured: it needs --diagnostics and the Grams of their inputs."
    if found.damped:
        more = [f"{_place(linear)} ({damp:g})" for linear, damp in found.damped]
        yield (
            f"At {len(more)} of {count} the Hessian was singular with the damping of {found.asked:g} asked for and was "
            f"given more: {_listed(more)}. More calibration data may help."
        )


def _factored(document: Document) -> Iterable[str]:
    """How many linears are two thin ones, and what that did to outputs."""
    found = factor_figures(document.factored)
    if found is None:
        return
    yield (
        f"{found.linears:,} linears are the product of two: {found.left / found.size:.1%} of their "
        f"{human_count(found.size)} parameters are left."
    )
    if found.mean_error is not None and found.worst is not None:
        worst, most = found.worst
        yield (
            f"The error of their outputs on calibration data is {shown(found.mean_error)} on average, "
            f"{shown(most)} at most ({_place(worst)})."
        )


def _place(linear: MaskedLinear | FactoredLinear) -> str:
    return f"{words(kind_of(linear)).label} of block {linear.block}"


def _rotated(document: Document) -> Iterable[str]:
    """Whether rotations concentrated what they are for, and how long the shortest and the longest were trained."""
    rotation, found = document.rotation, rotation_figures(document.learned)
    if rotation is None or found is None:
        return
    change = "" if found.change is None else f" ({found.change:+.1%})"
    importance = f"{rotation.importance} importance" if rotation.importance else "importance"
    steps = ""
    if found.steps is not None:
        least, most = found.steps
        span = f"{least:,} to {count_of_steps(most)}" if least != most else count_of_steps(most)
        shared = document.learned[0].block is None
        steps = f", in {span}{'' if shared else ' per block'}"
    yield (
        f"Entropy of the {importance} of weights: {shown(found.before)} nats before rotation ({rotation.kind}), "
        f"{shown(found.after)} nats after{change}{steps}."
    )


def _recovered(document: Document) -> Iterable[str]:
    """How many blocks have new weights, where training diverged, and how near the dense model that brought them."""
    recovery, found = document.recovery, document.recovered
    if recovery is None or found is None:
        return
    if found.blocks:
        sentence = f"LaCo recovered {found.recovered} of {found.blocks} blocks against {recovery.dense.name}"
        kept = found.blocks - found.recovered
        yield f"{sentence}; the others kept their old weights." if kept else f"{sentence}."
    if found.diverged:
        yield f"Training diverged and was rolled back at {_listed([f'block {block}' for block in found.diverged])}."
    for key, means in found.means.items():
        change = relative_change(means.before, means.after) if key == "mse" else None
        count = "1 block" if means.blocks == 1 else f"{means.blocks} blocks"
        yield (
            f"{'Mean squared error' if key == 'mse' else 'Linear CKA'} of the hidden states against the dense model, "
            f"held-out samples, mean of {count}: {shown(means.before)} before recovery, {shown(means.after)} after"
            f"{'' if change is None else f' ({change:+.1%})'}."
        )
    if document.sites or document.linears:
        yield f"Errors of single {'sites' if document.sites else 'linears'}, where measured, are from before recovery."


def _perplexities(document: Document) -> Iterable[str]:
    """The first and the last perplexity; never without its window."""
    found = document.recovered
    if found is None:
        return
    known = [(entry.blocks, entry.perplexity) for entry in found.perplexities if entry.perplexity is not None]
    if not known:
        return
    of = "" if found.window is None else f" of {found.window:,} tokens"
    ends = known[:1] + known[1:][-1:]
    told = ", ".join(f"{shown(value)} {_so_far(blocks, found.blocks)}" for blocks, value in ends)
    yield f"Perplexity on held-out windows{of}: {told}."


def _so_far(blocks: int, of: int) -> str:
    if blocks == 0:
        return "as pruned"
    if blocks == of:
        return "with all blocks recovered"
    return f"with the first {'block' if blocks == 1 else f'{blocks} blocks'} recovered"


def _figure(plot: Figure) -> str:
    chart = draw(
        plot.series,
        description=f"{plot.title}. {plot.note}",
        unit=plot.unit,
        full=plot.full,
        log=plot.log,
        across=plot.across,
        joined=plot.joined,
    )
    legend = "".join(f"<li>{swatch(line.style)}{text(line.label)}</li>" for line in plot.series)
    below = " Hollow marks at the foot: zero, or too small for this scale." if chart.below else ""
    return (
        f"<figure>\n<figcaption><h3>{text(plot.title)}</h3><p>{text(plot.note)}{below}</p></figcaption>\n"
        f'<ul class="legend">{legend}</ul>\n{chart.svg}\n</figure>'
    )


def _nothing(document: Document) -> str:
    """What would have to be measured; nothing can be where only sites have none and no site is."""
    if document.linears or document.layers or not document.sites:
        return ""
    return (
        "<p>Nothing was measured per layer: errors and diagnostics need statistics with Grams "
        "(<code>ckpt-prune calibrate --collect moments,gram</code>).</p>"
    )


Column = tuple[str, Callable[[SiteRecord], float | None]]
_COLUMNS: tuple[Column, ...] = (
    ("uncompensated", lambda site: site.figure("error_uncompensated")),
    ("compensated", lambda site: site.figure("error_compensated")),
    ("held out", lambda site: site.figure("error_held_out")),
    ("margin", lambda site: site.figure("margin")),
    ("drift share", lambda site: site.figure("share")),
    ("floor", relative_floor),
    ("ρ²", lambda site: site.figure("rho2")),
    ("effective rank", lambda site: site.figure("effective_rank")),
    ("k95", lambda site: site.figure("k95")),
    ("active", lambda site: site.figure("active")),
)
_HEAD_COLUMNS = {
    "uncompensated": "error_uncompensated",
    "compensated": "error_compensated",
    "floor": "floor",
    "ρ²": "rho2",
}
_SHIFT_COLUMNS = {
    "uncompensated": "uncompensated",
    "compensated": "test",
    "floor": "floor",
    "|Σ − Σ′| / |Σ|": "covariances",
    "|μ − μ′|² / E|x|²": "means",
    "least eigenvalue": "smallest",
    "CORP's bound": "bound",
    "degrees of freedom": "freedom",
    "calibration tokens": "tokens",
}


_LINEAR_COLUMNS: dict[str, Callable[[MaskedLinear], float | None]] = {
    "error": lambda linear: linear.figure("error"),
    "damping": lambda linear: linear.figure("damp"),
    "dead inputs": lambda linear: linear.figure("dead"),
}


# The tables have the numbers behind the plots, for those who want them and for screens that have no pointer.


def _site_tables(sites: Sequence[SiteRecord]) -> Iterable[str]:
    if not sites:
        return
    columns = [(name, pick) for name, pick in _COLUMNS if any(pick(site) is not None for site in sites)]
    rows = [
        (
            str(site.block),
            words(site.space).label,
            site.method,
            _MISSING if (strength := site.figure("strength")) is None else f"{strength:g}",
            f"{len(site.kept):,} of {site.units:,}",
            *(_cell(pick(site)) for _, pick in columns),
        )
        for site in sites
    ]
    names = [name for name, _ in columns]
    yield details("Every site", ("block", "space", "compensation", "λ", "kept", *names), rows, left=3)
    if any(site.shift is not None for site in sites):
        moved = [
            (
                str(site.block),
                words(site.space).label,
                *(_cell(site.shift.figure(key)) for key in _SHIFT_COLUMNS.values()),
            )
            for site in sites
            if site.shift is not None
        ]
        yield details("Every site on other samples", ("block", "space", *_SHIFT_COLUMNS), moved, left=2)
    heads = [
        (str(site.block), words(site.space).label, str(head.head), *(_cell(_of(head, n)) for n in _HEAD_COLUMNS))
        for site in sites
        for head in site.heads or []
    ]
    if heads:
        yield details("Every head", ("block", "space", "head", *_HEAD_COLUMNS), heads, left=2)


def _factor_table(factored: Sequence[FactoredLinear]) -> Iterable[str]:
    if not factored:
        return
    rows = [
        (
            str(linear.block),
            words(kind_of(linear)).label,
            linear.weight,
            f"{linear.rows:,} × {linear.columns:,}",
            f"{linear.rank:,}",
            f"{linear.left / linear.size:.1%}",
            _cell(linear.figure("error")),
            _cell(linear.figure("change")),
        )
        for linear in factored
    ]
    headers = ("block", "linear", "weight", "shape", "rank", "share", "error", "change of the weight")
    yield details("Every linear", headers, rows, left=3)


def _linear_table(linears: Sequence[MaskedLinear]) -> Iterable[str]:
    if not linears:
        return
    columns = {n: pick for n, pick in _LINEAR_COLUMNS.items() if any(pick(linear) is not None for linear in linears)}
    rows = [
        (
            str(linear.block),
            words(kind_of(linear)).label,
            linear.weight,
            f"{linear.rows:,} × {linear.columns:,}",
            f"{linear.zeros:,}",
            f"{linear.zeros / linear.size:.1%}",
            *(_cell(pick(linear)) for pick in columns.values()),
        )
        for linear in linears
    ]
    headers = ("block", "linear", "weight", "shape", "zeros", "share", *columns)
    yield details("Every linear", headers, rows, left=3)


def _rotation_table(learned: Sequence[Learned]) -> Iterable[str]:
    rows = []
    for entry in learned:
        before, after = entry.entropy_before, entry.entropy_after
        change = relative_change(before, after)
        block = "all" if entry.block is None else str(entry.block)
        told = _MISSING if change is None else f"{change:+.1%}"
        rows.append((block, _cell(before), _cell(after), told, _cell(entry.steps)))
    if rows:
        headers = ("blocks", "entropy before (nats)", "entropy after (nats)", "change", "steps")
        yield details("Every rotation", headers, rows, left=1)


def _layer_table(layers: Sequence[RecoveredLayer]) -> Iterable[str]:
    keys = ("mse_before", "mse_start", "mse_after", "cka_before", "cka_after")
    rows = [
        (str(layer.block), outcome(layer), f"{layer.epochs:,}", *(_cell(layer.figure(key)) for key in keys))
        for layer in layers
    ]
    if rows:
        names = ("MSE before", "MSE at the start", "MSE after", "CKA before", "CKA after")
        yield details("Every block", ("block", "outcome", "epochs run", *names), rows, left=2)


def _perplexity_table(perplexities: Sequence[Perplexity]) -> Iterable[str]:
    rows = [(f"{entry.blocks:,}", _cell(entry.figure("perplexity"))) for entry in perplexities]
    if rows:
        yield details("Every perplexity", ("blocks recovered", "perplexity"), rows, left=1)


def _stage_table(stages: Sequence[Stage]) -> Iterable[str]:
    """What the run took: memory of the process is the largest so far, that of an accelerator the stage's own."""
    if not stages:
        return
    device = any(stage.device_peak_bytes is not None for stage in stages)
    phases = list(dict.fromkeys(name for stage in stages for name in stage.phases))
    rows = [
        (
            stage.name,
            _seconds(stage.seconds),
            *(_seconds(stage.phases.get(name), digits=2) for name in phases),
            _bytes(stage.peak_bytes),
            *([_bytes(stage.device_peak_bytes)] if device else []),
        )
        for stage in stages
    ]
    of = [f"of these {name}" for name in phases]
    headers = ("stage", "seconds", *of, "memory, largest so far", *(["device memory"] if device else []))
    yield details("Every stage", headers, rows, left=1)


def _seconds(value: float | None, *, digits: int = 1) -> str:
    return _MISSING if value is None else f"{value:,.{digits}f}"


def _bytes(size: int | None) -> str:
    return _MISSING if size is None else human_bytes(size)


def _of(head: HeadErrors, column: str) -> float | None:
    return head.figure(_HEAD_COLUMNS[column])


def _cell(value: float | None) -> str:
    return _MISSING if value is None else shown(value)


def details(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """A table that is folded away, its first `left` columns words."""
    return (
        f"<details>\n<summary>{title}</summary>\n"
        f'<div class="scroll">{_table(headers, rows, left=left)}</div>\n</details>'
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """A table whose first `left` columns are words; the others are numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="left"' if i < left else "" for i in range(len(cells))]
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(f"<{tag}{kind}{scope}>{text(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table>\n<thead><tr>{line('th', headers)}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
