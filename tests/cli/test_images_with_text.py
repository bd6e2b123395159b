"""`--data` of conversations with images, through the commands that take it, and what is refused."""

import json
from pathlib import Path

import pytest

import ckpt_prune
from tests.cli.running import ok, read_json, read_refusal
from tests.talks import write_rows, write_talker

DATA = ("--data", "rows.jsonl", "--window", "64", "--samples", "4")
RIDGE = ("--part", "text", "--recipe", "ridge", "--ratio", "0.5", "--set", "spaces.mlp.compensation.lambda=0.1")


@pytest.fixture
def qwen(place: Path) -> Path:
    write_rows(place)
    write_talker(place / "qwen", "qwen3_vl")
    return place


def test_pruned_verified_and_measured(qwen: Path) -> None:
    output = ok("prune", "qwen", *RIDGE, *DATA, "-o", "out")
    assert "text part of this qwen3_vl: it is calibrated on images with their text\n" in output
    assert "2 windows of 64 tokens of rows.jsonl that it was not calibrated on" in output
    data = read_json("out/ckpt_prune.json")["calibration"]
    assert (data["modality"], data["windows"].partition(" with ")[0]) == ("image-text", "4 of rows.jsonl")
    assert "FAILED" not in ok("verify", "out", "--against", "qwen")
    result = json.loads(ok("evaluate", "out", "--against", "qwen", "--data", "rows.jsonl", "--window", "64", "--json"))
    assert result["kl"] > 0
    assert result["tokens"] < result["windows"] * 63  # those of images are not counted
    model = ckpt_prune.load("out")
    assert model.config.text_config.intermediate_size == 11


def test_measured_once(qwen: Path) -> None:
    ok("calibrate", "qwen", "--part", "text", *DATA, "-o", "own")
    assert read_json("own/statistics.json")["modality"] == "image-text"
    output = ok("prune", "qwen", *RIDGE, "--statistics", "own", "-o", "out")
    assert "it is calibrated on images with their text\n" in output


def test_what_cannot_be_read_is_refused(qwen: Path) -> None:
    prune = ("prune", "qwen", *RIDGE, *DATA, "-o", "out")
    with Path("rows.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": [{"type": "image", "path": "no.png"}]}]}\n')
    assert read_refusal(*prune) == (
        "rows.jsonl, line 25, message 1: no image no.png; images are files, named relative to the file of rows"
    )
    Path("rows.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    assert read_refusal(*prune).startswith("rows.jsonl: no row has an image; each is {")
    Path("rows.jsonl").write_text('{"text": "hello"}\n')
    assert read_refusal(*prune).startswith("rows.jsonl, line 1: no messages; each row must be {")
    write_rows(Path(), 24)
    short = ("prune", "qwen", *RIDGE, "--data", "rows.jsonl", "--window", "16", "-o", "out")
    assert read_refusal(*short).endswith(
        "up to the end of its last image, and a window has 16: say a longer --window, or leave the row out"
    )
    long = ("prune", "qwen", *RIDGE, "--data", "rows.jsonl", "--window", "256", "-o", "out")
    write_rows(Path(), 3)
    assert read_refusal(*long) == (
        "rows.jsonl: 3 rows fill no window of 256 tokens: give more, or say a shorter --window"
    )
    assert read_refusal("prune", "dense", "--data", "rows.jsonl", "-o", "out") == (
        "--data is for --part text of a vision language model, which dense is not opened as"
    )
    Path("qwen/preprocessor_config.json").unlink()
    assert read_refusal(*prune) == (
        "qwen: no image processor (preprocessor_config.json); copy the model's preprocessor_config.json into the folder"
    )
