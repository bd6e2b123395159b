"""Rotary pairs from the command line: alone, beside other spaces, under a budget, and how outputs are used."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import PhiConfig, PhiForCausalLM

import ckpt_prune
from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.running import TEXT, ok, read_json, read_refusal, run
from tests.evaluation.tiny import tiny_tokenizer

RECIPE = """\
version: 1
name: mine
target: sequential
container: any
spaces:
  rotary: {score: obs, ratio: 0.5, compensation: {method: factors, lambda: 0.001}}
"""
BESIDE = RECIPE + "  heads: {score: obs, ratio: 0.5, compensation: {method: ridge}}\n"
BUDGET = """\
version: 1
name: budget
allocation: least-error
widths: per_layer
container: any
spaces:
  rotary: {score: obs, compensation: {method: factors, lambda_grid: [0.001, 0.1], lambda_by: folds}}
  queries: {score: auto, compensation: {method: ridge}}
  heads: {score: auto, compensation: {method: ridge}}
  mlp: {score: auto, compensation: {method: ridge}}
"""
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}


@pytest.fixture
def here(place: Path) -> Path:
    """With recipes; heads of the models have two rotary pairs."""
    for name, text in (("mine", RECIPE), ("beside", BESIDE), ("budget", BUDGET)):
        Path(f"{name}.yaml").write_text(text)
    return place


def sites(folder: str) -> list[dict]:
    return [site for site in read_json(f"{folder}/ckpt_prune.json")["sites"] if site["space"] == "rotary"]


def parameters(folder: str) -> int:
    return sum(parameter.numel() for parameter in ckpt_prune.load(folder).parameters())


def checks_of(folder: str) -> list[dict]:
    checks: list[dict] = json.loads(run("verify", folder, "--against", "dense", "--json").stdout)["checks"]
    return checks


def test_pairs_go_by_a_plan_or_at_once(here):
    ok("calibrate", "dense", *TEXT, "--collect", "moments,rotary", "-o", "pairs")
    given = ("--recipe", "mine.yaml", "--statistics", "pairs")
    assert "rotary 1/2 (ratio 0.5)" in ok("plan", "dense", *given, "-o", "plan.json")
    ok("prune", "dense", "--plan", "plan.json", "--statistics", "pairs", "-o", "planned")
    output = ok("prune", "dense", *given, "-o", "out")
    assert "(of queries and keys: of the attention logits)" in output
    assert "no stock class has queries and keys without some of their rotary pairs" in output
    for name in ("model.safetensors", "config.json"):
        assert (here / "planned" / name).read_bytes() == (here / "out" / name).read_bytes()
    config, (first, *_) = read_json("out/config.json"), sites("out")
    assert config["num_rotary_pairs"] == 1
    assert (first["units"], len(first["kept"]), first["method"], first["strength"]) == (4, 2, "factors", 0.001)
    assert first["error_compensated"] < first["error_uncompensated"]
    assert read_json("out/ckpt_prune.json")["after"]["parameters"] == parameters("out")
    checks = {check["name"]: check for check in checks_of("out")}
    assert checks["kept units"]["detail"] == (
        "producers of 0 pruned spaces hold the dense rows, bit for bit; q of 2 blocks are rewritten and not compared"
    )
    assert all(check["passed"] is not False for check in checks.values())
    # The tensor that names the kept pairs is compared with the report.
    tensors = load_file("out/model.safetensors")
    name = "model.layers.0.self_attn.rotary_pairs"
    assert tensors[name].tolist() == [unit % 2 for unit in first["kept"]]
    save_file(tensors | {name: 1 - tensors[name]}, "out/model.safetensors", metadata={"format": "pt"})
    checks = {check["name"]: check for check in checks_of("out")}
    assert (checks["kept units"]["passed"], checks["kept units"]["detail"]) == (
        False,
        f"{name} does not name the rotary pairs that are kept",
    )


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_a_model_that_is_rotated_in_part(here):
    with quiet_transformers():
        PhiForCausalLM(PhiConfig(**SMALL, partial_rotary_factor=0.5)).save_pretrained("phi")
    tiny_tokenizer("<s> $A").save_pretrained("phi")
    assert read_refusal("prune", "phi", "--recipe", "mine.yaml", *TEXT, "-o", "out") == (
        "recipe mine prunes rotary, pairs of rotary positions, and in phi none can go: only a part of a head's "
        "dimensions is rotated (partial_rotary_factor)"
    )


def test_statistics_without_their_moments(here):
    assert read_refusal("prune", "dense", "--recipe", "mine.yaml", "--statistics", "stats", "-o", "out") == (
        "recipe mine prunes rotary pairs, and stats has no moments of them: calibrate with --collect moments,rotary"
    )
    ok("calibrate", "dense", *TEXT, "--collect", "rotary", "-o", "one")
    ok("calibrate", "dense", *TEXT, "--seed", "1", "--collect", "rotary", "-o", "two")
    ok("statistics", "add", "one", "two", "-o", "both")
    ok("prune", "dense", "--recipe", "mine.yaml", "--statistics", "both", "-o", "out")
