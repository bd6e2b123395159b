"""The card's snippet runs where there is nothing but numpy and onnxruntime, and says what PyTorch says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.graphs import Exported
from tests.pairs import choose_cases

from .exports import in_pytorch, make_exports

ALONE = """
import sys
class Alone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "numpy", "onnxruntime"}:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
sys.meta_path.insert(0, Alone())
for name in ("torch", "transformers", "onnx", "ckpt_prune", "tokenizers"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} is here")
"""
IDS = torch.tensor([[3, 4, 5]])


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Exported:
    return make_exports(tmp_path_factory)


def snippet(folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    return code


def run_snippet(folder: Path, place: Path) -> str:
    """Return what the snippet prints in a copy of the folder, in a Python that has nothing else."""
    shutil.copytree(folder, place / "copy")
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", ALONE + snippet(folder)],
        cwd=place / "copy",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]


@torch.inference_mode()
def continue_text(model: Any, steps: int) -> list[int]:
    """The likeliest tokens, reading the whole text anew for each."""
    ids = IDS
    for _ in range(steps):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()


@pytest.mark.parametrize(
    ("name", "settings"),
    choose_cases(
        [("llama-gqa-tied", {}), ("uneven-llama", {}), ("opt", {"dtype": "fp16"})],
        lambda case: case[0] == "llama-gqa-tied",
    ),
)
def test_generation_with_a_cache(exported, tmp_path, name, settings):
    model, folder = exported(name, **settings)
    expected = continue_text(in_pytorch(model), 20)
    assert len(set(expected)) > 3  # it says something
    assert numbers(run_snippet(folder, tmp_path)) == expected


def test_the_next_token_without_one(exported, tmp_path):
    model, folder = exported("rotated-llama", cache=False, opset=18)
    assert numbers(run_snippet(folder, tmp_path)) == continue_text(in_pytorch(model), 1)[3:]


@torch.inference_mode()
def test_an_image_classifier(exported, tmp_path):
    model, folder = exported("deit-teacher")
    expected = in_pytorch(model)(pixel_values=torch.zeros(1, 3, 12, 12)).logits.argmax(-1)
    assert numbers(run_snippet(folder, tmp_path)) == expected.tolist()


@pytest.mark.parametrize(("name", "shape"), [("dinov2-model", [1, 10, 16]), ("bert-mlm", [1, 3, 40])])
def test_features_and_encoders(exported, tmp_path, name, shape):
    assert numbers(run_snippet(exported(name)[1], tmp_path)) == shape


def test_the_card(exported):
    _, folder = exported("llama-gqa-tied")
    card = (folder / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "onnx",
        "pipeline_tag": "text-generation",
        "tags": ["ckpt-prune", "onnx"],
    }
    assert body.startswith("\n# llama-gqa-tied, ONNX\n\n```python\nimport numpy as np\n")
    assert " from `llama-gqa-tied` (llama): text-generation.\n" in body
    assert "| `model.onnx` | fp32 | 20 | as they are |\n" in body
    rows = re.findall(r"^\| (in|out) \| (.*) \| (.*) \| (.*) \|$", body, re.MULTILINE)
    past, present = (f"batch_size × 2 × {length}_sequence_length × 4" for length in ("past", "total"))
    assert rows == [
        ("in", "`input_ids`", "int64", "batch_size × sequence_length"),
        ("in", "`attention_mask`", "int64", "batch_size × total_sequence_length"),
        ("in", "`position_ids`", "int64", "batch_size × sequence_length"),
        ("in", "`past_key_values.0…1.key` and `.value`", "float32", past),
        ("out", "`logits`", "float32", "batch_size × sequence_length × 40"),
        ("out", "`present.0…1.key` and `.value`", "float32", present),
    ]


def test_files_that_the_card_names_are_there(exported):
    _, folder = exported("llama-gqa-tied")
    for name in re.findall(
        r"`([\w.]+\.(?:json|onnx))`|\"([\w.]+\.(?:json|onnx))\"", (folder / "README.md").read_text()
    ):
        assert (folder / "".join(name)).is_file(), name
