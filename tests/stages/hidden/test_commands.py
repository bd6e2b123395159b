"""Dimensions of the residual stream that go, from the command line."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import ckpt_prune
from ckpt_prune.evaluation.whole_model import quiet_transformers
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
from tests.families import logits, stock, windows

SLICE = ("--set", "hidden.multiple_of=2")
PER_BLOCK = ("prune", "tied", "--recipe", "slicegpt", *SLICE, *TEXT)
SHARED = ("prune", "tied", "--recipe", "slicegpt-shared", *SLICE, *TEXT)


@pytest.fixture
def here(place: Path) -> Path:
    """A llama whose head is its embedding, with gains that differ."""
    torch.manual_seed(3)
    with quiet_transformers(), torch.no_grad():
        model = tiny_llama(max_position_embeddings=32, tie_word_embeddings=True, num_hidden_layers=3)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        model.save_pretrained("tied")
    tiny_tokenizer("<s> $A").save_pretrained("tied")
    return place


def energy(folder: str) -> list[float]:
    shares: list[float] = read_json(f"{folder}/ckpt_prune.json")["hidden"]["energy"]
    return shares


def test_a_basis_for_every_sub_layer(here) -> None:
    lines = without_quality(ok(*PER_BLOCK, "-o", "out"))
    shares = energy("out")
    least = shares.index(min(shares))
    assert len(shares) == 6
    assert lines[-5:] == [
        "residual stream: 12 of 16 dimensions stay (ratio 0.25)",
        "Residual stream",
        "  12 of 16 dimensions stay (ratio 0.25).",
        "  Attention and mlp of every block read it in bases of their own, principal directions of what norms make of "
        f"it: {sum(shares) / 6:.2%} of the energy stays on average, {min(shares):.2%} in basis {least}.",
        "written to out",
    ]
    assert lines[0] == (
        "stored as llama with remote code (the residual stream changes its basis between blocks): load with "
        "ckpt_prune.load or trust_remote_code"
    )
    assert read_json("out/config.json")["hidden_size"] == 16
    verified = run("verify", "out", "--against", "tied")
    assert verified.exit_code == 0
    assert verified.stdout.splitlines()[-1] == (
        "kept units: 2 tensors outside the blocks are the dense ones, bit for bit; those inside have absorbed bases "
        "and are not compared"
    )
    page = ok("report", "out", "-o", "page.html")
    assert "page.html" in page
    assert "12 of 16 dimensions stay" in Path("page.html").read_text()
    assert "Matrices on the skip connections" in Path("out/README.md").read_text()


def test_one_basis_and_one_table(here) -> None:
    """A tied model keeps one table, and its output is an ordinary llama that can be pruned and masked again."""
    lines = without_quality(ok(*SHARED, "-o", "out"))
    assert lines[-4:] == [
        "  12 of 16 dimensions stay (ratio 0.25).",
        "  All blocks share one basis, principal directions of what norms make of it: "
        f"{energy('out')[0]:.2%} of the energy stays.",
        "  Embedding and head stay one table.",
        "written to out",
    ]
    config = read_json("out/config.json")
    assert (config["hidden_size"], config["head_dim"], config["tie_word_embeddings"]) == (12, 4, True)
    verified = run("verify", "out", "--against", "tied")
    assert verified.exit_code == 0
    same, distance = verified.stdout.splitlines()[-1].split(" are the dense ones: ")
    assert same == (
        "kept units: in the basis of 12 dimensions, found from the embedding, 29 tensors outside the blocks and in 3 "
        "of 3"
    )
    assert distance.endswith(" of a tensor's largest value away at most")
    model = stock(Path("out"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for recipe, more in (("rcpu", ("--ratio", "0.5")), ("wanda-50", ())):
        ok("prune", "out", "--recipe", recipe, *more, *TEXT, "-o", f"again-{recipe}")
    message = read_refusal("recover", "out", "--dense", "tied", *TEXT, "-o", "recovered")
    assert "12 hidden dimensions and tied has 16" in message.replace(str(here), "").replace("/", "")


def test_a_tied_head_reads_what_an_untied_one_does_inside_the_basis(here) -> None:
    """The tied head lacks what gains mix into the basis from outside it."""
    for tied in ("keep", "untie"):
        ok(*SHARED, "--ratio", "0.25", "--set", f"hidden.tied={tied}", "-o", tied)
    ids = windows()
    kept, untied = (logits(stock(Path(name)).double(), ids) for name in ("keep", "untie"))
    # By hand: the untied model's final states, through gains and projections of the dense model.
    model, wide = (stock(Path(name)).double().requires_grad_(False) for name in ("untie", "tied"))
    table, gain = wide.model.embed_tokens.weight, wide.model.norm.weight
    head = model.lm_head.weight
    back = torch.linalg.lstsq(table * gain, head).solution  # P / c
    project = back @ torch.linalg.pinv(back)
    states = ids_states(model, ids) @ (table * gain @ back).T
    assert torch.allclose(states, untied, atol=1e-6)
    inside = ids_states(model, ids) @ ((table @ project * gain) @ back).T
    assert torch.allclose(kept, inside, atol=1e-4 * float(inside.abs().max()))
    assert not torch.allclose(kept, untied, atol=1e-3)


@torch.no_grad()
def ids_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    states: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def test_a_size_takes_the_most_dimensions(here) -> None:
    job = ("prune", "tied", "--recipe", "slicegpt", *SLICE, "--target-params", "85%", *TEXT)
    output = ok(*job, "-o", "out")
    report = read_json("out/ckpt_prune.json")
    kept, before, after = report["hidden"]["kept"], report["before"]["parameters"], report["after"]["parameters"]
    assert kept < 16
    assert after <= 0.85 * before
    assert f"residual stream: {kept} of 16 dimensions stay" in output
    assert ", for 85% of the parameters\n" in output
    wider = ("--set", f"hidden.drop={14 - kept}", *TEXT, "--dry-run", "--json", "-o", "wider")
    dry = json.loads(ok(*job[:4], *SLICE, *wider))
    assert dry["after"]["parameters"] > 0.85 * before
    assert sum(tensor.numel() for tensor in ckpt_prune.load("out").parameters()) == after
    output = ok("prune", "tied", "--recipe", "slicegpt", "--target-params", "100%", *TEXT, "-o", "whole")
    assert "nothing is dropped: the model is within 100% of the parameters as it is\n" in output
    assert Path("whole/model.safetensors").read_bytes() == Path("tied/model.safetensors").read_bytes()


def test_a_dry_run_says_the_width_and_what_is_measured(here) -> None:
    output = ok("prune", "tied", "--recipe", "slicegpt", *SLICE, "--dry-run", "-o", "out")
    lines = without_quality(drop_time_line(output))
    assert lines[-3:] == [
        "residual stream: 12 of 16 dimensions stay (ratio 0.25)",
        "to be measured: the residual stream, wherever a block reads it; give --text FILE for it (128 windows of 32 "
        "tokens, unless you say --samples)",
        "everything that needs no measuring is checked, nothing written",
    ]
    report = json.loads(ok(*PER_BLOCK, "--dry-run", "--json", "-o", "out"))
    ok(*PER_BLOCK, "-o", "out")
    assert report["after"] == read_json("out/ckpt_prune.json")["after"]


def test_what_is_not_the_dense_models_is_found(here) -> None:
    ok(*PER_BLOCK, "-o", "out")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][0] += 1

    edit_weights("out", change)
    result = run("verify", "out", "--against", "tied")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == ("kept units: model.norm.weight is not the dense model's")


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("model.embed_tokens.weight", "the embedding is not the dense one in a basis of 12 dimensions"),
        (
            "model.layers.1.mlp.up_proj.weight",
            "model.layers.1.mlp.up_proj.weight is not the dense model's in the basis of the embedding: ",
        ),
    ],
)
def test_a_weight_that_is_not_the_dense_one_in_the_basis(here, name, detail) -> None:
    ok(*SHARED, "-o", "out")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][:, 0] *= 0

    edit_weights("out", change)
    verified = run("verify", "out", "--against", "tied")
    assert verified.exit_code == 1
    assert verified.stdout.splitlines()[-1].startswith(f"kept units: {detail}")


def test_what_does_not_follow_a_basis_of_its_own_is_refused(here) -> None:
    ok(*PER_BLOCK, "-o", "out")
    message = read_refusal("recover", "out", "--dense", "tied", *TEXT, "-o", "recovered")
    assert "has a residual stream of fewer dimensions, in another basis wherever it is read" in message
    message = read_refusal("recover", "out", "--method", "lora", *TEXT, "-o", "recovered")
    assert message.endswith("adapters have no place beside its skip connections")
    message = read_refusal("compare", "tied", "out", *TEXT)
    assert "has a residual stream of fewer dimensions, in another basis wherever it is read" in message
    turns = "its residual stream turns between blocks"
    again = {"units are counted alike": "prune --recipe slicegpt", turns: "prune --recipe wanda-50"}
    for why, command in {**again, f"{turns}, which": "calibrate"}.items():
        name, *options = command.split()
        assert f"(remote code): {why}" in read_refusal(name, "out", *options, *TEXT, "-o", "again")


def test_one_basis_from_statistics(here) -> None:
    """Statistics of every linear's input tell what the blocks' norms give: all but what the final norm reads."""
    ok("calibrate", "tied", *TEXT, "--collect", "moments,gram", "-o", "few")
    job = (*SHARED[:3], "slicegpt-shared", *SLICE, "--statistics")
    assert read_refusal(*job, "few", "-o", "out") == (
        "recipe slicegpt-shared needs Grams of what the blocks' norms give, and few has no linears: calibrate with "
        "--collect moments,gram,linears"
    )
    ok("calibrate", "tied", *TEXT, "--collect", "moments,gram,linears", "-o", "own")
    output = ok(*job, "own", "-o", "out")
    assert "residual stream: 12 of 16 dimensions stay (ratio 0.25)" in output
    ok(*SHARED, "-o", "live")
    assert energy("out")[0] == pytest.approx(energy("live")[0], abs=0.05)
    verified = run("verify", "out", "--against", "tied", "--statistics", "own")
    assert verified.exit_code == 0
    assert "not computed again: its weights have absorbed a basis of the residual stream" in verified.stdout
