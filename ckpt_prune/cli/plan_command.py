"""`ckpt-prune plan`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import plan, sweep
from ckpt_prune.cli.command import Command, echo_json, figure, size_cells, table_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.safe_text import escape_controls
from ckpt_prune.model.spaces import expert_space
from ckpt_prune.options.commands import PlanCommandOptions, PlanOptions, SweepDataOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.recipe.places import check_recipe

if TYPE_CHECKING:
    from ckpt_prune.model.cost_record import Cost
    from ckpt_prune.runner.plan import Planned
    from ckpt_prune.runner.sweep import Sweep


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

    recipe_pairs = [recipe_of(check_options(PlanOptions, options | {"recipe": each})) for each in recipes or (None,)]

    from ckpt_prune.runner.plannable import check_plannable

    for _, recipe in recipe_pairs:
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
    plans = [plan(**options, recipe=recipe) for recipe in recipes]
    before, compared = plans[0].plan.before, [each.comparison() for each in plans]
    if as_json:
        echo_json({"before": before.model_dump(), "recipes": compared})
    else:
        _print_compared(compared, before, [each.plan.after for each in plans])


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


def _print_planned(planned: "Planned") -> None:
    _print_plan(planned.settled, planned.plan)
    click.echo(f"\n{planned.stacks_line or planned.takes}")
    if planned.path is not None:
        click.echo(f"\nplan written to {planned.path}")


def _explain_predicted() -> str:
    from ckpt_prune.stages.spaces.messages import SECOND_ORDER

    return (
        f"predicted: the divergence (KL, in nats) from the dense model's output, {SECOND_ORDER}; the perplexity grows "
        "about exp(divergence) times"
    )


def _print_compared(compared: list[dict[str, Any]], before: "Cost", costs: "list[Cost]") -> None:
    spaces = list(dict.fromkeys(space for each in compared for space in each["errors"]))
    held_out = any(error is not None for each in compared for error in each["held_out"].values())
    predicted = any(each["divergence"] is not None for each in compared)
    rows = [
        {
            "recipe": each["recipe"],
            **size_cells(after, before),
            "stored as": each["container"],
            **{f"{space} error": figure(each["errors"].get(space)) for space in spaces},
            **{f"{space} held out": figure(each["held_out"].get(space)) for space in spaces if held_out},
            **({"predicted": figure(each["divergence"])} if predicted else {}),
        }
        for each, after in zip(compared, costs, strict=True)
    ]
    click.echo(table_of(rows))
    click.echo(
        "errors: means over blocks, relative to each output's energy, after compensation; they are no perplexity"
    )
    if held_out:
        click.echo("held out: the same on each fold of the samples when fitted on the others; by these recipes compare")
    if predicted:
        click.echo(_explain_predicted())
    for each in compared:
        for line in each["messages"]:
            click.echo(f"{each['recipe']}: {line}")


def _print_plan(settled: Any, plan: Any) -> None:
    from ckpt_prune.cli.rendering import plan_legend
    from ckpt_prune.runner.messages import kept_line, warnings, wider_choice
    from ckpt_prune.runner.sections import cost_table
    from ckpt_prune.show.terminal import print_table, section_lines
    from ckpt_prune.stages.depth.show import show_depth
    from ckpt_prune.stages.spaces.messages import multiples_line, predicted_line, size_lines
    from ckpt_prune.stages.spaces.show import (
        compare_errors,
        count_left_out,
        mean_lines,
        relative_floor,
        warn_of_sites,
    )

    click.echo(f"{print_table(cost_table(plan.before, plan.after))}\n")
    rows = []
    has_margins = any(site.margin is not None for site in plan.sites)
    pruned = {site.space for site in plan.sites if len(site.kept) < site.units}
    for site in plan.sites:
        if site.space not in pruned and pruned:
            continue  # the line about what is kept says enough of a space that stays whole in every block
        row = {
            "block": str(site.block),
            "space": expert_space(site.space, site.expert),
            "kept": f"{len(site.kept)}/{site.units}",
            "compensation": site.method + ("" if site.strength is None else f" {site.strength:g}"),
            "error before": figure(site.error_uncompensated),
            "error after": figure(site.error_compensated),
            "floor": figure(relative_floor(site)),
            "rho2": figure(site.rho2),
            "held out": figure(site.error_held_out),
        }
        rows.append(row | ({"margin": figure(site.margin, ".1%")} if has_margins else {}))
    if plan.depth is None:
        click.echo(f"{table_of(rows)}\n")
        lines = plan_legend(settled.model, plan.sites)
    else:
        lines = section_lines([show_depth(plan.depth)])
    for line in lines:
        click.echo(line)
    click.echo(f"\n{kept_line(settled)}")
    for line in filter(None, (predicted_line(settled.model, plan), *size_lines(settled))):
        click.echo(line)
    for keys in settled.recipe.stages:
        if keys.beside_plan is not None:
            click.echo(keys.beside_plan)
    of_sites = (
        *warn_of_sites(plan.sites),
        *count_left_out(plan.sites, plan.recipe),
        *mean_lines(plan.sites),
        *compare_errors(plan.sites, warnings=True),
    )
    for line in (*warnings(settled), *of_sites):
        click.echo(line)
    for line in filter(None, (plan.container_note, wider_choice(settled), multiples_line(settled))):
        click.echo(f"\n{line}")


def _print_sweep(sweep: "Sweep") -> None:
    points = sweep.points
    predicted = any(point.divergence is not None for point in points)
    axes = [axis for axis in ("blocks", "dimensions") if any(getattr(point, axis) is not None for point in points)]
    metric, form = ("top-1", ".1%") if sweep.metric == "top1" else (sweep.metric.replace("_", " "), ".3f")
    rows = []
    for point in points:
        row = {sweep.key: point.value if isinstance(point.value, str) else f"{point.value:g}"}
        row |= size_cells(point.after, sweep.before)
        row |= {axis: figure(getattr(point, axis), "") for axis in axes}
        row |= {space: "-".join(map(str, dict.fromkeys(point.widths[space]))) for space in sweep.spaces}
        row |= {f"{space} error": figure(point.errors[space]) for space in sweep.spaces}
        row |= {"predicted": figure(point.divergence)} if predicted else {}
        row |= {"KL": figure(point.measured), metric: figure(point.score, form)} if sweep.measured else {}
        rows.append(row)
    click.echo(table_of(rows))
    if sweep.spaces:
        click.echo("errors: means over blocks, relative to each output's energy, after compensation; no perplexity")
    if predicted and not sweep.depth:
        click.echo(_explain_predicted())
    for line in filter(None, (sweep.measured, *sweep.notes)):
        click.echo(line)
    if sweep.depth:
        _print_blocks(sweep)


def _print_blocks(sweep: "Sweep") -> None:
    rows = [
        {
            "ratio": f"{point.ratio:g}",
            "blocks gone": str(point.gone),
            **size_cells(point.after, sweep.before),
            "predicted": f"{point.divergence:.4f}",
        }
        for point in sweep.depth
    ]
    click.echo("\nwhole blocks instead (--recipe depth), the run of the least predicted divergence, without a map:")
    click.echo(table_of(rows))
    click.echo(
        "predicted: a second-order estimate of the divergence (KL, in nats) from the dense model's output; estimates "
        "of blocks and of units do not compare, and `drop: auto` in a recipe measures both"
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
        "plan MODEL --recipe ridge --statistics STATS --sweep spaces.heads.compensation.lambda,"
        "spaces.mlp.compensation.lambda=1e-4,1e-2,1 --evaluate test.txt --window 128",
    ],
)
