"""Sections of the stage `spaces`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_prune.common.formatting import plural
from ckpt_prune.common.ratios import is_far
from ckpt_prune.job.records import HeadErrors, SiteRecord
from ckpt_prune.model.family_keys import GROUPED
from ckpt_prune.model.spaces import KIND_OF_SPACE, expert_space, recipe_space
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.show.section import (
    MISSING,
    Figure,
    Line,
    Pick,
    Point,
    Section,
    Table,
    draw_figure,
    draw_line,
    format_figure,
    format_span,
    make_tables,
    mean_of,
    name_blocks,
    name_some,
    number_under,
)
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.spaces.records import StrengthSearch

SOLVED = 1e-6
"""Relative residual below which a logit solve is as good as the float32 moments it was made from."""
NO_PERPLEXITY = "errors are of each site's output, no perplexity or accuracy"
_DRIFT = (
    "relative to what a module would have to add for the residual stream to be the dense model's, errors of earlier "
    "blocks included (target drift)"
)


@dataclass(frozen=True)
class _Space:
    """How a space is spoken of: in titles and legends; what its units are; and what its errors are errors of."""

    label: str
    units: str = ""
    target: str = "output"


_SPACES = {
    "mlp": _Space("MLP", "columns of the MLP"),
    "pooling": _Space("MLP that pools the tokens", "columns of the MLP that pools the tokens"),
    "dense": _Space("MLP in other blocks", "columns of the MLP in other blocks, such as those without experts"),
    "heads": _Space("Attention heads", "heads, or KV groups"),
    "cross_heads": _Space("Heads of cross-attention", "heads of cross-attention, or its KV groups"),
    "linear_heads": _Space("Heads of linear attention", "heads of linear attention, or of state spaces"),
    "queries": _Space("Query heads in groups", "query heads inside KV groups"),
    "values": _Space("Values", "directions of values"),
    "qk": _Space("Q/K", "dimensions of queries and keys", "logit"),
    "rotary": _Space("Rotary pairs", "", "logit"),
}


def sections(report: Report) -> list[Section]:
    """Say how many units stay, and what error that leaves at the outputs that they belong to."""
    sites = sorted(report.sites, key=lambda site: site.block)
    if not sites:
        return []
    search, recipe = report.lambda_search, report.read_recipe()
    sentences = [*_errors(sites), *compare_errors(sites)]
    if sentences and (report.recovery is not None or report.adapters is not None):
        sentences.append("These errors are from before recovery.")
    sentences += [*warn_of_sites(sites), *([] if recipe is None else count_left_out(sites, recipe))]
    if report.spread is not None:
        sentences.append(
            "Widths follow predicted losses, averaged over draws of labels: other draws would move the loss "
            f"that is predicted of a site by about {report.spread:.1%}."
        )
    explanations = [] if recipe is None or report.asked is not None else [*_coarse(sites, recipe)]
    if search is not None:
        sentences.append(f"Lambda {search.chosen:g} has the least calibration perplexity of those that were tried.")
    figures = [*draw_sites(sites), *([] if search is None else _draw_search(search))]
    if not figures:
        explanations.append(
            "Nothing was measured per layer: errors and diagnostics need statistics with Grams "
            "(ckpt-prune calibrate --collect moments,gram)."
        )
    return [
        Section("Units", sentences, explanations, tables=_make_table(sites), figures=figures, details=_details(sites))
    ]


def _by_space(sites: Sequence[SiteRecord]) -> dict[str, list[SiteRecord]]:
    return {name: [s for s in sites if s.space == name] for name in dict.fromkeys(s.space for s in sites)}


def _words(space: str) -> _Space:
    return _SPACES.get(space, _Space(space))


# ---- errors, in words --------------------------------------------------------------------------------------------


def mean_errors(sites: Sequence[SiteRecord]) -> tuple[float, float] | None:
    """Return the means of the errors without and with compensation, over those sites that have both."""
    pairs = [
        (a, b)
        for site in sites
        if (a := site.error_uncompensated) is not None and (b := site.error_compensated) is not None
    ]
    return (sum(a for a, _ in pairs) / len(pairs), sum(b for _, b in pairs) / len(pairs)) if pairs else None


def mean_held_out(sites: Sequence[SiteRecord]) -> float | None:
    """Return the mean error on held-out folds over the sites that are compensated."""
    return mean_of([site.error_held_out for site in sites if site.method != "none"])


def _make_table(sites: Sequence[SiteRecord]) -> Sequence[Table]:
    """Make the table with a row for every space: its units, and the means of its errors."""

    def error(pair: tuple[float, float] | None, which: int) -> str | None:
        return None if pair is None else f"{pair[which]:.4f}"

    def name(records: Sequence[SiteRecord]) -> str:
        units = _words(records[0].space).units
        return f"{records[0].space} ({units})" if units else records[0].space

    return make_tables(
        "",
        list(_by_space(sites).values()),
        {
            "space": name,
            "units kept": lambda own: f"{format_span([len(site.kept) for site in own])} of {own[0].units}",
            "error before": lambda own: error(mean_errors(own), 0),
            "after": lambda own: error(mean_errors(own), 1),
            "held out": lambda own: None if (value := mean_held_out(own)) is None else f"{value:.4f}",
        },
    )


def _errors(sites: Sequence[SiteRecord]) -> Iterator[str]:
    """Say what the errors are."""
    measured = [records for records in _by_space(sites).values() if mean_errors(records) is not None]
    if measured:
        drift = any(site.share is not None for records in measured for site in records)
        logits = any(KIND_OF_SPACE.get(recipe_space(records[0].space)) in ("logits", "rotary") for records in measured)
        of = " (of queries and keys: of the attention logits)" if logits else ""
        yield (
            f"The error is the share of the energy of a module's output{of} that pruning changes, before and after "
            "compensation: mean over blocks, calibration samples."
        )
        if drift:
            yield f"It is {_DRIFT}."
        yield "It is not perplexity or accuracy."


def mean_lines(sites: Sequence[SiteRecord]) -> Iterator[str]:
    """Yield the mean error of every space on held-out folds."""
    for space, records in _by_space(sites).items():
        if (error := mean_held_out(records)) is not None:
            yield f"{space}: mean error on held-out folds, compensated, {error:.4f}"


def compare_errors(sites: Sequence[SiteRecord], *, warnings: bool = False) -> Iterator[str]:
    """Say at how many sites compensation lowers the error, on calibration samples and on held-out ones.

    Args:
        sites: of a report or a plan.
        warnings: say it only if it fails somewhere.
    """
    for key, where, advice in (
        ("error_compensated", "calibration", ""),
        ("error_held_out", "held-out", ": use more samples or a larger lambda"),
    ):
        pairs = [
            (site, before, after)
            for site in sites
            if len(site.kept) < site.units and site.method != "none"
            if (before := site.error_uncompensated) is not None and (after := site.figure(key)) is not None
        ]
        worse = [site for site, before, after in pairs if after >= before and before > 0]
        if pairs and (worse or not warnings):
            exceptions = f"; not at {_name_places(worse)}{advice}" if worse else ""
            count = f"{len(pairs) - len(worse)} of {len(pairs)} sites"
            yield f"Compensation lowers the error on {where} samples at {count}{exceptions}."


def count_left_out(sites: Sequence[SiteRecord], recipe: Recipe) -> Iterator[str]:
    """Say at how many sites a fit loses to the kept weights by held-out samples, so that these stay as they are."""
    ruled = {space for space, settings in recipe.spaces.items() if settings.compensation.by_rule}
    fitted = [site for site in sites if recipe_space(site.space) in ruled and len(site.kept) < site.units]
    held_out = [site for site in fitted if site.error_held_out is not None]
    left_out = [site for site in held_out if site.method == "none"]
    if left_out:
        yield (
            f"At {len(left_out)} of {plural(len(held_out), 'site')} a fit loses to the kept weights as they are on "
            f"held-out samples, and was left out: {_name_places(left_out)}."
        )


def _name_places(sites: Sequence[SiteRecord]) -> str:
    """Name sites by space, with runs of blocks: mlp of blocks 0 to 7 and 9."""
    blocks: dict[str, set[int]] = {}
    for site in sites:
        blocks.setdefault(expert_space(site.space, site.expert), set()).add(site.block)
    return name_some([f"{space} of {name_blocks(sorted(own))}" for space, own in blocks.items()])


def warn_of_sites(sites: Sequence[SiteRecord]) -> Iterator[str]:
    """Warn of solves that stopped short, and of experts with too few tokens or widths that do not run everywhere."""
    few = [f"{site.expert} of block {site.block} ({site.few})" for site in sites if site.few is not None]
    if few:
        yield (
            f"The router sent too few tokens to expert {name_some(few, 5)}: they were measured on all tokens of their "
            "layer; use more samples."
        )
    experts = [site for site in sites if site.expert is not None]
    odd = sorted({len(site.kept) for site in experts if len(site.kept) % GROUPED})
    if odd and any(len(site.kept) < site.units for site in experts):
        yield (
            f"Experts of {odd[0]} columns do not run by transformers' default, which wants a multiple of {GROUPED}: "
            f"say --set spaces.mlp.multiple_of={GROUPED}, or load them by ckpt_prune.load or with "
            'experts_implementation="eager".'
        )
    for site in sites:
        if site.residual is not None and site.residual > SOLVED:
            yield (
                f"The logits of block {site.block} are not solved to the end (relative residual {site.residual:.1g}): "
                "use more samples or a larger lambda."
            )


def _coarse(sites: Sequence[SiteRecord], recipe: Recipe) -> Iterator[str]:
    """Say of which spaces another share of the units went than the recipe asks for: they are too few to divide so."""
    if recipe.allocation != "uniform" or recipe.size is not None:
        return
    blocks = recipe.blocks(1 + max((site.block for site in sites), default=0))
    for space, settings in recipe.spaces.items():
        site = next((site for site in sites if site.space == space and site.block in blocks), None)
        if site is None or settings.keep is not None:
            continue
        ratio, dropped = recipe.ratio_of(space), site.units - len(site.kept)
        if is_far(ratio, dropped / site.units):
            steps = f" in multiples of {settings.multiple_of}" if settings.multiple_of > 1 else ""
            gone = f"{dropped} ({dropped / site.units:.3g}) went" if dropped else "none went"
            yield (
                f"Space {space} has {plural(site.units, 'unit')} per block{steps}, too coarse for a ratio of "
                f"{ratio:g}: {gone}."
            )


# ---- figures -----------------------------------------------------------------------------------------------------


def relative_floor(site: SiteRecord) -> float | None:
    """Return the least error that any weights and bias can reach, relative as the errors are; None if not known.

    Floor and j0 are per token; their ratio, times the uncompensated error, stands beside the errors.
    """
    if site.floor is None or site.j0 is None or site.error_uncompensated is None:
        return None
    # Where nothing is lost there is nothing to be relative to.
    return site.floor / site.j0 * site.error_uncompensated if site.j0 > 0 else 0.0 if site.floor == 0 else None


def inputs_of(site: SiteRecord) -> int | None:
    """Return the inputs of the consumer. Units of an MLP are its inputs; a head is several, which the record counts."""
    width = site.width or (site.units if site.space == "mlp" else None)
    return width if width is not None and width > 0 else None


def _of_inputs(key: str) -> Pick:
    def share(site: SiteRecord) -> float | None:
        value, width = site.figure(key), inputs_of(site)
        return None if value is None or width is None else value / width

    return share


def _of_heads(key: str) -> Pick:
    def by_head(site: SiteRecord) -> Mapping[str, float]:
        heads = site.heads or []
        return {f"head {head.head}": value for head in heads if (value := head.figure(key)) is not None}

    return by_head


_PER_HEAD = "Line: mean of the heads; band: from the least to the largest."
_DROPPED = "share of the dropped variance"
_BELOW = " No compensation of this kind gets below the floor."
FIGURES: Sequence[tuple[str, str, str, Pick | Mapping[str, Pick], Mapping[str, Any]]] = (
    (
        "{space}: {target} error",
        f"Lower is better.{_BELOW}",
        "share of {target} energy",
        {
            "uncompensated": "error_uncompensated",
            "compensated": "error_compensated",
            "held out": "error_held_out",
            "floor": relative_floor,
        },
        {},
    ),
    (
        "{space}: {target} error per head",
        f"Lower is better. {_PER_HEAD}",
        "share of the head's {target} energy",
        {"uncompensated": _of_heads("error_uncompensated"), "compensated": _of_heads("error_compensated")},
        {},
    ),
    (
        "ρ²: what the kept units predict",
        "Higher is better: the share of what was dropped that compensation can restore at most.",
        _DROPPED,
        "rho2",
        {"full": (0, 1)},
    ),
    ("ρ² per head", f"Higher is better. {_PER_HEAD}", _DROPPED, _of_heads("rho2"), {"full": (0, 1)}),
    (
        "{space}: rank of the inputs",
        "Lower means more redundant, easier to prune. k95: directions, or inputs, that hold 95 % of the variance.",
        "share of the width",
        {
            "effective rank": _of_inputs("effective_rank"),
            "k95": _of_inputs("k95"),
            "k95 of inputs": _of_inputs("k95_inputs"),
        },
        {"log": False},
    ),
    (
        "Active inputs",
        "Lower means sparser: inputs that are zero on most tokens cost little when dropped.",
        "mean share of tokens",
        "active",
        {"full": (0, 1)},
    ),
    (
        "Units kept",
        "Where the budget went: the recipe lets blocks differ.",
        "share of the units",
        lambda site: len(site.kept) / site.units,
        {"full": (0, 1), "varying": True},
    ),
)
"""Title, note, unit, what to draw, options of `draw_figure`. Several quantities make a figure for each space, one makes
one figure with a line for each space."""


def draw_sites(sites: Sequence[SiteRecord]) -> Iterator[Figure]:
    """Draw everything that was measured of the sites: errors, what bounds them, and what the inputs are like."""
    spaces = _by_space(sites)
    order = [name for name in _SPACES if name in spaces] + [name for name in spaces if name not in _SPACES]
    groups = [(_words(name), spaces[name]) for name in order]
    for title, note, unit, picks, options in FIGURES:
        if isinstance(picks, Mapping):
            for space, records in groups:
                named = [text.format(space=space.label, target=space.target) for text in (title, unit)]
                lines = [draw_line(name, records, pick) for name, pick in picks.items()]
                floor = any(line.name == "floor" and line.points for line in lines)
                own_note = note if floor else note.removesuffix(_BELOW)
                yield from draw_figure(named[0], own_note, named[1], *lines, **options)
        else:
            lines = [draw_line(space.label, records, picks) for space, records in groups]
            yield from draw_figure(title, note, unit, *lines, **options)


def _draw_search(search: StrengthSearch) -> Sequence[Figure]:
    """Draw calibration perplexity over the exponent of λ (RCPU, Figures 5 and 6); nothing without powers of ten."""
    points = []
    for text, perplexity in search.perplexity.items():
        try:
            strength = float(text)
        except ValueError:
            continue
        if perplexity is None or not strength > 0:
            continue
        exponent = math.log10(strength)
        if abs(exponent - round(exponent)) > 1e-9:
            return []
        chosen = " (chosen)" if strength == search.chosen else ""
        points.append(
            Point(round(exponent), perplexity, perplexity, perplexity, f"{format_figure(perplexity)}{chosen}")
        )
    if len(points) < 2:
        return []
    return draw_figure(
        "Perplexity over λ",
        f"Lower is better: of the pruned model on the calibration text. {search.chosen:g} was taken.",
        "perplexity",
        Line("calibration text", sorted(points, key=lambda point: point.place)),
        across="power of ten of λ",
        joined=True,
    )


# ---- every site --------------------------------------------------------------------------------------------------


def _of_pair(key: str) -> Callable[[tuple[SiteRecord, HeadErrors]], float | None]:
    return lambda pair: pair[1].figure(key)


def _details(sites: Sequence[SiteRecord]) -> list[Table]:
    place = {"block": lambda site: str(site.block), "space": lambda site: _words(site.space).label}
    heads = {"uncompensated": "error_uncompensated", "compensated": "error_compensated", "floor": "floor", "ρ²": "rho2"}
    return [
        *make_tables(
            "Every site",
            sites,
            {
                **place,
                "compensation": lambda site: site.method,
                "λ": lambda site: MISSING if site.strength is None else f"{site.strength:g}",
                "kept": lambda site: f"{len(site.kept):,} of {site.units:,}",
                "uncompensated": number_under("error_uncompensated"),
                "compensated": number_under("error_compensated"),
                "held out": number_under("error_held_out"),
                "margin": number_under("margin"),
                "drift share": number_under("share"),
                "floor": relative_floor,
                "ρ²": number_under("rho2"),
                "effective rank": number_under("effective_rank"),
                "k95": number_under("k95"),
                "k95 of inputs": number_under("k95_inputs"),
                "active": number_under("active"),
            },
            words=3,
        ),
        *make_tables(
            "Every head",
            [(site, head) for site in sites for head in site.heads or []],
            {
                "block": lambda pair: str(pair[0].block),
                "space": lambda pair: _words(pair[0].space).label,
                "head": lambda pair: str(pair[1].head),
                **{name: _of_pair(key) for name, key in heads.items()},
            },
            words=2,
        ),
    ]


def settle(recipe: Recipe, report: Report) -> Recipe:
    """Return a recipe with what the run chose by trials in place of the trials: one strength."""
    return recipe if report.lambda_search is None else recipe.with_strength(report.lambda_search.chosen)
