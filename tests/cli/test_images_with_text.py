"""`--data` of conversations with images, through the commands that take it, and what is refused."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ckpt_prune
from ckpt_prune.runner import prune_parts
from tests.cli.running import edit_weights, ok, read_json, read_refusal, run
from tests.talks import NEEDS, write_rows, write_talker

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


@pytest.mark.parametrize("model_type", [name for name, package in NEEDS.items() if find_spec(package) is None])
def test_a_package_that_a_processor_lacks_is_named(place: Path, model_type: str) -> None:
    write_rows(place)
    write_talker(place / "m", model_type)
    refused = read_refusal("calibrate", "m", "--part", "text", *DATA, "-o", "own")
    assert refused.startswith("m: its processor of images with text ")
    assert f"install {'the ' * (model_type == 'mistral3')}{NEEDS[model_type]}" in refused
    assert not Path("own").exists()


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
        "--data is of pairs, or of images with text, which dense does not read: give --text FILE"
    )
    Path("qwen/preprocessor_config.json").unlink()
    assert read_refusal(*prune) == (
        "qwen: no image processor (preprocessor_config.json); copy the model's preprocessor_config.json into the folder"
    )


def test_questions_with_answers(place: Path) -> None:
    """PaliGemma's tokens of a question attend to each other: each row is a window, and text alone is refused."""
    write_rows(place)
    write_talker(place / "pali", "paligemma")
    Path("t.txt").write_text("a cat and a dog")
    prune = ("prune", "pali", *RIDGE)
    assert read_refusal(*prune, "--text", "t.txt", "-o", "out") == (
        "pali: its prompts attend to later tokens as well, which a model of text alone does not do: give --data FILE, "
        "rows of images with their text, in place of --text"
    )
    assert read_refusal("export", "pali", "--format", "gguf", "-o", "out.gguf") == (
        "the text part of paligemma does not run by itself: its prompts attend to later tokens as well, which a model "
        "of text alone does not do"
    )
    ok(*prune, "--data", "rows.jsonl", "--samples", "6", "-o", "out")
    assert read_json("out/ckpt_prune.json")["calibration"]["windows"] == "6 of rows.jsonl with 10 images"
    assert "FAILED" not in ok("verify", "out", "--against", "pali")
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text().replace('"bot"', '"user"'))
    assert read_refusal(*prune, "--data", "rows.jsonl", "-o", "out2").endswith(
        "this model answers one question: a row has a user's message with an image, and one with the answer "
        '({"role": "assistant", "content": "…"})'
    )


TOWER = ("--vision-recipe", "corp-mlp", "--vision-ratio", "0.5")
ALL = ("prune", "llava", "--part", "all", *RIDGE[2:], *TOWER, *DATA)


@pytest.fixture
def both(place: Path) -> None:
    write_rows(place)
    write_talker(place / "llava", "llava")


@pytest.mark.usefixtures("both")
def test_tower_and_text_in_one_call() -> None:
    dry = ok(*ALL, "--dry-run")
    assert (dry.count("checked, nothing written"), Path("out").exists()) == (2, False)
    output = ok(*ALL, "-o", "out")
    assert output.index("of the vision part of this llava") < output.index("of the text part of this llava")
    assert output.count("written to out\n") == 1
    assert not Path("out.vision").exists()
    config = read_json("out/config.json")
    assert (config["vision_config"]["mlp_ratio"], config["text_config"]["intermediate_size"]) == (1, 11)
    report = read_json("out/ckpt_prune.json")
    assert (report["part"], report["source"]["name"]) == ("text", "llava")
    assert [other["part"] for other in report["others"]] == ["vision"]
    for folder, key in (("llava", "before"), ("out", "after")):
        assert report["whole"][key] == {
            "parameters": ckpt_prune.load(folder).num_parameters(),
            "bytes": sum(each.nbytes for each in load_file(f"{folder}/model.safetensors").values()),
            "cache": report[key]["cache"],
        }
    dried = json.loads(ok(*ALL, "--dry-run", "--json"))
    assert dried["whole"]["before"]["parameters"] == report["whole"]["before"]["parameters"]
    assert dried["whole"]["after"]["parameters"] == report["whole"]["after"]["parameters"]
    checked = ok("verify", "out", "--against", "llava")
    assert "FAILED" not in checked
    assert "kept units (vision): " in checked
    assert "tensors outside the text and vision parts are the dense model's, bit for bit\n" in checked
    assert "its text part pruned by recipe ridge, and its vision part by corp-mlp" in Path("out/README.md").read_text()
    ok("report", "out")
    assert "Units, vision part" in Path("out.report.html").read_text()

    def shift(tensors):
        (name, *_) = (name for name in tensors if "vision_tower" in name and name.endswith("mlp.fc1.weight"))
        tensors[name] += 1

    edit_weights("out", shift)
    checked = run("verify", "out", "--against", "llava").stdout
    assert re.search(r"^kept units \(vision\) +FAILED$", checked, re.MULTILINE)
    assert re.search(r"^kept units \(text\) +ok$", checked, re.MULTILINE)


@pytest.mark.usefixtures("both")
def test_parts_one_after_the_other_are_the_same() -> None:
    ok(*ALL, "-o", "out")
    vision = ("--part", "vision", "--recipe", "corp-mlp", "--ratio", "0.5", "--data", "rows.jsonl")
    assert run("prune", "llava", *vision, "-o", "tower").stderr.endswith(
        "tower was not measured: tower is no image classifier (LlavaForConditionalGeneration): --images does not go "
        "with it; measure it with --data FILE of conversations with images\n"
    )
    ok("prune", "tower", *RIDGE, *DATA, "-o", "whole")
    assert Path("whole/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()
    assert "FAILED" not in ok("verify", "whole", "--against", "llava")
    assert "FAILED" not in ok("verify", "whole", "--against", "tower")


@pytest.mark.usefixtures("both")
def test_a_stopped_run_goes_on_behind_the_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    prune, parts = prune_parts.prune_model, []

    def stop(options, *args, **kwargs):
        parts.append(options.part)
        if parts == ["vision", "text"]:
            raise KeyboardInterrupt
        return prune(options, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(prune_parts, "prune_model", stop)
        run(*ALL, "-o", "out")
    assert (Path("out.vision").is_dir(), Path("out").exists()) == (True, False)
    time = Path("out.vision/model.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_args, **_options: None)
        ok(*ALL, "-o", "out", "--resume")
    assert Path("out.vision/model.safetensors").stat().st_mtime_ns == time  # it was not made again
    ok(*ALL, "-o", "whole")
    assert Path("whole/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()


@pytest.mark.usefixtures("both")
def test_what_does_not_go_with_both_parts() -> None:
    assert read_refusal(*ALL, "--statistics", "own", "-o", "out") == (
        "--statistics is of one part: name it with --part vision or text"
    )
    assert read_refusal(*ALL[:4], "--recipe", "corp-qk", "--ratio", "0.5", *TOWER, *DATA, "-o", "out").startswith(
        "recipe corp-qk "
    )
    Path("llava/chat_template.jinja").unlink()
    assert read_refusal(*ALL, "-o", "out").startswith("llava has no chat template: ")
    assert not list(Path().glob("out*"))
