"""The fields of recovery in reports, and reports of models that were recovered afterwards."""

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.filenames import PRUNED_ELSEWHERE
from ckpt_prune.common.records import Record
from ckpt_prune.common.versions import versions
from ckpt_prune.job.form import Form
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.report import UsedRecipe
from ckpt_prune.job.run import Run
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.training import SnowsSettings
from ckpt_prune.stages.recovery.laco import Recoverer
from ckpt_prune.stages.recovery.records import Earlier, Perplexity, RecoveryRecord
from ckpt_prune.stages.report import Report, find_report
from ckpt_prune.stages.shared.source_facts import source_of, stored_as

_DESCENT = ("lr", "schedule", "norms", "teacher", "patience")
"""Settings of gradient descent, which Newton steps have not."""


def recovery_of(recoverer: Recoverer, dense: Checkpoint, *, on_the_fly: bool) -> RecoveryRecord:
    """Return how blocks were recovered.

    Args:
        on_the_fly: whether each block was recovered right after it was pruned.
    """
    settings, samples = recoverer.settings, recoverer.pruned.samples
    by_snows = settings.method == "snows"
    others = {"samples", "seed", "lora", *(_DESCENT if by_snows else SnowsSettings.model_fields)}
    chosen = settings.model_dump(mode="json", exclude=others) | {"seed": recoverer.seed}
    chosen |= {} if by_snows else {"lr": recoverer.rate}
    perplexities = recoverer.perplexities()
    return RecoveryRecord(
        dense=source_of(dense).model_copy(update={"card": None}),
        on_the_fly=on_the_fly,
        settings=Record.model_validate(chosen),
        data=Record.model_validate(
            {
                "modality": recoverer.pruned.factory.family.modality,
                "data": samples.fingerprint,
                "samples": recoverer.split.samples,
                "held_out": len(recoverer.split.measured) if settings.held_out else 0,
                "measured": len(recoverer.split.measured),
                "window": samples.tokens,
                "tokens": recoverer.split.samples * samples.tokens,
            }
        ),
        perplexity_after=None if perplexities is None else [Perplexity.model_validate(entry) for entry in perplexities],
    )


def _recovered_report(prepared: Prepared, records: Mapping[str, Sequence[Any]], run: Run) -> Report:
    """Return the model's own report with what was done to it added."""
    pruned, recovery, adapters = prepared.model, run.done.get("recovery"), run.done.get("adapters")
    own_report = find_report(pruned.checkpoint.path)
    changes: dict[str, Any] = {**versions(), "loss": None}  # measured before this
    if recovery is not None:
        earlier = None
        if own_report is not None and own_report.recovery is not None:
            earlier = Earlier(recovery=own_report.recovery, layers=own_report.layers)
        layers = list(records["recovery"])
        changes |= {"recovery": recovery.model_copy(update={"earlier": earlier}), "layers": layers}
    dense = pruned if recovery is None or prepared.job.dense is None else prepared.job.dense
    report = _pruned_elsewhere(prepared, dense) if own_report is None else own_report
    if adapters is not None:
        changes["adapters"] = adapters.model_copy(update={"earlier": report.adapters})
    return report.model_copy(update=changes)


def _pruned_elsewhere(prepared: Prepared, dense: Model) -> Report:
    """Return the report of a model that another tool pruned, as far as it can be made."""
    pruned = prepared.model
    return Report(
        recipe=UsedRecipe(name=PRUNED_ELSEWHERE),
        source=source_of(dense.checkpoint),
        ignored=sorted([*pruned.checkpoint.ignored, *pruned.checkpoint.shadowed]),
        calibration=Record(),
        # Nothing is known of what is padded.
        container=stored_as(prepared.output.container, pruned).model_copy(update={"padded": [], "note": None}),
        before=cost_of(dense),
        after=cost_of(pruned),
        sites=[],
    )


RECOVERED = Form(find_report, _recovered_report)
"""Output of `recover`."""


def known_samples(report: Report | None) -> list[tuple[int, str]] | None:
    """Return numbers and fingerprints of the samples that a model says it was pruned on and fitted to, in turn."""
    if report is None:
        return None
    data = report.calibration.entries
    pruned_on = [(data.get("samples"), data.get("data"))]
    adapters = report.adapters
    fitted = []
    while adapters is not None:
        fitted.append((adapters.samples, adapters.data))
        adapters = adapters.earlier
    seen = [*pruned_on, *reversed(fitted)]
    return [(count, data) for count, data in seen if isinstance(count, int) and isinstance(data, str) and data]
