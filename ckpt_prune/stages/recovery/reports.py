"""Reports of checkpoints that were recovered, and what they say of it."""

from collections.abc import Sequence

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.filenames import PRUNED_ELSEWHERE
from ckpt_prune.common.records import Record
from ckpt_prune.common.versions import versions
from ckpt_prune.job.cost import cost_of
from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import Adapters, Earlier, Perplexity, Recovery, Report, UsedRecipe
from ckpt_prune.job.source_facts import source_of, stored_as
from ckpt_prune.model.containers.container import Container
from ckpt_prune.model.model import Model
from ckpt_prune.stages.recovery.laco import Recoverer


def report_of_recovery(
    own: Report | None,
    pruned: Model,
    dense: Model,
    container: Container,
    recovery: Recovery,
    layers: Sequence[RecoveredLayer],
) -> Report:
    """What recovery did to a checkpoint that was pruned before: its own report, and what was added.

    Args:
        own: what the pruned checkpoint says of itself; None where another tool made it.
        pruned: what was recovered.
        dense: whose hidden states were the target.
        container: what both the pruned checkpoint and the output are stored as.
        recovery: `recovery_of`, without `earlier`.
        layers: what was done, block by block.
    """
    earlier = None
    if own is not None and own.recovery is not None:
        earlier = Earlier(recovery=own.recovery, layers=own.layers)
    base = _elsewhere(pruned, dense, container) if own is None else own
    told = recovery.model_copy(update={"earlier": earlier})
    return base.model_copy(update={**versions(), "recovery": told, "layers": list(layers)})


def report_of_adapters(own: Report | None, pruned: Model, container: Container, adapters: Adapters) -> Report:
    """What LoRA did to a checkpoint: its own report, and what was added.

    Args:
        own: what the pruned checkpoint says of itself; None where another tool made it.
        pruned: what was recovered.
        container: what it and the output are stored as.
        adapters: what was done.
    """
    base = _elsewhere(pruned, pruned, container) if own is None else own
    told = adapters.model_copy(update={"earlier": base.adapters})
    return base.model_copy(update={**versions(), "adapters": told})


def recovery_of(recoverer: Recoverer, dense: Checkpoint, *, on_the_fly: bool) -> Recovery:
    """How blocks were recovered.

    Args:
        recoverer: past the last block.
        dense: the model whose hidden states were the target.
        on_the_fly: whether each block was recovered right after it was pruned.
    """
    settings, samples = recoverer.settings, recoverer.pruned.samples
    chosen = settings.model_dump(mode="json", exclude={"samples", "seed"})
    perplexities = recoverer.perplexities()
    return Recovery(
        dense=source_of(dense).model_copy(update={"card": None}),
        on_the_fly=on_the_fly,
        settings=Record.model_validate(chosen | {"lr": recoverer.rate, "seed": recoverer.seed}),
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


def _elsewhere(pruned: Model, dense: Model, container: Container) -> Report:
    """What is known of a checkpoint that another tool pruned."""
    return Report(
        recipe=UsedRecipe(name=PRUNED_ELSEWHERE),
        source=source_of(dense.checkpoint),
        ignored=sorted([*pruned.checkpoint.ignored, *pruned.checkpoint.shadowed]),
        calibration=Record(),
        # What else it has to be noted of its container is not known, nor what is padded.
        container=stored_as(container, pruned).model_copy(update={"padded": [], "note": None}),
        before=cost_of(dense),
        after=cost_of(pruned),
        sites=[],
    )
