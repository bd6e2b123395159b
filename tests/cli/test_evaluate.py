"""`evaluate`: perplexity with its window, and two models side by side."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import load_model
from tests.cli.running import edit_weights, near, ok, poison, read_json, read_refusal, run
from tests.evaluation.tiny import tiny_tokenizer

TEXT = ("--text", "calib.txt", "--window", "16")


def test_text(place):
    figures = json.loads(ok("evaluate", "dense", *TEXT, "--json"))
    perplexity = figures.pop("perplexity")
    assert perplexity == pytest.approx(math.exp(figures.pop("nll")))
    assert figures == {"model": "dense", "window": 16, "windows": 98, "tokens": 98 * 15}
    lines = ok("evaluate", "dense", *TEXT).splitlines()
    assert [line.split() for line in lines] == [
        ["model", "perplexity", "window", "tokens"],
        ["dense", f"{perplexity:.3f}", "16", "1,470"],
    ]
    figures = json.loads(ok("evaluate", "dense", *TEXT, "--samples", "3", "--json"))
    assert (figures["windows"], figures["tokens"]) == (3, 45)


def test_against(place):
    figures = json.loads(ok("evaluate", "pruned", "--against", "dense", *TEXT, "--json"))
    assert figures["against"] == json.loads(ok("evaluate", "dense", *TEXT, "--json"))
    assert figures["kl"] > 0.01
    lines = ok("evaluate", "pruned", "--against", "dense", *TEXT).splitlines()
    assert lines[0].split() == ["before", "after", "share"]
    before, after = figures["against"]["perplexity"], figures["perplexity"]
    assert lines[1].split() == ["perplexity", f"{before:.3f}", f"{after:.3f}", f"{after / before:.1%}"]
    assert lines[2:8] == [
        "",
        "before: dense, after: pruned; window 16, tokens 1,470",
        "",
        f"KL divergence {figures['kl']:.4f} nats per token, top-1 agreement {figures['top1_agreement']:.1%}",
        "",
        f"KL of single tokens: median {figures['kl_median']:.4f}, 90% up to {figures['kl_90']:.4f}, 99% up to "
        f"{figures['kl_99']:.4f} nats; in speculative decoding, {figures['accepted']:.1%} of its tokens would be "
        "accepted by the other",
    ]
    assert lines[8:] == [
        "",
        f"the output is hardly of use beside dense by its first choices: perplexity {after:.4g} for {before:.4g}, KL "
        f"{figures['kl']:.4f} nats, the same first choice {figures['top1_agreement']:.1%}, by "
        f"{figures['windows']} windows",
    ]


def test_the_noise_of_a_reference_is_told_where_it_matters(place):
    text = (*TEXT, "--samples", "3")
    figures = json.loads(ok("evaluate", "dense", "--against", "dense", *text, "--json"))
    assert figures["kl"] == 0 < figures["self_noise"]
    lines = ok("evaluate", "dense", "--against", "dense", *text).splitlines()
    noise = f"noise: the reference is {figures['self_noise']:.2g} nats from itself in another dtype"
    assert f"{noise} (float32 or bfloat16)" in lines
    twice = json.loads(ok("evaluate", "dense", "--against", "dense", *text, "--text", "calib.txt", "--json"))
    assert twice["self_noise"] == pytest.approx(figures["self_noise"])
    assert "self_noise" not in json.loads(ok("evaluate", "pruned", "--against", "dense", *text, "--json"))


def test_what_was_measured_against_the_dense_model_is_noted_in_the_output(place, monkeypatch):
    ok("prune", "dense", "--recipe", "magnitude", "--ratio", "0.5", "-o", "out")
    card = Path("out/README.md").read_text()
    assert "What it costs in quality was not measured." in card
    job = ("evaluate", "out", "--text", "calib.txt", "--window", "16", "--samples", "3")
    ok(*job)
    ok("evaluate", "out", "--against", "out", *job[2:])  # not what it was made from
    allowed = os.access
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode, **more: path != Path("out") and allowed(path, mode, **more))
        ok(*job, "--against", "dense")
    assert Path("out/README.md").read_text() == card
    evaluation = json.loads(ok(*job, "--against", "dense", "--json"))
    loss = read_json("out/ckpt_prune.json")["loss"]
    verdict = loss.pop("verdict")
    assert verdict.startswith("the output is hardly of use beside dense by its first choices: perplexity ")
    assert verdict.endswith(", by 3 windows, too few to decide")
    assert loss == {
        "of": "perplexity",
        "before": evaluation["against"]["perplexity"],
        "after": evaluation["perplexity"],
        "kl": evaluation["kl"],
        "agreement": evaluation["top1_agreement"],
        "windows": 3,
        "data": "calib.txt, window 16, tokens 45",
        "against": "dense",
    }
    card = Path("out/README.md").read_text()
    assert "What it costs in quality was not measured." not in card
    assert "Measured on calib.txt, window 16, tokens 45: KL divergence" in card
    ok("verify", "out", "--against", "dense")
    again = run(*job[:-1], "2", "--against", "dense").stderr
    assert re.fullmatch(
        r"the model card of out now says perplexity .*, in place of perplexity .* on calib.txt, .*\n", again
    )
    monkeypatch.setattr("ckpt_prune.runner.publish.write_atomically", full_disk)
    result = run(*job, "--against", "dense")
    assert (result.exit_code, result.stderr) == (0, "the model card of out does not say what was measured: full\n")


def full_disk(*_: object) -> None:
    raise UserError("full")


def test_models_with_different_tokenizers_are_compared_in_bits_per_byte(place):
    shutil.copytree("dense", "other")
    tiny_tokenizer().save_pretrained("other")
    result = json.loads(ok("evaluate", "dense", "--against", "other", *TEXT, "--json"))
    both = [result["bits_per_byte"], result["against"]["bits_per_byte"]]
    assert result["bytes"] == result["against"]["bytes"]
    assert both[0] != both[1]  # one reads <s> before each piece
    assert "bits per byte" in ok("evaluate", "dense", "--against", "other", *TEXT)


def test_models_that_are_not_whole(place):
    edit_weights("dense", poison("model.norm.weight"))
    assert read_refusal("evaluate", "dense", *TEXT) == (
        "the model's logits are not numbers (NaN): its weights are damaged or overflow in this dtype"
    )
    edit_weights("dense", lambda tensors: tensors.pop("model.norm.weight"))
    assert read_refusal("evaluate", "dense", *TEXT) == (
        "dense: tensors are missing or of the wrong shape: model.norm.weight; "
        "run `ckpt-prune verify dense` for all of them"
    )


def test_blocks_run_one_at_a_time_and_no_model_is_loaded(place, monkeypatch):
    measured = json.loads(ok("evaluate", "pruned", "--against", "dense", *TEXT, "--json"))
    monkeypatch.setattr("ckpt_prune.evaluation.pair.load_model", None)
    assert json.loads(ok("evaluate", "pruned", "--against", "dense", *TEXT, "--json")) == measured


def test_what_it_takes_is_told_before(place, monkeypatch):
    """All blocks take a second for a window, here, and a head nothing. 98 windows, two models."""
    monkeypatch.setattr("ckpt_prune.runner.estimate.time_run", lambda *_: 1.0)
    monkeypatch.setattr("ckpt_prune.runner.estimate._time_head", lambda *_: 0.0)
    pair = ("evaluate", "dense", "--against", "dense", *TEXT)
    foreseen = json.loads(ok(*pair, "--dry-run", "--json"))["estimate"]
    assert foreseen["seconds"] == 2 * 98
    # Behind the blocks, both models hold head and norm in float32, and the states of all windows.
    for name in ("_block_bytes", "_activations", "STRIP_BYTES"):
        monkeypatch.setattr(f"ckpt_prune.runner.estimate.{name}", 0 if name.isupper() else lambda *_: 0)
    one, two = (
        json.loads(ok("evaluate", "dense", *more, *TEXT, "--dry-run", "--json"))["estimate"]["peak_bytes"]
        for more in ((), ("--against", "dense"))
    )
    tensors = load_file("dense/model.safetensors")
    assert read_json("dense/config.json")["tie_word_embeddings"] is False  # so what tokens look up is gone by then
    outside = 4 * (tensors["lm_head.weight"].numel() + tensors["model.norm.weight"].numel())
    assert two - one == outside + 98 * 16 * read_json("dense/config.json")["hidden_size"] * 4
    line = ok(*pair, "--dry-run").removeprefix("it takes ").strip()
    monkeypatch.setattr("ckpt_prune.runner.estimate.available_bytes", lambda: 2**20)
    told = run(*pair).stderr
    assert f"this takes {line}, and only 1.05 MB of memory are free: close other programs" in told


def test_a_model_that_is_loaded_whole_says_so_where_memory_is_short(place, monkeypatch):
    monkeypatch.setattr("ckpt_prune.evaluation.pair.available_bytes", lambda: 100)
    told = run("evaluate", "dense", "--generate", "the cat").stderr
    assert "dense is loaded whole, in float32, and takes " in told
    assert "100 B of memory are free: close other programs, or say --device-map auto" in told


def test_text_tasks_and_prompts_in_one_call_load_each_model_once(place, monkeypatch):
    item = {"question": "the cat", "choices": [" sat", " ran"], "answer": 0}
    Path("items.jsonl").write_text(json.dumps(item))
    parts = {"text": TEXT, "tasks": ("--tasks", "items.jsonl"), "generate": ("--generate", "the cat")}
    pair = ("evaluate", "dense", "--against", "pruned")
    alone = {name: json.loads(ok(*pair, *part, "--json")) for name, part in parts.items()}
    loaded = []

    def load(folder, **how):
        loaded.append(folder.name)
        return load_model(folder, **how)

    monkeypatch.setattr("ckpt_prune.evaluation.pair.load_model", load)
    options = [option for part in parts.values() for option in part]
    assert json.loads(ok(*pair, *options, "--json")) == near(alone)
    assert sorted(loaded) == ["dense", "pruned"]
    assert ok(*pair, *options) == "\n".join(ok(*pair, *part) for part in parts.values())
