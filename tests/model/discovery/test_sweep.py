"""Types that nobody described, through the commands: found, pruned by `ridge` and verified as tiny random models."""

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.model.depth import shorten_config
from ckpt_prune.model.descriptions import load_family, parse_family
from ckpt_prune.model.discovery.discover import discover
from ckpt_prune.verification import forward_pass
from tests.evaluation.tiny import tiny_tokenizer
from tests.model.discovery.test_discovery import config
from tests.pairs import choose_cases
from tools.families import (
    DISCOVERED,
    all_towers,
    all_types,
    prune_and_verify,
    run_command,
    try_kind,
    try_type,
    write_tiny,
)

CHECK = forward_pass._check
"""The comparison with the whole model, which other tests leave out."""
CLASSES = {**MODEL_FOR_MASKED_LM_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
TRIED = {
    # Dense models, grouped queries, blocks that take their number or the kind of attention in ways of their own.
    *("biogpt", "gpt_neo", "jais2", "moshi", "nanochat", "openai-gpt", "vaultgemma"),
    # Experts, also in stacks, latent attention, and a block that reads what the one before it chose.
    *("cohere2_moe", "ernie4_5_moe", "hunyuan_v1_moe", "llama4", "minicpm3", "zaya"),
    # Blocks of several kinds, state spaces, and two stacks.
    *("git", "jamba", "mamba", "olmo_hybrid", "qwen3_5_text", "bart"),
    # Parts of composites, and classes of images.
    *("fuyu", "modernvbert", "data2vec-vision", "ijepa"),
}
"""Types that are always tried; `--thorough` tries all.

Other tests find and prune gemma4, gpt_oss and lfm2: `FOUND`, cli/test_hybrids.py and cli/test_kept_bytes.py.
"""
TOWERS = ("glm4v", "inkling2", "lfm2_vl", "molmo2", "unlimited_ocr")
"""Types of models of images with text whose towers are always tried."""


@pytest.fixture(autouse=True)
def check(monkeypatch) -> None:
    monkeypatch.setattr(forward_pass, "_check", CHECK)


@pytest.mark.parametrize(
    ("kind", "model_type"),
    choose_cases([*all_types(), *all_towers()], lambda each: each[1] in (TOWERS if each in all_towers() else TRIED)),
)
def test_every_type_is_as_the_page_says(kind, model_type):
    kept, found = json.loads(DISCOVERED.read_text())["types"][kind][model_type], try_kind(kind, model_type)
    for key in ("built", "spaces", "pruned"):
        assert found[key] == kept[key], found["why"]


def test_a_width_that_a_class_derives_is_stated_by_outputs(tmp_path: Path):
    """LFM2's published configs have it under a name of their own, and its class rounds two thirds of it up."""
    source = write_tiny("lfm2", CLASSES["lfm2"], tmp_path / "source")
    values = json.loads((source / "config.json").read_text())
    values |= {"block_ff_dim": values.pop("intermediate_size"), "block_multiple_of": 16}
    values |= {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
    parsed = AutoConfig.for_model(**values)
    assert (parsed.block_auto_adjust_ff_dim, parsed.intermediate_size) == (True, 48)
    AutoModelForCausalLM.from_config(parsed).save_pretrained(source)
    (source / "config.json").write_text(json.dumps(values))
    description = discover(values).description
    assert description["width_switches"] == {"block_auto_adjust_ff_dim": False}
    assert description["found"]["proofs"]["mlp"] == {"together": True, "alone": True, "fewer": True}
    prune_and_verify(source, description)
    output = json.loads((tmp_path / "output" / "config.json").read_text())
    assert (output["block_auto_adjust_ff_dim"], output["intermediate_size"]) == (False, 16)  # half of 2 / 3 of 48
    assert {"block_ff_dim", "auto_map"}.isdisjoint(output)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "output", output_loading_info=True)
    assert not any(loading.values())
    assert model.model.layers[0].feed_forward.w2.in_features == 16


def test_blocks_that_compare_their_columns_stay_whole_beside_others(tmp_path: Path):
    """Gemma 3n: blocks carry several streams, the last ones read keys of others, and config.json lists their widths."""
    source, out = write_tiny("gemma3n_text", CLASSES["gemma3n_text"], tmp_path / "source"), tmp_path / "output"
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog and runs away " * 100)
    data = ("--text", str(tmp_path / "text.txt"), "--window", "16", "--samples", "8", "--evaluate-samples", "2")
    run_command("prune", str(source), "--ratio", "0.5", *data, "-o", str(out))
    run_command("verify", str(out), "--against", str(source))
    output = json.loads((out / "config.json").read_text())
    assert output["intermediate_size"] == [
        24 if number == 0 else 48 for number in output["activation_sparsity_pattern"]
    ]
    report = json.loads((out / "ckpt_prune.json").read_text())
    assert {site["block"] for site in report["sites"]} == {2, 3, 4, 5}
    shorter = shorten_config(open_model(str(out)), [0, 2, 5])
    assert (shorter["intermediate_size"], shorter["activation_sparsity_pattern"]) == ([48, 24, 24], [0.95, 0.0, 0.0])


@pytest.mark.parametrize("ratio", [0.5, 0.0])
def test_a_composite_states_a_width_that_the_class_of_its_part_derives(ratio, tmp_path: Path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"block_ff_dim": 96, "block_multiple_of": 16, "num_key_value_heads": 2, "vocab_size": 101}
    seen = sizes | {"intermediate_size": 48, "num_patches": 16, "patch_size": 4}
    whole = AutoConfig.for_model("lfm2_vl", text_config=text, vision_config=seen, image_token_id=5)
    AutoModelForImageTextToText.from_config(whole).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    values = json.loads((tmp_path / "source" / "config.json").read_text())
    values["text_config"]["block_ff_dim"] = values["text_config"].pop("intermediate_size")
    (tmp_path / "source" / "config.json").write_text(json.dumps(values))
    found = {"spaces": {"heads": {}, "mlp": {}}}
    prune_and_verify(tmp_path / "source", found, "--set", f"spaces.mlp.ratio={ratio}", part="text")
    output = json.loads((tmp_path / "output" / "config.json").read_text())["text_config"]
    assert (output["block_auto_adjust_ff_dim"], output["intermediate_size"]) == (False, 64 * (1 - ratio))
    assert "block_ff_dim" not in output
    _, loading = AutoModelForImageTextToText.from_pretrained(tmp_path / "output", output_loading_info=True)
    assert not any(loading.values())


def test_blocks_that_only_their_model_can_run_are_refused():
    """Big Bird's model switches the attention of its blocks as it runs."""
    found = try_type("big_bird", CLASSES["big_bird"])
    assert not found["pruned"]
    assert "its blocks cannot be run one by one (Query sided sequence length must be" in found["why"]


@pytest.mark.parametrize(
    ("model_type", "spaces", "whole"),
    [
        ("qwen3_next", {"queries", "heads", "linear_heads", "mlp", "shared", "experts"}, set()),
        ("nemotron_h", {"queries", "heads", "mlp", "dense", "shared", "experts"}, {"mixer.out_proj"}),
        ("kimi_linear", {"heads", "linear_heads", "mlp", "dense", "shared", "experts"}, set()),
        ("bailing_hybrid", {"heads", "linear_heads", "mlp", "dense", "shared", "experts"}, set()),
    ],
)
def test_blocks_of_several_kinds(model_type, spaces, whole, tmp_path: Path):
    source = write_tiny(model_type, CLASSES[model_type], tmp_path / "source")
    description = discover(json.loads((source / "config.json").read_text())).description
    assert {*description["spaces"]} == spaces
    assert {*description["found"]["whole"]} == whole
    prune_and_verify(source, description)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "phi3", "qwen3_moe", "bert", "vit", "dinov2"])
def test_what_is_described_by_hand_is_found(model_type):
    """Incidences of the same lines, and the same config keys or other names of them."""
    known, names = load_family(model_type), CONFIG_MAPPING[model_type].attribute_map
    found = parse_family(json.dumps(discover(config(model_type, known.architecture)).description))
    assert {"mlp"} <= found.spaces.keys() & known.spaces.keys()
    for name in found.spaces.keys() & known.spaces.keys():
        space, given = (own.spaces[name].model_dump(exclude_defaults=True) for own in (found, known))
        for key in ("units", "experts", "for_each", "part_of", "tables", "norm"):
            assert space.get(key) == given.get(key), (name, key)
        if "fixed" in space:  # by keys of own code
            continue
        configs = [{names.get(key, key): value for key, value in each["config"].items()} for each in (space, given)]
        assert configs[0] == configs[1], name
        assert _sorted(space.get("columns")) == _sorted(given.get("columns")), name
        assert _sorted(_runs(space)) == _sorted(_runs(given)), name
        assert space.get("norm") is None or found.norm_offset == known.norm_offset


def _runs(space):
    """Rows of a space with each of several copies, which lie one after the other, by itself."""
    runs = []
    for row in space["rows"]:
        each, after = row.get("lines_per_unit", []), row.get("after", [])
        others = {key: value for key, value in row.items() if key not in ("copies", "after")}
        before = [[[*each, space["units"]]] * copy for copy in range(row.get("copies", 1))]
        runs += [others | {"after": [*after, *copies]} for copies in before]
    return runs


def _sorted(value):
    if isinstance(value, dict):
        return {key: _sorted(own) for key, own in value.items()}
    if isinstance(value, list):
        return sorted((_sorted(own) for own in value), key=str)
    return value
