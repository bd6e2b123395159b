"""What a page is made from: the report of an output, or a plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_prune.job.records import Cost, DepthRecord, FactoredLinear, HiddenRecord, MaskedLinear, SiteRecord
from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import (
    Latency,
    Learned,
    Mask,
    Recovery,
    Report,
    Rotation,
    Stage,
    StrengthSearch,
    UsedRecipe,
)
from ckpt_prune.job.report_file import AnyPlan, read_report_or_plan
from ckpt_prune.report.adapters import is_recovered, told_of
from ckpt_prune.report.figures import RecoveryFigures, recovery_figures
from ckpt_prune.report.latency import latency_line

_STORED = "stored as "
"""How a note on a container begins, which its label says already."""


@dataclass(frozen=True)
class Document:
    """What the page says.

    Attributes:
        title: its heading.
        recipe: name, summary and source of the method.
        facts: label and text of what else there is to know, in order.
        before, after: cost of the source and of the output.
        depth: which whole blocks are gone; None where none was to go.
        hidden: what is left of the residual stream; None where it is whole.
        sites: by block, then in the order of the report.
        layers: by block; empty where the report has none.
        mask: which weights were zeroed; None where units were dropped.
        rotation: what was rotated before the mask.
        learned: the rotations by block; one that all blocks share comes first.
        linears: what the mask did, by block, then in the order of the report.
        factored: what became two thin linears, by block, then in the order of the report.
        recovery, recovered: how blocks were recovered, and what that did; None where they were not.
        adapters: how the model was recovered as a whole, in sentences.
        stages: what the run took, in order.
    """

    title: str
    recipe: UsedRecipe
    facts: list[tuple[str, str]]
    before: Cost
    after: Cost
    sites: list[SiteRecord]
    depth: DepthRecord | None = None
    hidden: HiddenRecord | None = None
    layers: list[RecoveredLayer] = field(default_factory=list)
    mask: Mask | None = None
    rotation: Rotation | None = None
    learned: list[Learned] = field(default_factory=list)
    linears: list[MaskedLinear] = field(default_factory=list)
    factored: list[FactoredLinear] = field(default_factory=list)
    recovery: Recovery | None = None
    recovered: RecoveryFigures | None = None
    adapters: Sequence[str] = ()
    stages: list[Stage] = field(default_factory=list)
    search: StrengthSearch | None = None


def read_document(path: Path) -> Document:
    """Read the report of an output folder, or a plan.

    Args:
        path: the folder, the report inside it, or the plan file.

    Raises:
        UserError: not there, not written by this tool, or damaged.
    """
    found = read_report_or_plan(path)
    return _of_report(found) if isinstance(found, Report) else _of_plan(found)


def _of_report(report: Report) -> Document:
    container, recipe = report.container, report.recipe
    stored = "remote code" if container.remote_code else container.model_type
    layers = sorted(report.layers, key=lambda layer: layer.block)
    recovered = recovery_figures(report.recovery, layers)
    facts = [
        ("Source", report.source.name),
        ("Fingerprint", report.source.fingerprint),
        ("Method", recipe.source),
        ("Mask", f"{report.mask.method}, {report.mask.pattern}" if report.mask else ""),
        ("Rotation", report.rotation.kind if report.rotation else ""),
        ("Recipe digest", report.recipe_digest),
        ("Calibration", _in_words(report.calibration.entries)),
        ("Latency", _latency(report.latency)),
        *_recovery_facts(report.recovery, recovered),
        ("Stored as", _with_note(stored, container.note)),
        ("Written by", f"ckpt_prune {report.ckpt_prune}, torch {report.torch}, transformers {report.transformers}"),
    ]
    title = f"{report.source.name}, {recipe.name if recipe.elsewhere else f'pruned by {recipe.name}'}"
    learned = report.rotation.learned if report.rotation else []
    return Document(
        title=f"{title} and recovered" if is_recovered(report) else title,
        recipe=recipe,
        facts=_told(facts),
        before=report.before,
        after=report.after,
        sites=sorted(report.sites, key=lambda site: site.block),
        depth=report.depth,
        hidden=report.hidden,
        layers=layers,
        mask=report.mask,
        rotation=report.rotation,
        learned=sorted(learned, key=lambda entry: -1 if entry.block is None else entry.block),
        linears=sorted(report.linears, key=lambda linear: linear.block),
        factored=sorted(report.factored, key=lambda linear: linear.block),
        recovery=report.recovery,
        recovered=recovered,
        adapters=told_of(report),
        stages=report.stages,
        search=report.lambda_search,
    )


def _of_plan(plan: AnyPlan) -> Document:
    statistics = plan.statistics
    stored = "remote code" if plan.container == "remote" else plan.container
    facts = [
        ("Source", plan.model_path),
        ("Fingerprint", plan.model),
        ("Method", plan.recipe.source),
        ("Recipe digest", plan.recipe_digest),
        ("Calibration", f"{statistics.path}, digest {statistics.digest}" if statistics else "none"),
        ("To be stored as", _with_note(stored, plan.container_note)),
    ]
    return Document(
        title=f"Plan for {Path(plan.model_path).name}, by {plan.recipe.name}",
        recipe=plan.recipe,
        facts=_told(facts),
        before=plan.before,
        after=plan.after,
        sites=sorted(plan.sites, key=lambda site: site.block),
        depth=plan.depth,
    )


def _told(facts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that there is something to say of."""
    return [(label, text) for label, text in facts if text]


def _recovery_facts(recovery: Recovery | None, figures: RecoveryFigures | None) -> list[tuple[str, str]]:
    if recovery is None or figures is None:
        return []
    count = f", {figures.recovered} of {figures.blocks} blocks" if figures.blocks else ""
    when = "each block right after it was pruned" if recovery.on_the_fly else "after pruning"
    return [
        ("Recovery", f"LaCo{count}, {when}"),
        ("Recovered against", f"{recovery.dense.name}, fingerprint {recovery.dense.fingerprint}"),
        ("Recovery data", _in_words(recovery.data.entries)),
        ("Recovery settings", _in_words(recovery.settings.entries)),
    ]


def _latency(latency: Latency | None) -> str:
    """What was foreseen and what was measured, behind a label that says of what."""
    told = None if latency is None else latency_line(latency)
    return "" if told is None else told.removeprefix("latency ")


def _with_note(container: str, note: str | None) -> str:
    if note and note.startswith(_STORED):
        return note.removeprefix(_STORED)  # the label says so
    return f"{container}: {note}" if note else container


def _in_words(provenance: Mapping[str, Any]) -> str:
    """Every entry in words, whatever the modality has: `target dense, 128 samples, window 2048, ...`."""
    counted = {"samples", "tokens", "folds", "epochs"}
    parts = []
    for key, value in provenance.items():
        if value is None or isinstance(value, dict | list) or (isinstance(value, float) and not math.isfinite(value)):
            continue
        words = key.replace("_", " ")
        if key in counted and isinstance(value, int):
            parts.append(f"{value:,} {words.removesuffix('s') if value == 1 else words}")
        else:
            parts.append(f"{words} {value}")
    return ", ".join(parts)
