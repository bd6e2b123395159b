"""Tiny random vision language models with their processors, and conversations with images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.skeleton import quiet_transformers
from tests.contract.test_parts import CONFIGS
from tests.encoders import randomise
from tests.evaluation.tiny import tiny_tokenizer
from tests.images import write_image

WINDOW, ROWS = 64, 24
TEMPLATE = (
    "{{% for m in messages %}}{{{{ m['role'] }}}} {{% for c in m['content'] %}}{{% if c['type'] == 'image' %}}{mark}"
    "{{% else %}}{{{{ c['text'] }}}}{{% endif %}}{{% endfor %}}\n{{% endfor %}}"
)
QWEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SIDE = {"height": 12, "width": 12}
CROP = {"size": {"shortest_edge": 12}, "crop_size": SIDE}
PIXELS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 256}
PADDLE = PIXELS | {"temporal_patch_size": 1, "size": {"shortest_edge": 256, "longest_edge": 256}}
LLAVA = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
TILES = {"image_grid_pinpoints": [[12, 24], [24, 12]]}
WHOLE = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": False}
IDEFICS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
PIXTRAL = {"size": {"longest_edge": 16}, "patch_size": {"height": 8, "width": 8}}
PIXTRAL_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
SQUARE = {"size": {"height": 16, "width": 16}}
INTERN = {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
AYA = {"patch_size": 4, "img_size": 16, "downsample_factor": 2}
AYA_MARKS = ("<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL")

GEMMA4 = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}

READERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "gemma3": ("Gemma3", "Gemma3ImageProcessor", {"size": SIDE}, {"image_seq_length": 9}, ("<boi>", "<eoi>", "<img>")),
    "gemma4": ("Gemma4", "Gemma4ImageProcessor", GEMMA4, {}, ("<boi>", "<eoi>", "<img>", "<sound>", "<boa>", "<eoa>")),
    "paligemma": ("PaliGemma", "SiglipImageProcessor", {"size": SIDE, "image_seq_length": 9}, {}, ("<image>",)),
    "qwen2_5_vl": ("Qwen2_5_VL", "Qwen2VLImageProcessor", PIXELS, {}, QWEN),
    "paddleocr_vl": ("PaddleOCRVL", "PaddleOCRVLImageProcessor", PADDLE, {}, ("<image>", "<start>", "<end>")),
    "qwen3_vl": ("Qwen3VL", "Qwen2VLImageProcessor", PIXELS, {}, QWEN),
    "llava": ("Llava", "CLIPImageProcessor", CROP, LLAVA, ("<image>",)),
    "llava_next": ("LlavaNext", "LlavaNextImageProcessor", CROP | TILES, LLAVA, ("<image>",)),
    "idefics3": ("Idefics3", "Idefics3ImageProcessor", WHOLE, {"image_seq_len": 4}, IDEFICS),
    "smolvlm": ("SmolVLM", "SmolVLMImageProcessor", WHOLE, {"image_seq_len": 4}, IDEFICS),
    "qwen3_5": ("Qwen3VL", "Qwen2VLImageProcessor", PIXELS, {}, QWEN),
    "mistral3": (
        "Pixtral",
        "PixtralImageProcessor",
        PIXTRAL,
        {"patch_size": 4, "spatial_merge_size": 2},
        PIXTRAL_MARKS,
    ),
    "internvl": ("InternVL", "GotOcr2ImageProcessor", SQUARE, {"image_seq_length": 4}, (*INTERN.values(), "<video>")),
    "aya_vision": ("AyaVision", "GotOcr2ImageProcessor", SQUARE, AYA, AYA_MARKS),
}
"""model_type → names of processor and image processor, their settings, and tokens of their own, a mark for an image
first."""
NEEDS = {"smolvlm": "num2words", "mistral3": "torchvision"}
"""Packages that a processor's own module imports, and this package does not."""
MARKS = {
    "paddleocr_vl": "<start><image><end>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "aya_vision": "<image>",
    "gemma4": "<img>",
}
WINDOWS = {"gemma4": 160}
"""Tokens of a window where those of a conversation with two images do not fit into `WINDOW`."""
CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "llava": lambda config: {"vision_feature_select_strategy": "default"},
    "llava_next": lambda config: {"image_grid_pinpoints": TILES["image_grid_pinpoints"]},
    "idefics3": lambda config: {"scale_factor": 2, "vision_config": config["vision_config"] | {"image_size": 16}},
    "smolvlm": lambda config: {"scale_factor": 2, "vision_config": config["vision_config"] | {"image_size": 16}},
    "mistral3": lambda config: {"spatial_merge_size": 2, "vision_config": config["vision_config"] | {"image_size": 16}},
    "internvl": lambda config: {"vision_config": config["vision_config"] | {"image_size": [16, 16]}},
    "aya_vision": lambda config: {"vision_config": config["vision_config"] | {"image_size": 16}},
}


def write_talker(folder: Path, model_type: str) -> PreTrainedModel:
    """Save a vision language model of one kind with its processor, and return it."""
    name, images, settings, own, marks = READERS[model_type]
    tokenizer = tiny_tokenizer("<s> $A")
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    sounds = ("audio_token", "boa_token", "eoa_token")
    gemma = dict(zip(("boi_token", "eoi_token", "image_token", *sounds), marks, strict=False))
    named = dict.fromkeys(("gemma3", "gemma4"), gemma)
    named["paddleocr_vl"] = {"image_token": "<image>"}
    named["internvl"] = INTERN | {"video_token": "<video>"}
    kept = {"extra_special_tokens": named[model_type]} if model_type in named else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="<unk>", model_max_length=1024, **kept,
    )  # fmt: skip
    config = dict(CONFIGS[model_type])
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 4 * WINDOW}
    config["text_config"] = config["text_config"] | size
    image = tokenizer.convert_tokens_to_ids(marks[2] if named.get(model_type) is gemma else marks[0])
    key = "image_token_index" if model_type.startswith("llava") else "image_token_id"
    config |= {key: image} | CHANGES.get(model_type, lambda _: {})(config)
    if model_type == "gemma4":
        config["text_config"]["vocab_size_per_layer_input"] = len(tokenizer)
        config |= {"video_token_id": 5, "audio_token_id": 6}
    if model_type.startswith("qwen"):
        config["video_token_id"], config["vision_start_token_id"] = image + 1, image + 2
    parsed = AutoConfig.for_model(model_type, **config)
    model: PreTrainedModel = getattr(transformers, load_composite(parsed.to_dict()).architecture)(parsed).eval()
    randomise(model, 7)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if model_type != "paligemma":
        (folder / "chat_template.jinja").write_text(TEMPLATE.format(mark=MARKS.get(model_type, marks[0])))
    pixels = {"image_processor_type": images, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": f"{name}Processor", **own}))
    return model


def write_rows(folder: Path, count: int = ROWS) -> Path:
    """Write conversations, most with an image or two, and their images; return the file."""
    rows = []
    for number in range(count):
        images = [{"type": "image", "path": f"images/{number}-{place}.png"} for place in range(number % 3)]
        for place, image in enumerate(images):
            write_image(folder / image["path"], 10 * number + place, (16 + number % 2, 16))
        say = {"type": "text", "text": f"what is in picture {number}"[: 8 + number % 11]}
        answer = "a cat and a dog on a mat"[: 6 + (7 * number) % 18]
        rows.append({"messages": [{"role": "user", "content": [*images, say]}, {"role": "bot", "content": answer}]})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
