"""Making the report of what a job has done, all but the digests of its files."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.architectures.composite import load_composite
from ckpt_prune.architectures.model import Model
from ckpt_prune.checkpoint.modules import sentence_class
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.containers.container import Container
from ckpt_prune.filenames import ELSEWHERE
from ckpt_prune.planning.accounting import cost_of
from ckpt_prune.planning.plan import SitePlan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.records import FactoredLinear, MaskedLinear, SiteRecord
from ckpt_prune.records import Record
from ckpt_prune.recovery.record import RecoveredLayer
from ckpt_prune.recovery.recoverer import Recoverer
from ckpt_prune.report.model import (
    Adapters,
    Asked,
    Earlier,
    Latency,
    Learned,
    Mask,
    Perplexity,
    Recovery,
    Report,
    Rotation,
    Source,
    StoredAs,
    StrengthSearch,
    UsedRecipe,
)
from ckpt_prune.report.source_card import source_card
from ckpt_prune.transform.settle import Settled
from ckpt_prune.transform.sizing import dense_size, size_at
from ckpt_prune.versions import versions


def report_of_prune(
    settled: Settled,
    records: Sequence[SitePlan | MaskedLinear | FactoredLinear],
    *,
    search: StrengthSearch | None = None,
    learned: Sequence[dict[str, Any]] | None = None,
    recovery: Recovery | None = None,
    layers: Sequence[RecoveredLayer] = (),
    scales: Adapters | None = None,
) -> Report:
    """What pruning did.

    Args:
        settled: what was run.
        records: of sites that lost units, or of linears that got zeros or became two.
        search: of λ by perplexity.
        learned: rotations, as `RotationLearner.run` gives them.
        recovery: `recovery_of`, where blocks were recovered as well.
        layers: what that did, block by block.
        scales: what they did, where they were fitted to all blocks.
    """
    recipe, asked, output = settled.recipe, settled.request.asked, settled.output
    whole, shortened, narrowed = settled.request.whole, settled.request.shortened, settled.request.narrowed
    mask = rotation = None
    if recipe.mask is not None:
        shares = settled.shares
        allocation = None if shares is None else recipe.mask.allocation
        mask = Mask(
            method=recipe.mask.method,
            pattern=recipe.mask.pattern,
            ratio=recipe.ratio,
            allocation=allocation,
            shares=shares,
        )
    if recipe.rotation is not None and learned is not None:
        rotation = Rotation(
            kind=recipe.rotation.kind,
            importance=recipe.importance,
            turns=settled.rotated is not None and bool(settled.rotated.turns),
            learned=[Learned.model_validate(entry) for entry in learned],
        )
    used = versions()
    return Report(
        ckpt_prune=used["ckpt_prune"],
        torch=used["torch"],
        transformers=used["transformers"],
        recipe=UsedRecipe.model_validate(whole.recipe.model_dump(mode="json", by_alias=True)),
        recipe_digest=whole.recipe.digest,
        origin=whole.origin,
        source=source_of(whole.model.checkpoint),
        ignored=sorted([*settled.model.checkpoint.ignored, *settled.model.checkpoint.shadowed]),
        part=part_name(settled.model.checkpoint),
        asked=None if asked is None else _asked(asked),
        calibration=Record.model_validate(settled.provenance()),
        plan=whole.plan.digest if whole.plan else None,
        lambda_search=search,
        container=_within(settled.model.checkpoint, stored_as(output.container, settled.model)),
        before=settled.before,
        after=output.cost,
        depth=None if shortened is None else shortened.record,
        hidden=None if narrowed is None or narrowed.idle else narrowed.record,
        mask=mask,
        rotation=rotation,
        sites=[_without_scores(record) for record in records if isinstance(record, SitePlan)],
        linears=[record for record in records if isinstance(record, MaskedLinear)],
        factored=[record for record in records if isinstance(record, FactoredLinear)],
        latency=_foreseen(settled),
        adapters=scales,
        recovery=recovery,
        layers=list(layers),
    )


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


def part_name(checkpoint: Checkpoint) -> str | None:
    """Which part of a composite a checkpoint is; None where it is a whole."""
    return None if checkpoint.within is None else checkpoint.within.part


def _within(checkpoint: Checkpoint, stored: StoredAs) -> StoredAs:
    """What an output is stored as: the whole, where its source is a part of one."""
    if checkpoint.within is None:
        return stored
    composite = load_composite(str(checkpoint.within.whole.config["model_type"]))
    return stored.model_copy(update={"model_type": composite.model_type, "auto_class": composite.auto})


def source_of(checkpoint: Checkpoint) -> Source:
    """Which model a checkpoint is."""
    return Source(name=checkpoint.name, fingerprint=checkpoint.fingerprint, card=source_card(checkpoint.path))


def stored_as(container: Container, model: Model) -> StoredAs:
    """What an output is stored as.

    Args:
        container: of the output.
        model: that it was made from, or itself.
    """
    loader = sentence_class(model.checkpoint.path, container.config)
    return StoredAs(
        model_type=container.model_type,
        remote_code=container.remote_class is not None,
        auto_class=model.family.loading_class,
        padded=sorted(container.padded),
        note=container.note,
        sentence_class=None if loader == "SentenceTransformer" else loader,
    )


def _asked(recipe: Recipe) -> Asked:
    return Asked(size=None if recipe.size is None else recipe.size.model_dump(), digest=recipe.digest)


def _foreseen(settled: Settled) -> Latency | None:
    """What the table of this machine says of the output; None where its size was no time."""
    request = settled.request
    size = request.whole.recipe.size if request.asked is None else request.asked.size
    if size is None or size.kind != "latency" or request.latencies is None:
        return None
    return Latency(
        of=f"latency of {size.timed.words}",
        dense=dense_size(request.whole, "latency") / 1e6,
        foreseen=size_at(request, "latency", settled.widths) / 1e6,
        off=request.latencies.off,
    )


def _without_scores(site: SitePlan) -> SiteRecord:
    return SiteRecord.model_validate(site.model_dump(exclude={"scores"}))


def _elsewhere(pruned: Model, dense: Model, container: Container) -> Report:
    """What is known of a checkpoint that another tool pruned."""
    return Report(
        recipe=UsedRecipe(name=ELSEWHERE),
        source=source_of(dense.checkpoint),
        ignored=sorted([*pruned.checkpoint.ignored, *pruned.checkpoint.shadowed]),
        calibration=Record(),
        # What else it has to be noted of its container is not known, nor what is padded.
        container=stored_as(container, pruned).model_copy(update={"padded": [], "note": None}),
        before=cost_of(dense),
        after=cost_of(pruned),
        sites=[],
    )
