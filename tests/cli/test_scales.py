"""`recover --method scales`: factors multiplied into the weights, and what is said of them."""

import signal
from pathlib import Path

import pytest
import torch

import ckpt_prune
from ckpt_prune.calibration.text import calibration_windows, load_tokenizer, read_text, token_stream
from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.recovery.training import Split
from tests.cli.running import TEXT, ok, refused, run
from tests.cli.test_recover import changed, linears, report_of, tensors
from tests.images import write_images, write_vit
from tests.oracles.scales import divergence

SCALES = ("--dense", "dense", "--method", "scales", *TEXT, "--samples", "32", "--epochs", "3", "--lr", "0.05")


def told_divergence(folder: str) -> float:
    """Of a folder as anybody loads it from the dense model, on the windows that are held out."""
    stream = token_stream(load_tokenizer(Path(folder)), read_text([Path("calib.txt")]), bos="auto")
    windows = calibration_windows(stream, samples=32, window=16, seed=0, choose="random")
    windows = windows[Split.of(len(windows), 0.1).measured]
    with torch.no_grad():
        theirs, ours = (ckpt_prune.load(each, dtype=torch.float32)(windows).logits for each in ("dense", folder))
    return float(divergence([theirs.double()], [ours.double()], logits=True))


def test_zeros_stay_and_the_stored_model_has_the_divergence_that_is_said(place: Path):
    ok("prune", "dense", "--recipe", "magnitude-50", "-o", "masked")
    said = run("recover", "masked", *SCALES, "-o", "out")
    assert said.exit_code == 0, said.output
    told = report_of("out")["lora"]
    assert told["method"] == "scales"
    assert told["loss_before"] == pytest.approx(told_divergence("masked"), rel=1e-4)
    assert told["loss_after"] == pytest.approx(told_divergence("out"), rel=1e-4)
    assert told["loss_after"] < 0.97 * told["loss_before"]
    assert changed("out", "masked") == linears(0, 1)
    ours, theirs = tensors("out"), tensors("masked")
    for name in linears(0, 1):
        assert ((ours[name] == 0) == (theirs[name] == 0)).all(), name
        used = theirs[name] != 0
        ratio = torch.where(used, ours[name] / theirs[name].where(used, torch.ones(())), torch.nan)
        rows, columns = ratio.nanmean(1), ratio.nanmean(0)
        assert torch.isfinite(rows).all()
        assert torch.isfinite(columns).all()
    assert said.stdout.splitlines() == [
        f"{told['parameters']} scales of inputs and outputs, {told['steps']} steps, 3.0 epochs of 32 samples in "
        f"{told['seconds']:.1f} s",
        "14 modules have new weights; zeros stay zero",
        f"divergence from the dense model on 3 held-out samples {told['loss_before']:.4f} -> {told['loss_after']:.4f}",
        "written to out",
    ]
    assert said.stderr == (
        "fitting scales of 2 blocks on 32 windows of 16 tokens, 3 of them held out, up to 3 epochs in steps of 4 at lr "
        "0.05\n"
    )
    assert "linear modules are the dense ones, bit for bit" in ok("verify", "out", "--against", "dense")
    card = Path("out/README.md").read_text()
    assert "Recovered by scales of the inputs and outputs of 14 linear modules, merged; 32 samples, 3 epochs" in card
    assert report_of("out")["recipe"]["name"] == "magnitude-50"


def test_the_same_run_gives_the_same_bytes(place: Path):
    for out in ("a", "b"):
        ok("recover", "pruned", *SCALES, "--batch", "8", "--accumulate", "2", "-o", out)
    assert changed("a", "b") == set()
    assert report_of("a")["job"] == report_of("b")["job"]
    ok("recover", "pruned", *SCALES, "--batch", "8", "--seed", "1", "-o", "c")
    assert changed("c", "a") == linears(0, 1)


def test_outputs_with_code_of_their_own_and_rotated_ones(place: Path):
    how = ("--statistics", "stats", "--ratio", "0.5", "--container", "remote")
    ok("prune", "dense", "--recipe", "rcpu", *how, "-o", "own")
    ok("prune", "dense", "--recipe", "wanda-50", "--set", "rotation={kind: per-layer, steps: 2}", *TEXT, "-o", "turned")
    for source in ("own", "turned"):
        ok("recover", source, *SCALES, "--held-out", "0", "-o", f"{source}-out")
        told = report_of(f"{source}-out")["lora"]
        assert told["modules"] == 14
        assert told["loss_after"] < told["loss_before"]
        assert told["loss_after"] == pytest.approx(told_divergence(f"{source}-out"), rel=1e-4)


def test_an_image_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_vit(Path("vit"))
    write_images(Path("pictures"), [f"{index}.png" for index in range(12)])
    ok("prune", "vit", "--recipe", "magnitude-50", "-o", "less")
    images = ("--dense", "vit", "--method", "scales", "--images", "pictures", "--epochs", "4", "--lr", "0.02")
    ok("recover", "less", *images, "--held-out", "0", "-o", "out")
    told = report_of("out")["lora"]
    assert (told["window"], told["samples"]) == (None, 12)
    assert told["loss_after"] < told["loss_before"]


def test_where_nothing_is_gained_weights_stay(place: Path):
    done = run("recover", "dense", *SCALES, "-o", "out")
    assert done.exit_code == 0, done.output
    assert done.stderr.endswith(
        "no epoch was better than the model as it was, at lr 0.05: the weights stay as they are; try a smaller --lr, "
        "or more samples\n"
    )
    assert changed("out", "dense") == set()
    told = report_of("out")["lora"]
    assert (told["modules"], told["loss_after"]) == (0, told["loss_before"])
    card = Path("out/README.md").read_text()
    assert "Fitting scales was tried, and no epoch was better on 3 held-out samples" in card


def test_a_rate_that_destroys_the_model_is_not_kept_where_nothing_is_held_out(place: Path):
    done = run("recover", "dense", *SCALES[:-2], "--lr", "1000", "--held-out", "0", "-o", "out")
    assert done.exit_code == 0, done.output
    assert "at lr 1000: the weights stay as they are" in done.stderr
    assert changed("out", "dense") == set()
    told = report_of("out")["lora"]
    assert (told["measured"], told["modules"], told["loss_after"]) == (3, 0, told["loss_before"])


def test_page_and_card_say_the_same(place: Path):
    ok("recover", "pruned", *SCALES, "--held-out", "0", "-o", "out")
    ok("report", "out", "-o", "page.html")
    told = report_of("out")["lora"]
    said = (
        "Recovered by scales of the inputs and outputs of 14 linear modules, merged; 32 samples, 3 epochs; zeros stay "
        "zero. Divergence from the dense model on 3 samples of those it was trained on, before -&gt; after: "
        f"{told['loss_before']:.4g} -&gt; {told['loss_after']:.4g}."
    )
    page = Path("page.html").read_text()
    assert said in page
    assert "and recovered" in page
    assert said.replace("&gt;", ">") in Path("out/README.md").read_text()


@pytest.mark.parametrize("words", ["--rank 4", "--alpha 2", "--seconds 5"])
def test_options_of_adapters_are_refused(place: Path, words: str):
    for method in ("scales", "laco"):
        said = refused("recover", "pruned", "--dense", "dense", "--method", method, *TEXT, *words.split(), "-o", "out")
        assert said == f"{words.split()[0]} is for --method lora"


@pytest.mark.parametrize("words", ["--resume", "--perplexity-after 1", "--norms", "--teacher pruned"])
def test_what_it_does_not_do_is_refused(place: Path, words: str):
    said = refused("recover", "pruned", *SCALES, *words.split(), "-o", "out")
    name = words if words.startswith("--teacher") else words.split()[0]
    assert said == f"{name} is for --method laco: scales trains the pruned model as a whole"


def test_it_needs_the_dense_model(place: Path):
    said = refused("recover", "pruned", *SCALES[2:], "-o", "out")
    assert said.startswith("recover needs --dense MODEL, the model that PRUNED was made from")


def test_what_is_interrupted_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CheckpointWriter, "commit", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert run("recover", "pruned", *SCALES, "--epochs", "1", "-o", "out").exit_code == 130
    assert not Path("out.partial").exists()
    assert not Path("out").exists()
