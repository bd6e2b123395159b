"""`ckpt-prune prune`."""

import sys
from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import prune, prune_as
from ckpt_prune.cli.command import Command, echo_json
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.safe_text import escape_controls
from ckpt_prune.model.runtimes import takers_by_change
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.options.option import check_options

if TYPE_CHECKING:
    from ckpt_prune.runner.prune import Pruned


def _prune(options: dict[str, Any], as_json: bool) -> None:
    outputs: list[tuple[Pruned, str]] = []

    def tell(pruned: "Pruned", following: str) -> None:
        if not as_json:
            _print_new(pruned, outputs[-1][0] if outputs else None)
        outputs.append((pruned, following))

    try:
        pruned = prune_as(check_options(PruneOptions, options), tell)
    except (UserError, KeyboardInterrupt) as error:
        if as_json and outputs:
            complete, failed = outputs[-1]
            why = {"error": str(error) if isinstance(error, UserError) else "interrupted"}
            fault = {"written": False, **why} if failed in ("onnx", "gguf") else why
            echo_json(complete.data() | ({failed: fault} if failed else {}))
        raise
    if as_json:
        echo_json(pruned.data())
    elif pruned.report is None:
        for each in (*pruned.all_first, pruned):
            _print_dry(each)
        _print_whole(pruned)
    else:
        _print_new(pruned, outputs[-1][0])
        if pruned.fewer_bits is not None:
            click.echo(pruned.fewer_bits)
    if not pruned.passed:
        click.get_current_context().exit(1)


def _print_new(pruned: "Pruned", before: "Pruned | None") -> None:
    """Print what has come about since `before`: each thing before the next begins, which takes long and may fail."""
    if before is None or before.goes_on:
        _print_done(pruned)
        return
    lines: list[str] = []
    if pruned.graph is not None and before.graph is None:
        from ckpt_prune.cli.export_command import lines_of

        lines = lines_of(pruned.graph)
    if pruned.evaluation is not None and before.evaluation is None:
        from ckpt_prune.cli.evaluate_command import result_text

        lines.append(result_text(pruned.evaluation))
    if pruned.pushed is not None:
        from ckpt_prune.cli.push_command import pushed_lines

        lines += pushed_lines(pruned.pushed, files=False)
    for line in lines:
        click.echo(line)


def _print_done(pruned: "Pruned") -> None:
    from ckpt_prune.runner.messages import kept_line, messages
    from ckpt_prune.runner.sections import cost_table, file_sentences, latency_sentences
    from ckpt_prune.show.terminal import print_table, section_lines
    from ckpt_prune.stages.folders import stage_sections

    report, settled = pruned.report, pruned.settled
    if report is not None and settled is not None:
        for message in messages(settled):
            if message not in report.warnings:  # which stand with the errors
                click.echo(message)
        click.echo(print_table(cost_table(report.before, report.after, report.file)))
        if (kept := kept_line(settled)) is not None:
            click.echo(kept)
        for line in (*section_lines(stage_sections(report)), *latency_sentences(report), *file_sentences(report)):
            click.echo(line)
        for warning in report.warnings:
            click.echo(f"warning: {warning}")
        if not pruned.goes_on:
            _print_whole(pruned)
            click.echo(f"written to {pruned.path}")
        for hint in hints(pruned, settled) if sys.stderr.isatty() else []:
            click.echo(escape_controls(hint), err=True)


def _print_whole(pruned: "Pruned") -> None:
    """Print the size beside the dense model, if several parts of that are pruned."""
    from ckpt_prune.runner.sections import cost_table
    from ckpt_prune.show.terminal import print_table

    whole = pruned.whole
    if whole is not None:
        table = print_table(cost_table(whole.before, whole.after))
        click.echo(f"all parts together, beside the dense model:\n{table}")


def hints(pruned: "Pruned", settled: Any) -> list[str]:
    """Say how to check an output, and how and where to run it."""
    from ckpt_prune.model.runtimes import places

    container, out = settled.output.container, pruned.path
    source = pruned.dense or settled.model.checkpoint.adapter or settled.model.checkpoint.path
    masked = any("zeros" in keys.changes(settled.recipe, set()) for keys in settled.recipe.stages)
    family = settled.model.family
    runtimes = places(container.config, masked=masked, generates=family.causal, auto_class=family.auto_class)
    within = settled.model.checkpoint.within is not None
    others = [name for name in runtimes if name != "transformers" and not within]
    load = f'transformers: {settled.model.family.auto_class}.from_pretrained("{out}")'
    if container.remote_class is not None:
        load = f'ckpt_prune.load("{out}"), or transformers with trust_remote_code=True'
    lines = [f"check it: ckpt-prune verify {out} --against {source}", f"run it: {load}"]
    return [*lines, f"it also runs in {', '.join(others)} ({out}/README.md has the commands)"] if others else lines


def _print_dry(pruned: "Pruned") -> None:
    from ckpt_prune.cli.rendering import container_line
    from ckpt_prune.runner.messages import kept_line, messages, unmeasured_lines
    from ckpt_prune.runner.sections import cost_table
    from ckpt_prune.show.terminal import print_table
    from ckpt_prune.stages.folders import stages_of

    settled: Any = pruned.settled
    for message in messages(settled):
        click.echo(message)
    click.echo(print_table(cost_table(settled.before, settled.output.cost)))
    planned = [line for stage in stages_of(settled.whole.recipe) for line in stage.plan_lines(settled)]
    for line in (*filter(None, [kept_line(settled)]), *planned):
        click.echo(line)
    if settled.foreseen:
        click.echo(container_line(settled))
    unmeasured = list(unmeasured_lines(settled))
    for line in (*unmeasured, *filter(None, [pruned.fewer_bits])):
        click.echo(line)
    assert pruned.estimate is not None
    click.echo(f"it takes {pruned.estimate.line}")
    click.echo(f"everything {'that needs no measuring is ' if unmeasured else ''}checked, nothing written")


command = Command(
    prune,
    call=_prune,
    examples=[
        "prune MODEL --target-params 70% --text calib.txt -o OUT --evaluate held_out.txt",
        "prune MODEL --recipe rcpu --ratio 0.2 --text calib.txt -o OUT",
        "prune MODEL --recipe ridge --set spaces.mlp.ratio=0.4 --statistics STATS -o OUT",
        "prune VIT --recipe corp --ratio 0.5 --images photos -o OUT",
        "prune MODEL --recipe sparsegpt --pattern 2:4 --text calib.txt -o OUT",
        "prune MODEL --plan plan.json -o OUT",
    ],
    tables={"Where outputs run, by what was pruned": takers_by_change()},
)
