"""`evaluate` of masked language models and of base models: figures from the library, exact keys, and refusals."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.masked import choose_masked, fill_in
from ckpt_prune.evaluation.whole_model import load_model, quiet_transformers
from ckpt_prune.measure.samples.samples import TokenWindows
from tests.cli.running import edit_weights, enter_copy, ok, read_refusal
from tests.encoders import CONTEXT, make
from tests.evaluation.tiny import BOS, EOS, tiny_tokenizer
from tests.images import write_images, write_processor

WINDOW = 12
DATA = ("--text", "some.txt", "--window", str(WINDOW))
MASK, UNKNOWN = 31, 2
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "dog", "ran"]


def bert_tokenizer():
    """A character tokenizer that frames a text and has a mask token."""
    tokenizer = tiny_tokenizer("<s> $A </s>")
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert tokenizer.mask_token_id == MASK
    return tokenizer


def nudge(scale: float):
    """An edit for `edit_weights`: every tensor moves a little."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(3)
        for tensor in tensors.values():
            tensor += scale * torch.randn(tensor.shape, generator=generator)

    return change


@pytest.fixture(scope="module")
def made_encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    with quiet_transformers():
        for variant in ("bert-mlm", "bert-pretraining", "bert-model", "dinov2-model", "vit-model", "dinov2-classifier"):
            make(folder / variant, variant)
        make(folder / "bert-classifier", "bert-sequence-classification")
    for name in ("bert-mlm", "bert-pretraining", "bert-model", "bert-classifier"):
        bert_tokenizer().save_pretrained(folder / name)
    for name in ("bert-mlm", "bert-model", "dinov2-model", "vit-model"):
        shutil.copytree(folder / name, folder / f"{name}-2")
        edit_weights(str(folder / f"{name}-2"), nudge(0.05))
    rng = random.Random(0)
    (folder / "some.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(120)))
    write_images(folder / "flat", [f"{i:02}.png" for i in range(8)])
    return folder


@pytest.fixture
def encoders(made_encoders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the models (`-2`: another of the same), `some.txt` and `flat` of its own."""
    return enter_copy(made_encoders, tmp_path, monkeypatch)


def windows(limit: int | None = None) -> torch.Tensor:
    """Ten characters at a time between the opening and the closing token, by hand."""
    ids = bert_tokenizer()(Path("some.txt").read_text(), add_special_tokens=False)["input_ids"]
    rows = [ids[start : start + WINDOW - 2] for start in range(0, len(ids) - WINDOW + 3, WINDOW - 2)]
    return torch.tensor([[BOS, *row, EOS] for row in rows[:limit]])


def fill_masks(folder: str, against: str | None = None, limit: int | None = None):
    rows = windows(limit)
    models = [load_model(Path(name), device="cpu") for name in (folder, against) if name]
    return fill_in(models[0], rows, choose_masked(rows, {BOS, EOS, UNKNOWN, MASK}), MASK, *models[1:])


def features(folder: str, against: str, data):
    return compare_features(load_model(Path(folder), device="cpu"), load_model(Path(against), device="cpu"), data)


def figures(folder: str, score) -> dict:
    return {
        "model": folder,
        "masked_perplexity": score.perplexity,
        "accuracy": score.accuracy,
        "window": WINDOW,
        "windows": score.windows,
        "masked": score.tokens,
    }


class TestMasked:
    def test_alone(self, encoders):
        score = fill_masks("bert-mlm")
        assert json.loads(ok("evaluate", "bert-mlm", *DATA, "--json")) == figures("bert-mlm", score)
        assert (score.window, score.windows) == (WINDOW, len(windows()))
        assert score.tokens == 2 * score.windows  # 15 % of ten
        lines = ok("evaluate", "bert-mlm", *DATA).splitlines()
        assert lines[0].split() == ["model", "masked", "perplexity", "accuracy", "window", "masked"]
        assert lines[1].split() == [
            *("bert-mlm", f"{score.perplexity:.3f}", f"{score.accuracy:.2%}", "12", f"{score.tokens:,}")
        ]
        assert lines[2:] == ["", "15% of the tokens masked: not comparable with a causal perplexity"]
        report = json.loads(ok("evaluate", "bert-mlm", *DATA, "--samples", "3", "--json"))
        assert report == figures("bert-mlm", fill_masks("bert-mlm", limit=3))

    def test_against(self, encoders):
        comparison = fill_masks("bert-mlm-2", "bert-mlm")
        report = json.loads(ok("evaluate", "bert-mlm-2", "--against", "bert-mlm", *DATA, "--json"))
        assert report == figures("bert-mlm-2", comparison.score) | {
            "kl": comparison.kl,
            "top1_agreement": comparison.top1_agreement,
            "against": figures("bert-mlm", comparison.reference_score),
        }
        assert comparison.kl > 0.01
        lines = ok("evaluate", "bert-mlm-2", "--against", "bert-mlm", *DATA).splitlines()
        assert [line.split()[0] for line in lines[:3]] == ["before", "masked", "accuracy"]
        assert lines[4].startswith("before: bert-mlm, after: bert-mlm-2; window ")
        assert lines[-3] == (
            f"KL divergence {comparison.kl:.4f} nats per token, top-1 agreement {comparison.top1_agreement:.1%}"
        )
        verdict = "the output is hardly of use beside bert-mlm by its first choices: masked perplexity "
        assert lines[-1].startswith(verdict)

    def test_a_perplexity_too_large_for_json(self, encoders):
        def change(tensors):
            tensors["cls.predictions.bias"][5] = 1e6

        edit_weights("bert-mlm", change)
        assert json.loads(ok("evaluate", "bert-mlm", *DATA, "--json"))["masked_perplexity"] is None
        assert ok("evaluate", "bert-mlm", *DATA).splitlines()[1].split()[1] == "inf"


def test_features_of_text(encoders):
    pair = ("evaluate", "bert-model-2", "--against", "bert-model", *DATA)
    comparison = features("bert-model-2", "bert-model", TokenWindows(windows()))
    assert comparison.cosine < 0.999
    assert json.loads(ok(*pair, "--json")) == {
        "model": "bert-model-2",
        "against": "bert-model",
        "cosine": comparison.cosine,
        "relative_error": comparison.relative_error,
        "samples": len(windows()),
        "tokens": WINDOW * len(windows()),
    }
    lines = ok(*pair).splitlines()
    assert lines[0].split() == ["model", "cosine", "relative", "error", "tokens"]
    assert lines[1].split() == [
        *("bert-model-2", f"{comparison.cosine:.4f}", f"{comparison.relative_error:.4f}", f"{comparison.tokens:,}")
    ]
    assert comparison.cosine < 0.95
    verdict = f"the output is much worse than bert-model: cosine of the features {comparison.cosine:.4f}"
    assert lines[2:] == ["", "last hidden states against those of bert-model", "", verdict]


class TestFeaturesOfImages:
    def test_images_of_another_size(self, encoders):
        for name in ("vit-model", "vit-model-2"):
            write_processor(Path(name))
        assert read_refusal("evaluate", "vit-model-2", "--against", "vit-model", "--images", "flat") == (
            "the model does not take the images: Input image size (8*8) doesn't match model (12*12)."
        )


class TestRefusals:
    def test_what_is_not_measured(self, encoders):
        assert read_refusal("evaluate", "bert-classifier", *DATA) == (
            "bert-classifier is for text-classification, and nothing here says what is right: compare it with "
            "--against MODEL2"
        )
        config = json.loads(Path("bert-classifier/config.json").read_text())
        Path("bert-classifier/config.json").write_text(
            json.dumps(config | {"architectures": ["BertForMultipleChoice"]})
        )
        assert read_refusal("evaluate", "bert-classifier", *DATA) == (
            "bert-classifier is a MultipleChoice model, which evaluate does not measure"
        )

    def test_windows_that_do_not_fit(self, encoders):
        assert read_refusal("evaluate", "bert-mlm", "--text", "some.txt", "--window", "3") == (
            "--window 3 is too short: the tokenizer adds 2 tokens of its own"
        )
        assert json.loads(ok("evaluate", "bert-mlm", "--text", "some.txt", "--window", "4", "--json"))["window"] == 4
        message = (
            f"window of {CONTEXT + 1} tokens is longer than the model's context of {CONTEXT}; "
            f"use a window of at most {CONTEXT}"
        )
        long = ("--text", "some.txt", "--window", str(CONTEXT + 1))
        assert read_refusal("evaluate", "bert-mlm", *long) == message
        assert read_refusal("evaluate", "bert-model", "--against", "bert-model-2", *long) == message

    def test_no_mask_token(self, encoders):
        tiny_tokenizer("<s> $A </s>").save_pretrained("bert-mlm")
        assert read_refusal("evaluate", "bert-mlm", *DATA) == (
            "bert-mlm: its tokenizer has no mask token, so nothing can be masked"
        )
