"""Measuring a classifier of texts, or one that gives them a number, on texts whose labels are known."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.progress import track
from ckpt_prune.datasets.files import read_rows
from ckpt_prune.datasets.glue import GLUE, LabelTask, Metric, guess_task, parse_task_name
from ckpt_prune.evaluation.batches import check_finite, group_by_length
from ckpt_prune.evaluation.metrics import METRICS, rank_correlation
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.purpose import check_folder, check_same_kind, check_same_tokenizer
from ckpt_prune.evaluation.results import PlainResult
from ckpt_prune.evaluation.whole_model import purpose_of_folder, read_config
from ckpt_prune.measure.samples.text import check_vocabulary, load_tokenizer
from ckpt_prune.measure.streams.readout import allow_several_texts, kl_divergence
from ckpt_prune.model.context import context_length
from ckpt_prune.show.section import Table

PURPOSE = "text-classification"
_UNLIMITED = 10**6
"""Tokenizers that know no limit name one beyond this."""
# The longest first: a pair's first text may be named as that of a row with one.
_COLUMNS = sorted(
    dict.fromkeys([*(task.columns for task in GLUE.values()), ("text1", "text2"), ("text",)]), key=len, reverse=True
)


@dataclass(frozen=True)
class LabelItem:
    """One text, or two that belong together, and its label: a class from 0, a number, or the name of a class."""

    texts: tuple[str, ...]
    label: float | str


@dataclass(frozen=True)
class _Task:
    name: str
    task: LabelTask
    items: list[LabelItem]


def read_labelled(path: Path, task: LabelTask, limit: int | None = None) -> list[LabelItem]:
    """Read a .jsonl (also .gz) or .parquet file of labelled texts, or its first `limit` rows."""
    items: list[LabelItem] = []
    try:
        for row in read_rows(path, (*task.columns, "label")):
            if len(items) == limit:
                break
            items.append(_read_item(row, task, f"{path}, row {len(items) + 1}"))
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as labelled texts: {one_line(error)}") from error
    if not items:
        raise UserError(f"{path} holds no labelled text")
    return items


def _read_item(row: Mapping[str, Any], task: LabelTask, where: str) -> LabelItem:
    shapes = [task.columns] if task.columns else _COLUMNS
    columns = next((shape for shape in shapes if row.keys() >= {*shape}), ())
    label, texts = row.get("label"), tuple(row[column] for column in columns)
    is_number = isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
    if not columns or not (isinstance(label, str) or is_number) or not all(isinstance(text, str) for text in texts):
        expected = " or ".join("+".join(shape) for shape in shapes)
        raise UserError(f"{where}: no labelled text; expected label, and {expected}")
    if label == -1:
        raise UserError(
            f"{where}: label -1 stands for one that is not public, as in GLUE's test splits: give the validation split"
        )
    return LabelItem(texts, label)  # type: ignore[arg-type]


def is_labelled(folder: Path) -> bool:
    """Return whether a folder holds a model whose answers are labels of texts."""
    return (folder / "config.json").is_file() and purpose_of_folder(folder) == PURPOSE


def measure_labelled(pair: Pair, names: Sequence[str], limit: int | None) -> PlainResult:
    """Let a model, and its reference, label texts: all of each task, or the first `limit`.

    A task is one of GLUE (`glue.parse_task_name`), or a file of labelled texts.
    """
    for folder in pair.folders:
        check_folder(folder)
        if purpose_of_folder(folder) != PURPOSE:
            raise UserError(
                f"{folder} gives no labels of texts: tasks of GLUE are for models with a sequence-classification head"
            )
    check_same_kind(pair.folder, pair.reference)
    check_same_tokenizer(pair.folder, pair.reference)
    tasks = [_read_task(name, limit) for name in names]
    if len({task.name for task in tasks}) < len(tasks):
        raise UserError("--tasks: two have the same name: figures could not be told apart")
    logits, others = _run(pair.load(), load_tokenizer(pair.folder), tasks), dict[str, Tensor]()
    if pair.reference is not None:
        others = _run(pair.load_reference(), load_tokenizer(pair.reference), tasks)
    record: dict[str, Any] = {}
    rows, apart, by_number = [], list[str](), list[str]()
    for task in tasks:
        by_name, figures = _score(pair.folder, task, logits[task.name])
        record[task.name] = {"items": len(task.items), "by_name": by_name, **figures}
        theirs: dict[str, float] = {}
        if pair.reference is not None:
            _, theirs = _score(pair.reference, task, others[task.name])
            both, sentence = _compare(logits[task.name], others[task.name])
            differences = {metric: value - theirs[metric] for metric, value in figures.items()}
            record[task.name] |= {**both, "difference": differences, "against": theirs}
            apart.append(f"{task.name}: {sentence}")
        for metric, value in figures.items():
            other = [f"{theirs[metric]:.4f}", f"{value - theirs[metric]:+.4f}"] if theirs else []
            rows.append([task.name, metric, f"{value:.4f}", *other, f"{len(task.items):,}"])
        if by_name is False:
            by_number.append(
                f"{task.name}: the model does not name its classes as the task does; they are taken by number"
            )
    against = [str(pair.reference_name), "difference"] if others else []
    table = Table(["task", "metric", str(pair.name), *against, "texts"], rows)
    return PlainResult({**pair.names(), "tasks": record}, [table, *apart, *by_number])


def _read_task(name: str, limit: int | None) -> _Task:
    if (named := parse_task_name(name)) is not None:
        return _Task(named.name, named.task, read_labelled(named.file(), named.task, limit))
    file = Path(name)
    return _Task(file.stem, guess_task(file), read_labelled(file, guess_task(file), limit))


@torch.inference_mode()
def _run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[_Task]) -> dict[str, Tensor]:
    """Return what a model's head gives for every text of every task, (N, labels) float32 on CPU."""
    if tokenizer.pad_token_id is None:
        raise UserError("the tokenizer has no padding token, so texts cannot be read together")
    model.eval()
    allow_several_texts(model, tokenizer.pad_token_id)
    config = model.config.get_text_config()
    pad = getattr(config, "pad_token_id", tokenizer.pad_token_id)
    limits = [limit for limit in (context_length(config), tokenizer.model_max_length) if limit and limit <= _UNLIMITED]
    truncation: dict[str, Any] = {"truncation": True, "max_length": min(limits)} if limits else {}
    logits = {}
    for task in tasks:
        rows = [tokenizer(*item.texts, **truncation) for item in task.items]
        check_vocabulary(torch.tensor([token for row in rows for token in row["input_ids"]]), model.config)
        outputs: dict[int, Tensor] = {}
        for batch in track(group_by_length([len(row["input_ids"]) for row in rows]), task.name, unit="batch"):
            # Padding on the right changes nothing for a causal model's tokens before it. The token is the one that the
            # model's class takes for padding: the tokenizer may name another.
            padded = tokenizer.pad([rows[index] for index in batch], padding_side="right", return_tensors="pt")
            padded["input_ids"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, pad)
            inputs = {name: padded[name].to(model.device) for name in tokenizer.model_input_names if name in padded}
            outputs |= zip(batch, model(**inputs).logits.float().cpu(), strict=True)
        logits[task.name] = torch.stack([outputs[index] for index in range(len(rows))])
        check_finite("model's logits", logits[task.name])
    return logits


def _score(folder: Path, task: _Task, logits: Tensor) -> tuple[bool | None, dict[str, float]]:
    """Return a task's metrics, and whether the model's classes were matched by their names; None for numbers."""
    count = logits.shape[1]
    default: tuple[Metric, ...] = (
        ("pearson", "spearman") if count == 1 else ("accuracy", "f1") if count == 2 else ("accuracy",)
    )
    metrics = task.task.metrics or default
    if ("pearson" in metrics) != (count == 1):
        gives = "numbers" if count == 1 else f"{count} classes"
        raise UserError(f"{folder} gives {gives}, and {task.name} is scored by {' and '.join(metrics)}: not its task")
    labels = [item.label for item in task.items]
    if count == 1:
        wrong = next((label for label in labels if isinstance(label, str)), None)
        if wrong is not None:
            raise UserError(f"{folder} gives numbers, and {task.name} has the label {wrong!r}: not its task")
        true, predicted, by_name = torch.tensor(labels, dtype=torch.float64), logits[:, 0].double(), None
    else:
        classes, class_of_output, by_name = _match_classes(folder, task.task, count)
        if len(classes) != count:
            raise UserError(f"{folder} has {count} classes, and {task.name} has {len(classes)}: not its task")
        true = torch.tensor([_find_class(label, classes, task.name) for label in labels])
        predicted = class_of_output[logits.argmax(1)]
    return by_name, {metric: METRICS[metric](predicted, true) for metric in metrics}


def _match_classes(folder: Path, task: LabelTask, count: int) -> tuple[list[str], Tensor, bool]:
    """Match the outputs of a model with the classes of a task.

    A model that was trained on the task may have its classes in another order (MNLI's do), and says so by their names.
    If it has no names of its own, they are taken by number.

    Returns:
        Names of the task's classes; the class of every output, (count,) int64; and whether they were matched by name.
    """
    names = read_config(folder).get("id2label")
    outputs = [_normalise(str(names.get(str(at), ""))) for at in range(count)] if isinstance(names, dict) else []
    classes = list(task.classes) or outputs or [str(at) for at in range(count)]
    if sorted(outputs) == sorted(classes):
        return classes, torch.tensor([classes.index(name) for name in outputs]), True
    return classes, torch.arange(count), False


def _find_class(label: float | str, classes: Sequence[str], task: str) -> int:
    if isinstance(label, str):
        if _normalise(label) in classes:
            return classes.index(_normalise(label))
        raise UserError(f"{task} has the label {label!r}; known are {', '.join(classes)}")
    if label != int(label) or not 0 <= label < len(classes):
        raise UserError(f"{task} has the label {label}: {len(classes)} classes are numbered from 0")
    return int(label)


def _normalise(name: str) -> str:
    return "_".join(name.casefold().replace("-", " ").replace("_", " ").split())


def _compare(ours: Tensor, theirs: Tensor) -> tuple[dict[str, float | None], str]:
    """Return how far two models answer alike, in JSON's words and in a sentence: classes, or the order of numbers."""
    if ours.shape != theirs.shape:
        raise UserError("the two heads differ in their classes: what they give cannot be compared")
    if ours.shape[1] == 1:
        order = rank_correlation(ours[:, 0], theirs[:, 0])
        sentence = f"rank correlation of the two models' numbers {order:.4f}"
        return {"kl": None, "agreement": None, "rank_correlation": order}, sentence
    agreement = float((ours.argmax(1) == theirs.argmax(1)).double().mean())
    kl = kl_divergence(theirs, ours) / len(ours)
    sentence = f"both put the same class first for {agreement:.1%}, KL {kl:z.6f}"
    return {"kl": kl, "agreement": agreement, "rank_correlation": None}, sentence
