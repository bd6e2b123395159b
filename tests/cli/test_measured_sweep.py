"""`plan --sweep` of what no plan says, and of what is calibrated anew: each value is pruned and measured."""

import json
from typing import Any

import pytest

from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.running import listing, ok, read_refusal
from tests.images import CLASSES, write_csv, write_images, write_vit

HELD_OUT = ("--evaluate", "calib.txt", "--window", "16", "--evaluate-samples", "4")
TRAIN = ("--text", "calib.txt", "--samples", "4")


def by_hand(model: str, *how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report of a prune, and what its output has on the held-out text."""
    report = json.loads(ok("prune", model, *how, "-o", "by-hand", "--overwrite", "--json"))
    measured = ("--against", model, "--text", "calib.txt", "--window", "16", "--samples", "4")
    return report, json.loads(ok("evaluate", "by-hand", *measured, "--json"))


def swept(model: str, *how: str) -> tuple[list[str], dict[str, Any]]:
    """The table of a sweep, and its JSON, which leave nothing behind."""
    before = listing()
    rows, sweep = ok("plan", model, *how).splitlines(), json.loads(ok("plan", model, *how, "--json"))
    assert listing() == before
    return rows, sweep


def test_calibration_samples(place):
    """A sweep of samples prunes from text at every value, even by a recipe whose errors a plan could predict."""
    how = ("--recipe", "ridge", "--set", "ratio=0.5", "--text", "calib.txt", "--window", "16")
    rows, sweep = swept("dense", *how, "--sweep", "samples=2,8", "--evaluate", "calib.txt", "--evaluate-samples", "4")
    assert rows[0].split()[:1] == ["samples"]
    assert [row.split()[0] for row in rows[1:3]] == ["2", "8"]
    for point in sweep["points"]:
        report, alone = by_hand("dense", *how, "--samples", str(point["samples"]))
        errors = [site["error_held_out"] for site in report["sites"] if site["space"] == "mlp"]
        assert point["errors"]["mlp"] == pytest.approx(sum(errors) / len(errors))
        assert point["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-9)
    first, second = sweep["points"]
    assert first["errors"] != second["errors"]


def test_the_strength_of_both_spaces_together(place):
    """The papers' curves of test perplexity over λ: one λ in every space at each point."""
    keys = [f"spaces.{space}.compensation.lambda" for space in ("heads", "mlp")]
    how = ("--recipe", "ridge", "--set", "ratio=0.5", *TRAIN, "--window", "16")
    evaluated = ("--evaluate", "calib.txt", "--evaluate-samples", "4")
    rows, sweep = swept("dense", *how, "--sweep", f"{','.join(keys)}=0.001,10", *evaluated)
    assert rows[0].split()[0] == ",".join(keys)
    for point, strength in zip(sweep["points"], (0.001, 10), strict=True):
        assert [point[key] for key in keys] == [strength, strength]
        settings = [part for key in keys for part in ("--set", f"{key}={strength}")]
        _, alone = by_hand("dense", *how, *settings)
        assert point["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-9)
    assert sweep["points"][0]["perplexity"] != sweep["points"][1]["perplexity"]


def test_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with quiet_transformers():
        write_vit(tmp_path / "vit")
    names = [f"{index:02}.png" for index in range(12)]
    write_images(tmp_path / "images", names)
    rows = [f"{name},{CLASSES[index % len(CLASSES)]}" for index, name in enumerate(names)]
    write_csv(tmp_path / "images" / "labels.csv", "file,label", *rows)
    data = ("--images", "images", "--samples", "8")
    how = ("--recipe", "corp-mlp", *data, "--evaluate", "images", "--sweep", "spaces.mlp.ratio=0.25,0.75")
    table, sweep = swept("vit", *how)
    ok("prune", "vit", "--recipe", "corp-mlp", "--set", "spaces.mlp.ratio=0.75", *data, "-o", "out")
    alone = json.loads(ok("evaluate", "out", "--against", "vit", "--images", "images", "--json"))
    assert table[0].split()[-2:] == ["KL", "top-1"]
    last = sweep["points"][1]
    assert last["kl"] == pytest.approx(alone["kl"], rel=1e-9)
    assert last["top1"] == alone["top1"]
    assert table[2].split()[-2:] == [f"{alone['kl']:.4f}", f"{alone['top1']:.1%}"]
    assert sweep["measured"] == f"top-1 (dense: {alone['against']['top1']:.1%}) and KL on 12 images"


def test_all_values_are_checked_before_the_first_is_pruned(place, monkeypatch):
    monkeypatch.setattr("ckpt_prune.runner.prune.run_job", lambda *_a, **_k: pytest.fail("pruned"))
    how = ("--recipe", "shortgpt", *TRAIN, *HELD_OUT, "--sweep", "depth.drop=1,9")
    assert "9" in read_refusal("plan", "dense", *how)
