"""A decoder with its cache, against the stock class that reads whole targets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from ckpt_prune.onnx.block_kinds import NotAlikeError, find_block_kinds
from ckpt_prune.onnx.stacks import KINDS, DecoderStep
from ckpt_prune.onnx.tasks import GraphTask
from ckpt_prune.onnx.tracing import make_example
from tests.seq2seq import write_model

TARGETS = torch.tensor([[2, 9, 40, 17, 63, 5, 8], [2, 11, 12, 13, 14, 15, 16]])


@pytest.mark.parametrize(
    "model_type", ["bart", "m2m_100", "marian", "mt5", "t5", "t5gemma", "t5gemma2", "umt5", "whisper"]
)
def test_a_target_in_pieces(model_type: str, tmp_path: Path) -> None:
    """States that it has keys and values of are not read again: they may be anything then."""
    model: Any = write_model(tmp_path / model_type, model_type).double()
    step, states = DecoderStep(model), torch.randn(2, 5, 32, dtype=torch.float64)
    mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2]) if step.reads_mask else None
    past = [each[:, :, :0] for each in step.make_past(TARGETS, states)]
    assert len(past) == 3 * len(KINDS)
    pieces, read = [], states
    with torch.no_grad():
        for start, end in ((0, 3), (3, 4), (4, 7)):
            outputs = step(TARGETS[:, start:end], read, mask, past)
            pieces.append(outputs.pop("logits"))
            kept = 2 if start == 0 else 4
            past = [each[:, :, :kept] if ".encoder." in name else each for name, each in outputs.items()]
            read = states.clone()
            read[:, :kept] = torch.nan
        expected = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=TARGETS,
            **({} if mask is None else {"attention_mask": mask}),
        )
    assert list(outputs) == [f"present.{layer}.{kind}" for layer in range(3) for kind in KINDS]
    torch.testing.assert_close(torch.cat(pieces, 1), expected.logits)


def test_blocks_of_a_decoder_are_of_one_kind(tmp_path: Path) -> None:
    """So two of them are traced. T5's hand on relative positions beside their states, and are no such chain."""
    task = GraphTask("text2text-generation", "pairs", cached=True, stack="decoder")

    def find(model_type: str) -> list[int]:
        step = DecoderStep(write_model(tmp_path / model_type, model_type))
        inputs = make_example(step, task).inputs
        kept = inputs["past_key_values"]
        with step.alone():
            return list(find_block_kinds(step, inputs, [tuple(kept[at : at + 4]) for at in (0, 4, 8)]).kinds)

    assert find("bart") == find("whisper") == [0, 0, 0]
    with pytest.raises(NotAlikeError):
        find("t5")


def test_the_encoder_is_away_while_a_decoder_is_traced(tmp_path: Path) -> None:
    model: Any = write_model(tmp_path / "bart", "bart")
    encoder = model.get_encoder()
    with DecoderStep(model).alone():
        assert not any(module is encoder for module in model.modules())
    assert model.get_encoder() is encoder
