"""Running a job: blocks through the engine into the writer, then config, report and model card."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_prune.calibration.sources import SequentialMoments
from ckpt_prune.checkpoint.staging import Staging, refuse_overlap
from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.planning.plan import MaskedLinear, SitePlan
from ckpt_prune.progress import meter, track
from ckpt_prune.recovery.record import recovery_record
from ckpt_prune.recovery.recoverer import RecoveredLayer
from ckpt_prune.rotations.learning import WrittenRotations
from ckpt_prune.transform.budgets import dense_scores
from ckpt_prune.transform.checks import check_trained
from ckpt_prune.transform.job import Job
from ckpt_prune.transform.publish import publish
from ckpt_prune.versions import versions

_REST = "rest"

Records = Sequence[SitePlan | MaskedLinear]
"""What was done: to spaces that lost units, or to linears that got zeros."""


@dataclass(frozen=True)
class StrengthSearch:
    """λ → calibration perplexity, and the λ chosen."""

    chosen: float
    perplexities: dict[float, float]


def search_strength(job: Job) -> StrengthSearch:
    """Choose λ by the perplexity of the pruned model on the calibration text (RCPU 7.1).

    The model is pruned once per value, block by block, nothing is written; ties go to the larger value, which stays
    nearer to the kept weights.
    """
    grid = job.recipe.perplexity_grid
    assert grid is not None
    if job.recipe.allocation == "least-error" and job.scores is None:
        job = replace(job, scores=dense_scores(job))
    found: dict[float, float] = {}
    for strength in grid:
        trial = replace(job, recipe=job.recipe.with_strength(strength), diagnostics=False)
        pruner, source = trial.pruner(), trial.source()
        stream = source.stream if isinstance(source, SequentialMoments) else trial.stream()
        for block in track(range(trial.blocks), f"trying lambda {strength:g}", total=trial.blocks):
            tensors, _ = pruner.block(block, trial.read_block(block), source)
            source.advance(block, tensors)
            if not isinstance(source, SequentialMoments):
                stream.advance(block, tensors)
        nll = stream.nll()
        found[strength] = math.exp(nll) if nll < 700 else math.inf
    chosen = min(found, key=lambda value: (found[value], -value))
    return StrengthSearch(chosen, found)


def check_output(source: Path, out: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse a place for the output before any work is done.

    Raises:
        UserError: it is, contains or is inside the source, or may not be written (`checkpoint.staging`).
    """
    refuse_overlap(source, out)
    if not resume:
        Staging(out, job="", layout="", resume=False, overwrite=overwrite)


def prune(job: Job, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Prune a checkpoint into a folder that stock transformers loads.

    Everything is checked first; the output is written to `OUT.partial` and renamed at the end.

    Args:
        job: what to do. A λ that is to be chosen by perplexity is searched here.
        out: the folder to write.
        resume: continue an interrupted run of the same job; the result is byte-identical to an uninterrupted one.
        overwrite: replace an existing output, or start an interrupted one afresh.

    Returns:
        The report, as in the output's ckpt_prune.json.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    check_trained(job)
    check_output(job.checkpoint.path, out, resume=resume, overwrite=overwrite)
    writer = CheckpointWriter(
        out,
        job.layout | job.aside,
        job=job.digest,
        sharded=job.checkpoint.sharded,
        aside=job.aside.keys(),
        resume=resume,
        overwrite=overwrite,
    )
    if not writer.done:
        job.checkpoint.check_finite()
    with writer:
        search = None
        if job.recipe.perplexity_grid and job.plan is None:
            note = writer.notes.get("search")
            if note is None:
                search = search_strength(job)
                writer.commit(
                    "search", note={"chosen": search.chosen, "perplexities": list(search.perplexities.items())}
                )
            else:
                search = StrengthSearch(note["chosen"], dict(note["perplexities"]))
        run = job if search is None else replace(job, recipe=job.recipe.with_strength(search.chosen))
        learned = None
        if job.recipe.rotation is not None:
            learner = job.learner()
            learned = learner.run(writer, out.absolute().parent)
            run = replace(run, rotations=WrittenRotations(writer.read, learner.sizes))
        written = _write_blocks(run, writer)
        _write_rest(run, writer)
        report = _report(run, written.records, search, learned) | written.recovery
        return publish(writer, report, run.container, run.checkpoint, [*run.layout, *run.aside])


@dataclass(frozen=True)
class _Written:
    """What became of the blocks.

    Attributes:
        records: of what was pruned.
        recovery: keys of the report, where blocks were recovered.
    """

    records: Records
    recovery: dict[str, Any]


def _write_blocks(job: Job, writer: CheckpointWriter) -> _Written:
    """Prune every block, recover it where the recipe says so, and write it."""
    pruner, source = job.pruner(), job.source()
    recoverer = job.recoverer() if job.recipe.recovery is not None else None
    records: list[SitePlan | MaskedLinear] = []
    layers: list[RecoveredLayer] = []
    with meter(recoverer.epochs, "recovering", unit="epoch") if recoverer else nullcontext() as epochs:
        for block in track(range(job.blocks), "pruning", total=job.blocks):
            unit = f"block {block}"
            prefix = job.family.block.format(block=block)
            planned = [name for tensors in job.layout.values() for name in tensors if name.startswith(prefix)]
            layer = None
            if unit in writer.done:
                note, tensors = writer.notes[unit], writer.read(planned)
                own: Records = [pruner.record.model_validate(record) for record in note["records"]]
                if recoverer is not None and epochs is not None:
                    dense = job.read_block(block)
                    # What it was before it was recovered is not on disk, and the report compares with it.
                    pruned, _ = pruner.block(block, dense, source)
                    recoverer.skip(block, dense, pruned, tensors)
                    layer = RecoveredLayer.model_validate(note["layer"])
                    epochs.to(recoverer.done(block))
            else:
                dense = job.read_block(block)
                tensors, own = pruner.block(block, dense, source)
                if recoverer is not None and epochs is not None:
                    tensors, layer = recoverer.block(block, dense, tensors, epochs)
                for name in planned:
                    writer.write(name, tensors[name])
                note = {"records": [r.model_dump(mode="json") for r in own], "layer": layer and layer.model_dump()}
                writer.commit(unit, note=note)
            source.advance(block, tensors)
            records += own
            layers += [layer] if layer else []
    if recoverer is None:
        return _Written(records, {})
    return _Written(records, recovery_record(recoverer, job.checkpoint, layers, on_the_fly=True))


def _write_rest(job: Job, writer: CheckpointWriter) -> None:
    if _REST in writer.done:
        return
    prefixes = tuple(job.family.block.format(block=block) for block in range(job.blocks))
    for tensors in job.layout.values():
        for name in tensors:
            if not name.startswith(prefixes):
                writer.write(name, job.read(name))
    writer.commit(_REST)


def _report(
    job: Job, records: Records, search: StrengthSearch | None, learned: list[dict[str, Any]] | None
) -> dict[str, Any]:
    container, recipe = job.container, job.recipe
    return {
        "version": 1,
        **versions(),
        "source": {"name": job.checkpoint.path.resolve().name, "fingerprint": job.checkpoint.fingerprint},
        "recipe": job.recipe.model_dump(mode="json", by_alias=True),
        "recipe_digest": job.recipe.digest,
        "asked": None
        if job.asked is None
        else {"size": job.asked.size and job.asked.size.model_dump(), "digest": job.asked.digest},
        "calibration": job.provenance(),
        "plan": job.plan.digest if job.plan else None,
        "lambda_search": None
        if search is None
        else {"chosen": search.chosen, "perplexity": {f"{k:g}": v for k, v in search.perplexities.items()}},
        "container": {
            "model_type": container.model_type,
            "remote_code": container.remote_class is not None,
            "auto_class": job.family.auto_class,
            "padded": sorted(container.padded),
            "note": container.note,
        },
        "before": job.before.model_dump(),
        "after": job.after.model_dump(),
        "mask": None
        if recipe.mask is None
        else {"method": recipe.mask.method, "pattern": recipe.mask.pattern, "ratio": recipe.ratio},
        "rotation": None
        if recipe.rotation is None or learned is None
        else {
            "kind": recipe.rotation.kind,
            "importance": recipe.importance,
            "turns": job.rotated is not None and bool(job.rotated.turns),
            "learned": learned,
        },
        "sites": [r.model_dump(mode="json", exclude={"scores"}) for r in records if isinstance(r, SitePlan)],
        "linears": [r.model_dump(mode="json") for r in records if isinstance(r, MaskedLinear)],
    }
