"""`ckpt_prune.calibrate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.types import AnyModel, AnyPath, Bos, Choose, ComputeDtype, Texts
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.measure.statistics.files import STATISTICS
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options import CalibrateOptions, PartName, checked, has_data
from ckpt_prune.parallel.group import process_group

if TYPE_CHECKING:
    from ckpt_prune.measure.samples.samples import Samples
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.runner.estimate import Estimate

EFFECTS = "effects"
"""What `collect` calls the effects of single sites."""
CENTRED = "centred"
"""What `collect` calls moments of keys less their mean, which are nothing without the others."""
NEEDS = {CENTRED: ("logits", "keys are those of logits"), EFFECTS: ("gram", "need Grams")}
"""What `collect` takes only together with something else, and why."""


@dataclass(frozen=True)
class ForeseenStatistics:
    """What a calibration will measure, and what it will take.

    Attributes:
        folder: that it will write.
        modality: what the model reads: text, image or audio.
        samples: windows, images or sounds.
        window: tokens of each.
        blocks: of the model.
        folds: of the samples.
        collect: kinds of statistics.
        bytes: that the folder will take.
        estimate: time, memory and disk.
    """

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
        """As `--json` prints it: what `Statistics.summary` has of it, and the estimate."""
        return {
            "written": False,
            "modality": self.modality,
            "samples": self.samples,
            "window": self.window,
            "tokens": self.samples * self.window,
            "folds": self.folds,
            "collect": list(self.collect),
            "blocks": self.blocks,
            "bytes": self.bytes,
            "estimate": self.estimate.data(),
        }


def calibrate(
    model: AnyModel,
    *,
    output: AnyPath,
    text: Texts = (),
    images: AnyPath | None = None,
    labels: AnyPath | None = None,
    max_corrupt: float = 0.05,
    audio: AnyPath | None = None,
    samples: int | None = None,
    window: int | None = None,
    seed: int = 0,
    choose: Choose = "random",
    bos: Bos = "auto",
    compute_dtype: ComputeDtype = "auto",
    folds: int | None = None,
    collect: str | Sequence[str] | None = None,
    active_above: float = 1e-6,
    shard: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    family: AnyPath | None = None,
    part: PartName | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> "Statistics | ForeseenStatistics":
    """Measure a dense model's activation statistics, as `ckpt-prune calibrate` does, one block in memory at a time.

    Args:
        model: a folder, a Hub id, or what a function of this package has written.
        output: the statistics folder to write.
        text: files to run a language model on.
        images: folder of images to run a vision model on, in place of text.
        labels: CSV with a column file and perhaps split (calib).
        max_corrupt: share of the images that may fail to decode.
        audio: folder of audio to run an encoder of speech on.
        samples: windows, or images; None for 128 windows, or all images up to 4000.
        window: tokens per window; None for the model's context, at most 2048.
        seed: of the random choice of samples.
        choose: random samples, or the first ones.
        bos: begin-of-sequence token before the text.
        compute_dtype: in which blocks run; auto for bfloat16 where the model is stored in it and the device is faster
            in it, else float32.
        folds: runs of samples whose moments are kept apart.
        collect: kinds of statistics; None for all that the model's family can use but `centred`, `rotary` and `taylor`,
            `effects` only of up to `measured_effects.SHALLOW` blocks. `queries` and `values`, what recipes need that
            weigh these by effect, are collected on request only.
        active_above: absolute value above which an input of a projection counts as active.
        shard: "I/N": measure only the I-th of N equal shares of the samples, to be added to the others later.
        dry_run: check everything, and measure and write nothing.
        overwrite: replace an existing statistics folder.
        family: file of a description of the model's family, where this version has none.
        part: which part of a model that is made of several: text, vision or encoder.
        trust_remote_code: accept a model that asks for code of its own.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars and notices on stderr.

    Returns:
        The statistics, which other functions take where they ask for some; of a dry run what they will be.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    options = checked(CalibrateOptions, locals())
    # Before torch is imported, what can be told without it.
    if not has_data(options, options):
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
    from ckpt_prune.runner.checks import check_one_basis
    from ckpt_prune.runner.estimate import estimate_calibration
    from ckpt_prune.stages.spaces.effects.gradients import add_gradients
    from ckpt_prune.stages.spaces.effects.measured import measure_effects, measured_singly
    from ckpt_prune.verification.forward_pass import check_forward

    out, trust = options.output, options.trust_remote_code
    with show_progress(progress):
        say = Notices()
        target = resolve_device(options.device)
        source = open_model(options.model, Opening.of(options))
        checkpoint, described = source.checkpoint, source.family
        known = list_collectable(source)
        again = source.has_remote_code
        inside = [space for space in described.columns if space not in described.consumers and not again]
        usual = [*list_collected_by_default(source), *([EFFECTS] if measured_singly(source) else [])]
        effects = [] if described.experts is not None or again else [EFFECTS]
        what = f"{described.model_type}{' with code of its own' if again else ''}"
        asked = _kinds(options.collect, (*known, *effects), inside, usual, what)
        kinds = tuple(kind for kind in known if kind in asked)
        check_source(source)
        check_one_basis(source)
        refuse_overlap(checkpoint.path, out)
        refuse_inside(out, [options.images, options.audio, options.labels, *options.text])
        chosen: Samples = choose_samples(source, options, options, trust=trust, say=say)
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
                (*kinds, *((EFFECTS,) if EFFECTS in asked else ())),
                size,
                estimate,
            )
        if estimate.warning is not None:
            say(estimate.warning)

        def finish(found: "Statistics") -> None:
            wanted = {*described.consumers, *asked, *(described.logits if "logits" in kinds else ())}
            held = [space for space in described.spaces if space in wanted]
            if "fisher" in kinds:
                found = add_gradients(source, found, chosen, spaces=held, device=target, compute_dtype=dtype)
            if EFFECTS in asked:
                effects = measure_effects(source, found, chosen, spaces=held, device=target, compute_dtype=dtype)
                process_group().on_first(lambda: record_effects(found, effects))

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
    """What `collect` asks for, in a fixed order; vectors always.

    Args:
        text: the option; None for `usual`.
        kinds: of statistics that the model's family can use.
        inside: spaces that stand inside others.
        usual: what is collected by default.
        family: its name, in words.
    """
    if text is None:
        return usual
    known = (*kinds, *inside)
    asked = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in asked if part not in known]
    if unknown or not asked:
        raise UserError(f"--collect {text}: of a {family}, one or more of {','.join(known)} can be collected")
    for kind, (needed, why) in (dict.fromkeys(inside, ("fisher", "are tried out with the metric")) | NEEDS).items():
        if kind in asked and needed not in asked:
            raise UserError(f"--collect {text}: {kind} {why}, add {needed}")
    return [kind for kind in known if kind in asked or kind == "moments"]
