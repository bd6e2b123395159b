"""`ckpt-prune plan`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import (
    container_option,
    device_option,
    echo_json,
    json_option,
    model_argument,
    overwrite_option,
    ratio_option,
    recipe_option,
    set_option,
    size_options,
    table,
    trust_option,
)


@click.command("plan")
@model_argument
@recipe_option
@click.option("--statistics", type=click.Path(path_type=Path), help="Statistics folder (`ckpt-prune calibrate`).")
@ratio_option
@size_options
@set_option
@container_option
@click.option(
    "--sweep",
    metavar="FROM:TO:STEP",
    help="Plan at several ratios, such as 0.1:0.7:0.1, and print the curve of size and predicted error.",
)
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), help="Plan file to write.")
@overwrite_option
@trust_option
@device_option
@json_option
def command(sweep: str | None, out: Path | None, as_json: bool, **given: Any) -> None:
    """Decide which units of MODEL stay under a recipe, and predict size and error. Writes nothing but the plan.

    Errors are those of each output projection on the calibration tokens, relative to its output's energy; of q and k,
    of the attention logits. floor is the least that any weights and bias on the kept inputs can reach, rho2 the share
    of the dropped output's variance that the kept inputs predict; held out, with statistics of several folds, is the
    error after on each fold when fitted on the others.

    Where compensation is chosen on held-out folds (method auto), margin is by how much the next best method is worse
    there, relative.

    \b
      ckpt-prune plan MODEL --recipe rcpu --statistics STATS --ratio 0.2 -o plan.json
      ckpt-prune prune MODEL --plan plan.json -o OUT
      ckpt-prune plan MODEL --recipe best --statistics STATS --target-params 5.0B
      ckpt-prune plan MODEL --recipe best --statistics STATS --sweep 0.1:0.7:0.1
    """
    from ckpt_prune.checkpoint.staging import write_whole
    from ckpt_prune.options import PlanOptions
    from ckpt_prune.transform.asked import check_plan_place, plan_request
    from ckpt_prune.transform.checks import check_request
    from ckpt_prune.transform.planned import make_plan
    from ckpt_prune.transform.settle import settle

    ratios = None if sweep is None else _ratios(sweep)
    request = plan_request(PlanOptions(output=out, diagnostics=ratios is None, **given), ratios=ratios is not None)
    checkpoint = request.model.checkpoint
    if ratios is not None:
        check_request(request)
        checkpoint.check_finite()
        _print_sweep(request, ratios, as_json=as_json)
        return
    settled = settle(request)
    checkpoint.check_finite()
    plan = make_plan(settled)
    if out is not None:
        check_plan_place(out, overwrite=given["overwrite"])  # planning takes time
        write_whole(out, plan.to_json())
    if as_json:
        click.echo(plan.to_json(), nl=False)
        return
    _print_plan(settled, plan)
    if out is not None:
        click.echo(f"\nplan written to {out}")


def _print_plan(settled: Any, plan: Any) -> None:
    from ckpt_prune.cli.rendering import COST_HEADERS, cost_rows, few_tokens, kept_line, warning_lines
    from ckpt_prune.report.figures import relative_floor

    click.echo(table(COST_HEADERS, cost_rows(plan.before, plan.after)))
    click.echo()
    rows = []
    chosen = any(site.margin is not None for site in plan.sites)
    for site in plan.sites:
        floor = relative_floor(site)
        figures = [site.error_uncompensated, site.error_compensated, floor, site.rho2, site.error_held_out]
        strength = "" if site.strength is None else f" {site.strength:g}"
        margin = [] if not chosen else ["-" if site.margin is None else f"{site.margin:.1%}"]
        rows.append(
            [
                str(site.block),
                site.space,
                f"{len(site.kept)}/{site.units}",
                site.method + strength,
                *("-" if f is None else f"{f:.4f}" for f in figures),
                *margin,
            ]
        )
    headers = ["block", "space", "kept", "compensation", "error before", "error after", "floor", "rho2", "held out"]
    click.echo(table([*headers, "margin"] if chosen else headers, rows))
    click.echo(f"\n{kept_line(settled)}")
    few = few_tokens(settled, errors="above")
    if few:
        click.echo(few)
    for line in warning_lines(plan.sites):
        click.echo(line)
    if plan.container_note:
        click.echo(f"\n{plan.container_note}")


def _ratios(text: str) -> list[float]:
    """The ratios of FROM:TO:STEP, both ends included."""
    from decimal import Decimal

    from ckpt_prune.errors import UserError

    try:
        start, stop, step = (Decimal(part) for part in text.split(":"))
        if not all(number.is_finite() for number in (start, stop, step)):
            raise ValueError(text)
        count = int((stop - start) / step) if step > 0 else -1
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"--sweep {text}: expected FROM:TO:STEP, such as 0.1:0.7:0.1") from error
    if not (0 <= start <= stop < 1) or count < 0 or count > 1000:
        raise UserError(f"--sweep {text}: ratios go up from 0 or more to less than 1, in at most 1000 steps")
    return [float(start + index * step) for index in range(count + 1)]


def _print_sweep(request: Any, ratios: list[float], *, as_json: bool) -> None:
    from ckpt_prune.checkpoint.units import human_bytes, human_count
    from ckpt_prune.planning.accounting import cost_of
    from ckpt_prune.transform.sweep import sweep

    points, before = sweep(request, ratios), cost_of(request.model)
    spaces = list(request.recipe.spaces)
    if as_json:
        rows_json = [{"ratio": p.ratio, **p.after.model_dump(), "widths": p.widths, "errors": p.errors} for p in points]
        echo_json({"recipe": request.recipe.name, "before": before.model_dump(), "points": rows_json})
        return
    rows = []
    for point in points:
        kept = [str(low) if low == high else f"{low}-{high}" for low, high in (point.widths[s] for s in spaces)]
        errors = ["-" if point.errors[s] is None else f"{point.errors[s]:.4f}" for s in spaces]
        rows.append(
            [
                f"{point.ratio:g}",
                human_count(point.after.parameters),
                f"{point.after.parameters / before.parameters:.1%}",
                human_bytes(point.after.bytes),
                human_count(point.after.flops),
                *kept,
                *errors,
            ]
        )
    headers = ["ratio", "parameters", "share", "bytes", "FLOPs", *spaces, *(f"{space} error" for space in spaces)]
    click.echo(table(headers, rows))
    click.echo("errors: means over blocks, relative to each output's energy, after compensation")
