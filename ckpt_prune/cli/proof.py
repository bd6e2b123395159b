"""What an exported graph is compared with PyTorch on, and the table of what came out."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from ckpt_prune.cli.options import table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ckpt_prune.calibration.image_files import Split
    from ckpt_prune.exporting.outcome import Case, ProofSamples, Validation
    from ckpt_prune.exporting.tasks import Task

WINDOWS, IMAGES, WINDOW = 16, 64, 512
"""Where nothing is asked for: windows and their length, at most the context; images."""
CHARACTERS = 400_000
"""Bytes of the standard library's text: enough windows for any tokenizer."""


class ProofOptions(BaseModel):
    """What to compare a graph with PyTorch on."""

    text: tuple[Path, ...] = Field(
        default=(),
        description="Text file to compare on (.txt or .jsonl); may be repeated. [default: Python sources of the "
        "running Python's standard library]",
    )
    images: Path | None = Field(
        default=None,
        description="Folder of images to compare on: plain, with labels.csv, or with a sub-folder per class. "
        "[default: noise, and no accuracy]",
    )
    labels: Path | None = Field(
        default=None,
        description="CSV with columns file, label and perhaps split (eval). [default: labels.csv in or beside DIR]",
    )
    samples: int | None = Field(default=None, ge=1, description="Number of windows, or of images. [default: 16, 64]")
    window: int | None = Field(
        default=None, ge=2, description="Tokens per window. [default: the model's context length, at most 512]"
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Of the random choice of images, and of noise.")
    max_corrupt: float = Field(default=0.05, ge=0, le=1, description="Share of the images that may fail to decode.")


def proof_samples(
    folder: Path, task: "Task", options: ProofOptions, *, trust: bool = False, split: "Split" = "eval"
) -> "ProofSamples":
    """What to compare on, as the options say.

    Without --text a model of text reads Python sources, and without --images a model of images noise; text is noise
    too where the folder has no tokenizer. The description says so.

    Args:
        folder: of the graph or of its model: config.json, and a tokenizer or an image processor.
        task: of the graph.
        options: which text or images.
        trust: run the checkpoint's own code for its config and image processor.
        split: which rows of a labels.csv with a split to take images from.

    Raises:
        UserError: data of the wrong kind, unreadable or too little, or a window longer than the model's context.
    """
    from ckpt_prune.errors import UserError

    if options.labels is not None and options.images is None:
        raise UserError("--labels goes with --images")
    if task.modality == "image":
        if options.text or options.window is not None:
            raise UserError(f"{folder} reads images: --text and --window do not go with it; give --images DIR")
        return _images(folder, task, options, trust, split)
    if options.images is not None:
        raise UserError(f"{folder} reads text: --images does not go with it; give --text FILE")
    return _text(folder, task, options, trust)


def _text(folder: Path, task: "Task", options: ProofOptions, trust: bool) -> "ProofSamples":
    from ckpt_prune.calibration.text import evaluation_windows, frame_length, framed, load_tokenizer, read_text
    from ckpt_prune.errors import UserError
    from ckpt_prune.evaluation.loading import config_of
    from ckpt_prune.exporting.outcome import ProofSamples

    config = config_of(folder, trust=trust).get_text_config()
    context = getattr(config, "max_position_embeddings", None) or WINDOW
    window = options.window or min(context, WINDOW)
    if window > context:
        raise UserError(f"--window {window} is longer than the model's context of {context} tokens: give at most that")
    what = ", ".join(path.name for path in options.text)
    try:
        tokenizer = load_tokenizer(folder)
        if options.text:
            text = read_text(options.text)
        else:
            text, what = _python_sources()
        # An encoder reads whole texts, between tokens of its tokenizer's own.
        frame = 0 if task.name == "text-generation" else frame_length(tokenizer)
        if window < frame + 2:
            raise UserError(f"--window {window} is too short: the tokenizer adds {frame} tokens of its own")
        stream = _stream(tokenizer, text, task.name == "text-generation", getattr(config, "vocab_size", None))
        windows = evaluation_windows(stream, window=window, limit=options.samples or WINDOWS, frame=frame)
        windows = framed(windows, tokenizer) if frame else windows
    except UserError as error:
        if options.text:
            raise
        return ProofSamples(description=_noise(options, f"random tokens ({error})"))
    return ProofSamples(
        windows=windows,
        description={
            "what": what,
            "files": [str(path) for path in options.text],
            "samples": len(windows),
            "window": window,
            "seed": options.seed,
        },
    )


def _stream(tokenizer: "PreTrainedTokenizerBase", text: str, causal: bool, vocabulary: int | None) -> Any:
    from ckpt_prune.calibration.text import token_stream
    from ckpt_prune.errors import UserError

    stream = token_stream(tokenizer, text, bos="auto" if causal else "never")
    if vocabulary is not None and len(stream) and int(stream.max()) >= vocabulary:
        raise UserError(
            f"token id {int(stream.max())} is outside the model's vocabulary of {vocabulary}: the tokenizer belongs "
            "to another model"
        )
    return stream


def _python_sources() -> tuple[str, str]:
    """Modules of the standard library that the demo's model was not trained on, and a line that says what they are."""
    import sysconfig

    from ckpt_prune.demo import corpus
    from ckpt_prune.errors import UserError

    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    try:
        for path in corpus.modules(root):
            if corpus.is_held_out(path.relative_to(root).as_posix()) and sum(map(len, texts)) < CHARACTERS:
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError as error:
        raise UserError(str(error)) from error
    return "\n".join(texts), f"{len(texts)} Python sources of this machine's standard library, no --text being given"


def _images(folder: Path, task: "Task", options: ProofOptions, trust: bool, split: "Split") -> "ProofSamples":
    from ckpt_prune.calibration.image_files import choose_images, find_images
    from ckpt_prune.calibration.image_processor import load_processor
    from ckpt_prune.calibration.images import ImageSamples
    from ckpt_prune.evaluation.classification import class_names
    from ckpt_prune.evaluation.loading import read_config
    from ckpt_prune.exporting.outcome import ProofSamples

    if options.images is None:
        return ProofSamples(description=_noise(options, "normal noise for pixels, no --images being given"))
    classes = class_names(read_config(folder)) if task.name == "image-classification" else None
    files = find_images(options.images, labels=options.labels, split=split, id2label=classes)
    chosen = choose_images(
        files, samples=options.samples or min(IMAGES, len(files.paths)), seed=options.seed, choose="random"
    )
    images = ImageSamples(
        chosen,
        load_processor(folder, trust_remote_code=trust),
        tokens=lambda size: max(1, size[0] * size[1] // 256),  # only how many fit a batch of features
        max_corrupt=options.max_corrupt,
    )
    return ProofSamples(
        images=images,
        description={
            "what": options.images.name,
            "files": [str(options.images)],
            "samples": len(images),
            "window": None,
            "seed": options.seed,
            "skipped": sorted(images.skipped),
        },
    )


def _noise(options: ProofOptions, what: str) -> dict[str, Any]:
    return {"what": what, "files": [], "samples": None, "window": None, "seed": options.seed}


def proof_lines(validation: "Validation") -> list[str]:
    """What came out: a table of the cases, the checks that failed, and the metrics.

    A table's lines come as one element.
    """
    lines = [validation.note] if validation.note else []
    if validation.cases:
        headers = ["onnxruntime - PyTorch", "max abs", "mean abs", "max rel", "mean rel", "top-1", ""]
        lines.append(table(headers, [_row(case) for case in validation.cases]))
    lines += [f"{_named(case)}: {_where(case)}" for case in validation.cases if not case.passed]
    for metric in validation.metrics:
        show = _percent if metric.name in ("top-1", "agreement") else _decimal
        failed = "" if metric.passed else " FAILED"
        if metric.name in ("agreement", "cosine"):
            lines.append(f"{metric.name} {show(metric.onnxruntime)} ({metric.of}){failed}")
        else:
            ours, theirs = show(metric.onnxruntime), show(metric.pytorch)
            lines.append(f"{metric.name} {ours} in onnxruntime, {theirs} in PyTorch ({metric.of}){failed}")
    lines += [f"{check.name} FAILED: {check.detail}" for check in validation.checks if check.passed is False]
    skipped = [check for check in validation.checks if check.passed is None]
    lines += [f"{check.name}: {check.detail}" for check in skipped]
    lines.append(f"compared on: {validation.data.get('what', 'noise')}")
    verdict = "agrees" if validation.passed else "does NOT agree"
    lines.append(
        f"the graph {verdict} with {validation.against.name} ({validation.dtype}, {validation.provider}, tolerance "
        f"{validation.tolerance:g} of the largest output)"
    )
    return lines


def _row(case: "Case") -> list[str]:
    figures = [case.max_abs, case.mean_abs, case.max_rel, case.mean_rel]
    return [
        _named(case),
        *("-" if figure is None else f"{figure:.1e}" for figure in figures),
        "" if case.agreement is None else _percent(case.agreement),
        "ok" if case.passed else "FAILED",
    ]


def _named(case: "Case") -> str:
    """A case in words: its output, and what it was read from."""
    from ckpt_prune.exporting.metrics import counted

    size = counted(case.batch, "image") if case.tokens is None else f"{case.batch} x {counted(case.tokens, 'token')}"
    padding = "" if case.padding == "none" else f", padded {case.padding}"
    segments = ", two segments" if case.segments else ""
    cache = {"none": "", "chunks": ", cached in chunks", "steps": ", generated"}[case.cache]
    return f"{case.output}: {size}{padding}{segments}{cache}"


def _where(case: "Case") -> str:
    """What is wrong with a failed case, and where."""
    parts = []
    if case.where is not None:
        place = case.where
        token = "" if place.token is None else f", token {place.token}"
        here = (_figure(value) for value in (place.onnxruntime, place.pytorch))
        parts.append(f"row {place.batch}{token}, unit {place.unit} is {next(here)}, in PyTorch {next(here)}")
        if case.largest:
            parts.append(f"the largest is {_figure(case.largest)}")
    if case.note is not None:
        parts.append(case.note)
    return "; ".join(parts)


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _decimal(value: float | None) -> str:
    return "inf" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
