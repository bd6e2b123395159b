"""`recover`: exact output, every option, what other commands make of an output, and what is refused."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.show.section import format_figure
from tests.cli.running import (
    TEXT,
    changed,
    edit_weights,
    listing,
    ok,
    read_json,
    read_refusal,
    run,
)
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.pairs import dealt
from tests.reports import without_stages

BARE = ("recover", "pruned", "--dense", "dense")
RECOVER = (*BARE, *changed(TEXT, "--samples", "32"), "--epochs", "2")
"""Of a model of two blocks of hidden size 16, half of which is gone; 32 windows of 16, three of them held out."""
STATES = 32 * 16 * 16
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def tensors(folder: str) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(Path(folder).glob("model*.safetensors")) for name, t in load_file(path).items()}


def find_changed(folder: str, before: str = "pruned") -> set[str]:
    """Names of the tensors that are not bit for bit as they were; shapes and dtypes are."""
    ours, theirs = tensors(folder), tensors(before)
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
    return {name for name in ours if not torch.equal(ours[name], theirs[name])}


def linears(*blocks: int, only: tuple[str, ...] = (*ATTENTION, *MLP)) -> set[str]:
    homes = {"self_attn": ATTENTION, "mlp": MLP}
    return {
        f"model.layers.{block}.{home}.{name}.weight"
        for block in blocks
        for home, names in homes.items()
        for name in names
        if name in only
    }


def report_of(out: str) -> dict[str, Any]:
    return read_json(f"{out}/ckpt_prune.json")


FIGURES = ("mse_before", "mse_start", "mse_after", "cka_before", "cka_after")


def cells(line: str) -> list[str]:
    return re.split("  +", line.strip())


def mean(layers: list[dict[str, Any]], key: str) -> float:
    return math.fsum(layer[key] for layer in layers) / len(layers)


def summary(layers: list[dict[str, Any]], recovered: int) -> list[str]:
    return [
        "Recovery",
        f"  {recovered} of {len(layers)} blocks have new weights, trained towards the hidden states of dense; zeros "
        "stay zero.",
        "  Hidden states on 3 held-out samples, mean over blocks, before → after: mean squared error "
        f"{mean(layers, 'mse_before'):.4g} → {mean(layers, 'mse_after'):.4g}, linear CKA "
        f"{mean(layers, 'cka_before'):.4g} → {mean(layers, 'cka_after'):.4g}.",
    ]


def curve(out: str, window: int = 16) -> str:
    recovery = report_of(out)["recovery"]
    figures = ", ".join(f"{entry['perplexity']:.3f} with {entry['blocks']}" for entry in recovery["perplexity_after"])
    return f"  Perplexity on held-out windows of {window} tokens: {figures} of 2 blocks recovered."


@pytest.fixture(scope="module")
def recovered(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        ok(*RECOVER, "-o", str(out := tmp_path_factory.mktemp("recovered") / "whole"))
    return out


@pytest.fixture
def whole(place: Path, recovered: Path) -> Path:
    """A copy of it in the working folder, beside what `place` has."""
    return Path(shutil.copytree(recovered, "whole"))


# ---- what is said ----------------------------------------------------------------------------------------------


def test_text(place):
    before = listing()
    lines = ok(*RECOVER, "-o", "out").splitlines()
    assert {Path(name).parts[0] for name in set(listing()) - set(before)} == {"out"}
    layers = report_of("out")["layers"]
    assert cells(lines[0]) == [
        *("block", "outcome", "epochs run", "MSE before", "MSE at the start", "MSE after", "CKA before", "CKA after")
    ]
    assert len({len(line) for line in lines[:3]}) == 1
    for block, (line, layer) in enumerate(zip(lines[1:3], layers, strict=True)):
        figures = [format_figure(layer[key]) for key in FIGURES]
        assert cells(line) == [str(block), f"weights of epoch {layer['best_epoch']}", "2", *figures]
        assert layer["mse_after"] < layer["mse_start"]
        assert layer["best_epoch"] in (1, 2)
    end = lines.index("written to out")
    assert lines[3:end] == [*summary(layers, 2), curve("out")]
    assert find_changed("out") == linears(0, 1)
    # It is measured beside the dense model, on what it was not trained on.
    loss = report_of("out")["loss"]
    assert loss["data"].endswith("that it was not calibrated on")
    assert f"{loss['before']:.3f}" in "\n".join(lines[end:])
    assert f"| {loss['of']} | " in Path("out/README.md").read_text()


def test_measuring_the_result_is_turned_off(place):
    assert ok(*RECOVER, "--evaluate-samples", "0", "-o", "out").endswith("written to out\n")
    assert report_of("out").get("loss") is None


# ---- which weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [("0:1", [0]), (":1", [0]), (":", [0, 1])],
)
def test_layers(place, layers, blocks):
    lines = ok(*RECOVER, "--layers", layers, "-o", "out").splitlines()
    records = report_of("out")["layers"]
    assert [layer["block"] for layer in records if layer["recovered"]] == blocks
    assert [layer["epochs"] for layer in records] == [2 * (block in blocks) for block in (0, 1)]
    assert find_changed("out") == linears(*blocks)
    kept = [
        f"weights of epoch {layer['best_epoch']}" if layer["recovered"] else "old weights kept" for layer in records
    ]
    assert [cells(line)[1] for line in lines[1:3]] == kept
    assert lines[3:6] == summary(records, len(blocks))
    assert report_of("out")["recovery"]["settings"]["layers"] == layers


def test_zeros_stay_zeros(place):
    ok("prune", "dense", "--recipe", "wanda-2-4", *TEXT, "-o", "masked")
    args = ("--lr", "0.02", "-o", "out")
    ok("recover", "masked", *RECOVER[2:], *args)
    assert find_changed("out", "masked") == linears(0, 1)
    ours, theirs = tensors("out"), tensors("masked")
    assert all(torch.equal(ours[name] == 0, theirs[name] == 0) for name in ours)
    pruned, recovered = (ok("inspect", name, "--sparsity").replace(name, "-") for name in ("masked", "out"))
    assert recovered == pruned
    assert "all                    14    3.84K  50.0%  50.0%  50.0%      2:4\n" in recovered
    assert "sparsity: 14 masked weights: 50.0 % zeros, 2:4 holds in every group\n" in ok("verify", "out")


def test_a_learning_rate_that_gets_lost(place):
    result = run(*RECOVER, "--lr", "1000", "--evaluate-samples", "0", "-o", "out")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    layers = report_of("out")["layers"]
    assert [cells(line)[1:3] for line in lines[1:3]] == [["training diverged, old weights kept", "3"]] * 2
    assert lines[3:] == [
        *summary(layers, 0),
        "  Training diverged in 2 blocks (0, 1) and was taken back there: use a smaller lr than 1e+03.",
        curve("out"),
        "written to out",
    ]
    assert all(layer["diverged"] and layer["mse_after"] == layer["mse_start"] for layer in layers)
    assert find_changed("out") == set()


@pytest.mark.parametrize("recovered", [True, False])
def test_an_error_that_grew_is_said_where_something_was_recovered(place, recovered):
    ok(*RECOVER, "-o", "out")
    report = report_of("out")
    report["layers"][1]["mse_after"] = 1.001 * report["layers"][1]["mse_before"]
    for layer in report["layers"]:
        layer["recovered"] = recovered
    Path("out/ckpt_prune.json").write_text(json.dumps(report))
    ok("report", "out")
    assert ("squared error is larger than without recovery" in Path("out.report.html").read_text()) == recovered


def test_epochs_that_gain_nothing_are_said(place):
    """Steps too small for any float32 weight."""
    lines = ok(*RECOVER, "--lr", "1e-30", "-o", "out").splitlines()
    (line,) = (line for line in lines if line.startswith("  No epoch"))
    assert line.startswith("  No epoch was better than the old weights in 2 blocks (0, 1)")
    assert "use more samples or epochs" in line
    assert "1e-30" in line
    assert not any("diverged" in line for line in lines)
    assert find_changed("out") == set()
    assert "no epoch" not in ok(*RECOVER, "-o", "better")


def strict(text: str) -> dict[str, Any]:
    """JSON as the standard has it, without infinities."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(("block", "model"), dealt([0, 1], ["pruned", "dense"]))
def test_hidden_states_that_are_not_finite(place, model, block):
    """Every weight is finite, and what the block makes of them is not: the figures are null, blocks before recover."""
    ok("prune", "dense", "--recipe", "magnitude-50", "-o", "masked")
    where = {"pruned": "masked", "dense": "dense"}[model]
    edit_weights(where, lambda weights: weights[f"model.layers.{block}.mlp.down_proj.weight"].mul_(1e38))
    lines = ok("recover", "masked", *RECOVER[2:], "-o", "out").splitlines()
    report = strict(Path("out/ckpt_prune.json").read_text())
    layers = report["layers"]
    for layer in layers:
        lost = layer["block"] >= block
        assert [layer[key] is None for key in FIGURES] == [lost] * 5
        assert (layer["recovered"], layer["epochs"] > 0) == (not lost, not lost)
    assert lines[4].startswith(f"  {block} of 2 blocks have new weights")
    assert lines[5 + block].startswith(f"  The hidden states after block {block} are not finite")
    assert not any("no epoch" in line for line in lines)
    perplexities = [entry["perplexity"] for entry in report["recovery"]["perplexity_after"]]
    assert [figure is None for figure in perplexities] == [model == "pruned"] * 2
    assert find_changed("out", "masked") == linears(*range(block))
    assert ok("report", "out") == "report written to out.report.html\n"
    assert "nan" not in Path("out.report.html").read_text().lower()
    assert f"{block} of 2 blocks have new weights" in Path("out/README.md").read_text()
    again = strict(ok("recover", "masked", *RECOVER[2:], "-o", "again", "--json"))
    assert without_stages(again) == without_stages(report)


# ---- memory, repetition and interruption -----------------------------------------------------------------------


def test_a_disk_without_room_for_states(place, monkeypatch):
    """There is room for the output, of a few KiB, and not for hidden states."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**26 + STATES * 4 - 1))
    before = listing()
    result = run(*RECOVER, "--state-memory", "0", "-o", "out")
    assert (result.exit_code, listing()) == (2, before)
    assert result.stderr.splitlines()[-1] == (
        f"Error: {Path('out.partial').absolute()} has 67.1 MB free and hidden states beyond --state-memory need 67.1 "
        "MB; free space or choose another place, or take fewer samples, shorter windows or --compute-dtype bfloat16"
    )
    ok(*RECOVER, "-o", "out")


# ---- models of every kind --------------------------------------------------------------------------------------


def test_pruned_elsewhere(place):
    """Half of every weight at zero, and no report beside it."""

    def halve(weights: dict[str, torch.Tensor]) -> None:
        for name in linears(0, 1):
            weights[name][:, ::2] = 0

    shutil.copytree("dense", "theirs")
    edit_weights("theirs", halve)
    ok("recover", "theirs", *RECOVER[2:], "-o", "out")
    assert find_changed("out", "theirs") == linears(0, 1)
    report = report_of("out")
    assert report["recipe"] == {"name": "pruned elsewhere"}
    assert report["source"]["name"] == report["recovery"]["dense"]["name"] == "dense"
    assert json.loads(ok("verify", "out", "--against", "dense", "--json"))["passed"]
    assert ok("inspect", "out", "--sparsity").splitlines()[-1].split()[3:] == ["50.0%", "50.0%", "50.0%", "2:4"]
    assert ok("report", "out") == "report written to out.report.html\n"
    assert "perplexity" in ok("evaluate", "out", "--text", "calib.txt", "--window", "16", "--samples", "2")
    ok("recover", "out", "--dense", "dense", *TEXT, "--epochs", "1", "-o", "again")
    assert report_of("again")["recipe"] == {"name": "pruned elsewhere"}


# ---- options that mean nothing ---------------------------------------------------------------------------------


def test_two_windows_are_enough(place):
    Path("two.txt").write_text("the cat sat on a mat and then the dog ran")
    ok(*BARE, "--text", "two.txt", "--window", "16", "--epochs", "1", "-o", "out")
    data = report_of("out")["recovery"]["data"]
    assert (data["samples"], data["held_out"]) == (2, 1)


# ---- models that do not belong together ------------------------------------------------------------------------


def other(**changes: Any) -> None:
    """A dense model `other` that differs in this."""
    with quiet_transformers():
        tiny_llama(**{"max_position_embeddings": 32, **changes}).save_pretrained("other")
    tiny_tokenizer("<s> $A").save_pretrained("other")


BELONGS = "a model is recovered against the dense one it was made from"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, f"pruned has 2 blocks and other has 3: {BELONGS}, block by block"),
        ({"hidden_size": 32}, f"pruned has 16 hidden dimensions and other has 32: {BELONGS}, block by block"),
        ({"vocab": 41}, "pruned and other have vocabularies of 40 and 41 tokens"),
    ],
)
def test_a_dense_model_of_another_shape(place, changes, message):
    other(**changes)
    assert read_refusal("recover", "pruned", "--dense", "other", *TEXT, "-o", "out") == message


def test_a_dense_model_of_other_weights(place):
    other(seed=1)
    message = read_refusal("recover", "pruned", "--dense", "other", *TEXT, "-o", "out")
    assert re.fullmatch(
        r"the two models make different hidden states of the same samples before their first block \(relative "
        r"difference \d\.\d\d\): the pruned one was not made from this dense one, or was rotated since",
        message,
    )


def test_a_dense_model_of_another_tokenizer(place):
    path = Path("dense/tokenizer.json")
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    assert read_refusal(*RECOVER, "-o", "out") == (
        "pruned and dense have different tokenizers: they read the text differently"
    )
