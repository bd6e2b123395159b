"""`evaluate --depth` and `--segmentation`: against transformers' own read-out and definitions taken pixel by pixel."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    DPTImageProcessorPil,
    PreTrainedModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SegformerImageProcessorPil,
)

from ckpt_prune.evaluation.label_maps import LabelMaps
from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.running import ok, read_json, read_refusal, set_config
from tests.contract.test_parts import DEPTH
from tests.oracles.dense_labels import miou

COUNT, WIDE, HIGH, CLASSES = 3, 20, 14, 4
SIZE = {"height": 16, "width": 16}
DEPTHS = ("--images", "pictures", "--depth", "maps")
LABELS = ("--images", "pictures", "--segmentation", "maps")


def depth_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    settings = {"reassemble_hidden_size": 16, "patch_size": 4, "depth_estimation_type": "metric", "max_depth": 2}
    model = DepthAnythingForDepthEstimation(DepthAnythingConfig(**DEPTH, **settings))
    torch.nn.init.normal_(model.head.conv3.weight, std=2)  # so that it tells pixels apart
    return model


def segmenter(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"hidden_sizes": [8, 8], "depths": [1, 1], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]}
    more = {"num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2]}
    model = SegformerForSemanticSegmentation(
        SegformerConfig(**sizes, **more, decoder_hidden_size=8, num_labels=CLASSES)
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.5)  # so that it tells pixels apart
    model.decode_head.batch_norm.running_mean.uniform_(-1, 1)
    return model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with quiet_transformers():
        for name, seed in (("depth", 0), ("other-depth", 1)):
            depth_model(seed).save_pretrained(name)
            DPTImageProcessorPil(size=SIZE, do_rescale=True, do_normalize=True).save_pretrained(name)
        for name, seed in (("labels", 0), ("other-labels", 1)):
            segmenter(seed).save_pretrained(name)
            SegformerImageProcessorPil(size=SIZE, do_reduce_labels=False).save_pretrained(name)
    Path("pictures").mkdir()
    Path("maps").mkdir()
    generator = np.random.default_rng(0)
    for n in range(COUNT):
        quarters = np.kron(generator.integers(0, 256, (2, 2, 3)), np.ones((HIGH // 2, WIDE // 2, 1)))
        Image.fromarray(quarters.astype(np.uint8)).save(f"pictures/{n}.png")
    return tmp_path


def write_maps(values: list[np.ndarray]) -> None:
    for n, own in enumerate(values):
        Image.fromarray(own).save(f"maps/{n}.png")


def read_out(name: str, kind: type[PreTrainedModel], processor: Any, method: str) -> list[torch.Tensor]:
    """What transformers tells of each picture at its size, one picture after the other."""
    with quiet_transformers():
        model, own = kind.from_pretrained(name).eval(), processor.from_pretrained(name)
    told = []
    for n in range(COUNT):
        inputs = own(images=Image.open(f"pictures/{n}.png"), return_tensors="pt")
        with torch.no_grad():
            (plane,) = getattr(own, method)(model(**inputs), target_sizes=[(HIGH, WIDE)])
        told.append(plane["predicted_depth"] if isinstance(plane, dict) else plane)
    return told


def measure(*args: str) -> dict[str, Any]:
    return json.loads(ok("evaluate", *args, "--json"))


def test_depth_equals_the_definitions_on_transformers_own_answers(here):
    generator = np.random.default_rng(1)
    maps = [generator.integers(0, 2000, (HIGH, WIDE)).astype(np.uint16) for _ in range(COUNT)]
    maps[0][3, 4] = 0
    write_maps(maps)
    expected = []
    for name in ("depth", "other-depth"):
        told = read_out(name, DepthAnythingForDepthEstimation, DPTImageProcessorPil, "post_process_depth_estimation")
        pairs = [
            (float(d), int(t) / 1000)
            for plane, own in zip(told, maps, strict=True)
            for d, t in zip(plane.flatten(), own.flatten(), strict=True)
            if t
        ]
        near = [d > 0 and max(d / t, t / d) < 1.25 for d, t in pairs]
        rmse = math.sqrt(sum((d - t) ** 2 for d, t in pairs) / len(pairs))
        expected.append({"rmse": pytest.approx(rmse, rel=1e-5), "delta1": sum(near) / len(near), "pixels": len(pairs)})
    assert 0 < expected[0]["delta1"] < 1
    result = measure("depth", "--against", "other-depth", *DEPTHS)
    assert result.pop("against") == {"model": "other-depth", **expected[1]}
    assert result == {"model": "depth", **expected[0], "skipped": [], "agreement": None, "kl": None}
    table = ok("evaluate", "depth", "--against", "other-depth", *DEPTHS).splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["RMSE", "δ1"]
    in_other_unit = measure("depth", *DEPTHS, "--depth-scale", "500")
    assert in_other_unit["rmse"] != result["rmse"]


@pytest.mark.parametrize("reduced", [False, True])
def test_segmentation_equals_the_definition_on_transformers_own_answers(here, reduced):
    generator = np.random.default_rng(2)
    truth = [generator.integers(-1, CLASSES, (HIGH, WIDE)) for _ in range(COUNT)]
    write_maps([np.where(own < 0, 0 if reduced else 255, own + reduced).astype(np.uint8) for own in truth])
    for name in ("labels", "other-labels"):
        with quiet_transformers():
            SegformerImageProcessorPil(size=SIZE, do_reduce_labels=reduced).save_pretrained(name)
    flat = [int(label) for own in truth for label in own.flatten()]
    told, expected = [], []
    for name in ("labels", "other-labels"):
        planes = read_out(
            name, SegformerForSemanticSegmentation, SegformerImageProcessorPil, "post_process_semantic_segmentation"
        )
        told.append([int(label) for plane in planes for label in plane.flatten()])
        mean, right, shares = miou(told[-1], flat, CLASSES)
        figures = {"miou": pytest.approx(mean), "accuracy": pytest.approx(right), "classes": pytest.approx(shares)}
        expected.append(figures | {"pixels": sum(label >= 0 for label in flat)})
    assert len(set(told[0])) > 1
    result = measure("labels", "--against", "other-labels", *LABELS)
    assert result.pop("against") == {"model": "other-labels", **expected[1]}
    same = [a == b for a, b, label in zip(*told, flat, strict=True) if label >= 0]
    agreement = pytest.approx(sum(same) / len(same))
    assert result == {"model": "labels", **expected[0], "skipped": [], "agreement": agreement, "kl": None}


def test_a_pruned_backbone_is_measured_under_its_head(here):
    write_maps([np.full((HIGH, WIDE), 900, np.uint16)] * COUNT)
    how = ("--part", "backbone", "--recipe", "corp-mlp", "--ratio", "0.5", "--images", "pictures", "--samples", "3")
    ok("prune", "depth", *how, "-o", "out")
    assert read_json("out/config.json")["backbone_config"]["mlp_ratio"] == 2
    assert "FAILED" not in ok("verify", "out", "--against", "depth")
    result = measure("out", "--against", "depth", *DEPTHS)
    assert result["against"]["rmse"] == measure("depth", *DEPTHS)["rmse"] != result["rmse"]


def test_what_is_refused(here):
    write_maps([np.full((HIGH, WIDE), 3, np.uint8)] * COUNT)
    assert read_refusal("evaluate", "labels", *DEPTHS) == (
        "labels (SegformerForSemanticSegmentation) is no model of depth: --depth does not go with it"
    )
    assert read_refusal("evaluate", "depth", *LABELS) == (
        "depth (DepthAnythingForDepthEstimation) is no model of segmentation: --segmentation does not go with it"
    )
    assert read_refusal("evaluate", "depth", *DEPTHS, "--segmentation", "maps") == (
        "--depth and --segmentation: maps are measured alone, with --images"
    )
    assert read_refusal("evaluate", "labels", *LABELS, "--depth-scale", "10") == "--depth-scale is of --depth DIR"
    set_config("depth", depth_estimation_type="relative")
    assert read_refusal("evaluate", "depth", *DEPTHS) == (
        "depth tells relative depths, which have no unit: an error of them says nothing"
    )
    write_maps([np.full((HIGH, WIDE), 4, np.uint8)] * COUNT)
    assert read_refusal("evaluate", "labels", *LABELS) == (
        "maps/0.png: label 4, and the model has 4 classes (0 to 3; 255 is ignored)"
    )
    write_maps([np.full((HIGH, WIDE), 255, np.uint8)] * COUNT)
    assert read_refusal("evaluate", "labels", *LABELS) == "maps: no pixel of any map is labelled"
    write_maps([np.full((HIGH, HIGH), 1, np.uint8)] * COUNT)
    assert read_refusal("evaluate", "labels", *LABELS) == (
        "maps/0.png is 14 x 14 pixels, its image pictures/0.png is 20 x 14"
    )
    Path("maps/0.png").unlink()
    assert read_refusal("evaluate", "labels", *LABELS) == ("maps/0.png: no such label map, which pictures/0.png needs")
    Path("maps/0.png").write_text("no PNG")
    assert read_refusal("evaluate", "labels", *LABELS).startswith("maps/0.png: not a readable PNG: ")
    Image.new("RGB", (WIDE, HIGH)).save("maps/0.png")
    assert read_refusal("evaluate", "labels", *LABELS) == (
        "maps/0.png is a picture of mode RGB: a label map has one number a pixel"
    )
    settings = read_json("labels/preprocessor_config.json")
    Path("labels/preprocessor_config.json").write_text(json.dumps(settings | {"do_center_crop": True}))
    assert read_refusal("evaluate", "labels", *LABELS).startswith(
        "labels: its image processor cuts the middle out of images, of which there are no maps: set do_center_crop to "
    )
    Path("labels/preprocessor_config.json").write_text(
        json.dumps(settings | {"image_processor_type": "ViTImageProcessor"})
    )
    assert read_refusal("evaluate", "labels", *LABELS) == (
        "labels: its image processor has no post_process_semantic_segmentation, which reads a model's segmentation out"
    )


def test_two_images_of_one_stem_are_one_map(tmp_path):
    write = [tmp_path / "a" / "0.png", tmp_path / "b" / "0.png"]
    for path in write:
        path.parent.mkdir()
        Image.new("L", (2, 2)).save(path)
    with pytest.raises(Exception, match="have one stem"):
        LabelMaps(tmp_path / "a", write, classes=2)
