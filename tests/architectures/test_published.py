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

import ckpt_prune
from ckpt_prune.architectures.blocks import module_paths
from ckpt_prune.errors import UserError
from ckpt_prune.evaluation.verify import verify
from ckpt_prune.planning.accounting import cost_of
from ckpt_prune.planning.mask_recipe import RotationKind
from ckpt_prune.planning.recipe import Recipe
from tests.contract.dense import Dense, spaces_recipe
from tests.contract.models import BLOCKS, Case
from tests.contract.whole import TARGETS, Whole, assert_same_outputs, outputs, plain
from tests.families import model_of
from tests.transform.test_rotations import random_rotations, rotating

NEOX = {"vocab_size": 50304, "num_attention_heads": 8}
PHI = {"vocab_size": 51200, "num_attention_heads": 32}
PARAMETERS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (124_439_808, {"model_type": "gpt2"}),
    "gpt2-medium": (354_823_168, {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24}),
    "gpt2-xl": (1_557_611_200, {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48}),
    "Phi-3-mini-4k-instruct": (3_821_079_552, {"model_type": "phi3", "pad_token_id": None}),
    "Phi-3-medium-4k-instruct": (
        13_960_238_080,
        {
            "model_type": "phi3",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "pad_token_id": None,
        },
    ),
    "pythia-70m": (
        70_426_624,
        {"model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, **NEOX},
    ),
    "pythia-1.4b": (
        1_414_647_808,
        {
            "model_type": "gpt_neox",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            **NEOX,
            "num_attention_heads": 16,
        },
    ),
    "gpt-neox-20b": (20_554_567_680, {"model_type": "gpt_neox", "vocab_size": 50432}),
    "phi-1_5": (1_418_270_720, {"model_type": "phi", **PHI}),
    "phi-2": (
        2_779_683_840,
        {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32, **PHI},
    ),
    "gpt-j-6b": (6_050_882_784, {"model_type": "gptj", "tie_word_embeddings": False}),
    "bloom-560m": (559_214_592, {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "n_head": 16}),
    "bloom-7b1": (7_069_016_064, {"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "n_head": 32}),
    "falcon-7b": (6_921_720_704, {"model_type": "falcon", "multi_query": True, "parallel_attn": True}),
    "falcon-40b": (
        41_303_293_952,
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
    ),
    "falcon-rw-1b": (
        1_311_625_216,
        {
            "model_type": "falcon",
            "vocab_size": 50304,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
        },
    ),
    "mpt-7b": (
        6_649_286_656,
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432},
    ),
}
"""Model on the Hub → parameters as its card or the size of its files has them, and what its config.json says of it."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_config_has_as_many_parameters_as_its_model(name: str) -> None:
    count, config = PARAMETERS[name]
    assert cost_of(model_of(config)).parameters == count


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
    found = dict(tensors)
    for block in range(BLOCKS):
        prefix = f"gpt_neox.layers.{block}.attention"
        found |= {f"{prefix}.bias": torch.ones(1, 1, 32, 32).tril(), f"{prefix}.masked_bias": torch.tensor(-1e9)}
        found[f"{prefix}.rotary_emb.inv_freq"] = torch.ones(2)
    return found


def as_bloom(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


PUBLISHED = {
    Case("gpt2", "GPT2LMHeadModel"): as_gpt2,
    Case("gptj", "GPTJForCausalLM"): as_gptj,
    Case("gpt_neox", "GPTNeoXForCausalLM"): as_pythia,
    Case("bloom", "BloomForCausalLM"): as_bloom,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_names_as_published(case: Case, tied: bool, tmp_path: Path) -> None:
    """Pruned it is what a checkpoint with transformers' own names is; what models compute themselves travels along."""
    dense = Dense(tmp_path)
    folder = dense.folder(case)
    tensors = load_file(folder / "model.safetensors")
    if tied:
        config = dense.model(case).checkpoint.config | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
        del tensors[f"{case.family.head}.weight"]
    save_file(PUBLISHED[case](tensors), folder / "model.safetensors", metadata={"format": "pt"})
    dense = Dense(tmp_path)
    assert dense.model(case).family.architecture == case.architecture
    recipe = spaces_recipe(case, dict.fromkeys(case.ratios, "ridge"), "remote")
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "bloom", "apply_residual_connection_post_layernorm": True},
            "bloom with apply_residual_connection_post_layernorm true in config.json is not supported: its residual "
            "stream goes on from the output of its norms",
        ),
        (
            {"model_type": "bloom", "slow_but_exact": True},
            "bloom with slow_but_exact true in config.json is not supported: it multiplies by slices of its weights, "
            "apart from its linear modules",
        ),
        (
            {"model_type": "gpt2", "add_cross_attention": True},
            "gpt2 with add_cross_attention true in config.json is not supported: its blocks also read another model's "
            "hidden states",
        ),
        (
            {"model_type": "phi", "qk_layernorm": True},
            "phi with qk_layernorm true in config.json is not supported: its class makes the norms of queries and keys "
            "as wide as the hidden size by the number of heads",
        ),
        (
            {"model_type": "falcon"},
            "falcon with multi_query true in config.json is not supported: config.json has to say it, as published "
            "ones do",
        ),
        (
            {"model_type": "falcon", "new_decoder_architecture": True, "alibi": True},
            "falcon with alibi true in config.json is not supported: no published falcon has the two together, and "
            "this layout is not described",
        ),
    ],
)
def test_settings_that_change_the_function_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        model_of(config)
    assert str(caught.value) == message


# ---- blocks of different widths ------------------------------------------------------------------------------------


RATIO = {"gpt_neox": 0.4}
"""At which one block keeps more heads than the other; a quarter by default."""
UNEVEN = [
    Case("gpt2", "GPT2LMHeadModel"),
    Case("phi3", "Phi3ForCausalLM"),
    Case("gpt_neox", "GPTNeoXForCausalLM"),
    Case("falcon", "FalconForCausalLM", "new_decoder_architecture"),
]


@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_blocks_of_different_widths(case: Case, tmp_path: Path) -> None:
    """Every block of the output computes with its own numbers, with every implementation of attention."""
    dense, data = Dense(tmp_path), case.samples(3, seed=9)
    spaces = {space: {"score": "flap", "compensation": {"method": "none"}} for space in case.ratios}
    top = {
        "allocation": "across-layers",
        "widths": "per_layer",
        "container": "any",
        "ratio": RATIO.get(case.model_type, 0.25),
    }
    recipe = Recipe.model_validate({"version": 1, "name": "test", "spaces": spaces, **top})
    report = dense.prune(case, recipe, tmp_path / "out")
    widths = {(site["block"], site["space"]): len(site["kept"]) for site in report["sites"]}
    assert widths[0, "heads"] != widths[1, "heads"], widths
    model, whole = dense.model(case), plain(case.model())
    for site in report["sites"]:
        consumer = case.family.columns[site["space"]].consumer
        (path,) = module_paths(case.family)[consumer]
        weight = whole.get_parameter(f"{case.family.layers}.{site['block']}.{path}.weight")
        kept = model.consumer_columns(site["space"], torch.tensor(site["kept"]))
        gone = torch.ones(weight.shape[1], dtype=torch.bool)
        gone[kept] = False
        with torch.no_grad():
            weight[:, gone] = 0
    expected = outputs(whole, data)
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
