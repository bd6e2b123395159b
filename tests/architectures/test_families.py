"""Descriptions against the stock models they describe."""

import json
from math import prod

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_prune.architectures.family import family_of, known_families, load_family
from ckpt_prune.architectures.hypothetical import checkpoint_of_config, is_config_only
from ckpt_prune.architectures.skeleton import (
    Names,
    build_skeleton,
    parameter_count,
    parse_config,
    tied_names,
)
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.errors import UserError
from tests.families import BLOCKS, SIZES, VARIANTS, make, model_of, stock

KNOWN = "bert, deit, dinov2, llama, mistral, opt, qwen2, qwen3, seed_oss, vit"
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "seed_oss"]
"""Those with rotary positions and gated projections, which the variants here are of."""
UNEQUAL = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
"""Every dimension differs from every other, so that no two can be mistaken."""
ROWS_PER_UNIT = {
    "heads": {"self_attn.q_proj": 12, "self_attn.k_proj": 6, "self_attn.v_proj": 6},
    "mlp": {"mlp.gate_proj": 1, "mlp.up_proj": 1},
}


def config_of(model_type, **changes):
    return AutoConfig.for_model(model_type, **{**UNEQUAL, **changes})


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    return Names(build_skeleton(config, load_family(config.model_type).architecture)).shapes


def test_the_known_families():
    assert list(known_families()) == KNOWN.split(", ")
    assert {variant.model_type for variant in VARIANTS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_class_is_the_one_transformers_picks(name):
    assert AutoModelForCausalLM._model_mapping[type(config_of(name))].__name__ == load_family(name).architecture
    assert load_family(name).model_type == name


@pytest.mark.parametrize("name", FAMILIES)
def test_named_modules_exist(name):
    family = load_family(name)
    skeleton = build_skeleton(config_of(name), family.architecture)
    assert len(skeleton.get_submodule(family.layers)) == BLOCKS
    assert family.entry == [family.embedding, "model.rotary_emb"]
    assert (family.exit, family.head) == (["model.norm"], "lm_head")
    for path in (*family.entry, *family.exit, family.head):
        skeleton.get_submodule(path)
    names = set(skeleton.state_dict())
    for space in family.spaces.values():
        for module in (*space.readers, space.consumer):
            assert {family.tensor(block, module) for block in range(BLOCKS)} <= names
    prefixes = tuple(family.block.format(block=block) for block in range(BLOCKS))
    outside = {name for name in names if not name.startswith(prefixes)}
    assert outside == {f"{path}.weight" for path in (family.embedding, *family.exit, family.head)}


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_and_columns_are_counted_in_units(name):
    family, model = load_family(name), model_of({"model_type": name, **UNEQUAL})
    shapes = shapes_of(config_of(name))
    for key, space in family.spaces.items():
        units = model.units(key)
        assert units == {"heads": 2, "mlp": 22}[key]
        assert shapes[family.tensor(1, space.consumer)][1] == units * model.unit_columns(key)
        assert set(space.readers) == set(ROWS_PER_UNIT[key])
        for incidence in space.rows:
            assert incidence.copies == 1
            assert shapes[family.tensor(1, incidence.module)][0] == units * ROWS_PER_UNIT[key][incidence.module]


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("key", ["heads", "mlp"])
@pytest.mark.parametrize("name", FAMILIES)
def test_config_keys_change_the_widths_of_their_space_and_nothing_else(name, key, kept):
    family, model = load_family(name), model_of({"model_type": name, **UNEQUAL})
    space, dense = family.spaces[key], shapes_of(model.config)
    changes = model.config_values({key: kept})
    assert changes.keys() == space.config.keys()
    pruned = shapes_of(config_of(name, **changes))
    expected = dict(dense)
    for block in range(BLOCKS):
        for module in space.readers:
            for kind in ("weight", "bias"):
                tensor = family.tensor(block, module, kind)
                if tensor in expected:
                    expected[tensor] = (kept * ROWS_PER_UNIT[key][module], *expected[tensor][1:])
        tensor = family.tensor(block, space.consumer)
        expected[tensor] = (expected[tensor][0], kept * model.unit_columns(key))
    assert pruned == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_bias_slots_open_with_their_key_and_only_with_it(name):
    family = load_family(name)
    keys = {slot for slot in family.bias_slots.values() if isinstance(slot, str)}
    for opened in [set(), *({key} for key in keys), keys]:
        config = config_of(name, **{key: key in opened for key in keys})
        expected = {m for m, slot in family.bias_slots.items() if slot is True or slot in opened}
        biases = {n for n in shapes_of(config) if n.endswith(".bias")}
        assert biases == {family.tensor(block, module, "bias") for block in range(BLOCKS) for module in expected}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_config_class_refuses_odd_head_counts_where_the_description_says_so(name):
    raw = {"model_type": name, **UNEQUAL, "num_attention_heads": 3, "num_key_value_heads": 3}
    if load_family(name).heads_divide_hidden:
        with pytest.raises(UserError, match=r"^transformers refuses this config.json: .*multiple of the number of att"):
            parse_config(raw)
    else:
        assert parse_config(raw).num_attention_heads == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_stand_ins_have_the_same_tensors(name):
    family = load_family(name)
    for stand_in in family.stand_ins:
        other = load_family(stand_in)
        slots = {s: False for s in other.bias_slots.values() if isinstance(s, str)}
        own = {s: False for s in family.bias_slots.values() if isinstance(s, str)}
        plain = {n: s for n, s in shapes_of(config_of(name, **own)).items() if not n.endswith(".bias")}
        assert shapes_of(config_of(stand_in, **slots)) == plain


# ---- dimensions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "head_dim", "group"),
    [
        ({"head_dim": 6}, 6, 2),
        ({"head_dim": None}, 4, 2),
        ({}, 4, 2),
        ({"num_key_value_heads": None}, 4, 1),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, 8, 1),
    ],
)
def test_head_dim_and_groups_have_fallbacks(raw, head_dim, group):
    class Config:
        hidden_size, num_attention_heads, num_key_value_heads = 16, 4, 2

    config = Config()
    for key, value in raw.items():
        setattr(config, key, value)
    family = load_family("llama")
    assert (family.dimension(config, "head_dim"), family.dimension(config, "group")) == (head_dim, group)


@pytest.mark.parametrize("name", FAMILIES)
def test_head_dim_is_the_stock_models_where_the_config_is_silent(name):
    values = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = AutoConfig.for_model(name, **values)
    family = load_family(name)
    rows = shapes_of(config)[family.tensor(0, "self_attn.k_proj")][0]
    assert family.dimension(config, "head_dim") == rows // 2


def test_a_missing_dimension_is_named():
    class Config:
        hidden_size = 16

    with pytest.raises(UserError) as caught:
        load_family("qwen2").dimension(Config(), "kv_heads")
    message = "config.json of type qwen2 lacks num_key_value_heads or num_attention_heads"
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "changes", "windowed"),
    [
        ("llama", {}, False),
        ("mistral", {"sliding_window": None}, False),
        ("mistral", {"sliding_window": 8}, True),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, True),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, True),
        ("seed_oss", {}, False),
    ],
)
def test_whether_attention_is_windowed(name, changes, windowed):
    assert model_of({"model_type": name, **UNEQUAL, **changes}).uses_sliding_window is windowed


# ---- refusals --------------------------------------------------------------------------------------------------


def refusal(config) -> str:
    with pytest.raises(UserError) as caught:
        family_of(config)
    return str(caught.value)


@pytest.mark.parametrize("model_type", ["gpt2", "Llama", "", "../llama"])
def test_an_unknown_family(model_type):
    assert refusal({"model_type": model_type}) == (
        f"model_type {model_type!r} is not a family this version knows ({KNOWN}): "
        "a new one is a JSON description in ckpt_prune/architectures/families/"
    )


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 3}])
def test_no_model_type(config):
    assert refusal(config) == "config.json has no model_type, so the family of this checkpoint is unknown"


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "llama"])
def test_experts(model_type, key):
    assert refusal({"model_type": model_type, key: 8}) == (
        f"this checkpoint is a mixture of experts ({key} in config.json), which is not supported; "
        f"known families: {KNOWN}; a description goes in ckpt_prune/architectures/families/"
    )


def test_no_experts_is_no_mixture():
    assert family_of({"model_type": "llama", "num_experts": 0, "num_local_experts": None}) == load_family("llama")


# ---- skeletons -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_skeleton_has_every_shape_and_no_memory(tmp_path, variant):
    folder = make(tmp_path / "model", variant)
    checkpoint = Checkpoint.open(folder)
    skeleton = build_skeleton(parse_config(checkpoint.config), VARIANTS[variant].family.architecture)
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    expected, tied = Names(skeleton).shapes, tied_names(skeleton)
    assert tied == ({"lm_head.weight"} if variant in ("llama-gqa-tied", "qwen2") else set())
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
        name: shape for name, shape in expected.items() if name not in tied
    }
    assert parameter_count(skeleton) == stock(folder).num_parameters()


def test_a_config_alone_is_a_checkpoint_for_counting(tmp_path):
    folder = make(tmp_path / "model", "qwen2")
    assert not is_config_only(folder)
    (tmp_path / "config").mkdir()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config" / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert is_config_only(tmp_path / "config")
    assert not is_config_only(tmp_path)
    real, counted = Checkpoint.open(folder), checkpoint_of_config(tmp_path / "config")
    assert {n: i.shape for n, i in real.tensors.items()} == {n: i.shape for n, i in counted.tensors.items()}
    assert all(info.nbytes == 2 * prod(info.shape) for info in counted.tensors.values())


def test_a_config_that_transformers_refuses(tmp_path):
    with pytest.raises(UserError, match=r"^transformers refuses this config.json: "):
        parse_config({"model_type": "llama", "hidden_size": "wide"})
