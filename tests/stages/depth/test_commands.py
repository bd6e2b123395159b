"""Whole blocks that go, from the command line."""

import json
import re
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

import ckpt_prune
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.stages.spaces.messages import SECOND_ORDER
from tests.cli.running import (
    TEXT,
    drop_time_line,
    edit_weights,
    ok,
    read_json,
    read_refusal,
    run,
    without_quality,
)
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.families import stock
from tests.oracles.gap import ridge_map

RECIPE = """\
version: 1
name: mine
depth: {blocks: [1, 3, 4], compensation: {method: linear, lambda: 0.1}}
"""
LINEAR = ("prune", "deep", "--recipe", "mine.yaml", *TEXT)
GIVEN = ("prune", "deep", "--recipe", "shortgpt", "--set", "depth={blocks: [1, 3, 4]}")
WITHOUT_ATTENTION = ("--recipe", "shortgpt", "--set", "depth={part: attention, blocks: [0, 3]}")
"""The first block is one of them, of which models ask how many tokens the cache holds."""


@pytest.fixture
def here(place: Path) -> Path:
    """A llama of six blocks, and a recipe that drops three of them in two gaps."""
    Path("mine.yaml").write_text(RECIPE)
    torch.manual_seed(3)
    with quiet_transformers():
        tiny_llama(max_position_embeddings=32, num_hidden_layers=6).save_pretrained("deep")
    tiny_tokenizer("<s> $A").save_pretrained("deep")
    return place


def windows() -> Tensor:
    from ckpt_prune.measure.samples.choose import choose_samples
    from ckpt_prune.model.model import Model
    from ckpt_prune.options.commands import PruneOptions

    options = PruneOptions.model_validate(
        {"model": "deep", "output": "out", "text": ("calib.txt",), "samples": 8, "window": 16}
    )
    samples = choose_samples(Model.open("deep"), options, trust=False, say=print)
    return samples.batch(slice(len(samples)))["input_ids"]


def states(model: Any, ids: Tensor) -> list[Tensor]:
    """States that enter every block and leave the last one."""
    hidden_states: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: hidden_states.append(args[0])) for layer in model.model.layers
    ]
    hooks.append(model.model.layers[-1].register_forward_hook(lambda _, args, out: hidden_states.append(out)))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return hidden_states


def test_given_blocks_go_without_any_data(here) -> None:
    output = ok(*GIVEN, "-o", "out")
    assert without_quality(output)[-7:] == [
        "gone: block 1, blocks 3 to 4",
        "Blocks",
        "  blocks #.#..# 3 of 6 stay (. is gone)",
        "  gone",
        "  block 1",
        "  blocks 3 to 4",
        "written to out",
    ]
    assert read_json("out/config.json") == read_json("deep/config.json") | {
        "num_hidden_layers": 3,
        "rope_theta": 10000.0,
    }
    model = stock(Path("deep"))
    model.model.layers = torch.nn.ModuleList([model.model.layers[block] for block in (0, 2, 5)])
    ids = windows()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(stock(Path("out"))(input_ids=ids, use_cache=False).logits, expected)
    assert run("verify", "out", "--against", "deep").exit_code == 0


def test_a_dry_run_says_how_many_and_what_is_measured(here) -> None:
    output = drop_time_line(ok("prune", "deep", "--recipe", "depth", "--ratio", "0.5", "--dry-run", "-o", "out"))
    assert without_quality(output)[-4:] == [
        "3 of 6 blocks stay: which ones is measured first",
        "to be stored as llama",
        "to be measured: how far blocks move the residual stream; give --text FILE for it (128 windows of 32 tokens, "
        "unless you say --samples)",
        "everything that needs no measuring is checked, nothing written",
    ]


def test_a_block_is_compared_with_those_that_it_stands_for(here) -> None:
    ok(*GIVEN, "-o", "out")
    table = ok("compare", "deep", "out", *TEXT).splitlines()
    rows = [re.split(r" {2,}", line.strip())[:2] for line in table[:4]]
    assert rows == [["block", "of A"], ["0", "0 to 1"], ["1", "2 to 4"], ["2", "5"]]
    blocks = json.loads(ok("compare", "deep", "out", *TEXT, "--json"))["blocks"]
    assert [each["reference_blocks"] for each in blocks] == [[0, 1], [2, 3, 4], [5]]
    ids, dense = windows(), stock(Path("deep"))
    theirs, ours = states(dense, ids), states(stock(Path("out")), ids)
    for each, (first, end) in zip(blocks, [(0, 2), (2, 5), (5, 6)], strict=True):
        stretch, number = stock(Path("deep")), each["block"]
        stretch.model.layers = stretch.model.layers[first:end]
        stretch.model.layers[0].register_forward_pre_hook(lambda _, args, at=number: (ours[at], *args[1:]))
        carried = states(stretch, ids)[-1]
        expected = ((theirs[end] - carried).norm(), (carried - ours[number + 1]).norm())
        # Where both enter alike nothing is carried on.
        shares = [float(part / theirs[end].norm()) for part in expected]
        assert [each["input_error"], each["local_error"]] == pytest.approx(shares, rel=1e-4, abs=1e-6)
    assert blocks[0]["growth"] is None


def test_two_gaps_and_their_maps(here) -> None:
    """The second map is fitted behind the first, to the dense model's own stream."""
    lines = without_quality(ok(*LINEAR, "-o", "out"))
    report = read_json("out/ckpt_prune.json")
    assert lines[-5] == "  blocks +.+..# 3 of 6 stay (. is gone, + makes up for it)"
    first, second = report["depth"]["gaps"]
    assert " ".join(lines[-3].split()) == (
        "block 1 ridge (lambda 0.1) in model.layers.0.mlp.down_proj.weight "
        f"{first['error_uncompensated']:#.3g} {first['error_compensated']:#.3g}"
    )
    dense, edited, ids = stock(Path("deep")).double(), stock(Path("deep")).double(), windows()
    layers, ends = edited.model.layers, states(dense, ids)
    for gap, before, kept in ((first, 0, (0, 2, 3, 4, 5)), (second, 1, (0, 2, 5))):
        entered: list[Tensor] = []
        down = edited.model.layers[before].mlp.down_proj
        hook = down.register_forward_hook(lambda _, args, out, seen=entered: seen.append(out.flatten(0, 1)))
        edited_states = states(edited, ids)
        hook.remove()
        reached = ends[gap["first"] + gap["blocks"]]
        z = entered[0].numpy()
        y = z + (reached - edited_states[before + 1]).flatten(0, 1).numpy()
        T, _ = ridge_map(z, y, 0.1, biased=False)
        down.weight.data = torch.tensor(T) @ down.weight.data
        edited.model.layers = torch.nn.ModuleList([layers[block] for block in kept])
    with torch.no_grad():
        expected = edited(input_ids=ids, use_cache=False).logits
        logits = stock(Path("out")).double()(input_ids=ids, use_cache=False).logits
    assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))
    assert first["error_compensated"] < first["error_uncompensated"]


def test_verify_finds_what_is_not_the_dense_models(here) -> None:
    ok(*LINEAR, "-o", "out")
    result = run("verify", "out", "--against", "deep")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == (
        "kept units: 28 tensors of the 3 blocks that stay and of what is outside them are the dense ones, bit for bit; "
        "2 weights with a map absorbed not compared"
    )

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1

    edit_weights("out", change)
    result = run("verify", "out", "--against", "deep")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == ("kept units: model.layers.1.mlp.up_proj.weight is not the dense model's")


@pytest.mark.parametrize("wrong", [{"blocks": 7}, {"kept": []}, {"kept": [5, 0, 2]}, {"kept": [0, 2, 6]}], ids=str)
def test_a_wrong_record_is_no_ground_to_compare(here, wrong: dict[str, Any]) -> None:
    ok(*GIVEN, "-o", "out")
    report = read_json("out/ckpt_prune.json")
    report["depth"] |= wrong
    Path("out/ckpt_prune.json").write_text(json.dumps(report))
    result = run("verify", "out", "--against", "deep")
    assert result.exit_code == 1
    assert "kept units: ckpt_prune.json keeps blocks that the dense model has not\n" in result.stdout


def test_statistics_choose_the_blocks_and_text_fits_the_maps(here) -> None:
    ok("calibrate", "deep", *TEXT, "-o", "deep-stats")
    options = ("--recipe", "depth", "--set", "depth.compensation={method: linear}", "--ratio", "0.34")
    ok("prune", "deep", *options, *TEXT, "-o", "live")
    both = ("--statistics", "deep-stats", *TEXT)
    ok("prune", "deep", *options, *both, "-o", "both")
    assert Path("live/model.safetensors").read_bytes() == Path("both/model.safetensors").read_bytes()
    gaps = [read_json(f"{folder}/ckpt_prune.json")["depth"]["gaps"] for folder in ("live", "both")]
    assert gaps[0][0]["divergence"] == pytest.approx(gaps[1][0]["divergence"], rel=1e-5)
    message = read_refusal("prune", "deep", *options, "--statistics", "deep-stats", "-o", "out")
    assert message == "recipe depth fits maps on the model itself: give --text as well"
    message = read_refusal("prune", "deep", "--recipe", "sleb", "--statistics", "deep-stats", "-o", "out")
    assert message == "recipe sleb runs the model itself: give --text in place of --statistics"
    ok("prune", "deep", "--recipe", "shortgpt", "--statistics", "deep-stats", "-o", "out")


def test_a_plan_chooses_the_blocks(here) -> None:
    ok("calibrate", "deep", *TEXT, "-o", "deep-stats")
    options = ("--recipe", "depth", "--set", "depth.compensation={method: linear}", "--ratio", "0.34")
    sections = ok("plan", "deep", *options, "--statistics", "deep-stats", "-o", "plan.json").split("\n\n")
    assert sections.pop(-2).startswith("pruning by it takes about ")
    plan = read_json("plan.json")
    (gap,) = plan["depth"]["gaps"]
    blocks = f"blocks {gap['first']} to {gap['first'] + 1}"
    picture = "".join("." if gap["first"] <= block < gap["first"] + 2 else "#" for block in range(6))
    assert sections[1:-1] == [
        f"Blocks\n  blocks {picture} 4 of 6 stay (. is gone)\n"
        "  gone           cosine distance  predicted divergence\n"
        f"  {blocks}  {gap['distance']:#15.3g}  {gap['divergence']:#20.3g}",
        f"gone: {blocks}\npredicted: a divergence (KL) of {gap['divergence']:.4f} nats from the dense model's output, "
        f"about {exp(gap['divergence']):.2f} times its perplexity; {SECOND_ORDER}",
    ]
    ok("prune", "deep", "--plan", "plan.json", *TEXT, "-o", "out")
    ok("prune", "deep", *options, *TEXT, "-o", "direct")
    assert Path("out/model.safetensors").read_bytes() == Path("direct/model.safetensors").read_bytes()
    message = read_refusal("prune", "deep", "--plan", "plan.json", "-o", "bare")
    assert message == "recipe depth fits maps on the model itself: give --text as well"
    message = read_refusal("prune", "dense", "--plan", "plan.json", *TEXT, "-o", "bare")
    assert message.startswith("the plan was made for another model (")
    for change, why in (
        ({"kept": [0, 1, 2, 7]}, "the plan keeps blocks that are not among the model's 6 blocks"),
        ({"blocks": 7}, "the plan keeps blocks that are not among the model's 6 blocks"),
        ({"gaps": []}, "the plan's gaps are not the blocks that it drops"),
    ):
        Path("edited.json").write_text(json.dumps(plan | {"depth": plan["depth"] | change}))
        message = read_refusal("prune", "deep", "--plan", "edited.json", *TEXT, "-o", "bare")
        assert message == f"{why}: plan again instead of editing it"
    message = read_refusal("plan", "deep", "--recipe", "sleb", "--statistics", "deep-stats")
    assert message == "recipe sleb chooses blocks by the loss without them, on text: use `ckpt-prune prune --text`"


def test_statistics_that_do_not_say_what_blocks_do(here) -> None:
    ok("calibrate", "deep", *TEXT, "--collect", "moments,gram", "-o", "deep-stats")
    message = read_refusal("plan", "deep", "--recipe", "depth", "--statistics", "deep-stats")
    assert message == (
        "deep-stats does not say what blocks do, by which recipe depth chooses them: run `ckpt-prune calibrate --folds "
        "4` again"
    )


def silence(model: Any, block: int, part: str) -> Any:
    """The model without what the attention or the mlp of a block gives."""
    layer = model.model.layers[block]
    module = layer.self_attn.o_proj if part == "attention" else layer.mlp.down_proj
    module.weight.data.zero_()
    return model


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_parts_by_influence(here, part: str) -> None:
    ids, model, given = windows(), stock(Path("deep")), []
    for layer in model.model.layers:
        module = layer.self_attn.o_proj if part == "attention" else layer.mlp.down_proj
        module.register_forward_hook(lambda _, args, out: given.append(out))
    ends = states(model, ids)
    apart = []
    for block, part_output in enumerate(given):
        after = ends[block] + part_output if part == "attention" else ends[block + 1]
        apart.append(1 - float(functional.cosine_similarity(after - part_output, after, dim=-1).mean()))
    output = ok(
        "prune", "deep", "--recipe", "shortgpt", "--set", f"depth.part={part}", "--ratio", "0.34", *TEXT, "-o", "a"
    )
    depth = read_json("a/ckpt_prune.json")["depth"]
    least = sorted(sorted(range(6), key=lambda block: apart[block])[:2])
    assert [gap["first"] for gap in depth["gaps"]] == least
    assert [gap["distance"] for gap in depth["gaps"]] == pytest.approx([apart[block] for block in least], rel=1e-4)
    picture = "".join("." if block in least else "#" for block in range(6))
    lines = without_quality(output)
    assert lines[-8] == f"gone: {part} of block {least[0]}, block {least[1]}"
    assert lines[-6] == f"  {part} of blocks {picture} 4 of 6 stay (. is gone)"
    assert lines[-2].startswith(f"  The last projection of {part} is zeros in 2 of them: a stock class computes it all")
    assert (
        ok("verify", "a", "--against", "deep")
        .splitlines()[-1]
        .endswith("are the dense ones, bit for bit, and 2 are zeros")
    )


def test_parts_by_loss_and_by_divergence(here) -> None:
    ids, losses = windows(), []
    for block in range(6):
        model = silence(stock(Path("deep")), block, "attention")
        with torch.no_grad():
            losses.append(float(model(input_ids=ids, labels=ids, use_cache=False).loss))
    job = ("prune", "deep", "--set", "depth.part=attention", "--set", "depth.drop=1", *TEXT)
    ok(*job, "--recipe", "sleb", "-o", "a")
    least = min(range(6), key=lambda block: losses[block])
    assert [gap["first"] for gap in read_json("a/ckpt_prune.json")["depth"]["gaps"]] == [least]
    ok(*job, "--recipe", "depth", "--set", "depth.compensation={method: none}", "-o", "b")
    (gap,) = read_json("b/ckpt_prune.json")["depth"]["gaps"]
    assert gap["divergence"] > 0
    assert run("verify", "b", "--against", "deep").exit_code == 0
    ok("recover", "b", "--dense", "deep", *TEXT, "--epochs", "1", "-o", "c")


def test_blocks_without_attention_make_a_graph(here) -> None:
    ok("prune", "deep", *WITHOUT_ATTENTION, "--container", "remote", "-o", "bare")
    ok("export", "bare", "-o", "graph", *TEXT)


def test_blocks_without_attention(here) -> None:
    ok("prune", "deep", *WITHOUT_ATTENTION, "-o", "zeros")
    lines = without_quality(ok("prune", "deep", *WITHOUT_ATTENTION, "--container", "remote", "-o", "bare"))
    assert lines[-7:-3] == [
        "gone: attention of block 0, block 3",
        "Blocks",
        "  attention of blocks .##.## 4 of 6 stay (. is gone)",
        "  gone",
    ]
    sizes = [Path(folder, "model.safetensors").stat().st_size for folder in ("bare", "zeros", "deep")]
    assert sizes[0] < sizes[1] == sizes[2]
    assert read_json("bare/config.json")["ckpt_prune_absent"] == {
        "attention": "self_attn",
        "norm": "input_layernorm",
        "blocks": [0, 3],
    }
    bare, zeros, ids = ckpt_prune.load("bare"), stock(Path("zeros")), windows()[:2, :6]
    with torch.no_grad():
        assert torch.equal(bare(input_ids=ids).logits, zeros(input_ids=ids).logits)
    for cache in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **cache}
        assert torch.equal(bare.generate(ids, **options), zeros.generate(ids, **options))
    verified = ok("verify", "bare", "--against", "deep").splitlines()[-1]
    assert verified == "kept units: 47 tensors are the dense ones, bit for bit, and 2 blocks have no attention"
    message = read_refusal("prune", "bare", "--recipe", "ridge", *TEXT, "-o", "again")
    assert "masks alone go into it" in message


def test_vllms_own_class_is_named_where_the_first_block_has_attention(here, monkeypatch) -> None:
    """Its DeciLM reads `block_configs`, and begins the residual stream with the first block's attention."""
    depth = ("--recipe", "shortgpt", "--set", "depth.part=attention", "--container", "remote")
    ok("prune", "deep", *depth, *TEXT, "--set", "depth.drop=5", "--for", "vllm", "-o", "out")
    config = read_json("out/config.json")
    assert config["ckpt_prune_absent"]["blocks"] == [1, 2, 3, 4, 5]
    assert config["architectures"] == ["PrunedLlamaForCausalLM", "DeciLMForCausalLM"]
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(here / "modules"))
    read = AutoConfig.from_pretrained("out", trust_remote_code=True)
    blocks = read.block_configs
    assert [block.attention.no_op for block in blocks] == [False] + [True] * 5
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    assert [block.attention.n_heads_in_group for block in blocks] == [group] * 6
    assert [block.ffn.intermediate_size for block in blocks] == [config["intermediate_size"]] * 6
    assert not any(block.ffn.no_op or hasattr(block.ffn, "ffn_mult") for block in blocks)
    assert json.loads(read.to_json_string())["architectures"] == config["architectures"]
    model = AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)
    with torch.no_grad():
        ids = windows()[:1, :6]
        assert torch.equal(model(input_ids=ids).logits, ckpt_prune.load("out")(input_ids=ids).logits)
    assert run("verify", "out", "--against", "deep").exit_code == 0


def test_attentions_go_until_a_size_is_met(here) -> None:
    depth = ("--recipe", "shortgpt", "--set", "depth.part=attention", "--container", "remote", *TEXT)
    ok("prune", "deep", *depth, "--target-params", "80%", "-o", "out")
    report = read_json("out/ckpt_prune.json")
    dense, left = report["before"]["parameters"], report["after"]["parameters"]
    each = (dense - left) // len(report["depth"]["gaps"])
    assert left <= 0.8 * dense < left + each
