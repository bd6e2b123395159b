"""Refusals of recovery: two models that do not belong together, damaged files, too little data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT, ROTATIONS
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model
from ckpt_prune.stages.shared.pairs import check_same_reader
from tests import refusals
from tests.images import write_processor
from tests.reports import recover
from tests.stages.recovering import (
    pruned_by,
    recovery_job,
    training_data,
)
from tests.stages.test_rotations import random_rotations, rotating
from tests.stages.whole import make_recipe


def refusal(pruned: Path, dense: Path, out: Path, samples: Samples | None = None, **changes: Any) -> str:
    """The message, one line; nothing is left on disk."""
    before = sorted(out.parent.iterdir())
    samples = training_data("llama") if samples is None else samples
    line = refusals.refusal(lambda: recover(recovery_job(pruned, dense, samples, **changes), out))
    assert sorted(out.parent.iterdir()) == before
    return line


@pytest.fixture
def shared(dense, tmp_path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        random_rotations(patch)
        return pruned_by(dense.folder("llama"), tmp_path / "pruned", rotating("shared", ratio=0.5), None)


def test_rotations_that_are_missing_or_damaged(dense, shared, tmp_path):
    path, folder, out = shared / ROTATIONS, dense.folder("llama"), tmp_path / "out"
    whole_file = load_file(path)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    assert f"{path} is {len(raw) // 2} bytes long but its header says {len(raw)}" in refusal(shared, folder, out)
    path.unlink()
    assert f"{path} is not there, which says how the pruned model is rotated" in refusal(shared, folder, out)
    for name in ("residual", "blocks.2.heads"):
        save_file({k: v for k, v in whole_file.items() if k != name}, path)
        assert f"has no {name} of shape" in refusal(shared, folder, out)
        save_file(whole_file | {name: whole_file[name][..., :-1].clone()}, path)
        assert f"has no {name} of shape" in refusal(shared, folder, out)


def test_rotations_of_another_run(dense, shared, tmp_path):
    rotations = load_file(shared / ROTATIONS)
    save_file(rotations | {"residual": rotations["residual"].flip(0).contiguous()}, shared / ROTATIONS)
    text = refusal(shared, dense.folder("llama"), tmp_path / "out")
    assert "before their first block" in text


def test_a_report_that_names_no_known_rotation(dense, shared, tmp_path):
    report = json.loads((shared / REPORT).read_text())
    report["rotation"]["kind"] = "sideways"
    (shared / REPORT).write_text(json.dumps(report))
    assert "names an unknown rotation 'sideways'" in refusal(shared, dense.folder("llama"), tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "[]", '{"recipe": {}}', '{"linears": 5}', '{"container": null}'])
def test_a_damaged_report(dense, masked_llama, tmp_path, text):
    """Before anything is trained: what it says is carried into the output's report and model card."""
    pruned = shutil.copytree(masked_llama, tmp_path / "pruned")
    (pruned / REPORT).write_text(text)
    assert str(pruned / REPORT) in refusal(pruned, dense.folder("llama"), tmp_path / "out")


# ---- the same readers --------------------------------------------------------------------------------------------


def reader_refusal(pruned: Path, dense: Path, text: str = "a word or two") -> str | None:
    ours, theirs = Model.open(pruned), Model.open(dense)
    file = pruned.parent / "read.txt"
    file.write_text(text)
    try:
        check_same_reader(ours, theirs, [file])
    except UserError as error:
        return str(error)
    return None


def test_tokenizers(dense, masked_llama, tmp_path):
    folder = dense.folder("llama")
    assert reader_refusal(masked_llama, folder) is None
    pruned = shutil.copytree(masked_llama, tmp_path / "pruned")
    tokenizer = pruned / "tokenizer.json"
    values = json.loads(tokenizer.read_text())
    # Saved by another version: another layout of the file, and a setting that no text shows.
    tokenizer.write_text(json.dumps(values | {"truncation": None}, indent=7))
    config = json.loads((pruned / "tokenizer_config.json").read_text())
    (pruned / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 17}))
    assert reader_refusal(pruned, folder) is None
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer.write_text(json.dumps(values))
    expected = f"{pruned} and {folder} have different tokenizers: they read the text differently"
    assert reader_refusal(pruned, folder) == expected
    # What is not in the text is read differently, to no effect.
    assert reader_refusal(pruned, folder, "no such letters here".replace("a", "").replace("b", "")) is None


def test_image_processors(dense, tmp_path):
    folder = dense.folder("vit")
    pruned = pruned_by(folder, tmp_path / "pruned", make_recipe("magnitude"), None)
    path = pruned / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert reader_refusal(pruned, folder) is None
    write_processor(pruned, size={"height": 10, "width": 10})
    assert reader_refusal(pruned, folder) == f"{pruned} and {folder} have different image processors"
