"""`tools/probe_features.py patches`: a linear head on the patches of images, against label maps."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import save_file
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.image_files import ImageFiles
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from tests.images import write_processor
from tests.oracles.dense_labels import drawn_out, miou, normalise
from tools.probe_features import main

COLOURS = ((250, 10, 10), (10, 250, 10), (10, 10, 250))
COUNT, SIDE = 6, 32
ARGS = ("--images", "pictures", "--head", "head.safetensors", "--label-maps", "maps")


def run_tool(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DINOv2 with registers, another, and pictures of coloured quarters with their maps."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("base", "other")):
        config = Dinov2WithRegistersConfig(
            image_size=16,
            patch_size=4,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_register_tokens=3,
        )
        torch.manual_seed(seed)
        with quiet_transformers():
            Dinov2WithRegistersModel(config).save_pretrained(name)
        write_processor(Path(name), size={"height": 16, "width": 16})
    Path("pictures").mkdir()
    Path("maps").mkdir()
    generator = np.random.default_rng(0)
    for n in range(COUNT):
        quarters = generator.integers(0, 3, (2, 2))
        labels = np.kron(quarters, np.ones((SIDE // 2, SIDE // 2), int)).astype(np.uint8)
        Image.fromarray(np.asarray(COLOURS, np.uint8)[labels]).save(f"pictures/{n}.png")
        labels[:2, :2] = 255
        Image.fromarray(labels).save(f"maps/{n}.png")
    return tmp_path


def tokens(name: str) -> torch.Tensor:
    """Patches of all pictures, (images, 4, 4, d) float64."""
    files = ImageFiles(tuple(Path("pictures", f"{n}.png") for n in range(COUNT)))
    samples = ImageSamples(files, load_processor(Path(name)), tokens=lambda _: 20)
    with torch.inference_mode(), quiet_transformers():
        states = Dinov2WithRegistersModel.from_pretrained(name).eval()(**samples.batch(slice(None))).last_hidden_state
    return states[:, 4:].double().unflatten(1, (4, 4))


def labels() -> torch.Tensor:
    """Labels of the pictures, (images, SIDE, SIDE), -1 unknown."""
    maps = torch.stack([torch.from_numpy(np.asarray(Image.open(f"maps/{n}.png")).astype(int)) for n in range(COUNT)])
    return torch.where(maps == 255, -1, maps)


def fit_head() -> dict[str, torch.Tensor]:
    """A head on normalised patches of `base` that tells the colours apart, in DINOv2's names."""
    patches = tokens("base").flatten(0, 2)
    truth = labels()[:, 4::8, 4::8].flatten()
    mean, variance = patches.mean(0), patches.var(0)
    gain, shift = torch.linspace(0.5, 2, 16).double(), torch.linspace(-1, 1, 16).double()
    inputs = (patches - mean) / (variance + 1e-5).sqrt() * gain + shift
    one_hot = torch.nn.functional.one_hot(truth.clamp_min(0), 3).double()
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1).double()], 1)
    solved = torch.linalg.lstsq(inputs, one_hot, driver="gelsd").solution
    norm = {"running_mean": mean, "running_var": variance, "weight": gain, "bias": shift}
    return {
        "decode_head.conv_seg.weight": solved[:-1].T[:, :, None, None].float().contiguous(),
        "decode_head.conv_seg.bias": solved[-1].float().contiguous(),
        **{f"decode_head.bn.{name}": value.float() for name, value in norm.items()},
        "decode_head.bn.num_batches_tracked": torch.tensor(7),
    }


def pick_classes(name: str, head: dict[str, torch.Tensor]) -> list[int]:
    """Classes of all pixels by the definition."""
    conv, bias = (head[f"decode_head.conv_seg.{part}"].double() for part in ("weight", "bias"))
    norm = {part: head[f"decode_head.bn.{part}"].tolist() for part in ("running_mean", "running_var", "weight", "bias")}
    classes = []
    for image in tokens(name).tolist():
        read = torch.tensor([[normalise(token, norm) for token in row] for row in image]).double()
        logits = read @ conv[:, :, 0, 0].T + bias
        planes = [drawn_out(logits[:, :, c].tolist(), SIDE, SIDE) for c in range(3)]
        classes += [max(range(3), key=lambda c: planes[c][y][x]) for y in range(SIDE) for x in range(SIDE)]
    return classes


def test_segmentation_of_both_models(here):
    head = fit_head()
    save_file(head, "head.safetensors")
    result = run_tool("patches", "base", "--against", "other", *ARGS)
    truth = labels().flatten().tolist()
    classes = [pick_classes(name, head) for name in ("base", "other")]
    base, other = (miou(predicted, truth, 3) for predicted in classes)
    labelled = [index for index, label in enumerate(truth) if label >= 0]
    same = sum(classes[0][index] == classes[1][index] for index in labelled) / len(labelled)
    assert len(labelled) == COUNT * (SIDE * SIDE - 4)

    def near(value):
        """A pixel that two classes are nearly level at may go to either: of float64 here and of float32 there.

        Twelve of a class's 1360 pixels are 0.009 of it.
        """
        return pytest.approx(value, abs=0.009)

    def score(metrics):
        return {
            "miou": near(metrics[0]),
            "accuracy": near(metrics[1]),
            "classes": near(metrics[2]),
            "pixels": len(labelled),
        }

    assert result == {
        "model": "base",
        **score(base),
        "images": COUNT,
        "agreement": near(same),
        "against": {"model": "other", **score(other)},
    }
    assert base[0] > 0.8 > other[0]


def test_depth(here):
    """A head of one output, on maps of 16 bits where 0 is unknown."""
    generator = torch.Generator().manual_seed(1)
    head = {"weight": 100 * torch.randn(1, 16, generator=generator), "bias": torch.tensor([500.0])}
    save_file(head, "head.safetensors")
    truth = []
    for n in range(COUNT):
        values = torch.randint(0, 1000, (SIDE, SIDE), generator=generator).numpy().astype(np.uint16)
        values[5, 5] = 0
        Image.fromarray(values).save(f"maps/{n}.png")
        truth += [int(value) for value in values.flatten()]
    depths = []
    for image in tokens("base"):
        plane = drawn_out((image @ head["weight"][0].double() + 500).tolist(), SIDE, SIDE)
        depths += [value for row in plane for value in row]
    errors = [(a - b) ** 2 for a, b in zip(depths, truth, strict=True) if b]
    result = run_tool("patches", "base", *ARGS)
    assert result["rmse"] == pytest.approx(math.sqrt(sum(errors) / len(errors)), rel=1e-5)
    assert result["pixels"] == len(errors)
