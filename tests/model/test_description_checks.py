"""Descriptions are checked against transformers' own classes: wrong ones are refused by the key that is wrong."""

import json
from typing import Any

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.model import description_checks
from ckpt_prune.model.description_checks import check_description
from ckpt_prune.model.descriptions import OUTSIDE_KEY, family_for_config, load_family, parse_family
from ckpt_prune.model.short_forms import shorten_description
from tests.contract.models import CASES
from tests.refusals import refusal

LLAMA = next(case for case in CASES if case.model_type == "llama")
CONFIG = json.loads(LLAMA.config.to_json_string(use_diff=False))
SPACES = {
    name: space.model_dump(exclude_defaults=True) | {"config": space.config}
    for name, space in load_family("llama").spaces.items()
}
WHOLE: dict[str, Any] = {
    "extends": "llama",
    "inherits": ["spaces", "rope", "bias_slots", "residual", "stand_ins"],
    "model_type": "llama",
}


def described_as(**keys: Any) -> dict[str, Any]:
    inherits = [key for key in WHOLE["inherits"] if key not in keys]
    return WHOLE | {"inherits": inherits} | keys


def with_mlp(changes: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return described_as(spaces=SPACES | {"mlp": SPACES["mlp"] | changes}, **keys)


ATTENTION = load_family("llama").attention.model_dump(exclude_defaults=True)
RESIDUAL = load_family("llama").residual.model_dump()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (
            described_as(architectures={"LlamaForNothing": {"auto": "AutoModelForCausalLM"}}),
            "architectures: this transformers has no class LlamaForNothing",
        ),
        (
            described_as(architectures={"LlamaForCausalLM": {"auto": "AutoLlama"}}),
            "architectures: transformers has no AutoLlama",
        ),
        (
            described_as(architectures={"LlamaForCausalLM": {"auto": "AutoModelForCausalLM", "head": "head"}}),
            "architectures.LlamaForCausalLM.head: it has no head.weight",
        ),
        (described_as(layers="model.blocks"), "layers: LlamaForCausalLM has no list model.blocks of 2 blocks"),
        (described_as(embedding="model.wte"), "embedding: LlamaForCausalLM has no module model.wte"),
        (
            described_as(dimensions=load_family("llama").dimensions | {"mlp": ["ffn_dim"]}),
            "dimensions.mlp: config.json has no number under ffn_dim",
        ),
        (
            described_as(block="model.block.{block}."),
            "block: LlamaForCausalLM has no tensor that begins with model.block.0.",
        ),
        (
            with_mlp({"rows": [{"module": "mlp.up_proj"}]}, residual=RESIDUAL),
            "residual: reads and writes together are not the modules of the spaces: mlp.gate_proj",
        ),
        (
            with_mlp({"rows": [{"module": "mlp.up_proj"}]}, residual=None),
            "spaces: no space names model.layers.0.mlp.gate_proj.weight, which LlamaForCausalLM has",
        ),
        (
            with_mlp({"columns": {"module": "mlp.down"}}, residual=None),
            "spaces: LlamaForCausalLM has no model.layers.0.mlp.down.weight (mlp.down); its blocks have "
            "mlp.down_proj, mlp.gate_proj, mlp.up_proj, self_attn.k_proj, self_attn.o_proj, self_attn.q_proj, "
            "self_attn.v_proj",
        ),
        (
            with_mlp({"config": {"num_mlp": []}}),
            "spaces.mlp.config: config.json has no number under num_mlp",
        ),
        (
            with_mlp({"config": {"intermediate_size": ["head_dim"]}}),
            "spaces.mlp.config: intermediate_size is 22 in config.json, and mlp times head_dim is 176",
        ),
        (described_as(bias_slots={}), "bias_slots: self_attn.q_proj of LlamaForCausalLM has a bias"),
        (
            described_as(bias_slots={"mlp.up_proj": "up_bias"}),
            "bias_slots: LlamaConfig has no key up_bias",
        ),
        (
            described_as(bias_slots=load_family("llama").bias_slots | {"mlp.up_proj": "attention_bias"}),
            "bias_slots: mlp.up_proj of LlamaForCausalLM has none with attention_bias true, mlp_bias false",
        ),
        (
            described_as(residual=RESIDUAL | {"final": "model.ln"}),
            "residual.final: LlamaForCausalLM has no module model.ln",
        ),
        (
            described_as(residual=RESIDUAL | {"reads": {"ln": ["mlp.up_proj"]}}),
            "residual.reads: blocks of LlamaForCausalLM have no module ln",
        ),
        (
            with_mlp({"rows": [{"module": "mlp.up_proj", "lines_per_unit": [2]}, {"module": "mlp.gate_proj"}]}),
            "spaces.mlp.rows: 22 units lie on 44 rows of mlp.up_proj (numbers up to 43), and LlamaForCausalLM has 22",
        ),
        (
            with_mlp({"columns": {"module": "mlp.down_proj", "lines_per_unit": ["heads"]}}),
            "spaces.mlp: 'heads' is none of the dimensions group, head_dim, hidden, kv_heads, layers, mlp, pairs, ",
        ),
        (with_mlp({"rows": []}), "llama.json: spaces.mlp.columns.rows: list should have at least 1 item"),
        (
            described_as(
                attention=ATTENTION | {"query": "self_attn.k_proj"},
                spaces=SPACES,
                residual=RESIDUAL,
                bias_slots=load_family("llama").bias_slots,
            ),
            "attention.query and key: self_attn.k_proj has 16 outputs in LlamaForCausalLM, and 6 heads of 8 have 48",
        ),
        (
            described_as(residual=RESIDUAL | {"writes": ["self_attn.q_proj", "mlp.down_proj"]}),
            "residual: reads and writes together are not the modules of the spaces: self_attn.o_proj",
        ),
        (described_as(stand_ins=["arcee"]), "stand_ins: arcee is not one of beit, bert, "),
    ],
)
def test_a_wrong_key_is_named(description: dict[str, Any], message: str) -> None:
    config = CONFIG | {"attention_bias": "q_proj of LlamaForCausalLM" in message, "mlp_bias": "up_proj of" in message}
    assert refusal(lambda: check_description(parse_family(json.dumps(description)), config)).startswith(message)


def test_a_dimension_may_have_names_that_the_config_lacks() -> None:
    dimensions = load_family("llama").dimensions | {"mlp": ["ffn_dim", "intermediate_size"]}
    family = parse_family(json.dumps(described_as(dimensions=dimensions, spaces=SPACES)))
    check_description(family, CONFIG)
    assert family.dimensions["mlp"] == ["ffn_dim", "intermediate_size"]


def test_what_writes_the_stream_are_the_consumers_though_others_are_as_wide() -> None:
    reads = RESIDUAL["reads"] | {"input_layernorm": [*RESIDUAL["reads"]["input_layernorm"], "self_attn.o_proj"]}
    description = described_as(residual=RESIDUAL | {"reads": reads, "writes": ["mlp.down_proj"]})
    with pytest.raises(UserError) as error:
        check_description(parse_family(json.dumps(description)), CONFIG | {"hidden_size": 32})
    assert str(error.value) == "residual.writes: not the consumers of the spaces: self_attn.o_proj"


def test_a_class_is_built_as_often_however_many_experts_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next has 512 in each of 48 blocks: once more for each of them took minutes."""
    config = json.loads(next(case for case in CASES if case.model_type == "mixtral").config.to_json_string(False))
    build, built = description_checks.build_skeleton, list[str]()
    monkeypatch.setattr(description_checks, "build_skeleton", lambda *of: built.append(of[1]) or build(*of))
    counts = []
    for experts, changes in ((2, True), (4, True), (4, False)):
        check_description(load_family("mixtral"), config | {"num_local_experts": experts}, changes=changes)
        counts.append(len(built) - sum(counts))
    assert counts[0] == counts[1] > counts[2] == 0


@pytest.mark.parametrize("modules", [["self_attn.k_proj", "self_attn.q_proj"], ["self_attn.q_proj"]])
def test_rows_of_rotary_pairs_are_of_queries_then_of_keys(modules: list[str]) -> None:
    rows = {row["module"]: row for row in SPACES["rotary"]["rows"]}
    description = described_as(
        spaces=SPACES | {"rotary": SPACES["rotary"] | {"rows": [rows[name] for name in modules]}}
    )
    assert refusal(check_description, parse_family(json.dumps(description)), CONFIG) == (
        f"spaces.rotary.rows: rows are of self_attn.q_proj, then of self_attn.k_proj, not of {', '.join(modules)}"
    )


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({}, "the description of a family has no model_type"),
        ({"model_type": 3}, "the description of a family has no model_type"),
        ({"model_type": "new", "extends": "../llama"}, "new.json extends '../llama', which is not one of beit, bert, "),
        ({"model_type": "new", "inherits": "rope"}, 'new.json has "inherits": "rope": write a list of keys'),
        ({"model_type": "new"}, "new.json: architectures: write an object with one class of transformers at least"),
        (
            {"model_type": "new", "extends": "llama", "inherits": ["spaces"]},
            "new.json extends llama and does not say whether rope, bias_slots, residual are the same: ",
        ),
        (described_as(model_type="new", block=None), "new.json: block: input should be a valid string"),
        (described_as(model_type="new", blocks="x"), "new.json: blocks: unknown key; did you mean 'block'?"),
    ],
)
def test_an_invalid_description_is_refused(description: dict[str, Any], message: str) -> None:
    assert refusal(parse_family, json.dumps(description)).startswith(message)


def test_a_config_that_carries_another_familys_description() -> None:
    with pytest.raises(UserError, match=r"^config\.json of type other carries a description of llama "):
        family_for_config({"model_type": "other", OUTSIDE_KEY: WHOLE})


def test_spaces_are_in_the_order_of_computation_however_a_config_was_sorted() -> None:
    sorted_keys = json.loads(json.dumps(described_as(spaces=SPACES), sort_keys=True))
    assert list(parse_family(json.dumps(sorted_keys)).spaces) == list(load_family("llama").spaces)


def test_spaces_follow_from_the_modules_of_attention_unless_they_are_stated():
    rows = [{"module": "mlp.fc1", "copies": 2}]
    description = described_as(
        attention=ATTENTION | {"output": "self_attn.dense"},
        spaces={"heads": {"norm": "behind"}, "values": {"fixed": None}, "mlp": {"rows": rows, "columns": "mlp.fc2"}},
        bias_slots={"attention": True, "self_attn.dense": False, "mlp": "mlp_bias"},
        residual={"norm": "rms", "reads": {"first": ["attention", "mlp"]}, "final": "model.norm"},
    )
    family, llama = parse_family(json.dumps(description)), load_family("llama")
    assert [(name, space.consumer, space.norm) for name, space in family.columns.items()] == [
        ("heads", "self_attn.dense", "behind"),
        ("values", "self_attn.dense", "behind"),
        ("mlp", "mlp.fc2", None),
    ]
    heads, values = family.spaces["heads"], family.spaces["values"]
    assert (heads.rows, heads.config) == (llama.spaces["heads"].rows, llama.spaces["heads"].config)
    assert (values.fixed, values.rounding) == (None, "floor")
    assert family.bias_slots == {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), True),
        **dict.fromkeys(("mlp.fc1", "mlp.fc2"), "mlp_bias"),
    }
    assert family.residual is not None
    assert family.residual.reads == {"first": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"]}
    assert (family.residual.writes, family.residual.starts) == (["self_attn.dense", "mlp.fc2"], ["model.embed_tokens"])


def test_what_a_description_need_not_state_is_left_out_of_it():
    dimensions = load_family("llama").dimensions
    shorter = shorten_description({"attention": ATTENTION, "dimensions": dimensions, "spaces": SPACES})["spaces"]
    assert {name: shorter[name] for name in ("queries", "heads", "values")} == {
        "queries": {},
        "heads": {},
        "values": {},
    }
    assert shorter["mlp"] == {"rows": ["mlp.gate_proj", "mlp.up_proj"], "columns": "mlp.down_proj"}
    assert parse_family(json.dumps(described_as(spaces=shorter))).spaces == load_family("llama").spaces


def test_a_description_of_an_earlier_version_is_read():
    """Outputs carry the keys of the version that wrote them, with the kind of every space beside its name."""
    names = ("part_of", "for_each", "lines_per_unit", "repeats", "repeated_units")
    old_names = ("within", "per", "each", "times", "run")
    text = json.dumps(described_as(spaces=SPACES, no_rotary="why")).replace('"kind":', '"ends":')
    for name, new in zip(old_names, names, strict=True):
        assert f'"{new}":' in text
        text = text.replace(f'"{new}":', f'"{name}":')
    family = parse_family(text.replace('"no_rotary":', '"unpaired":'))
    assert family.spaces == load_family("llama").spaces
    assert family.no_rotary == "why"


def test_a_key_under_both_of_its_names_is_refused():
    with pytest.raises(UserError, match="has unpaired and no_rotary, its name now: leave unpaired out"):
        parse_family(json.dumps(described_as(unpaired="why", no_rotary="why")))
