"""`frontier --for onnxruntime`, as people call it: what it finds, how it goes on, and what it refuses."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, SwinConfig, SwinForImageClassification

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.evaluation.file_score import FileScore
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.pairs import PairReader, choose_pairs
from ckpt_prune.onnx import export as exporting
from ckpt_prune.onnx.pairs import OnnxPair, make_pair_case
from ckpt_prune.onnx.session import OnnxModel
from ckpt_prune.runner.frontier import graphs
from ckpt_prune.runner.frontier.candidates import Measured, RoundedCandidate
from ckpt_prune.runner.frontier.record import Frontier
from tests.gguf_files.tiny import TEXT, save
from tests.graphs import traced_once
from tests.images import write_images, write_processor, write_vit
from tests.runner.frontiers import all_tokens as all_tokens
from tests.runner.frontiers import (
    best_of,
    cost_more,
    fail,
    keep_all_tokens,
    make_command,
    make_place,
    paste,
    read,
    run,
    stop,
)
from tests.sentence_folders import make_sentences
from tests.seq2seq import write_model as write_seq2seq
from tests.seq2seq import write_pairs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module", autouse=True)
def _one_trace() -> Iterator[None]:
    """Let all runs have one trace of a model; commands that they name trace anew what those did not."""
    with pytest.MonkeyPatch.context() as patch:
        traced_once(patch, graphs, exporting)
        yield


def command(place, out, *more):
    return make_command(place, out, "--for", "onnxruntime", *more, samples=2, window=32)


@pytest.fixture(scope="module")
def sized(place):
    with pytest.MonkeyPatch.context() as patched:
        keep_all_tokens(patched)
        code, output = run(*command(place, "sized", "--target-bytes", "300KB"))
    assert code == 0, output
    return output


def test_a_size_is_kept_to_and_the_command_makes_the_same_graph(place, sized, monkeypatch):
    found = read(place, "sized")
    best = best_of(found)
    file = place / "sized" / "model_q4.onnx"
    assert 0.97 * 300_000 < file.stat().st_size == best["bytes"] <= 300_000
    within = [each for each in found["candidates"] if each["bytes"] <= 300_000]
    assert best["kl"] == min(each["kl"] for each in within)
    assert best["pareto"]
    assert {each["name"] for each in found["candidates"]} > {"int4 everywhere", "int8 everywhere"}
    assert (found["measured_in"], found["loss"]) == ("onnxruntime", "KL")
    assert found["sentence"] in sized
    assert re.search(
        r"keep all weights: [\d.]+ KB, KL .*, within 300 KB; of the 16 weight matrices of products and embeddings "
        r"store (\d+ in \d-bit blocks of \d+, )+rounded (by GPTQ|to the nearest)$",
        found["sentence"],
    )
    assert all(f"  KL {what}  " in sized for what in ("measured", "predicted"))
    assert "; KL: how far " in sized
    steps = (
        "4 steps: trace of MODEL; what fewer bits lose; what fewer columns and tokens lose, if bits alone lose much; "
        "about 4 files"
    )
    assert re.search(rf"^{steps}\. This takes about \d+ s, \S+ [MG]B of memory and 1\.3\d MB of disk, ", sized, re.M)
    assert all(each["pruned"] is None for each in found["candidates"])
    assert "measured in onnxruntime on " in sized
    monkeypatch.chdir(place / "sized")
    (line,) = [line for line in Path("make.sh").read_text().splitlines() if line.startswith("ckpt-prune ")]
    assert line == f"{found['commands'][0]} --overwrite"
    code, output = run(*shlex.split(line)[1:], "--no-validate")
    assert code == 0, output
    assert Path("made/model_q4.onnx").read_bytes() == file.read_bytes()
    own = {"frontier.html", "frontier.json", "frontier.svg", "make.sh", "made"}
    assert {path.name for path in Path().iterdir()} - own == {path.name for path in Path("made").iterdir()}
    for name in ("config.json", "genai_config.json", "generation_config.json"):
        assert Path(name).read_bytes() == Path("made", name).read_bytes()
    ours, theirs = (json.loads(Path(folder, "ckpt_prune_onnx.json").read_text()) for folder in (".", "made"))
    for record in (ours, theirs):
        del record["graphs"][0]["quantization"]["allowed"]  # the command allows any loss
    assert ours == theirs


def test_what_it_finds_is_a_folder_as_export_writes_it(place, sized):
    card = (place / "sized" / "README.md").read_text()
    assert "\n`ckpt-prune frontier` found for model: keep all weights: " in card
    assert (
        "\nIt was measured in onnxruntime on 2 windows of 32 tokens of held_out.txt. `make.sh` makes it again. " in card
    )
    assert "onnxruntime-genai generates with `model_q4.onnx` (`genai_config.json`)." in card
    assert re.search(
        r"^\| `model_q4.onnx` \| int4 \| 20 \| (\d+ in \d-bit blocks of \d+(, )?)+ \|$", card, re.MULTILINE
    )
    code, output = run("verify", place / "sized", "--against", place / "model")
    assert code == 0, output
    text = ["--text", place / "held_out.txt", "--samples", 2, "--window", 32]
    shutil.copytree(place / "sized", place / "deep" / "sized")
    for source, passes in (("../../model", 0), ("../gone", 2)):
        (place / "deep" / "sized" / "frontier.json").write_text(json.dumps(read(place, "sized") | {"source": source}))
        code, output = run("validate", place / "deep" / "sized", *text, "--max-loss", "99%")
        assert (code, "which it was made from: give --against MODEL\n" in output) == (passes, passes == 2), output


@pytest.mark.usefixtures("all_tokens")
def test_below_the_reach_of_bits_columns_go_and_the_commands_make_the_same_graph(place, monkeypatch):
    """All weights in 4 bits have 215 KB; 300 KB, above, keep all columns."""
    code, printed = run(*command(place, "narrow", "--target-bytes", "210KB"))
    assert code == 0, printed
    found = read(place, "narrow")
    (best,) = [each for each in found["candidates"] if each["bytes"] <= 210_000]
    assert best["name"] == found["recommended"] == "columns and bits by budget, GPTQ"
    assert 32 <= min(best["pruned"]["mlp"]) < 96
    assert "drop columns of MLPs" in found["sentence"]
    lost = float(re.search(r"pruned, a loss of ([\d.]+)", printed)[1])
    assert lost < best["predicted_kl"] < 2 * lost
    monkeypatch.chdir(place / "narrow")
    source = "../model: its record names pruned (`sh make.sh` makes pruned)"
    for words, remedy in (
        ("validate .", "which it was made from (`sh make.sh` makes pruned): give --against MODEL"),
        ("validate . --against ../model", f"was not made from {source}"),
        ("verify . --against ../model", f"it was exported from another model than {source}"),
        ("prune . --ratio 0.5 -o ../out", "give the model it was exported from (`sh make.sh` makes pruned)"),
    ):
        assert remedy in run(*words.split())[1], words
    paste(printed, monkeypatch)
    assert Path("made/model_q4.onnx").read_bytes() == Path("model_q4.onnx").read_bytes()
    card, made = (Path(folder, "README.md").read_text() for folder in (".", "made"))
    assert "\n# model, ONNX\n" in card
    assert "; `pruned` is a smaller model, which it makes of model first." in card
    assert "Beside model, on 2 windows of 32 tokens of text.txt: perplexity " in made
    code, output = run("verify", ".", "--against", "pruned")
    assert code == 0, output


def test_tokens_go_with_columns_and_the_commands_make_the_same_graph(place, monkeypatch):
    """What it costs is what the graph and stock transformers find for the texts, written by stock tokenizers."""
    (place / "other.txt").write_text(TEXT.upper())
    code, printed = run(*command(place, "fewer", "--target-bytes", "100KB", "--held-out", place / "other.txt"))
    assert code == 0, printed
    found, folder = read(place, "fewer"), place / "fewer"
    best = best_of(found)
    assert best["name"] == "tokens, columns and bits by budget, GPTQ"
    assert 0.97 * 100_000 < (folder / "model_q4.onnx").stat().st_size == best["bytes"] <= 100_000
    assert best["pruned"]["vocabulary"] < 2048
    assert min(best["pruned"]["mlp"]) < 96
    assert "drop all but " in found["sentence"]

    dense, fewer = (AutoTokenizer.from_pretrained(each) for each in (place / "model", folder))
    with quiet_transformers(), torch.no_grad():
        model, graph = AutoModelForCausalLM.from_pretrained(place / "model").eval(), OnnxModel(folder, "model_q4.onnx")
        for text, kl in best["kl_of"].items():
            window = dense((place / text).read_text())["input_ids"][:32]
            assert kl == pytest.approx(cost_more(model, graph, (dense, fewer), [window]), abs=2e-4)
    assert list(best["kl_of"]) == ["held_out.txt", "other.txt"]
    assert best["kl"] == pytest.approx(sum(best["kl_of"].values()) / 2)
    assert all(each["kl_of"].keys() == best["kl_of"].keys() for each in found["candidates"])

    monkeypatch.chdir(folder)
    paste(printed, monkeypatch)
    assert Path("made/model_q4.onnx").read_bytes() == Path("model_q4.onnx").read_bytes()


def test_what_it_finds_is_what_evaluate_measures(place, sized):
    found = read(place, "sized")
    best = best_of(found)
    graph, data = place / "sized" / "model_q4.onnx", ["--text", place / "held_out.txt", "--window", 32, "--samples", 2]
    code, output = run("evaluate", graph, "--against", place / "model", *data, "--json")
    assert code == 0, output
    measured = json.loads(output)
    assert best["perplexity"] == pytest.approx(measured["perplexity"], rel=1e-4), measured


@pytest.mark.usefixtures("all_tokens")
def test_an_interrupted_run_goes_on(place, sized, monkeypatch):
    """What was measured is not measured again, and the result is that of a run that was not stopped."""
    from ckpt_prune.onnx.quantization.deciding import Decider

    with monkeypatch.context() as patched:
        patched.setattr(Decider, "by_gptq", stop)
        code, output = run(*command(place, "stopped", "--target-bytes", "300KB"))
    assert code != 0
    assert "--resume continues" in output
    with monkeypatch.context() as patched:
        patched.setattr(Decider, "_alone", fail)
        patched.setattr(Decider, "as_first", fail)
        code, output = run(*command(place, "stopped", "--target-bytes", "300KB", "--resume"))
    assert code == 0, output
    figures = ("name", "bytes", "kl", "perplexity", "types")
    again, whole = (
        [[each[name] for name in figures] for each in read(place, out)["candidates"]] for out in ("stopped", "sized")
    )
    assert again == whole


@pytest.mark.usefixtures("all_tokens")
@pytest.mark.parametrize(
    ("loss", "allowed", "name"),
    [("20%", 0.182, "smallest within the loss"), ("80%", 0.588, "columns and bits, smallest within the loss")],
)
def test_the_smallest_graph_within_a_loss(place, loss, allowed, name):
    """All weights in the coarsest blocks lose 0.36 nats: only fewer columns make less of 80 %."""
    code, output = run(*command(place, loss, "--max-loss", loss))
    assert code == 0, output
    found = read(place, loss)
    assert found["asked"] == f"within a loss of {allowed} nats a token"
    best = best_of(found)
    assert best["name"].startswith(name)
    assert best["bytes"] == min(each["bytes"] for each in found["candidates"] if each["kl"] <= allowed)
    assert [command.split()[1] for command in found["commands"]] == [*(["prune"] if best["pruned"] else []), "export"]
    assert bool(best["pruned"]) == name.startswith("columns")


def test_a_size_out_of_reach_is_refused_before_anything_is_made(place):
    code, output = run(*command(place, "small", "--target-bytes", "2000"))
    assert code == 2
    assert (
        "2 KB are out of reach: 4 bits for each weight of model, with the fewest columns and tokens that are tried"
        in output
    )
    code, output = run(*command(place, "small", "--target-bytes", "60KB"))
    assert code == 2, output
    assert "with all weights in blocks of 4 bits it has" in output
    assert "making and measuring" not in output
    assert not (place / "small").exists()


@pytest.mark.usefixtures("all_tokens")
def test_a_size_that_needs_other_tokenizers_ends_with_what_was_measured(place):
    code, output = run(*command(place, "whole", "--target-bytes", "100KB"))
    assert code == 1, output
    assert "the columns and tokens that may go do not make the graph small enough: ask for a larger one" in output
    assert "nothing usable within 100 KB" in output


def test_models_of_images_are_measured_on_other_images(place):
    write_vit(place / "vit", hidden_size=32, intermediate_size=64)
    write_images(place / "images", [f"{number}.png" for number in range(40)])
    words = ["frontier", place / "vit", "--for", "onnxruntime", "--images", place / "images", "--held-out-samples", 8]
    code, output = run(*words, "--target-bytes", "60KB", "-o", place / "seen")
    assert code == 0, output
    found = read(place, "seen")
    assert found["measured_on"] == "8 images of images"
    assert found["dense_perplexity"] is None
    assert all(each["perplexity"] is None and 0 <= each["top1"] <= 1 for each in found["candidates"])
    assert "perplexity" not in output


def test_models_in_stages_keep_their_columns(place):
    """No graph takes a hundredth of the time; models that can be pruned would be."""
    sizes = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32}
    SwinForImageClassification(SwinConfig(**sizes)).save_pretrained(place / "swin")
    write_processor(place / "swin", size={"height": 32, "width": 32})
    write_images(place / "photos", [f"{number}.png" for number in range(20)])
    words = ["frontier", place / "swin", "--for", "onnxruntime", "--images", place / "photos", "--held-out-samples", 4]
    code, output = run(*words, "--target-latency", "1%", "-o", place / "stages")
    assert code == 1, output
    found = [each["name"] for each in read(place, "stages")["candidates"]]
    assert found == ["float32", "int8 everywhere", "int4 everywhere, GPTQ"]


def test_the_most_that_goes_of_both_stacks_is_said(monkeypatch):
    monkeypatch.setattr(graphs, "_within_loss", lambda *_: iter(()))
    pruned, lines = SimpleNamespace(unpriced=SimpleNamespace(in_float=lambda: 0.1)), list[str]()
    maker: Any = SimpleNamespace(prune_stacks=lambda _share: pruned)
    assert not [*graphs._with_narrower_stacks(maker, [], None, 1.0, lines.append)]
    assert lines[-1].startswith("without 50% of the units of both stacks: no more is tried")


def test_both_graphs_of_an_encoder_decoder_share_a_size(place, monkeypatch):
    """All weights in 4 bits have 123 KB: units of both stacks go, and the commands make the same graphs."""
    model = write_seq2seq(place / "bart", "bart")
    rows = write_pairs(place / "rows.jsonl").read_text().splitlines(keepends=True)
    for name, some in (("pairs.jsonl", rows[:32]), ("others.jsonl", rows[32:])):
        (place / name).write_text("".join(some))
    data = ["--data", place / "pairs.jsonl", "--held-out", place / "others.jsonl", "--samples", 4]
    code, printed = run(
        "frontier", place / "bart", *data, "--for", "onnxruntime", "--target-bytes", 122_000, "-o", place / "both"
    )
    assert code == 0, printed
    found, folder = read(place, "both"), place / "both"
    best = best_of(found)
    assert best["name"] == "without 15% of the units of both stacks, by budget, GPTQ"
    assert best["pruned"] == {"mlp": [40, 40, 47, 47, 47]}
    files = ["encoder_model_q4.onnx", "decoder_model_merged_q4.onnx"]
    assert 0.9 * 122_000 < best["bytes"] == sum((folder / file).stat().st_size for file in files) <= 122_000
    assert re.search(r"^Its graphs: encoder [\d.]+ KB, decoder [\d.]+ KB\.$", printed, re.MULTILINE)
    pair, lost, tokens = OnnxPair(folder, files), 0.0, 0
    pairs = choose_pairs(
        PairReader(Checkpoint.open(place / "bart"), None), place / "others.jsonl", "decoder", samples=None, seed=None
    )
    for row in range(len(pairs)):
        feed = make_pair_case(pairs, row, row + 1).feed
        with torch.no_grad():
            ours, theirs = (each(**feed).logits[0].double().log_softmax(-1) for each in (pair, model))
        lost, tokens = lost + float((theirs.exp() * (theirs - ours)).sum()), tokens + len(ours)
    assert best["kl"] == pytest.approx(lost / tokens, rel=1e-3)
    monkeypatch.chdir(folder)
    paste(printed, monkeypatch)
    assert all(Path("made", file).read_bytes() == Path(file).read_bytes() for file in files)
    code, output = run(
        "frontier",
        place / "bart",
        "--for",
        "onnxruntime",
        "--text",
        place / "text.txt",
        "--held-out",
        place / "held_out.txt",
        "-o",
        place / "no",
    )
    assert "bart reads pairs of a source and its target: give --data FILE --held-out OTHER" in output


def test_an_embedder_is_measured_on_short_texts_and_its_loss_is_said_of_the_cosine(place):
    pytest.importorskip("sentence_transformers")
    make_sentences(place / "embedder")
    for name, words in (("lines.txt", "the cat sat on a mat and then "), ("others.txt", "the dog ran far away ")):
        (place / name).write_text(words * 30)
    words = ["frontier", place / "embedder", "--for", "onnxruntime", "--text", place / "lines.txt", "--max-loss", "6%"]
    few = ["--held-out", place / "others.txt", "--samples", 2, "--held-out-samples", 4, "--window", 16]
    code, output = run(*words, *few, "-o", place / "vectors")
    assert code == 0, output
    found = read(place, "vectors")
    assert found["asked"] == "within a loss of 0.120 of the vectors' energy, twice the 6% that the cosine may lose"
    assert found["measured_on"] == "the embeddings of 8 texts cut from 4 windows of 16 tokens of others.txt"
    assert "lost energy: what the vectors lose of theirs, twice what the cosine loses" in output


def test_for_a_time_models_are_pruned_by_what_each_type_lacks(place, monkeypatch):
    """Times are made up: of blocks by their widths in PyTorch, and of graphs one after the other."""

    def fastest(timers, _workload, _say):
        shapes = [[layer.mlp.down_proj.weight.shape[1] for layer in timer._model.model.layers] for timer in timers]
        return [5e5 + sum(2e5 + 1e4 * columns for columns in own) for own in shapes]

    of_graphs = iter([100.0, 70.0, 90.0, 55.0, 66.0, 58.0, 57.0])
    monkeypatch.setattr("ckpt_prune.benchmarking.latency_table.time_fastest", fastest)
    monkeypatch.setattr("ckpt_prune.runner.frontier.graph_scores.time_fastest", lambda *_: [1e6 * next(of_graphs)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    save(place / "shallow", "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    words = command(place, "timed", "--target-latency", "60%", "--choose", "first")
    code, output = run(*(place / "shallow" if each == place / "model" else each for each in words))
    assert code == 0, output
    found = read(place, "timed")
    by_name = {each["name"]: each for each in found["candidates"]}
    assert list(by_name) == [
        "float32",
        "int8 everywhere",
        "int4 everywhere, GPTQ",
        "pruned to 60.0 % of the time, float32",  # 55 ms: within a tenth of what is allowed
        "pruned to 85.7 % of the time, int8 everywhere",  # 66 ms: too long
        "pruned to 75.6 % of the time, int8 everywhere",
        "pruned to 66.7 % of the time, int4 everywhere, GPTQ",
    ]
    within = {name: each for name, each in by_name.items() if each["ms"] <= 60}
    assert found["asked"] == "within 60 ms"
    assert found["recommended"] == min(within, key=lambda name: within[name]["kl"])
    widths = [sum(each["pruned"]["mlp"]) for name, each in by_name.items() if name.startswith("pruned")]
    assert widths[0] < widths[3] < widths[2] < widths[1] < 96
    best = by_name[found["recommended"]]
    config = json.loads((place / "timed" / "config.json").read_text())
    assert config["intermediate_size"] == best["pruned"]["mlp"][0]
    assert [line.split()[1] for line in found["commands"]] == ["prune", "export"]


def test_ways_to_store_weights_are_said_in_words():
    def advice(kinds):
        return RoundedCandidate("some", "int4", None, "gptq", kinds, "weights of the blocks").advice

    assert (
        advice({"4-bit blocks of 32": 5}) == "store all 5 weights of the blocks in 4-bit blocks of 32, rounded by GPTQ"
    )
    assert advice({"dense": 1, "int4:64": 7, "int8:channel": 3, "float32": 2}) == (
        "of the 13 weights of the blocks store 7 in int4 (one scale per group of 64 columns), 3 in int8 (one scale per "
        "row), 2 in float32, 1 as they are, rounded by GPTQ"
    )


def test_if_nothing_usable_is_fast_enough_the_fastest_that_is_usable_is_named():
    def graph(name, kl, ms):
        score = FileScore(bytes=1000, kl=kl, perplexity=None, speeds=(1.0,), top1=0.5, ms=ms)
        return Measured(RoundedCandidate(name, "int8", None, "nearest"), score)

    found = [
        graph("whole", 0.0, 13.0),
        graph("int8", 0.3, 8.07),
        graph("smaller int8", 0.35, 8.2),
        graph("small", 2.4, 7.9),
    ]
    words = {
        "place": "m",
        "asked": "within 7.94 ms",
        "beyond_use": "",
        "data_words": "",
        "model": "m",
        "commands": (),
        "reach": None,
        "dense_bytes": 20_000,
    }
    frontier = Frontier(folder=Path("out"), dense=None, found=found, best=found[3], runtime="onnxruntime", **words)
    sizes = {"whole": 9, "int8": 7, "smaller int8": 8, "small": 4}
    small = [replace(each, score=replace(each.score, ms=None, bytes=sizes[each.candidate.name])) for each in found]
    sized = replace(frontier, found=small, best=small[3], asked="within 5 bytes")
    assert sized.sentence.endswith("has KL 2.4000, top-1 50.0%; ask for 7 bytes or more")  # as large as int8
    assert replace(sized, reach=4).sentence == sized.sentence  # as large as the one that is not
    assert replace(sized, reach=5).sentence.endswith("ask for 5 bytes or more")
    assert frontier.sentence == (
        "nothing usable within 7.94 ms; the best, small, has KL 2.4000, top-1 50.0%; the fastest that is usable takes "
        "8.07 ms: int8, KL 0.3000, top-1 50.0%"
    )
