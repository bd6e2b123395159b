"""Base models saved without their pooler, as most embedding models are: every command takes them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

import ckpt_prune
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.model.model import Model
from tests import graphs
from tests.cli.running import edit_weights, ok, read_refusal
from tests.encoders import edit_files, make, no_pooler, samples

PRUNE = ["--recipe", "magnitude", "--set", "spaces.heads.ratio=0", "--set", "spaces.mlp.ratio=0.5"]


@pytest.fixture(params=["bert-model", "vit-model"])
def variant(request) -> str:
    """A variant whose checkpoint without a pooler is the folder `dense`."""
    edit_files(make(Path("dense"), request.param), no_pooler)
    return request.param


def test_it_is_pruned_verified_and_loaded(variant):
    assert json.loads(ok("inspect", "dense", "--json"))["blocks"] == 3
    ok("prune", "dense", *PRUNE, "-o", "out")
    assert "FAILED" not in ok("verify", "out", "--against", "dense")
    batch = samples(variant, 4).batch(slice(4))
    for folder in ("dense", "out"):
        ours = ckpt_prune.load(folder)
        theirs = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
        with torch.inference_mode():
            outputs, expected = ours(**batch), theirs(**batch)
        assert outputs.pooler_output is None
        assert torch.equal(outputs.last_hidden_state, expected.last_hidden_state)


def test_it_is_stored_with_remote_code(variant):
    ok("prune", "dense", *PRUNE, "-o", "stock")
    ok("prune", "dense", *PRUNE, "--container", "remote", "-o", "remote")
    assert "FAILED" not in ok("verify", "remote", "--against", "dense")
    batch = samples(variant, 4).batch(slice(4))
    with torch.inference_mode():
        outputs, expected = (ckpt_prune.load(folder)(**batch) for folder in ("remote", "stock"))
    assert outputs.pooler_output is None
    torch.testing.assert_close(outputs.last_hidden_state, expected.last_hidden_state)


def test_its_graph_has_no_pooled_output():
    edit_files(graphs.make(Path("shallow"), "vit-model"), no_pooler)
    with graphs.trace_as_commands_do():
        ok("export", "shallow", "-o", "onnx")
    onnx = pytest.importorskip("onnx")
    assert [output.name for output in onnx.load("onnx/model.onnx").graph.output] == ["last_hidden_state"]


def test_outputs_for_effects_are_those_of_the_model(variant):
    model = Model.open("dense")
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float32)
    readout = Readout(factory, model.checkpoint.tensors, model.checkpoint.read)
    batch = samples(variant, 4).batch(slice(4))
    stock = AutoModel.from_pretrained("dense", add_pooling_layer=False).eval()
    with torch.inference_mode():
        states = stock(**batch, output_hidden_states=True)
    outputs = readout.outputs(batch, states.hidden_states[-1])
    assert [output.shape for output in outputs] == [states.last_hidden_state.shape]
    if variant == "bert-model":  # nothing comes after its last block
        assert torch.equal(outputs[0], states.last_hidden_state)


def test_half_a_pooler_is_damage(variant):
    make(Path("whole"), variant)
    edit_weights("whole", lambda tensors: tensors.pop("pooler.dense.bias"))
    assert read_refusal("inspect", "whole") == (
        "whole lacks tensor pooler.dense.bias (1 missing), which its config.json asks for"
    )
