"""The sections of a report: size and loss, recipe, what each stage did, and how the output was made."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from ckpt_prune.common.formatting import format_share, human_bytes, human_count, plural
from ckpt_prune.job.latency import TRUSTED
from ckpt_prune.job.report import UNKNOWN, BlockTime, FileSize, PhaseRecord
from ckpt_prune.model.cost_record import Cost, WholeSize
from ckpt_prune.recipe.shipped import shipped_recipes
from ckpt_prune.recipe.sizes import TargetSize
from ckpt_prune.show.section import MISSING, Section, Table, list_entries, make_tables
from ckpt_prune.stages.folders import find_functions, stage_sections
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.recovery.show import is_recovered
from ckpt_prune.stages.report import AnyPlan, Report

_STORED = "stored as "
_OFF = 0.05
"""Timings of one model differ by so much."""
_CHANGED = " with changes; ckpt_prune.json has it as it was used."


def name_report(report: Report) -> str:
    """Return a heading: the model and what was done to it."""
    recipe = report.recipe
    how = recipe.name if recipe.elsewhere else f"pruned by recipe {recipe.name}"
    for other in map(Report.read, report.others):
        how = f"{how}, and its {other.part} part by {other.recipe.name}"
    how = how if report.part is None else f"its {report.part} part {how}"
    return f"{report.source.name}, {how}{' and recovered' if is_recovered(report) else ''}"


def all_sections(report: Report) -> list[Section]:
    """Return all sections; where several parts were pruned, the whole comes first, and then each part in turn."""
    if not report.others:
        return [size_section(report), *recipe_sections(report), *stage_sections(report), provenance(report)]
    sections = [size_section(report)]
    for each in (*map(Report.read, reversed(report.others)), report):
        size = Section("Size", tables=[replace(cost_table(each.before, each.after), bars=True)])
        of_part = [size, *recipe_sections(each), *stage_sections(each)]
        sections += [replace(section, title=f"{section.title}, {each.part} part") for section in of_part]
    return [*sections, provenance(report)]


# ---- the recipe --------------------------------------------------------------------------------------------------


def recipe_sections(report: Report) -> list[Section]:
    """Say by which recipe, and how it differs from the shipped one of its name."""
    summary = report.recipe.summary
    sentences = [line for line in (f"{summary}{_beside_shipped(report)}".strip(),) if line]
    sentences += [f"{change.words}." for change in report.changes]
    return [Section("Recipe", sentences)] if sentences else []


def _beside_shipped(report: Report) -> str:
    """Say how the recipe differs from the shipped one of its name: nothing, how much goes, or more than that."""
    name = report.recipe.name
    if name not in shipped_recipes():
        return ""
    shipped = load_recipe(name)
    for settle in find_functions("settle", "show"):
        shipped = settle(shipped, report)
    if shipped.digest == report.recipe_digest:
        return ""
    start, used = " That is the shipped recipe of this name", report.read_recipe()
    if used is None or used.without_amount != shipped.without_amount:
        return start + _CHANGED
    try:
        size = used.size if report.asked is None else TargetSize.model_validate(report.asked.size)
    except ValidationError:
        return start + _CHANGED
    if size is not None:
        return f"{start}, for {size.words}."
    if any(settings.keep is not None for settings in used.spaces.values()):
        return f"{start}, with numbers of units to keep."
    ratios = {space: used.ratio_of(space) for space in used.spaces}
    if len(set(ratios.values())) > 1:
        return f"{start}, at ratios of {', '.join(f'{ratio:g} ({space})' for space, ratio in ratios.items())}."
    return f"{start}, at a ratio of {next(iter(ratios.values()), used.ratio):g}."


# ---- sizes -------------------------------------------------------------------------------------------------------


def size_section(report: Report) -> Section:
    """Say what was gained, and what was lost if that was measured: of the whole, if several parts were pruned."""
    sizes = report.whole or report
    table, loss = cost_table(sizes.before, sizes.after, report.file), report.loss
    rows, sentences, explanations = [*table.rows], [*latency_sentences(report), *file_sentences(report)], []
    parts = [report] if report.whole is None else [report, *map(Report.read, report.others)]
    if zeros := sum(count(part) for part in parts for count in find_functions("count_zeros", "show")):
        old, new = sizes.before.parameters, sizes.after.parameters - zeros
        rows.insert(1, ["not zero", human_count(old), human_count(new), f"{new / old:.1%}"])
    if loss is None:
        how = "ckpt-prune evaluate OUT --against MODEL measures it, and notes it here."
        explanations = [f"What it costs in quality was not measured. {how}"]
    else:
        if loss.before is not None and loss.after is not None:
            is_share = loss.of.endswith("accuracy")
            style, of = (".2%", loss.samples) if is_share else (".3f", None)
            share = f"{loss.after / loss.before:.1%}" if loss.before else MISSING
            rows.append([loss.of, *(format_share(each, style, of) for each in (loss.before, loss.after)), share])
        apart = [f"{loss.of} {loss.after:.4f}"] if loss.before is None and loss.after is not None else []
        apart += [] if loss.kl is None else [f"KL divergence from the dense model {loss.kl:z.4f} nats"]
        if loss.agreement is not None:
            apart.append(f"the same first choice in {format_share(loss.agreement, '.1%', loss.samples)}")
        sentences.append(f"Measured on {loss.data}: {', '.join(apart) or loss.of}.")
        sentences += [f"{loss.verdict[0].upper()}{loss.verdict[1:]}."] if loss.verdict else []
    sentences += [f"{line[0].upper()}{line[1:]}." for line in report.warnings]
    title = "Size" if loss is None else "Size and loss"
    return Section(title, sentences, explanations, tables=[Table(table.columns, rows, bars=True)])


def cost_table(before: Cost | WholeSize, after: Cost | WholeSize, file: FileSize | None = None) -> Table:
    """Make the table of parameters, bytes and FLOPs; and of what a token takes in the cache, if that changes.

    The bytes of a file, if a size of that was asked for, stand first.
    """
    flops = "FLOPs" if before.tokens is None else f"FLOPs / {before.tokens} tokens"
    costs = [
        ("parameters", human_count, before.parameters, after.parameters),
        ("bytes" if file is None else "bytes of safetensors", human_bytes, before.bytes, after.bytes),
    ]
    if file is not None:
        costs.insert(0, (f"bytes of {file.name}", human_bytes, file.before, file.after))
    if before.flops is not None and after.flops is not None:
        costs.append((flops, human_count, before.flops, after.flops))
    if before.cache and after.cache is not None and after.cache != before.cache:
        costs.append(("KV cache / token", human_bytes, before.cache, after.cache))
    rows = [[name, show(old), show(new), f"{new / old:.1%}"] for name, show, old, new in costs]
    return Table(["", "before", "after", "share"], rows)


def file_sentences(report: Report) -> list[str]:
    """Say what the weights beside a file are for, if a size of that was asked for."""
    if report.file is None:
        return []
    return [
        f"{report.file.name} is all that llama.cpp reads; before: MODEL's file in its own type. The safetensors beside "
        "it are its weights before rounding, for transformers and other exports: llama.cpp does without them."
    ]


def latency_sentences(report: Report) -> list[str]:
    """Say what an output takes beside what a table of the machine had foreseen, if its size was a time."""
    latency = report.latency
    if latency is None or not latency.dense or not latency.foreseen:
        return []
    share = latency.foreseen / latency.dense
    foreseen = f"foreseen {share:.1%} of the dense model's ({latency.foreseen:.4g} of {latency.dense:.4g} ms)"
    if latency.off is not None and latency.off > TRUSTED:
        foreseen += f" by a table that was {latency.off:.0%} off and is not to be relied on"
    start = f"{latency.of[0].upper()}{latency.of[1:]} on the machine that pruned it: {foreseen}"
    if not latency.measured or not latency.measured_dense:
        return [f"{start}; the output was not timed here: see ckpt-prune benchmark."]
    took = latency.measured / latency.measured_dense
    more = "; more than was foreseen" if took > (1 + _OFF) * share else ""
    return [f"{start}, measured {took:.1%} ({latency.measured:.4g} of {latency.measured_dense:.4g} ms){more}."]


# ---- where everything came from ----------------------------------------------------------------------------------


def provenance(report: Report) -> Section:
    """Say from which model, by which recipe and samples, by which versions, and how long it took."""
    recipe, container = report.recipe, report.container
    stored = "remote code" if container.remote_code else container.model_type
    if container.note is not None:
        says_stored = container.note.startswith(_STORED)
        stored = container.note.removeprefix(_STORED) if says_stored else f"{stored}: {container.note}"
    written = f"ckpt_prune {report.ckpt_prune}, torch {report.torch}, transformers {report.transformers}"
    left_out = f"{plural(len(report.ignored), 'tensor')} that the stock class does not load" if report.ignored else ""
    facts = {
        "dense model": report.source.name,
        "left out of it": left_out,
        "its fingerprint": report.source.fingerprint,
        "recipe": recipe.name,
        "method from": recipe.source,
        "file of the recipe": "" if report.origin is None else report.origin.pinned,
        "digest of the recipe": report.recipe_digest,
        "calibration": list_entries(report.calibration.entries),
        "stored as": stored,
        "written by": "" if report.ckpt_prune == UNKNOWN else written,
    }
    rows = [[name, fact] for name, fact in facts.items() if fact]
    return Section("How it was made", tables=[Table(["", ""], rows, words=2)], details=_phases(report))


def _phases(report: Report) -> list[Table]:
    """Make the table of time and memory: that of the process is the largest so far, of an accelerator the phase's."""
    inner = dict.fromkeys(name for stage in report.stages for name in stage.phases)
    blocks = [block for stage in report.stages for block in stage.blocks]
    of_blocks = dict.fromkeys(name for block in blocks for name in block.phases)
    return [
        *make_tables(
            "Time and memory",
            report.stages,
            {
                "phase": lambda stage: stage.name,
                "seconds": lambda stage: _seconds(stage.seconds, 1),
                **{f"of these {name}": _inner_seconds(name) for name in inner},
                "memory, largest so far": lambda stage: _bytes(stage.peak_bytes),
                "device memory": lambda stage: _bytes(stage.device_peak_bytes),
            },
        ),
        *make_tables(
            "Time of each block",
            blocks,
            {
                "block": lambda own: str(own.block),
                "seconds": lambda own: _seconds(own.seconds, 2),
                **{f"of these {name}": _inner_seconds(name) for name in of_blocks},
            },
        ),
    ]


def _inner_seconds(name: str) -> Callable[[PhaseRecord | BlockTime], str | None]:
    return lambda stage: _seconds(stage.phases.get(name), 2)


def _seconds(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def _bytes(size: int | None) -> str | None:
    return None if size is None else human_bytes(size)


# ---- plans -------------------------------------------------------------------------------------------------------


def report_of_plan(plan: AnyPlan) -> Report:
    """Return a plan as a report, as far as it goes."""
    statistics = plan.statistics
    calibration = {} if statistics is None else {"statistics": f"{statistics.path}, digest {statistics.digest}"}
    stored = {"model_type": plan.container, "remote_code": plan.container == "remote", "note": plan.container_note}
    return Report.read(
        {
            "recipe": plan.recipe,
            "recipe_digest": plan.recipe_digest,
            "origin": plan.origin,
            "source": {"name": plan.model_path, "fingerprint": plan.model},
            "calibration": calibration or {"statistics": "none"},
            "container": stored,
            "before": plan.before,
            "after": plan.after,
            "depth": plan.depth,
            "sites": plan.sites,
        }
    )


def titled_sections(document: Report | AnyPlan) -> tuple[str, list[Section]]:
    if isinstance(document, Report):
        return name_report(document), all_sections(document)
    size, *others = all_sections(report_of_plan(document))
    title = f"Plan for {Path(document.model_path).name}, by {document.recipe.name}"
    return title, [replace(size, explanations=()), *others]  # there is no output yet that could be measured
