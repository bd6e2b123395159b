"""GGUF files as sources: they come back bit for bit, and hostile ones are refused in one line that leaves nothing."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.gguf_weight import GgufWeight
from ckpt_prune.gguf.orders import Order, as_in_checkpoint
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.show.model_card import source_card
from tests.gguf_files.test_families import FAMILIES
from tests.gguf_files.tiny import proving, save
from tests.pairs import every
from tests.refusals import refusal

UNREAD = {
    "hunyuan-dynamic",
    "granite-4-experts",  # a granitemoeshared computes it
    *("gemma2-scale", "gemma3-scale"),  # the scale is in other weights, which compute the same
    *("falcon_h1-factors", "falcon_h1-tied", "minicpm3"),  # and so are these factors
    *("helium", "cwm", "ministral", "aria_text", "hyperclovax"),  # another class computes it
}
TOKENS = torch.randint(2, 2048, (1, 48), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("source") / "model", "llama", tie_word_embeddings=True)
    file = folder.parent / "m.gguf"
    export_gguf(str(folder), file, proving(folder), kind="f32", proof=False)
    return folder, file


@pytest.mark.parametrize("name", every(14, sorted(FAMILIES.keys() - UNREAD)))
def test_a_file_becomes_the_checkpoint_that_it_was_made_of(name, tmp_path):
    model_type, changes = FAMILIES[name]
    folder = save(tmp_path / "model", model_type, **changes)
    export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)
    ckpt_prune.convert(tmp_path / "m.gguf", output=tmp_path / "back", proof=False)
    dense, back = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "back"))
    assert back.keys() == dense.keys()
    if (of_blocks := dense.get("model.embed_tokens_per_layer.weight")) is not None:  # a file has a row for every token
        back["model.embed_tokens_per_layer.weight"] = back["model.embed_tokens_per_layer.weight"][: len(of_blocks)]
    for key in dense:
        torch.testing.assert_close(back[key], dense[key], rtol=0, atol=1e-6)
    again = AutoTokenizer.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        outputs = [AutoModelForCausalLM.from_pretrained(place)(TOKENS).logits for place in (folder, tmp_path / "back")]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-3)
    text = "def f(x):\n    return x  # it's 3,14 \u00e9t\u00e9 </s>"
    assert again(text)["input_ids"] == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_1"])
def test_types_are_those_of_gguf_py(llama, tmp_path, kind):
    folder, _ = llama
    export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind=kind, proof=False)
    dense = load_file(folder / "model.safetensors")
    file = open_gguf(tmp_path / "m.gguf")
    assert file.tensors["blk.0.attn_norm.weight"].kind.name == "F32"
    # Rows of 48 are filled up to 64.
    rounded, wide = file.tensors["blk.1.ffn_up.weight"], file.tensors["blk.1.ffn_down.weight"]
    assert rounded.kind.name == kind.upper()
    assert wide.kind.name == kind.upper()
    assert wide.shape == (32, 64 if kind.startswith("q") else 48)
    expected = gguf.dequantize(
        gguf.quantize(dense["model.layers.1.mlp.up_proj.weight"].numpy(), rounded.kind), rounded.kind
    )
    np.testing.assert_array_equal(file.read("blk.1.ffn_up.weight")[:48].numpy(), expected)


def test_experts_in_mxfp4_are_read_as_gguf_py_decodes_them(tmp_path):
    """Published files of gpt-oss have them: rows of gate and up alternate, and matrices are transposed."""
    folder = save(tmp_path / "model", "gpt_oss", **FAMILIES["gpt_oss"][1] | {"intermediate_size": 64})
    export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)
    edit_file(tmp_path / "m.gguf", tmp_path / "packed.gguf", "_exps.weight")
    ckpt_prune.convert(tmp_path / "packed.gguf", output=tmp_path / "back", proof=False)
    dense, back = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "back"))
    for name in ("gate_up_proj", "down_proj"):
        key, kind = f"model.layers.1.mlp.experts.{name}", gguf.GGMLQuantizationType.MXFP4
        expected = gguf.dequantize(gguf.quantize(dense[key].mT.contiguous().numpy(), kind), kind)
        np.testing.assert_array_equal(back[key].mT.float().numpy(), expected)


def test_halves_of_other_sizes_are_refused():
    gate, up = (GgufWeight((rows, 2), lambda: None) for rows in (4, 2))
    order = Order("both", ("gate", "up"), -2, lambda rows: torch.arange(rows).chunk(2))
    with pytest.raises(ValueError, match="gate"):
        as_in_checkpoint({"gate": gate, "up": up}, [order])


def break_file(data: bytes, what: str) -> bytes:
    """A file with one thing in it that cannot be."""
    name = data.index(b"blk.0.ffn_up.weight")
    shape = name + len("blk.0.ffn_up.weight") + 4
    key = data.index(b"llama.block_count")
    return {
        "cut in a tensor": data[:-100],
        "cut in the keys": data[:5000],
        "empty": b"",
        "no magic": b"GGML" + data[4:],
        "version": data[:4] + struct.pack("<I", 77) + data[8:],
        "other byte order": data[:4] + struct.pack(">I", 3) + data[8:],
        "tensors": data[:8] + struct.pack("<Q", 2**60) + data[16:],
        "keys": data[:16] + struct.pack("<Q", 2**60) + data[24:],
        "length of a key": data[:24] + struct.pack("<Q", 2**62) + data[32:],
        "not UTF-8": data[:key] + b"\xff" + data[key + 1 :],
        "type of a value": data[: key + 17] + struct.pack("<I", 99) + data[key + 21 :],
        "blocks": data[: key + 21] + struct.pack("<I", 2**31) + data[key + 25 :],
        "rows": data[:shape] + struct.pack("<Q", 2**40) + data[shape + 8 :],
        "no rows": data[:shape] + struct.pack("<Q", 0) + data[shape + 8 :],
        "type of a tensor": data[: shape + 16] + struct.pack("<I", 77) + data[shape + 20 :],
        "place": data[: shape + 20] + struct.pack("<Q", 2**50) + data[shape + 28 :],
        "on another": data[: shape + 20] + struct.pack("<Q", 0) + data[shape + 28 :],
    }[what]


FAULTS = [
    "cut in a tensor", "cut in the keys", "empty", "no magic", "version", "other byte order", "tensors", "keys",
    "length of a key", "not UTF-8", "type of a value", "blocks", "rows", "no rows", "type of a tensor", "place",
    "on another",
]  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_hostile_file_is_refused_in_a_line_that_names_it(llama, tmp_path, what):
    file = tmp_path / "bad.gguf"
    file.write_bytes(break_file(llama[1].read_bytes(), what))
    assert "bad.gguf" in refusal(ckpt_prune.convert, file, output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == [file]


@given(st.integers(0, 60_000), st.binary(min_size=1, max_size=8))
def test_whatever_is_written_over_a_header_is_read_or_refused(llama, place, bytes_):
    data = bytearray(llama[1].read_bytes())
    data[place : place + len(bytes_)] = bytes_
    file = llama[1].with_name("fuzzed.gguf")
    file.write_bytes(data)
    try:
        ckpt_prune.convert(file, output=llama[1].with_name("out"), overwrite=True, proof=False)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017


def edit_file(file: Path, out: Path, packed: str = "nothing", **values: object) -> Path:
    """A copy of a file with other keys; None takes one away. Tensors with `packed` in their names are in MXFP4."""
    old = open_gguf(file)
    writer = gguf.GGUFWriter(out, (old.values | values)["general.architecture"])
    for key, value in (old.values | values).items():
        if key == "general.architecture" or value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name in old.tensors:
        tensor, kind = old.read(name).numpy(), gguf.GGMLQuantizationType.MXFP4 if packed in name else None
        writer.add_tensor(name, gguf.quantize(tensor, kind) if kind else tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("split.count", 3, "one of 3 parts"),
        ("llama.attention.head_count", [4, 4, 2, 4, 4, 4], "its blocks differ"),
        ("llama.attention.head_count", 5, "5"),
        ("llama.rope.scaling.type", "longrope", "a way to scale rotary positions that is not converted"),
        ("tokenizer.ggml.model", "bert", "tokenizer 'bert' is not converted"),
        ("tokenizer.ggml.pre", "klingon", "pre-tokenizer 'klingon'"),
        ("tokenizer.ggml.eos_token_id", 5000, "eos_token_id is '5000', and there are 2048 tokens"),
        ("tokenizer.ggml.token_type", [1, 1], "2048 tokens"),
        ("tokenizer.ggml.merges", ["zzzz qqqq"], "is not of tokens"),
        ("llama.attention.layer_norm_rms_epsilon", None, "is missing, not a finite number"),
    ],
)
def test_keys_that_contradict_the_rest_are_refused(llama, tmp_path, key, value, says):
    file = edit_file(llama[1], tmp_path / "bad.gguf", **{key: value})
    with pytest.raises(UserError, match=says):
        ckpt_prune.convert(file, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.max_alibi_bias", None, "is missing, and mpt computes 8.0"),
        ("attention.max_alibi_bias", 16.0, "'16.0', and mpt computes 8.0"),
        ("feed_forward_length", 100, "'100', and MLPs of mpt are always 4 times as wide as the model: prune the"),
        ("attention.head_count_kv", 2, "attn_qkv.weight has 144 rows, and 6 and 2 heads; download it again"),
    ],
)
def test_keys_that_an_mpt_has_no_place_for_are_refused(tmp_path, key, value, says):
    folder = save(tmp_path / "model", "mpt", **FAMILIES["mpt"][1])
    export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)
    file = edit_file(tmp_path / "m.gguf", tmp_path / "bad.gguf", **{f"mpt.{key}": value})
    with pytest.raises(UserError, match=says):
        ckpt_prune.convert(file, output=tmp_path / "out")


def test_a_gemma_4_that_no_class_computes_is_refused_by_the_key(tmp_path):
    """MLPs of a third width, and blocks that read keys and values of others than in llama.cpp."""
    folder = save(tmp_path / "model", *FAMILIES["gemma4-shared"][:1], **FAMILIES["gemma4-shared"][1])
    export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)
    for key, value, says in (
        ("feed_forward_length", [48] * 4 + [96, 80], "MLPs of one width, or twice as wide"),
        ("attention.shared_kv_layers", 1, "the same blocks"),
    ):
        file = edit_file(tmp_path / "m.gguf", tmp_path / "bad.gguf", **{f"gemma4.{key}": value})
        with pytest.raises(UserError, match=rf"gemma4\.{key} is .*{says}"):
            ckpt_prune.convert(file, output=tmp_path / "out")


def test_an_unknown_architecture_is_refused(llama, tmp_path):
    data = llama[1].read_bytes().replace(b"llama", b"plamo", 1)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(UserError, match="GGUF files of plamo are not converted"):
        ckpt_prune.convert(tmp_path / "m.gguf", output=tmp_path / "out")


def test_the_licence_comes_along(llama, tmp_path):
    card = {"general.license": "apache-2.0", "general.languages": ["en"]}
    file = edit_file(llama[1], tmp_path / "m.gguf", **card)
    ckpt_prune.convert(file, output=tmp_path / "out")
    assert source_card(tmp_path / "out").license == "apache-2.0"
    export_gguf(str(tmp_path / "out"), tmp_path / "again.gguf", proving(tmp_path / "out"), proof=False)
    assert card.items() <= open_gguf(tmp_path / "again.gguf").values.items()


def test_the_folder_is_a_checkpoint_that_this_tool_opens(llama, tmp_path):
    ckpt_prune.convert(llama[1], output=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(UserError, match="overlaps the source"):
        ckpt_prune.convert(llama[1], output=llama[1].parent, overwrite=True)
    with pytest.raises(UserError, match="exists; --overwrite"):
        ckpt_prune.convert(llama[1], output=tmp_path / "out")


def test_a_key_given_twice_is_refused(tmp_path):
    entry = struct.pack("<Q", 1) + b"a" + struct.pack("<II", 4, 7)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry * 2)
    with pytest.raises(UserError, match="it has the key 'a' twice; download it again"):
        open_gguf(tmp_path / "m.gguf")
