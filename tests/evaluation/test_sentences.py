"""Embeddings are those of sentence-transformers, which loads a folder by itself, and how they are compared."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation import embedder
from ckpt_prune.evaluation.sentences import compare_sentences, open_embedder
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.measure.samples.text import load_tokenizer
from tests.cli.running import edit_weights
from tests.refusals import refusal
from tests.sentence_folders import MODES, make_sentences

TEXTS = ["the cat sat", "on a mat and then the dog ran", "far away", "a", "the CAT sat on a mat", "then"]
PROMPT = {"prompts": {"query": "is it ", "document": ""}, "default_prompt_name": "query"}


def open_model(folder: Path) -> embedder.Embedder:
    return open_embedder(load_model(folder, device="cpu"), folder, load_tokenizer(folder))


@pytest.mark.parametrize("batch_tokens", [8192, 60])
@pytest.mark.parametrize(
    ("made", "prompts", "pooling"),
    [
        ({}, {}, {}),
        ({"modes": MODES, "dense": True}, {}, {}),
        ({"normal": False, "max_seq_length": 9, "do_lower_case": True}, {}, {}),
        ({"normal": False}, PROMPT, {}),
        ({"normal": False}, PROMPT, {"include_prompt": False}),
        ({"normal": False}, PROMPT | {"default_prompt_name": None}, {"pooling_mode": ["lasttoken", "cls"]}),
    ],
    ids=["plain", "all modes", "cut", "prompt", "unpooled prompt", "prompt not asked for"],
)
def test_embeddings_are_those_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, prompts: Any, pooling: Any, batch_tokens: int
) -> None:
    folder = make_sentences(tmp_path / "m", **made)
    settings = json.loads((folder / "1_Pooling/config.json").read_text())
    (folder / "1_Pooling/config.json").write_text(json.dumps(settings | pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    expected = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    monkeypatch.setattr(embedder, "BATCH_TOKENS", batch_tokens)
    model = open_model(folder)
    for most in (24, 12):
        embeddings, tokens = model.embed(TEXTS, most)
        expected.max_seq_length = min(most, made.get("max_seq_length", most))
        np.testing.assert_allclose(embeddings.numpy(), expected.encode(TEXTS), rtol=1e-4, atol=1e-5)
        prompt = prompts.get("prompts", {}).get(prompts.get("default_prompt_name"), "")
        assert tokens == sum(min(expected.max_seq_length, len(prompt + text) + 2) for text in TEXTS)


def test_figures_are_those_of_the_embeddings(tmp_path: Path) -> None:
    a, b = (make_sentences(tmp_path / name, normal=False) for name in ("a", "b"))
    edit_weights(
        str(b),
        lambda tensors: [
            t.add_(torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) * 0.3) for t in tensors.values()
        ],
    )
    comparison = compare_sentences(open_model(b), open_model(a), TEXTS, 24)
    x, y = (open_model(folder).embed(TEXTS, 24)[0].double().numpy() for folder in (a, b))
    x, y = (embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True) for embeddings in (x, y))
    pairs = [(embeddings @ embeddings.T)[np.triu_indices(len(TEXTS), 1)] for embeddings in (x, y)]
    near = [(embeddings @ embeddings.T - 2 * np.eye(len(TEXTS))).argmax(1) for embeddings in (x, y)]
    assert comparison.cosine == pytest.approx((x * y).sum(1).mean(), abs=1e-12)
    assert comparison.rank_correlation == pytest.approx(spearmanr(*pairs).statistic, abs=1e-9)
    assert comparison.nearest == (near[0] == near[1]).mean()
    assert (comparison.texts, comparison.pairs) == (6, 15)
    assert -1 < comparison.rank_correlation < 0.999
    same = compare_sentences(open_model(a), open_model(a), TEXTS, 24)
    assert (same.cosine, same.rank_correlation, same.nearest) == (pytest.approx(1), pytest.approx(1), 1)


TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
LIST = "modules.json"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (LIST, "no", "is not the list of modules that sentence-transformers writes"),
        (LIST, [TRANSFORMER | {"path": "0_T"}, POOLING], "does not begin with a Transformer in the folder itself"),
        (LIST, [TRANSFORMER, POOLING | {"path": "../x"}], "names ../x, which is no folder inside"),
        (LIST, [TRANSFORMER, POOLING, {"type": "a.Odd", "path": "1_Pooling"}], "cannot load its modules: "),
        (LIST, [TRANSFORMER, {"type": "a.Dense", "path": "2_Dense"}, POOLING], "its modules cannot be run: "),
        (LIST, [TRANSFORMER], "has no Pooling behind its Transformer, so a text has no one embedding"),
        ("1_Pooling/config.json", {"embedding_dimension": 4, "pooling_mode": "odd"}, "cannot load its modules: "),
        ("config_sentence_transformers.json", {"default_prompt_name": "odd"}, "cannot load its modules: "),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, file: str, content: Any, message: str) -> None:
    folder = make_sentences(tmp_path / "m", dense=True)
    (folder / file).write_text(json.dumps(content))
    assert message in refusal(lambda: open_model(folder).embed(TEXTS, 8))


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_sentences(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(
        UserError, match=r'^embeddings need sentence-transformers: pip install "\.\[embed\]" in the checkout'
    ):
        open_model(folder)
