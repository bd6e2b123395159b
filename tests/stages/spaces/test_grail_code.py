"""`grail-code` against the formulas of GRAIL's released code for vision transformers, on inputs that hooks see."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.cli.running import TEXT, ok, read_json
from tests.stages.spaces.dense_inputs import copy_dense, read_dense


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy_dense(made, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_columns_and_weights_are_those_of_the_released_code(here):
    """The Gram and the strength are of the dense model; the Gram is summed in float32, which λ's 1e-3 damps to 1e-3."""
    ok("prune", "dense", "--recipe", "grail-code", "--ratio", "0.5", *TEXT, "--evaluate-samples", "0", "-o", "out")
    model, seen = read_dense()
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
