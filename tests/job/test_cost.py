import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ckpt_prune
from ckpt_prune.job.job import Job
from ckpt_prune.model.config_only import checkpoint_of_config
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import Names, build_skeleton, parse_config
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from tests.families import CONTEXT, VARIANTS, calibrate, job_on, make, model_of, one_group, prune, recipe, stock
from tests.pairs import one_of

LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def llama_7b_parameters(heads: int, columns: int) -> int:
    """Embedding, head and last norm; per block q, k, v, o, gate, up, down and two norms."""
    block = 4 * 4096 * heads * 128 + 3 * 4096 * columns + 2 * 4096
    return 2 * 32000 * 4096 + 4096 + 32 * block


@pytest.mark.parametrize(
    ("ratio", "billions", "heads", "columns"),
    [(0.0, "6.738", 32, 11008), (0.1, "6.104", 29, 9907), (0.2, "5.470", 26, 8806), (0.3, "4.836", 23, 7705)],
)
def test_llama_7b_from_its_config_alone(tmp_path, ratio, billions, heads, columns):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    model = Model.of(checkpoint_of_config(tmp_path))
    job = prepare_plan(Job(model, load_recipe("magnitude", ratio=ratio)))
    expected = llama_7b_parameters(heads, columns)
    assert f"{expected / 1e9:.3f}" == billions
    assert job.before.parameters == llama_7b_parameters(32, 11008)
    assert job.output.cost.parameters == expected
    assert job.output.cost.bytes == 2 * expected


@pytest.mark.parametrize(
    ("variant", "method"),
    # qwen3 has no slot for a bias on down_proj.
    one_of(5, [(v, m) for v in VARIANTS for m in ("none", "bias") if m == "none" or not v.startswith("qwen3")]),
)
def test_parameters_bytes_and_flops_are_those_of_the_real_model(tmp_path, variant, method):
    """Attention is eager, so that the counter sees its two products."""
    folder = make(tmp_path / "dense", variant, dtype=torch.bfloat16)
    if method == "bias":
        job = job_on(folder, recipe("bias", heads=one_group(variant)), calibrate(folder, tmp_path / "statistics"))
    else:
        job = job_on(folder, recipe("none", "magnitude", heads=one_group(variant)))
    prune(job, tmp_path / "out")
    for path, cost in ((folder, job.before), (tmp_path / "out", job.output.cost)):
        model = stock(path, attn_implementation="eager")
        assert cost.parameters == model.num_parameters()
        assert cost.bytes == 2 * model.num_parameters()
        assert cost.tokens == CONTEXT
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            model(input_ids=torch.zeros(1, CONTEXT, dtype=torch.int64), use_cache=False)
        assert cost.flops == counter.get_total_flops() - rotary_flops(counter)


@pytest.mark.parametrize("variant", one_of(4, [name for name, variant in VARIANTS.items() if variant.kv_heads == 2]))
@pytest.mark.parametrize("spaces", [("queries",), ("queries", "heads"), ("queries", "heads", "values")], ids="-".join)
def test_what_query_heads_and_values_save_is_counted(tmp_path, variant, spaces):
    """One of two in every group; beside groups what goes with both goes once. Keys stay cached as wide."""
    folder = make(tmp_path / "dense", variant)
    settings = {space: {"score": "principal" if space == "values" else "magnitude", "ratio": 0.5} for space in spaces}
    full_recipe = FullRecipe.model_validate({"version": 1, "name": "test", "container": "any", "spaces": settings})
    statistics = (calibrate(folder, tmp_path / "statistics"),) if "values" in spaces else ()
    job = job_on(folder, full_recipe, *statistics)
    prune(job, tmp_path / "out")
    cached = []
    for path, cost in ((folder, job.before), (tmp_path / "out", job.output.cost)):
        model = ckpt_prune.load(path)
        model.set_attn_implementation("eager")
        assert cost.parameters == model.num_parameters()
        assert cost.bytes == 4 * model.num_parameters()
        ids = torch.zeros(1, CONTEXT, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            kept = getattr(model(input_ids=ids, use_cache=True), cache_argument(model.forward))
        assert cost.flops == counter.get_total_flops() - rotary_flops(counter)
        cached.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers))
        assert cached[-1] == cost.cache * CONTEXT
    assert cached[1] == cached[0] / (2 if "heads" in spaces else 1) * (0.75 if "values" in spaces else 1)


def rotary_flops(counter: FlopCounterMode) -> int:
    """The angles, positions times frequencies, are a matrix product to the counter."""
    return sum(
        flops
        for path, by_op in counter.get_flop_counts().items()
        if path.endswith("rotary_emb")
        for flops in by_op.values()
    )


def shapes_of(config):
    skeleton = build_skeleton(parse_config(config), "LlamaForCausalLM")
    return {name: (torch.bfloat16, shape) for name, shape in Names(skeleton).shapes.items()}


def test_a_tied_head_on_disk_counts_once_in_parameters_and_twice_in_bytes():
    """Some published checkpoints store both."""
    config = LLAMA_7B | {"tie_word_embeddings": True, "num_hidden_layers": 1}
    shapes = shapes_of(config)
    assert "lm_head.weight" in shapes
    model = model_of(config)
    both = cost_of(model, shapes)
    one = cost_of(model, {n: s for n, s in shapes.items() if n != "lm_head.weight"})
    assert one == cost_of(model)
    assert both.parameters == one.parameters
    assert both.flops == one.flops
    assert both.bytes - one.bytes == 2 * 32000 * 4096
