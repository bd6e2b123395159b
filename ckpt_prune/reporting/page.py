"""The page itself: everything in one file, nothing to load, nothing to run."""

import math
from collections.abc import Callable, Iterable, Sequence
from importlib import resources

from ckpt_prune.checkpoint.units import human_bytes, human_count
from ckpt_prune.reporting.charts import draw, swatch
from ckpt_prune.reporting.escaping import text
from ckpt_prune.reporting.plots import Figure, figures, outcome, shown, steps_taken, words
from ckpt_prune.reporting.reading import Document, Layer, Learned, Linear, Perplexity, Record, Rotation, Site

MARKER = '<meta name="generator" content="ckpt-prune report">'
"""By which a page of this tool is known."""
# The browser itself then refuses whatever a page like this has no business loading or running.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MISSING = "–"


def page(document: Document) -> str:
    """The HTML of a report, the same for the same input."""
    style = resources.files("ckpt_prune.reporting").joinpath("style.css").read_text(encoding="utf-8")
    learned = _learned(document)
    plots = figures(document.sites, document.layers, document.linears, learned, document.perplexities)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        MARKER,
        f"<title>{text(document.title)}</title>",
        f"<style>\n{style}</style>\n</head>\n<body>",
        *_header(document),
        '<h2>Over depth</h2>\n<div class="plots">' if plots else "",
        *(_figure(plot) for plot in plots),
        "</div>" if plots else _nothing(document),
        *_site_tables(document.sites),
        *_linear_table(document.linears),
        *_rotation_table(learned),
        *_layer_table(document.layers),
        *_perplexity_table(document.perplexities),
        "</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _header(document: Document) -> Iterable[str]:
    yield f"<header>\n<h1>{text(document.title)}</h1>"
    if document.recipe.summary:
        yield f'<p class="soft">{text(document.recipe.summary)}</p>'
    sentences = [
        *(*_verdict(document.sites), *_masked(document), *_rotated(document.rotation)),
        *(*_recovered(document), *_perplexities(document)),
    ]
    yield from (f"<p>{text(sentence)}</p>" for sentence in sentences)
    facts = "\n".join(f"<dt>{text(label)}</dt><dd>{text(fact)}</dd>" for label, fact in document.facts)
    yield f'<div class="top">\n<div class="scroll costs">{_costs(document)}</div>'
    yield f"<dl>\n{facts}\n</dl>\n</div>\n</header>"


def _costs(document: Document) -> str:
    before, after = document.before, document.after
    flops = "FLOPs" if before.tokens is None else f"FLOPs of {before.tokens:,} tokens"
    rows = [
        (name, show(a), show(b), f"{b / a:.1%}")
        for name, show, a, b in (
            ("Parameters", human_count, before.parameters, after.parameters),
            ("Bytes", human_bytes, before.bytes, after.bytes),
            (flops, human_count, before.flops, after.flops),
        )
    ]
    return _table(("", "before", "after", "share"), rows, left=1)


def _verdict(sites: Sequence[Site]) -> list[str]:
    """Whether compensation did what it is for, on the tokens it was fitted to and on others; where not, by name."""
    sentences = []
    for key, where in (("error_compensated", "calibration data"), ("error_held_out", "held-out data")):
        pairs = [
            (site, before, after)
            for site in sites
            if site.pruned and site.method != "none"
            if (before := site.figure("error_uncompensated")) is not None and (after := site.figure(key)) is not None
        ]
        if not pairs:
            continue
        failed = [site for site, before, after in pairs if after >= before and before > 0]
        count = f"{len(pairs) - len(failed)} of {len(pairs)} sites"
        sentence = f"Compensation lowers the error on {where} at {count}"
        if failed:
            sentence += f"; not at {_listed([f'{words(site.space).label} of block {site.block}' for site in failed])}"
        sentences.append(f"{sentence}.")
    return sentences


def _listed(names: Sequence[str]) -> str:
    """The first eight, and how many more."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"


def _masked(document: Document) -> Iterable[str]:
    """What a mask zeroed, what that did to outputs, and where the Hessian was singular as it was."""
    linears, mask = document.linears, document.mask
    if not linears:
        return
    zeros, size = sum(linear.zeros for linear in linears), sum(linear.size for linear in linears)
    count = "1 linear" if len(linears) == 1 else f"{len(linears):,} linears"
    how = f" ({mask.method}, {mask.pattern})" if mask else ""
    yield (
        f"{zeros / size:.2%} of {human_count(size)} weights in {count} were zeroed{how}. Shapes stay as they were: "
        "parameters, bytes and FLOPs count zeros like any other weight."
    )
    errors = [(linear, error) for linear in linears if (error := linear.figure("error")) is not None]
    if errors:
        worst, most = max(errors, key=lambda pair: pair[1])
        mean = sum(error for _, error in errors) / len(errors)
        yield (
            f"The error of their outputs on calibration data is {shown(mean)} on average, "
            f"{shown(most)} at most ({_place(worst)})."
        )
    elif mask and mask.method == "magnitude":
        yield "The error of their outputs was not measured: a magnitude mask looks at no calibration data."
    else:
        yield "The error of their outputs was not measured: it needs --diagnostics and the Grams of their inputs."
    asked = document.asked_damp
    more = [
        f"{_place(linear)} ({damp:g})"
        for linear in linears
        if asked is not None and (damp := linear.figure("damp")) is not None and damp > asked
    ]
    if more:
        yield (
            f"At {len(more)} of {count} the Hessian was singular with the damping of {asked:g} asked for and was given "
            f"more: {_listed(more)}. More calibration data may help."
        )


def _place(linear: Linear) -> str:
    return f"{words(linear.kind).label} of block {linear.block}"


def _learned(document: Document) -> list[Learned]:
    """Rotations by block; one that all blocks share has none."""
    entries = document.rotation.learned if document.rotation else []
    return sorted(entries, key=lambda entry: -1 if entry.block is None else entry.block)


def _rotated(rotation: Rotation | None) -> Iterable[str]:
    """Whether rotations concentrated what they are for."""
    if rotation is None:
        return
    before, after = ([e.figure(f"entropy_{when}") for e in rotation.learned] for when in ("before", "after"))
    known = [(b, a) for b, a in zip(before, after, strict=True) if b is not None and a is not None]
    if not known or len(known) < len(rotation.learned):
        return
    start, end = (math.fsum(values) for values in zip(*known, strict=True))
    change = f" ({end / start - 1:+.1%})" if start > 0 else ""
    importance = f"{rotation.importance} importance" if rotation.importance else "importance"
    yield (
        f"Entropy of the {importance} of weights: {shown(start)} nats before rotation ({rotation.kind}), "
        f"{shown(end)} nats after{change}{_steps(rotation)}."
    )


def _steps(rotation: Rotation) -> str:
    """How long the rotations were trained, the shortest and the longest."""
    entries = sorted((e for e in rotation.learned if steps_taken(e)), key=lambda e: e.figure("steps") or 0)
    if not entries:
        return ""
    span = steps_taken(entries[-1])
    if entries[0].figure("steps") != entries[-1].figure("steps"):
        span = f"{entries[0].figure('steps'):,.0f} to {span}"
    return f", in {span}{'' if entries[0].block is None else ' per block'}"


def _recovered(document: Document) -> Iterable[str]:
    """How many blocks have new weights, where training diverged, and how near the dense model that brought them."""
    recovery, layers = document.recovery, document.layers
    if recovery is None:
        return
    if layers:
        kept = len(layers) - sum(layer.recovered for layer in layers)
        sentence = f"LaCo recovered {len(layers) - kept} of {len(layers)} blocks against {recovery.dense.name}"
        yield f"{sentence}; the others kept their old weights." if kept else f"{sentence}."
    diverged = [f"block {layer.block}" for layer in layers if layer.diverged]
    if diverged:
        yield f"Training diverged and was rolled back at {_listed(diverged)}."
    for key, name in (("mse", "Mean squared error"), ("cka", "Linear CKA")):
        pairs = [(layer.figure(f"{key}_before"), layer.figure(f"{key}_after")) for layer in layers]
        known = [(b, a) for b, a in pairs if b is not None and a is not None]
        if not known:
            continue
        before, after = (math.fsum(values) / len(known) for values in zip(*known, strict=True))
        change = f" ({after / before - 1:+.1%})" if key == "mse" and before > 0 else ""
        count = "1 block" if len(known) == 1 else f"{len(known)} blocks"
        yield (
            f"{name} of the hidden states against the dense model, held-out samples, mean of {count}: "
            f"{shown(before)} before recovery, {shown(after)} after{change}."
        )
    if document.sites or document.linears:
        yield f"Errors of single {'sites' if document.sites else 'linears'}, where measured, are from before recovery."


def _perplexities(document: Document) -> Iterable[str]:
    """The first and the last perplexity; never without its window."""
    known = [(p.blocks, value) for p in document.perplexities if (value := p.figure("perplexity")) is not None]
    if not known or document.recovery is None:
        return
    window = document.recovery.data.figure("window")
    of = "" if window is None else f" of {window:,.0f} tokens"
    ends = known[:1] + known[1:][-1:]
    told = ", ".join(f"{shown(value)} {_so_far(blocks, len(document.layers))}" for blocks, value in ends)
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


Column = tuple[str, Callable[[Site], float | None]]
_COLUMNS: tuple[Column, ...] = (
    ("uncompensated", lambda site: site.figure("error_uncompensated")),
    ("compensated", lambda site: site.figure("error_compensated")),
    ("held out", lambda site: site.figure("error_held_out")),
    ("margin", lambda site: site.figure("margin")),
    ("drift share", lambda site: site.figure("share")),
    ("floor", lambda site: site.floor),
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


_LINEAR_COLUMNS: dict[str, Callable[[Linear], float | None]] = {
    "error": lambda linear: linear.figure("error"),
    "damping": lambda linear: linear.figure("damp"),
    "dead inputs": lambda linear: linear.figure("dead"),
}


# The tables have the numbers behind the plots, for those who want them and for screens that have no pointer.


def _site_tables(sites: Sequence[Site]) -> Iterable[str]:
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
    yield _details("Every site", ("block", "space", "compensation", "λ", "kept", *names), rows, left=3)
    heads = [
        (str(site.block), words(site.space).label, str(head.head), *(_cell(_of(head, n)) for n in _HEAD_COLUMNS))
        for site in sites
        for head in site.heads or []
    ]
    if heads:
        yield _details("Every head", ("block", "space", "head", *_HEAD_COLUMNS), heads, left=2)


def _linear_table(linears: Sequence[Linear]) -> Iterable[str]:
    if not linears:
        return
    columns = {n: pick for n, pick in _LINEAR_COLUMNS.items() if any(pick(linear) is not None for linear in linears)}
    rows = [
        (
            str(linear.block),
            words(linear.kind).label,
            linear.weight,
            f"{linear.rows:,} × {linear.columns:,}",
            f"{linear.zeros:,}",
            f"{linear.zeros / linear.size:.1%}",
            *(_cell(pick(linear)) for pick in columns.values()),
        )
        for linear in linears
    ]
    headers = ("block", "linear", "weight", "shape", "zeros", "share", *columns)
    yield _details("Every linear", headers, rows, left=3)


def _rotation_table(learned: Sequence[Learned]) -> Iterable[str]:
    rows = []
    for entry in learned:
        before, after, steps = (entry.figure(key) for key in ("entropy_before", "entropy_after", "steps"))
        change = None if before is None or after is None or before <= 0 else f"{after / before - 1:+.1%}"
        block = "all" if entry.block is None else str(entry.block)
        rows.append((block, _cell(before), _cell(after), change or _MISSING, _cell(steps)))
    if rows:
        headers = ("blocks", "entropy before (nats)", "entropy after (nats)", "change", "steps")
        yield _details("Every rotation", headers, rows, left=1)


def _layer_table(layers: Sequence[Layer]) -> Iterable[str]:
    keys = ("mse_before", "mse_start", "mse_after", "cka_before", "cka_after")
    rows = [
        (str(layer.block), outcome(layer), f"{layer.epochs:,}", *(_cell(layer.figure(key)) for key in keys))
        for layer in layers
    ]
    if rows:
        names = ("MSE before", "MSE at the start", "MSE after", "CKA before", "CKA after")
        yield _details("Every block", ("block", "outcome", "epochs run", *names), rows, left=2)


def _perplexity_table(perplexities: Sequence[Perplexity]) -> Iterable[str]:
    rows = [(f"{entry.blocks:,}", _cell(entry.figure("perplexity"))) for entry in perplexities]
    if rows:
        yield _details("Every perplexity", ("blocks recovered", "perplexity"), rows, left=1)


def _of(head: Record, column: str) -> float | None:
    return head.figure(_HEAD_COLUMNS[column])


def _cell(value: float | None) -> str:
    return _MISSING if value is None else shown(value)


def _details(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
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
