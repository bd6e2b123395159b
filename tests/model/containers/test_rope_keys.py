"""Rotary positions in the config.json of outputs: for transformers 5, and for earlier readers."""

import json

import pytest
from click.testing import CliRunner
from transformers import AutoConfig

from ckpt_prune.cli.main import main
from ckpt_prune.model.containers.rope_keys import state_rope
from tests.families import make

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI3 = {"hidden_size": 64, "num_attention_heads": 4, "original_max_position_embeddings": 64}
KNOWN = {
    # model_type, rope_parameters of transformers 5 → the keys that the config classes of transformers 4.57 read
    "llama": ({"rope_theta": 500.0, "rope_type": "default"}, {"rope_theta": 500.0}),
    "qwen2": ({"rope_theta": 500.0, **LLAMA3}, {"rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "stablelm": (
        {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "gpt_neox": (
        {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        {"rotary_emb_base": 500.0, "rotary_pct": 0.5},
    ),
    "gemma3_text": (
        {
            "full_attention": {"rope_theta": 500.0, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
        },
        {
            "rope_theta": 500.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "modernbert": (
        {
            "full_attention": {"rope_theta": 500.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
        },
        {"global_rope_theta": 500.0, "local_rope_theta": 50.0},
    ),
    "phi3": (
        {"rope_theta": 500.0, "rope_type": "longrope", "partial_rotary_factor": 1.0, **FACTORS},
        {"rope_theta": 500.0, "partial_rotary_factor": 1.0, "rope_scaling": {"type": "longrope", **FACTORS}},
    ),
}


@pytest.mark.parametrize("model_type", KNOWN)
def test_older_keys_stand_beside_those_of_transformers_5(model_type):
    parameters, older = KNOWN[model_type]
    shape = PHI3 if model_type == "phi3" else {}
    config = {"model_type": model_type, "rope_parameters": parameters, **shape}
    both = state_rope(config)
    assert {key: both[key] for key in older} == older
    assert not (both.keys() & {"rope_theta", "rope_scaling"}) - older.keys()
    for given in (both, {key: value for key, value in both.items() if key != "rope_parameters"}):
        read = AutoConfig.for_model(**given).rope_parameters
        expected = AutoConfig.for_model(**config).rope_parameters
        read.pop("type", None)
        assert read == expected
    assert state_rope(both) == both


def test_a_config_of_before_transformers_5_gains_its_words():
    config = {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": None}
    assert state_rope(config) == config | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}


def test_the_text_model_inside_another_is_read_likewise():
    inner = {
        "model_type": "qwen2_vl_text",
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    stated = state_rope({"model_type": "qwen2_vl", "text_config": inner})["text_config"]
    assert stated["rope_theta"] == 500.0
    assert stated["rope_scaling"] == {"rope_type": "default", "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "opt"}, {"model_type": "bert"}])
def test_nothing_is_said_of_positions_where_the_source_says_nothing(config):
    assert state_rope(config) == config


def test_keys_that_contradict_each_other_stay_as_they_are():
    config = {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 500.0, **LLAMA3},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    assert state_rope(config)["rope_scaling"] == config["rope_scaling"]


def test_an_output_states_both(tmp_path):
    dense, out = make(tmp_path / "dense", "llama"), tmp_path / "out"
    values = json.loads((dense / "config.json").read_text())
    values["rope_parameters"] = {"rope_theta": 1234.0, "rope_type": "default"}
    (dense / "config.json").write_text(json.dumps(values))
    done = CliRunner().invoke(main, ["prune", str(dense), "--recipe", "magnitude", "-o", str(out)])
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"] == values["rope_parameters"]
    assert config["rope_theta"] == 1234.0
