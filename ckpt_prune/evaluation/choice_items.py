"""Multiple-choice items from jsonl files in the shapes of well-known data sets.

The prompts are those of EleutherAI's evaluation harness without examples, so that figures can be compared with its own.
"""

import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.text_encoding import check_unicode, decode_text, parse_json_rows

SHAPES = (
    "question or question_stem, choices (text, label) and answerKey (ARC, OpenBookQA); goal, sol1, sol2 and label "
    "(PIQA); sentence with _, option1, option2 and answer (WinoGrande); question and label 0 or 1 (BoolQ); "
    "activity_label, ctx_a, ctx_b, endings and label (HellaSwag); sentence1, sentence2 and label (RTE); or question, "
    "choices (a list) and answer (a number from 0)"
)


@dataclass(frozen=True)
class Item:
    """One item: the model's answer is the option whose continuation is likeliest after its context.

    Attributes:
        options: context and continuation of each; a continuation begins with its space.
        answer: the number of the right one, from 0.
    """

    options: tuple[tuple[str, str], ...]
    answer: int


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """Read the items of a jsonl file, one a line, or of an array; only the first so many with `limit`."""
    try:
        content = decode_text(path, path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read as text: a task is an lm-eval name or a .jsonl file") from error
    items: list[Item] = []
    for where, row in parse_json_rows(path, content):
        if limit is not None and len(items) == limit:
            break
        try:
            item = _read_item(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where}: no multiple-choice item; expected {SHAPES}") from error
        check_unicode(where, *chain.from_iterable(item.options))
        items.append(item)
    if not items:
        raise UserError(f"{path} holds no item")
    return items


def _read_item(row: dict[str, Any]) -> Item:
    """Return the item in a row. Raises ValueError, KeyError, TypeError or AttributeError if there is none."""
    keys = row.keys()
    if {"sentence", "option1", "option2", "answer"} <= keys:  # WinoGrande: one ending after either name
        before, after = row["sentence"].split("_")
        options = tuple((before + row[name], f" {after.strip()}") for name in ("option1", "option2"))
        return Item(options, ("1", "2").index(str(row["answer"])))
    if {"goal", "sol1", "sol2", "label"} <= keys:  # PIQA
        context, choices = _ask(row["goal"]), [row["sol1"], row["sol2"]]
        answer = int(row["label"])
    elif {"choices", "answerKey"} <= keys:  # ARC, and OpenBookQA, whose stems are beginnings of sentences
        context = row["question_stem"] if "question_stem" in keys else _ask(row["question"])
        choices = row["choices"]["text"]
        answer = row["choices"]["label"].index(row["answerKey"])
    elif {"activity_label", "ctx_a", "ctx_b", "endings", "label"} <= keys:  # HellaSwag
        context = _tidy(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        choices, answer = [_tidy(ending) for ending in row["endings"]], int(row["label"])
    elif {"sentence1", "sentence2", "label"} <= keys or {"premise", "hypothesis", "label"} <= keys:  # RTE
        first, second = ("sentence1", "sentence2") if "sentence1" in keys else ("premise", "hypothesis")
        context = f"{row[first]}\nQuestion: {row[second]} True or False?\nAnswer:"
        choices, label = ["True", "False"], row["label"]
        answer = ("entailment", "not_entailment").index(label) if isinstance(label, str) else int(label)
    elif {"question", "choices", "answer"} <= keys:
        context, choices, answer = _ask(row["question"]), row["choices"], int(row["answer"])
    else:  # BoolQ
        context, choices = _ask(f"{row['question'].removesuffix('?')}?"), ["no", "yes"]
        context = f"{row['passage']}\n{context}" if "passage" in keys else context
        answer = int(row["label"] if "label" in keys else row["answer"])
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise ValueError(choices)
    if len(choices) < 2 or not 0 <= answer < len(choices):
        raise ValueError(answer)
    return Item(tuple((context, f" {choice}") for choice in choices), answer)


def _tidy(text: str) -> str:
    """Write a text of HellaSwag as lm-eval does: WikiHow's marks of titles and steps go."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _ask(question: str) -> str:
    return f"Question: {question}\nAnswer:"
