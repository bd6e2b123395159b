"""Every output is measured beside its dense model, on what it was not made on, and says how good it is."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckpt_prune.common.errors import EvaluationFailedError, UserError
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.evaluation import pair, texts
from ckpt_prune.evaluation.sentences import open_embedder
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.measure.samples.text import load_tokenizer, mix_windows, tokenise_text
from ckpt_prune.runner import fewer_bits, prune
from ckpt_prune.runner.prune import Pruned
from ckpt_prune.verification.dense_source import find_dense_source
from tests.cli.running import TEXT, ok, read_json, read_refusal, run
from tests.gguf_files.tiny import save
from tests.images import write_images, write_vit
from tests.sentence_folders import make_sentences

PRUNE = ("prune", "dense", "--recipe", "rcpu", "--ratio", "0.5", *TEXT)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The windows that models are compared on."""
    seen: list[torch.Tensor] = []
    compare = texts.compare

    def note(model, reference, windows, **options):
        seen.append(windows)
        return compare(model, reference, windows, **options)

    monkeypatch.setattr(texts, "compare", note)
    return seen


def perplexity(folder: str, windows: torch.Tensor) -> float:
    model = load_model(Path(folder), device="cpu").double()
    with torch.no_grad():
        logits = model(windows).logits[:, :-1]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).exp())


def test_a_pruned_model_is_measured_on_windows_that_it_was_not_calibrated_on(place, read):
    output = ok(*PRUNE, "-o", "out")
    (windows,) = read
    stream = tokenise_text(load_tokenizer(Path("dense")), Path("calib.txt").read_text())
    used, whole = (mix_windows([stream], samples=count, window=16, seed=0)[0].tolist() for count in (8, 999))
    assert len(windows) == 2
    assert all(window in whole and window not in used for window in windows.tolist())
    loss = read_json("out/ckpt_prune.json")["loss"]
    assert loss["data"] == "2 windows of 16 tokens of calib.txt that it was not calibrated on"
    # Logits of a few units in float32: 2^-24 of them, some hundred sums deep.
    assert loss["before"] == pytest.approx(perplexity("dense", windows), rel=1e-4)
    assert loss["after"] == pytest.approx(perplexity("out", windows), rel=1e-4)
    assert loss["verdict"] in output
    assert loss["verdict"][1:] in Path("out/README.md").read_text()
    ok("verify", "out", "--against", "dense")
    # What was measured is measured once.
    ok(*PRUNE, "-o", "out", "--resume")
    assert len(read) == 1


def test_without_the_dense_model_an_export_says_what_the_checkpoint_lost_and_on_what(place):
    ok(*PRUNE, "-o", "out")
    Path("dense").rename("moved")
    dense = find_dense_source(Path("out"))
    assert dense is not None
    assert dense.lacking.endswith(
        "`export` and `validate` take it as --dense MODEL. As a checkpoint, it was measured on 2 windows of 16 "
        f"tokens of calib.txt that it was not calibrated on: {read_json('out/ckpt_prune.json')['loss']['verdict']}"
    )


def test_a_text_without_other_windows_is_said_to_be_seen(place, read):
    Path("short.txt").write_text(" ".join(Path("calib.txt").read_text().split()[:35]))
    ok("prune", "dense", "--recipe", "rcpu", *TEXT[2:], "--text", "short.txt", "-o", "out")
    data = read_json("out/ckpt_prune.json")["loss"]["data"]
    assert data == (
        "2 windows of 16 tokens of short.txt that it was calibrated on, because short.txt has no others: what is lost "
        "elsewhere is more"
    )


def test_measuring_is_turned_off_and_does_not_fail_a_run(place, monkeypatch):
    for command, record in ((PRUNE, "ckpt_prune.json"), (QUANTIZE, "ckpt_prune_quantised.json")):
        shutil.rmtree("out", ignore_errors=True)
        ok(*command, "-o", "out", "--evaluate-samples", "0")
        written = read_json(f"out/{record}")
        assert not written.get("loss", written.get("losses"))
        assert "not measured" in Path("out/README.md").read_text()
        assert read_refusal(*command, "-o", "new", "--evaluate", "calib.txt", "--evaluate-samples", "0") == (
            "--evaluate names what to measure on, and --evaluate-samples 0 measures nothing: give one"
        )
    monkeypatch.setattr(pair, "available_bytes", lambda: 1000)
    monkeypatch.setattr(pair.Pair, "streamed", {})
    result = run(*PRUNE, "-o", "large")
    assert (result.exit_code, result.stderr) == (
        0,
        "large was not measured: large and dense are loaded whole, in float32, and take 33.9 KB, and 1.00 KB of memory "
        "are free\n",
    )
    assert read_json("large/ckpt_prune.json").get("loss") is None


QUANTIZE = ("quantize", "dense", "--format", "int8", *TEXT)


def test_a_rounded_model_is_measured_beside_its_own_and_the_dense_one(place, read):
    pytest.importorskip("compressed_tensors")
    output = ok(*QUANTIZE, "-o", "rounded")
    (loss,) = read_json("rounded/ckpt_prune_quantised.json")["losses"]
    assert (loss["against"], loss["data"]) == (
        "dense",
        "2 windows of 16 tokens of calib.txt that it was not calibrated on",
    )
    assert loss["before"] == pytest.approx(perplexity("dense", read[0]), rel=1e-4)
    assert f"{loss['before']:.3f}" in output
    assert f"- Beside dense, on {loss['data']}: perplexity " in Path("rounded/README.md").read_text()
    ok("quantize", "pruned", *QUANTIZE[2:], "-o", "both")
    losses = read_json("both/ckpt_prune_quantised.json")["losses"]
    assert [loss["against"] for loss in losses] == ["pruned", "dense"]
    assert losses[0]["kl"] < losses[1]["kl"]
    assert torch.equal(read[1], read[2])
    # What `evaluate` measures takes its place, and that of no other.
    ok("evaluate", "both", "--against", "dense", "--text", "calib.txt", "--window", "16", "--samples", "3")
    losses = read_json("both/ckpt_prune_quantised.json")["losses"]
    assert [(loss["against"], loss["data"].split(",")[0]) for loss in losses] == [
        ("pruned", losses[0]["data"]),
        ("dense", "calib.txt"),
    ]
    Path("dense").rename("moved")
    result = run("quantize", "pruned", *QUANTIZE[2:], "-o", "alone")
    assert "not compared with the dense model: dense lies neither beside the model, nor here" in result.stderr


def test_images_that_were_not_used_are_measured_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_vit(Path("vit"))
    write_images(Path("images"), [f"{number}.png" for number in range(40)])
    data = ("--images", "images", "--samples", "24")
    output = ok("prune", "vit", "--recipe", "corp-mlp", "--ratio", "0.5", *data, "-o", "out", "--evaluate-samples", "9")
    loss = read_json("out/ckpt_prune.json")["loss"]
    assert loss["data"] == "9 images of images that it was not calibrated on"
    assert 0 <= loss["agreement"] <= 1
    assert f"top-1 agreement {loss['agreement']:.1%}" in output


def test_an_embedder_is_measured_by_embeddings_and_its_graph_makes_them(tmp_path, monkeypatch):
    """The card's code pools as modules.json says, here by two modes, a layer and a normalisation."""
    monkeypatch.chdir(tmp_path)
    make_sentences(Path("dense"), modes=("mean_tokens", "lasttoken"), dense=True)
    Path("lines.txt").write_text("the cat sat on a mat and then the dog ran far away " * 30)
    how = ("--text", "lines.txt", "--window", "16", "--samples", "4")
    sizes = ("--set", "spaces.heads.ratio=0", "--set", "spaces.mlp.ratio=0.5")
    ok("prune", "dense", "--recipe", "ridge", *sizes, *how, "-o", "out")
    loss = read_json("out/ckpt_prune.json")["loss"]
    assert (loss["of"], loss["before"]) == ("cosine of the embeddings", None)
    output = ok("export", "out", "-o", "graph", "--text", "lines.txt", "--window", "16", "--samples", "4")
    assert "cosine with PyTorch of dense 0." in output
    own, dense = read_json("graph/validation.json")["graphs"][0]["metrics"]
    assert (own["against"], dense["against"]) == (None, "dense")
    assert own["onnxruntime"] == pytest.approx(1, abs=1e-6)
    card = Path("graph/README.md").read_text()
    assert f"Beside dense, on {dense['of']} of lines.txt: cosine of the embeddings {dense['onnxruntime']:.4f}." in card
    tokenizer = load_tokenizer(Path("out"))
    code = (
        card.split("```python\n")[1]
        .split("\n```")[0]
        .replace("[[3, 4, 5]]", repr([tokenizer("the cat sat")["input_ids"]]))
    )
    monkeypatch.chdir("graph")
    made: dict[str, object] = {}
    exec(code, made)
    model = open_embedder(load_model(tmp_path / "out", device="cpu"), tmp_path / "out", tokenizer)
    # Graphs pass within 1e-4 of the largest output.
    torch.testing.assert_close(torch.tensor(made["embedding"]), model.embed(["the cat sat"], 16)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ((), "ckpt-prune export dense --format gguf --dtype q8_0 -o OUT.gguf"),
        (
            ("--ratio", "0.9", "--set", "spaces.heads.ratio=0"),
            "ckpt-prune export dense --format gguf --dtype q8_0 -o OUT.gguf",
        ),
        (("--for", "vllm"), "ckpt-prune quantize dense --format int8 -o OUT"),
        (("--for", "onnxruntime"), "ckpt-prune export dense --dtype int8 -o OUT"),
        (("--target-flops", "60%"), None),
        (("--set", "export.dtype=int4"), None),
        (("--set", "export.dtype=fp16"), "ckpt-prune export dense --format gguf --dtype q8_0 -o OUT.gguf"),
        (("--recipe", "magnitude-50"), None),
    ],
)
@pytest.mark.usefixtures("any_tokenizer")
def test_the_command_that_loses_less_is_named(place, options, command):
    recipe = () if "--recipe" in options else ("--recipe", "magnitude")
    printed = json.loads(ok("prune", "dense", *recipe, *options, "--dry-run", "--json"))
    if command is None:
        assert printed["fewer_bits"] is None
    else:
        assert f"`{command}` takes about " in printed["fewer_bits"]


def test_the_size_of_a_file_is_told_with_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(files("ckpt_prune") / "demo" / "model")
    how = ("--recipe", "magnitude", "--ratio", "0.3", "--json")
    line = json.loads(ok("prune", model, *how, "-o", "out"))["fewer_bits"]
    ok("export", model, "--format", "gguf", "--dtype", "q8_0", "--no-validate", "-o", "OUT.gguf")
    assert f"-o OUT.gguf` takes about {human_bytes(Path('OUT.gguf').stat().st_size)}, this " in line


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize(("normalised", "form"), [(True, "--format gguf --dtype q8_0"), (False, "--dtype int8")])
def test_a_file_is_named_only_of_what_llama_cpp_computes(tmp_path, monkeypatch, normalised, form):
    """It divides the weights of the chosen experts by their sum, whatever the config says."""
    monkeypatch.chdir(tmp_path)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": normalised}
    save(Path("mixture"), "qwen3_moe", num_hidden_layers=2, head_dim=16, **experts)
    how = ("--recipe", "magnitude", "--ratio", "0.5", "--dry-run", "--json")
    line = json.loads(ok("prune", "mixture", *how))["fewer_bits"]
    assert f"`ckpt-prune export mixture {form} -o OUT" in line


@pytest.mark.usefixtures("any_tokenizer")
def test_four_bits_are_named_where_eight_are_too_many(place, monkeypatch):
    """In bfloat16 half of a model is what 8 bits take; where 4 are too many as well, pruning alone is left."""
    torch.manual_seed(0)
    load_model(Path("dense"), device="cpu").to(torch.bfloat16).save_pretrained("half")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"dense/{name}", "half")
    how = ("--recipe", "magnitude", "--for", "vllm", "--ratio", "0.5")
    with monkeypatch.context() as patched:
        patched.setattr(fewer_bits, "_EIGHT", 99)
        asked = json.loads(ok("prune", "half", *how, "--dry-run", "--json"))
    few = f"quantize half --format int4 --target-bytes {asked['after']['bytes']} --text FILE -o OUT` takes about"
    assert few in asked["fewer_bits"]
    for share, said in (("60%", "q8_0"), ("45%", "q4_k_m"), ("44%", None)):
        if said is None:
            monkeypatch.setattr(fewer_bits, "_FOUR", 7.5)
        how = ("--recipe", "magnitude", "--target-bytes", share)
        line = json.loads(ok("prune", "half", *how, "--dry-run", "--json"))["fewer_bits"]
        assert line is None if said is None else f"--dtype {said} " in line


def test_a_file_that_cannot_be_measured_is_complete_all_the_same(tmp_path, monkeypatch):
    """Only data that was named has to be measured."""
    made = Pruned(tmp_path, None, None, graph=SimpleNamespace(path=tmp_path / "model.gguf"))

    def fails(*_arguments):
        raise UserError("no text is left")

    monkeypatch.setattr(prune, "measure_file", fails)
    after = prune._measure(SimpleNamespace(model="m", evaluate=()), made, None, of_file=True)
    assert (after.evaluation, after.notices) == (None, (f"{tmp_path} was not measured: no text is left",))
    with pytest.raises(EvaluationFailedError, match=r"no text is left; .* is complete"):
        prune._measure(SimpleNamespace(model="m", evaluate=("text.txt",)), made, None, of_file=True)
