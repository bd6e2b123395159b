"""Embeddings as sentence-transformers folders say, text by text from definitions, and how they are compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation import batches
from ckpt_prune.evaluation.sentences import SentenceModel, compare_sentences
from ckpt_prune.evaluation.whole_model import load_model
from tests.cli.running import edit_weights
from tests.sentence_folders import MODES, make_sentences

TEXTS = ["the cat sat", "on a mat and then the dog ran", "far away", "a", "the cat sat on a mat", "then"]


def open_model(folder: Path) -> SentenceModel:
    return SentenceModel(load_model(folder, device="cpu"), folder, AutoTokenizer.from_pretrained(folder))


def pool(states: np.ndarray, mode: str) -> np.ndarray:
    places = np.arange(1, len(states) + 1)
    return {
        "cls_token": lambda: states[0],
        "lasttoken": lambda: states[-1],
        "max_tokens": lambda: states.max(0),
        "mean_tokens": lambda: states.mean(0),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / np.sqrt(len(states)),
        "weightedmean_tokens": lambda: (states * places[:, None]).sum(0) / places.sum(),
    }[mode]()


@torch.inference_mode()
def by_hand(folder: Path, modes: tuple[str, ...], most: int) -> np.ndarray:
    """Embeddings of `TEXTS`, one text at a time."""
    model, tokenizer, embeddings = load_model(folder, device="cpu"), AutoTokenizer.from_pretrained(folder), []
    for text in TEXTS:
        batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=most)
        states = model(**batch).last_hidden_state[0].double().numpy()
        order = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
        value = np.concatenate([pool(states, mode) for mode in order if mode in modes])
        if (folder / "2_Dense").is_dir():
            dense_weights = {
                name: tensor.double().numpy()
                for name, tensor in load_file(folder / "2_Dense/model.safetensors").items()
            }
            value = np.tanh(dense_weights["linear.weight"] @ value + dense_weights["linear.bias"])
        if "Normalize" in (folder / "modules.json").read_text():
            value = value / np.linalg.norm(value)
        embeddings.append(value)
    return np.stack(embeddings)


@pytest.mark.parametrize(
    "modes", [*((mode,) for mode in MODES), MODES], ids=lambda modes: modes[0] if modes[1:] == () else "all"
)
def test_padding_and_batches_do_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: tuple[str, ...]
) -> None:
    every = modes == MODES
    folder = make_sentences(tmp_path / "m", modes=modes, dense=every, normal=every)
    monkeypatch.setattr(batches, "BATCH_TOKENS", 60)
    embeddings, tokens = open_model(folder).embed(TEXTS, 24)
    np.testing.assert_allclose(embeddings.numpy(), by_hand(folder, modes, 24), rtol=1e-4, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokens == sum(min(24, len(tokenizer(text).input_ids)) for text in TEXTS)


def test_a_text_is_cut_to_what_the_folder_says(tmp_path: Path) -> None:
    folder = make_sentences(tmp_path / "m", max_seq_length=9, do_lower_case=True)
    model = open_model(folder)
    assert model.longest == 9
    np.testing.assert_allclose(
        model.embed(TEXTS, 24)[0].numpy(), by_hand(folder, ("mean_tokens",), 9), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(model.embed([text.upper() for text in TEXTS], 24)[0], model.embed(TEXTS, 24)[0])


def write_prompts(folder: Path, **settings: Any) -> Path:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("pools", [True, False])
def test_the_default_prompt_stands_before_every_text(tmp_path: Path, pools: bool) -> None:
    """Its tokens, and what the tokenizer opens a text with, are pooled unless the folder says otherwise."""
    folder = make_sentences(tmp_path / "m", normal=False)
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling | {"include_prompt": pools}))
    prompts = {"query": "is it ", "document": ""}
    embeddings = open_model(write_prompts(folder, prompts=prompts, default_prompt_name="query")).embed(TEXTS, 24)[0]
    model, tokenizer = load_model(folder, device="cpu"), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        for text, row in zip(TEXTS, embeddings, strict=True):
            batch = tokenizer(f"is it {text}", return_tensors="pt", truncation=True, max_length=24)
            states = model(**batch).last_hidden_state[0]
            torch.testing.assert_close(row, states[0 if pools else 7 :].mean(0), rtol=1e-4, atol=1e-5)


def test_prompts_that_are_not_asked_for(tmp_path: Path) -> None:
    folder = make_sentences(tmp_path / "m")
    plain = open_model(folder).embed(TEXTS, 24)[0]
    write_prompts(folder, prompts={"query": "is it "}, default_prompt_name=None)
    torch.testing.assert_close(open_model(folder).embed(TEXTS, 24)[0], plain)
    write_prompts(folder, prompts={"query": "is it "}, default_prompt_name="question")
    with pytest.raises(UserError, match="has the default_prompt_name 'question', and no such prompt: add it, or write"):
        open_model(folder)


def test_figures_are_those_of_the_embeddings(tmp_path: Path) -> None:
    a, b = (make_sentences(tmp_path / name, normal=False) for name in ("a", "b"))
    edit_weights(
        str(b),
        lambda tensors: [
            t.add_(torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) * 0.3) for t in tensors.values()
        ],
    )
    comparison = compare_sentences(open_model(b), open_model(a), TEXTS, 24)
    x, y = by_hand(a, ("mean_tokens",), 24), by_hand(b, ("mean_tokens",), 24)
    x, y = (embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True) for embeddings in (x, y))
    upper = np.triu_indices(len(TEXTS), 1)
    ranks = [np.argsort(np.argsort((embeddings @ embeddings.T)[upper])) for embeddings in (x, y)]
    near = [(embeddings @ embeddings.T - 2 * np.eye(len(TEXTS))).argmax(1) for embeddings in (x, y)]
    assert comparison.cosine == pytest.approx((x * y).sum(1).mean(), abs=1e-5)
    assert comparison.rank_correlation == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-9)
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
        (LIST, [TRANSFORMER, {"type": "a.LSTM", "path": "1_LSTM"}], "has a module LSTM; known are Pooling, Normalize"),
        (LIST, [TRANSFORMER], "has no Pooling behind its Transformer, so a text has no one embedding"),
        ("1_Pooling/config.json", {"pooling_mode_odd": True}, "asks for odd; known are cls_token, max_tokens"),
        ("1_Pooling/config.json", {}, "says no pooling mode; known are cls_token"),
        ("2_Dense/config.json", {"activation_function": "a.Swish"}, "asks for Swish; known are Identity, Tanh"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, file: str, content: Any, message: str) -> None:
    folder = make_sentences(tmp_path / "m", dense=True)
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        open_model(folder)
    assert message in str(caught.value)
