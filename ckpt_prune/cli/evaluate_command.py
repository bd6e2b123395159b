"""`ckpt-prune evaluate`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import (
    device_option,
    echo_json,
    json_option,
    options_of,
    table,
    trust_option,
)
from ckpt_prune.options import EvaluationOptions

NAMED = 10
"""So many images that do not decode are named in text; JSON names all."""


@click.command("evaluate")
@click.argument("model")
@options_of(EvaluationOptions)
@click.option(
    "--against", metavar="MODEL2", help="A reference (the dense model): both side by side, with KL divergence."
)
@click.option("--tasks", metavar="T[,T...]", help="lm-eval tasks instead of text (needs the eval extra).")
@click.option(
    "--include-path", type=click.Path(path_type=Path), help="Folder with lm-eval task files of your own, for --tasks."
)
@trust_option
@device_option
@json_option
def command(
    model: str,
    against: str | None,
    tasks: str | None,
    include_path: Path | None,
    trust: bool,
    device: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure MODEL: perplexity on text in windows of T tokens, accuracy on images, or lm-eval tasks.

    Perplexity: non-overlapping windows, the tail dropped, the first token of each window unscored, exp of the mean.
    Two protocols are in use, windows of 128 and of 2048 tokens, and differ by a factor of two on the same model: the
    window is printed with every figure. KL is the mean over scored tokens of KL(MODEL2 || MODEL), in nats.

    Images: top-1 and top-5 of an image classifier, and with --against how often both put the same class first and the
    mean KL over images. Preprocessing is the checkpoint's own (preprocessor_config.json), by Pillow. --limit takes
    images at random (seed 0): the first ones would be those of the first classes.

    A masked language model (BERT) is asked for 15 % of the tokens of every window, masked; a base model without a head
    is compared by the cosine of its features with those of MODEL2.

    This loads the whole model, and both with --against.

    \b
      ckpt-prune evaluate OUT --against MODEL --text wiki.test.raw --window 2048
      ckpt-prune evaluate OUT --against MODEL --images photos --labels labels.csv
      ckpt-prune evaluate OUT --tasks arc_easy,piqa
    """
    from ckpt_prune.checkpoint.hub import resolve
    from ckpt_prune.devices import resolve_device
    from ckpt_prune.errors import UserError

    evaluation = EvaluationOptions(**options)
    target = resolve_device(device)
    if tasks is None and include_path is not None:
        raise UserError("--include-path goes with --tasks")
    if evaluation.images is None and evaluation.labels is not None:
        raise UserError("--labels goes with --images")
    if evaluation.images is not None:
        if evaluation.text or evaluation.window is not None or tasks is not None:
            raise UserError("--images does not go with --text, --window or --tasks")
        reference = resolve(against) if against else None
        _pictures(resolve(model), reference, evaluation, target, as_json, trust)
        return
    if tasks is not None:
        if evaluation.text or evaluation.window is not None or against is not None:
            raise UserError("--tasks does not go with --text, --window or --against")
        if trust:
            raise UserError("--tasks never runs a checkpoint's own code: --trust-remote-code does not go with it")
        from ckpt_prune.evaluation.harness import run_tasks

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        found = run_tasks(resolve(model), names, device=target, limit=evaluation.limit, include_path=include_path)
        if as_json:
            echo_json(found)
        else:
            _print_tasks(found)
        return
    if not evaluation.text:
        raise UserError("evaluate needs --text FILE, --images DIR for a vision model, or --tasks")
    if evaluation.window is None:
        raise UserError(
            "evaluate needs --window T: a perplexity means nothing without its window (128 and 2048 are common)"
        )
    reference = resolve(against) if against else None
    _text(resolve(model), reference, evaluation, target, as_json, trust)


def _text(
    folder: Path, reference: Path | None, options: EvaluationOptions, device: Any, as_json: bool, trust: bool
) -> None:
    from ckpt_prune.checkpoint.digests import tokenizer_fingerprint
    from ckpt_prune.cli.evaluate_encoder import auto_class_of, check_same_kind, evaluate_encoder
    from ckpt_prune.errors import UserError

    for path in (folder, reference):
        if path is not None and not (path / "config.json").is_file():
            raise UserError(f"{path} has no config.json; give a checkpoint folder as published on the Hub")
        if path is not None and _is_vision(path):
            raise UserError(f"{path} is a vision model: --text does not go with it; measure it with --images")
    if reference is not None and tokenizer_fingerprint(folder) != tokenizer_fingerprint(reference):
        raise UserError(f"{folder} and {reference} have different tokenizers: their perplexities cannot be compared")
    check_same_kind(folder, reference)
    if auto_class_of(folder) == "AutoModelForCausalLM":
        _perplexity(folder, reference, options, device, as_json, trust)
    else:
        evaluate_encoder(folder, reference, options, device, as_json, trust)


def _perplexity(
    folder: Path, reference: Path | None, options: EvaluationOptions, device: Any, as_json: bool, trust: bool
) -> None:
    from ckpt_prune.calibration.text import evaluation_windows, load_tokenizer, read_text, token_stream
    from ckpt_prune.evaluation.loading import load_model
    from ckpt_prune.evaluation.perplexity import compare, perplexity

    assert options.window is not None
    stream = token_stream(load_tokenizer(folder), read_text(options.text), bos=options.bos)
    windows = evaluation_windows(stream, window=options.window, limit=options.limit)
    model = load_model(folder, device=device, trust_remote_code=trust)
    if reference is None:
        score = perplexity(model, windows)
        if as_json:
            echo_json(_json(folder, score))
        else:
            click.echo(_table([(folder, score)]))
        return
    found = compare(model, load_model(reference, device=device, trust_remote_code=trust), windows)
    if as_json:
        echo_json(
            _json(folder, found.score)
            | {
                "kl": found.kl,
                "top1_agreement": found.top1_agreement,
                "against": _json(reference, found.reference_score),
            }
        )
        return
    click.echo(_table([(folder, found.score), (reference, found.reference_score)]))
    click.echo(f"\nKL divergence {found.kl:.4f} nats per token, top-1 agreement {found.top1_agreement:.1%}")


def _pictures(
    folder: Path, reference: Path | None, options: EvaluationOptions, device: Any, as_json: bool, trust: bool
) -> None:
    """Measure a model of images: a classifier by its classes, a base model by its features."""
    from ckpt_prune.calibration.image_files import choose_images, find_images
    from ckpt_prune.calibration.images import ImageSamples
    from ckpt_prune.cli.evaluate_encoder import auto_class_of, check_same_kind, evaluate_features, reference_of_base
    from ckpt_prune.errors import UserError

    assert options.images is not None
    base = None
    if _is_vision(folder) and auto_class_of(folder) == "AutoModel":
        base = reference_of_base(folder, reference)
        check_same_kind(folder, base)
    classes = _shared_classes(folder, reference) if base is None else None
    processor = _shared_processor(folder, reference, trust)
    files = find_images(options.images, labels=options.labels, split="eval", id2label=classes)
    if files.labels is None and reference is None:
        raise UserError(
            f"{options.images}: images without classes say nothing of one model; give --labels FILE, a sub-folder per "
            "class, or --against MODEL2"
        )
    if options.limit is not None:
        files = choose_images(files, samples=min(options.limit, len(files.paths)), seed=0)
    samples = ImageSamples(files, processor, tokens=_tokens_of(folder), max_corrupt=options.max_corrupt)
    skipped = sorted(samples.skipped)
    if base is not None:
        evaluate_features(folder, base, samples, device, as_json, trust, skipped=skipped)
    else:
        _classification(folder, reference, samples, device, as_json, trust, skipped)
    if not as_json:
        _print_skipped(skipped)


def _tokens_of(folder: Path) -> Callable[[tuple[int, int]], int]:
    """Tokens of an image of a size; asked only of base models, whose family is known."""
    from ckpt_prune.architectures.family import family_of
    from ckpt_prune.architectures.model import image_tokens
    from ckpt_prune.architectures.skeleton import parse_config
    from ckpt_prune.evaluation.loading import read_config

    config = read_config(folder)
    return lambda size: image_tokens(family_of(config), parse_config(config), size)


def _shared_classes(folder: Path, reference: Path | None) -> dict[int, str]:
    from ckpt_prune.errors import UserError

    classes = _classes(folder)
    if reference is not None and len(_classes(reference)) != len(classes):
        raise UserError(
            f"{folder} and {reference} have {len(classes)} and {len(_classes(reference))} classes: "
            "their figures cannot be compared"
        )
    return classes


def _shared_processor(folder: Path, reference: Path | None, trust: bool) -> Any:
    from ckpt_prune.calibration.image_processor import load_processor
    from ckpt_prune.errors import UserError

    processor = load_processor(folder, trust_remote_code=trust)
    if reference is not None:
        other = load_processor(reference, trust_remote_code=trust)
        if processor.to_json_string() != other.to_json_string():
            raise UserError(
                f"{folder} and {reference} have different image processors: their figures cannot be compared"
            )
    return processor


def _classification(
    folder: Path, reference: Path | None, samples: Any, device: Any, as_json: bool, trust: bool, skipped: list[str]
) -> None:
    from ckpt_prune.evaluation.classification import classify, compare_classifiers
    from ckpt_prune.evaluation.loading import load_model

    model = load_model(folder, device=device, trust_remote_code=trust)
    if reference is None:
        score = classify(model, samples)
        if as_json:
            alone = {"agreement": None, "kl": None, "against": None}
            echo_json(_accuracy_json(folder, score) | alone | {"skipped": skipped})
        else:
            click.echo(_accuracy_table([(folder, score)]))
        return
    found = compare_classifiers(model, load_model(reference, device=device, trust_remote_code=trust), samples)
    if as_json:
        against = _accuracy_json(reference, found.reference_score)
        echo_json(
            _accuracy_json(folder, found.score)
            | {
                "agreement": found.agreement,
                "kl": found.kl,
                "against": {key: against[key] for key in ("model", "top1", "top5")},
                "skipped": skipped,
            }
        )
        return
    click.echo(_accuracy_table([(folder, found.score), (reference, found.reference_score)]))
    click.echo(f"\nKL divergence {found.kl:.4f} nats per image, top-1 agreement {found.agreement:.1%}")


def _is_vision(folder: Path) -> bool:
    from ckpt_prune.checkpoint.jsonfile import read_object
    from ckpt_prune.errors import UserError
    from ckpt_prune.evaluation.classification import is_vision

    try:
        return is_vision(read_object(folder / "config.json"))
    except UserError:  # the loader says what is wrong with it
        return False


def _classes(folder: Path) -> dict[int, str]:
    from ckpt_prune.checkpoint.jsonfile import read_object
    from ckpt_prune.errors import UserError
    from ckpt_prune.evaluation.classification import class_names, is_classifier

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; give a checkpoint folder as published on the Hub")
    config = read_object(folder / "config.json")
    if not is_classifier(config):
        what = config.get("architectures") or config.get("model_type")
        raise UserError(
            f"{folder} is no image classifier ({', '.join(what) if isinstance(what, list) else what}): "
            "--images does not go with it; measure a language model with --text"
        )
    return class_names(config)


def _accuracy_json(folder: Path, score: Any) -> dict[str, Any]:
    return {"model": str(folder), "images": score.images, "top1": score.top1, "top5": score.top5}


def _accuracy_table(scores: list[tuple[Path, Any]]) -> str:
    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.2%}"

    rows = [[str(path), share(s.top1), share(s.top5), f"{s.images:,}"] for path, s in scores]
    return table(["model", "top-1", "top-5", "images"], rows)


def _print_skipped(skipped: list[str]) -> None:
    if skipped:
        more = f" and {len(skipped) - NAMED} more" if len(skipped) > NAMED else ""
        click.echo(f"left out, {len(skipped)} not decoding: {', '.join(skipped[:NAMED])}{more}", err=True)


def _json(folder: Path, score: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        # JSON has no infinity.
        "perplexity": score.perplexity if math.isfinite(score.perplexity) else None,
        "nll": score.nll,
        "window": score.window,
        "windows": score.windows,
        "tokens": score.tokens,
    }


def _table(scores: list[tuple[Path, Any]]) -> str:
    rows = [[str(path), f"{s.perplexity:.3f}", str(s.window), f"{s.tokens:,}"] for path, s in scores]
    return table(["model", "perplexity", "window", "tokens"], rows)


def _print_tasks(found: dict[str, Any]) -> None:
    rows = []
    for task, metrics in found["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "stderr" not in metric:
                rows.append([task, metric, f"{value:.4f}"])
    click.echo(table(["task", "metric", "value"], rows))
