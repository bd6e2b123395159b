"""`ckpt-prune prune`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.prune import Pruned, PushFailedError, prune_as
from ckpt_prune.cli.options import (
    after_option,
    container_option,
    device_option,
    echo_json,
    family_option,
    json_option,
    model_argument,
    options_of,
    overwrite_option,
    part_option,
    public_option,
    ratio_option,
    recipe_option,
    set_option,
    size_options,
    state_memory_option,
    table,
    trust_option,
)
from ckpt_prune.common.errors import UserError
from ckpt_prune.options import CalibrationOptions, ImageOptions, PruneOptions, checked


@click.command("prune")
@model_argument
@recipe_option
@click.option("--statistics", type=click.Path(path_type=Path), help="Statistics folder (`ckpt-prune calibrate`).")
@options_of(CalibrationOptions)
@options_of(ImageOptions)
@click.option("--plan", type=click.Path(path_type=Path), help="Apply a plan file instead of a recipe.")
@ratio_option
@size_options
@set_option
@container_option
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything and print sizes; measure and write nothing. Data to measure on may be left out.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run of the same job.")
@click.option(
    "--diagnostics/--no-diagnostics",
    default=True,
    show_default=True,
    help="Also record floors, rho2, spectra and, with folds, held-out errors of every site: one or two more "
    "factorisations each.",
)
@state_memory_option
@after_option
@click.option(
    "--push",
    metavar="REPO",
    help="Push OUT to this new repository on the Hub (ORG/NAME) when it is complete, as `ckpt-prune push` does. Token "
    "and name are checked before any work.",
)
@public_option
@overwrite_option
@family_option
@part_option
@trust_option
@device_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Write a pruned and compensated copy of MODEL (a folder or a Hub id) that transformers loads.

    A recipe either drops units of spaces, so that the model becomes smaller, or has a mask, which zeroes single
    weights and leaves every shape as it is.

    Without --recipe it is best-uniform, which sets nothing by hand: units, widths, strength and form of compensation
    are those that do the least harm by what is measured, with the same widths in every block. Recipe best is the same
    with widths per block: it loses less, and OUT then carries its own code to load it with.

    Moments come from --statistics (the dense cache) or are measured on --text, or on --images for a vision model. A
    sequential recipe measures each block on the already pruned ones before it, as its paper does; a dense recipe
    measures the unpruned model first. A recipe without scores or compensation that look at activations (magnitude)
    needs neither. Where a recipe has `recovery`, what stays is trained as `ckpt-prune recover` does it afterwards: each
    block right after it is pruned (any recipe does it with --set recovery.epochs=10), or scales of all blocks at the
    end (--set recovery.method=scales). Where it has `export` (--set export.format=onnx), OUT/onnx is its graph,
    compared with PyTorch as `ckpt-prune export` does it. Where it computes something else the exit code is 1, where it
    cannot be made 2, and OUT is complete without it either way.

    A run that takes long begins with a line on stderr about time, memory and disk; --dry-run always has it.

    The output appears only when it is complete. An interrupted run leaves OUT.partial, for --resume.

    \b
      ckpt-prune prune MODEL --target-params 70% --text calib.txt -o OUT
      ckpt-prune prune MODEL --recipe rcpu --ratio 0.2 --text calib.txt -o OUT
      ckpt-prune prune MODEL --recipe ridge --set spaces.mlp.ratio=0.4 --statistics STATS -o OUT
      ckpt-prune prune VIT --recipe corp --ratio 0.5 --images DIR -o OUT
      ckpt-prune prune MODEL --recipe wanda-2-4 --text calib.txt -o OUT
      ckpt-prune prune MODEL --plan plan.json -o OUT
    """
    complete: list[Pruned] = []
    try:
        pruned = prune_as(checked(PruneOptions, given), written=complete.append if as_json else _print_done)
    except PushFailedError as error:
        if complete:
            echo_json(error.pruned.data() | {"pushed": {"error": str(error)}})
        raise
    except (UserError, KeyboardInterrupt) as error:
        if complete:
            why = str(error) if isinstance(error, UserError) else "interrupted"
            echo_json(complete[0].data() | {"onnx": {"written": False, "error": why}})
        raise
    if as_json:
        echo_json(pruned.data())
    elif pruned.report is None:
        _print_dry(pruned.settled)
    elif pruned.graph is not None:
        from ckpt_prune.cli.proof import exported_lines

        click.echo("\n".join(exported_lines(pruned.graph)))
    if not as_json and pruned.pushed is not None:
        from ckpt_prune.cli.push_command import pushed_lines

        click.echo("\n".join(pushed_lines(pruned.pushed, files=False)))
    if not pruned.passed:
        click.get_current_context().exit(1)


def _print_done(pruned: Pruned) -> None:
    """What was pruned: before its graph, which takes long and may end in the middle."""
    from ckpt_prune.cli.rendering import COST_HEADERS, cost_rows, kept_line, report_lines
    from ckpt_prune.runner.messages import messages

    report, settled = pruned.report, pruned.settled
    if report is not None and settled is not None:
        for message in messages(settled):
            click.echo(message)
        click.echo(table(COST_HEADERS, cost_rows(report.before, report.after)))
        if not settled.recipe.has("mask") and not settled.recipe.has("low_rank"):
            click.echo(kept_line(settled))
        for line in report_lines(report):
            click.echo(line)
        click.echo(f"written to {pruned.path}")


def _print_dry(settled: Any) -> None:
    from ckpt_prune.cli.rendering import COST_HEADERS, container_line, cost_rows, kept_line, ranks_line
    from ckpt_prune.common.filenames import GRAPH_FOLDER
    from ckpt_prune.common.formatting import plural
    from ckpt_prune.runner.estimate import estimate_job
    from ckpt_prune.runner.messages import messages, unmeasured_lines
    from ckpt_prune.sparsity.patterns import describe_mask

    for message in messages(settled):
        click.echo(message)
    click.echo(table(COST_HEADERS, cost_rows(settled.before, settled.output.cost)))
    mask = settled.recipe.mask
    if settled.recipe.low_rank is not None:
        click.echo(ranks_line(settled))
    elif mask is None:
        click.echo(kept_line(settled))
    else:
        how = describe_mask(mask.method, mask.pattern)
        rotation = settled.recipe.rotation
        if rotation is not None:
            click.echo(
                f"to be rotated first, {rotation.kind}: {rotation.steps} steps of "
                f"{rotation.importance_for(settled.recipe)} "
                "importance"
            )
        where = "of every linear weight in every block"
        if mask.allocation != "uniform":
            where = f"of all linear weights, shared out over blocks by {mask.allocation}"
        click.echo(f"to be masked by {how}: {settled.recipe.ratio:.1%} {where}")
    recovery = settled.recipe.recovery
    if recovery is not None:
        blocks, how = recovery.blocks(settled.model.blocks), " by scales" if recovery.method == "scales" else ""
        click.echo(
            f"to be recovered{how}: {len(blocks)} of {settled.model.blocks} blocks, "
            f"{plural(recovery.epochs, 'epoch')} on {len(settled.training.samples)} samples"
        )
    if settled.recipe.export is not None:
        click.echo(f"to be exported to the output's folder {GRAPH_FOLDER}, {', '.join(settled.recipe.export.dtype)}")
    if settled.foreseen:
        click.echo(container_line(settled))
    unmeasured = list(unmeasured_lines(settled))
    for line in unmeasured:
        click.echo(line)
    click.echo(f"it takes {estimate_job(settled).line}")
    click.echo(f"everything {'that needs no measuring is ' if unmeasured else ''}checked, nothing written")
