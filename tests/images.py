"""Folders of generated images and tiny random vision checkpoints, made on the spot."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

SIZE = 8
CLASSES = ("n01 tench", "n02 great white shark", "n03 great grey owl", "n04 crane", "n05 crane", "n06 cup")
ID2LABEL = dict(enumerate(CLASSES))
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.2)
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": SIZE, "width": SIZE},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": MEAN,
    "image_std": STD,
}


def tiny_vit(seed: int = 0, classes: int = len(CLASSES), **changes) -> ViTForImageClassification:
    """Two layers on four patches; logits far enough from zero for figures to differ."""
    names = {i: CLASSES[i] if i < len(CLASSES) else f"class {i}" for i in range(classes)}
    config = ViTConfig(
        **{
            "image_size": SIZE,
            "patch_size": 4,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "initializer_range": 0.5,
            "id2label": names,
            "label2id": {name: i for i, name in names.items()},
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = ViTForImageClassification(config).eval()
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    return model


def write_processor(folder: Path, **changes) -> Path:
    """A preprocessor_config.json; a change to None leaves the key out."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {key: value for key, value in {**PROCESSOR, **changes}.items() if value is not None}
    (folder / "preprocessor_config.json").write_text(json.dumps(described))
    return folder


def write_vit(folder: Path, seed: int = 0, **changes) -> Path:
    """A checkpoint folder with its image processor."""
    tiny_vit(seed, **changes).save_pretrained(folder)
    return write_processor(folder)


def write_image(path: Path, seed: int = 0, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Path:
    """Noise in the format the suffix names, (width, height) `size`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colours = Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * size[0] * size[1]))
    colours.convert(mode).save(path)
    return path


def write_images(folder: Path, names: Iterable[str]) -> list[Path]:
    """An image for each name, all different."""
    return [write_image(folder / name, seed) for seed, name in enumerate(names)]


def write_csv(path: Path, *rows: str) -> Path:
    """A CSV of these lines, the header first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path
