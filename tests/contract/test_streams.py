"""Hidden states carried from block to block, and read out behind the last, are those of the whole model."""

import pytest
import torch

from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.readout import Readout
from tests.pairs import choose_cases

from .dense import Dense
from .models import BLOCKS, LONG, Case, first_cases
from .whole import assert_same_outputs, outputs, record_states

NEAR = 1e-9
FLOAT32 = {"dinov3_vit": 1e-6}
"""Families whose positions are float32 numbers, which `double` turns into others; and what that leaves."""


@pytest.mark.parametrize("case", choose_cases(LONG, first_cases()[::2].__contains__), ids=str)
def test_states_and_outputs_are_those_of_the_whole_model(dense: Dense, case: Case) -> None:
    model, data = dense.model(case), case.samples(3, seed=9)
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float64)
    stream = HiddenStream(factory, model.checkpoint.tensors, model.checkpoint.read, data)
    assert stream.states.shape[1] == data.tokens
    assert case.family.modality == "text" or model.tokens == data.tokens
    dense_model, near = case.model().double(), FLOAT32.get(case.model_type, NEAR)
    paths = [f"{case.family.layers}.{index}" for index in range(BLOCKS)]
    expected = record_states(dense_model, data, results=paths)
    for index, path in enumerate(paths):
        stream.advance(index, model.read_block(index))
        assert_same_outputs({path: stream.states}, {path: torch.from_numpy(expected[path])}, near)
    readout = Readout(factory, model.checkpoint.tensors, model.checkpoint.read)
    computed = readout.outputs(data.batch(slice(len(data))), stream.states)
    expected_outputs = outputs(dense_model, data)
    names = [name for name in expected_outputs if name.endswith("logits")] if readout.logits else ["last_hidden_state"]
    assert_same_outputs(dict(zip(names, computed, strict=True)), {name: expected_outputs[name] for name in names}, near)
