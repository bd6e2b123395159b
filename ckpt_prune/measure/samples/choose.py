"""Choose the calibration samples that options name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ckpt_prune.common.errors import NoneLeftError, UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.measure.samples.audio import AudioSamples, find_audio
from ckpt_prune.measure.samples.image_files import ImageFiles, choose_images, find_all_images
from ckpt_prune.measure.samples.image_processor import image_settings, load_processor
from ckpt_prune.measure.samples.image_text import ImageTextWindows, Reader, pack_windows, read_talks
from ckpt_prune.measure.samples.images import ImageSamples, makes_one_size
from ckpt_prune.measure.samples.pairs import PairReader, PairWindows, choose_pairs, read_pairs, reads_pairs
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.samples.text import (
    add_frame,
    check_vocabulary,
    count_frame_tokens,
    draw_windows,
    mix_windows,
    read_documents,
    read_file,
    read_text,
    tokenise_text,
    tokenizer_of,
)
from ckpt_prune.measure.samples.tower_images import TowerImages, check_reads_whole
from ckpt_prune.model.composites import SEEING, load_composite
from ckpt_prune.model.context import context_length
from ckpt_prune.model.family import DATA_OPTIONS, Modality
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions

DEFAULT_WINDOWS, DEFAULT_PAIRS, MOST_IMAGES = 128, 1024, 4000
"""Samples if no number is asked for: windows or sounds, pairs, and at most so many images (CORP's number)."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Say = Callable[[str], None]


def asked_data(modality: Modality) -> str:
    """Return the option for data of a kind, as a user writes it."""
    return f"{DATA_OPTIONS[modality]} {'DIR' if modality in ('image', 'audio') else 'FILE'}"


def usual_samples(model: Model, *, audio: bool | None = None) -> int:
    """Return how many samples are taken if no number is asked for; at most so many of images.

    Args:
        model: a part or a whole model, which reads its kind of data.
        audio: whether the sources of its pairs are sounds; None: as the description of the whole says.
    """
    modality = model.family.modality
    if modality != "pairs":
        return MOST_IMAGES if modality == "image" else DEFAULT_WINDOWS
    return DEFAULT_WINDOWS if (_hears(model) if audio is None else audio) else DEFAULT_PAIRS


def _hears(model: Model) -> bool:
    """Return whether a model is a part of one that is described to hear."""
    within = model.checkpoint.within
    parts = () if within is None else load_composite(within.whole.config).parts.values()
    return any((part.described or {}).get("modality") == "audio" for part in parts)


def check_kind(model: Model, options: SampleOptions) -> str:
    """Refuse data of another kind than the model reads, and return the option for its own."""
    folder, modality = model.checkpoint.path, model.family.modality
    given = {"image": bool(options.images), "audio": options.audio is not None}
    needed = asked_data(modality)
    if modality == "pairs":
        if options.talks is None:
            raise UserError(reads_pairs(folder, audio=_hears(model)))
        return needed
    if modality == "audio" and options.talks is not None and model.checkpoint.within is not None:
        return "--data FILE"  # the sounds of pairs
    if options.talks is not None:
        if modality == "audio" or model.checkpoint.within is None:
            raise UserError(f"--data is of pairs, or of images with text, which {folder} does not read: give {needed}")
        return "--data FILE"
    within = model.checkpoint.within
    alone = None if within is None else load_composite(within.whole.config).part(within.part).alone
    if alone is not None:
        raise UserError(f"{folder}: {alone}: give --data FILE, rows of images with their text, in place of --text")
    if any(given.values()) if modality == "text" else not given[modality]:
        or_pairs = ", or --data FILE of audio with its text" if _hears(model) else ""
        raise UserError(f"{folder} reads {modality}{'s' * (modality == 'image')}: give {needed}{or_pairs}")
    return needed


def choose_samples(
    model: Model,
    options: SampleOptions,
    *,
    trust: bool = False,
    most: int | None = None,
    skip: int = 0,
    say: Say,
) -> Samples:
    """Choose the calibration samples that options name.

    Args:
        model: its tokenizer, image processor or feature extractor reads them.
        options: which windows, images or sounds, and how many.
        trust: run the image processor's own code.
        most: samples if no number is asked for, or all there are if these are fewer. By default 128 windows or sounds,
            and 4000 images.
        skip: number of samples that were chosen before; others are chosen now.
        say: takes a line about what could not be read, or about fewer samples than asked for, which are all used.

    Raises:
        NoneLeftError: there are no other samples than those that are skipped.
    """
    needed, folder, modality = check_kind(model, options), model.checkpoint.path, model.family.modality
    if modality == "pairs":
        return _choose_pairs(model, options, most, skip, say)
    if options.talks is not None and modality == "text":
        return _choose_talks(model, options, trust, most, skip, say)
    if modality == "text":
        return _choose_windows(model, options, most, skip, say)
    if options.window is not None or options.bos != "auto":
        raise UserError(f"--window and --bos are for text: they do not go with {needed.split()[0]}")
    if modality == "image":
        return _choose_images(model, options, trust, most or MOST_IMAGES, skip, say)
    place = options.talks or options.audio
    assert place is not None
    paths = [pair.source for pair in read_pairs(place, audio=True)] if options.talks else find_audio(place)
    sounds = ImageFiles(tuple(path for path in paths if isinstance(path, Path)))
    chosen = _choose_files(sounds, str(place), "sound", options, most or DEFAULT_WINDOWS, skip, say)
    shape = {name: model.dimension(name) for name in ("channels", "frames")}
    return AudioSamples(list(chosen.paths), folder, **shape, tokens=model.tokens)


def _choose_windows(model: Model, options: SampleOptions, most: int | None, skip: int, say: Say) -> TokenWindows:
    causal, window = model.family.causal, _window_of(model, options)
    tokenizer = tokenizer_of(model.checkpoint)
    # What generates text reads one long text; others read each window between the tokenizer's own tokens.
    if not causal and options.bos != "auto":
        raise UserError("--bos is for causal language models: others read windows between the tokenizer's own tokens")
    frame = 0 if causal else count_frame_tokens(tokenizer)
    if not options.text:
        read_text(())
    bos = options.bos if causal else "never"
    requested = options.samples or most or DEFAULT_WINDOWS
    if options.choose in ("offsets", "documents"):
        return _draw_windows(model, options, tokenizer, samples=requested, window=window, frame=frame, skip=skip)
    texts = [read_file(file, tokenizer) for file in options.text]
    windows, shares = mix_windows(
        [tokenise_text(tokenizer, text, bos=bos) for text, _ in texts],
        samples=requested,
        window=window,
        seed=options.seed,
        choose="first" if options.choose == "first" else "random",
        frame=frame,
        skip=skip,
    )
    windows = add_frame(windows, tokenizer) if frame else windows
    check_vocabulary(windows, model.config)
    count = len(windows)
    if count < requested and (most is None or _should_tell(options, skip)):
        name = str(options.text[0]) if len(options.text) == 1 else "the text"
        say(_all_used(f"{name} has {count} window{'s' * (count != 1)} of {window} tokens", skip, requested))
    origin = [
        f"{share} of {file.name}{f' ({talks:,} by the chat template)' if talks else ''}"
        for file, share, (_, talks) in zip(options.text, shares, texts, strict=True)
    ]
    return TokenWindows(windows, ", ".join(origin))


def _choose_talks(
    model: Model, options: SampleOptions, trust: bool, most: int | None, skip: int, say: Say
) -> ImageTextWindows:
    """Put conversations with images into windows, in random order unless the first are asked for."""
    assert options.talks is not None
    assert model.checkpoint.within is not None
    if options.bos != "auto" or options.choose in ("offsets", "documents"):
        raise UserError("--bos, --choose offsets and --choose documents are for --text: they do not go with --data")
    requested, window = options.samples or most or DEFAULT_WINDOWS, _window_of(model, options)
    seed = None if options.choose == "first" else options.seed
    reader = Reader(model.checkpoint.within.whole, trust=trust)
    windows = pack_windows(
        reader, options.talks, samples=requested, window=window, seed=seed, skip=skip, config=model.config
    )
    if len(windows) < requested and (most is None or _should_tell(options, skip)):
        count = plural(len(windows), "window")
        say(_all_used(f"{options.talks} has {count} of {windows.tokens} tokens", skip, requested))
    return windows


def _choose_pairs(model: Model, options: SampleOptions, most: int | None, skip: int, say: Say) -> PairWindows:
    """Choose pairs in random order unless the first are asked for."""
    within = model.checkpoint.within
    assert options.talks is not None
    assert within is not None
    if options.bos != "auto" or options.choose in ("offsets", "documents"):
        raise UserError("--bos, --choose offsets and --choose documents are for --text: they do not go with --data")
    stack = load_composite(within.whole.config).part(within.part).stack
    assert stack in ("encoder", "decoder")
    reader, seed = PairReader(within.whole, _window_of(model, options)), options.seed
    requested = options.samples or most or usual_samples(model, audio=reader.audio)
    chosen = choose_pairs(
        reader, options.talks, stack, samples=requested, seed=None if options.choose == "first" else seed, skip=skip
    )
    if len(chosen) < requested and _should_tell(options, skip):
        say(_all_used(f"{options.talks} has {plural(len(chosen), 'pair')}", skip, requested))
    return chosen


def _window_of(model: Model, options: SampleOptions) -> int:
    """Return the tokens of a window; UserError if the model cannot read so many."""
    window, limit = options.window or model.tokens, context_length(model.config)
    if limit is not None and window > limit:
        raise UserError(f"--window {window} is longer than the model's context of {limit} tokens")
    return window


def _draw_windows(
    model: Model,
    options: SampleOptions,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    samples: int,
    window: int,
    frame: int,
    skip: int,
) -> TokenWindows:
    """Draw windows of a text, or of its documents, at random places."""
    if len(options.text) > 1:
        raise UserError(f"--choose {options.choose} draws from one text: give one --text")
    (file,) = options.text
    bos = options.bos if model.family.causal else "never"
    inside = options.choose == "documents"
    texts = read_documents(file, tokenizer) if inside else [read_file(file, tokenizer)[0]]
    tokens: dict[int, Tensor] = {}

    def length(at: int) -> int:
        tokens[at] = tokenise_text(tokenizer, texts[at], bos=bos) if texts[at].strip() else torch.zeros(0).long()
        return len(tokens[at])

    places = draw_windows(length, len(texts), samples=samples, window=window - frame, seed=options.seed, skip=skip)
    windows = torch.stack([tokens[at][start : start + window - frame] for at, start in places])
    windows = add_frame(windows, tokenizer) if frame else windows
    check_vocabulary(windows, model.config)
    return TokenWindows(windows, f"{len(windows)} of {file.name} at random {'documents' if inside else 'offsets'}")


def _choose_images(
    model: Model,
    options: SampleOptions,
    trust: bool,
    most: int,
    skip: int,
    say: Say,
) -> ImageSamples:
    processor = load_processor(model.checkpoint.path, trust_remote_code=trust)
    if options.talks is not None:
        place = str(options.talks)
        files = ImageFiles(tuple(sorted({image for talk in read_talks(options.talks) for image in talk.images})))
    else:
        files = find_all_images(options.images, labels=options.labels, split="calib")
        place = " and ".join(map(str, options.images))
    chosen = _choose_files(files, place, "image", options, most, skip, say)
    samples = (
        TowerImages(chosen, processor, model, max_corrupt=options.max_corrupt)
        if _reads_tiles(model, processor)
        else ImageSamples(chosen, processor, tokens=model.image_tokens, max_corrupt=options.max_corrupt)
    )
    if samples.skipped:
        named = ", ".join(samples.skipped[:3]) + (", ..." if len(samples.skipped) > 3 else "")
        say(f"{len(samples.skipped)} of {len(chosen.paths)} images do not decode and are left out: {named}")
    return samples


def _reads_tiles(model: Model, processor: Any) -> bool:
    """Return whether a tower is handed tiles, patches or images of several sizes by the model that it is a part of."""
    within = model.checkpoint.within
    if within is None or load_composite(within.whole.config).auto not in SEEING:
        return False
    if not makes_one_size(processor, image_settings(within.whole.config["model_type"])):
        return True
    check_reads_whole(model, processor)
    return False


def _choose_files(
    files: ImageFiles, folder: str, noun: str, options: SampleOptions, most: int, skip: int, say: Say
) -> ImageFiles:
    if options.choose in ("offsets", "documents"):
        raise UserError(f"--choose {options.choose} is for text: say random or first")
    requested = options.samples or most
    count = min(len(files.paths) - skip, requested)
    if count < requested and _should_tell(options, skip):
        say(_all_used(f"{folder} has {count} {noun}{'s' * (count > 1)} to calibrate on", skip, requested))
    how: Literal["first", "random"] = "first" if options.choose == "first" else "random"
    return choose_images(files, samples=count, seed=options.seed, choose=how, skip=skip)


def _should_tell(options: SampleOptions, skip: int) -> bool:
    """Return True if a user may wonder about fewer samples: a number was asked for, or others took some."""
    return options.samples is not None or skip > 0


def _all_used(count: str, skip: int, requested: int) -> str:
    others = f" beside the {skip} that the model has seen" if skip else ""
    return f"{count}{others}: all are used, not {requested}"


@dataclass(frozen=True)
class FreshSamples:
    """Samples that a pruned model is fitted to.

    `seen` says whether the model was pruned on these, or fitted to them before; None if that is not known.
    """

    samples: Samples
    seen: bool | None


def choose_fresh_samples(
    model: Model,
    options: SampleOptions,
    used: Samples | Sequence[tuple[int, str]] | None,
    *,
    trust: bool = False,
    most: int | None = None,
    say: Say,
) -> FreshSamples:
    """Choose samples that a model was not pruned on, if there are others of the same choice.

    A model is fitted to the samples that it was pruned on already: it is nearer to the dense model there than on any
    others. `used` is what the model was pruned on, and fitted to after that, in turn: the samples, or their numbers and
    fingerprints; None if they are not known. All other arguments are those of `choose_samples`; `say` also takes a line
    if there are no other samples, or if they are chosen in another way than those that the model has seen.
    """

    def choose(given: SampleOptions, skip: int = 0, say: Say = lambda _line: None) -> Samples | None:
        try:
            return choose_samples(model, given, trust=trust, most=most, skip=skip, say=say)
        except NoneLeftError:
            return None

    skip, seen = 0, None if used is None else False
    if isinstance(used, Sequence):
        for count, fingerprint in used:
            same = choose(options.model_copy(update={"samples": count}), skip)
            if same is not None and same.fingerprint == fingerprint:
                skip += count
            else:
                seen = None
    elif used is not None:
        skip = len(used) + len(getattr(used, "skipped", ()))
    lines: list[str] = []
    samples = choose(options, skip, lines.append)
    if samples is None or (skip and len(samples) < 2):
        lines = ["there are fewer than 2 other samples than those that the model has seen: it is fitted to those again"]
        samples, seen = choose(options), True
    elif used and seen is None:
        lines.append(
            "it is not known whether the model has seen these samples: some that it was pruned on or fitted to were "
            "chosen in another way (other data, --window, --seed or --choose)"
        )
    assert samples is not None
    if not seen and options.choose in ("offsets", "documents"):
        seen = None  # they may overlap
    for line in lines:
        say(line)
    return FreshSamples(samples, seen)
