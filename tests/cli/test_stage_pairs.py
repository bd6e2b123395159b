"""Every pair of stages, each in its main variants, either works or is refused before anything is measured."""

import itertools
import shutil
from pathlib import Path

import pytest

from tests import encoders
from tests.cli.running import TEXT
from tests.cli.stage_pairs import VARIANTS, deal_pairs, recipe_of, try_recipe
from tests.gguf_files.tiny import save
from tests.images import write_images
from tests.pairs import choose_cases

MEETING = [
    (("depth", "blocks"), ("quantize", "gptq")),
    (("depth", "map"), ("quantize", "gptq int4")),
    (("depth", "loss"), ("spaces", "ridge")),
    (("depth", "influence"), ("hidden", "shared")),
    (("hidden", "shared"), ("spaces", "drift")),
    (("hidden", "auto"), ("spaces", "least error")),
    (("rotation", "values"), ("mask", "wanda")),
    (("rotation", "shared"), ("recovery", "scales")),
    (("spaces", "rotary"), ("recovery", "laco")),
    (("spaces", "sequential"), ("quantize", "gptq")),
    (("mask", "magnitude"), ("quantize", "gptq")),
    (("mask", "pattern"), ("recovery", "laco")),
    (("low_rank", "plain"), ("export", "onnx")),
    (("depth", "folds"), ("export", "gguf")),
    (("bare", "tried"), ("export", "onnx")),
]
"""Tested always: most of the ways in which stages meet."""


MODELS = ("llama", "gemma3_text", "bert", "vit")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Tiny models whose rows groups of 32 columns divide, and what they read."""
    folder = tmp_path_factory.mktemp("pairs")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 4}
    save(folder / "llama", "llama", **sizes, max_position_embeddings=32)
    save(folder / "gemma3_text", "gemma3_text", head_dim=16)
    encoders.make(folder / "bert", "bert-mlm")
    encoders.make(folder / "vit", "vit")
    write_images(folder / "images", [f"{number}.png" for number in range(8)])
    (folder / "calib.txt").write_text("the cat sat on a mat and then a dog ran far away " * 8)
    return folder


def outcome(models: Path, model: str, pair) -> str:
    data = ("--images", models / "images", "--samples", "4") if model == "vit" else TEXT
    data = tuple(str(models / each) if each == "calib.txt" else str(each) for each in data)
    return try_recipe(recipe_of(*pair), str(models / model), data)


@pytest.mark.parametrize(
    "pair", choose_cases([(pair,) for pair in MEETING], lambda each: ("export", "onnx") not in each[0])
)
def test_a_pair_of_stages_works(models, tmp_path, monkeypatch, pair):
    monkeypatch.chdir(tmp_path)
    assert outcome(models, "vit" if "bare" in dict(pair) else "llama", pair) == "works"


@pytest.mark.parametrize("stages", list(itertools.combinations(VARIANTS, 2)), ids=" and ".join)
def test_every_pair_works_or_is_refused(models, tmp_path, monkeypatch, stages):
    """Variants of two stages with one of the other's, of models in turn."""
    monkeypatch.chdir(tmp_path)
    turn = list(VARIANTS).index(stages[0]) + list(VARIANTS).index(stages[1])
    for number, pair in enumerate(deal_pairs(*stages, turn)):
        if number and ("export", "onnx") in pair:  # a graph is traced for seconds
            continue
        model = "llama" if "export" in stages else MODELS[(turn + number) % len(MODELS)]
        outcome(models, model, pair)  # fails at whatever else happens
        shutil.rmtree("out", ignore_errors=True)


def test_every_stage_works_in_some_pair():
    assert {stage for pair in MEETING for stage, _ in pair} == VARIANTS.keys()
