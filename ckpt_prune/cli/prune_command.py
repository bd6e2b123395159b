"""`ckpt-prune prune`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import (
    CalibrationOptions,
    ImageOptions,
    after_option,
    container_option,
    device_option,
    echo_json,
    json_option,
    options_of,
    overwrite_option,
    ratio_option,
    recipe_option,
    set_option,
    size_options,
    state_memory_option,
    table,
    target_size,
    trust_option,
)


@click.command("prune")
@click.argument("model")
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
def command(
    model: str,
    recipe: str | None,
    statistics: Path | None,
    plan_file: Path | None,
    ratio: float | None,
    target_params: str | None,
    target_bytes: str | None,
    target_flops: str | None,
    overrides: tuple[str, ...],
    container: str | None,
    out: Path,
    dry_run: bool,
    resume: bool,
    diagnostics: bool,
    state_memory: float,
    after: str | None,
    overwrite: bool,
    trust: bool,
    device: str,
    as_json: bool,
    **options: Any,
) -> None:
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
    from ckpt_prune.architectures.fitting import fitting_family
    from ckpt_prune.architectures.skeleton import parse_config
    from ckpt_prune.calibration.states import StateMemory
    from ckpt_prune.checkpoint.writing import check_room
    from ckpt_prune.cli.setup import (
        asked_after,
        build_job,
        cost_rows,
        has_data,
        kept_line,
        live_samples,
        mask_lines,
        open_source,
        recovery_lines,
        resolve_device,
        resumable,
        training_samples,
        warning_lines,
        with_container,
    )
    from ckpt_prune.containers.checking import check_source
    from ckpt_prune.errors import UserError
    from ckpt_prune.planning.plan import read_plan
    from ckpt_prune.planning.recipe import DEFAULT_RECIPE, load_recipe
    from ckpt_prune.transform.checks import check_planned, check_spaces, check_trained
    from ckpt_prune.transform.prepare import measured, measures_first
    from ckpt_prune.transform.prune import check_output, prune

    calibration, images = CalibrationOptions(**options), ImageOptions(**options)
    data = has_data(calibration, images)
    if recipe is not None and plan_file is not None:
        raise UserError("a plan has settled its recipe: give --recipe or --plan, not both")
    size = target_size(target_params, target_bytes, target_flops, ratio)
    if plan_file is not None and (ratio is not None or size or overrides or container):
        raise UserError(
            "a plan has settled ratio and recipe: --ratio, --target-*, --set and --container do not go with it"
        )
    target = resolve_device(device)
    plan = read_plan(plan_file) if plan_file else None
    changes = with_container(overrides, container)
    loaded = plan.recipe if plan else load_recipe(DEFAULT_RECIPE if recipe is None else recipe, changes, ratio, size)
    recovers = loaded.recovery is not None
    if data and not recovers and (statistics is not None or plan is not None):
        given = "--text" if calibration.text else "--images"
        raise UserError(
            f"a plan has settled its statistics: {given} does not go with it"
            if plan is not None
            else f"give --statistics or {given}, not both"
        )
    if after is not None and not recovers:
        raise UserError(f"--perplexity-after is for recipes with recovery, which {loaded.name} has not")
    checkpoint = open_source(model, trust=trust)
    goes_on = resume and not overwrite and not dry_run and loaded.export is not None
    if goes_on and _only_graph_missing(checkpoint, loaded, out):
        assert loaded.export is not None
        from ckpt_prune.cli.exporting import GraphStep

        click.echo(f"{out} is complete: only its graph is missing", err=True)
        made = GraphStep.of(loaded.export, checkpoint, calibration, images, trust=trust).run(out)
        if as_json:
            echo_json({"onnx": made.json()})
        else:
            click.echo("\n".join(made.lines()))
        click.get_current_context().exit(0 if made.passed else 1)
    check_output(checkpoint.path, out, resume=resume, overwrite=overwrite)
    if plan is not None:
        check_planned(checkpoint, plan)
    if plan is not None and plan.statistics is not None:
        statistics = statistics or Path(plan.statistics.path)
        if not statistics.is_dir():
            raise UserError(f"the plan's statistics are no longer at {statistics}: say where with --statistics")
    # Before the data: reading it takes time, and a broken config would be blamed on the tokenizer.
    family = fitting_family(checkpoint)
    check_source(checkpoint, family)
    check_spaces(family, loaded)
    live = training = None
    allocate = StateMemory(int(state_memory * 2**30), out.absolute().parent)
    if data and loaded.needs_moments and statistics is None and plan is None:
        live = live_samples(checkpoint, family, loaded, calibration, images, allocate=allocate, trust=trust)
    if data and recovers:
        asked = asked_after(after, family, family.dimension(parse_config(checkpoint.config), "layers"))
        training = training_samples(
            checkpoint, family, loaded, calibration, images, live, allocate=allocate, after=asked, trust=trust
        )
    job = build_job(
        checkpoint,
        loaded,
        statistics=statistics,
        live=live,
        device=target,
        plan=plan,
        diagnostics=diagnostics,
        training=training,
    )
    check_trained(job)
    if dry_run and not job.settled:
        raise UserError(
            f"allocation {loaded.allocation} has no widths before the model is measured: "
            f"for a dry run, run `{loaded.calibration}` and give --statistics STATS instead"
        )
    made_from = plan.statistics.digest if plan is not None and plan.statistics is not None else None
    if made_from and job.statistics is not None and job.statistics.index.digest != made_from:
        raise UserError(f"the plan was made from other statistics than {job.statistics.folder}: plan again")
    step = None
    if loaded.export is not None:
        from ckpt_prune.cli.exporting import GraphStep

        step = GraphStep.of(loaded.export, checkpoint, calibration, images, trust=trust)
    if dry_run or measures_first(job):
        # Measuring comes before prune's own scan: refuse here what would otherwise pass for an overflow.
        checkpoint.check_finite()
        if dry_run or job.settled:
            check_room(out.absolute().parent, job.after.bytes + (step.bytes(job.after.parameters) if step else 0))
    if dry_run:
        if as_json:
            echo_json(_dry_report(job))
        else:
            _print_dry(job)
        return
    with resumable(out), measured(job, out.absolute().parent, seed=calibration.seed) as ready:
        report = prune(ready, out, resume=resume, overwrite=overwrite)
    if as_json:
        try:
            graph = step.run(out) if step else None
        except UserError as error:
            echo_json(report | {"onnx": {"written": False, "error": str(error)}})
            raise
        echo_json(report | ({"onnx": graph.json()} if graph else {}))
        click.get_current_context().exit(0 if graph is None or graph.passed else 1)
    for message in _messages(ready):
        click.echo(message)
    click.echo(table(["", "before", "after", "share"], cost_rows(ready)))
    if loaded.mask is None:
        click.echo(kept_line(ready))
    _print_errors(report)
    for line in mask_lines(report):
        click.echo(line)
    for line in warning_lines(report["sites"]):
        click.echo(line)
    for line in recovery_lines(report):
        click.echo(line)
    if report["lambda_search"]:
        click.echo(f"lambda {report['lambda_search']['chosen']:g}, of least calibration perplexity")
    click.echo(f"written to {out}")
    if step is not None:
        graph = step.run(out)
        for line in graph.lines():
            click.echo(line)
        click.get_current_context().exit(0 if graph.passed else 1)


def _only_graph_missing(checkpoint: Any, recipe: Any, out: Path) -> bool:
    """Whether OUT is what an interrupted run of this recipe on this model left before its export."""
    from ckpt_prune.checkpoint.jsonfile import read_object
    from ckpt_prune.filenames import GRAPH_FOLDER, REPORT

    if not (out / REPORT).is_file() or (out / GRAPH_FOLDER).exists():
        return False
    report = read_object(out / REPORT)
    made_from = report.get("source", {}).get("fingerprint")
    asked = (report.get("asked") or {}).get("digest", report.get("recipe_digest"))
    return bool(asked == recipe.digest and made_from == checkpoint.fingerprint)


def _messages(job: Any) -> list[str]:
    """What a user should know of a job beside its sizes."""
    from ckpt_prune.cli.setup import few_tokens, masked_before

    found = []
    if job.recipe.target != "dense" and not job.sequential and job.statistics is not None and job.plan is None:
        kind = "sequential" if job.recipe.target == "sequential" else "drift-correcting"
        found.append(f"recipe {job.recipe.name} is {kind}; with --statistics its dense-cache variant is used")
    if job.container.note:
        found.append(job.container.note)
    masked = masked_before(job.checkpoint)
    if masked:
        found.append(
            f"this model was masked before ({masked}): what is rewritten now loses those zeros, and another mask "
            "chooses anew; see `ckpt-prune inspect OUT --sparsity`"
        )
    few = few_tokens(job, errors="below")
    if few:
        found.append(few)
    return found


DRIFT = ", of what the dense model's residual stream asks for (target drift), all that came before included"


def _print_errors(report: dict[str, Any]) -> None:
    for space in dict.fromkeys(site["space"] for site in report["sites"]):
        pairs = [(s["error_uncompensated"], s["error_compensated"]) for s in report["sites"] if s["space"] == space]
        known = [pair for pair in pairs if None not in pair]
        if known:
            bare, compensated = (sum(errors) / len(known) for errors in zip(*known, strict=True))
            what = "logits" if space == "qk" else "outputs"
            drift = any(s["share"] is not None for s in report["sites"] if s["space"] == space)
            click.echo(
                f"{space}: mean error of the {what} on the calibration samples {bare:.4f} bare, "
                f"{compensated:.4f} compensated{DRIFT if drift else ''}"
            )


def _print_dry(job: Any) -> None:
    from ckpt_prune.cli.setup import cost_rows, kept_line, mask_name
    from ckpt_prune.filenames import GRAPH_FOLDER

    for message in _messages(job):
        click.echo(message)
    click.echo(table(["", "before", "after", "share"], cost_rows(job)))
    mask = job.recipe.mask
    if mask is None:
        click.echo(kept_line(job))
    else:
        how = mask_name(mask.method, mask.pattern)
        rotation = job.recipe.rotation
        if rotation is not None:
            click.echo(
                f"to be rotated first, {rotation.kind}: {rotation.steps} steps of {job.recipe.importance} importance"
            )
        click.echo(f"to be masked by {how}: {job.recipe.ratio:.1%} of every linear weight in every block")
    recovery = job.recipe.recovery
    if recovery is not None:
        blocks = recovery.blocks(job.blocks)
        click.echo(
            f"to be recovered: {len(blocks)} of {job.blocks} blocks, {recovery.epochs} epochs on "
            f"{len(job.training.samples)} samples"
        )
    if job.recipe.export is not None:
        click.echo(f"to be exported to the output's folder {GRAPH_FOLDER}, {job.recipe.export.dtype}")
    click.echo("everything checked, nothing written")


def _dry_report(job: Any) -> dict[str, Any]:
    return {
        "recipe": job.recipe.model_dump(mode="json", by_alias=True),
        "container": {"model_type": job.container.model_type, "remote_code": job.container.remote_class is not None},
        "widths": [dict(w) for w in job.widths],
        "before": job.before.model_dump(),
        "after": job.after.model_dump(),
        "messages": _messages(job),
    }
