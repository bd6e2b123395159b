"""A dense Llama in the working folder, and what its MLPs' last modules read, seen by hooks on the whole model."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ckpt_prune.measure.samples.text import load_tokenizer, mix_windows, read_text, tokenise_text


def copy_dense(made: Path, place: Path) -> None:
    """Copy the model and its text into a folder."""
    shutil.copytree(made / "dense", place / "dense")
    shutil.copy(made / "calib.txt", place)


def read_dense() -> tuple[Any, dict[int, Tensor]]:
    """Return the model in float64, and the inputs of each block's `down_proj` on its samples, (tokens, columns)."""
    seen: dict[int, Tensor] = {}
    model: Any = AutoModelForCausalLM.from_pretrained("dense", dtype=torch.float64)
    for block, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _m, x, b=block: seen.update({b: x[0].flatten(0, 1)}))
    stream = tokenise_text(load_tokenizer(Path("dense")), read_text([Path("calib.txt")]))
    with torch.no_grad():
        model(mix_windows([stream], samples=8, window=16, seed=0)[0])
    return model, seen
