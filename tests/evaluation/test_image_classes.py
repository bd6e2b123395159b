import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import softmax
from scipy.stats import entropy
from sklearn.metrics import top_k_accuracy_score

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation import image_classes as module
from ckpt_prune.evaluation.image_classes import (
    Classification,
    class_names,
    classify,
    compare_classifiers,
    is_classifier,
    is_vision,
)
from ckpt_prune.measure.samples.image_files import ImageFiles, choose_images, find_images
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from tests.images import MEAN, SIZE, STD, tiny_vit, write_image, write_processor
from tests.shared_data import shared_data

COUNT = 40


def fail_if_asked(size: tuple[int, int]) -> int:
    """Accuracy is measured on models whose tokens nobody knows."""
    raise AssertionError(size)


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> ImageSamples:
    """Noise of several sizes, with classes that are right about as often as not."""
    folder = tmp_path_factory.mktemp("images")
    paths = [write_image(folder / f"{i:02}.png", i, (8 + i % 5, 8 + i % 3)) for i in range(COUNT)]
    ranked = [oracle_probabilities(tiny_vit(), path).argsort()[::-1] for path in paths]
    labels = tuple(int(ranking[i % 6] if i % 2 else ranking[0]) for i, ranking in enumerate(ranked))
    processor = load_processor(write_processor(folder / "vit"))
    return ImageSamples(ImageFiles(tuple(paths), labels), processor, tokens=fail_if_asked)


def without_labels(samples: ImageSamples) -> ImageSamples:
    stripped = copy.copy(samples)
    stripped.labels = None
    return stripped


def oracle_probabilities(model, path) -> np.ndarray:
    """Class distribution of one image: float64 from the resized pixels on."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR), dtype=np.float64)
    values = torch.from_numpy(((pixels / 255 - MEAN) / STD).transpose(2, 0, 1))
    with torch.no_grad():
        return softmax(copy.deepcopy(model).double().eval()(pixel_values=values[None]).logits[0].numpy())


class TestClassify:
    def test_equals_the_oracle(self, samples):
        model = tiny_vit()
        shares = np.stack([oracle_probabilities(model, path) for path in samples.paths])
        top1, top5 = (top_k_accuracy_score(samples.labels, shares, k=k, labels=range(6)) for k in (1, 5))
        assert 0.4 < top1 < top5 < 1  # or the figures would say little
        assert classify(model, samples) == Classification(top1, top5, images=COUNT, classes=6)


class TestCompare:
    def test_two_models_equal_the_oracle(self, samples, monkeypatch):
        monkeypatch.setattr(module, "BATCH_PIXELS", 9 * SIZE * SIZE)
        model, reference = tiny_vit(1), tiny_vit(0)
        result = compare_classifiers(model, reference, samples)
        q, p = (
            np.stack([oracle_probabilities(network, path) for path in samples.paths]) for network in (model, reference)
        )
        assert result.kl == pytest.approx(entropy(p, q, axis=1).mean(), rel=1e-5)
        assert result.kl != pytest.approx(entropy(q, p, axis=1).mean(), rel=1e-2)
        same = p.argmax(1) == q.argmax(1)
        assert 0 < sum(same) < COUNT
        assert result.agreement == same.mean()
        assert result.score == classify(model, samples)
        assert result.reference_score == classify(reference, samples)


class Fixed(torch.nn.Module):
    """A model with given logits; its images are their own numbers."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, pixel_values):
        self.seen = pixel_values.dtype
        return SimpleNamespace(logits=self.logits[pixel_values.flatten().long()])


class Numbers:
    """Images of one pixel, which is their number."""

    size = (1, 1, 1)

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def batch(self, rows):
        return {"pixel_values": torch.arange(len(self.labels)).float().view(-1, 1, 1, 1)[rows]}


def test_images_come_in_the_dtype_of_the_model_and_kl_is_taken_wide():
    model, reference = (Fixed(torch.tensor(logits)) for logits in ([[0.0, 3.0]], [[1.0, 2.0]]))
    model.dtype = reference.dtype = torch.bfloat16
    model.logits, reference.logits = model.logits.bfloat16(), reference.logits.bfloat16()
    result = compare_classifiers(model, reference, Numbers(torch.tensor([1])))
    assert model.seen == reference.seen == torch.bfloat16
    e = math.exp(1)
    p, q = [1 / (1 + e), e / (1 + e)], [1 / (1 + e**3), e**3 / (1 + e**3)]
    assert result.kl == pytest.approx(entropy(p, q), rel=1e-12)


def make_broken() -> torch.nn.Module:
    model = tiny_vit()
    model.classifier.bias.data[3] = math.nan
    return model


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([make_broken], "the model's logits are not finite numbers: the weights are damaged or overflow in this dtype"),
        ([tiny_vit, make_broken], "the reference's logits are not finite numbers: the weights are damaged or overflow"),
        ([tiny_vit, lambda: tiny_vit(classes=7)], "the models have 6 and 7 classes: they cannot be compared; compare"),
        ([lambda: tiny_vit(image_size=12)], "the model does not take images of 3 x 8 x 8: Input image size (8*8)"),
        ([lambda: tiny_vit().vit], "the model gives no class logits: it is no image classifier"),
    ],
)
def test_refused_models(samples, models, message):
    networks = [make() for make in models]
    with pytest.raises(UserError) as caught:
        classify(*networks, samples) if len(networks) == 1 else compare_classifiers(*networks, samples)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("label", [6, -1])
def test_labels_of_another_model(label):
    with pytest.raises(UserError, match=f"^class {label} is none of the model's 6 classes: the labels are another"):
        classify(Fixed(torch.zeros(2, 6)), Numbers(torch.tensor([0, label])))


def test_no_labels(samples):
    with pytest.raises(UserError, match=r"^the images have no classes to measure accuracy with; give their labels, or"):
        classify(tiny_vit(), without_labels(samples))


class TestConfigs:
    @pytest.mark.parametrize(
        ("config", "vision", "classifier"),
        [
            ({"architectures": ["ViTForImageClassification"], "model_type": "vit"}, True, True),
            ({"architectures": ["PrunedViTForImageClassification"], "model_type": "ours"}, True, True),
            ({"architectures": ["Dinov2Model"], "model_type": "dinov2"}, True, False),
            # A family of ours without a head by default, whatever transformers has beside.
            ({"model_type": "dinov2"}, True, False),
            ({"architectures": ["SwinForImageClassification"], "model_type": "swin"}, True, True),
            ({"architectures": ["SwinModel"], "model_type": "swin"}, True, False),
            ({"model_type": "swin"}, True, True),
            ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, False, False),
            ({"architectures": ["PerceiverForMaskedLM"], "model_type": "perceiver"}, False, False),
            ({"model_type": "bert"}, False, False),
            ({"architectures": "ViT", "model_type": 3}, False, False),
        ],
    )
    def test_what_a_config_is_of(self, config, vision, classifier):
        assert (is_vision(config), is_classifier(config)) == (vision, classifier)


def test_a_trained_model():
    """Preprocessing is pinned: with ImageNet's mean and standard deviation instead, 49 of 100 are right."""
    from transformers import ViTForImageClassification

    folder, images = shared_data("vit-tiny-imagenet", "imagenet-1per-class")
    names = class_names(json.loads((folder / "config.json").read_text()))
    files = find_images(images, split="eval", id2label=names)
    assert (len(files.paths), len(find_images(images / "images", split="calib").paths)) == (744, 256)
    assert names[files.labels[0]] == "n01440764 tench"
    samples = ImageSamples(
        choose_images(files, samples=100, choose="first"), load_processor(folder), tokens=fail_if_asked
    )
    assert samples.size == (3, 224, 224)
    assert samples.skipped == ()
    model = ViTForImageClassification.from_pretrained(folder, local_files_only=True)
    score = classify(model, samples)
    assert score.top1 == pytest.approx(0.85, abs=0.011)
    assert score.top5 == pytest.approx(0.94, abs=0.011)
    assert (score.images, score.classes) == (100, 1000)
