"""The part of `ckpt-prune evaluate` for encoders of text: masked language models, and base models without a head."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.cli.options import (
    echo_json,
    table,
)
from ckpt_prune.options import EvaluationOptions

if TYPE_CHECKING:
    from ckpt_prune.calibration.samples import Samples

MASKED = ("AutoModelForMaskedLM", "AutoModelForPreTraining")


def auto_class_of(folder: Path) -> str:
    """The Auto class of a folder's architecture."""
    from ckpt_prune.evaluation.loading import auto_class, read_config

    return auto_class(read_config(folder))


def check_same_kind(folder: Path, reference: Path | None) -> None:
    """Refuse a reference that gives something else than what is measured: other predictions, or none.

    Raises:
        UserError: the Auto classes differ, but for the two of masked language models.
    """
    from ckpt_prune.errors import UserError

    if reference is None:
        return
    ours, theirs = auto_class_of(folder), auto_class_of(reference)
    if ours != theirs and not {ours, theirs} <= set(MASKED):
        raise UserError(f"{folder} loads as {ours}, {reference} as {theirs}: what they give cannot be compared")


def reference_of_base(folder: Path, reference: Path | None) -> Path:
    """The reference that a base model needs.

    Raises:
        UserError: there is none.
    """
    from ckpt_prune.errors import UserError

    if reference is None:
        raise UserError(f"{folder} has no head, so there is nothing to score: compare it with --against MODEL2")
    return reference


def evaluate_encoder(
    folder: Path, reference: Path | None, options: EvaluationOptions, device: Any, as_json: bool, trust: bool
) -> None:
    """Measure an encoder on text: masked tokens where it predicts them, features where it has no head.

    Raises:
        UserError: it does neither, or has no reference to compare its features with.
    """
    from ckpt_prune.calibration.samples import TokenWindows
    from ckpt_prune.calibration.text import (
        evaluation_windows,
        frame_length,
        framed,
        load_tokenizer,
        read_text,
        token_stream,
    )
    from ckpt_prune.errors import UserError

    assert options.window is not None
    auto = auto_class_of(folder)
    base = reference_of_base(folder, reference) if auto == "AutoModel" else None
    if base is None and auto not in MASKED:
        raise UserError(
            f"{folder} is a {auto.removeprefix('AutoModelFor')} model: evaluate measures causal and masked language "
            "models, image classifiers, and base models against another"
        )
    tokenizer = load_tokenizer(folder)
    frame = frame_length(tokenizer)
    if options.window < frame + 2:
        raise UserError(f"--window {options.window} is too short for an encoder: it adds {frame} tokens of its own")
    stream = token_stream(tokenizer, read_text(options.text), bos="never")
    windows = evaluation_windows(stream, window=options.window, limit=options.limit, frame=frame)
    windows = framed(windows, tokenizer)
    if base is not None:
        evaluate_features(folder, base, TokenWindows(windows), device, as_json, trust)
    else:
        _masked(folder, reference, tokenizer, windows, device, as_json, trust)


def _masked(
    folder: Path, reference: Path | None, tokenizer: Any, windows: Any, device: Any, as_json: bool, trust: bool
) -> None:
    from ckpt_prune.errors import UserError
    from ckpt_prune.evaluation.loading import load_model
    from ckpt_prune.evaluation.masked import SHARE, MaskedComparison, choose_masked, fill_in

    if tokenizer.mask_token_id is None:
        raise UserError(f"{folder}: its tokenizer has no mask token, so nothing can be masked")
    masked = choose_masked(windows, set(tokenizer.all_special_ids))
    model = load_model(folder, device=device, trust_remote_code=trust)
    other = None if reference is None else load_model(reference, device=device, trust_remote_code=trust)
    found = fill_in(model, windows, masked, tokenizer.mask_token_id, other)
    pairs = [(folder, found.score if isinstance(found, MaskedComparison) else found)]
    if isinstance(found, MaskedComparison) and reference is not None:
        pairs.append((reference, found.reference_score))
    if as_json:
        figures = [
            {
                "model": str(path),
                "masked_perplexity": s.perplexity if math.isfinite(s.perplexity) else None,
                "accuracy": s.accuracy,
                "window": s.window,
                "windows": s.windows,
                "masked": s.tokens,
            }
            for path, s in pairs
        ]
        more: dict[str, Any] = {}
        if isinstance(found, MaskedComparison):
            more = {"kl": found.kl, "top1_agreement": found.top1_agreement, "against": figures[1]}
        echo_json(figures[0] | more)
        return
    rows = [[str(p), f"{s.perplexity:.3f}", f"{s.accuracy:.2%}", str(s.window), f"{s.tokens:,}"] for p, s in pairs]
    click.echo(table(["model", "masked perplexity", "accuracy", "window", "masked"], rows))
    click.echo(f"\n{SHARE:.0%} of the tokens masked: not comparable with a causal perplexity")
    if isinstance(found, MaskedComparison):
        click.echo(f"KL divergence {found.kl:.4f} nats per token, top-1 agreement {found.top1_agreement:.1%}")


def evaluate_features(
    folder: Path,
    reference: Path,
    samples: "Samples",
    device: Any,
    as_json: bool,
    trust: bool,
    *,
    skipped: list[str] | None = None,
) -> None:
    """Compare the features of two base models.

    Args:
        folder: the model.
        reference: the one it was made from.
        samples: what both read.
        device: where both run.
        as_json: print JSON instead of a table.
        trust: run code that a folder brings.
        skipped: images that do not decode, for JSON; None for text.

    Raises:
        UserError: a model does not load or does not take the samples, or the features cannot be compared.
    """
    from ckpt_prune.calibration.samples import TokenWindows
    from ckpt_prune.errors import UserError
    from ckpt_prune.evaluation.features import compare_features
    from ckpt_prune.evaluation.forward import check_windows
    from ckpt_prune.evaluation.loading import load_model

    models = [load_model(path, device=device, trust_remote_code=trust) for path in (folder, reference)]
    if isinstance(samples, TokenWindows):
        for each in models:
            check_windows(each, samples.windows)
    try:
        found = compare_features(models[0], models[1], samples)
    except ValueError as error:  # what transformers' vision models raise for images of another size
        reason = " ".join(str(error).split())
        raise UserError(f"the models do not take what they are to be compared on: {reason[:300]}") from error
    if as_json:
        figures = {
            "model": str(folder),
            "against": str(reference),
            "cosine": found.cosine,
            "relative_error": found.relative_error,
            "samples": found.samples,
            "tokens": found.tokens,
        }
        echo_json(figures if skipped is None else figures | {"skipped": skipped})
        return
    rows = [[str(folder), f"{found.cosine:.4f}", f"{found.relative_error:.4f}", f"{found.tokens:,}"]]
    click.echo(table(["features of", "cosine", "relative error", "tokens"], rows))
    click.echo(f"\nlast hidden states against those of {reference}")
