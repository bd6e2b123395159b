"""Fewer tokens in one run with every other stage, and exports of such outputs beside a model of all tokens."""

import json
from pathlib import Path

import pytest

from tests.cli.running import ok, read_refusal
from tests.stages.vocabulary.tokenizers_of_tests import byte_level, page, save_llama


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "page.txt").write_text(page(), encoding="utf-8")
    save_llama(folder / "dense", byte_level())
    return folder


TEXT = ("--text", "page.txt", "--samples", "4", "--window", "32")
PAIRS = {
    "spaces": ("--recipe", "magnitude"),
    "mask": ("--set", "mask.method=magnitude", "--set", 'mask.pattern="2:4"'),
    "depth": ("--set", "depth.blocks=[1]"),
    "quantize": ("--set", "quantize.format=int8"),
    "recovery": ("--recipe", "magnitude", "--set", "recovery.epochs=1"),
    "gguf": ("--set", "export.format=gguf", "--set", "export.validate=false"),
}


@pytest.mark.parametrize("stage", PAIRS)
def test_fewer_tokens_go_with_every_other_stage(made, monkeypatch, stage):
    monkeypatch.chdir(made)
    ok("prune", "dense", "--vocabulary", "384", *PAIRS[stage], *TEXT, "-o", stage)
    config = json.loads((made / stage / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == 384
    assert stage != "gguf" or (made / stage / "model-f32.gguf").is_file()
    if stage == "gguf":
        for place in (("-o", "graphs"), ("--format", "gguf", "-o", "again.gguf")):
            message = read_refusal("export", stage, "--dense", "dense", *place)
            assert message.startswith("--dense dense has another tokenizer than gguf: ")
