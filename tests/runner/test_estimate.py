"""Estimates: time by running a block, also one that no stock class builds; memory by sizes."""

import torch

import ckpt_prune
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.runner.estimate import time_run  # before the tests' fixtures put a number in its place
from tests import encoders
from tests.families import CONTEXT, SIZES, make


def test_a_block_of_an_output_whose_heads_differ_is_run(tmp_path):
    uneven = {"widths": "per_layer", "allocation": "across-layers", "container": "remote", "ratio": 0.3}
    dense = make(tmp_path / "dense")
    ckpt_prune.prune(dense, recipe="magnitude", overrides=uneven, output=tmp_path / "out", progress=False)
    model = open_model(tmp_path / "out")
    assert model.has_remote_code
    assert any("num_attention_heads" in config for config in model.checkpoint.config["per_layer_config"].values())
    assert time_run(model, torch.device("cpu"), torch.float32, None) > 0


def test_a_blank_image_stands_for_images_that_are_not_given(tmp_path):
    model = open_model(encoders.make(tmp_path / "vit", "vit"))
    assert time_run(model, torch.device("cpu"), torch.float32, None) > 0


def test_what_blocks_keep_for_their_next_run_is_counted(tmp_path):
    """The input of the mlp's last layer, and what norms, attention and mlp hand on, as far as --state-memory goes."""
    dense, text = make(tmp_path / "dense"), tmp_path / "calib.txt"
    text.write_text("the cat sat on the mat " * 200)
    given = {
        "recipe": "ridge",
        "ratio": 0.2,
        "text": text,
        "window": CONTEXT,
        "samples": 64,
        "dry_run": True,
        "evaluate_samples": 0,
    }
    peaks = {}
    for memory in (0.0, 8.0):
        data = ckpt_prune.prune(dense, state_memory=memory, progress=False, **given).data()
        peaks[memory] = data["estimate"]["peak_bytes"]
    tokens = 64 * CONTEXT
    assert peaks[8.0] - peaks[0.0] == tokens * (SIZES["intermediate_size"] + 4 * SIZES["hidden_size"]) * 4


def test_measuring_afterwards_takes_its_time_and_what_was_not_given_is_said(tmp_path, monkeypatch):
    """A block takes a second for a sample, here, and a pruned one its share of the FLOPs; each reads three windows."""
    monkeypatch.setattr("ckpt_prune.runner.estimate.time_run", lambda *_: 1.0)
    for name in ("time_solve", "_time_head"):
        monkeypatch.setattr(f"ckpt_prune.runner.estimate.{name}", lambda *_: 0.0)
    dense, text = make(tmp_path / "dense"), tmp_path / "held_out.txt"
    text.write_text("the cat sat on the mat " * 200)
    given = {"recipe": "ridge", "ratio": 0.2, "window": CONTEXT, "dry_run": True}
    alone = ckpt_prune.prune(dense, progress=False, **given).estimate
    both_run = ckpt_prune.prune(dense, evaluate=text, evaluate_samples=3, progress=False, **given)
    both = both_run.estimate
    share = both_run.settled.after.flops / both_run.settled.before.flops
    assert 0.5 < share < 0.99
    assert (alone.seconds, both.seconds) == (128, 128 + (1 + share) * 3)
    monkeypatch.setattr("ckpt_prune.runner.estimate.elapsed_seconds", lambda: 7.0)
    assert ckpt_prune.prune(dense, progress=False, **given).estimate.seconds == 128 + 7
    assert both.line.startswith("with 128 samples about ")
