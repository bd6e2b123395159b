"""`grail-code` against the formulas of GRAIL's released code for vision transformers, on inputs that hooks see."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ckpt_prune.measure.samples.text import load_tokenizer, mix_windows, read_text, tokenise_text
from tests.cli.running import TEXT, ok, read_json


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made / "dense", tmp_path / "dense")
    shutil.copy(made / "calib.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_columns_and_weights_are_those_of_the_released_code(here):
    """The Gram and the strength are of the dense model; the Gram is summed in float32, which λ's 1e-3 damps to 1e-3."""
    ok("prune", "dense", "--recipe", "grail-code", "--ratio", "0.5", *TEXT, "--evaluate-samples", "0", "-o", "out")
    model, seen = AutoModelForCausalLM.from_pretrained("dense", dtype=torch.float64), {}
    for block, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _m, x, b=block: seen.update({b: x[0].flatten(0, 1)}))
    stream = tokenise_text(load_tokenizer(Path("dense")), read_text([Path("calib.txt")]))
    with torch.no_grad():
        model(mix_windows([stream], samples=8, window=16, seed=0)[0])
    sites = {
        site["block"]: site["kept"] for site in read_json("out/ckpt_prune.json")["sites"] if site["space"] == "mlp"
    }
    written = load_file("out/model.safetensors")
    for block, inputs in seen.items():
        x, weight = inputs.numpy(), model.model.layers[block].mlp.down_proj.weight.detach().numpy()
        scores = [np.abs(weight[:, j]).sum() * np.sqrt((x[:, j] ** 2).sum()) for j in range(x.shape[1])]
        kept = sorted(sorted(range(len(scores)), key=lambda j: -scores[j])[: len(scores) // 2])
        assert sites[block] == kept
        gram = x.T @ x
        inner = gram[np.ix_(kept, kept)]
        damped = inner + 1e-3 * inner.diagonal().mean() * np.eye(len(kept))
        expected = weight @ np.linalg.solve(damped, gram[kept]).T
        ours = written[f"model.layers.{block}.mlp.down_proj.weight"].double().numpy()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
