"""`ckpt-prune prune`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import (
    after_option,
    container_option,
    device_option,
    echo_json,
    json_option,
    model_argument,
    options_of,
    overwrite_option,
    ratio_option,
    recipe_option,
    set_option,
    size_options,
    state_memory_option,
    table,
    trust_option,
)
from ckpt_prune.options import CalibrationOptions, ImageOptions


@click.command("prune")
@model_argument
@recipe_option
@click.option("--statistics", type=click.Path(path_type=Path), help="Statistics folder (`ckpt-prune calibrate`).")
@options_of(CalibrationOptions)
@options_of(ImageOptions)
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="Apply a plan file instead of a recipe.")
@ratio_option
@size_options
@set_option
@container_option
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--dry-run", is_flag=True, help="Check everything and print sizes; write nothing.")
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
@overwrite_option
@trust_option
@device_option
@json_option
def command(plan_file: Path | None, out: Path, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Write a pruned and compensated copy of MODEL (a folder or a Hub id) that transformers loads.

    A recipe either drops units of spaces, so that the model becomes smaller, or has a mask, which zeroes single
    weights and leaves every shape as it is.

    Without --recipe it is best, which sets nothing by hand: units, widths, strength and form of compensation are those
    that do the least harm by what is measured. Blocks then differ in width, and OUT carries its own code to load it
    with; best-uniform is the same for stock classes.

    Moments come from --statistics (the dense cache) or are measured on --text, or on --images for a vision model. A
    sequential recipe measures each block on the already pruned ones before it, as its paper does; a dense recipe
    measures the unpruned model first. A recipe without scores or compensation that look at activations (magnitude)
    needs neither. Where a recipe has `recovery` (any does with --set recovery.epochs=10), what stays of each block is
    trained right after it is pruned, as `ckpt-prune recover` does it afterwards. Where it has `export` (--set
    export.format=onnx), OUT/onnx is its graph, compared with PyTorch as `ckpt-prune export` does it. Where it computes
    something else the exit code is 1, where it cannot be made 2, and OUT is complete without it either way.

    The output appears only when it is complete. An interrupted run leaves OUT.partial, for --resume.

    \b
      ckpt-prune prune MODEL --target-params 70% --text calib.txt -o OUT
      ckpt-prune prune MODEL --recipe rcpu --ratio 0.2 --text calib.txt -o OUT
      ckpt-prune prune MODEL --recipe ridge --set spaces.mlp.ratio=0.4 --statistics STATS -o OUT
      ckpt-prune prune VIT --recipe corp --ratio 0.5 --images DIR -o OUT
      ckpt-prune prune MODEL --recipe wanda-2-4 --text calib.txt -o OUT
      ckpt-prune prune MODEL --plan plan.json -o OUT
    """
    from ckpt_prune.checkpoint.staging import check_output
    from ckpt_prune.options import PruneOptions

    options = PruneOptions(plan=plan_file, output=out, **given)
    # Before torch is imported, what can be told without it.
    if Path(options.model).is_dir():
        check_output(Path(options.model), out, resume=options.resume, overwrite=options.overwrite)

    from ckpt_prune.cli.exporting import GraphStep
    from ckpt_prune.cli.resuming import resumable
    from ckpt_prune.errors import UserError
    from ckpt_prune.filenames import GRAPH_FOLDER
    from ckpt_prune.transform.asked import prune_request, read_asked
    from ckpt_prune.transform.checks import check_trained
    from ckpt_prune.transform.run import run
    from ckpt_prune.transform.settle import settle

    asked = read_asked(options)
    recipe, source = asked.recipe, asked.model.checkpoint
    goes_on = options.resume and not options.overwrite and not dry_run and recipe.export is not None
    if goes_on and _only_graph_missing(source, recipe, out):
        assert recipe.export is not None
        click.echo(f"{out} is complete: only its graph is missing", err=True)
        made = GraphStep.of(recipe.export, source, options, options, trust=options.trust).run(out)
        if as_json:
            echo_json({"onnx": made.json()})
        else:
            click.echo("\n".join(made.lines()))
        click.get_current_context().exit(0 if made.passed else 1)
    settled = settle(prune_request(asked, lambda line: click.echo(line, err=True)))
    check_trained(settled.request)
    if dry_run and settled.known is None:
        raise UserError(
            f"allocation {recipe.allocation} has no widths before the model is measured: "
            f"for a dry run, run `{recipe.calibration}` and give --statistics STATS instead"
        )
    step = None
    if recipe.export is not None:
        step = GraphStep.of(recipe.export, source, options, options, trust=options.trust)
    if dry_run or settled.request.measures_first:
        _check_before_measuring(settled, step, out)
    if dry_run:
        if as_json:
            echo_json(_dry_report(settled))
        else:
            _print_dry(settled)
        return
    with resumable(out):
        done = run(
            settled,
            out,
            resume=options.resume,
            overwrite=options.overwrite,
            announce=lambda line: click.echo(line, err=True),
        )
    if done.finished and (out / GRAPH_FOLDER).exists():
        step = None
    if as_json:
        _print_json(done.report.data(), step, out)
    else:
        if not done.finished:
            _print_done(done, out)
        if step is not None:
            graph = step.run(out)
            click.echo("\n".join(graph.lines()))
            click.get_current_context().exit(0 if graph.passed else 1)


def _check_before_measuring(settled: Any, step: Any, out: Path) -> None:
    """What running would find after measuring: refused here, a NaN would otherwise pass for an overflow."""
    from ckpt_prune.checkpoint.writing import check_room

    settled.model.checkpoint.check_finite()
    if settled.known is not None:
        cost = settled.output.cost
        check_room(out.absolute().parent, cost.bytes + (step.bytes(cost.parameters) if step else 0))


def _print_json(report: dict[str, Any], step: Any, out: Path) -> None:
    from ckpt_prune.errors import UserError

    try:
        graph = step.run(out) if step else None
    except UserError as error:
        echo_json(report | {"onnx": {"written": False, "error": str(error)}})
        raise
    echo_json(report | ({"onnx": graph.json()} if graph else {}))
    click.get_current_context().exit(0 if graph is None or graph.passed else 1)


def _print_done(done: Any, out: Path) -> None:
    from ckpt_prune.cli.rendering import COST_HEADERS, cost_rows, kept_line, report_lines

    report = done.report
    for message in _messages(done.settled):
        click.echo(message)
    click.echo(table(COST_HEADERS, cost_rows(report.before, report.after)))
    if done.settled.recipe.mask is None:
        click.echo(kept_line(done.settled))
    for line in report_lines(report):
        click.echo(line)
    click.echo(f"written to {out}")


def _only_graph_missing(checkpoint: Any, recipe: Any, out: Path) -> bool:
    """Whether OUT is what an interrupted run of this recipe on this model left before its export."""
    from ckpt_prune.filenames import GRAPH_FOLDER
    from ckpt_prune.report.reading import report_of

    report = None if (out / GRAPH_FOLDER).exists() else report_of(out)
    if report is None:
        return False
    asked = report.recipe_digest if report.asked is None else report.asked.digest
    return bool(asked == recipe.digest and report.source.fingerprint == checkpoint.fingerprint)


def _messages(settled: Any) -> list[str]:
    """What a user should know of a job beside its sizes."""
    from ckpt_prune.cli.rendering import few_tokens, mask_name
    from ckpt_prune.report.reading import report_of

    found = []
    request, recipe = settled.request, settled.recipe
    if recipe.target != "dense" and not request.sequential and request.statistics is not None and request.plan is None:
        kind = "sequential" if recipe.target == "sequential" else "drift-correcting"
        found.append(f"recipe {recipe.name} is {kind}; with --statistics its dense-cache variant is used")
    if settled.output.container.note:
        found.append(settled.output.container.note)
    made = report_of(settled.model.checkpoint.path)
    if made is not None and made.mask is not None:
        masked = mask_name(made.mask.method, made.mask.pattern)
        found.append(
            f"this model was masked before ({masked}): what is rewritten now loses those zeros, and another mask "
            "chooses anew; see `ckpt-prune inspect OUT --sparsity`"
        )
    few = few_tokens(settled, errors="below")
    if few:
        found.append(few)
    return found


def _print_dry(settled: Any) -> None:
    from ckpt_prune.cli.rendering import COST_HEADERS, cost_rows, kept_line, mask_name
    from ckpt_prune.filenames import GRAPH_FOLDER

    for message in _messages(settled):
        click.echo(message)
    click.echo(table(COST_HEADERS, cost_rows(settled.before, settled.output.cost)))
    mask = settled.recipe.mask
    if mask is None:
        click.echo(kept_line(settled))
    else:
        how = mask_name(mask.method, mask.pattern)
        rotation = settled.recipe.rotation
        if rotation is not None:
            click.echo(
                f"to be rotated first, {rotation.kind}: {rotation.steps} steps of {settled.recipe.importance} "
                "importance"
            )
        click.echo(f"to be masked by {how}: {settled.recipe.ratio:.1%} of every linear weight in every block")
    recovery = settled.recipe.recovery
    if recovery is not None:
        blocks = recovery.blocks(settled.model.blocks)
        click.echo(
            f"to be recovered: {len(blocks)} of {settled.model.blocks} blocks, {recovery.epochs} epochs on "
            f"{len(settled.request.training.samples)} samples"
        )
    if settled.recipe.export is not None:
        click.echo(f"to be exported to the output's folder {GRAPH_FOLDER}, {settled.recipe.export.dtype}")
    click.echo("everything checked, nothing written")


def _dry_report(settled: Any) -> dict[str, Any]:
    return {
        "recipe": settled.recipe.model_dump(mode="json", by_alias=True),
        "container": {
            "model_type": settled.output.container.model_type,
            "remote_code": settled.output.container.remote_class is not None,
        },
        "widths": [dict(w) for w in settled.widths],
        "before": settled.before.model_dump(),
        "after": settled.output.cost.model_dump(),
        "messages": _messages(settled),
    }
