"""The estimate of time runs a block, also of an output whose blocks no stock class builds."""

import torch

import ckpt_prune
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.runner.estimate import time_run  # before the tests' fixtures put a number in its place
from tests.families import make


def test_a_block_of_an_output_whose_heads_differ_is_run(tmp_path):
    uneven = {"widths": "per_layer", "allocation": "across-layers", "container": "remote", "ratio": 0.3}
    dense = make(tmp_path / "dense")
    ckpt_prune.prune(dense, recipe="magnitude", overrides=uneven, output=tmp_path / "out", progress=False)
    model = open_model(tmp_path / "out")
    assert model.has_remote_code
    assert any("num_attention_heads" in config for config in model.checkpoint.config["per_layer_config"].values())
    assert time_run(model, torch.device("cpu"), torch.float32, None) > 0
