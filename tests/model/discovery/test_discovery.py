"""What is found of classes that nobody described, and that nothing else is."""

import inspect
import json
import warnings
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, conversion_mapping

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.descriptions import parse_family
from ckpt_prune.model.discovery import discover as room
from ckpt_prune.model.discovery.discover import Stack, discover
from ckpt_prune.model.discovery.layouts import find_incidences
from ckpt_prune.model.discovery.proofs import Prover
from ckpt_prune.model.discovery.trace import find_blocks, join_units, trace_block
from ckpt_prune.model.discovery.twin import FIRST, OTHER, build_twin, commonest_reason, small_configs
from ckpt_prune.model.skeleton import parse_config
from ckpt_prune.model.spaces import Incidence
from tests.refusals import refusal


def config(model_type: str, architecture: str) -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):
        values: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    return values | {"model_type": model_type, "architectures": [architecture]}


ARCEE = ("arcee", "ArceeForCausalLM")
FOUND = {
    ARCEE: {"queries", "heads", "mlp"},
    ("cohere2_moe", "Cohere2MoeForCausalLM"): {"queries", "heads", "mlp", "experts"},
    ("gpt_oss", "GptOssForCausalLM"): {"queries", "heads", "mlp", "experts"},
    ("llama4_text", "Llama4ForCausalLM"): {"queries", "heads", "mlp", "shared", "experts"},
    ("bart", "BartForCausalLM"): {"heads", "mlp"},  # own code has fewer heads
    ("gpt_bigcode", "GPTBigCodeForCausalLM"): {"heads", "mlp"},  # all read one head of keys and values
    ("deberta", "DebertaForMaskedLM"): {"mlp"},  # tensors that are no bias of a linear module have a part for each head
    ("xlnet", "XLNetLMHeadModel"): {"mlp"},  # its attention has no linear module
    ("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM"): {"heads", "mlp"},  # no config key states its width
    ("moshi", "MoshiForCausalLM"): {"queries", "heads", "mlp"},  # its key states twice the width
    ("jais2", "Jais2ForCausalLM"): {"queries", "heads", "mlp"},  # columns that are zero at most tokens
    ("diffllama", "DiffLlamaForCausalLM"): {"mlp"},  # it halves its groups
    ("gemma4_text", "Gemma4ForCausalLM"): {"mlp"},  # blocks with numbers of their own
    ("falcon_mamba", "FalconMambaForCausalLM"): {"mlp"},  # channels of a state space
    ("fnet", "FNetForMaskedLM"): {"mlp"},  # tokens mix without weights
    ("gemma3n_text", "Gemma3nForCausalLM"): {"mlp"},  # of blocks that do not compare columns, and share others' keys
    ("yoso", "YosoForMaskedLM"): {"mlp"},  # noise has no number in its attention
}
OF_FOUR = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    "intermediate_size": [64] * 4,
}


@pytest.mark.parametrize("named", FOUND, ids=lambda named: named[0])
def test_spaces_are_found_and_proven(named):
    found = discover(config(*named) | (OF_FOUR if named[0] == "gemma3n_text" else {})).description
    assert found["spaces"].keys() == FOUND[named]
    proofs = found["found"]["proofs"]
    assert proofs.keys() == FOUND[named]
    for space, proof in proofs.items():
        assert proof == {"together": True, "alone": True, "fewer": None if space == "experts" else True}
    family = parse_family(json.dumps(found))
    assert family.model_type == named[0]
    assert "queries" in FOUND[named] or {"heads"}.isdisjoint(FOUND[named]) or family.spaces["heads"].unit == "head"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_shared_experts_that_a_config_leaves_out_have_modules_without_columns():
    found = discover(config("afmoe", "AfmoeForCausalLM") | {"num_shared_experts": 0}).description
    assert found["spaces"].keys() == {"queries", "heads", "mlp", "dense", "experts"}


def test_interleaved_experts_with_biases_beside_heads_with_sinks():
    found = discover(config("gpt_oss", "GptOssForCausalLM")).description
    assert found["spaces"]["heads"]["tables"] == [{"module": "self_attn.sinks", "lines_per_unit": ["group"]}]
    assert found["spaces"]["queries"] == {"tables": ["self_attn.sinks"]}
    gate, down = "mlp.experts.gate_up_proj.{expert}", "mlp.experts.down_proj.{expert}"
    assert found["spaces"]["mlp"] == {"rows": [{"module": gate, "lines_per_unit": [2]}]}
    keys = ("gate", "up", "down", "stacked", "no_suffix", "transposed", "biased")
    assert [found["experts"][key] for key in keys] == [gate, gate, down, True, True, True, True]


def test_channels_of_a_state_space_lie_on_all_that_it_reads_and_keeps_of_each():
    mlp = discover(config("falcon_mamba", "FalconMambaForCausalLM")).description["spaces"]["mlp"]
    assert mlp["rows"] == [{"module": "mixer.in_proj", "copies": 2}]
    front, last = ("A_log", "conv1d.weight", "dt_proj.weight"), ("D", "conv1d.bias", "dt_proj.bias", "x_proj.weight")
    tables = {each["module"]: each.get("axis") == 0 for each in map(_incidence, mlp["tables"])}
    assert tables == {f"mixer.{name}": name in front for name in (*front, *last)}


def _incidence(short: str | dict[str, Any]) -> dict[str, Any]:
    return {"module": short} if isinstance(short, str) else short


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (
            ("blt", "BltForCausalLM"),
            "BltForCausalLM cannot be built small (5 configs tried; most fail with: it still has ",
        ),
        (
            ("xlm", "XLMWithLMHeadModel"),
            "XLMWithLMHeadModel has MLPs alone as blocks: its attention stands outside them",
        ),
        (
            ("mamba2", "Mamba2ForCausalLM"),
            "no space of Mamba2ForCausalLM is proven: queries and heads: no config key counts its heads; "
            "mixer.out_proj: one norm covers all columns of mixer.out_proj: with fewer of them it scales "
            "those that stay differently",
        ),
        (
            ("llama4_vision_model", "Llama4VisionModel"),
            "no space of Llama4VisionModel is proven: heads: the heads of llama4_vision_model are always as wide "
            "together as the hidden size, or its class counts them otherwise; mlp: its config key also states a width "
            "of vision_adapter.mlp.fc1, outside the blocks",
        ),
    ],
)
def test_a_class_without_proven_spaces_is_refused(named, reason):
    assert refusal(discover, config(*named)).startswith(reason)


def test_mlps_twice_as_wide_as_others_keep_twice_as_many_columns():
    """One key states both, as of the blocks of Gemma 4 E2B that share keys."""
    values = config("gemma4_text", "Gemma4ForCausalLM") | {"num_kv_shared_layers": 12, "use_double_wide_mlp": True}
    found = discover(values).description
    runs = {"units": "mlp", "for_each": "dense_runs", "wider_than": "mlp"}
    assert found["spaces"] == {"mlp": found["spaces"]["mlp"], "dense": found["spaces"]["mlp"] | runs}
    assert (found["derived"]["dense_runs"], found["together"]) == ([2], ["mlp"])
    assert {proof["fewer"] for proof in found["found"]["proofs"].values()} == {True}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_class_without_proven_spaces_is_described_where_nothing_is_pruned():
    with pytest.raises(UserError, match=r"no space of MobileBertForMaskedLM is proven: "):
        discover(config("mobilebert", "MobileBertForMaskedLM"))
    found = discover(config("mobilebert", "MobileBertForMaskedLM"), spaceless=True)
    assert found.description["spaces"] == {}
    assert found.line().startswith("no space of mobilebert is proven on a small random model of ")


def test_the_reason_is_the_commonest_whatever_its_numbers():
    reasons = ["it needs timm", "64 is no multiple of 12", "32 is no multiple of 12", "it needs timm!"]
    assert commonest_reason(reasons) == "64 is no multiple of 12"
    assert commonest_reason(reasons[:1] + reasons[3:]) == "it needs timm"


def test_blocks_of_a_twin_keep_the_numbers_that_lists_give_them():
    """Of a kind that only a list of numbers tells apart there is one, too."""
    usual = {"num_hidden_layers": 12, "attn_layer_indices": [5, 9], "layer_types": ["conv"] * 11 + ["moe"]}
    small, _ = next(small_configs(config("llama", "LlamaForCausalLM") | usual, FIRST))
    assert (small["num_hidden_layers"], small["attn_layer_indices"]) == (4, [2])
    assert small["layer_types"] == ["conv", "conv", "conv", "moe"]


# ---- proofs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "together", "alone"),
    [
        (
            {"rows": [{"module": "self_attn.q_proj", "lines_per_unit": ["group", "head_dim"]}]},
            False,
            False,
        ),  # keys stay behind
        ({"tables": [{"module": "self_attn.idle"}]}, True, False),
    ],
)
def test_a_planted_symmetry_is_not_proven(planted, together, alone):
    description = discover(config(*ARCEE)).description
    twin = build_twin(config(*ARCEE), ARCEE[1], OTHER)
    spaces = description["spaces"] | {"heads": description["spaces"]["heads"] | planted}
    prover = Prover(parse_family(json.dumps(description | {"spaces": spaces})), twin)
    proof = prover.prove("heads")
    assert (proof.together, proof.alone, proof.holds) == (together, alone, False)


def test_units_that_one_table_is_of_are_the_same_in_all_blocks():
    """T5's decoder has such a table for self-attention, and none for cross-attention."""
    architecture = "T5ForConditionalGeneration"
    values = config("t5", architecture) | {"decoder_start_token_id": 0}
    description = discover(values, Stack(architecture, "AutoModelForSeq2SeqLM", "decoder")).description
    twin = build_twin(values, architecture, OTHER)
    for name, together, alone in (("heads", False, False), ("cross_heads", True, False)):
        space = description["spaces"][name]
        spaces = description["spaces"] | {name: space | {"same_units": not space.get("same_units", False)}}
        proof = Prover(parse_family(json.dumps(description | {"spaces": spaces})), twin).prove(name)
        assert (proof.together, proof.alone) == (together, alone)


def test_fewer_units_that_compute_something_else_are_no_proof(monkeypatch):
    """A class may be told its width by a key that says something else besides: here, half of the dropped ones."""
    description = discover(config(*ARCEE)).description
    prover = Prover(parse_family(json.dumps(description)), build_twin(config(*ARCEE), ARCEE[1], OTHER))
    assert prover.prove("mlp").fewer
    values = prover._values
    monkeypatch.setattr(prover, "_values", lambda space, kept: values(space, kept) | {"hidden_act": "gelu"})
    assert prover.prove("mlp").fewer is False


# ---- derivatives and layouts -----------------------------------------------------------------------------------


def test_what_columns_depend_on_is_what_moving_rows_shows():
    """Against differences: each row of a producer is moved, and the consumer's input looked at."""
    twin = build_twin(config(*ARCEE), ARCEE[1], FIRST)
    layers, (run, *_) = find_blocks(twin)
    assert layers == "model.layers"
    attention, mlp = trace_block(run)
    assert (attention.consumer, attention.mixes, mlp.consumer, mlp.mixes) == (
        "self_attn.o_proj",
        True,
        "mlp.down_proj",
        False,
    )
    assert join_units(attention).bincount().tolist() == [48] * 5
    for trace in (attention, mlp):
        for producer in trace.producers:
            module: Any = run.block.get_submodule(producer)
            depends = torch.stack(
                [_columns_that_move(run, trace.consumer, module, row) for row in range(0, module.out_features, 17)], 1
            )
            assert torch.equal(trace.rows[producer][:, ::17], depends)


@torch.no_grad()
def _columns_that_move(run, consumer: str, producer, row: int) -> torch.Tensor:
    def inputs(shift: float) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def move(_module, _arguments, output):
            shifted = output.clone()
            shifted[..., row] += shift
            return shifted

        hooks = [
            producer.register_forward_hook(move),
            run.block.get_submodule(consumer).register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0])),
        ]
        run.block(run.states, *run.arguments, **run.options)
        for hook in hooks:
            hook.remove()
        return seen[0].double()

    return (inputs(1.0) - inputs(0.0)).flatten(0, -2).abs().amax(0) > 0


NAMED = {"head_dim": 24, "group": 5, "kv_heads": 7, "query_heads": 35}


@pytest.mark.parametrize(
    "incidence",
    [
        {"lines_per_unit": ["head_dim"]},
        {"lines_per_unit": ["group", "head_dim"]},
        {"copies": 2},
        {"lines_per_unit": [2]},
        {"lines_per_unit": [3, "head_dim"]},
        {"lines_per_unit": ["head_dim"], "copies": 2, "after": [["query_heads", "head_dim"]]},
        {
            "lines_per_unit": ["head_dim"],
            "after": [["group", "head_dim"]],
            "stride": [["group", "head_dim"], [2, "head_dim"]],
        },
    ],
)
def test_layouts_are_said_as_they_lie(incidence):
    """The incidence that is found has the same lines as the one that made the layout."""
    given = Incidence(module="m", **incidence)
    lines = [given.lines(torch.tensor([unit]), 2, NAMED.__getitem__) for unit in range(2)]
    owner = torch.full((int(max(each.max() for each in lines)) + 3,), -1)
    for unit, own in enumerate(lines):
        owner[own] = unit
    (found,) = find_incidences("m", owner, 2, NAMED) or ()
    named = Incidence(**found)
    for unit, own in enumerate(lines):
        assert torch.equal(named.lines(torch.tensor([unit]), 2, NAMED.__getitem__), own)


def test_a_unit_may_lie_in_lines_of_two_sizes():
    """Two of head_dim and three of group, one unit behind the other, said without the number of units."""
    found = find_incidences("m", torch.arange(7).repeat_interleave(2 * 24 + 3 * 5), 7, NAMED)
    assert [(each["lines_per_unit"], each.get("after")) for each in found or ()] == [
        ([2, "head_dim"], None),
        ([3, "group"], [[2, "head_dim"]]),
    ]
    lines = [Incidence(**each).lines(torch.tensor([3]), 7, NAMED.__getitem__) for each in found or ()]
    assert torch.cat(lines).tolist() == list(range(3 * 63, 4 * 63))


def test_an_order_that_cannot_be_said():
    assert find_incidences("m", torch.tensor([0, 1, 1, 0]), 2, NAMED) is None


# ---- the cache -------------------------------------------------------------------------------------------------


def test_what_was_found_is_kept_and_a_damaged_file_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = discover(config(*ARCEE))
    small = config(*ARCEE) | {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 40}
    small |= {"initializer_range": 0.5, "pad_token_id": 3, "num_nextn_predict_layers": 1}
    again = discover(small)
    assert (again.kept, again.description) == (True, found.description)
    for file in (tmp_path / "ckpt-prune" / "families").iterdir():
        file.write_text('{"description": {}, "seconds": 1}')
    anew = discover(small)
    assert (anew.kept, anew.description) == (False, found.description)
    with monkeypatch.context() as patch:  # weights of a part may be converted as those of its whole
        patch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", lambda _type: [])
        assert not discover(small).kept
    monkeypatch.setattr(room, "__version__", "0")
    assert not discover(small).kept


def test_twins_run_on_one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(room, "_draft", lambda *_arguments: seen.append(torch.get_num_threads()) or (_ for _ in ()))
    torch.set_num_threads(2)
    with pytest.raises(UserError):
        discover(config(*ARCEE))
    assert (seen, torch.get_num_threads()) == ([1], 2)
    torch.set_num_threads(before)


def test_linear_attention_takes_few_tokens_at_a_time_while_a_class_is_looked_at():
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    stated = config("kimi_linear", "KimiLinearForCausalLM")
    taken = inspect.unwrap(module.chunk_kimi_delta_attention).__defaults__
    with room._short_chunks("KimiLinearForCausalLM", parse_config(stated)):
        short = inspect.unwrap(module.chunk_kimi_delta_attention).__defaults__
    assert short == (8, *taken[1:]) != taken
    assert inspect.unwrap(module.chunk_kimi_delta_attention).__defaults__ == taken
