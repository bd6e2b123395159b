"""`frontier --for vllm` and `quantize --target-bytes`: what they find, how they go on, and what they refuse."""

import json
import re
import shlex
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.runner.frontier.checkpoints import CheckpointMaker
from ckpt_prune.stages.quantize.choosing import SCHEMES, SchemeBudget, linear_weights, predict_scheme_losses
from ckpt_prune.verification.dense_source import find_dense_source
from tests.runner.frontiers import best_of, cost_more, fail, find_smallest, make_command, make_place, read, run, stop

SIZE, LIMIT = "1107KB", 1_107_000
"""Between 4 and 8 bits for all linear weights, beside an embedding and a head that are larger than all of them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("checkpoints"))


def command(place, out, *more):
    return make_command(place, out, "--for", "vllm", *more, samples=4, window=48)


@pytest.fixture(scope="module")
def sized(place):
    code, output = run(*command(place, "sized", "--target-bytes", SIZE))
    assert code == 0, output
    return output


def check_card(folder, found):
    card = (folder / "README.md").read_text()
    assert f"found for model: {found['sentence']}." in card
    assert "`make.sh` makes it again. `frontier.html` shows" in card
    assert "not measured" not in card


def test_a_size_is_kept_to_and_the_command_makes_the_same_checkpoint(place, sized, monkeypatch):
    found = read(place, "sized")
    by_name = {each["name"]: each for each in found["candidates"]}
    best = by_name[found["recommended"]]
    file = place / "sized" / "model.safetensors"
    assert 0.99 * LIMIT < file.stat().st_size == best["bytes"] <= LIMIT
    assert best["name"] == "by budget, GPTQ"
    assert by_name["int8 everywhere, GPTQ"]["kl"] < best["kl"] < by_name["int4 everywhere, GPTQ"]["kl"]
    assert (found["measured_in"], found["loss"]) == ("PyTorch", "KL")
    assert found["sentence"] in sized
    check_card(place / "sized", found)
    steps = "importance of inputs; what fewer bits lose; what fewer tokens and columns lose, if fewer bits lose much"
    assert f"4 steps: {steps}; about 4 files. This takes about " in sized
    assert {"config.json", "tokenizer.json", "frontier.svg"} <= {path.name for path in (place / "sized").iterdir()}
    counts = re.search(
        r"of the 14 weights of linear layers in the blocks \(embedding and head stay as they are\) store (.*), rounded",
        found["sentence"],
    )
    assert counts
    assert re.search(r"\d+ in int4 \(one scale per (row|group of \d+ columns)\)", counts[1])
    monkeypatch.chdir(place / "sized")
    code, output = run(*shlex.split(found["commands"][0])[1:])
    assert code == 0, output
    assert Path("made/model.safetensors").read_bytes() == file.read_bytes()


def test_each_joined_weight_has_a_group_that_names_it(place, sized):
    config = json.loads((place / "sized" / "config.json").read_text())["quantization_config"]
    way = {target: str(group["weights"]) for group in config["config_groups"].values() for target in group["targets"]}
    assert len(set(way.values())) > 1
    for joined in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        for block in range(2):
            names = [f"model.layers.{block}.{joined[0]}.{each}_proj" for each in joined[1]]
            assert len({way.get(name) for name in names}) == 1
    tensors = load_file(place / "sized" / "model.safetensors")
    packed = {name.removesuffix(".weight_packed") for name in tensors if name.endswith("packed")}
    assert packed == way.keys()
    assert not packed & set(config["ignore"])


def test_what_it_finds_is_what_evaluate_and_stock_transformers_measure(place, sized):
    found = read(place, "sized")
    best = best_of(found)
    data = ["--text", place / "held_out.txt", "--window", 48, "--samples", 2, "--json"]
    code, output = run("evaluate", place / "sized", "--against", place / "model", *data)
    assert code == 0, output
    assert best["kl"] == pytest.approx(json.loads(output[output.index("{") :])["kl"], rel=1e-3)
    check_card(place / "sized", found)  # which the figures of `evaluate` leave as it is
    code, output = run("verify", place / "sized", "--against", place / "model")
    assert code == 0, output
    tensors, ids = load_file(place / "sized" / "model.safetensors"), torch.arange(40)[None]
    with quiet_transformers(), torch.no_grad():
        loaded, dense = (AutoModelForCausalLM.from_pretrained(place / name).eval() for name in ("sized", "model"))
        for name in [name.removesuffix("_packed") for name in tensors if name.endswith("packed")]:
            module = dense.get_submodule(name.removesuffix(".weight"))
            scales = tensors[f"{name}_scale"]
            bits = 32 * tensors[f"{name}_packed"].shape[1] // module.in_features
            words = tensors[f"{name}_packed"].numpy().view("uint8")
            codes = torch.from_numpy(words.astype("int64"))
            if bits == 4:
                codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
            weight = (codes - 2 ** (bits - 1)).reshape(*scales.shape, -1) * scales[..., None]
            module.weight.data = weight.reshape(module.weight.shape)
        torch.testing.assert_close(loaded(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)


def test_an_interrupted_run_goes_on(place, sized, monkeypatch):
    """What was measured is not measured again, and the result is that of a run that was not stopped."""

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointMaker, "_score", stop)
        code, output = run(*command(place, "stopped", "--target-bytes", SIZE, "--resume"))
    assert code != 0
    assert "nothing to resume: starting afresh\n" in output
    assert "--resume continues" in output
    code, output = run(*command(place, "stopped", "--target-bytes", SIZE, "--resume", "--seed", "3"))
    assert "was begun by a different job (it had another --seed, choice of samples)" in output
    with monkeypatch.context() as patched:
        patched.setattr("ckpt_prune.runner.rounding_trials.measure_statistics", fail)
        patched.setattr("ckpt_prune.runner.scheme_budgets.predict_scheme_losses", fail)
        code, output = run(*command(place, "stopped", "--target-bytes", SIZE, "--resume"))
    assert code == 0, output
    again, whole = read(place, "stopped"), read(place, "sized")
    assert again["candidates"] == whole["candidates"]


def test_the_smallest_checkpoint_within_a_loss_is_found(tmp_path):
    """No group divides the columns of an MLP, so that int4 is not tried everywhere."""
    make_place(tmp_path, intermediate_size=100)
    found = find_smallest(tmp_path, command(tmp_path, "loss", "--max-loss", "10%"))
    names = [each["name"] for each in found["candidates"]]
    assert names[0] == "int8 everywhere, GPTQ"
    assert len(names) > 1


def test_a_size_that_nothing_reaches_is_refused_at_once(place):
    whole = "with 4 bits for all linear weights model takes 1.09 MB, 1.05 MB of them"
    code, output = run(*command(place, "small", "--target-bytes", "100KB"))
    assert code == 2
    assert f"100 KB are out of reach: {whole}" in output
    assert "with the fewest columns and tokens that are tried 160.2 KB; ask for more" in output
    data = ["--text", place / "text.txt", "--samples", 4, "--window", 48]
    code, output = run(
        "quantize", place / "model", "--format", "int4", "--target-bytes", "1MB", *data, "-o", place / "small"
    )
    assert code == 2
    assert f"1 MB are out of reach: {whole}" in output
    assert "or prune it first" in output
    assert not list(place.glob("small*"))


def test_below_what_bits_reach_tokens_and_columns_go_in_one_recipe(place, monkeypatch):
    """What it costs is what stock transformers find for the texts, written by stock tokenizers."""
    limit = 202_000
    code, output = run(*command(place, "cut", "--target-bytes", limit))
    assert code == 0, output
    found = read(place, "cut")
    best, folder = best_of(found), place / "cut"
    assert found["sentence"].startswith("drop all but 320 tokens and columns of MLPs and refit what stays: ")
    assert ", within 202 KB; " in found["sentence"]
    assert best["pruned"] == {"mlp": [64, 64], "vocabulary": 320}
    assert 0.97 * limit < (folder / "model.safetensors").stat().st_size == best["bytes"] <= limit
    check_card(folder, found)
    shutil.copytree(folder, place / "deep" / "cut")
    assert find_dense_source(place / "deep" / "cut").other_tokens  # the model was found where the record says
    code, output = run("verify", folder, "--against", place / "model")
    assert code == 0, output

    dense, fewer = (AutoTokenizer.from_pretrained(each) for each in (place / "model", folder))
    windows = torch.tensor(dense((place / "held_out.txt").read_text())["input_ids"])[: 2 * 48].view(2, 48).tolist()
    with quiet_transformers(), torch.no_grad():
        models = [AutoModelForCausalLM.from_pretrained(each).eval() for each in (place / "model", folder)]
        assert best["kl"] == pytest.approx(cost_more(*models, (dense, fewer), windows), abs=2e-4)

    monkeypatch.chdir(folder)
    code, output = run(*shlex.split(found["commands"][0])[1:])
    assert code == 0, output
    assert Path("made/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


# ---- the budget ------------------------------------------------------------------------------------------------------


def test_every_way_to_store_every_weight_is_predicted_and_finer_ones_lose_less(place):
    model = open_model(str(place / "model"))
    windows = TokenWindows(torch.randint(0, 2048, (4, 32), generator=torch.Generator().manual_seed(0)))
    how = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    losses = predict_scheme_losses(model, windows, {}, **how)
    assert losses.keys() == linear_weights(model).keys()
    for name, own in losses.items():
        columns = model.checkpoint.tensors[name].shape[1]
        assert set(own) == {way.name for way in SCHEMES if columns % (way.group_size or 1) == 0}
        assert 0 < own["int8:channel"] < own["int4:32"] / 20
    budget = SchemeBudget(model, losses)
    least = budget.least
    choices = [budget.at_bytes(least + more) for more in (0, 2_000, 10_000, 40_000)]
    assert choices[0].bytes == least
    whole = budget.everywhere("int4")
    alike = [replace(whole, names=dict.fromkeys(whole.names, way)) for way in ("int4:channel", "dense")]
    assert [budget.is_default(choice) for choice in (whole, *alike)] == [True, False, False]
    assert [choice.kl for choice in choices] == sorted((choice.kl for choice in choices), reverse=True)
    for choice in choices:
        types = choice.types(model)
        assert Counter(way for way in choice.names.values()) == choice.counts
        assert sum(pattern.count("model") for pattern in types) == len(types)
