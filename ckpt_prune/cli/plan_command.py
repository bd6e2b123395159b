"""`ckpt-prune plan`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.plan import compared_plan, plan
from ckpt_prune.api.sweep import Sweep
from ckpt_prune.api.sweep import sweep as plan_at
from ckpt_prune.cli.options import (
    RECIPE_HELP,
    checked_recipe,
    container_option,
    device_option,
    echo_json,
    family_option,
    json_option,
    model_argument,
    overwrite_option,
    part_option,
    ratio_option,
    set_option,
    size_options,
    table,
    trust_option,
)
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.safe_text import escape_controls
from ckpt_prune.model.spaces import expert_space
from ckpt_prune.options import PlanOptions, checked
from ckpt_prune.recipe.shipped import DEFAULT_RECIPE

if TYPE_CHECKING:
    from ckpt_prune.api.plan import ComparedPlan
    from ckpt_prune.job.plan import SitePlan


_OF_A_SWEEP = ("evaluate", "evaluate_samples", "text", "images", "samples", "window")


def _predicted() -> str:
    """What a column of predicted divergences is."""
    from ckpt_prune.runner.messages import SECOND_ORDER

    return (
        f"predicted: the divergence (KL, in nats) of the output from the dense model's, {SECOND_ORDER}; its "
        "exponential is about what the perplexity is multiplied by"
    )


def _refuse_data(recipes: tuple[str, ...], given: dict[str, Any]) -> None:
    """Those who come from `prune --text` are told what a plan is made from, or that there is none by their recipe."""
    from ckpt_prune.runner.read_recipe import recipe_of

    wanted = [recipe_of(checked(PlanOptions, given | {"recipe": each})) for each in recipes or (None,)]

    from ckpt_prune.runner.plan import check_plannable

    for _, recipe in wanted:
        check_plannable(recipe)
    raise UserError(
        "a plan is made from statistics: run `ckpt-prune calibrate MODEL --text FILE -o STATS` (or --images DIR) "
        "and give --statistics STATS, or let `ckpt-prune prune` measure"
    )


@click.command("plan")
@model_argument
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="R",
    callback=checked_recipe,
    help=f"{RECIPE_HELP}; given more than once, all are compared in one table. [default: {DEFAULT_RECIPE}]",
)
@click.option("--statistics", type=click.Path(path_type=Path), help="Statistics folder (`ckpt-prune calibrate`).")
@click.option(
    "--test",
    type=click.Path(path_type=Path),
    metavar="STATS",
    help="Statistics of MODEL on other samples: also say what every site of the plan loses there.",
)
@ratio_option
@size_options
@set_option
@container_option
@click.option(
    "--sweep",
    metavar="VALUES",
    help="Plan at several ratios, such as 0.1:0.7:0.1, or at several values of a key of the recipe, such as "
    "spaces.mlp.compensation.lambda=1e-4,1e-2,1, and print the curve of size and predicted error.",
)
@click.option(
    "--evaluate",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="With --sweep: also prune at each value, into a temporary folder, and measure its perplexity and KL on this "
    "text, or its accuracy and KL on this folder of images. What no plan says (masks, rotations, a narrower stream) "
    "is measured alone.",
)
@click.option("--evaluate-samples", type=int, help="Windows, or images, of --evaluate, at most.")
@click.option(
    "--text",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --sweep and --evaluate: text to calibrate every value on, in place of --statistics. Values of samples "
    "and of seed can be swept then, too.",
)
@click.option(
    "--images", type=click.Path(path_type=Path), metavar="DIR", help="Folder of images to calibrate on, likewise."
)
@click.option("--samples", type=int, help="Windows of --text, or images of --images.")
@click.option("--window", type=int, help="Tokens of a window, of --text and of --evaluate.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Plan file to write.")
@overwrite_option
@family_option
@part_option
@trust_option
@device_option
@json_option
def command(sweep: str | None, recipes: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Decide which units of MODEL stay under a recipe, and predict size and error. Writes nothing but the plan.

    Errors are those of each output projection on the calibration tokens, relative to its output's energy; of q and k,
    of the attention logits. floor is the least that any weights and bias on the kept inputs can reach, rho2 the share
    of the dropped output's variance that the kept inputs predict; held out, with statistics of several folds, is the
    error after on each fold when fitted on the others.

    Where compensation is chosen on held-out folds (method auto), margin is by how much at least the next best method is
    worse there, relative.

    --test STATS holds the plan, made from --statistics, against other samples: the error of every site there, exactly,
    beside how far its inputs are from those it was fitted on, and the bounds of CORP's Propositions C.1.3 and C.2.3.
    The plan file holds all of it, and `ckpt-prune report` draws it, of the plan and of what is pruned by it.

    \b
      ckpt-prune plan MODEL --recipe rcpu --statistics STATS --ratio 0.2 -o plan.json
      ckpt-prune prune MODEL --plan plan.json -o OUT
      ckpt-prune plan MODEL --recipe best --statistics STATS --target-params 5.0B
      ckpt-prune plan MODEL --recipe rcpu --recipe ridge --recipe best-uniform --statistics STATS --ratio 0.2
      ckpt-prune plan MODEL --recipe best --statistics STATS --sweep 0.1:0.7:0.1
      ckpt-prune plan MODEL --recipe ridge --statistics STATS --sweep spaces.mlp.compensation.lambda=1e-4,1e-2,1 \\
        --evaluate held_out.txt --window 512
      ckpt-prune plan MODEL --recipe ridge --text train.txt --window 512 --sweep samples=4,16,64 --evaluate held_out.txt
      ckpt-prune plan MODEL --recipe ridge --statistics CODE --test STORIES --ratio 0.2
    """
    measured = {name: given.pop(name) for name in _OF_A_SWEEP}
    if sweep is None and (measured["text"] or measured["images"] is not None):
        _refuse_data(recipes, given)
    if sweep is None and any(value not in ((), None) for value in measured.values()):
        raise UserError("--evaluate, --evaluate-samples, --samples and --window are of the points of a --sweep")
    if given["test"] is not None and (len(recipes) > 1 or sweep is not None):
        raise UserError("--test holds one plan against other statistics: it goes with one --recipe and no --sweep")
    if len(recipes) > 1:
        _side_by_side(recipes, sweep, as_json, given)
        return
    given["recipe"] = recipes[0] if recipes else None
    if sweep is not None:
        _swept(sweep, as_json, given | measured)
        return
    made = plan(**given)
    if as_json:
        for said in (*made.messages, made.takes):
            click.echo(escape_controls(said), err=True)
        click.echo(made.plan.to_json(), nl=False)
        return
    _print_plan(made.settled, made.plan)
    if made.shifting is not None:
        _print_shifts(made.plan.sites, made.shifting.left)
        if made.shifting.same:
            click.echo("both statistics were measured on the same samples: nothing is held against others")
    click.echo(f"\n{made.takes}")
    if made.path is not None:
        click.echo(f"\nplan written to {made.path}")


def _print_shifts(sites: "Sequence[SitePlan]", left: Sequence[str]) -> None:
    """What sites lose on other samples than those the plan was made from."""

    def figure(value: float | None, form: str = ".4f") -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            *(str(site.block), expert_space(site.space, site.expert), f"{len(site.kept)}/{site.units}"),
            *(figure(value) for value in (site.error_compensated, shift.test, shift.uncompensated, shift.floor)),
            figure(shift.covariances, ".3f"),
            figure(shift.freedom, ".0f"),
        ]
        for site in sites
        if (shift := site.shift) is not None
    ]
    click.echo()
    click.echo(table(["block", "space", "kept", "calibration", "test", "before", "floor", "apart", "freedom"], rows))
    click.echo()
    click.echo("calibration, test: the error on the samples of --statistics and of --test, after compensation")
    click.echo("before, floor: on those of --test without compensation, and the least there can be")
    click.echo(
        "apart: how far the inputs of the two (of q and k the equations of a fit) are from each other, |S - S'| / |S|"
    )
    click.echo("freedom: numbers that the compensation is free to choose; -o and --json hold bounds and more")
    if left:
        click.echo(f"{' and '.join(left)}: not told on other samples; moments do not say where tokens go")


def _side_by_side(recipes: tuple[str, ...], sweep: str | None, as_json: bool, given: dict[str, Any]) -> None:
    if sweep is not None or given["output"] is not None:
        raise UserError("several recipes are compared, not written: --sweep and -o go with one --recipe")
    if len(set(recipes)) < len(recipes):
        raise UserError("--recipe: one is given twice")
    compared = [compared_plan(plan(**given, recipe=recipe)) for recipe in recipes]
    if as_json:
        echo_json({"before": compared[0].before.model_dump(), "recipes": [each.data() for each in compared]})
    else:
        _print_compared(compared)


def _print_compared(compared: "list[ComparedPlan]") -> None:
    from ckpt_prune.common.formatting import human_bytes, human_count

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    before = compared[0].before
    spaces = list(dict.fromkeys(space for each in compared for space in each.errors))
    held_out = any(error is not None for each in compared for error in each.held_out.values())
    predicted = any(each.divergence is not None for each in compared)
    rows = [
        [
            each.recipe,
            human_count(each.after.parameters),
            f"{each.after.parameters / before.parameters:.1%}",
            human_bytes(each.after.bytes),
            human_count(each.after.flops),
            each.container,
            *(figure(each.errors.get(space)) for space in spaces),
            *(figure(each.held_out.get(space)) for space in spaces if held_out),
            *([figure(each.divergence)] if predicted else []),
        ]
        for each in compared
    ]
    headers = ["recipe", "parameters", "share", "bytes", "FLOPs", "stored as"]
    headers += [f"{space} error" for space in spaces]
    headers += [f"{space} held out" for space in spaces if held_out]
    click.echo(table([*headers, "predicted"] if predicted else headers, rows))
    click.echo(
        "errors: means over blocks, relative to each output's energy, after compensation; they are no perplexity"
    )
    if held_out:
        click.echo("held out: the same on each fold of the samples when fitted on the others; by these recipes compare")
    if predicted:
        click.echo(_predicted())
    for each in compared:
        for line in each.messages:
            click.echo(f"{each.recipe}: {line}")


def _swept(values: str, as_json: bool, given: dict[str, Any]) -> None:
    alone = ("ratio", *(f"target_{kind}" for kind in ("params", "bytes", "flops", "latency")), "output")
    own = [given.pop(name) for name in alone]
    if any(value is not None for value in own):
        raise UserError(
            "--sweep has ratios of its own and writes no plan: --ratio, --target-* and -o do not go with it; --set "
            "ratio=0.3 holds one while another key varies"
        )
    del given["overwrite"], given["test"]
    found = plan_at(given.pop("model"), values, **given)
    if as_json:
        echo_json(found.data())
    else:
        _print_sweep(found)


def _print_plan(settled: Any, plan: Any) -> None:
    from ckpt_prune.cli.rendering import COST_HEADERS, cost_rows, kept_line, plan_legend, warning_lines
    from ckpt_prune.report.depth import depth_lines
    from ckpt_prune.report.figures import relative_floor
    from ckpt_prune.runner.messages import few_tokens, predicted_line, size_lines, wider_choice

    click.echo(table(COST_HEADERS, cost_rows(plan.before, plan.after)))
    click.echo()
    rows = []
    chosen = any(site.margin is not None for site in plan.sites)
    pruned = {site.space for site in plan.sites if len(site.kept) < site.units}
    for site in plan.sites:
        if site.space not in pruned and pruned:
            continue  # of a space that stays whole in every block the line of what is kept says enough
        floor = relative_floor(site)
        figures = [site.error_uncompensated, site.error_compensated, floor, site.rho2, site.error_held_out]
        strength = "" if site.strength is None else f" {site.strength:g}"
        margin = [] if not chosen else ["-" if site.margin is None else f"{site.margin:.1%}"]
        rows.append(
            [
                str(site.block),
                expert_space(site.space, site.expert),
                f"{len(site.kept)}/{site.units}",
                site.method + strength,
                *("-" if f is None else f"{f:.4f}" for f in figures),
                *margin,
            ]
        )
    headers = ["block", "space", "kept", "compensation", "error before", "error after", "floor", "rho2", "held out"]
    if plan.depth is None:
        click.echo(table([*headers, "margin"] if chosen else headers, rows))
        click.echo()
        lines = plan_legend(settled.model, plan.sites, language=plan.before.cache is not None)
    else:
        lines = depth_lines(plan.depth)
    for line in lines:
        click.echo(line)
    click.echo(f"\n{kept_line(settled)}")
    predicted = predicted_line(settled.model, plan)
    if predicted:
        click.echo(predicted)
    for line in size_lines(settled):
        click.echo(line)
    if settled.recipe.recovery is not None:
        click.echo(
            f"the recipe ends with recovery ({settled.recipe.recovery.method}), which these figures leave out: "
            "`prune --plan` asks for the samples that it takes"
        )
    few = few_tokens(settled, errors="above")
    if few:
        click.echo(few)
    for line in warning_lines(plan.sites):
        click.echo(line)
    if plan.container_note:
        click.echo(f"\n{plan.container_note}")
    wider = wider_choice(settled)
    if wider:
        click.echo(f"\n{wider}")


def _print_sweep(found: Sweep) -> None:
    from ckpt_prune.common.formatting import human_bytes, human_count

    rows = []
    predicted = any(point.divergence is not None for point in found.points)
    counted = {name: [getattr(point, name) for point in found.points] for name in ("blocks", "dimensions")}
    axes = {name: counts for name, counts in counted.items() if set(counts) != {None}}
    for index, point in enumerate(found.points):
        kept = [str(low) if low == high else f"{low}-{high}" for low, high in (point.widths[s] for s in found.spaces)]
        errors = ["-" if point.errors[s] is None else f"{point.errors[s]:.4f}" for s in found.spaces]
        rows.append(
            [
                point.value if isinstance(point.value, str) else f"{point.value:g}",
                human_count(point.after.parameters),
                f"{point.after.parameters / found.before.parameters:.1%}",
                human_bytes(point.after.bytes),
                human_count(point.after.flops),
                *("-" if own[index] is None else str(own[index]) for own in axes.values()),
                *kept,
                *errors,
                *(["-" if point.divergence is None else f"{point.divergence:.4f}"] if predicted else []),
                *(["-" if point.measured is None else f"{point.measured:.4f}"] if found.measured else []),
                *(["-" if point.score is None else _scored(found.metric, point.score)] if found.measured else []),
            ]
        )
    headers = [
        found.key,
        "parameters",
        "share",
        "bytes",
        "FLOPs",
        *axes,
        *found.spaces,
        *(f"{space} error" for space in found.spaces),
        *(["predicted"] if predicted else []),
        *(["KL", "top-1" if found.metric == "top1" else found.metric.replace("_", " ")] if found.measured else []),
    ]
    click.echo(table(headers, rows))
    if found.spaces:
        click.echo("errors: means over blocks, relative to each output's energy, after compensation; no perplexity")
    if predicted and not found.depth:
        click.echo(_predicted())
    if found.measured:
        click.echo(found.measured)
    for note in found.notes:
        click.echo(note)
    if found.depth:
        _print_blocks(found)


def _scored(metric: str, score: float) -> str:
    return f"{score:.1%}" if metric == "top1" else f"{score:.3f}"


def _print_blocks(found: Sweep) -> None:
    """What whole blocks are worth beside the units of the recipe."""
    from ckpt_prune.common.formatting import human_bytes, human_count

    rows = [
        [
            f"{point.ratio:g}",
            str(point.gone),
            human_count(point.after.parameters),
            f"{point.after.parameters / found.before.parameters:.1%}",
            human_bytes(point.after.bytes),
            human_count(point.after.flops),
            f"{point.divergence:.4f}",
        ]
        for point in found.depth
    ]
    click.echo()
    click.echo("whole blocks instead (--recipe depth), the run of the least predicted divergence, without a map:")
    click.echo(table(["ratio", "blocks gone", "parameters", "share", "bytes", "FLOPs", "predicted"], rows))
    click.echo(
        "predicted: the divergence (KL, in nats) of the output from the dense model's, by second order; of blocks and "
        "of units it is on different footings: what decides is measured (drop: auto, in recipes)"
    )
