"""Families that spaces do not hold for are refused by name, with the reason, by every command that opens a model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.running import TEXT, read_refusal

WHY = {
    "siglip2_vision_model": "it reads patches that are cut out beforehand, as many of each image as fit (NaFlex), ",
}


@pytest.mark.parametrize("model_type", WHY)
def test_it_is_refused_by_name(model_type: str) -> None:
    folder = Path(model_type)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"weight": torch.ones(2, 2)}, folder / "model.safetensors")
    expected = f"{model_type} is not supported: {WHY[model_type]}"
    assert read_refusal("inspect", model_type).startswith(expected)
    assert read_refusal("prune", model_type, "--recipe", "ridge", *TEXT, "-o", "out").startswith(expected)
    assert read_refusal("calibrate", model_type, *TEXT, "-o", "stats").startswith(expected)
