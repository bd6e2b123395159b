"""`--part`: one model inside another, through every command that takes it, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file
from transformers import LlavaForConditionalGeneration

import ckpt_prune
from ckpt_prune.model import composites
from ckpt_prune.model.skeleton import quiet_transformers
from tests.cli.running import TEXT, edit_weights, ok, read_json, read_refusal, run
from tests.contract.test_parts import PartCase
from tests.evaluation.tiny import tiny_tokenizer

NOTE = (
    "all figures are of the text part of this llava: it is calibrated on text alone: what its blocks see of images "
    "plays no part in what goes; --data FILE calibrates it on both\n"
)
RIDGE = ["prune", "llava", "--part", "text", "--recipe", "ridge", "--ratio", "0.5", *TEXT]


def save(model_type: str) -> None:
    with quiet_transformers():
        PartCase(model_type, "text", ()).model.save_pretrained(model_type)
    tiny_tokenizer("<s> $A").save_pretrained(model_type)


@pytest.fixture
def llava(place: Path) -> None:
    save("llava")


def changes(before: dict, after: dict, inside: str = "") -> dict:
    """Keys whose values differ, dotted → the new value, without those that outputs state for older versions."""
    differences = {}
    for key in sorted(before.keys() | after.keys()):
        a, b = before.get(key), after.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            differences |= changes(a, b, f"{inside}{key}.")
        elif a != b:
            differences[inside + key] = b
    return {key: value for key, value in differences.items() if not key.endswith((".rope_theta", ".rope_scaling"))}


def test_the_text_part_is_pruned_in_place(llava):
    output = ok(*RIDGE, "-o", "out")
    assert NOTE in output
    assert changes(read_json("llava/config.json"), read_json("out/config.json")) == {
        "text_config.intermediate_size": 11,
        "text_config.num_attention_heads": 2,
        "text_config.num_key_value_heads": 1,
    }
    assert type(ckpt_prune.load("out")) is LlavaForConditionalGeneration
    checked = ok("verify", "out", "--against", "llava")
    assert "load: LlavaForConditionalGeneration by stock transformers: no key missing, unexpected" in checked
    assert "other parts: 47 tensors outside the text part are the dense model's, bit for bit\n" in checked
    assert "# llava, its text part pruned by recipe ridge\n" in Path("out/README.md").read_text()
    report = json.loads(ok("evaluate", "out", "--against", "llava", "--text", "calib.txt", "--window", "16", "--json"))
    assert report["perplexity"] > 1


def test_measured_once_and_planned(llava):
    ok("calibrate", "llava", "--part", "text", *TEXT, "-o", "own")
    recipe = ("--recipe", "wanda-sp", "--ratio", "0.5")
    ok("plan", "llava", "--part", "text", "--statistics", "own", *recipe, "-o", "plan.json")
    assert NOTE in ok("prune", "llava", "--part", "text", "--plan", "plan.json", "-o", "planned")
    ok("prune", "llava", "--part", "text", "--statistics", "own", *recipe, "-o", "out")
    names = [path.name for path in Path("out").glob("*.safetensors")]
    assert names
    assert all(Path("out", name).read_bytes() == Path("planned", name).read_bytes() for name in names)
    other = read_refusal("prune", "llava", "--part", "vision", "--statistics", "own", *recipe, "-o", "other")
    assert "own" in other


def test_another_part_that_was_changed_is_noticed(llava):
    ok(*RIDGE, "-o", "out")
    shutil.copytree("llava", "other")

    def shift(tensors):
        tensors["multi_modal_projector.linear_1.bias"] += 1

    edit_weights("other", shift)
    assert read_refusal("verify", "out", "--against", "other") == "out was not made from other: its report names llava"
    edit_weights("out", shift)
    assert "other parts: multi_modal_projector.linear_1.bias is not the dense model's\n" in run_verify()


def run_verify() -> str:
    result = run("verify", "out", "--against", "llava")
    assert result.exit_code == 1
    return result.stdout


def test_biases_where_the_whole_has_slots_for_them(llava):
    ok(*RIDGE[:4], "--recipe", "flap", "--ratio", "0.5", *TEXT, "-o", "out")
    changed = changes(read_json("llava/config.json"), read_json("out/config.json"))
    assert (changed["text_config.attention_bias"], changed["text_config.mlp_bias"]) == (True, True)
    assert "FAILED" not in ok("verify", "out", "--against", "llava")
    assert "language_model.model.layers.0.mlp.down_proj.bias" in load_file("out/model.safetensors")


def test_a_tower_of_no_known_family_is_found_by_its_class_and_a_class_without_slots_is_refused(place):
    save("gemma3")
    assert read_refusal("prune", "gemma3", "--part", "text", "--recipe", "flap", *TEXT, "-o", "out").startswith(
        "no stock class fits: gemma3_text has no slot for a bias on "
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composites, "known_families", lambda: ())
        assert "outputs of a small random model, " in ok("inspect", "gemma3", "--part", "vision")


def test_recovered_and_compared_in_place(llava):
    ok(*RIDGE, "-o", "small")
    ok("recover", "small", "--dense", "llava", "--part", "text", *TEXT, "--epochs", "1", "-o", "whole")
    assert read_json("whole/config.json") == read_json("small/config.json")
    checked = ok("verify", "whole", "--against", "llava")
    assert "FAILED" not in checked
    assert "other parts: 47 tensors outside the text part are the dense model's, bit for bit\n" in checked
    output = ok("compare", "llava", "whole", "--part", "text", *TEXT)
    assert output.startswith("block ")
    assert output.endswith("nats, mean over 8 samples of 16 tokens\n")


def test_a_tower_that_reads_patches_is_pruned_on_images(place: Path) -> None:
    with quiet_transformers():
        PartCase("qwen2_5_vl", "vision", ()).model.save_pretrained("qwen")
    settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 256}
    Path("qwen/preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", **settings})
    )
    photos = place / "photos"
    photos.mkdir()
    for seed in range(6):
        Image.effect_noise((16, 16), 10 + 10 * seed).save(photos / f"{seed}.png")
    prune = ("prune", "qwen", "--part", "vision", "--recipe", "corp-mlp", "--ratio", "0.25", "--images", "photos")
    assert "kept per block: mlp 18/24" in ok(*prune, "-o", "out")
    assert changes(read_json("qwen/config.json"), read_json("out/config.json")) == {
        "vision_config.intermediate_size": 18
    }
    assert "kept units" in ok("verify", "out", "--against", "qwen")
    Image.effect_noise((8, 32), 40).save(photos / "wide.png")
    assert "kept per block: mlp 18/24" in ok(*prune, "-o", "out2")
