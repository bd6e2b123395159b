"""Measuring a causal language model by its answers: multiple-choice items, and continuations of prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.choice_items import read_items
from ckpt_prune.evaluation.choices import ChoiceScore, answer
from ckpt_prune.evaluation.generation import GeneratedText, continue_prompts
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.purpose import check_folder, check_generates, check_same_kind, check_same_tokenizer
from ckpt_prune.evaluation.results import PlainResult
from ckpt_prune.measure.samples.text import Bos, load_tokenizer
from ckpt_prune.show.section import Table


def name_files(files: Sequence[Path]) -> dict[str, Path]:
    """Return task → file of items, by the files' names."""
    named = {file.stem: file for file in files}
    if len(named) < len(files):
        raise UserError("--tasks: two files have the same name: figures could not be told apart")
    return named


def measure_choices(pair: Pair, files: Mapping[str, Path], limit: int | None, bos: Bos) -> PlainResult:
    """Let a model, and its reference, answer the items of files, by task, or the first `limit` of each."""
    _check(pair)
    tasks = {task: read_items(file, limit) for task, file in files.items()}

    def measure(model: PreTrainedModel, folder: Path) -> dict[str, ChoiceScore]:
        tokenizer = load_tokenizer(folder)
        return {name: answer(model, tokenizer, items, bos=bos, what=name) for name, items in tasks.items()}

    others = {} if pair.reference is None else measure(pair.load_reference(), pair.reference)
    record: dict[str, Any] = {}
    rows, apart = [], []
    for task, score in measure(pair.load(), pair.folder).items():
        record[task] = score.data()
        rows.append([task, str(pair.name), *score.cells()])
        if task in others:
            both = score.compare(others[task])
            record[task] |= {**both, "against": others[task].data()}
            rows.append([task, str(pair.reference_name), *others[task].cells()])
            shown = f"{both['difference']:+.1%}", f"{both['difference_stderr']:.1%}", f"{both['agreement']:.1%}"
            apart.append([task, *shown])
    tables = [Table(["task", "model", *ChoiceScore.headings()], rows)]
    if apart:
        tables.append(Table(["task", "difference", "+/-", "both choose the same"], apart))
    return PlainResult({**pair.names(), "tasks": record}, tables)


def measure_generation(pair: Pair, prompts: Sequence[str], tokens: int) -> PlainResult:
    """Let a model, and its reference, continue prompts greedily, by at most so many tokens."""
    _check(pair)

    def measure(model: PreTrainedModel, folder: Path) -> list[GeneratedText]:
        return continue_prompts(model, load_tokenizer(folder), prompts, tokens=tokens)

    others = None if pair.reference is None else measure(pair.load_reference(), pair.reference)
    record, parts = [], list[str]()
    for number, (prompt, text) in enumerate(zip(prompts, measure(pair.load(), pair.folder), strict=True)):
        record.append({"prompt": prompt, **asdict(text)})
        parts += [repr(prompt), text.describe(pair.name)]
        if others is not None:
            record[-1]["against"] = asdict(others[number])
            parts.append(others[number].describe(pair.reference_name))
    return PlainResult({**pair.names(), "generated": record}, parts)


def _check(pair: Pair) -> None:
    for folder in pair.folders:
        check_folder(folder)
        check_generates(folder)
    check_same_kind(pair.folder, pair.reference)
    check_same_tokenizer(pair.folder, pair.reference)
