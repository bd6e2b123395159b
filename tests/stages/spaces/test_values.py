"""Directions of values, alone and beside heads, queries and columns, from the command line."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import ckpt_prune
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.modeling_pruned import cache_argument
from tests.cli.running import TEXT, interrupt_job, ok, read_json, read_refusal, resume_job
from tests.evaluation.tiny import tiny_tokenizer

RECIPE = """\
version: 1
name: mine
container: any
spaces:
  values: {score: principal, ratio: 0.5, compensation: {method: ridge}}
"""
BESIDE = """\
version: 1
name: beside
target: drift
container: any
spaces:
  queries: {score: obs, ratio: 0.5, compensation: {method: ridge}}
  heads: {score: obs, ratio: 0.5, compensation: {method: ridge}}
  values: {score: principal, ratio: 0.25, compensation: {method: auto}}
  mlp: {score: obs, ratio: 0.25, compensation: {method: ridge}}
"""
BUDGET = """\
version: 1
name: budget
allocation: least-error
widths: per_layer
container: any
spaces:
  queries: {score: auto, compensation: {method: ridge}}
  heads: {score: auto, compensation: {method: ridge}}
  values: {score: principal, compensation: {method: ridge}}
  mlp: {score: auto, compensation: {method: ridge}}
"""


@pytest.fixture
def here(place: Path) -> Path:
    """Four query heads of four dimensions in two groups; recipes for values alone, beside all else, and by error."""
    for name, text in (("mine", RECIPE), ("beside", BESIDE), ("budget", BUDGET)):
        Path(f"{name}.yaml").write_text(text)
    return place


def shapes(folder: str, block: int = 0) -> dict[str, tuple[int, ...]]:
    """Weights of a block's attention."""
    weights = ckpt_prune.load(folder).get_submodule(f"model.layers.{block}.self_attn").named_parameters()
    return {name[0]: tuple(weight.shape) for name, weight in weights}


def kept_units(folder: str, space: str) -> list[list[int]]:
    return [site["kept"] for site in read_json(f"{folder}/ckpt_prune.json")["sites"] if site["space"] == space]


def test_half_of_the_values(here):
    lines = ok("prune", "dense", "--recipe", "mine.yaml", "--statistics", "stats", "-o", "out").splitlines()
    assert "kept per block: values 2/4 (ratio 0.5)" in lines
    assert lines[0] == (
        "stored as llama with remote code (no stock class has values narrower than queries and keys): load with "
        "ckpt_prune.load or trust_remote_code"
    )
    assert shapes("out") == {"q": (16, 16), "k": (8, 16), "v": (4, 16), "o": (16, 8)}
    assert kept_units("out", "values") == [[0, 1, 4, 5], [0, 1, 4, 5]]
    config = read_json("out/config.json")
    assert (config["v_head_dim"], config["num_attention_heads"], config["num_key_value_heads"]) == (2, 4, 2)
    output = ok("verify", "out", "--against", "dense")
    assert "v of 2 blocks are rewritten and not compared" in output
    again = AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(again(ids).logits, ckpt_prune.load("out")(ids).logits)


def test_the_cache_shrinks(here):
    """Generation caches narrow values, and gives token by token what one pass gives."""
    ok("prune", "dense", "--recipe", "mine.yaml", "--statistics", "stats", "-o", "out")
    model, ids = ckpt_prune.load("out"), torch.arange(3, 13)[None]
    cache = DynamicCache()
    given = {cache_argument(model.forward): cache}
    steps = [model(ids[:, at : at + 1], **given).logits for at in range(10)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits, rtol=1e-4, atol=1e-5)
    assert [tuple(tensor.shape) for tensor in (cache.layers[0].keys, cache.layers[0].values)] == [
        (1, 2, 10, 4),
        (1, 2, 10, 2),
    ]
    cache_bytes = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    report = read_json("out/ckpt_prune.json")
    assert (report["before"]["cache"], report["after"]["cache"]) == (2 * 2 * 2 * 4 * 4, cache_bytes / 10)
    assert "KV cache    96 B a token" in ok("inspect", "out")
    assert "KV cache    128 B a token" in ok("inspect", "dense")
    assert "| KV cache / token | 128 B | 96 B | 75.0% |" in Path("out/README.md").read_text()
    lines = ok("inspect", "dense", "--recipe", "mine.yaml", "--ratio", "0.25,0.5").splitlines()
    assert [re.search(r"(\d+) B +llama", line)[1] for line in lines[-2:]] == ["112", "96"]


def test_beside_heads_queries_and_columns(here):
    """Drift-correcting, each space measured on what those before have left; interrupted runs go on alike."""
    job = ["prune", "dense", "--recipe", "beside.yaml", *TEXT, "--folds", "2"]
    ok(*job, "-o", "whole")
    assert shapes("whole") == {"q": (4, 16), "k": (4, 16), "v": (3, 16), "o": (16, 3)}
    # Units are those of the dense model, as many in the group that has gone.
    assert kept_units("whole", "values") == [[0, 1, 2, 4, 5, 6]] * 2
    ok("verify", "whole", "--against", "dense")
    card = Path("whole/README.md").read_text()
    rows = ("queries (query heads inside KV groups) | 2 of 4", "heads (heads, or KV groups) | 1 of 2")
    rows += ("values (directions of values) | 6 of 8", "mlp (columns of the MLP) | 18 of 24")
    assert all(f"| {row} |" in card for row in rows)
    interrupt_job(job, 3)
    resume_job(job)
    # From statistics of the dense model, too.
    cached = ("--set", "spaces.values.compensation.method=ridge", "--statistics", "stats")
    ok("plan", "dense", "--recipe", "beside.yaml", *cached, "-o", "plan.json")
    ok("prune", "dense", "--plan", "plan.json", "-o", "planned")
    assert shapes("planned") == shapes("whole")


def test_a_projection_of_queries_keys_and_values_is_refused(here):
    with quiet_transformers():
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=300, n_positions=32)
        GPT2LMHeadModel(config).save_pretrained("fused")
    tiny_tokenizer("<s> $A").save_pretrained("fused")
    assert read_refusal("prune", "fused", "--recipe", "mine.yaml", *TEXT, "-o", "out") == (
        "recipe mine prunes values, and values of gpt2 stay as wide as they are: one projection makes queries, keys "
        "and values. Leave out spaces.values"
    )
