"""`ckpt-prune plan`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.plan import Planned, compared_plan, plan
from ckpt_prune.api.sweep import Sweep, sweep
from ckpt_prune.cli.command import Command, echo_json, table
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.safe_text import escape_controls
from ckpt_prune.model.spaces import expert_space
from ckpt_prune.options.commands import PlanCommandOptions, PlanOptions, SweepDataOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.recipe.places import check_recipe

if TYPE_CHECKING:
    from ckpt_prune.api.plan import ComparedPlan
    from ckpt_prune.job.plan import SitePlan


def _plan(options: dict[str, Any], as_json: bool) -> None:
    """Make a plan, compare plans, or sweep."""
    check_options(PlanCommandOptions, options)
    recipes: Sequence[str] = options.pop("recipes", ())
    values = options.pop("sweep", None)
    for recipe in recipes:
        check_recipe(recipe)
    data = [name for name in SweepDataOptions.model_fields if name in options]
    if values is None and ("text" in data or "images" in data):
        _refuse_data(recipes, {name: value for name, value in options.items() if name not in data})
    if values is None and data:
        raise UserError("--evaluate, --evaluate-samples, --samples and --window are of the points of a --sweep")
    if "test" in options and (len(recipes) > 1 or values is not None):
        raise UserError("--test holds one plan against other statistics: it goes with one --recipe and no --sweep")
    if len(recipes) > 1:
        _compare(recipes, values, options, as_json)
        return
    if recipes:
        options["recipe"] = recipes[0]
    if values is not None:
        _sweep(values, options, as_json)
        return
    planned = plan(**options)
    if as_json:
        for line in (*planned.messages, planned.takes):
            click.echo(escape_controls(line), err=True)
        click.echo(planned.plan.to_json(), nl=False)
    else:
        _print_planned(planned)


def _refuse_data(recipes: Sequence[str], options: dict[str, Any]) -> None:
    """Say what a plan is made from, to a user who comes from `prune --text`; or that the recipe has no plan."""
    from ckpt_prune.runner.read_recipe import recipe_of

    wanted = [recipe_of(check_options(PlanOptions, options | {"recipe": each})) for each in recipes or (None,)]

    from ckpt_prune.runner.plan import check_plannable

    for _, recipe in wanted:
        check_plannable(recipe)
    raise UserError(
        "a plan is made from statistics: run `ckpt-prune calibrate MODEL --text FILE -o STATS` (or --images DIR) "
        "and give --statistics STATS, or let `ckpt-prune prune` measure"
    )


def _compare(recipes: Sequence[str], values: str | None, options: dict[str, Any], as_json: bool) -> None:
    if values is not None or "output" in options:
        raise UserError("several recipes are compared, not written: --sweep and -o go with one --recipe")
    if len(set(recipes)) < len(recipes):
        raise UserError("--recipe: one is given twice")
    compared = [compared_plan(plan(**options, recipe=recipe)) for recipe in recipes]
    if as_json:
        echo_json({"before": compared[0].before.model_dump(), "recipes": [each.data() for each in compared]})
    else:
        _print_compared(compared)


def _sweep(values: str, options: dict[str, Any], as_json: bool) -> None:
    if {"ratio", "target_params", "target_bytes", "target_flops", "target_latency", "output"} & options.keys():
        raise UserError(
            "--sweep has ratios of its own and writes no plan: --ratio, --target-* and -o do not go with it; --set "
            "ratio=0.3 holds one while another key varies"
        )
    kept = {name: value for name, value in options.items() if name not in ("overwrite", "diagnostics")}
    curve = sweep(values=values, **kept)
    if as_json:
        echo_json(curve.data())
    else:
        _print_sweep(curve)


def _print_planned(planned: Planned) -> None:
    _print_plan(planned.settled, planned.plan)
    if planned.shifting is not None:
        _print_shifts(planned.plan.sites, planned.shifting.left)
        if planned.shifting.same:
            click.echo("both statistics were measured on the same samples: nothing is held against others")
    click.echo(f"\n{planned.takes}")
    if planned.path is not None:
        click.echo(f"\nplan written to {planned.path}")


def _predicted() -> str:
    from ckpt_prune.runner.messages import SECOND_ORDER

    return (
        f"predicted: the divergence (KL, in nats) of the output from the dense model's, {SECOND_ORDER}; its "
        "exponential is about what the perplexity is multiplied by"
    )


def _print_shifts(sites: "Sequence[SitePlan]", left: Sequence[str]) -> None:
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


def _print_plan(settled: Any, plan: Any) -> None:
    from ckpt_prune.cli.rendering import kept_line, plan_legend
    from ckpt_prune.runner.messages import few_tokens, predicted_line, size_lines, wider_choice
    from ckpt_prune.runner.sections import cost_table
    from ckpt_prune.show.terminal import print_table, section_lines
    from ckpt_prune.stages.depth.show import show_depth
    from ckpt_prune.stages.spaces.show import compare_errors, mean_lines, relative_floor, warn_of_sites

    click.echo(print_table(cost_table(plan.before, plan.after)))
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
        lines = section_lines([show_depth(plan.depth)])
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
    for line in (*warn_of_sites(plan.sites), *mean_lines(plan.sites), *compare_errors(plan.sites, warnings=True)):
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


command = Command(
    plan,
    call=_plan,
    options=PlanCommandOptions,
    examples=[
        "plan MODEL --recipe rcpu --statistics STATS --ratio 0.2 -o plan.json",
        "plan MODEL --recipe best --statistics STATS --target-params 5.0B",
        "plan MODEL --recipe rcpu --recipe ridge --recipe best-uniform --statistics STATS --ratio 0.2",
        "plan MODEL --recipe best --statistics STATS --sweep 0.1:0.7:0.1",
        "plan MODEL --statistics STATS --sweep spaces.mlp.ratio=0.2,0.4 --evaluate test.txt --window 512",
        "plan MODEL --recipe ridge --text train.txt --window 512 --sweep samples=4,16,64 --evaluate test.txt",
        "plan MODEL --recipe ridge --statistics CODE --test STORIES --ratio 0.2",
    ],
)
