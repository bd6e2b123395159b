"""`ckpt_prune.load`; outputs with remote code are in transform/test_remote.py."""

import json

import pytest
import torch

import ckpt_prune
from ckpt_prune.benchmarking import runners
from ckpt_prune.common.errors import UserError
from tests.families import job_on, logits, make, prune, recipe, stock, windows
from tests.refusals import refusal


def test_a_stock_output_is_loaded_as_stock(tmp_path):
    prune(job_on(make(tmp_path / "dense"), recipe("none", "magnitude")), tmp_path / "out")
    ids = windows(2, 10)
    model = ckpt_prune.load(tmp_path / "out")
    assert type(model) is type(stock(tmp_path / "out"))
    assert not model.training
    assert torch.equal(logits(model, ids), logits(stock(tmp_path / "out"), ids))


def test_dtype_is_the_checkpoints_unless_asked(tmp_path):
    folder = make(tmp_path / "dense", dtype=torch.bfloat16)
    assert ckpt_prune.load(folder).dtype == torch.bfloat16
    assert ckpt_prune.load(folder, dtype=torch.float32).dtype == torch.float32
    assert ckpt_prune.load(str(folder), device="cpu").device == torch.device("cpu")


@pytest.mark.parametrize(
    "code",
    ["evil.EvilForCausalLM", "modeling_pruned.NotThere", "modeling_pruned.copy", "someone/repo--modeling_pruned.X", ""],
)
def test_code_of_others_is_never_run(tmp_path, code):
    folder = make(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": code}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("evil.py", "modeling_pruned.py"):
        (folder / name).write_text("raise SystemExit('run')")
    assert refusal(ckpt_prune.load, folder) == (
        f"{folder} asks for remote code that is not this tool's (auto_map in config.json): it is not run"
    )


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, " has no config.json; give a checkpoint folder"),
        (b"{", "/config.json is not a readable JSON object (Expecting property name"),
        ("{}".encode("utf-16"), "/config.json is not UTF-8 text: save it as UTF-8"),
    ],
)
def test_without_a_readable_config(tmp_path, content, fault):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert refusal(ckpt_prune.load, tmp_path).startswith(f"{tmp_path}{fault}")


def test_two_of_four_is_packed_where_kernels_are_and_else_says_what_lacks(tmp_path, monkeypatch):
    """No GPU is needed to see what is asked for; `tests/benchmarking/test_runners.py` packs."""
    folder = make(tmp_path / "dense")
    with pytest.raises(UserError, match="two_four: torch's kernels for 2:4 run on NVIDIA GPUs alone"):
        ckpt_prune.load(folder, two_four=True)
    with pytest.raises(UserError, match="two_four: torch's kernels for 2:4 compute in float16, not in torch"):
        ckpt_prune.load(folder, two_four=True, dtype=torch.bfloat16)
    packed: list[torch.nn.Module] = []
    monkeypatch.setattr(runners, "why_not_two_four", lambda *_: None)
    monkeypatch.setattr(runners, "pack_two_four", packed.append)
    model = ckpt_prune.load(folder, two_four=True)
    assert packed == [model]
    assert model.dtype == torch.float16
