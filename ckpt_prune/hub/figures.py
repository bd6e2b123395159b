"""Measured figures for a model card, from the output of `evaluate --json`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.safe_text import as_markdown, escape_controls

_MOST_BYTES = 2**24
_NAMES = {
    "perplexity": ("perplexity", "perplexity"),
    "masked_perplexity": ("perplexity", "perplexity of masked tokens"),
    "accuracy": ("accuracy", "accuracy"),
    "accuracy_norm": ("accuracy", "accuracy, by length"),
    "top1": ("accuracy", "top-1 accuracy"),
    "top5": ("accuracy", "top-5 accuracy"),
    "cosine": ("cosine_similarity", "cosine to the dense model's features"),
    "kl": ("kl_divergence", "KL divergence from the dense model, nats"),
}
"""Key of `evaluate --json` → the Hub's type of metric, and its name."""


@dataclass(frozen=True)
class MeasuredFigure:
    """One figure.

    Attributes:
        data: name of the data.
        kind: type of metric on the Hub.
        name: for readers.
        value: of the model.
        against: value of the reference model.
    """

    data: str
    kind: str
    name: str
    value: float
    against: float | None


def read_figures(given: str, model: str) -> list[MeasuredFigure]:
    """Read the figures of `--evaluation NAME=FILE`.

    Args:
        given: name of the data, and file with the output of `evaluate --json`.
        model: name of the folder that is pushed.
    """
    data, mark, file = given.partition("=")
    if not (data.strip() and mark and file):
        raise UserError(f"--evaluation {given}: expected NAME=FILE, the data's name and what `evaluate --json` printed")
    try:
        values = parse_json_object(read_input(Path(file), _MOST_BYTES))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); `ckpt-prune evaluate --json` prints one") from error
    except ValueError as error:
        raise UserError(f"{file} is no JSON object ({error}); `ckpt-prune evaluate --json` prints one") from error
    measured = values.get("model")
    if isinstance(measured, str) and Path(measured).name != model:
        raise UserError(f"{file} has figures of {measured}, not of {model}")
    figures = list(_figures(escape_controls(data.strip()), values))
    if not figures:
        raise UserError(f"{file} has no figures; `ckpt-prune evaluate --json` prints them")
    return figures


def _figures(data: str, values: dict[str, Any]) -> Iterator[MeasuredFigure]:
    tasks = values.get("tasks")
    if isinstance(tasks, dict):
        for task, figures in tasks.items():
            if isinstance(figures, dict):
                yield from _figures(escape_controls(str(task)), figures)
        return
    against = values.get("against")
    window = values.get("window")
    for key, (kind, name) in _NAMES.items():
        value = _number(values.get(key))
        if value is not None:
            width = f", windows of {window} tokens" if kind == "perplexity" and isinstance(window, int) else ""
            other = _number(against.get(key)) if isinstance(against, dict) else None
            yield MeasuredFigure(data, kind, name + width, value, other)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def to_model_index(name: str, task: str | None, figures: list[MeasuredFigure]) -> list[dict[str, Any]]:
    """Return the figures as the Hub shows them beside a model."""
    results = []
    for data in dict.fromkeys(each.data for each in figures):
        metrics = [{"type": each.kind, "name": each.name, "value": each.value} for each in figures if each.data == data]
        results.append({"task": {"type": task or "other"}, "dataset": {"name": data, "type": data}, "metrics": metrics})
    return [{"name": name, "results": results}]


def figures_table(figures: list[MeasuredFigure]) -> list[str]:
    lines = ["## Measured", "", "| data | figure | this model | reference |", "|---|---|---|---|"]
    for each in figures:
        against = "" if each.against is None else f"{each.against:.4g}"
        lines.append(f"| {as_markdown(each.data)} | {as_markdown(each.name)} | {each.value:.4g} | {against} |")
    return lines
