"""Families: dimensions, what a file inherits, refusals, skeletons. `tests/contract` has what holds of every family."""

import json
import shutil
from contextlib import nullcontext
from functools import partial
from math import prod
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.model import descriptions
from ckpt_prune.model.config_only import checkpoint_of_config, is_config_only
from ckpt_prune.model.descriptions import families_with_experts, known_families, load_family, variants_of
from ckpt_prune.model.settings import unknown_settings
from ckpt_prune.model.skeleton import (
    Names,
    build_skeleton,
    find_ties,
    parse_config,
)
from ckpt_prune.model.supported import NO_MODEL_TYPE, check_model_type, declared_family
from tests import refusals
from tests.families import SIZES, VARIANTS, make

FAMILIES = sorted({variant.model_type for variant in VARIANTS.values()})


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    return Names(build_skeleton(config, load_family(config.model_type).architecture)).shapes


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

    message = "config.json of type qwen2 lacks num_key_value_heads or num_attention_heads"
    assert refusals.refusal(load_family("qwen2").dimension, Config(), "kv_heads") == message


# ---- refusals --------------------------------------------------------------------------------------------------


refusal = partial(refusals.refusal, declared_family)


@pytest.mark.parametrize("model_type", ["rwkv", "../llama"])
def test_an_unknown_family(model_type):
    assert refusal({"model_type": model_type}) == (
        f"model_type {model_type!r} is not one of the {len(known_families())} families that this version knows, "
        "and carries no description"
    )


UNSUPPORTED = json.loads((Path(descriptions.__file__).parent / "unsupported.json").read_text())


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_a_family_that_cannot_be_described_is_refused_with_the_reason(model_type):
    why = UNSUPPORTED[model_type]
    assert refusal({"model_type": model_type, "num_local_experts": 8}) == f"{model_type} is not supported: {why}"
    assert model_type not in known_families()


@pytest.mark.parametrize("wrapped", [{}, {"model_type": "timm_wrapper"}])
def test_a_folder_of_timm(wrapped):
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 10, **wrapped}
    assert refusal(config) == (
        "this is timm's vit_tiny_patch16_224: `ckpt-prune convert MODEL -o OUT` writes it as a vit or deit of "
        "transformers if one computes the same"
    )


@pytest.mark.parametrize("config", [{}, {"model_type": 3}])
def test_no_model_type(config):
    assert refusal(config) == NO_MODEL_TYPE


def test_experts_of_a_family_without():
    assert refusal({"model_type": "llama", "moe_intermediate_size": 8}) == (
        "config.json of type llama has moe_intermediate_size, and a llama has no experts: take one of "
        f"{', '.join(families_with_experts())}"
    )


def test_no_experts_is_no_mixture():
    assert declared_family({"model_type": "llama", "num_experts": 0, "num_local_experts": None}) == load_family("llama")


# ---- inheritance -----------------------------------------------------------------------------------------------


@pytest.fixture
def families(tmp_path, monkeypatch):
    """A folder with a parent, and whatever is written to it."""
    for cached in (known_families, load_family, variants_of):
        monkeypatch.setattr(descriptions, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(descriptions, "_folder", lambda: tmp_path)
    source = Path(descriptions.__file__).parent / "families"
    for name in ("llama", "vit"):
        shutil.copy(source / f"{name}.json", tmp_path)

    def write(parent, **keys):
        values = {"extends": parent, "model_type": "child"} | keys
        (tmp_path / "child.json").write_text(json.dumps(values))
        return descriptions.load_family("child")

    return write


FACTS = ["spaces", "rope", "bias_slots", "residual", "stand_ins"]


def test_what_changes_the_function_is_not_inherited_silently(families):
    assert refusals.refusal(families, "llama", inherits=["spaces", "rope", "bias_slots"], stand_ins=[]) == (
        "child.json extends llama and does not say whether residual is the same: compare the two modeling files of "
        'transformers, then write "inherits": ["spaces", "rope", "bias_slots", "residual"], or state those that differ'
    )
    with pytest.raises(UserError, match="does not say whether spaces, bias_slots, residual, unrotatable are the same"):
        families("vit")


def test_facts_are_inherited_by_name(families):
    assert families("llama", inherits=FACTS) == families(
        "llama", inherits=FACTS[:-1], stand_ins=["mistral", "seed_oss"]
    )
    assert families("llama", inherits=FACTS).residual == load_family("llama").residual
    assert families("llama", inherits=[f for f in FACTS if f != "residual"], residual=None).residual is None


@pytest.mark.parametrize(
    ("inherits", "keys"), [("layers", {}), ("unrotatable", {}), ("residual", {"residual": None}), ("nothing", {})]
)
def test_only_facts_that_a_file_takes_over_are_inherited_by_name(families, inherits, keys):
    with pytest.raises(UserError, match=rf'child.json has {inherits} in "inherits", which takes only keys that its'):
        families("llama", inherits=[*(f for f in FACTS if f not in keys), inherits], **keys)


# ---- skeletons -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_skeleton_has_every_shape_and_no_memory(tmp_path, variant):
    folder = make(tmp_path / "model", variant)
    checkpoint = Checkpoint.open(folder)
    skeleton = build_skeleton(parse_config(checkpoint.config), VARIANTS[variant].family.architecture)
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    expected, tied = Names(skeleton).shapes, {Names(skeleton).saved_as(name) for name in find_ties(skeleton)}
    assert tied == ({"lm_head.weight"} if variant in ("llama-gqa-tied", "qwen2") else set())
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
        name: shape for name, shape in expected.items() if name not in tied
    }


def test_a_fused_tensor_may_hold_parts_that_differ_in_rows():
    """lara_mini stores what linear attention reads in one tensor: queries to values, gates, and two for each head."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 20, "layer_types": ["linear_attention"] * 2}
    names = Names(build_skeleton(parse_config({"model_type": "lara_mini", **sizes}), "LaraMiniForCausalLM"))
    disk = "model.layers.1.linear_attn.in_proj.weight"
    parts = names.parameters(disk)
    assert [part.rpartition(".in_proj_")[2] for part in parts] == ["qkv.weight", "z.weight", "b.weight", "a.weight"]
    assert names.rows(disk) == [len(names.model.get_parameter(part)) for part in parts]
    assert names.shape(disk) == names.shapes[disk] == (sum(names.rows(disk)), 32)
    assert {names.saved_as(part) for part in parts} == {disk}
    assert names.missing(names.shapes) == []


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


# ---- settings that no description names -----------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", known_families())
def test_every_key_of_a_config_class_is_accounted_for(model_type):
    """A new transformers that adds one fails here: does it change the function, or may `settings` name it?"""
    family = load_family(model_type)
    assert family.settings is not None
    config, variants = AutoConfig.for_model(model_type), variants_of(model_type)
    unknown = [
        set(unknown_settings(load_family(model_type, chosen_variant).named_keys, config))
        for chosen_variant in (None, *variants)
    ]
    refused = {"add_cross_attention"} & set(vars(config)) - family.named_keys
    assert set.intersection(*unknown) - set(variants) == refused


def test_a_setting_that_no_description_knows_is_refused_by_name():
    class Later(LlamaConfig):
        norm_placement: str = "before"

    load_family("llama").check_config(Later())
    assert refusals.refusal(load_family("llama").check_config, Later(norm_placement="after")) == (
        'llama with norm_placement "after" in config.json is not supported: the description of llama does not say what '
        "that changes"
    )
    unguarded = load_family("llama").model_copy(update={"settings": None})
    unguarded.check_config(Later(norm_placement="after"))


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"model_type": "qwen2_5_vl"}, "qwen2_5_vl is made of several models: --part text or --part vision prunes one"),
        ({"model_type": "bart"}, "bart has two stacks of blocks: --part encoder or --part decoder names one"),
        ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, None),
    ],
)
def test_a_whole_is_refused_and_a_class_of_one_part_is_not(config, advice):
    with nullcontext() if advice is None else pytest.raises(UserError, match=f"^{advice}$"):
        check_model_type(config)
