"""`recover --method scales`: factors multiplied into the weights, and how they are reported."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples import choose as choosing
from ckpt_prune.measure.samples.text import load_tokenizer, mix_windows, read_file, read_text, tokenise_text
from ckpt_prune.stages.recovery.training import SampleSplit
from tests.cli.running import TEXT, changed, ok, read_refusal, run
from tests.cli.test_recover import find_changed, linears, report_of, tensors
from tests.oracles.scales import divergence

SCALES = ("--dense", "dense", "--method", "scales", *changed(TEXT, "--samples", "32"), "--epochs", "3", "--batch", "4")
SCALES += ("--lr", "0.05", "--held-out", "0.1")
FEW = "there are fewer than 2 other samples than those that the model has seen: it is fitted to those again"
TRAINED = "Recovered by scales of the inputs and outputs of 14 linear modules, merged"


def told_divergence(folder: str, skip: int = 0, samples: int = 32) -> float:
    """Measure a folder's divergence from the dense model, loaded as anybody loads it, on the windows that are held out.

    Args:
        folder: where it is.
        skip: windows that it was pruned on, which are left out.
        samples: others.
    """
    stream = tokenise_text(load_tokenizer(Path(folder)), read_text([Path("calib.txt")]), bos="auto")
    windows = mix_windows([stream], samples=skip + samples, window=16, seed=0, choose="random")[0]
    pruned_on = mix_windows([stream], samples=skip, window=16, seed=0, choose="random")[0] if skip else windows[:0]
    windows = windows[~(windows[:, None] == pruned_on).all(-1).any(1)]
    assert len(windows) == samples
    windows = windows[SampleSplit.of(len(windows), 0.1).measured]
    with torch.no_grad():
        theirs, ours = (ckpt_prune.load(name, dtype=torch.float32)(windows).logits for name in ("dense", folder))
    return float(divergence([theirs.double()], [ours.double()], logits=True))


def test_zeros_stay_and_the_stored_model_has_the_divergence_that_is_said(place: Path):
    ok("prune", "dense", "--recipe", "magnitude-50", "-o", "masked")
    result = run("recover", "masked", *SCALES, "--evaluate-samples", "0", "-o", "out")
    assert result.exit_code == 0, result.output
    adapters = report_of("out")["adapters"]
    assert adapters["method"] == "scales"
    assert adapters["loss_before"] == pytest.approx(told_divergence("masked"), rel=1e-4)
    assert adapters["loss_after"] == pytest.approx(told_divergence("out"), rel=1e-4)
    assert adapters["loss_after"] < 0.97 * adapters["loss_before"]
    assert find_changed("out", "masked") == linears(0, 1)
    ours, theirs = tensors("out"), tensors("masked")
    for name in linears(0, 1):
        assert ((ours[name] == 0) == (theirs[name] == 0)).all(), name
        used = theirs[name] != 0
        ratio = torch.where(used, ours[name] / theirs[name].where(used, torch.ones(())), torch.nan)
        rows, columns = ratio.nanmean(1), ratio.nanmean(0)
        assert torch.isfinite(rows).all()
        assert torch.isfinite(columns).all()
    assert result.stdout.splitlines() == [
        "Scales",
        f"  {TRAINED}; 29 samples that it had not seen before, 3 epochs ({adapters['steps']} steps), "
        f"{adapters['parameters']} parameters; zeros stay zero.",
        f"  Divergence from the dense model on 3 held-out samples: {adapters['loss_before']:.4f} → "
        f"{adapters['loss_after']:.4f}.",
        "written to out",
    ]
    assert result.stderr == (
        "fitting scales of 2 blocks on 32 windows of 16 tokens, 3 of them held out, up to 3 epochs in steps of 4 at lr "
        "0.05\n"
    )
    assert "linear modules are the dense ones, bit for bit" in ok("verify", "out", "--against", "dense")
    card = Path("out/README.md").read_text()
    assert f"{TRAINED}; 29 samples that it had not seen before, 3 epochs" in card
    assert report_of("out")["recipe"]["name"] == "magnitude-50"


def test_where_there_is_nothing_to_fit_weights_stay(place: Path):
    done = run("recover", "dense", *SCALES, "-o", "out")
    assert done.exit_code == 0, done.output
    assert done.stderr.endswith("there is nothing to train: the loss is 0, and the weights stay as they are\n")
    assert find_changed("out", "dense") == set()
    adapters = report_of("out")["adapters"]
    assert (adapters["modules"], adapters["loss_after"]) == (0, adapters["loss_before"])
    card = Path("out/README.md").read_text()
    assert "Fitting scales was tried, and no epoch was better on 3 held-out samples" in card
    assert "and recovered" not in card


# ---- as a step of a recipe ---------------------------------------------------------------------------------------

STEP = ("--set", "recovery={method: scales, epochs: 3, batch: 4, lr: 0.05, held_out: 0.1}")


def test_scales_are_fitted_to_samples_that_it_was_not_pruned_on(place: Path):
    """Scales are fitted to samples that pruning did not use: the same in the recipe, after it and from statistics."""
    recipe = ("--recipe", "ridge", "--ratio", "0.5")
    ok("prune", "dense", *recipe, *TEXT, "-o", "plain")
    ok("prune", "dense", *recipe, "--statistics", "stats", "-o", "cached")
    after = ("--dense", "dense", "--method", "scales", *TEXT)
    used = report_of("plain")["calibration"]["data"]
    assert report_of("cached")["calibration"]["data"] == used
    digests = set()
    for out, job in {
        "a": ("recover", "plain", *after),
        "b": ("recover", "cached", *after),
        "c": ("prune", "dense", *recipe, *TEXT, "--set", "recovery.method=scales"),
        "d": (
            "prune",
            "dense",
            *recipe,
            "--statistics",
            "stats",
            *TEXT,
            "--set",
            "recovery.method=scales",
        ),
    }.items():
        done = run(*job, "-o", out)
        assert done.exit_code == 0, done.output
        assert "no other samples" not in done.stderr
        digests.add(report_of(out)["adapters"]["data"])
    assert len(digests) == 1
    assert used not in digests
    # Another seed may choose some of the same samples; its choice is left as it is.
    ok("recover", "plain", *after, "--seed", "3", "-o", "e")
    assert report_of("e")["adapters"]["data"] not in {*digests, used}


def test_scales_after_scales_take_others_again_and_both_are_told(place: Path):
    ok("prune", "dense", "--recipe", "ridge", "--ratio", "0.5", *TEXT, "--set", "recovery.method=scales", "-o", "one")
    after = ("--dense", "dense", "--method", "scales", *TEXT)
    output = ok("recover", "one", *after, "-o", "two")
    assert "; other samples may gain less: measure it by evaluate --against MODEL.\n" in output
    ok("recover", "two", *after, "--only", "mlp", "--held-out", "0.2", "-o", "three")
    last = report_of("three")["adapters"]
    records = [last, last["earlier"], last["earlier"]["earlier"]]
    assert "earlier" not in records[2]
    assert [{**record, "earlier": None} for record in records[1:]] == [
        {**report_of(out)["adapters"], "earlier": None} for out in ("two", "one")
    ]
    used = {report_of("one")["calibration"]["data"], *(record["data"] for record in records)}
    assert len(used) == 4
    card = Path("three/README.md").read_text()
    assert card.count("## Scales, before that\n") == 2
    ok("report", "three", "-o", "page.html")
    assert Path("page.html").read_text().count("<h2>Scales, before that</h2>") == 2
    # Earlier versions called the record lora.
    values = report_of("three")
    Path("three/ckpt_prune.json").write_text(json.dumps({"lora": values.pop("adapters")} | values))
    ok("report", "three", "-o", "old.html")
    assert Path("old.html").read_text() == Path("page.html").read_text()


def test_where_there_are_too_few_others_that_is_said(place: Path):
    there_are = len(tokenise_text(load_tokenizer(Path("dense")), read_text([Path("calib.txt")]), bos="auto")) // 16
    step = ("--set", "recovery.method=scales")
    beside_five = (
        f"calib.txt has 5 windows of 16 tokens beside the {there_are - 5} that the model has seen: all are used, not"
    )
    for others, samples, line in ((5, 5, beside_five), (1, there_are - 1, FEW)):
        data = ("--text", "calib.txt", "--window", "16", "--samples", str(there_are - others))
        done = run("prune", "dense", "--recipe", "ridge", "--ratio", "0.5", *data, *step, "-o", f"out-{others}")
        assert done.exit_code == 0, done.output
        assert line in done.stderr
        assert done.stderr.count(" that the model has seen") == 1
        assert report_of(f"out-{others}")["adapters"]["samples"] == samples
        card = Path(f"out-{others}/README.md").read_text()
        assert ("samples that it had seen before, 1 epoch" in card) == (samples != others)
        assert ("samples that it had not seen before, 1 epoch" in card) == (samples == others)


def test_a_text_that_fails_the_second_time_is_no_text_without_others(place: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise scales would be fitted to the pruning samples, and nothing would say why."""
    turns = itertools.count()

    def fails(file: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
        if next(turns):
            raise UserError(f"{file}: cannot be read: Input/output error")
        return read_file(file, tokenizer)

    monkeypatch.setattr(choosing, "read_file", fails)
    step = ("--set", "recovery.method=scales")
    message = read_refusal("prune", "dense", "--recipe", "ridge", "--ratio", "0.5", *TEXT, *step, "-o", "out")
    assert message == "calib.txt: cannot be read: Input/output error"


def test_a_dry_run_says_that_scales_are_fitted(place: Path):
    output = ok("prune", "dense", "--recipe", "ridge", *TEXT, *STEP, "-o", "out", "--dry-run")
    assert "to be recovered by scales: 2 of 2 blocks, 3 epochs on 8 samples\n" in output
    assert not Path("out").exists()


def test_a_plan_is_applied_with_its_scales(place: Path):
    output = ok(
        "plan", "dense", "--recipe", "ridge", "--statistics", "stats", "--ratio", "0.5", *STEP, "-o", "plan.json"
    )
    assert (
        "the recipe ends with recovery (scales), which these figures leave out: `prune --plan` asks for the samples "
        "that it takes\n"
    ) in output
    assert read_refusal("prune", "dense", "--plan", "plan.json", "-o", "out") == (
        "recipe ridge recovers on samples, beside any statistics: give --text"
    )
    ok("prune", "dense", "--plan", "plan.json", *TEXT, "-o", "out")
    ok("prune", "dense", "--recipe", "ridge", "--statistics", "stats", "--ratio", "0.5", *TEXT, *STEP, "-o", "whole")
    assert find_changed("out", "whole") == set()
