"""`evaluate --images`: accuracy, and two classifiers side by side."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import SwinConfig, SwinForImageClassification

from ckpt_prune.evaluation.image_classes import classify, compare_classifiers
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.image_files import ImageFiles, choose_images
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from tests.cli.running import edit_weights, enter_copy, ok, poison, read_refusal, set_config
from tests.images import tiny_vit, write_csv, write_images, write_processor, write_vit

LABELS = [3, 0, 5, 1, 2, 4, 0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of the same classes, and twelve images in each layout."""
    folder = tmp_path_factory.mktemp("pictured")
    with quiet_transformers():
        write_vit(folder / "vit", 0)
        write_vit(folder / "other", 1)
    names = [f"{i:02}.png" for i in range(len(LABELS))]
    write_images(folder / "listed" / "images", names)
    rows = [f"images/{name},{label},eval" for name, label in zip(names, LABELS, strict=True)]
    write_images(folder / "listed" / "images", ["calib.png"])
    write_csv(folder / "listed" / "labels.csv", "file,label,split", *rows, "images/calib.png,0,calib")
    for name, label in zip(names, LABELS, strict=True):
        target = folder / "foldered" / f"n0{label + 1}"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "listed" / "images" / name, target / name)
    shutil.copytree(folder / "listed" / "images", folder / "flat")
    (folder / "flat" / "calib.png").unlink()
    return folder


@pytest.fixture
def pictures(pictured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `vit`, `other`, `listed`, `foldered` and `flat` of its own."""
    return enter_copy(pictured, tmp_path, monkeypatch)


def expected_samples(limit: int | None = None) -> ImageSamples:
    files = ImageFiles(tuple(sorted(Path("flat").iterdir())), tuple(LABELS))
    if limit is not None:
        files = choose_images(files, samples=limit, seed=0)
    return ImageSamples(files, load_processor(Path("vit")), tokens=lambda size: 5)


def test_alone(pictures):
    score = classify(tiny_vit(), expected_samples())
    assert json.loads(ok("evaluate", "vit", "--images", "listed", "--json")) == {
        **{"model": "vit", "images": 12, "top1": score.top1, "top5": score.top5},
        **{"agreement": None, "kl": None, "against": None, "skipped": []},
    }
    lines = ok("evaluate", "vit", "--images", "listed").splitlines()
    shares = [f"{share:.2%} ± {(share * (1 - share) / 12) ** 0.5:.2%}" for share in (score.top1, score.top5)]
    assert [line.split() for line in lines] == [
        ["model", "top-1", "top-5", "images"],
        ["vit", *shares[0].split(), *shares[1].split(), "12"],
        [],
        ["measured", "on", "images", "12,", "split", "eval", "of", "labels.csv"],
    ]
    assert "measured on" not in ok("evaluate", "vit", "--images", "foldered")


def test_against(pictures):
    comparison = compare_classifiers(tiny_vit(1), tiny_vit(0), expected_samples())
    report = json.loads(ok("evaluate", "other", "--against", "vit", "--images", "listed", "--json"))
    assert report == {
        "model": "other",
        "images": 12,
        "top1": comparison.score.top1,
        "top5": comparison.score.top5,
        "agreement": comparison.agreement,
        "kl": pytest.approx(comparison.kl, rel=1e-6),
        "against": {
            **{"model": "vit", "images": 12},
            **{"top1": comparison.reference_score.top1, "top5": comparison.reference_score.top5},
        },
        "skipped": [],
    }
    assert report["kl"] > 0.01
    lines = ok("evaluate", "other", "--against", "vit", "--images", "listed").splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["before", "top-1", "top-5"]
    error = (comparison.agreement * (1 - comparison.agreement) / 12) ** 0.5
    assert lines[3:-1] == [
        "",
        "before: vit, after: other; images 12, split eval of labels.csv",
        "",
        f"KL divergence {comparison.kl:.4f} nats per image, top-1 agreement {comparison.agreement:.1%} ± {error:.1%}",
        "",
    ]
    assert lines[-1].startswith("the output is much worse than vit by its first choices: top-1 accuracy ")


def test_images_that_do_not_decode(pictures):
    for i in (4, 7):
        Path(f"listed/images/{i:02}.png").write_text("no image")
    assert read_refusal("evaluate", "vit", "--images", "listed") == (
        "2 of 12 images do not decode, more than the allowed share of 0.05; the first is listed/images/04.png: "
        "not a BMP, GIF, JPEG, PNG, PPM, TIFF or WEBP image"
    )
    lenient = ("--images", "listed", "--max-corrupt", "0.2")
    report = json.loads(ok("evaluate", "vit", *lenient, "--json"))
    assert (report["images"], report["skipped"]) == (10, ["listed/images/04.png", "listed/images/07.png"])
    result = ok("evaluate", "vit", *lenient)
    assert result.splitlines()[1].split()[-1] == "10"


def test_a_classifier_of_no_family_of_ours(pictures):
    """How it makes tokens is neither known nor needed."""
    small = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2, "image_size": 8, "patch_size": 2}
    with quiet_transformers():
        torch.manual_seed(0)
        names = tiny_vit().config
        config = SwinConfig(**small, id2label=names.id2label, label2id=names.label2id)
        SwinForImageClassification(config).save_pretrained("swin")
    write_processor(Path("swin"))
    report = json.loads(ok("evaluate", "swin", "--images", "listed", "--json"))
    model = SwinForImageClassification.from_pretrained("swin", local_files_only=True)
    assert (report["images"], report["top1"]) == (12, classify(model, expected_samples()).top1)


def test_images_that_do_not_fit(pictures):
    Path("foldered/n01").rename("foldered/goldfish")
    assert read_refusal("evaluate", "vit", "--images", "foldered") == (
        "foldered/goldfish: label 'goldfish' is none of the model's 6 classes, which look like 'n01 tench'; "
        "give a class's index or its name in config.json's id2label"
    )


def test_models_that_cannot_be_compared(pictures):
    write_processor(Path("other"), resample=3)
    assert read_refusal("evaluate", "other", "--against", "vit", "--images", "listed") == (
        "other and vit have different image processors: their figures cannot be compared"
    )
    with quiet_transformers():
        write_vit(Path("seven"), classes=7)
    assert read_refusal("evaluate", "seven", "--against", "vit", "--images", "listed") == (
        "seven and vit have 7 and 6 classes: their figures cannot be compared"
    )


def test_models_that_are_not_whole(pictures):
    edit_weights("vit", poison("classifier.bias"))
    assert read_refusal("evaluate", "vit", "--images", "listed") == (
        "the model's logits are not finite numbers: the weights are damaged or overflow in this dtype"
    )
    set_config("vit", id2label={"a": "b"})
    assert read_refusal("evaluate", "vit", "--images", "listed").startswith(
        "config.json's id2label and num_labels cannot "
    )


def test_remote_code_is_run_only_when_trusted(pictures, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(pictures / "modules"))
    set_config("vit", auto_map={"AutoModelForImageClassification": "modeling_ours.Ours"})
    Path("vit/modeling_ours.py").write_text(
        "from pathlib import Path\nfrom transformers import ViTForImageClassification\n"
        f"Path({str(pictures / 'ran')!r}).touch()\n"
        "class Ours(ViTForImageClassification):\n    pass\n"
    )
    assert re.search(r"remote", read_refusal("evaluate", "vit", "--images", "listed"))
    assert not Path("ran").exists()
    report = json.loads(ok("evaluate", "vit", "--images", "listed", "--trust-remote-code", "--json"))
    assert Path("ran").exists()
    assert report["top1"] == classify(tiny_vit(), expected_samples()).top1
