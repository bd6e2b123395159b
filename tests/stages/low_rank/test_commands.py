"""`low_rank` from the command line: two thin linears in the place of each."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.running import TEXT, edit_weights, ok, read_json, read_refusal, run, without_quality
from tests.oracles import factors

PRUNE = ("prune", "dense", "--recipe", "svd-llm-w", "--ratio", "0.4")
LINEARS = (*(f"self_attn.{kind}_proj" for kind in "qkvo"), *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down")))
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def factored(place: Path) -> Path:
    ok(*PRUNE, *TEXT, "-o", "out")
    return place


def test_what_is_said_and_written(factored, capsys):
    lines = without_quality(ok(*PRUNE, *TEXT, "-o", "out", "--overwrite"))
    assert lines[0].startswith("stored as llama with remote code (two thin linears stand in for one)")
    report = read_json("out/ckpt_prune.json")
    linears = report["factored"]
    dense = ok("inspect", "dense", "--json")
    assert {linear["kind"] for linear in linears} == {"q", "k", "v", "o", "gate", "up", "down"}
    assert all(
        linear["rank"] * (linear["rows"] + linear["columns"]) < linear["rows"] * linear["columns"] for linear in linears
    )
    ranks = [linear["rank"] for linear in linears]
    assert lines[-3].startswith(
        f"  {len(linears)} linear modules became the product of two, of ranks {min(ranks)} to {max(ranks)}: "
    )
    error = sum(linear["error"] for linear in linears) / len(linears)
    assert lines[-2].startswith(f"  The error of their outputs on the calibration samples is {error:#.3g} on average, ")
    gone = sum(
        linear["rows"] * linear["columns"] - linear["rank"] * (linear["rows"] + linear["columns"]) for linear in linears
    )
    assert report["after"]["parameters"] == json.loads(dense)["parameters"] - gone
    assert read_json("out/config.json")["ckpt_prune_ranks"]["self_attn.q_proj"] == linears[0]["rank"]


def test_statistics_give_the_same(factored):
    ok("calibrate", "dense", *TEXT, "--collect", "moments,gram,linears", "-o", "grams")
    ok(*PRUNE, "--statistics", "grams", "-o", "again")
    first, second = (read_json(f"{folder}/ckpt_prune.json")["factored"] for folder in ("out", "again"))
    assert [linear["rank"] for linear in first] == [linear["rank"] for linear in second]
    assert [linear["change"] for linear in first] == pytest.approx([linear["change"] for linear in second], rel=1e-3)
    assert "computed again" in ok("verify", "again", "--against", "dense", "--statistics", "grams")


def test_verify_finds_another_factor(factored):
    output = ok("verify", "out", "--against", "dense")
    assert "products of two factors are as far from the dense weights as ckpt_prune.json says" in output

    def scale(tensors):
        tensors[f"{QUERY}.up.weight"] *= 1.5

    edit_weights("out", scale)
    result = run("verify", "out", "--against", "dense")
    assert result.exit_code == 1
    assert f"kept units: {QUERY}.weight is " in result.stdout
    assert " of its norm away from the product of its factors, ckpt_prune.json says " in result.stdout


def test_the_update_is_that_of_the_dense_weights_behind_factored_blocks(place):
    """Block by block: D is that of svd-llm-w, U the least squares on what the pruned model lets through."""
    every_window = ("--text", "calib.txt", "--samples", "99", "--window", "16", "--compute-dtype", "float32")
    given = ("dense", "--ratio", "0.4", *every_window)
    ok("prune", *given, "--recipe", "svd-llm", "-o", "out")
    ok("prune", *given, "--recipe", "svd-llm-w", "-o", "first")
    updated, first, dense = (load_file(f"{folder}/model.safetensors") for folder in ("out", "first", "dense"))
    ids = AutoTokenizer.from_pretrained("dense")(Path("calib.txt").read_text()).input_ids
    windows = torch.tensor(ids[: len(ids) // 16 * 16]).view(-1, 16)
    for block, name in ((0, "self_attn.q_proj"), (1, "mlp.down_proj"), (1, "self_attn.v_proj")):
        path = f"model.layers.{block}.{name}"
        down = updated[f"{path}.down.weight"]
        assert torch.equal(down, first[f"{path}.down.weight"])
        # Dense blocks behind the factored ones before: the inputs that the update is measured on.
        model = AutoModelForCausalLM.from_pretrained("dense").double().eval()
        for before in range(block):
            for linear in (f"model.layers.{before}.{suffix}" for suffix in LINEARS):
                product = updated[f"{linear}.up.weight"].double() @ updated[f"{linear}.down.weight"].double()
                model.get_submodule(linear).weight.data.copy_(product)
        reads: list[torch.Tensor] = []

        def see(_module, args, inputs=reads):
            inputs.append(args[0].flatten(0, 1))

        model.get_submodule(path).register_forward_pre_hook(see)
        with torch.inference_mode():
            model(windows)
        arrays = (dense[f"{path}.weight"].double().numpy(), reads[0].numpy(), down.double().numpy())
        expected = torch.from_numpy(factors.solve_update(*arrays))
        assert torch.linalg.norm(updated[f"{path}.up.weight"] - expected) <= 2e-3 * torch.linalg.norm(expected)
    assert not torch.equal(updated[f"{path}.up.weight"], first[f"{path}.up.weight"])
    ok("verify", "out", "--against", "dense")


def test_the_update_needs_data(place):
    ok("calibrate", "dense", *TEXT, "--collect", "moments,gram,linears", "-o", "grams")
    given = ("prune", "dense", "--recipe", "svd-llm", "--ratio", "0.4", "--statistics", "grams")
    assert read_refusal(*given, "-o", "out") == (
        "recipe svd-llm fits factors to what reaches them behind factored blocks: give --text in place of --statistics"
    )


def test_a_dry_run(place):
    assert "to be factored: 14 linears, into ranks of " in ok(*PRUNE, *TEXT, "-o", "out", "--dry-run")
    output = ok("prune", "dense", "--recipe", "low-rank", *TEXT, "-o", "out", "--dry-run")
    assert "measuring finds ranks of that size that lose less" in output
    assert "ckpt-prune plan" not in output
    assert not Path("out").exists()


def test_what_else_reads_it(factored):
    ok("report", "out", "-o", "page.html")
    page = Path("page.html").read_text()
    assert "Output error of the factored linears" in page
    assert f"{QUERY}.weight" in page
    assert "linear modules became the product of two, of ranks" in Path("out/README.md").read_text()
    comparison = json.loads(ok("compare", "dense", "out", *TEXT, "--json"))
    score = json.loads(ok("evaluate", "out", "--against", "dense", "--text", "calib.txt", "--window", "16", "--json"))
    assert comparison["divergence"] > 0
    assert score["kl"] > 0


def test_what_does_not_read_it(factored):
    has = "out has two thin linears in the place of each, which recovery does not train"
    assert read_refusal("recover", "out", "--dense", "dense", *TEXT, "-o", "again") == has
