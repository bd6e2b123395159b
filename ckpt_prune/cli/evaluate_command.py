"""`ckpt-prune evaluate`."""

import math
from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import (
    EvaluationOptions,
    device_option,
    echo_json,
    json_option,
    options_of,
    table,
)


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
@device_option
@json_option
def command(
    model: str,
    against: str | None,
    tasks: str | None,
    include_path: Path | None,
    device: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure MODEL: perplexity on text in windows of T tokens, or lm-eval tasks.

    Perplexity: non-overlapping windows, the tail dropped, the first token of each window unscored, exp of the mean.
    Two protocols are in use, windows of 128 and of 2048 tokens, and differ by a factor of two on the same model: the
    window is printed with every figure. KL is the mean over scored tokens of KL(MODEL2 || MODEL), in nats.

    This loads the whole model, and both with --against.

    \b
      ckpt-prune evaluate OUT --against MODEL --text wiki.test.raw --window 2048
      ckpt-prune evaluate OUT --tasks arc_easy,piqa
    """
    from ckpt_prune.checkpoint.hub import resolve
    from ckpt_prune.cli.setup import resolve_device
    from ckpt_prune.errors import UserError

    evaluation = EvaluationOptions(**options)
    target = resolve_device(device)
    if tasks is None and include_path is not None:
        raise UserError("--include-path goes with --tasks")
    if tasks is not None:
        if evaluation.text or evaluation.window is not None or against is not None:
            raise UserError("--tasks does not go with --text, --window or --against")
        from ckpt_prune.evaluation.harness import run_tasks

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        found = run_tasks(resolve(model), names, device=target, limit=evaluation.limit, include_path=include_path)
        if as_json:
            echo_json(found)
        else:
            _print_tasks(found)
        return
    if not evaluation.text:
        raise UserError("evaluate needs --text FILE, or --tasks")
    if evaluation.window is None:
        raise UserError(
            "evaluate needs --window T: a perplexity means nothing without its window (128 and 2048 are common)"
        )
    _perplexity(resolve(model), resolve(against) if against else None, evaluation, target, as_json)


def _perplexity(folder: Path, reference: Path | None, options: EvaluationOptions, device: Any, as_json: bool) -> None:
    from ckpt_prune.calibration.text import evaluation_windows, load_tokenizer, read_text, token_stream
    from ckpt_prune.checkpoint.digests import tokenizer_fingerprint
    from ckpt_prune.errors import UserError
    from ckpt_prune.evaluation.loading import load_model
    from ckpt_prune.evaluation.perplexity import compare, perplexity

    assert options.window is not None
    for path in (folder, reference):
        if path is not None and not (path / "config.json").is_file():
            raise UserError(f"{path} has no config.json; give a checkpoint folder as published on the Hub")
    if reference is not None and tokenizer_fingerprint(folder) != tokenizer_fingerprint(reference):
        raise UserError(f"{folder} and {reference} have different tokenizers: their perplexities cannot be compared")
    stream = token_stream(load_tokenizer(folder), read_text(options.text), bos=options.bos)
    windows = evaluation_windows(stream, window=options.window, limit=options.limit)
    model = load_model(folder, device=device)
    if reference is None:
        score = perplexity(model, windows)
        if as_json:
            echo_json(_json(folder, score))
        else:
            click.echo(_table([(folder, score)]))
        return
    found = compare(model, load_model(reference, device=device), windows)
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
