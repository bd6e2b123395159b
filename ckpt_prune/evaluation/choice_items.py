"""Multiple-choice items in plain jsonl, in the shapes that the usual data sets have, as texts to compare.

The prompts are those of EleutherAI's evaluation harness without examples, so that figures can be held against its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.text_encoding import check_unicode, decode_text, parse_json_rows

SHAPES = (
    "question or question_stem, choices (text, label) and answerKey (ARC, OpenBookQA); goal, sol1, sol2 and label "
    "(PIQA); sentence with _, option1, option2 and answer (WinoGrande); question and label 0 or 1 (BoolQ); or "
    "question, choices (a list) and answer (a number from 0)"
)


@dataclass(frozen=True)
class Item:
    """One item: whichever option's continuation is likeliest after its context is the model's answer.

    Attributes:
        options: of each choice the context and the continuation, which begins with its space.
        answer: the number of the right one, from 0.
    """

    options: tuple[tuple[str, str], ...]
    answer: int


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """Read a file of items.

    Args:
        path: jsonl, one item a line, or an array of them; blank lines are passed over.
        limit: only the first so many.

    Raises:
        UserError: the file cannot be read, holds no item, or a line is no item; the message names it.
    """
    try:
        content = decode_text(path, path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read as text: a task is an lm-eval name or a .jsonl file") from error
    items: list[Item] = []
    for where, row in parse_json_rows(path, content):
        if limit is not None and len(items) == limit:
            break
        try:
            item = _item(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where}: no multiple-choice item; expected {SHAPES}") from error
        check_unicode(where, *chain.from_iterable(item.options))
        items.append(item)
    if not items:
        raise UserError(f"{path} holds no item")
    return items


def _item(raw: dict[str, Any]) -> Item:
    kinds: tuple[tuple[set[str], Callable[[dict[str, Any]], Item]], ...] = (
        ({"goal", "sol1", "sol2", "label"}, _piqa),
        ({"sentence", "option1", "option2", "answer"}, _winogrande),
        ({"choices", "answerKey"}, _arc),
        ({"question", "choices", "answer"}, _listed),
        ({"question", "label"}, _boolq),
    )
    read = next((read for keys, read in kinds if keys <= raw.keys()), None)
    if read is None:
        raise KeyError(raw)
    item = read(raw)
    if len(item.options) < 2 or not 0 <= item.answer < len(item.options):
        raise ValueError(raw)
    return item


def _of(context: str, choices: list[str], answer: int) -> Item:
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise ValueError(choices)
    return Item(tuple((context, f" {choice}") for choice in choices), answer)


def _piqa(raw: dict[str, Any]) -> Item:
    return _of(f"Question: {raw['goal']}\nAnswer:", [raw["sol1"], raw["sol2"]], int(raw["label"]))


def _arc(raw: dict[str, Any]) -> Item:
    choices = raw["choices"]
    answer = choices["label"].index(raw["answerKey"])
    # OpenBookQA's stems are beginnings of sentences, which the choice ends.
    context = raw["question_stem"] if "question_stem" in raw else f"Question: {raw['question']}\nAnswer:"
    return _of(context, choices["text"], answer)


def _listed(raw: dict[str, Any]) -> Item:
    return _of(f"Question: {raw['question']}\nAnswer:", raw["choices"], int(raw["answer"]))


def _boolq(raw: dict[str, Any]) -> Item:
    context = f"Question: {raw['question'].removesuffix('?')}?\nAnswer:"
    if "passage" in raw:
        context = f"{raw['passage']}\n{context}"
    return _of(context, ["no", "yes"], int(raw["label"]))


def _winogrande(raw: dict[str, Any]) -> Item:
    """The same ending after either name: what counts is how likely it is then."""
    before, after = raw["sentence"].split("_")
    options = tuple((before + raw[name], f" {after.strip()}") for name in ("option1", "option2"))
    return Item(options, ("1", "2").index(str(raw["answer"])))
