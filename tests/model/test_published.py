"""Checkpoints as they are published: their sizes, their tensors' names, and the settings that are refused."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.composites import extract_part, load_composite
from ckpt_prune.model.config_only import checkpoint_of_config
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.descriptions import known_families, load_family, variants_of
from ckpt_prune.model.family_keys import Refusal
from ckpt_prune.recipe.names import RotationKind
from ckpt_prune.stages import FullRecipe
from ckpt_prune.verification.verify import verify
from tests import refusals
from tests.contract.dense import Dense, spaces_recipe
from tests.contract.models import BLOCKS, Case
from tests.contract.whole import TARGETS, Whole, assert_same_outputs, outputs, plain
from tests.families import model_of
from tests.pairs import choose_cases, every
from tests.stages.test_rotations import random_rotations, rotating

PUBLISHED, COMPOSITES = json.loads(Path(__file__).with_name("published.json").read_text()).values()
"""Model on the Hub → parameters by its page, and its config.json as published as far as it says what is computed.

Of some models it says only what differs from the config class.
"""


SMALLEST = {
    min(
        (name for name in PUBLISHED if PUBLISHED[name]["model_type"] == model_type),
        key=lambda name: PUBLISHED[name]["parameters"],
    )
    for model_type in {config["model_type"] for config in PUBLISHED.values()}
}
"""Of every family."""


# Names of the 15,000 experts of DeepSeek-V3 take six seconds.
@pytest.mark.parametrize(
    "name", choose_cases(PUBLISHED, lambda name: name in SMALLEST and PUBLISHED[name]["parameters"] < 10**11)
)
def test_a_published_config_has_as_many_parameters_as_its_page_counts(name: str) -> None:
    config = {**PUBLISHED[name]}
    parameters = config.pop("parameters")
    model = model_of(config)
    assert (model.family.model_type, cost_of(model).parameters) == (config["model_type"], parameters)


@pytest.mark.parametrize("name", every(9, sorted(COMPOSITES, key=lambda name: COMPOSITES[name]["parameters"])))
def test_a_published_composite_has_as_many_parameters_as_its_page_counts(name: str, tmp_path: Path) -> None:
    """Its parts are parts of that, each by its config alone."""
    config = {**COMPOSITES[name]}
    parameters = config.pop("parameters")
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = checkpoint_of_config(tmp_path)
    assert sum(info.numel for info in checkpoint.tensors.values()) == parameters
    for part in load_composite(config).parts:
        described = ckpt_prune.inspect(str(tmp_path), part=part)
        inside = extract_part(checkpoint, part).within
        assert inside is not None
        other_parameters = sum(info.numel for info in inside.rest.values())
        assert described.parameters == parameters - other_parameters


# ---- names ---------------------------------------------------------------------------------------------------------


def as_gpt2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the prefix of the base model, and with the causal mask of every block."""
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return bare | {f"h.{block}.attn.bias": torch.ones(1, 1, 32, 32).tril() for block in range(BLOCKS)}


def as_gptj(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    masks = {f"transformer.h.{block}.attn.masked_bias": torch.tensor(-1e9) for block in range(BLOCKS)}
    return (
        tensors
        | masks
        | {f"transformer.h.{b}.attn.bias": torch.ones(1, 1, 32, 32).tril().bool() for b in range(BLOCKS)}
    )


def as_pythia(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    file_tensors = dict(tensors)
    for block in range(BLOCKS):
        prefix = f"gpt_neox.layers.{block}.attention"
        file_tensors |= {f"{prefix}.bias": torch.ones(1, 1, 32, 32).tril(), f"{prefix}.masked_bias": torch.tensor(-1e9)}
        file_tensors[f"{prefix}.rotary_emb.inv_freq"] = torch.ones(2)
    return file_tensors


def as_bloom(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def as_beit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the places in its table, which every block of old files has."""
    place = "attention.attention.relative_position_bias.relative_position_index"
    return tensors | {f"beit.encoder.layer.{b}.{place}": torch.zeros(10, 10, dtype=torch.int64) for b in range(BLOCKS)}


def as_clip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the prefix that it has beside the other tower."""
    file_tensors = {f"text_model.{name}": tensor for name, tensor in tensors.items()}
    return file_tensors | {"text_model.embeddings.position_ids": torch.arange(32)[None]}


AS_PUBLISHED = {
    Case("gpt2", "GPT2LMHeadModel"): as_gpt2,
    Case("gptj", "GPTJForCausalLM"): as_gptj,
    Case("gpt_neox", "GPTNeoXForCausalLM"): as_pythia,
    Case("bloom", "BloomForCausalLM"): as_bloom,
    Case("beit", "BeitForImageClassification", "use_relative_position_bias"): as_beit,
    Case("clip_text_model", "CLIPTextModel"): as_clip,
}


@pytest.mark.parametrize(
    ("case", "tied"),
    every(2, [(case, tied) for case in AS_PUBLISHED for tied in {False, case.family.head is not None}]),
    ids=str,
)
def test_names_as_published(case: Case, tied: bool, tmp_path: Path) -> None:
    """Pruned it is what a checkpoint with transformers' own names is; what models compute themselves travels along."""
    dense = Dense(tmp_path)
    folder = dense.folder(case)
    tensors = load_file(folder / "model.safetensors")
    if tied:
        config = dense.model(case).checkpoint.config | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
        del tensors[f"{case.family.head}.weight"]
    save_file(AS_PUBLISHED[case](tensors), folder / "model.safetensors", metadata={"format": "pt"})
    dense = Dense(tmp_path)
    assert dense.model(case).family.architecture == case.architecture
    methods = {space: "none" if space in case.family.logits else "ridge" for space in case.ratios}
    recipe = spaces_recipe(case, methods, "remote")
    dense.prune(case, recipe, tmp_path / "out")
    for check in verify(tmp_path / "out", folder):
        assert check.passed or check.name == "sparsity", check
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    Dense(tmp_path / "plain").root.mkdir()
    (tmp_path / "plain" / str(case)).symlink_to(folder)
    Dense(tmp_path / "plain").prune(case, recipe, tmp_path / "same")
    data = case.samples(3, seed=9)
    ours, theirs = (outputs(ckpt_prune.load(tmp_path / name), data) for name in ("out", "same"))
    assert_same_outputs(ours, theirs, 1e-12)


# ---- refusals ------------------------------------------------------------------------------------------------------


REFUSED = [
    (name, variant, refusal)
    for name in known_families()
    for variant in (None, *variants_of(name))
    for refusal in load_family(name, variant).refused
    if refusal.purpose is None and refusal.unlike is None and "." not in refusal.key
]


@pytest.mark.parametrize(("name", "variant", "refusal"), REFUSED, ids=lambda value: getattr(value, "key", value))
def test_settings_that_change_the_function_are_refused(name: str, variant: str | None, refusal: Refusal) -> None:
    values = {variant: True} if variant else {}
    config = AutoConfig.for_model(name, **values)
    is_float = isinstance(getattr(config, refusal.key, None), float)
    setattr(config, refusal.key, float(refusal.value) if is_float else refusal.value)
    with pytest.raises(UserError, match=rf"^{name} with \w+ .* in config\.json is not supported: "):
        load_family(name, variant).check_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "falcon"},
            "falcon with multi_query true in config.json is not supported: config.json has to say it, as published "
            "ones do",
        ),
        (
            {"model_type": "deberta-v2", "conv_kernel_size": 3},
            "deberta-v2 with conv_kernel_size 3 in config.json is not supported: a convolution stands between its "
            "first two blocks",
        ),
    ],
)
def test_a_refused_setting_is_named_with_the_reason(config: dict[str, Any], message: str) -> None:
    assert refusals.refusal(model_of, config) == message


def test_heads_of_a_phi3_with_listed_rotary_factors_need_own_code(tmp_path: Path) -> None:
    """Its config class wants as many factors as the hidden size by the number of heads says."""
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    case = Case(
        "phi3",
        "Phi3ForCausalLM",
        settings=json.dumps({"rope_scaling": {"type": "longrope", **factors}, "original_max_position_embeddings": 16}),
    )
    dense = Dense(tmp_path)
    for space in ("heads", "mlp"):
        out = tmp_path / space
        dense.prune(case, spaces_recipe(case, {space: "none"}), out)
        assert ("auto_map" in json.loads((out / "config.json").read_text())) == (space == "heads")
        for check in verify(out, dense.folder(case)):
            assert check.passed or check.name == "sparsity", check


# ---- blocks of different widths ------------------------------------------------------------------------------------


RATIO = {"gpt_neox": 0.4, "siglip_vision_model": 0.4}
"""At which one block keeps more heads than the other; a quarter by default."""
UNEVEN = [
    Case("stablelm", "StableLmForCausalLM"),
    Case("gpt2", "GPT2LMHeadModel"),
    Case("phi3", "Phi3ForCausalLM"),
    Case("gpt_neox", "GPTNeoXForCausalLM"),
    Case("falcon", "FalconForCausalLM", "new_decoder_architecture"),
    Case("beit", "BeitForImageClassification", "use_relative_position_bias"),
    Case("siglip_vision_model", "SiglipVisionModel"),
]


@pytest.mark.parametrize("case", every(4, UNEVEN), ids=str)
def test_blocks_of_different_widths(case: Case, tmp_path: Path) -> None:
    """Every block of the output computes with its own numbers, with every implementation of attention."""
    dense, data = Dense(tmp_path), case.samples(3, seed=9)
    spaces = {space: {"score": "flap", "compensation": {"method": "none"}} for space in case.family.consumers}
    top = {
        "allocation": "across-layers",
        "widths": "per_layer",
        "container": "any",
        "ratio": RATIO.get(case.model_type, 0.25),
    }
    recipe = FullRecipe.model_validate({"version": 1, "name": "test", "spaces": spaces, **top})
    report = dense.prune(case, recipe, tmp_path / "out")
    widths = {(site["block"], site["space"]): len(site["kept"]) for site in report["sites"]}
    assert widths[0, "heads"] != widths[1, "heads"], widths
    model, reference = dense.model(case), plain(case.model())
    for site in report["sites"]:
        consumer = case.family.columns[site["space"]].consumer
        (path,) = module_paths(case.family)[consumer]
        weight = reference.get_parameter(f"{case.family.layers}.{site['block']}.{path}.weight")
        kept = model.consumer_columns(site["space"], torch.tensor(site["kept"]))
        gone = torch.ones(weight.shape[1], dtype=torch.bool)
        gone[kept] = False
        with torch.no_grad():
            weight[:, gone] = 0
    expected = outputs(reference, data)
    loaded = ckpt_prune.load(tmp_path / "out")
    for implementation in ("sdpa", "eager"):
        loaded.set_attn_implementation(implementation)
        assert_same_outputs(outputs(loaded, data), expected, 1e-6)
    assert_same_outputs(outputs(copy.deepcopy(loaded), data), expected, 1e-6)
    for check in verify(tmp_path / "out", dense.folder(case)):
        assert check.passed or check.name == "sparsity", check


# ---- settings that the stock class heeds ---------------------------------------------------------------------------


KINDS = get_args(RotationKind)
SETTINGS: list[tuple[Case, dict[str, Any], tuple[str, ...]]] = [
    (
        Case("gpt2", "GPT2LMHeadModel"),
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        KINDS,
    ),
    (Case("gpt2", "GPT2LMHeadModel"), {"scale_attn_weights": False}, KINDS),
    (Case("gpt_neox", "GPTNeoXForCausalLM"), {"use_parallel_residual": False}, KINDS),
    (Case("mpt", "MptForCausalLM"), {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}, ()),
    (
        Case("falcon", "FalconForCausalLM", "new_decoder_architecture"),
        {"num_ln_in_parallel_attn": 1},
        ("values",),
    ),
]
"""Case, config keys, and how such a model can be rotated."""


@pytest.mark.parametrize(("case", "settings", "kinds"), SETTINGS, ids=lambda value: str(value)[:40])
def test_settings_that_the_stock_class_heeds(
    case: Case, settings: dict[str, Any], kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruned or rotated, the output computes what the dense model with the same setting does."""
    case = replace(case, settings=json.dumps(settings))
    dense, data = Dense(tmp_path), case.samples(3, seed=9)
    methods = dict.fromkeys(case.ratios, "affine")
    dense.prune(case, spaces_recipe(case, methods, **TARGETS["by site"]), tmp_path / "out", case.samples())
    expected = outputs(Whole(case).prune(case.samples(), methods, "by site").model, data)
    assert_same_outputs(outputs(ckpt_prune.load(tmp_path / "out"), data), expected, 5e-4)
    random_rotations(monkeypatch)
    for kind in KINDS:
        if kind in kinds:
            dense.prune(case, rotating(kind, container="any"), tmp_path / kind)
            rotated = outputs(ckpt_prune.load(tmp_path / kind), data)
            assert_same_outputs(rotated, outputs(case.model(), data), 2e-5)
        else:
            with pytest.raises(UserError, match=f"^{case.model_type} cannot be rotated"):
                dense.prune(case, rotating(kind, container="any"), tmp_path / kind)
