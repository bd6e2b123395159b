"""The report of a job: what its stages have done, all but the digests of its files."""

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.records import Record
from ckpt_prune.common.versions import versions
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.report import Asked, Latency, Source, UsedRecipe
from ckpt_prune.job.run import Run
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.runner.changes import changes_of
from ckpt_prune.runner.messages import warnings
from ckpt_prune.runner.whole_size import Change, whole_sizes
from ckpt_prune.stages.folders import stages_of
from ckpt_prune.stages.report import Report, find_report
from ckpt_prune.stages.shared.source_facts import source_of, stored_as, stored_whole
from ckpt_prune.stages.spaces.size_search import Sized, dense_size, size_at


def report_of(prepared: Prepared, records: Mapping[str, Sequence[Any]], run: Run) -> Report:
    """Return the report of a job.

    Args:
        records: key of a stage → records of its step on all blocks.
        run: with what the stages have done as a whole.
    """
    whole, checkpoint, sized = prepared.whole, prepared.model.checkpoint, prepared.facts(Sized)
    unsized = None if sized is None else sized.recipe
    used, source, others = versions(), source_of(whole.model.checkpoint), _other_parts(checkpoint)
    if others:  # named after the model that both parts are of
        source = Source.model_validate(others[-1]["source"] | {"fingerprint": source.fingerprint})
    fields: dict[str, Any] = {"sites": []}
    for stage in stages_of(whole.recipe):
        fields |= stage.report(prepared, records.get(stage.keys.key, []), run)
    asked_for = None
    if unsized is not None:
        asked_for = Asked(size=None if unsized.size is None else unsized.size.model_dump(), digest=unsized.digest)
    return Report(
        ckpt_prune=used["ckpt_prune"],
        torch=used["torch"],
        transformers=used["transformers"],
        recipe=UsedRecipe.model_validate(whole.recipe.model_dump(mode="json", by_alias=True)),
        recipe_digest=whole.recipe.digest,
        origin=whole.job.origin,
        source=source,
        ignored=sorted([*checkpoint.ignored, *checkpoint.shadowed]),
        part=None if checkpoint.within is None else checkpoint.within.part,
        others=others,
        whole=whole_sizes(prepared, [_change(each) for each in others]) if others else None,
        asked=asked_for,
        changes=changes_of(prepared),
        calibration=Record.model_validate(describe_data(prepared)),
        plan=whole.plan.digest if whole.plan else None,
        container=stored_whole(checkpoint, stored_as(prepared.output.container, prepared.model)),
        before=prepared.before,
        after=prepared.output.cost,
        latency=_foresee_latency(prepared),
        warnings=warnings(prepared),
        **fields,
    )


def _other_parts(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the reports of other parts of a part's whole that were pruned before."""
    before = None if checkpoint.within is None else find_report(checkpoint.path)
    if before is None or before.part is None:
        return []
    files = ("others", "whole", "files", "side_files", "job", "stages")
    earlier = {key: value for key, value in before.data().items() if key not in files}
    part = checkpoint.within and checkpoint.within.part
    return [each for each in (earlier, *before.others) if each["part"] != part]


def _change(report: Mapping[str, Any]) -> Change:
    return Cost.read(report["before"]), Cost.read(report["after"])


def describe_data(prepared: Prepared) -> dict[str, Any]:
    """Return where the moments came from, as the report says it."""
    if prepared.statistics is not None and not prepared.sequential:
        index = prepared.statistics.index
        return {
            "target": "dense",
            "modality": index.modality,
            "statistics": index.digest,
            **({"data": index.data[0]} if len(index.data) == 1 else {}),
            **({"windows": index.texts} if index.texts else {}),
            "samples": index.samples,
            "window": index.window,
            "tokens": index.tokens,
            "folds": index.folds,
        }
    if prepared.live is not None:
        samples, once = prepared.live.samples, "" if prepared.recipe.true_sequential else ", once per block"
        return {
            "target": prepared.whole.recipe.target + once,
            "modality": "image-text" if prepared.sees_images else prepared.model.family.modality,
            "data": samples.fingerprint,
            **({"windows": origin} if (origin := getattr(samples, "origin", "")) else {}),
            "samples": len(samples),
            "window": samples.tokens,
            "tokens": len(samples) * samples.tokens,
            "folds": prepared.live.folds,
        }
    return {"target": "none"}


def _foresee_latency(prepared: Prepared) -> Latency | None:
    """Return what the table of this machine says of the output; None if its size was no latency."""
    sized = prepared.facts(Sized)
    size = prepared.whole.recipe.size if sized is None else sized.recipe.size
    if size is None or size.kind != "latency" or prepared.job.latencies is None:
        return None
    return Latency(
        of=f"latency of {size.timed.words}",
        dense=dense_size(prepared.whole, "latency") / 1e6,
        foreseen=size_at(prepared, "latency", prepared.widths) / 1e6,
        off=prepared.job.latencies.off,
    )
