"""A model's dimensions, shapes and names, against the checkpoints and stock classes that they speak of."""

from functools import cache
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckpt_prune.model.cuts import list_cuts
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import Names, build_skeleton, parse_config
from tests import encoders, families
from tests.families import BLOCKS, model_of

RAW = {
    "llama": {"model_type": "llama", **families.SIZES},
    "mistral": {"model_type": "mistral", **families.SIZES, "head_dim": 6, "sliding_window": None},
    "qwen2-tied": {"model_type": "qwen2", **families.SIZES, "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", **families.SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 6},
    "vit": {"model_type": "vit", **encoders.SIZES["vit"]},
    "dinov2": {"model_type": "dinov2", **encoders.SIZES["dinov2"]},
    "dinov2-swiglu": {"model_type": "dinov2", **encoders.SIZES["dinov2"], "use_swiglu_ffn": True},
    "opt": {"model_type": "opt", **encoders.SIZES["opt"]},
    "bert": {"model_type": "bert", **encoders.SIZES["bert"]},
}
WIDTHS = {
    "llama": {"rotary": 2, "queries": 2, "heads": 2, "values": 4, "mlp": 22},
    "mistral": {"rotary": 3, "queries": 2, "heads": 2, "values": 6, "mlp": 22},
    "qwen2-tied": {"rotary": 2, "queries": 2, "heads": 2, "values": 4, "mlp": 22},
    "llama-biases": {"rotary": 3, "queries": 2, "heads": 2, "values": 6, "mlp": 22},
    "vit": {"qk": 4, "heads": 4, "values": 4, "mlp": 22},
    "dinov2": {"qk": 4, "heads": 4, "values": 4, "mlp": 64},
    "dinov2-swiglu": {"qk": 4, "heads": 4, "values": 4, "mlp": 48},
    "opt": {"qk": 4, "heads": 4, "values": 4, "mlp": 22},
    "bert": {"qk": 4, "heads": 4, "values": 4, "mlp": 22},
}
COLUMNS = {
    "llama": {"queries": 4, "heads": 8},
    "mistral": {"queries": 6, "heads": 12},
    "qwen2-tied": {"queries": 4, "heads": 8},
    "llama-biases": {"queries": 6, "heads": 12},
}
"""Of the consumer, per unit: two heads of four or six, or one of them; elsewhere one head of four."""


@cache
def model(name: str) -> Model:
    return model_of(RAW[name])


# ---- dimensions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RAW)
def test_dimensions(name):
    dense_model = model(name)
    assert dense_model.blocks == dense_model.dimension("layers") == BLOCKS
    assert {s: max(dense_model.unit_counts(s)) for s in dense_model.family.spaces} == WIDTHS[name]
    values = 2 if "queries" in WIDTHS[name] else 4
    copies = {s: {"qk": 4, "rotary": 2, "queries": 2, "values": values}.get(s, 1) for s in WIDTHS[name]}
    assert {s: dense_model.copies(s) for s in WIDTHS[name]} == copies
    assert {s: dense_model.site_units(s, 0) for s in WIDTHS[name]} == {
        s: n * copies[s] for s, n in WIDTHS[name].items()
    }
    columns = {"qk": 1, "rotary": 1, "heads": 4, "values": 4 // values, "mlp": 1} | COLUMNS.get(name, {})
    assert {s: dense_model.unit_columns(s) for s in WIDTHS[name]} == {s: columns[s] for s in WIDTHS[name]}


def test_config_values_are_of_the_spaces_given():
    assert model("llama").config_values({"heads": 1}) == {"num_attention_heads": 2, "num_key_value_heads": 1}
    assert model("llama").config_values({"heads": 2, "mlp": 7}) == {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 7,
    }
    # One of two query heads in each of two groups, or in the one that stays.
    assert model("llama").config_values({"queries": 1}) == {"num_attention_heads": 2}
    assert model("llama").config_values({"queries": 1, "heads": 1}) == {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    assert model("vit").config_values({"qk": 3}) == {"qk_head_dim": 3}
    assert model("vit").config_values({}) == {}


def test_tokens_are_the_context_or_patches_and_special_tokens():
    assert (model("llama").tokens, model("vit").tokens) == (32, 10)
    assert (model("vit").image_tokens((12, 12)), model("vit").image_tokens((8, 20))) == (10, 11)
    deit = model_of({"model_type": "deit", **encoders.SIZES["deit"]})
    assert deit.image_tokens((8, 20)) == 12


# ---- tensors ---------------------------------------------------------------------------------------------------


def test_shapes_are_those_on_disk(tmp_path):
    folder = families.make(tmp_path / "m", "qwen3", dtype=torch.float16)
    on_disk = {n: (t.dtype, tuple(t.shape)) for n, t in load_file(folder / "model.safetensors").items()}
    dense_model = Model.open(folder)
    assert dense_model.shapes == dense_model.tensors == on_disk
    assert dense_model.dtype == torch.float16


def test_tensors_leave_out_stored_buffers(tmp_path):
    dense_model = Model.open(encoders.make(tmp_path / "m", "bert-old-names"))
    assert dense_model.shapes.keys() - dense_model.tensors.keys() == {"bert.embeddings.position_ids"}


@pytest.mark.parametrize("name", RAW)
def test_every_tensor_is_in_a_block_or_outside(name):
    dense_model = model(name)
    listed = [*(n for block in range(BLOCKS) for n in dense_model.block_names(block)), *dense_model.outside()]
    assert sorted(listed) == sorted(dense_model.shapes)
    assert len(dense_model.block_names(0)) == len(dense_model.block_names(BLOCKS - 1)) > 0
    for module in dense_model.family.linears:
        assert dense_model.tensor(1, module) in dense_model.block_names(1)
        assert dense_model.has(module)
        assert dense_model.has(module, "bias") == (dense_model.tensor(0, module, "bias") in dense_model.shapes)


def test_a_block_is_read(tmp_path):
    folder = families.make(tmp_path / "m", "llama-biases")
    stored = load_file(folder / "model.safetensors")
    tensors = Model.open(folder).read_block(2)
    assert tensors.keys() == {name for name in stored if name.startswith("model.layers.2.")}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())


def test_a_head_that_is_the_embedding():
    assert model("qwen2-tied").tied
    assert not model("llama").tied


# ---- widths ----------------------------------------------------------------------------------------------------


def choices(name: str) -> st.SearchStrategy[dict[str, torch.Tensor]]:
    """Space → units that stay of a few spaces, as many in each copy and any of them."""
    dense_model = model(name)

    @st.composite
    def drawn(draw: st.DrawFn) -> dict[str, torch.Tensor]:
        kept = {}
        for space in draw(st.sets(st.sampled_from(sorted(WIDTHS[name])))):
            units = dense_model.units(space, 0)
            count = draw(st.integers(1, units))
            subsets = st.permutations(range(units)).map(lambda order, n=count: sorted(order[:n]))
            runs = [copy * units + unit for copy in range(dense_model.copies(space)) for unit in draw(subsets)]
            kept[space] = torch.tensor(runs)
        return kept

    return drawn()


def counts(dense_model: Model, kept: dict[str, torch.Tensor]) -> dict[str, int]:
    return {space: len(units) // dense_model.copies(space) for space, units in kept.items()}


def shapes_of_choice(dense_model: Model, block: int, kept: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """A block's tensors, cut on the meta device."""
    tensors = {n: torch.empty(dense_model.shapes[n][1], device="meta") for n in dense_model.block_names(block)}
    for module, kind, dim, lines in list_cuts(dense_model.remaining_lines(kept)):
        name = dense_model.tensor(block, module, kind)
        if name in tensors:
            tensors[name] = tensors[name].index_select(dim, lines.to("meta"))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", RAW)
@settings(max_examples=10)  # of each of nine models
@given(data=st.data())
def test_any_choice_of_as_many_units_has_the_same_shapes(name, data):
    """Each block with units of its own; what stands outside the blocks stays."""
    dense_model = model(name)
    kept = [data.draw(choices(name)) for _ in range(BLOCKS)]
    shapes = dense_model.shapes_at([counts(dense_model, units) for units in kept])
    for block, units in enumerate(kept):
        assert {n: shapes[n][1] for n in dense_model.block_names(block)} == shapes_of_choice(dense_model, block, units)
        # The pairs that stay are written down for every KV head that stays.
        pairs_spec, pairs = shapes.pop(dense_model.pairs_name(block), None), dense_model.kept_pairs(units)
        fewer = "rotary" in units and len(units["rotary"]) < dense_model.site_units("rotary", 0)
        assert (pairs_spec is not None) == fewer
        assert pairs_spec is None or (pairs is not None and pairs_spec == (torch.int16, tuple(pairs.shape)))
    assert {n: shapes[n] for n in dense_model.outside()} == {n: dense_model.shapes[n] for n in dense_model.outside()}
    assert {n: dtype for n, (dtype, _) in shapes.items()} == {n: dtype for n, (dtype, _) in dense_model.shapes.items()}


@pytest.mark.parametrize("name", RAW)
@settings(max_examples=10)  # of each of nine models
@given(data=st.data())
def test_widths_are_read_off_tensors(name, data):
    dense_model, kept = model(name), data.draw(choices(name))
    block = data.draw(st.integers(0, BLOCKS - 1))
    tensors = {n: torch.empty(s, device="meta") for n, s in shapes_of_choice(dense_model, block, kept).items()}
    widths = counts(dense_model, kept)
    if "values" in widths:  # half of the heads have as many lines as heads half as wide: the tensors come with a note
        tensors = dense_model.note_widths(block, tensors, widths)
    assert dense_model.widths_of(block, tensors) == WIDTHS[name] | widths


@pytest.mark.parametrize("name", RAW)
def test_whole_widths_are_the_checkpoints_own_shapes(name):
    dense_model = model(name)
    assert (
        dense_model.shapes_at([{s: max(dense_model.unit_counts(s)) for s in dense_model.family.spaces}] * BLOCKS)
        == dense_model.shapes
    )
    assert dense_model.shapes_at([{}] * BLOCKS) == dense_model.shapes


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mlp", [1, 7, 22])
@pytest.mark.parametrize("name", ["mistral", "qwen2-tied", "llama-biases"])
def test_shapes_are_those_of_the_stock_class_at_that_config(name, heads, mlp):
    dense_model, widths = model(name), {"heads": heads, "mlp": mlp}
    raw = RAW[name] | {"head_dim": dense_model.dimension("head_dim")} | dense_model.config_values(widths)
    expected = Names(build_skeleton(parse_config(raw), dense_model.family.architecture)).shapes
    shapes = {n: shape for n, (_, shape) in dense_model.shapes_at([widths] * BLOCKS).items()}
    assert shapes == {n: shape for n, shape in expected.items() if n in shapes}
    assert expected.keys() - shapes.keys() == ({"lm_head.weight"} if dense_model.tied else set())


@pytest.mark.parametrize("name", RAW)
def test_weights_of_a_unit_are_those_that_go_with_it(name):
    """One unit less of every copy, in one block, without biases."""
    dense_model = model(name)

    def weights(widths: dict[str, int]) -> int:
        shapes = dense_model.shapes_at([widths])
        return sum(prod(shape) for tensor, (_, shape) in shapes.items() if tensor.endswith(".weight"))

    for space, units in WIDTHS[name].items():
        gone = weights({}) - weights({space: units - 1})
        assert gone == dense_model.copies(space) * dense_model.unit_weights(space) > 0


# ---- statistics ------------------------------------------------------------------------------------------------


def test_widths_of_what_statistics_hold():
    dense_model, prefix = model("opt"), "model.decoder.layers.{block}."
    assert dense_model.consumer_widths == {f"{prefix}self_attn.out_proj.weight": 16, f"{prefix}fc2.weight": 22}
    assert dense_model.linear_widths == {f"{prefix}self_attn.q_proj.weight/input": 16, f"{prefix}fc1.weight/input": 16}
    assert dense_model.query_heads == {f"{prefix}self_attn.q_proj.weight": (4, 4)}
