"""VBP's one list of all blocks' columns, against variances that hooks see on the whole model."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ckpt_prune.measure.samples.text import load_tokenizer, mix_windows, read_text, tokenise_text
from tests.cli.running import TEXT, ok, read_json


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made / "dense", tmp_path / "dense")
    shutil.copy(made / "calib.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_columns_of_least_variance_in_the_whole_model_go(here):
    ok("prune", "dense", "--recipe", "vbp-global", "--ratio", "0.5", *TEXT, "--evaluate-samples", "0", "-o", "out")
    model, seen = AutoModelForCausalLM.from_pretrained("dense", dtype=torch.float64), {}
    for block, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _m, x, b=block: seen.update({b: x[0].flatten(0, 1)}))
    stream = tokenise_text(load_tokenizer(Path("dense")), read_text([Path("calib.txt")]))
    with torch.no_grad():
        model(mix_windows([stream], samples=8, window=16, seed=0)[0])
    variances = {block: x.var(0, correction=0).tolist() for block, x in seen.items()}
    ranked = sorted(((v, b, j) for b, own in variances.items() for j, v in enumerate(own)), reverse=True)
    kept = ranked[: len(ranked) // 2]
    sites = {site["block"]: site["kept"] for site in read_json("out/ckpt_prune.json")["sites"]}
    assert sites == {block: sorted(j for _, b, j in kept if b == block) for block in variances}
    assert len({len(own) for own in sites.values()}) == 2
