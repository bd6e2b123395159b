"""Multiple choice: items in the shapes of the usual data sets, and answers by log-probability."""

import json
import math

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation import batches
from ckpt_prune.evaluation.choice_items import Item, read_items
from ckpt_prune.evaluation.choices import ChoiceScore, answer
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.shared_data import shared_data

SHAPES = {
    "arc": (
        {
            "question": "Why?",
            "choices": {"text": ["so", "not", "ever"], "label": ["A", "B", "C"]},
            "answerKey": "C",
        },
        Item(tuple(("Question: Why?\nAnswer:", f" {word}") for word in ("so", "not", "ever")), 2),
    ),
    "openbookqa": (
        {"question_stem": "It is", "choices": {"text": ["so", "not"], "label": ["1", "2"]}, "answerKey": "1"},
        Item((("It is", " so"), ("It is", " not")), 0),
    ),
    "piqa": (
        {"goal": "to sit", "sol1": "sit", "sol2": "stand", "label": 0},
        Item((("Question: to sit\nAnswer:", " sit"), ("Question: to sit\nAnswer:", " stand")), 0),
    ),
    "winogrande": (
        {"sentence": "Ann saw Bea so _ ran away.", "option1": "Ann", "option2": "Bea", "answer": "2"},
        Item((("Ann saw Bea so Ann", " ran away."), ("Ann saw Bea so Bea", " ran away.")), 1),
    ),
    "boolq": (
        {"question": "is it?", "label": 1},
        Item((("Question: is it?\nAnswer:", " no"), ("Question: is it?\nAnswer:", " yes")), 1),
    ),
    "boolq with its passage": (
        {"passage": "It is.", "question": "is it", "label": 1},
        Item((("It is.\nQuestion: is it?\nAnswer:", " no"), ("It is.\nQuestion: is it?\nAnswer:", " yes")), 1),
    ),
    "one's own": (
        {"question": "Why?", "choices": ["so", "not"], "answer": 1},
        Item((("Question: Why?\nAnswer:", " so"), ("Question: Why?\nAnswer:", " not")), 1),
    ),
}


GOOD = json.dumps(SHAPES["piqa"][0])


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        '{"question": "is it?", "label": 2}',
        '{"question": "Why?", "choices": ["so"], "answer": 0}',
        '{"question": "Why?", "choices": ["so", ""], "answer": 0}',
        '{"question": "Why?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "C"}',
        '{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}',
        '{"sentence": "a _ b", "option1": "a", "option2": "b", "answer": "3"}',
        '{"goal": "to sit", "sol1": "sit", "sol2": "stand", "label": -1}',
        "[" * 100_000,
    ],
)
def test_what_is_no_item_is_named_by_its_line(tmp_path, line):
    file = tmp_path / "items.jsonl"
    file.write_text(f"{GOOD}\n{line}\n")
    message = (
        r"items\.jsonl, line 2: (no multiple-choice item; expected question or |not valid JSON: |nested too deeply)"
    )
    with pytest.raises(UserError, match=message):
        read_items(file)


def test_files_without_items(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty\.jsonl holds no item"):
        read_items(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match=r"nowhere\.jsonl cannot be read as text"):
        read_items(tmp_path / "nowhere.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"binary\.jsonl: not UTF-8 text \(byte 0\)"):
        read_items(tmp_path / "binary.jsonl")


@pytest.mark.parametrize("file", ["arc_challenge_test", "piqa_valid", "winogrande_xl_dev", "boolq_dev_nopassage"])
def test_real_files_are_read_whole(file):
    (path,) = shared_data(f"tasks/{file}.jsonl")
    items = read_items(path)
    assert len(items) == sum(bool(line.strip()) for line in path.read_text().split("\n"))
    assert all(0 <= item.answer < len(item.options) for item in items)


def oracle(model, ids: list[int], tail: int) -> float:
    """The textbook's: one text at a time, token by token, in float64."""
    total = 0.0
    for place in range(len(ids) - tail, len(ids)):
        logits = model(torch.tensor([ids[:place]])).logits[0, -1].double()
        total += float(logits[ids[place]] - logits.logsumexp(0))
    return total


ITEMS = [
    Item((("the cat", " sat"), ("the cat", " ran on"), ("the cat", " is")), 1),
    Item((("a dog", " ran"), ("it", " ran")), 0),
    Item((("away", " then"), ("away", " so then")), 1),
]


@pytest.mark.parametrize(("template", "batch_tokens"), [(None, 8192), ("<s> $A", 20)])
def test_answers_are_those_of_the_textbook(template, batch_tokens, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_TOKENS", batch_tokens)
    model, tokenizer = tiny_llama(), tiny_tokenizer(template)
    picked, right, right_norm = [], 0, 0
    with torch.inference_mode():
        for item in ITEMS:
            plain, normed = [], []
            for context, continuation in item.options:
                ids = tokenizer(context + continuation)["input_ids"]  # a character is a token
                plain.append(oracle(model, ids, len(continuation)))
                normed.append(plain[-1] / len(continuation.strip()))
            picked.append(plain.index(max(plain)))
            right += picked[-1] == item.answer
            right_norm += normed.index(max(normed)) == item.answer
    score = answer(model, tokenizer, ITEMS, what="items")
    assert score.picked == tuple(picked)
    assert (score.items, score.accuracy, score.accuracy_norm) == (3, right / 3, right_norm / 3)
    assert score.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    assert score.stderr == pytest.approx((score.accuracy * (1 - score.accuracy) / 2) ** 0.5)


def test_a_text_beyond_the_context_loses_its_beginning():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    long = "the dog ran far away"
    cut = Item(((long, " so"), (long, " on")), 0)
    kept = Item(tuple(((long + continuation)[-16:-3], continuation) for _, continuation in cut.options), 0)
    assert answer(model, tokenizer, [cut], what="") == answer(model, tokenizer, [kept], what="")


def test_a_model_that_is_not_finite(monkeypatch):
    model = tiny_llama()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="the model's log-probabilities are not finite"):
        answer(model, tiny_tokenizer(), ITEMS, what="items")


def test_the_error_of_a_difference_counts_items_that_differ():
    ours, theirs = (
        ChoiceScore(4, sum(right) / 4, 0.0, 0.5, (0, 0, 0, 0), right)
        for right in ((True, True, False, False), (True, True, True, True))
    )
    # per item 0, 0, -1, -1: mean -1/2, sample variance 1/3
    both = {"agreement": 1, "difference": -0.5, "difference_stderr": math.sqrt(1 / 3 / 4)}
    assert ours.compare(theirs) == pytest.approx(both)
    assert ours.compare(ours) == {"agreement": 1, "difference": 0, "difference_stderr": 0}
