"""Text parts and towers of models that are made of several, found in their stock classes."""

import warnings

import pytest
from transformers import CONFIG_MAPPING

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.composites import Composite, extract_part
from ckpt_prune.model.discovery.discover import discover
from ckpt_prune.model.discovery.parts import find_composite
from tests.refusals import refusal
from tools.families import write_tiny


def found(model_type: str) -> Composite:
    with warnings.catch_warnings(action="ignore"):
        values = CONFIG_MAPPING[model_type]().to_dict()
    return Composite.model_validate(find_composite(values | {"model_type": model_type}))


@pytest.mark.parametrize(
    ("model_type", "modules"),
    [
        ("gemma3", {"model.language_model": "model", "lm_head": "lm_head"}),
        ("qwen3_5_moe", {"model.language_model": "model", "lm_head": "lm_head"}),
        ("smolvlm", {"model.text_model": "model", "lm_head": "lm_head"}),
        ("llama4", {"language_model": ""}),
        ("modernvbert", {"model.text_model": ""}),  # its head is its own
        ("paddleocr_vl", {"model.language_model": ""}),  # no Auto class loads it alone
    ],
)
def test_modules_of_a_text_part_are_found_by_their_classes(model_type, modules):
    assert found(model_type).parts["text"].modules == modules


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("gemma3", "model.vision_tower"),
        ("idefics2", "model.vision_model"),
        ("qwen3_vl", "model.visual"),
        ("vision-encoder-decoder", "encoder"),
        ("git", "git.image_encoder"),
    ],
)
def test_towers_are_found_by_their_configs(model_type, module):
    assert found(model_type).parts["vision"].modules == {module: ""}


def test_what_has_no_tower_says_so():
    values = CONFIG_MAPPING["gemma4_unified"]().to_dict() | {"vision_config": {"patch_size": 4}}
    parts = Composite.model_validate(find_composite(values))
    assert parts.refused == {"vision": "no model with a class of its own reads images in it"}


@pytest.mark.parametrize(
    ("model_type", "part", "reason"),
    [
        (
            "video_llava",
            "vision",
            "model.video_tower and model.image_tower have one config, and would have to keep as many units",
        ),
        (
            "florence2",
            "vision",
            "it has blocks in 4 stages of their own widths, and stages inside a part are not pruned",
        ),
        (
            "vision-encoder-decoder",
            "text",
            "its blocks read what the tower makes of an image, and no pairs of an image and its text are read",
        ),
    ],
)
def test_parts_that_cannot_be_pruned_say_why(model_type, part, reason):
    assert found(model_type).refused == {part: reason}


def test_experts_that_files_number_in_one_list_with_others_cannot_be_taken_apart(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        whole = Checkpoint.open(write_tiny("ernie4_5_vl_moe", None, tmp_path))
    block = "model.language_model.layers.1.mlp"
    assert refusal(extract_part, whole, "text") == (
        f"--part text of ernie4_5_vl_moe cannot be pruned: its files number the experts of {block}.text_moe.experts "
        f"and {block}.vision_moe.experts in one list (model.layers.1.mlp.experts.0.down_proj.weight), which cannot be "
        "taken apart; --part vision can be pruned"
    )


@pytest.mark.parametrize("find", [find_composite, discover])
def test_a_whole_inside_another_is_named(find):
    inner = {"model_type": "qwen2_5_omni_thinker", "text_config": {}}
    assert refusal(find, {"model_type": "qwen2_5_omni", "thinker_config": inner}) == (
        "the model of a qwen2_5_omni that reads text and images stands in its thinker_config: save that alone, by "
        "transformers.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(MODEL).save_pretrained(OUT), beside "
        "it the tokenizer and processor, and prune OUT"
    )


def test_a_model_of_one_part_is_refused():
    with pytest.raises(UserError, match="which a llama is not"):
        find_composite({"model_type": "llama"})
