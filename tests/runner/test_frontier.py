"""`frontier`, as people call it: what it finds, how it goes on, and what it refuses."""

import json
import math
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from safetensors.torch import load_file

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.folder_kinds import FRONTIER
from ckpt_prune.common.formatting import decimal_bytes, human_bytes
from ckpt_prune.gguf.choosing import TypeBudget
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.timing import FileTimes
from ckpt_prune.gguf.types import default_type
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.options.commands import FrontierOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.recipe.sizes import Timed
from ckpt_prune.runner.frontier.asked import as_named_in, read_held_out
from tests.gguf_files.tiny import GRANITE, TEXT
from tests.runner.frontiers import all_tokens as all_tokens
from tests.runner.frontiers import best_of, fail, find_smallest, make_command, make_place, paste, read, run, stop

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
pytest.importorskip("libgguf")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("frontier"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64}
    return make_place(tmp_path_factory.mktemp("mixture"), "granitemoe", **GRANITE, **experts)


def command(place, out, *more):
    return make_command(place, out, *more, samples=16, window=48)


@pytest.fixture(scope="module")
def sized(place):
    code, output = run(*command(place, "sized", "--target-bytes", "300KB"))
    assert code == 0, output
    return output


def test_a_size_is_kept_to_and_the_commands_make_the_same_file(place, sized, monkeypatch):
    output, found = sized, read(place, "sized")
    best = best_of(found)
    file = place / "sized" / "model.gguf"
    assert file.stat().st_size == best["bytes"] <= 300_000
    assert best["kl"] == min(each["kl"] for each in found["candidates"] if each["bytes"] <= 300_000)
    assert best["pareto"]
    assert found["sentence"] in output
    assert f"KL {best['kl']:.3f} ± {best['kl_error']:.3f}, perplexity " in found["sentence"]
    assert "2 windows cannot tell which of two is better if they are near: more --held-out-samples tell it." in output
    headings = next(line for line in output.splitlines() if line.startswith("file "))
    names = ("KL measured", "KL predicted", "KL median", "KL 90%", "tokens read/s")
    assert all(f"  {name}  " in headings for name in names)
    (legend,) = [line for line in output.splitlines() if line.startswith("measured in ")]
    assert legend == (
        "measured in llama.cpp on 2 windows of 48 tokens of held_out.txt; * marks what nothing beats in size and KL; "
        "KL: how far the predictions are from MODEL's, the mean in nats; predicted: before the file "
        "was made, of the data that it was made by; median, 90%: half, and 90% of the tokens, lose no more; top-1: "
        "share of the tokens for which both put the same first"
    )
    assert "5 steps: predictions of MODEL; importance of inputs; " in output
    dense = load_file(place / "model" / "model.safetensors").values()
    size = sum(tensor.nbytes for tensor in dense)
    (row,) = [line.split("  ") for line in output.splitlines() if line.startswith("MODEL as it is  ")]
    assert [cell.strip() for cell in row if cell.strip()][:3] == ["MODEL as it is", decimal_bytes(size), "0"]
    assert found["dense_bytes"] == size
    assert (place / "sized" / "frontier.svg").read_text().startswith("<svg xmlns=")
    code, output = run("validate", place / "sized", "--text", place / "held_out.txt", "--samples", 2, "--window", 48)
    assert output.startswith("llama.cpp, "), output  # beside its model, which the record names
    assert found["recommended"] in (place / "sized" / "frontier.html").read_text()
    monkeypatch.chdir(place / "sized")
    script = (place / "sized" / "make.sh").read_text().splitlines()
    assert script[-len(found["commands"]) :] == [f"{line} --overwrite" for line in found["commands"]]
    assert script[3] == 'cd "$(dirname "$0")"'
    for line in found["commands"]:
        words = shlex.split(line)[1:]
        code, output = run(*words, *(["--no-validate"] if words[0] == "export" else []))
        assert code == 0, output
    assert (place / "sized" / "made.gguf").read_bytes() == file.read_bytes()
    card = (place / "sized" / "README.md").read_text()
    assert f"found for model: {found['sentence']}." in card
    assert "as architecture `llama`:\n\n```sh\nllama-cli -m model.gguf\n```" in card


@pytest.mark.usefixtures("all_tokens")
def test_all_experts_of_a_block_have_one_type_by_what_each_of_them_loses(mixture):
    code, output = run(*command(mixture, "experts", "--target-bytes", "315KB"))
    assert code == 0, output
    best = best_of(read(mixture, "experts"))
    assert 0.99 * 315_000 < best["bytes"] <= 315_000
    assert best["bytes"] == (mixture / "experts" / "model.gguf").stat().st_size
    assert best["kl"] < 0.3
    kinds = {name: tensor.kind.name for name, tensor in open_gguf(mixture / "experts" / "model.gguf").tensors.items()}
    assert {kinds[f"blk.{block}.ffn_gate_inp.weight"] for block in (0, 1)} == {"F32"}  # routers
    stacks = {name: kind for name, kind in kinds.items() if "_exps." in name}
    assert len(stacks) == 6
    assert len(set(stacks.values())) > 1
    assert stacks["blk.0.ffn_down_exps.weight"] != stacks["blk.1.ffn_down_exps.weight"]


def test_commands_name_what_they_read_as_it_is_called_in_their_folder(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "other.txt").write_text(TEXT)
    given = {"text": ("text.txt", str(place / "other.txt")), "held_out": "held_out.txt", "output": "deep/out"}
    (place / "deep").mkdir()
    options = check_options(FrontierOptions, given | {"model": "model"})
    named = as_named_in(options.output, options)
    assert (named.model, named.text) == ("../../model", (Path("../../text.txt"), place / "other.txt"))
    assert as_named_in(options.output, options.model_copy(update={"model": "ada/model"})).model == "ada/model"


@pytest.mark.usefixtures("sized")
def test_an_interrupted_run_goes_on(place, monkeypatch):
    """What was measured before the first file is not measured again, and the result is that of a run not stopped."""

    with monkeypatch.context() as patched:
        patched.setattr("ckpt_prune.gguf.score.TextPredictions.score", stop)
        code, output = run(*command(place, "stopped", "--target-bytes", "300KB"))
    assert code != 0
    assert "--resume continues" in output
    with monkeypatch.context() as patched:
        patched.setattr("ckpt_prune.runner.rounding_trials.measure_statistics", fail)
        patched.setattr("ckpt_prune.runner.file_budgets.predict_type_losses", fail)
        code, output = run(*command(place, "stopped", "--target-bytes", "300KB", "--resume"))
    assert code == 0, output
    again, whole = read(place, "stopped"), read(place, "sized")
    figures = ("name", "bytes", "kl", "perplexity", "types")
    assert [[each[name] for name in figures] for each in again["candidates"]] == [
        [each[name] for name in figures] for each in whole["candidates"]
    ]


def test_every_text_that_is_held_out_gives_an_equal_share_of_the_windows(place):
    (place / "other.txt").write_text(TEXT.upper())
    texts = [place / "held_out.txt", place / "other.txt"]
    model = open_model(str(place / "model"))

    def windows(*held_out, samples):
        given = {"model": place / "model", "output": place / "o", "text": place / "text.txt", "held_out": held_out}
        options = check_options(FrontierOptions, given | {"held_out_samples": samples, "window": 48})
        return read_held_out(options, model)

    both, alone = windows(*texts, samples=4), [windows(text, samples=2) for text in texts]
    (both, names), alone = both, [own for own, _ in alone]
    assert sorted(both.tolist()) == sorted(torch.cat(alone).tolist())
    assert [text.name for text in texts for _ in range(2)] == [
        names[both.tolist().index(window)] for window in torch.cat(alone).tolist()
    ]


def test_a_size_below_the_coarsest_types_and_fewest_columns_is_refused_at_once(place):
    code, output = run(*command(place, "small", "--target-bytes", "8000"))
    assert code == 2
    assert output.startswith("Error: --target-bytes: 8 KB are out of reach: the coarsest types make a file of ")
    # `prune` keeps more back, for what the card says: nothing is measured for a size that no file keeps to.
    least = re.findall(r"([\d.]+ KB)", output)[-1].replace(" ", "")
    size = ["--target-bytes", least, "--for", "llama.cpp", "-o", place / "small"]
    code, output = run("prune", place / "model", "--text", place / "text.txt", *size)
    assert (code, "KB are out of reach: the coarsest types make a file of " in output) == (2, True)
    assert not list(place.glob("small*"))


@pytest.mark.parametrize(
    ("runtime", "module", "export"),
    [
        ("llama.cpp", "files", "--format gguf --dtype f32 -o OUT.gguf"),
        ("onnxruntime", "graphs", "--dtype fp32 -o OUT"),
        ("vllm", "checkpoints", None),
    ],
)
def test_that_the_model_fits_as_it_is_is_said_before_the_work(place, monkeypatch, runtime, module, export):
    monkeypatch.setattr(f"ckpt_prune.runner.frontier.{module}.open_staging", stop)
    size = sum(4 * tensor.numel() for tensor in load_file(place / "model" / "model.safetensors").values())
    if runtime == "llama.cpp":
        code, output = run("export", place / "model", *export.split()[:-1], place / "whole.gguf", "--no-validate")
        assert code == 0, output
        size = (place / "whole.gguf").stat().st_size
    _, output = run(*command(place, "fits", "--for", runtime, "--target-bytes", f"{size / 1e6 + 0.1:.3f}MB"))
    how = "" if export is None else f" (`ckpt-prune export {place / 'model'} {export}`)"
    said = f"in its own type MODEL takes {decimal_bytes(size)}{how}, and fits within "
    assert said in output, output
    assert output.index(said) < output.index(" steps: ")
    _, output = run(*command(place, "fits", "--for", runtime, "--target-bytes", f"{size / 1e6 - 0.1:.3f}MB"))
    assert " steps: " in output
    assert "in its own type" not in output


def test_a_size_that_nothing_reaches_is_said(place, monkeypatch):
    """Here between what a third of the columns would take and what is tried."""
    monkeypatch.setattr("ckpt_prune.runner.frontier.files.check_reach", lambda *_: None)
    code, output = run(*command(place, "none", "--target-bytes", "40KB"))
    assert code == 1
    assert re.search(r"nothing usable within 40 KB; ask for [\d.]+ KB or more", output)
    assert not (place / "none" / "model.gguf").exists()


def test_a_file_that_is_predicted_to_be_beyond_use_is_not_made(place, monkeypatch):
    monkeypatch.setattr("ckpt_prune.runner.frontier.files.USABLE", 1.02)
    code, output = run(*command(place, "beyond", "--target-bytes", "300KB"))
    assert code == 1
    assert "nothing usable within 300 KB: KL 0.0" in output
    assert "and 1.02 times is the bound; ask for " in output
    assert "making and measuring" not in output
    assert not (place / "beyond" / "model.gguf").exists()


def test_the_smallest_file_within_a_loss_is_found(place):
    found = find_smallest(place, command(place, "loss", "--max-loss", "10%"))
    best = best_of(found)
    mixture = next(each for each in found["candidates"] if each["types"].keys() == {"file"})
    assert best["bytes"] < mixture["bytes"]
    names = [each["name"] for each in found["candidates"]]
    assert len(set(names)) == len(names)


def test_without_a_target_mixtures_stand_beside_types_by_budget_that_are_as_large(place, monkeypatch):
    """Rows of 64 fall back: a file of q6_k is one of q8_0, and one of q4_0 is larger than q4_k_m's, and loses more."""
    ladder, choose = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"), TypeBudget.at_bytes
    monkeypatch.setattr("ckpt_prune.runner.frontier.files.LADDER", ladder)
    monkeypatch.setattr(TypeBudget, "at_bytes", lambda budget, limit: choose(budget, min(limit, 340_000)))
    code, output = run(*command(place, "whole"))
    assert code == 0, output
    found = {each["name"]: each["bytes"] for each in read(place, "whole")["candidates"]}
    by_budget = [f"bits by budget, as large as {name}" for name in ("q8_0", "q4_k_m")]  # that of q5_k_m is the first
    assert list(found)[:-1] == ["q8_0", by_budget[0], "q5_k_m", "q4_k_m", by_budget[1]]
    assert found["q5_k_m"] > 340_000 >= found[by_budget[0]] > found["q4_k_m"] >= found[by_budget[1]]


def test_tokens_go_where_types_lose_more_and_the_recipe_makes_the_same_file(mixture, monkeypatch):
    code, output = run(*command(mixture, "fewer", "--target-bytes", "247KB", "--choose", "first"))
    assert code == 0, output
    found = read(mixture, "fewer")
    (candidate,) = found["candidates"]
    assert candidate["pruned"] == {"vocabulary": 512}
    assert 0.95 * 247_000 < candidate["bytes"] <= 247_000
    # The text has tokens that go, and a model that was never trained loses nothing by writing it with others.
    assert candidate["kl"] is not None
    assert candidate["top1"] is None
    assert "drop all but 512 tokens" in found["sentence"]
    assert "; they predict other tokens than MODEL, so there is no median, 90% or top-1. " in output
    against = ["--text", mixture / "held_out.txt", "--samples", 1, "--window", 48, "--against", mixture / "model"]
    code, refused = run("validate", mixture / "fewer", *against)
    made = f"`sh {mixture / 'fewer' / 'make.sh'}` makes {mixture / 'fewer' / 'pruned'}"
    says = f"model.gguf has 512 tokens and {mixture / 'model'} has 2,048: give --against the pruned checkpoint that"
    assert (code, f"{says} it was made of ({made})\n" in refused) == (2, True)
    code, refused = run("validate", mixture / "fewer")
    assert (code, f"the checkpoint that it was made from ({made})\n" in refused) == (2, True)

    monkeypatch.setattr("ckpt_prune.stages.vocabulary.settle.count_tokens", fail)
    monkeypatch.setattr("ckpt_prune.stages.vocabulary.settle.VocabularyChoice._lost", fail)
    paste(output, monkeypatch)
    assert (mixture / "fewer" / "made.gguf").read_bytes() == (mixture / "fewer" / "model.gguf").read_bytes()


@pytest.mark.usefixtures("all_tokens")
@pytest.mark.parametrize(("which", "limit", "widths"), [("place", 243, {64, 96}), ("mixture", 283, {32})])
def test_columns_go_where_types_alone_lose_much_and_the_recipe_makes_the_same_file(
    request, monkeypatch, which, limit, widths
):
    """A size that no types reach with all columns."""
    place = request.getfixturevalue(which)
    code, output = run(*command(place, "pruned", "--target-bytes", f"{limit}KB", "--choose", "first"))
    assert code in (0, 1), output
    assert output.count("no smaller vocabulary is tried: its tokenizer is of a kind of its own\n") == 1
    found = read(place, "pruned")
    assert found["candidates"]
    chosen = next(line for line in output.splitlines() if line.startswith(f"chosen within {limit} KB: "))
    assert chosen.endswith(" columns of each MLP left; what the file loses is predicted once it is pruned")
    (predicted,) = re.findall(r"^predicted of the file: KL ([\d.]+), ", output, re.MULTILINE)
    assert f" (predicted {predicted})" in output
    assert f"{found['candidates'][0]['predicted_kl']:.3f}" == predicted
    assert all(each["bytes"] <= 1000 * limit for each in found["candidates"])
    assert all(set(each["pruned"]["mlp"]) <= widths for each in found["candidates"])
    (remark,) = found["remarks"]
    assert re.fullmatch(r"None of llama\.cpp's own mixtures is so small .*: the smallest, \w+, has [\d.]+ KB\.", remark)
    assert remark.replace("'", "&#x27;") in (place / "pruned" / "frontier.html").read_text()
    monkeypatch.chdir(place / "pruned")
    code, output = run(*shlex.split(found["commands"][0])[1:])
    assert code == 0, output
    name = found["candidates"][0]["types"]["file"]
    assert (place / "pruned" / "pruned" / f"model-{name}-mix.gguf").read_bytes() == (
        place / "pruned" / "model.gguf"
    ).read_bytes()


@pytest.mark.usefixtures("all_tokens")
@pytest.mark.parametrize(
    ("which", "size", "widths"),
    [("place", "300KB", {96}), ("mixture", "320KB", {64}), ("place", "243KB", {64, 96})],
)
def test_prune_takes_a_size_for_llama_cpp_as_that_of_the_file(request, which, size, widths):
    """Where types alone reach it, the weights beside the file are those of the model."""
    place = request.getfixturevalue(which)
    out = place / f"file-{size}"
    few = ["--samples", 4, "--window", 48, "--evaluate-samples", 0]
    words = ["prune", place / "model", "--text", place / "text.txt", *few, "--target-bytes", size, "--for", "llama.cpp"]
    code, output = run(*words, "-o", out)
    assert code == 0, output
    (file,) = out.glob("*.gguf")
    limit = int(size.removesuffix("KB")) * 1000
    assert 0.97 * limit < file.stat().st_size <= limit
    report = json.loads((out / "ckpt_prune.json").read_text())
    assert {len(site["kept"]) for site in report["sites"]} <= widths
    own = FilePlanner(open_model(str(place / "model"))).plan(default_type(Checkpoint.open(place / "model"))).bytes
    assert report["file"] == {"name": file.name, "before": own, "after": file.stat().st_size}
    sizes = [human_bytes(own), human_bytes(file.stat().st_size), f"{file.stat().st_size / own:.1%}"]
    assert f"| bytes of {file.name} | {' | '.join(sizes)} |" in (out / "README.md").read_text()
    assert f"bytes of {file.name} {' '.join(sizes)}\n" in re.sub(" +", " ", output)
    assert "The safetensors beside it are its weights before rounding, " in output
    assert file.name.endswith("-mix.gguf")
    if len(widths) == 1:
        before, after = (load_file(each / "model.safetensors") for each in (place / "model", out))
        assert before.keys() == after.keys()
        assert all(before[name].equal(after[name]) for name in before)
    assert not list(place.glob(f".{out.name}*"))  # nothing of what was measured stays


TIMES = FileTimes(
    {Kind.Q8_0: 4.0, Kind.Q5_1: 3.5, Kind.Q5_0: 3.0, Kind.Q4_1: 2.5, Kind.IQ4_NL: 5.0, Kind.Q4_0: 2.0}, 1e5
)
"""Nanoseconds a weight: iq4_nl loses less than q4_0, and takes longer than q8_0."""


def _time_by_types(slower, file, timed, _context):
    """A runtime that takes a little longer than foreseen."""
    assert timed == Timed(8, single=True)
    matrices = [each for each in GGUFReader(file).tensors if each.tensor_type in TIMES.by_kind]
    return slower * (TIMES.outside + sum(TIMES.by_kind[each.tensor_type] * each.n_elements for each in matrices))


@pytest.mark.usefixtures("all_tokens")
@pytest.mark.parametrize(("slower", "tries"), [(1.0, 1), (1.2, 2)])
def test_a_time_is_kept_to_by_what_types_take(place, monkeypatch, slower, tries):
    """What is chosen is made again for less if the file itself takes too long; slow types are not taken."""
    monkeypatch.setattr("ckpt_prune.runner.file_budgets.time_types", lambda *_: TIMES)
    monkeypatch.setattr("ckpt_prune.runner.frontier.file_maker.time_file", partial(_time_by_types, slower))
    monkeypatch.setattr("ckpt_prune.runner.frontier.files.time_dense", lambda *_: 1e6)
    out = f"timed{tries}"
    code, output = run(*command(place, out, "--target-latency", "90%@token:8"))
    assert code == 0, output
    found = read(place, out)
    by_budget = [each for each in found["candidates"] if each["name"].startswith("by budget")]
    assert len(by_budget) == tries
    assert all(each["ms"] > 0.9 for each in by_budget[:-1])
    assert by_budget[-1]["ms"] <= 0.9
    best = best_of(found)
    assert best["kl"] == min(each["kl"] for each in found["candidates"] if each["ms"] <= 0.9)
    assert ", within 0.9 ms (90% of 1 in float16) for a single token after a text of 8 tokens; " in found["sentence"]
    assert f": {best['ms']:.4g} ms, " in found["sentence"]
    assert "iq4_nl" not in by_budget[-1]["types"].values()
    assert "how long types take; " in output


def test_a_time_that_nothing_keeps_to_is_said(place, monkeypatch):
    monkeypatch.setattr("ckpt_prune.runner.file_budgets.time_types", lambda *_: TIMES)
    for again in ((), ("--overwrite",)):
        code, output = run(*command(place, "never", "--target-latency", "0.1ms@token:8", *again))
        assert code == 1, output
    assert re.search(
        r"nothing usable within 0\.1 ms for a single token .*: the fastest types are predicted to take 0\.\d+ ms",
        output,
    )


@pytest.mark.usefixtures("all_tokens")
def test_columns_go_where_a_loss_is_large(place):
    """The file is smaller than the coarsest types make it with all columns."""
    code, output = run(*command(place, "much", "--max-loss", "80%", "--choose", "first"))
    assert code == 0, output
    found = read(place, "much")
    best = best_of(found)
    assert best["kl"] <= math.log(1.8)
    assert best["pruned"].keys() == {"mlp"}
    listed = FRONTIER.list_written(place / "much")
    assert {"model.gguf", "recipe.yaml", "frontier.json", "make.sh"} <= listed
    assert listed == {path.name for path in (place / "much").iterdir()}
    assert best["bytes"] < 243_000
