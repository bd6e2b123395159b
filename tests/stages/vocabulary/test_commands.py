"""`prune --vocabulary`: what an output computes, what its files say, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ckpt_prune.stages.vocabulary.records import VocabularyRecord
from tests.cli.running import ok, run
from tests.stages.vocabulary.tokenizers_of_tests import byte_fallback, byte_level, page, save_llama

TEXT = ("--text", "page.txt")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "page.txt").write_text(page(), encoding="utf-8")
    save_llama(folder / "dense", byte_level(), extra=12)
    save_llama(folder / "untied", byte_fallback(), tied=False)
    return folder


@pytest.fixture
def place(made, monkeypatch) -> Path:
    monkeypatch.chdir(made)
    return made


def record_of(folder: Path) -> VocabularyRecord:
    report = json.loads((folder / "ckpt_prune.json").read_text(encoding="utf-8"))
    return VocabularyRecord.read(report["vocabulary"])


@pytest.mark.parametrize("dense", ["dense", "untied"])
def test_kept_tokens_have_their_logits_and_verify_proves_it(place, dense, tmp_path):
    out = tmp_path / "out"
    ok("prune", dense, "--vocabulary", "384", *TEXT, "-o", str(out))
    kept = record_of(out).kept_rows
    assert len(kept) == 384
    before, after = (load_file(folder / "model.safetensors") for folder in (place / dense, out))
    for name, tensor in before.items():
        rows = name.startswith(("model.embed_tokens", "lm_head"))
        assert torch.equal(after[name], tensor[kept] if rows else tensor)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (place / dense, out)]
    ours = torch.randint(len(kept), (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [
            model(input_ids=ids).logits for model, ids in zip(models, (torch.tensor(kept)[ours], ours), strict=True)
        ]
    assert torch.equal(logits[0][..., kept], logits[1])
    said = ok("verify", str(out), "--against", dense)
    assert "hard texts are decoded as by the dense tokenizer" in said
    assert "bit for bit" in said


def test_numbers_of_tokens_follow_wherever_they_stand(place, tmp_path):
    out = tmp_path / "out"
    dense = tmp_path / "named"
    save_llama(dense, byte_level())
    tokenizer = AutoTokenizer.from_pretrained(dense)
    word = tokenizer.convert_tokens_to_ids("Ġthe")
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"image_token_id": word}))
    (dense / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, word], "suppress_tokens": [word]}))
    (dense / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))
    (dense / "merges.txt").write_text("#version: 0.2\na b\n")
    (dense / "tekken.json").write_text("{}")
    (tmp_path / "list.txt").write_text("Ġof\n")
    said = ok("prune", str(dense), "--vocabulary", f"{tmp_path / 'list.txt'}", "-o", str(out))
    assert "tekken.json" in said
    smaller = AutoTokenizer.from_pretrained(out)
    new = smaller.convert_tokens_to_ids("Ġthe")
    assert smaller.convert_tokens_to_ids("Ġof") != smaller.unk_token_id
    kept = record_of(out).kept_rows
    assert kept[new] == word
    assert len(kept) % 64 == 0
    values = {name: json.loads((out / name).read_text()) for name in ("config.json", "generation_config.json")}
    assert values["config.json"]["image_token_id"] == new
    assert values["config.json"]["vocab_size"] == len(kept)
    assert values["generation_config.json"]["eos_token_id"] == [2, new]
    assert values["generation_config.json"]["suppress_tokens"] == [new]
    assert json.loads((out / "vocab.json").read_text()) == smaller.get_vocab()
    merges = (out / "merges.txt").read_text().splitlines()
    content = json.loads((out / "tokenizer.json").read_text())
    assert merges == ["#version: 0.2", *(" ".join(pair) for pair in content["model"]["merges"])]
    assert not (out / "tekken.json").exists()


def test_scripts_go_first_and_the_rest_of_a_multiple_is_filled(place, tmp_path):
    out = tmp_path / "out"
    ok("prune", "dense", "--vocabulary", "latin", "--set", "vocabulary.multiple_of=16", "-o", str(out))
    tokens = AutoTokenizer.from_pretrained(out).get_vocab()
    assert "Ġthe" in tokens
    gone = AutoTokenizer.from_pretrained(place / "dense").get_vocab().keys() - tokens.keys()
    assert gone
    assert record_of(out).rows_kept % 16 == 0
    # What is gone is Russian alone: letters of two bytes, and words of them.
    assert all(bytes(1) and any(letter in "ÐÑ" for letter in token) for token in gone)


def test_the_default_costs_no_more_than_allowed_and_says_so_before_anything_is_written(place, tmp_path):
    line = ("--vocabulary", "auto", "--set", "vocabulary.cost=5%", "--set", "vocabulary.multiple_of=8", *TEXT)
    said = ok("prune", "dense", *line, "--dry-run")
    assert "page.txt, its held-out eighth, takes" in said
    assert "bits per byte" in said
    out = tmp_path / "out"
    ok("prune", "dense", *line, "-o", str(out))
    (text,) = record_of(out).texts
    assert text.loss is not None
    assert text.loss <= 0.05
    assert record_of(out).rows_kept < 500
    assert "Vocabulary" in (out / "README.md").read_text(encoding="utf-8")


def test_it_comes_before_spaces_and_counts_in_a_size(place, tmp_path):
    out = tmp_path / "both"
    params = sum(tensor.numel() for tensor in load_file(place / "dense" / "model.safetensors").values())
    options = ("--recipe", "magnitude", "--target-params", "80%", *TEXT, "--json")
    done = json.loads(ok("prune", "dense", "--vocabulary", "384", *options, "-o", str(out)))
    assert done["before"]["parameters"] == params
    assert done["after"]["parameters"] <= 0.8 * params
    assert record_of(out).rows_kept == 384
    assert "bit for bit" not in run("verify", str(out), "--against", "dense").stderr
    alone = tmp_path / "alone"
    done = json.loads(
        ok("prune", "dense", "--vocabulary", "auto", "--target-params", "90%", *TEXT, "--json", "-o", str(alone))
    )
    assert 0.8 * params < done["after"]["parameters"] <= 0.9 * params
