"""Windows at random places, against loops as the released code of GPTQ and Wanda has them."""

import json
import random
from pathlib import Path

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.datasets.texts import parse_text_name
from ckpt_prune.measure.samples.choose import choose_fresh_samples, choose_samples
from ckpt_prune.measure.samples.text import draw_windows, load_tokenizer, read_documents
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from tests.families import make

WINDOW, SEED = 12, 3
WORDS = [f"w{n % 7} {n}" for n in range(60)]
DOCUMENTS = [" ".join(WORDS[: 3 * n + 1]) for n in range(9)]
"""The first ones are shorter than a window."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make(tmp_path_factory.mktemp("drawn") / "dense", "llama")
    (folder.parent / "text.txt").write_text(" ".join(WORDS))
    (folder.parent / "rows.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in DOCUMENTS))
    return Model.open(folder)


def options(model: Model, text: str, choose: str, **changes: object) -> SampleOptions:
    given = {"text": (model.checkpoint.path.parent / text,), "choose": choose, "seed": SEED, "window": WINDOW}
    return SampleOptions.model_validate(given | {"samples": 20} | changes)


def ids(model: Model, text: str) -> list[int]:
    return load_tokenizer(model.checkpoint.path)(text)["input_ids"]


def test_offsets_are_those_of_gptqs_code(model: Model):
    stream = ids(model, " ".join(WORDS))
    random.seed(SEED)
    expected = []
    for _ in range(20):
        i = random.randint(0, len(stream) - WINDOW - 1)
        expected.append(stream[i : i + WINDOW])
    chosen = choose_samples(model, options(model, "text.txt", "offsets"), say=print)
    assert chosen.batch(slice(None))["input_ids"].tolist() == expected
    later = choose_samples(model, options(model, "text.txt", "offsets", samples=8), skip=12, say=print)
    assert later.batch(slice(None))["input_ids"].tolist() == expected[12:]
    # Later windows may overlap the earlier: nobody knows whether they were seen.
    assert choose_fresh_samples(model, options(model, "text.txt", "offsets"), chosen, say=print).seen is None


def test_documents_are_those_of_wandas_code(model: Model):
    random.seed(SEED)
    expected = []
    for _ in range(20):
        while True:
            document = ids(model, DOCUMENTS[random.randint(0, len(DOCUMENTS) - 1)])
            if len(document) > WINDOW:
                break
        i = random.randint(0, len(document) - WINDOW - 1)
        expected.append(document[i : i + WINDOW])
    chosen = choose_samples(model, options(model, "rows.jsonl", "documents"), say=print)
    assert chosen.batch(slice(None))["input_ids"].tolist() == expected
    assert torch.unique(chosen.batch(slice(None))["input_ids"], dim=0).shape[0] > 1
    other = choose_samples(model, options(model, "rows.jsonl", "documents", seed=4), say=print)
    assert other.fingerprint != chosen.fingerprint


def test_what_is_too_short_is_told():
    with pytest.raises(UserError, match="the longest of 3 documents has 5 tokens, and a window of 5 must be shorter"):
        draw_windows(lambda at: 3 + at, 3, samples=2, window=5, seed=0)
    with pytest.raises(UserError, match="the text has 5 tokens"):
        draw_windows(lambda _: 5, 1, samples=2, window=5, seed=0)
    assert {at for at, _ in draw_windows(lambda at: 3 + at, 3, samples=9, window=4, seed=0)} == {2}


def test_documents_of_a_file_and_of_a_named_text(tmp_path: Path):
    (tmp_path / "one.txt").write_text("a\n\nb")
    assert read_documents(tmp_path / "one.txt") == ["a\n\nb"]
    rows = "\n".join(json.dumps({"text": f"row {n}"}) for n in range(3))
    (tmp_path / "train.jsonl").write_text(rows)
    assert read_documents(tmp_path / "train.jsonl") == ["row 0", "row 1", "row 2"]
    named = parse_text_name(tmp_path / "c4:train")
    assert named is not None
    assert named.documents() == ["row 0", "row 1", "row 2"]
    assert named.read() == "row 0 row 1 row 2"
