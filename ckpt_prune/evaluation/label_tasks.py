"""Measuring a classifier of texts, or one that gives them a number, on texts whose labels are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.architectures.context import context_length
from ckpt_prune.calibration.readout import kl_divergence, read_whole
from ckpt_prune.calibration.text import load_tokenizer
from ckpt_prune.checkpoint.digests import tokenizer_fingerprint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.datasets.glue import LabelTask, Metric, guess_task, parse_task_name
from ckpt_prune.evaluation.batches import by_length, check_tokens
from ckpt_prune.evaluation.correlation import rank_correlation
from ckpt_prune.evaluation.label_items import LabelItem, read_labelled
from ckpt_prune.evaluation.metrics import METRICS
from ckpt_prune.evaluation.purpose import check_folder, check_same_kind
from ckpt_prune.evaluation.results import Alike, LabelResult, LabelScore
from ckpt_prune.evaluation.texts import Pair
from ckpt_prune.evaluation.whole_model import purpose_of_folder, read_config

PURPOSE = "text-classification"
_UNLIMITED = 10**6
"""Tokenizers that know no length say one beyond this."""


@dataclass(frozen=True)
class _Task:
    known: LabelTask
    items: list[LabelItem]


def is_labelled(folder: Path) -> bool:
    """Whether a folder holds a model whose answers are labels of texts."""
    return (folder / "config.json").is_file() and purpose_of_folder(folder) == PURPOSE


def measure_labelled(pair: Pair, names: Sequence[str], limit: int | None) -> LabelResult:
    """Let a model, and a reference where there is one, label texts.

    Args:
        pair: the two.
        names: of tasks of GLUE (`task_names`), or files of labelled texts.
        limit: only the first so many rows of each.

    Raises:
        UserError: the model gives no labels of texts, a task cannot be read, or its labels are not the model's.
    """
    for path in (pair.folder, pair.reference):
        if path is None:
            continue
        check_folder(path)
        if purpose_of_folder(path) != PURPOSE:
            raise UserError(
                f"{path} gives no labels of texts: tasks of GLUE are for models with a sequence-classification head"
            )
    check_same_kind(pair.folder, pair.reference)
    if pair.reference is not None and tokenizer_fingerprint(pair.folder) != tokenizer_fingerprint(pair.reference):
        raise UserError(f"{pair.folder} and {pair.reference} have different tokenizers: they read a text differently")
    tasks = _read(names, limit)
    found = _logits(pair.load(), load_tokenizer(pair.folder), tasks)
    model, others, references = pair.folder, None, None
    if pair.reference is not None:
        others = _logits(pair.load_reference(), load_tokenizer(pair.reference), tasks)
        references = {name: _score(pair.reference, name, task, others[name]) for name, task in tasks.items()}
    scores = {name: _score(model, name, task, found[name]) for name, task in tasks.items()}
    alike = None if others is None else {name: _alike(found[name], others[name]) for name in tasks}
    return LabelResult(pair.name, scores, pair.reference_name, references, alike)


def _read(names: Sequence[str], limit: int | None) -> dict[str, _Task]:
    tasks: dict[str, _Task] = {}
    for given in names:
        own = parse_task_name(given)
        name = Path(given).stem if own is None else own.name
        known = guess_task(Path(given)) if own is None else own.task
        if name in tasks:
            raise UserError("--tasks: two have the same name: figures could not be told apart")
        tasks[name] = _Task(known, read_labelled(Path(given) if own is None else own.file(), known, limit))
    return tasks


@torch.inference_mode()
def _logits(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Mapping[str, _Task]
) -> dict[str, Tensor]:
    """What a model's head gives for every text of every task, (N, labels) float32 on CPU."""
    if tokenizer.pad_token_id is None:
        raise UserError("the tokenizer has no padding token, so texts cannot be read together")
    return {name: _of_task(model.eval(), tokenizer, task.items, name) for name, task in tasks.items()}


def _of_task(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: Sequence[LabelItem], what: str
) -> Tensor:
    context, most = context_length(model.config.get_text_config()), tokenizer.model_max_length
    limits = [each for each in (context, most if most < _UNLIMITED else None) if each is not None]
    cut: dict[str, Any] = {"truncation": True, "max_length": min(limits)} if limits else {}
    rows = [tokenizer(*item.texts, **cut) for item in items]
    lengths = [len(row["input_ids"]) for row in rows]
    assert tokenizer.pad_token_id is not None
    check_tokens(model, torch.tensor([token for row in rows for token in row["input_ids"]], dtype=torch.int64))
    read_whole(model, tokenizer.pad_token_id)
    pad = getattr(model.config.get_text_config(), "pad_token_id", tokenizer.pad_token_id)
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    for batch in track(by_length(lengths), what, unit="batch"):
        # On the right, where it changes nothing of what a causal model makes of the tokens before, and by the token
        # that the model's class takes for padding: the tokenizer may name another.
        padded = tokenizer.pad([rows[index] for index in batch], padding_side="right", return_tensors="pt")
        padded["input_ids"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, pad)
        given = {name: value.to(model.device) for name, value in padded.items() if name in tokenizer.model_input_names}
        logits = model(**given).logits.float().cpu()
        if not all_finite(logits):
            raise UserError("the model's logits are not numbers (NaN): its weights are damaged or overflow here")
        for index, row in zip(batch, logits, strict=True):
            found[index] = row
    return torch.stack(found)


def _score(folder: Path, name: str, task: _Task, logits: Tensor) -> LabelScore:
    labels = logits.shape[1]
    metrics = task.known.metrics or _metrics(labels)
    if ("pearson" in metrics) != (labels == 1):
        gives = "numbers" if labels == 1 else f"{labels} classes"
        raise UserError(f"{folder} gives {gives}, and {name} is scored by {' and '.join(metrics)}: not its task")
    if labels == 1:
        wrong = next((item.label for item in task.items if isinstance(item.label, str)), None)
        if wrong is not None:
            raise UserError(f"{folder} gives numbers, and {name} has the label {wrong!r}: not its task")
        true = torch.tensor([float(item.label) for item in task.items], dtype=torch.float64)
        return LabelScore(len(task.items), _figures(metrics, logits[:, 0].double(), true), None)
    classes, own, by_name = _classes(folder, task.known, labels)
    if len(classes) != labels:
        raise UserError(f"{folder} has {labels} classes, and {name} has {len(classes)}: not its task")
    true = torch.tensor([_number(item.label, classes, name) for item in task.items])
    return LabelScore(len(task.items), _figures(metrics, own[logits.argmax(1)], true), by_name)


def _figures(metrics: Sequence[Metric], predicted: Tensor, true: Tensor) -> dict[str, float]:
    return {metric: METRICS[metric](predicted, true) for metric in metrics}


def _metrics(labels: int) -> tuple[Metric, ...]:
    """What a task that is not known is scored by."""
    return ("pearson", "spearman") if labels == 1 else ("accuracy", "f1") if labels == 2 else ("accuracy",)


def _classes(folder: Path, known: LabelTask, labels: int) -> tuple[list[str], Tensor, bool]:
    """Names of a task's classes, the model's outputs in their order, and whether both have the same names.

    A model that was trained on the task may have its classes in another order (MNLI's do), and says so by their names.
    Where it has no names of its own they are taken by number.

    Returns:
        The names; the task's class of every output, (labels,) int64; and whether they were told apart by name.
    """
    said = read_config(folder).get("id2label")
    own = [_plain(str(said.get(str(at), ""))) for at in range(labels)] if isinstance(said, dict) else []
    classes = list(known.classes) or own or [str(at) for at in range(labels)]
    if sorted(own) == sorted(classes):
        return classes, torch.tensor([classes.index(each) for each in own]), True
    return classes, torch.arange(labels), False


def _number(label: float | str, classes: Sequence[str], name: str) -> int:
    """A label as the number of its class."""
    if isinstance(label, str):
        if _plain(label) in classes:
            return classes.index(_plain(label))
        raise UserError(f"{name} has the label {label!r}; known are {', '.join(classes)}")
    if label != int(label) or not 0 <= label < len(classes):
        raise UserError(f"{name} has the label {label}: {len(classes)} classes are numbered from 0")
    return int(label)


def _plain(name: str) -> str:
    """A class's name however it is spelt."""
    return "_".join(name.casefold().replace("-", " ").replace("_", " ").split())


def _alike(ours: Tensor, theirs: Tensor) -> Alike:
    if ours.shape != theirs.shape:
        raise UserError("the two heads differ in their classes: what they give cannot be compared")
    if ours.shape[1] == 1:
        return Alike(None, None, rank_correlation(ours[:, 0], theirs[:, 0]))
    same = float((ours.argmax(1) == theirs.argmax(1)).double().mean())
    return Alike(kl_divergence(theirs, ours) / len(ours), same, None)
