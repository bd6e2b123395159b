"""`calibrate`: statistics of a dense model, measured once for any recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.checkpoint.staging import refuse_inside, refuse_overlap
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.samples.shards import take_shard
from ckpt_prune.measure.statistics.folder import Statistics, record_effects
from ckpt_prune.measure.statistics.measurement import (
    check_measurable,
    list_collectable,
    list_collected_by_default,
    measure_statistics,
)
from ckpt_prune.model.containers.checking import check_source
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import CalibrateOptions
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.checks import check_pairs
from ckpt_prune.runner.estimate import Estimate, estimate_calibration
from ckpt_prune.stages.shared.one_basis import check_one_basis
from ckpt_prune.stages.spaces.effects.gradients import add_gradients
from ckpt_prune.stages.spaces.effects.measured import measure_effects, measured_singly
from ckpt_prune.verification.forward_pass import check_forward

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
    estimate: Estimate

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


@dataclass(frozen=True)
class _Measurement:
    """A measurement that is ready to run.

    Attributes:
        named: all kinds that are collected, effects and spaces inside others among them.
        kinds: those that sums over tokens hold.
    """

    model: Model
    named: Sequence[str]
    kinds: tuple[Any, ...]
    samples: Samples
    folds: int
    device: torch.device
    dtype: torch.dtype

    def add_effects(self, statistics: Statistics) -> None:
        """Add what errors of every layer do to the model's output, as far as that is wanted."""
        family = self.model.family
        names = {*family.consumers, *self.named, *(family.logits if "logits" in self.kinds else ())}
        how: dict[str, Any] = {
            "spaces": [space for space in family.spaces if space in names],
            "device": self.device,
            "compute_dtype": self.dtype,
        }
        if "fisher" in self.kinds:
            statistics = add_gradients(self.model, statistics, self.samples, **how)
        if EFFECTS in self.named:
            effects = measure_effects(self.model, statistics, self.samples, **how)
            process_group().on_first(lambda: record_effects(statistics, effects))


def calibrate_model(options: CalibrateOptions) -> Statistics | ForeseenStatistics:
    """Measure statistics, or say what that takes (`ckpt_prune.calibrate`)."""
    out, say = options.output, Notices()
    check_pairs(options)
    work = _read(options, say)
    model, samples = work.model, work.samples
    estimate = estimate_calibration(model, samples, work.kinds, work.folds, work.device, work.dtype).since_start()
    if options.dry_run:
        return _foresee(options, work, estimate)
    if estimate.warning is not None:
        say(estimate.warning)
    return measure_statistics(
        model,
        samples,
        out,
        seed=options.seed,
        folds=work.folds,
        collect=work.kinds,
        device=work.device,
        compute_dtype=work.dtype,
        overwrite=options.overwrite,
        skeleton=container_of(model).skeleton() if model.has_remote_code else None,
        announce=lambda size: say(f"{out} will take {human_bytes(size)}"),
        finish=work.add_effects,
    )


def _read(options: CalibrateOptions, say: Notices) -> _Measurement:
    """Open the model, choose what is collected and on what. Processes that do not do the same are refused."""
    device, model = resolve_device(options.device), open_model(options.model, Opening.of(options))
    named, kinds = _choose_kinds(model, options.collect)
    check_source(model)
    check_one_basis(model)
    refuse_overlap(model.checkpoint.path, options.output)
    refuse_inside(options.output, [options.audio, options.labels, options.talks, *options.images, *options.text])
    samples: Samples = choose_samples(model, options, trust=options.trust_remote_code, say=say)
    if options.shard is not None:
        if "taylor" in kinds:
            raise UserError("--shard: taylor, absolute values of sums over all samples, does not add: leave it out")
        samples = take_shard(samples, options.shard)
    process_group().on_first(model.checkpoint.check_finite)
    check_forward(model, samples, say)
    dtype = resolve_compute_dtype(options.compute_dtype, device, model.dtype)
    process_group().agree(
        {
            "model": model.checkpoint.fingerprint,
            "text" if model.family.modality == "text" else "set of images": samples.fingerprint,
            "job": [kinds, options.folds, str(dtype)],
        }
    )
    return _Measurement(model, named, kinds, samples, options.folds or 1, device, dtype)


def _choose_kinds(model: Model, asked: str | None) -> tuple[list[str], tuple[Any, ...]]:
    """Return the kinds of statistics that are named, or collected by default, and those that the sums hold."""
    family, again = model.family, model.has_remote_code
    collectable = list_collectable(model)
    inside = [space for space in family.columns if space not in family.consumers and not again]
    effects = [] if family.experts is not None or again else [EFFECTS]
    usual = [*list_collected_by_default(model), *([EFFECTS] if measured_singly(model) else [])]
    what = f"{family.model_type}{' with code of its own' if again else ''}"
    named = _kinds(asked, (*collectable, *effects), inside, usual, what)
    return named, tuple(kind for kind in collectable if kind in named)


def _foresee(options: CalibrateOptions, work: _Measurement, estimate: Estimate) -> ForeseenStatistics:
    size = process_group().once(
        lambda: check_measurable(
            work.model,
            work.samples,
            options.output,
            folds=work.folds,
            collect=work.kinds,
            overwrite=options.overwrite,
        )
    )
    return ForeseenStatistics(
        options.output,
        work.model.family.modality,
        len(work.samples),
        work.samples.tokens,
        work.model.blocks,
        work.folds,
        (*work.kinds, *((EFFECTS,) if EFFECTS in work.named else ())),
        size,
        estimate,
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
