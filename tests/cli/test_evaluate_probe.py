"""`evaluate --images --probe`: what features tell of classes."""

import json
from pathlib import Path

import pytest
import torch

from ckpt_prune.evaluation.probes import probe
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.image_files import ImageFiles
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from tests.cli.running import ok, refused
from tests.images import tiny_vit, write_csv, write_images, write_processor

LABELS = [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Base models `base` and `other`, and pictures of three classes, half to learn from."""
    monkeypatch.chdir(tmp_path)
    with quiet_transformers():
        for seed, name in enumerate(("base", "other")):
            tiny_vit(seed).vit.save_pretrained(name)
            write_processor(Path(name))
    write_images(Path("pictures"), [f"{n}.png" for n in range(8)])
    rows = [f"{n}.png,{label},{'eval' if n % 2 else 'calib'}" for n, label in enumerate(LABELS)]
    write_csv(Path("pictures/labels.csv"), "file,label,split", *rows)
    return tmp_path


@torch.inference_mode()
def features(seed: int, rows: list[int]) -> torch.Tensor:
    samples = ImageSamples(
        ImageFiles(tuple(Path("pictures", f"{n}.png") for n in rows)), load_processor(Path("base")), tokens=lambda _: 5
    )
    return tiny_vit(seed).vit(**samples.batch(slice(None))).last_hidden_state[:, 0].double()


@pytest.mark.parametrize("kind", ["knn", "linear"])
def test_both_models(here, kind):
    said = json.loads(ok("evaluate", "base", "--against", "other", "--images", "pictures", "--probe", kind, "--json"))
    learned, tested = [0, 2, 4, 6], [1, 3, 5, 7]
    classes = [torch.tensor([LABELS[n] for n in rows]) for rows in (learned, tested)]
    own, other = (
        probe(kind, features(seed, learned), classes[0], features(seed, tested), classes[1]) for seed in (0, 1)
    )
    same = sum(a == b for a, b in zip(own.picked, other.picked, strict=True)) / 4
    assert said == {
        "model": "base",
        "probe": kind,
        "top1": own.top1,
        "strength": own.strength,
        "features": 16,
        "train": 4,
        "test": 4,
        "split": "by labels: calib to learn, eval to test",
        "agreement": same,
        "difference": own.top1 - other.top1,
        "against": {"model": "other", "top1": other.top1, "strength": other.strength, "features": 16},
    }
    lines = ok("evaluate", "base", "--against", "other", "--images", "pictures", "--probe", kind).splitlines()
    assert lines[0].split() == ["model", "top-1", "strength", "features"]
    assert lines[1].split()[:2] == ["base", f"{own.top1:.2%}"]
    assert lines[4::2] == [
        f"{kind} probe: 4 images to learn from, 4 to test on; by labels: calib to learn, eval to test",
        f"difference {own.top1 - other.top1:+.2%}, same class {same:.1%}",
    ]


def test_refusals(here):
    assert refused("evaluate", "base", "--text", "x.txt", "--window", "4", "--probe", "knn") == (
        "--probe goes with --images"
    )
    write_images(Path("flat"), ["a.png", "b.png", "c.png", "d.png"])
    assert refused("evaluate", "base", "--images", "flat", "--probe", "knn") == (
        "flat: images without classes: give --labels FILE, or a sub-folder per class"
    )
