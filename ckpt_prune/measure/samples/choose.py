"""The calibration samples that options ask for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_prune.architectures.context import context_length
from ckpt_prune.architectures.model import Model
from ckpt_prune.common.errors import NoneLeftError, UserError
from ckpt_prune.measure.samples.audio import AudioSamples, find_audio
from ckpt_prune.measure.samples.image_files import ImageFiles, choose_images, find_images
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples, PatchSamples
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.samples.text import (
    add_frame,
    check_vocabulary,
    choose_windows,
    count_frame_tokens,
    load_tokenizer,
    read_text,
    tokenise_text,
)
from ckpt_prune.options import ImageOptions, SampleOptions

DEFAULT_WINDOWS, MOST_IMAGES = 128, 4000
"""Samples where none are asked for: windows, and at most so many of the images there are (CORP's number)."""


def choose_samples(
    model: Model,
    calibration: SampleOptions,
    images: ImageOptions,
    *,
    trust: bool = False,
    most: int | None = None,
    skip: int = 0,
    say: Callable[[str], None],
) -> Samples:
    """The calibration samples that options ask for.

    Args:
        model: whose tokenizer or image processor reads them.
        calibration: which windows, or how many images.
        images: which images.
        trust: run the image processor's own code.
        most: samples where none are asked for: so many, or all there are if these are fewer. By default 128 windows,
            and at most 4000 images.
        skip: so many were chosen before, and others are wanted.
        say: told in a line what could not be read, and that there are fewer samples than asked for: all are used.

    Raises:
        UserError: data of the wrong kind, unreadable or none, or a window longer than the model's context.
    """
    family, folder = model.family, model.checkpoint.path
    if family.modality == "image":
        if images.images is None:
            raise UserError(f"{folder} reads images: give --images DIR")
        if calibration.window is not None or calibration.bos != "auto":
            raise UserError("--window and --bos are for text: they do not go with --images")
        return _images(model, calibration, images, trust, most or MOST_IMAGES, skip, say)
    if family.modality == "audio":
        return _audio(model, calibration, images, most or DEFAULT_WINDOWS, skip, say)
    if images.images is not None or images.audio is not None:
        raise UserError(f"{folder} reads text: give --text FILE")
    window = calibration.window or model.tokens
    limit = context_length(model.config)
    if limit is not None and window > limit:
        raise UserError(f"--window {window} is longer than the model's context of {limit} tokens")
    tokenizer = load_tokenizer(folder)
    # What generates text reads one long text; others read each window between the tokenizer's own tokens.
    if not family.causal and calibration.bos != "auto":
        raise UserError("--bos is for causal language models: others read windows between the tokenizer's own tokens")
    frame = 0 if family.causal else count_frame_tokens(tokenizer)
    stream = tokenise_text(tokenizer, read_text(calibration.text), bos=calibration.bos if family.causal else "never")
    wanted = calibration.samples or most or DEFAULT_WINDOWS
    windows = choose_windows(
        stream,
        samples=wanted,
        window=window,
        seed=calibration.seed,
        choose=calibration.choose,
        frame=frame,
        skip=skip,
    )
    windows = add_frame(windows, tokenizer) if frame else windows
    check_vocabulary(windows, model.config)
    if len(windows) < wanted and (_expected(calibration, skip) or most is None):
        name = str(calibration.text[0]) if len(calibration.text) == 1 else "the text"
        say(_all_used(f"{name} has {len(windows)} window{'s' * (len(windows) != 1)} of {window} tokens", skip, wanted))
    return TokenWindows(windows)


@dataclass(frozen=True)
class Fresh:
    """What a pruned model is fitted to.

    Attributes:
        samples: the samples.
        seen: whether it was pruned on these, or fitted to them before; None where that is not known.
    """

    samples: Samples
    seen: bool | None


def choose_fresh_samples(
    model: Model,
    calibration: SampleOptions,
    images: ImageOptions,
    used: Samples | Sequence[tuple[int, str]] | None,
    *,
    trust: bool = False,
    most: int | None = None,
    say: Callable[[str], None],
) -> Fresh:
    """Samples that a model was not pruned on, as far as there are others of the same choice.

    To those that it was pruned on it is fitted already: it is nearer to the dense model there than on any others.

    Args:
        model: as of `choose_samples`, as are those that are not named here.
        calibration: which, and how many.
        images: which images.
        used: what it was pruned on, and fitted to after that, in turn: the samples, or their numbers and fingerprints;
            None where they are not known.
        trust: run the image processor's own code.
        most: samples where none are asked for.
        say: told in a line where there are fewer others than asked for, or none, or where samples are chosen in another
            way than those that the model has seen.

    Raises:
        UserError: as of `choose_samples`.
    """

    def choose(asked: SampleOptions, skip: int = 0, say: Callable[[str], None] = lambda _line: None) -> Samples | None:
        try:
            return choose_samples(model, asked, images, trust=trust, most=most, skip=skip, say=say)
        except NoneLeftError:
            return None

    skip, seen = 0, None if used is None else False
    if isinstance(used, Sequence):
        for count, fingerprint in used:
            same = choose(calibration.model_copy(update={"samples": count}), skip)
            if same is not None and same.fingerprint == fingerprint:
                skip += count
            else:
                seen = None
    elif used is not None:
        skip = len(used) + len(getattr(used, "skipped", ()))
    heard: list[str] = []
    found = choose(calibration, skip, heard.append)
    if found is None or (skip and len(found) < 2):
        heard = ["there are fewer than 2 other samples than those that the model has seen: it is fitted to those again"]
        found, seen = choose(calibration), True
    elif used and seen is None:
        heard.append(
            "it is not known whether the model has seen these samples: some that it was pruned on or fitted to were "
            "chosen in another way (other data, --window, --seed or --choose)"
        )
    assert found is not None
    for line in heard:
        say(line)
    return Fresh(found, seen)


def _expected(calibration: SampleOptions, skip: int) -> bool:
    """Whether there is a reason to say that there are fewer samples: they were asked for, or others took some."""
    return calibration.samples is not None or skip > 0


def _all_used(there_are: str, skip: int, wanted: int) -> str:
    beyond = f" beside the {skip} that the model has seen" if skip else ""
    return f"{there_are}{beyond}: all are used, not {wanted}"


def _audio(
    model: Model, calibration: SampleOptions, options: ImageOptions, most: int, skip: int, say: Callable[[str], None]
) -> Samples:
    folder = model.checkpoint.path
    if options.audio is None:
        raise UserError(f"{folder} reads audio: give --audio DIR")
    if calibration.window is not None or calibration.bos != "auto":
        raise UserError("--window and --bos are for text: they do not go with --audio")
    found, wanted = find_audio(options.audio), calibration.samples or most
    count = min(len(found) - skip, wanted)
    if count < wanted and _expected(calibration, skip):
        say(_all_used(f"{options.audio} has {count} sound{'s' * (count > 1)} to calibrate on", skip, wanted))
    files = ImageFiles(tuple(found))
    chosen = choose_images(files, samples=count, seed=calibration.seed, choose=calibration.choose, skip=skip)
    shape = {name: model.dimension(name) for name in ("channels", "frames")}
    return AudioSamples(list(chosen.paths), folder, **shape, tokens=model.tokens)


def _images(
    model: Model,
    calibration: SampleOptions,
    options: ImageOptions,
    trust: bool,
    most: int,
    skip: int,
    say: Callable[[str], None],
) -> Samples:
    assert options.images is not None
    processor = load_processor(model.checkpoint.path, trust_remote_code=trust)
    found = find_images(options.images, labels=options.labels, split="calib")
    wanted = calibration.samples or most
    count = min(len(found.paths) - skip, wanted)
    if count < wanted and _expected(calibration, skip):
        say(_all_used(f"{options.images} has {count} image{'s' * (count > 1)} to calibrate on", skip, wanted))
    chosen = choose_images(found, samples=count, seed=calibration.seed, choose=calibration.choose, skip=skip)
    reads = PatchSamples if model.family.flat else ImageSamples
    samples = reads(chosen, processor, tokens=model.image_tokens, max_corrupt=options.max_corrupt)
    if samples.skipped:
        named = ", ".join(samples.skipped[:3]) + (", ..." if len(samples.skipped) > 3 else "")
        say(f"{len(samples.skipped)} of {count} images do not decode and are left out: {named}")
    return samples
