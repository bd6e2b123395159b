"""Hybrids, whose blocks are of several kinds, by the description that is found, from a file: `--family`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.streams.drift import ResidualBlock
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.model.containers.choosing import choose_container
from ckpt_prune.model.containers.opening import open_model
from tests.cli.running import TEXT, ok, read_json
from tests.evaluation.tiny import tiny_tokenizer
from tests.pairs import every
from tests.undescribed import make_model

BLOCKS: dict[str, dict[str, set[int]]] = {
    "lfm2": {"heads": {1, 3}, "mlp": {0, 1, 2, 3}},
    "nemotron_h": {"heads": {2}, "mlp": {1, 3}},
    "falcon_h1": {"heads": {0, 1, 2, 3}, "linear_heads": {0, 1, 2, 3}, "mlp": {0, 1, 2, 3}},
    "qwen3_next": {"heads": {1, 3}, "linear_heads": {0, 2}, "mlp": {0, 1, 2, 3}, "shared": {0, 1, 2, 3}},
    "kimi_linear": {"heads": {1, 3}, "linear_heads": {0, 2}, "mlp": {1, 2, 3}, "shared": {1, 2, 3}, "dense": {0}},
    "jamba": {"heads": {1, 3}, "mlp": {1, 3}, "dense": {0, 2}},
    "glm4_moe": {"heads": {0, 1, 2, 3}, "mlp": {1, 2, 3}, "shared": {1, 2, 3}, "dense": {0}},
    "gemma4_text": {"mlp": {0, 1}, "dense": {2, 3}},  # the latter twice as wide
}
"""Blocks that lose units of each space."""
SPACES = {name: {"score": "magnitude", "optional": name != "mlp"} for name in ("heads", "mlp", "dense", "shared")}
PRUNE = ("prune", "hybrid", "--family", "hybrid.json", "--ratio", "0.5", "-o", "out", "--recipe")


@pytest.fixture
def hybrid(place: Path, request: pytest.FixtureRequest) -> str:
    """`hybrid`, and `hybrid.json`, the description that is found; returned is its type."""
    with quiet_transformers():
        make_model(request.param).save_pretrained("hybrid")
    tiny_tokenizer().save_pretrained("hybrid")
    Path("hybrid.json").write_text(json.dumps(json.loads(ok("inspect", "hybrid", "--json"))["description"]))
    return str(request.param)


def check_kinds(found: dict[str, Any], pruned: dict[str, set[int]]) -> None:
    """Check that blocks of a kind have the same spaces and, where the config names it, the same type."""
    kinds: dict[str, list[int]] = found["kinds"]
    types = getattr(transformers.AutoConfig.from_pretrained("hybrid"), "layer_types", None) or [""] * found["blocks"]
    alike: dict[Any, list[int]] = {}
    for block, name in enumerate(types):
        alike.setdefault((name, frozenset(each for each in pruned if block in pruned[each])), []).append(block)
    assert list(kinds.values()) == (list(alike.values()) if len(alike) > 1 else [])
    for (name, spaces), kind in zip(alike, kinds, strict=False):
        inside = kind.removeprefix(f"{name} (").removesuffix(")") if name else kind
        assert inside != kind or not name
        assert spaces <= {*inside.split(", ")}
    sizes = [found["block"][key] for key in ("fewest", "parameters", "most")]
    assert sizes == sorted(sizes)
    assert (sizes[0] < sizes[2]) == (len({spaces for _, spaces in alike}) > 1 or found["family"] == "gemma4_text")


@pytest.mark.parametrize("hybrid", every(2, BLOCKS), indirect=True)
def test_units_that_go_are_as_if_they_were_zero(hybrid: str) -> None:
    """In a stock class: the output computes what the dense model does with these units' columns at zero."""
    ok(*PRUNE, "magnitude", "--set", f"spaces={json.dumps(SPACES)}")
    assert "FAILED" not in ok("verify", "out", "--against", "hybrid")
    ok("verify", "hybrid")  # by what is found of its class
    report = read_json("out/ckpt_prune.json")
    assert report["container"]["remote_code"] is False
    pruned: dict[str, set[int]] = {}
    weights = load_file("hybrid/model.safetensors")
    for site in report["sites"]:
        if len(site["kept"]) < site["units"]:
            pruned.setdefault(site["space"], set()).add(site["block"])
        units = weights[site["consumer"]].unflatten(1, (site["units"], -1))
        units[:, [unit for unit in range(site["units"]) if unit not in site["kept"]]] = 0
        weights[site["consumer"]] = units.flatten(1)
    assert pruned == BLOCKS[hybrid]
    check_kinds(json.loads(ok("inspect", "hybrid", "--family", "hybrid.json", "--json")), pruned)
    save_file(weights, "hybrid/model.safetensors", {"format": "pt"})
    tokens = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with quiet_transformers(), torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained("hybrid", dtype=torch.float32)(tokens).logits
        computed = ckpt_prune.load("out").float()(tokens).logits
    # Sums of float32 in another order, of some hundred terms each in four blocks.
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("hybrid", every(2, ["lfm2", "nemotron_h"]), indirect=True)
def test_it_is_fitted(hybrid: str) -> None:
    ok(*PRUNE, "ridge", *TEXT)
    assert "FAILED" not in ok("verify", "out", "--against", "hybrid")
    report = read_json("out/ckpt_prune.json")
    assert {(site["space"], site["block"]) for site in report["sites"] if site["method"] == "ridge"} == {
        (space, block) for space, blocks in BLOCKS[hybrid].items() for block in blocks
    }
    errors = [(site["error_compensated"], site["error_uncompensated"]) for site in report["sites"]]
    assert all(fitted < plain for fitted, plain in errors)


@pytest.mark.parametrize("hybrid", ["nemotron_h", "qwen3_next"], indirect=True)
def test_it_is_measured_chosen_and_masked(hybrid: str) -> None:
    ok("calibrate", "hybrid", "--family", "hybrid.json", *TEXT, "-o", "statistics")
    ok(*PRUNE, "ridge", "--statistics", "statistics")
    ok(*PRUNE, "best-uniform", *TEXT, "--overwrite", "--container", "any")
    assert "FAILED" not in ok("verify", "out", "--against", "hybrid")
    ok(*PRUNE, "wanda-owl", *TEXT, "--overwrite")
    assert "FAILED" not in ok("verify", "out", "--against", "hybrid")


@pytest.mark.parametrize("hybrid", ["qwen3_5_text"], indirect=True)
def test_modules_of_one_kind_of_blocks_may_have_biases(hybrid: str) -> None:
    ok(*PRUNE, "flap-global", *TEXT, "--container", "any")
    assert "linear_attn.out_proj" in read_json("out/config.json")["ckpt_prune_biases"]
    assert "FAILED" not in ok("verify", "out", "--against", "hybrid")
    tensors = load_file("out/model.safetensors")
    biases = {block for block in range(4) if f"model.layers.{block}.linear_attn.out_proj.bias" in tensors}
    assert biases == {0, 2}


@pytest.mark.parametrize("hybrid", ["falcon_h1"], indirect=True)
def test_a_buffer_that_the_model_gives_its_blocks_is_in_those_of_remote_code(hybrid: str) -> None:
    """It is as wide as the heads of state spaces, so that these are left whole where blocks differ."""
    command = (*PRUNE, "best", *TEXT, "--folds", "2")
    ok(*command)
    config = read_json("out/config.json")
    assert config["architectures"] == ["PrunedFalconH1ForCausalLM"]
    assert not any("mamba_n_heads" in own for own in config["per_layer_config"].values())
    with quiet_transformers(), torch.no_grad():
        logits = ckpt_prune.load("out")(torch.arange(3, 12)[None]).logits
        assert logits.isfinite().all()
    model, widths = open_model("hybrid"), [{"linear_heads": kept} for kept in (8, 8, 6, 8)]
    with pytest.raises(UserError, match="blocks of a falcon_h1 have equally many linear_heads, and 6 to 8 would stay"):
        choose_container(model, widths, set(), per_layer=True)


def test_heads_of_state_spaces_in_several_groups_stay_whole(place: Path) -> None:
    """Those of a group share what their states read: of eight in two groups no three may go."""
    with quiet_transformers():
        make_model("falcon_h1", mamba_n_groups=2).save_pretrained("hybrid")
    said = ok("inspect", "hybrid")
    assert "linear_heads" not in said
    assert "mamba.out_proj: whole, no config key counts its heads, or they depend on one another" in said


@pytest.mark.parametrize("hybrid", ["nemotron_h"], indirect=True)
def test_blocks_of_one_kind_may_go(hybrid: str) -> None:
    command = ("prune", "hybrid", "--family", "hybrid.json", "-o", "out", "--recipe", "depth", *TEXT)
    ok(*command, "--set", "depth={blocks: [1], compensation: {method: none}}")
    assert "FAILED" not in ok("verify", "out", "--against", "hybrid")
    model = open_model("out")
    assert (model.blocks, model.blocks_with("heads"), model.blocks_with("mlp")) == (3, [1], [2])


def test_the_stream_behind_linear_attention_is_what_the_mlp_reads(place: Path) -> None:
    """Target drift fits linear attention to the stream in front of the mlp, not to the block's output."""
    with quiet_transformers():
        make_model("qwen3_next").save_pretrained("hybrid")
    model, samples = open_model("hybrid"), TokenWindows(torch.randint(3, 40, (2, 9)))
    stream = open_stream(model, samples, device=torch.device("cpu"), compute_dtype=torch.float32)
    residual = ResidualBlock(stream, 0, model.read_block(0), ["linear_heads"])
    seen: list[torch.Tensor] = []
    norm = residual.block.get_submodule("post_attention_layernorm")
    norm.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    residual.whole = True  # it would end before the norm
    with torch.no_grad():
        residual.run(slice(0, 2))
    torch.testing.assert_close(residual.after("linear_heads"), seen[0].flatten(0, 1).double())
    assert not residual.ends("linear_heads")


def test_spaces_that_a_recipe_leaves_whole_are_named(place: Path) -> None:
    """Those that share weights with what it prunes, such as query heads with KV groups, are not."""
    with quiet_transformers():
        make_model("qwen3_next").save_pretrained("hybrid")
    command = ("prune", "hybrid", "--ratio", "0.5", "--dry-run", "--recipe", "magnitude")
    said = ok(*command)
    assert "left whole by this recipe: shared, experts\n" in said
    assert "it is pruned as heads is; --set spaces.linear_heads.ratio=0 leaves it whole" in said
    assert "linear_heads 2/2" in ok(*command, "--set", "spaces.linear_heads.ratio=0")
    assert "left whole by this recipe: experts\n" in ok(*command, "--set", "spaces.shared.score=magnitude")
    assert "left whole" not in ok("prune", "dense", *command[2:])


def test_a_class_that_derives_its_widths_is_not_said_to_be_untied(place: Path) -> None:
    """Its config is read with widths stated, which says nothing of tied tensors."""
    with quiet_transformers():
        make_model("lfm2", block_auto_adjust_ff_dim=True, block_multiple_of=8).save_pretrained("hybrid")
    assert read_json("hybrid/config.json")["tie_word_embeddings"]
    assert "tied  " not in ok("inspect", "hybrid")
    assert "kinds       conv (mlp) in blocks 0 and 2; full_attention (queries, heads, mlp) in blocks 1 and 3\n" in ok(
        "inspect", "hybrid"
    )
    ok("prune", "hybrid", "--recipe", "magnitude", "--ratio", "0.5", "-o", "out", "--container", "any")
    assert read_json("out/config.json")["tie_word_embeddings"]


@pytest.mark.parametrize("hybrid", ["glm4_moe"], indirect=True)
def test_graphs_of_experts_in_code_of_their_own(hybrid: str) -> None:
    """Experts run by products of all of them, as a graph needs: a loop over those that were chosen is not traced."""
    ok("prune", "hybrid", "--recipe", "best", "--ratio", "0.3", *TEXT, "-o", "out")
    assert json.loads(Path("out/config.json").read_text())["auto_map"]
    assert "the graph agrees with out" in ok("export", "out", "--trust-remote-code", "-o", "graph")
