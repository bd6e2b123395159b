"""Options that say what a model is run on: text, images or audio."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from ckpt_prune.common.errors import UserError
from ckpt_prune.datasets.texts import NamedText, Split, parse_text_name
from ckpt_prune.options.option import DATA, MACHINE, MEASURE, Input, Inputs, Options, Texts, option

ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
Bos = Literal["auto", "always", "never"]
Choose = Literal["random", "first", "offsets", "documents"]
_BOS = "Put a begin-of-sequence token before the text. auto: if the tokenizer itself adds one."


class TextOptions(Options):
    """Text, which may be named as papers name it."""

    group = DATA
    usual_split: ClassVar[Split] = "test"
    shares_samples: ClassVar[bool] = True
    """Whether --samples counts windows of all texts together, each of which then gives one at least."""
    text: Texts = option(default=(), metavar="FILE")
    """Text file. May be repeated."""
    window: int | None = option(default=None, ge=2)
    """Tokens per window."""

    @property
    def talks(self) -> Path | None:
        """File of conversations with images, for commands that take one."""
        return None

    @model_validator(mode="after")
    def _find_named_texts(self) -> Self:
        texts = [parse_text_name(text, self.usual_split) or text for text in self.text]
        named = [text.window for text in texts if isinstance(text, NamedText)]
        windows = {window for window in (self.window, *named) if window is not None}
        if len(windows) > 1:
            raise ValueError(f"windows of {' and '.join(map(str, sorted(windows)))} tokens are asked for")
        self.text = tuple(text.path if isinstance(text, NamedText) else text for text in texts)
        self.window = next(iter(windows), None)
        samples = getattr(self, "samples", None)
        if self.shares_samples and samples is not None and 0 < samples < len(self.text):
            raise ValueError(f"--samples {samples} takes no window of some of the {len(self.text)} texts of --text")
        return self


class SampleOptions(TextOptions):
    """Samples to run a model on: windows of text, images or audio."""

    usual_split: ClassVar[Split] = "train"
    text: Texts = option(default=(), metavar="FILE", digest="content")
    """Text to run the model on: a .txt, .jsonl, .ndjson or .json file, or a named text: wikitext2, c4, ptb. Rows may be
    conversations, which the model's chat template writes out. May be repeated: each gives an equal share of the
    windows."""
    images: Inputs = option(default=(), metavar="DIR", digest="content")
    """Folder of images to run a vision model on, instead of --text: plain, with a labels.csv, or with a sub-folder per
    class. May be repeated: each gives an equal share of the samples."""
    labels: Input = option(default=None, metavar="CSV", needs="images", digest="content")
    """CSV file with a column file, and perhaps a column split: then the rows calib are taken. [default: labels.csv in
    the folder of images or beside it]"""
    max_corrupt: float = option(default=0.05, ge=0, le=1)
    """Share of the images that may fail to decode."""
    audio: Input = option(default=None, metavar="DIR", digest="content")
    """Folder of audio to run a speech encoder on, instead of --text: .wav files at its sampling rate, or features, one
    file per sound (.npy, .safetensors)."""
    samples: int | None = option(default=None, ge=1)
    """Number of windows, pairs or images; all, if there are fewer. [default: 128 windows; 1024 pairs; at most 4000
    images]"""
    window: int | None = option(default=None, ge=2)
    """Tokens per window. [default: the model's context length, at most 2048]"""
    seed: int = option(default=0, ge=0, le=2**63 - 1)
    """Seed of the random choice of samples."""
    choose: Choose = option(default="random")
    """random: windows from all over the text, or any images. first: from the start, as the code of several papers
    does. offsets: windows at random places of the text, which may overlap, and documents: each at a random place inside
    a random document that is longer, as the code of GPTQ, SparseGPT and Wanda takes them from WikiText-2 and C4."""
    bos: Bos = option(default="auto")
    """Put a begin-of-sequence token before the text. auto: if the tokenizer itself adds one."""
    compute_dtype: ComputeDtype = option(default="auto", group=MACHINE)
    """Type in which the model runs while it is measured or trained. auto: bfloat16 if the model is stored in it and the
    device is faster in it, else float32. `compare`, and `recover` except by scales, always take float32 for auto."""


class CalibrationOptions(SampleOptions):
    """Samples to measure statistics on."""

    data: Input = option(default=None, metavar="FILE", digest="content")
    """Rows (.jsonl, .json) in place of --text. For --part text of a vision language model: messages as its chat
    template takes them, whose images are paths relative to FILE. For an encoder-decoder: source and target, perhaps
    with source_language and target_language as its tokenizer names them; for Whisper audio, a path, and text."""
    folds: int | None = option(default=None, ge=1)
    """Keep sums apart for this many groups of samples. Recipes that choose lambda by folds need it, and so do held-out
    errors. [default: 1, 2 if the recipe sees whether fits win, 4 if it chooses by folds]"""

    @property
    def talks(self) -> Path | None:
        """The file of --data."""
        return self.data


class TrainingOptions(SampleOptions):
    """Samples to train on."""

    samples: int | None = option(default=None, ge=2)
    """Number of windows, or of images; all, if there are fewer. [default: 2048; 32 for --method scales]"""


class LabelledImageOptions(Options):
    """Images with classes, beside an option `images` for them."""

    group = DATA
    labels: Input = option(default=None, metavar="CSV", needs="images")
    """CSV file with the columns file and label, and perhaps a column split: then the rows eval are taken. [default:
    labels.csv in the folder of images or beside it]"""
    max_corrupt: float = option(default=0.05, ge=0, le=1)
    """Share of the images that may fail to decode."""


class EvaluationOptions(TextOptions, LabelledImageOptions):
    """Data that a model is measured on."""

    shares_samples = False
    text: Texts = option(default=(), metavar="FILE")
    """Text file to measure perplexity on, or a named text: wikitext2, c4, ptb, also wikitext2:validation, or with the
    window wikitext2@128, wikitext2@2048. May be repeated: each is measured by itself, and all together."""
    window: int | None = option(default=None, ge=2)
    """Tokens per window. --text needs it."""
    images: Input = option(default=None, metavar="DIR")
    """Folder of images to measure an image classifier on: with a labels.csv, with a sub-folder per class, or, with
    --against, plain."""
    data: Input = option(default=None, metavar="FILE")
    """Rows (.jsonl, .json): conversations with images, to measure a vision language model on by the perplexity of their
    text, with --window; or sources with their targets, to measure an encoder-decoder on by the perplexity of these."""
    samples: int | None = option(default=None, ge=1)
    """Use only this many: the first windows of each text, images at random (seed 0), or each task's first items.
    [default: all]"""
    bos: Bos = option(default="auto")
    """Put a begin-of-sequence token before the text. auto: if the tokenizer itself adds one."""

    @property
    def talks(self) -> Path | None:
        """The file of --data."""
        return self.data


class ProofOptions(TextOptions, LabelledImageOptions):
    """Data that a graph is compared with PyTorch on."""

    text: Texts = option(default=(), metavar="FILE")
    """Text to compare on: a .txt, .jsonl, .ndjson or .json file. May be repeated: each gives an equal share of the
    windows. [default: the sources of Python's standard library]"""
    images: Inputs = option(default=(), metavar="DIR")
    """Folder of images to compare on: plain, with a labels.csv, or with a sub-folder per class. [default: noise;
    accuracy is not compared]"""
    data: Input = option(default=None, metavar="FILE")
    """Rows (.jsonl, .json) of sources with their targets, to compare an encoder-decoder on; for Whisper audio, a path,
    and text. [default: noise; no perplexity is compared]"""
    samples: int | None = option(default=None, ge=1)
    """Number of windows, of images, or of pairs. [default: 2 windows, 16 for rounded graphs or --dense; 64 images or
    pairs]"""
    window: int | None = option(default=None, ge=2)
    """Tokens per window. [default: the model's context length, at most 512]"""
    seed: int = option(default=0, ge=0, le=2**63 - 1)
    """Seed of the random choice of images, and of noise."""


class QualityOptions(Options):
    """Data that an output is measured on when it is complete."""

    group = MEASURE
    evaluate: Texts = option(default=(), metavar="FILE|DIR", digest="none")
    """Measure OUT and MODEL on this held-out text (in windows of --window tokens), or on this folder of images. May be
    repeated. [default: windows of --text, or some of --images, that the model was not calibrated on]"""
    evaluate_samples: int | None = option(default=None, ge=0, digest="none")
    """Windows, or images, to measure OUT and MODEL on. 0: measure nothing. [default: 16 of
    --evaluate; of --text and --images an eighth as many as calibrated on, 2 to 8 windows or 16 to 64 images]"""


def words_of_windows(texts: Iterable[Path], samples: int, window: int, seed: int) -> list[str]:
    """Return the options of a command line that choose windows of text."""
    words = [word for text in texts for word in ("--text", str(text))]
    return [*words, "--samples", str(samples), "--window", str(window), "--seed", str(seed)]


def given_data(options: SampleOptions) -> str | None:
    """Return the option that says what the model is run on, if any does; raise UserError if there are two."""
    data = {
        "--text": bool(options.text),
        "--images": bool(options.images),
        "--audio": options.audio is not None,
        "--data": options.talks is not None,
    }
    flags = [name for name, is_given in data.items() if is_given]
    if getattr(options, "part", None) == "all" and len(flags) == 2 and "--images" in flags:
        flags.remove("--images")  # of the tower
    if len(flags) > 1:
        raise UserError(f"give {' or '.join(flags)}, not both")
    return flags[0] if flags else None


def has_data(options: SampleOptions) -> bool:
    """Return True if there is something to run the model on; raise UserError if there are two things."""
    return given_data(options) is not None
