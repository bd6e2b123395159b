"""Sections of the stage `recovery`."""

import math
from collections.abc import Sequence

from ckpt_prune.common.filenames import ADAPTER_FOLDER, ADAPTER_PLACE
from ckpt_prune.common.formatting import plural
from ckpt_prune.show.section import (
    Section,
    Table,
    draw_figure,
    draw_line,
    draw_shares,
    list_entries,
    make_tables,
    name_some,
    number_under,
)
from ckpt_prune.stages.recovery.records import Adapters, Perplexity, RecoveredLayer, RecoveryRecord
from ckpt_prune.stages.report import Report

_SNOWS = "SNOWS: Preserving Deep Representations in One-Shot Pruning, arXiv 2411.18376"
_LACO = "LaCo: Layer-wise Compensation for Pruned Large Language Models, ACL 2026 long.1342"


# ---- block by block ----------------------------------------------------------------------------------------------


def sections(report: Report) -> list[Section]:
    """Say what was trained, and what it gave."""
    blocks = [] if report.recovery is None else [_show_blocks(report.recovery, report.layers)]
    return blocks + _show_adapters(report.adapters, kept=ADAPTER_PLACE in report.files)


def _show_blocks(recovery: RecoveryRecord, records: Sequence[RecoveredLayer]) -> Section:
    """Say what was trained towards which model, and how much nearer that brought the hidden states."""
    layers = sorted(records, key=lambda layer: layer.block)
    perplexities = sorted(recovery.perplexity_after or [], key=lambda entry: entry.blocks)
    sentences = [
        *_new_weights(recovery, layers),
        *_likeness(recovery, layers),
        *_warnings(recovery, layers),
        *_perplexities(recovery, perplexities, len(layers)),
    ]
    explanations = [_training(recovery)]
    if recovery.earlier is not None:
        explanations.append("It had been recovered before; that record is in ckpt_prune.json as recovery.earlier.")
    samples = f"{_samples(recovery)} samples"
    figures = [
        *draw_figure(
            "Error of the hidden states",
            f"Lower is better: against the dense model, on {samples}. Start: the block with its old weights, behind "
            "recovered blocks.",
            "mean squared error",
            draw_line("before recovery", layers, "mse_before"),
            draw_line("after recovery", layers, "mse_after", remark=_unless_recovered),
            draw_line("start", layers, "mse_start"),
        ),
        *draw_figure(
            "Linear CKA of the hidden states",
            f"Higher is better: 1 if they are those of the dense model but for rotation and scale. On {samples}.",
            "linear CKA",
            draw_line("before recovery", layers, "cka_before"),
            draw_line("after recovery", layers, "cka_after", remark=_unless_recovered),
            full=(0, 1),
        ),
        *draw_figure(
            "Perplexity over recovered blocks",
            f"Lower is better: on {samples}, with only so many of the first blocks recovered and the others as pruned.",
            "perplexity",
            draw_line("perplexity", perplexities, "perplexity", place=lambda entry: entry.blocks),
            across="blocks recovered",
            joined=True,
        ),
        *draw_shares(
            "Error over epochs",
            f"Lower is better: of hidden states on {samples} while blocks were recovered, as a share of what it was.",
            "share of error",
            {f"block {layer.block}": [*enumerate(layer.curve)] for layer in layers},
            "epoch",
        ),
    ]
    return Section(
        "Recovery", sentences, explanations, figures=figures, details=_details(recovery, layers, perplexities)
    )


def _details(
    recovery: RecoveryRecord, layers: Sequence[RecoveredLayer], perplexities: Sequence[Perplexity]
) -> list[Table]:
    facts = [
        ("dense model", f"{recovery.dense.name}, fingerprint {recovery.dense.fingerprint}"),
        ("data", list_entries(recovery.data.entries)),
        ("settings", list_entries(recovery.settings.entries)),
    ]
    return [
        *make_tables(
            "Every block",
            layers,
            {
                "block": lambda layer: str(layer.block),
                "outcome": _outcome,
                "epochs run": lambda layer: f"{layer.epochs:,}",
                "MSE before": number_under("mse_before"),
                "MSE at the start": number_under("mse_start"),
                "MSE after": number_under("mse_after"),
                "CKA before": number_under("cka_before"),
                "CKA after": number_under("cka_after"),
            },
            words=2,
        ),
        *make_tables(
            "Every perplexity",
            perplexities,
            {"blocks recovered": lambda entry: f"{entry.blocks:,}", "perplexity": number_under("perplexity")},
        ),
        Table(("", ""), facts, words=2, title="Data and settings"),
    ]


def _outcome(layer: RecoveredLayer) -> str:
    kept = f"weights of epoch {layer.best_epoch:,}" if layer.recovered else "old weights kept"
    return f"training diverged, {kept}" if layer.diverged else kept


def _unless_recovered(layer: RecoveredLayer) -> str:
    return "" if layer.recovered and not layer.diverged else _outcome(layer)


def _samples(recovery: RecoveryRecord) -> str:
    return "held-out" if recovery.data.amount("held_out") != 0 else "training"


def _rate(recovery: RecoveryRecord) -> float:
    rate = recovery.settings.figure("lr")
    return math.nan if rate is None else rate


def _new_weights(recovery: RecoveryRecord, layers: Sequence[RecoveredLayer]) -> list[str]:
    if not layers:
        return []
    count = f"{sum(layer.recovered for layer in layers)} of {len(layers)} blocks"
    how = f"trained towards the hidden states of {recovery.dense.name}"
    if _is_by_snows(recovery):
        how = f"fitted to what the weights of {recovery.dense.name} make of the same states"
    return [f"{count} have new weights, {how}; zeros stay zero."]


def _is_by_snows(recovery: RecoveryRecord) -> bool:
    return recovery.settings.text("method") == "snows"


def _training(recovery: RecoveryRecord) -> str:
    data, settings = recovery.data, recovery.settings
    only, where = settings.text("only"), settings.text("layers")
    which = "" if only is None else f"{'MLP' if only == 'mlp' else only} "
    when = "each block right after it was pruned" if recovery.on_the_fly else "block by block after pruning"
    images = data.text("modality") == "image"
    samples = "images" if images else f"windows of {data.amount('window')} tokens"
    how = f"up to {plural(settings.amount('epochs') or 0, 'epoch')} at a learning rate of {_rate(recovery):.3g}"
    if _is_by_snows(recovery):
        behind = plural(settings.amount("operations") or 0, "operation")
        how = f"by a Newton step for each {settings.amount('batch')} of the others, with {behind} behind each module"
    return (
        f"Recovered with {_SNOWS if _is_by_snows(recovery) else _LACO}: the {which}weights that pruning left"
        f"{'' if where is None else f' of layers {where}'} were trained, {when}, on {data.amount('samples')} {samples},"
        f" {data.amount('held_out')} of them held out, {how}."
    )


def _likeness(recovery: RecoveryRecord, layers: Sequence[RecoveredLayer]) -> list[str]:
    """Say how near the dense model's the hidden states are, over those blocks that have both figures."""
    changes = []
    for key, what in (("mse", "mean squared error"), ("cka", "linear CKA")):
        pairs = [(layer.figure(f"{key}_before"), layer.figure(f"{key}_after")) for layer in layers]
        complete = [(before, after) for before, after in pairs if before is not None and after is not None]
        if complete:
            before, after = (math.fsum(values) / len(complete) for values in zip(*complete, strict=True))
            of = "" if len(complete) == len(layers) else f" ({plural(len(complete), 'block')})"
            changes.append(f"{what} {before:.4g} → {after:.4g}{of}")
    measured = recovery.data.amount("measured") or recovery.data.amount("held_out")
    samples = f"{_samples(recovery)} samples" if measured is None else plural(measured, f"{_samples(recovery)} sample")
    return [f"Hidden states on {samples}, mean over blocks, before → after: {', '.join(changes)}."] if changes else []


def _warnings(recovery: RecoveryRecord, layers: Sequence[RecoveredLayer]) -> list[str]:
    """Warn of blocks that training did not help, and of those where it got lost."""
    warnings = []
    broken = [layer.block for layer in layers if layer.mse_after is None]
    idle = [layer.block for layer in layers if layer.epochs and not layer.recovered and not layer.diverged]
    diverged = [layer.block for layer in layers if layer.diverged]
    if broken:
        warnings.append(f"The hidden states after block {broken[0]} are not finite: what follows cannot be recovered.")
    if idle:
        warnings.append(
            f"No Newton step was better than the old weights in {_blocks(idle)}: use more samples."
            if _is_by_snows(recovery)
            else f"No epoch was better than the old weights in {_blocks(idle)}, with lr {_rate(recovery):.3g} and "
            "less: use more samples or epochs."
        )
    # Where nothing was recovered, both errors are of the same weights, in batches of other sizes.
    last = layers[-1] if any(layer.recovered for layer in layers) else None
    if last is not None and last.mse_before is not None and (last.mse_after or 0) > last.mse_before:
        warnings.append(
            "After the last block the squared error is larger than without recovery: measure the result with "
            "ckpt-prune evaluate, or use more samples."
        )
    if diverged:
        warnings.append(
            f"Training diverged in {_blocks(diverged)} and was taken back there: use a smaller lr than "
            f"{_rate(recovery):.3g}."
        )
    return warnings


def _blocks(numbers: Sequence[int]) -> str:
    return f"{plural(len(numbers), 'block')} ({name_some([str(number) for number in numbers])})"


def _perplexities(recovery: RecoveryRecord, perplexities: Sequence[Perplexity], blocks: int) -> list[str]:
    """List the perplexities by the number of recovered blocks; never without their window."""
    if not perplexities:
        return []
    window = recovery.data.amount("window")
    of = "" if window is None else f" of {window:,} tokens"
    curve = ", ".join(
        f"{'inf' if entry.perplexity is None else f'{entry.perplexity:.3f}'} with {entry.blocks}"
        for entry in perplexities
    )
    return [f"Perplexity on {_samples(recovery)} windows{of}: {curve} of {blocks} blocks recovered."]


# ---- as a whole --------------------------------------------------------------------------------------------------


def _show_adapters(adapters: Adapters | None, *, kept: bool) -> list[Section]:
    """Say what was trained and what it gave, for each time, the last one first; and whether that adapter was kept."""
    sections: list[Section] = []
    while adapters is not None:
        title = "Scales" if adapters.method == "scales" else "LoRA"
        sentences = _adapter_sentences(adapters)
        if kept and not sections:
            sentences.append(
                f"The adapter by itself is in {ADAPTER_FOLDER}: peft.PeftModel.from_pretrained puts it on the "
                "recovered model."
            )
        sections.append(Section(title if not sections else f"{title}, before that", sentences))
        adapters = adapters.earlier
    return sections


def is_recovered(report: Report) -> bool:
    """Return True if weights were trained after pruning."""
    adapters = report.adapters
    while adapters is not None and not adapters.modules:
        adapters = adapters.earlier
    return report.recovery is not None or adapters is not None


def _adapter_sentences(adapters: Adapters) -> list[str]:
    scales, held_out = adapters.method == "scales", bool(adapters.settings.get("held_out"))
    if adapters.measured is None:
        measured = "held-out samples"
    elif held_out:
        measured = plural(adapters.measured, "held-out sample")
    else:
        measured = f"{plural(adapters.measured, 'sample')} of those it was trained on"
    if not adapters.modules:
        tried = "Fitting scales" if scales else "LoRA"
        return [f"{tried} was tried, and no epoch was better on {measured}: the weights are as they were."]
    how = "scales of the inputs and outputs of" if scales else f"LoRA of rank {adapters.rank} on"
    trained = plural((adapters.samples or 0) - ((adapters.measured or 0) if held_out else 0), "sample")
    unknown = " (whether it had seen them before is not known)" if scales else ""
    seen = {None: unknown, True: " that it had seen before", False: " that it had not seen before"}[adapters.seen]
    epochs = adapters.epochs or 0
    sentences = [
        f"Recovered by {how} {plural(adapters.modules, 'linear module')}, merged; {trained}{seen}, {epochs:.3g} "
        f"epoch{'' if epochs == 1 else 's'} ({plural(adapters.steps, 'step')}), "
        f"{adapters.parameters} parameters; zeros stay zero."
    ]
    if adapters.loss_before is not None and adapters.loss_after is not None:
        loss = "Divergence from the dense model" if scales else "Loss"
        more = "" if held_out else "; other samples may gain less: measure it by evaluate --against MODEL"
        sentences.append(f"{loss} on {measured}: {adapters.loss_before:.4f} → {adapters.loss_after:.4f}{more}.")
    return sentences
