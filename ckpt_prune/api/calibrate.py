"""`ckpt_prune.calibrate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.function import takes
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.measure.statistics.files import STATISTICS
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options.commands import CalibrateOptions
from ckpt_prune.options.data import has_data
from ckpt_prune.parallel.group import process_group

if TYPE_CHECKING:
    from ckpt_prune.measure.samples.samples import Samples
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.runner.estimate import Estimate

EFFECTS = "effects"
"""The value of `collect` for the effects of single sites."""
CENTRED = "centred"
"""The value of `collect` for moments of keys less their mean. They need the others."""
NEEDS = {CENTRED: ("logits", "keys are those of logits"), EFFECTS: ("gram", "need Grams")}
"""Value of `collect` → the value that it needs besides, and why."""


@dataclass(frozen=True)
class ForeseenStatistics:
    """A calibration that is checked but not run: what it would measure, its bytes on disk, and its `estimate`."""

    folder: Path
    modality: str
    samples: int
    window: int
    blocks: int
    folds: int
    collect: tuple[str, ...]
    bytes: int
    estimate: "Estimate"

    def summary(self) -> dict[str, Any]:
        """Return what `--json` prints: the keys of `Statistics.summary` that are known, and the estimate."""
        names = ("modality", "samples", "window", "folds", "collect", "blocks", "bytes")
        figures = {name: getattr(self, name) for name in names}
        tokens = self.samples * self.window
        return {
            "written": False,
            **figures,
            "collect": list(self.collect),
            "tokens": tokens,
            "estimate": self.estimate.data(),
        }


@takes(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> "Statistics | ForeseenStatistics":
    """Run the dense MODEL over calibration text or images and write its activation statistics.

    One block is in memory at a time. Any recipe can use the statistics for the same model, and `ckpt-prune statistics
    add` adds two folders that were measured on different data. Images go through the checkpoint's own image processor.

    A long run starts with an estimate of time, memory and disk; --dry-run always prints one.
    """
    # Refuse what can be refused before torch is imported.
    if not has_data(options):
        raise UserError("calibrate needs --text FILE, --images DIR for a vision model, or --audio DIR")
    check_supported(options.model, options.family, options.part)
    check_texts(options.text)
    if not options.overwrite:
        process_group().on_first(lambda: Staging(options.output, job="", kind=STATISTICS))

    from ckpt_prune.checkpoint.staging import refuse_inside, refuse_overlap
    from ckpt_prune.common.formatting import human_bytes
    from ckpt_prune.measure.samples.choose import choose_samples
    from ckpt_prune.measure.samples.shards import take_shard
    from ckpt_prune.measure.statistics.folder import record_effects
    from ckpt_prune.measure.statistics.measurement import (
        check_measurable,
        list_collectable,
        list_collected_by_default,
        measure_statistics,
    )
    from ckpt_prune.model.containers.checking import check_source
    from ckpt_prune.model.containers.container import container_of
    from ckpt_prune.model.containers.opening import Opening, open_model
    from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
    from ckpt_prune.runner.estimate import estimate_calibration
    from ckpt_prune.stages.shared.one_basis import check_one_basis
    from ckpt_prune.stages.spaces.effects.gradients import add_gradients
    from ckpt_prune.stages.spaces.effects.measured import measure_effects, measured_singly
    from ckpt_prune.verification.forward_pass import check_forward

    out, trust = options.output, options.trust_remote_code
    say = Notices()
    target = resolve_device(options.device)
    source = open_model(options.model, Opening.of(options))
    checkpoint, described = source.checkpoint, source.family
    collectable = list_collectable(source)
    again = source.has_remote_code
    inside = [space for space in described.columns if space not in described.consumers and not again]
    usual = [*list_collected_by_default(source), *([EFFECTS] if measured_singly(source) else [])]
    effects = [] if described.experts is not None or again else [EFFECTS]
    what = f"{described.model_type}{' with code of its own' if again else ''}"
    chosen_kinds = _kinds(options.collect, (*collectable, *effects), inside, usual, what)
    kinds = tuple(kind for kind in collectable if kind in chosen_kinds)
    check_source(source)
    check_one_basis(source)
    refuse_overlap(checkpoint.path, out)
    refuse_inside(out, [options.images, options.audio, options.labels, *options.text])
    chosen: Samples = choose_samples(source, options, trust=trust, say=say)
    if options.shard is not None:
        if "taylor" in kinds:
            raise UserError("--shard: taylor, absolute values of sums over all samples, does not add: leave it out")
        chosen = take_shard(chosen, options.shard)
    process_group().on_first(checkpoint.check_finite)
    check_forward(source, chosen, say)
    dtype = resolve_compute_dtype(options.compute_dtype, target, source.dtype)
    process_group().agree(
        {
            "model": checkpoint.fingerprint,
            "text" if described.modality == "text" else "set of images": chosen.fingerprint,
            "job": [kinds, options.folds, str(dtype), options.active_above],
        }
    )

    folds = options.folds or 1
    estimate = estimate_calibration(source, chosen, kinds, folds, target, dtype)
    if options.dry_run:
        size = process_group().once(
            lambda: check_measurable(source, chosen, out, folds=folds, collect=kinds, overwrite=options.overwrite)
        )
        return ForeseenStatistics(
            out,
            described.modality,
            len(chosen),
            chosen.tokens,
            source.blocks,
            folds,
            (*kinds, *((EFFECTS,) if EFFECTS in chosen_kinds else ())),
            size,
            estimate,
        )
    if estimate.warning is not None:
        say(estimate.warning)

    def finish(statistics: "Statistics") -> None:
        wanted_spaces = {*described.consumers, *chosen_kinds, *(described.logits if "logits" in kinds else ())}
        tried = [space for space in described.spaces if space in wanted_spaces]
        if "fisher" in kinds:
            statistics = add_gradients(source, statistics, chosen, spaces=tried, device=target, compute_dtype=dtype)
        if EFFECTS in chosen_kinds:
            effects = measure_effects(source, statistics, chosen, spaces=tried, device=target, compute_dtype=dtype)
            process_group().on_first(lambda: record_effects(statistics, effects))

    return measure_statistics(
        source,
        chosen,
        out,
        seed=options.seed,
        folds=folds,
        collect=kinds,
        device=target,
        compute_dtype=dtype,
        overwrite=options.overwrite,
        skeleton=container_of(source).skeleton() if again else None,
        announce=lambda size: say(f"{out} will take {human_bytes(size)}"),
        finish=finish,
        active_above=options.active_above,
    )


def _kinds(text: str | None, kinds: Sequence[str], inside: Sequence[str], usual: list[str], family: str) -> list[str]:
    """Return the kinds of statistics to collect, in a fixed order and always with moments.

    Args:
        text: the option `collect`; None for `usual`.
        kinds: those that the model's family can use.
        inside: spaces inside other spaces.
        usual: what is collected by default.
    """
    if text is None:
        return usual
    collectable = (*kinds, *inside)
    named_kinds = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in named_kinds if part not in collectable]
    if unknown or not named_kinds:
        raise UserError(f"--collect {text}: choose from {','.join(collectable)} ({family})")
    for kind, (needed, why) in (dict.fromkeys(inside, ("fisher", "are tried out with the metric")) | NEEDS).items():
        if kind in named_kinds and needed not in named_kinds:
            raise UserError(f"--collect {text}: {kind} {why}, add {needed}")
    return [kind for kind in collectable if kind in named_kinds or kind == "moments"]
