"""`validate FILE.gguf` compares weights as well: a few damaged ones change no prediction that is looked at."""

import pytest

from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.types import type_of_file
from ckpt_prune.gguf.weights import other_weights
from ckpt_prune.model.containers.opening import open_model
from tests.gguf_files.tiny import WINDOWED, proving, save
from tests.pairs import dealt

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"]
FAMILIES = {"llama": {}, "phi3": {}, "gemma3_text": WINDOWED, "starcoder2": {}}


def save_as_gguf(folder, kind, model_type="llama"):
    model = save(folder / "model", model_type, **FAMILIES[model_type])
    export_gguf(str(model), folder / "m.gguf", proving(model), kind=kind, proof=False)
    return folder / "m.gguf", open_model(str(model))


def wrong(file, model):
    return other_weights(file, model, type_of_file(open_gguf(file)))


@pytest.mark.parametrize(("kind", "model_type"), dealt(TYPES, FAMILIES))
def test_what_is_written_is_the_checkpoints(tmp_path, kind, model_type):
    assert wrong(*save_as_gguf(tmp_path, kind, model_type)) == []


@pytest.mark.parametrize("kind", TYPES)
def test_one_damaged_block_is_named(tmp_path, kind):
    file, model = save_as_gguf(tmp_path, kind)
    info = open_gguf(file).tensors["blk.3.attn_q.weight"]
    data = bytearray(file.read_bytes())
    block = info.bytes // (info.shape[0] * info.shape[1] // 32)
    start = info.offset + 5 * block
    assert any(data[start : start + block])
    data[start : start + block] = bytes(block)
    file.write_bytes(data)
    assert wrong(file, model) == ["blk.3.attn_q.weight"]


def test_weights_of_another_model_are_not_the_checkpoints(tmp_path):
    file, _ = save_as_gguf(tmp_path, "q4_0")
    other = save(tmp_path / "other", "llama", initializer_range=1.0)
    assert len(wrong(file, open_model(str(other)))) > 30
    narrower = save(tmp_path / "narrower", "llama", intermediate_size=32)
    mismatched = wrong(file, open_model(str(narrower)))
    assert not any("ffn_up" in name for name in mismatched)  # of another shape: not compared
