"""`tools/probe_features.py`: probes of features, against loops and refits."""

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.image_files import ImageFiles
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from tests.images import tiny_vit, write_csv, write_images, write_processor
from tools.probe_features import STRENGTHS, linear, main, neighbours, probe

LABELS = [0, 1, 2, 0, 1, 2, 0, 1]


def drawn(count: int, seed: int, classes: int = 3, d: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = torch.randn(classes, d, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return centres[labels] + torch.randn(count, d, generator=generator, dtype=torch.float64), labels


def test_neighbours_vote_by_their_similarity():
    train, classes = drawn(30, 0)
    test, _ = drawn(7, 1)
    votes = neighbours(train, classes, test, count=5, temperature=0.07)
    for row, x in enumerate(test):
        similar = sorted(((float(x @ t / (x.norm() * t.norm())), int(c)) for t, c in zip(train, classes, strict=True)))
        expected = [0.0] * 3
        for value, label in similar[-5:]:
            expected[label] += math.exp((value - similar[-1][0]) / 0.07)
        assert votes[row].tolist() == pytest.approx(expected)


def test_a_linear_probe_is_the_ridge_of_least_error_on_what_is_left_out():
    train, classes = drawn(25, 0)
    test, _ = drawn(8, 1)
    one_hot = torch.nn.functional.one_hot(classes).double()
    scale = float((train - train.mean(0)).square().sum()) / min(train.shape)

    def ridge(x: torch.Tensor, y: torch.Tensor, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        centred = x - x.mean(0)
        weights = torch.linalg.solve(
            centred.T @ centred + strength * scale * torch.eye(x.shape[1]), centred.T @ (y - y.mean(0))
        )
        return weights, y.mean(0) - x.mean(0) @ weights

    def left_out(strength: float) -> float:
        total = 0.0
        for row in range(len(train)):
            others = torch.arange(len(train)) != row
            weights, constant = ridge(train[others], one_hot[others], strength)
            total += float((train[row] @ weights + constant - one_hot[row]).square().sum())
        return total

    best = min(STRENGTHS, key=left_out)
    weights, constant = ridge(train, one_hot, best)
    scores, strength = linear(train, classes, test)
    assert strength == best
    torch.testing.assert_close(scores, test @ weights + constant)


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
    files = ImageFiles(tuple(Path("pictures", f"{n}.png") for n in rows))
    samples = ImageSamples(files, load_processor(Path("base")), tokens=lambda _: 5)
    return tiny_vit(seed).vit(**samples.batch(slice(None))).last_hidden_state[:, 0].double()


@pytest.mark.parametrize("kind", ["knn", "linear"])
@pytest.mark.usefixtures("here")
def test_both_models(kind):
    args = ["classes", "base", "--against", "other", "--images", "pictures", "--probe", kind]
    result = json.loads(CliRunner().invoke(main, args, catch_exceptions=False).stdout)
    learned, tested = [0, 2, 4, 6], [1, 3, 5, 7]
    classes = [torch.tensor([LABELS[n] for n in rows]) for rows in (learned, tested)]
    base, other = (
        probe(kind, features(seed, learned), classes[0], features(seed, tested), classes[1]) for seed in (0, 1)
    )
    assert result == {
        "model": "base",
        "probe": kind,
        **base.data(),
        "train": 4,
        "test": 4,
        "agreement": sum(a == b for a, b in zip(base.picked, other.picked, strict=True)) / 4,
        "difference": base.top1 - other.top1,
        "against": {"model": "other", **other.data()},
    }
