"""Data that an exported graph is compared with PyTorch on: text, images, or noise."""

import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.sentence_modules import find_sentence_use
from ckpt_prune.common.errors import NoneLeftError, UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.datasets import standard_library
from ckpt_prune.evaluation.image_classes import class_names
from ckpt_prune.evaluation.sentences import TEXT_TOKENS
from ckpt_prune.evaluation.whole_model import config_of, read_config
from ckpt_prune.measure.samples.image_files import ImageSplit, choose_images, find_all_images, take_images
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.measure.samples.mixing import name_sources
from ckpt_prune.measure.samples.pairs import PairReader, PairWindows, choose_pairs, reads_pairs
from ckpt_prune.measure.samples.text import (
    Bos,
    add_frame,
    check_vocabulary,
    count_frame_tokens,
    load_tokenizer,
    mix_windows,
    read_file,
    tokenise_text,
    tokenizer_of,
)
from ckpt_prune.model.context import context_length
from ckpt_prune.onnx.tasks import GraphTask, Modality
from ckpt_prune.options.data import ProofOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOWS, IMAGES, WINDOW = 16, 64, 512
"""By default: windows and their length, at most the context; images."""
PAIRS = 64
FEW_WINDOWS = 1
"""Enough for a graph that is held to a tolerance: its perplexity is compared, not estimated."""
ROUNDING_SAMPLES: dict[Modality, int] = {"text": 32, "image": 32, "pairs": 128}
"""Windows, images or pairs that rounding is fitted to; pairs are shorter than windows."""
CHECKED: dict[Modality, int] = {"text": 8, "image": 128, "pairs": 32}
"""Others that sets of weights are measured on. An image is one prediction, and a few lose most: what is predicted of
ViT-Tiny by 16 is off by a factor of up to four, on either side."""
PER_TOKEN = 16
"""Characters of the standard library's text that are read for each token: enough with any tokenizer."""


@dataclass(frozen=True)
class ProofSamples:
    """Data to compare a graph and its model on. Without any: noise, on which no metric is measured."""

    windows: Tensor | None = None
    """int64 (N, T): real text, no padding."""
    images: ImageSamples | None = None
    pairs: PairWindows | None = None
    """Sources with their targets."""
    for_rounding: Tensor | ImageSamples | PairWindows | None = None
    """The data on which rounding is measured: others than those above, or the same if there are none."""
    description: dict[str, Any] | None = None
    """For the record: where from, how many, window, seed."""
    texts: Sequence[str] = ()
    """The text of each window, if there are several."""

    @property
    def seed(self) -> int:
        return int((self.description or {}).get("seed") or 0)


def choose_proof_samples(
    folder: Path,
    task: GraphTask,
    options: ProofOptions,
    *,
    trust: bool = False,
    split: ImageSplit = "eval",
    rounded: bool = False,
    windows: int = WINDOWS,
    checkpoint: Checkpoint | None = None,
) -> ProofSamples:
    """Read the text or images of the options.

    Without --text a model of text reads Python sources, and without --images a model of images noise; text is noise
    too if the folder has no tokenizer. The description says so.

    Args:
        folder: of the graph or of its model: config.json, and a tokenizer or an image processor.
        trust: run the checkpoint's own code for its config and image processor.
        split: which rows of a labels.csv with a split to take images from.
        rounded: also take samples to measure on what rounding costs.
        windows: their number by default.
        checkpoint: whose tokenizer reads the text, if it may have other tokens than `folder`; None: that of the folder.
    """
    if options.labels is not None and not options.images:
        raise UserError("--labels goes with --images")
    if task.modality == "pairs":
        if options.text or options.images:
            raise UserError(reads_pairs(folder))
        return _choose_pairs(folder, options, checkpoint, rounded)
    if options.data is not None:
        raise UserError(f"{folder} is no encoder-decoder: --data does not go with it")
    if task.modality == "image":
        if options.text or options.window is not None:
            raise UserError(f"{folder} reads images: --text and --window do not go with it; give --images DIR")
        return _choose_images(folder, task, options, trust, split, rounded)
    if options.images:
        raise UserError(f"{folder} reads text: --images does not go with it; give --text FILE")
    count = options.samples or max(windows, len(options.text))
    load = partial(load_tokenizer, folder) if checkpoint is None else partial(tokenizer_of, checkpoint)
    return _choose_text(folder, load, task, options, trust, rounded, count)


def _choose_pairs(folder: Path, options: ProofOptions, checkpoint: Checkpoint | None, rounded: bool) -> ProofSamples:
    if options.data is None:
        return _use_noise(options, "random tokens, no --data being given")
    source = Checkpoint.open(folder, packed=True) if checkpoint is None else checkpoint
    window = options.window or context_length(config_of(folder).get_text_config(decoder=True))
    reader, samples = PairReader(source, window), options.samples or PAIRS
    choose = partial(choose_pairs, reader, options.data, "decoder", seed=None)
    pairs, others = choose(samples=samples), None
    if rounded:
        with suppress(NoneLeftError):
            others = choose(samples=_count_rounded("pairs"), skip=len(pairs))
    described = _describe(options, options.data.name, [options.data], len(pairs), options.window)
    return ProofSamples(pairs=pairs, for_rounding=others or pairs, description=described)


def _count_rounded(modality: Modality) -> int:
    """Return how many samples are chosen to measure rounding on."""
    return ROUNDING_SAMPLES[modality] + CHECKED[modality]


def _choose_text(
    folder: Path,
    load: Callable[[], "PreTrainedTokenizerBase"],
    task: GraphTask,
    options: ProofOptions,
    trust: bool,
    rounded: bool,
    count: int,
) -> ProofSamples:
    config = config_of(folder, trust=trust).get_text_config()
    context = context_length(config) or WINDOW
    window = options.window or min(context, WINDOW)
    if window > context:
        raise UserError(f"--window {window} is longer than the model's context of {context} tokens: give at most that")
    what = ", ".join(path.name for path in options.text)
    generates = task.name == "text-generation"
    limit = count + _count_rounded("text") if rounded else count
    try:
        tokenizer = load()
        if options.text:
            texts = [read_file(file, tokenizer)[0] for file in options.text]
        else:
            text, what = _read_python_sources(PER_TOKEN * limit * window)
            texts = [text]
        # An encoder reads whole texts, between special tokens of its tokenizer.
        frame = 0 if generates else count_frame_tokens(tokenizer)
        if window < frame + 2:
            raise UserError(f"--window {window} is too short: the tokenizer adds {frame} tokens of its own")
        bos: Bos = "auto" if generates else "never"
        streams = [tokenise_text(tokenizer, text, bos=bos) for text in texts]
        windows, counts = mix_windows(streams, samples=limit, window=window, seed=0, choose="first", frame=frame)
        windows, others = windows[:count], windows[count:]
        if task.name == "feature-extraction" and find_sentence_use(folder) == "sentence-similarity":
            others = _cut_sentences(others if len(others) else windows)
        windows, others = ((add_frame(each, tokenizer) if frame else each) for each in (windows, others))
        for each in (windows, others):
            check_vocabulary(each, config)
    except UserError as error:
        if options.text:
            raise
        return _use_noise(options, f"random tokens ({error})")
    description = _describe(options, what, options.text, len(windows), window)
    others, names = others if len(others) else windows, name_sources(options.text, counts)[: len(windows)]
    return ProofSamples(windows=windows, for_rounding=others, description=description, texts=names)


def _cut_sentences(windows: Tensor) -> Tensor:
    """Cut windows, int64 (N, T), into texts as short as embeddings are compared of (`evaluation.sentences`)."""
    length = min(TEXT_TOKENS, windows.shape[1])
    return windows[:, : windows.shape[1] // length * length].reshape(-1, length)


def _read_python_sources(characters: int) -> tuple[str, str]:
    """Modules of the standard library that the demo's model was not trained on, and a line that says what they are.

    Args:
        characters: so many at least, if there are as many.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    try:
        for path in standard_library.list_modules(root):
            if standard_library.is_held_out(path.relative_to(root).as_posix()) and sum(map(len, texts)) < characters:
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError as error:
        raise UserError(str(error)) from error
    sources = plural(len(texts), "Python source")
    return "\n".join(texts), f"{sources} of this machine's standard library, no --text being given"


def _choose_images(
    folder: Path, task: GraphTask, options: ProofOptions, trust: bool, split: ImageSplit, rounded: bool
) -> ProofSamples:
    if not options.images:
        return _use_noise(options, "normal noise for pixels, no --images being given")
    classes = class_names(read_config(folder)) if task.name == "image-classification" else None
    files = find_all_images(options.images, labels=options.labels, split=split, id2label=classes)
    count = options.samples or min(IMAGES, len(files.paths))
    more = _count_rounded("image") if rounded else 0
    total = max(count, min(count + more, len(files.paths)))
    chosen = choose_images(files, samples=total, seed=options.seed, choose="random")
    processor = load_processor(folder, trust_remote_code=trust)

    def make_samples(rows: range) -> ImageSamples:
        return ImageSamples(
            take_images(chosen, list(rows)),
            processor,
            tokens=lambda size: max(1, size[0] * size[1] // 256),  # only how many fit a batch of features
            max_corrupt=options.max_corrupt,
        )

    images = make_samples(range(count))
    description = _describe(options, ", ".join(path.name for path in options.images), options.images, len(images), None)
    return ProofSamples(
        images=images,
        for_rounding=make_samples(range(count, total)) if total > count else images,
        description=description | {"skipped": sorted(images.skipped)},
    )


def _use_noise(options: ProofOptions, what: str) -> ProofSamples:
    return ProofSamples(description=_describe(options, what, (), None, None))


def _describe(options: ProofOptions, what: str, files: Any, samples: int | None, window: int | None) -> dict[str, Any]:
    names = [str(path) for path in files]
    return {"what": what, "files": names, "samples": samples, "window": window, "seed": options.seed}
