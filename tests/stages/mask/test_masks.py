"""Masks: groups and errors against whole models masked by hand, and what is kept."""

from dataclasses import replace

import pytest
import torch

from ckpt_prune.measure.samples.samples import TokenWindows
from tests import encoders, families
from tests.families import prune
from tests.oracles.masked_model import Target
from tests.stages.whole import (
    RULES,
    assert_masked,
    data_of,
    make_recipe,
    make_wide,
    prune_by_mask,
    stock,
    tensors_of,
    watch_reading,
    whole,
)

FOURS: list[tuple[str, str, Target]] = [
    ("wide llama", "magnitude 2:4", "dense"),
    ("wide opt", "wanda 2:4", "by input"),
    ("wide qwen3", "wanda 2:4", "by block"),
    ("wide qwen2", "sparsegpt 2:4", "dense"),
    ("wide opt", "sparsegpt 2:4", "by input"),
]
"""`tests/contract` has rules without groups, in every family."""


@pytest.mark.parametrize(("variant", "rule", "target"), FOURS)
def test_groups_equal_the_whole_model_masked_by_hand(dense, tmp_path, variant, rule, target):
    folder, data = dense.folder(variant), data_of(variant)
    report = prune_by_mask(folder, tmp_path / "out", make_recipe(rule, target), data)
    expected = whole(stock(folder, variant), variant).mask(data, RULES[rule][1], target)
    assert_masked(tmp_path / "out", folder, expected, updated="sparsegpt" in rule)
    assert {linear["weight"]: linear["zeros"] for linear in report["linears"]} == {
        name: int((weight == 0).sum()) for name, weight in expected.items()
    }


@pytest.mark.parametrize("only", ["attention", "mlp"])
@pytest.mark.parametrize(("variant", "rule", "target"), [FOURS[0], FOURS[4]])
def test_a_mask_of_one_part_equals_the_whole_model_masked_by_hand(dense, tmp_path, variant, rule, target, only):
    """All other tensors keep their bits, and what is masked later reads what they make of it."""
    folder, data = dense.folder(variant), data_of(variant)
    recipe = make_recipe(rule, target, mask=RULES[rule][0] | {"only": only})
    report = prune_by_mask(folder, tmp_path / "out", recipe, data)
    model = whole(stock(folder, variant), variant)
    part = replace(model, inputs=model.inputs[:2] if only == "attention" else model.inputs[2:])
    expected = part.mask(data, RULES[rule][1], target)
    assert_masked(tmp_path / "out", folder, expected, updated="sparsegpt" in rule)
    assert {linear["weight"] for linear in report["linears"]} == expected.keys()
    assert report["mask"]["only"] == only


def test_a_ratio_of_zero_changes_no_bit(dense, tmp_path):
    folder = dense.folder("opt")
    for rule in ("magnitude", "wanda", "sparsegpt"):
        prune_by_mask(folder, tmp_path / rule, make_recipe(rule, ratio=0.0), data_of("opt"))
        after = tensors_of(tmp_path / rule)
        assert all(torch.equal(after[name], tensor) for name, tensor in tensors_of(folder).items())


def test_errors_are_those_of_the_whole_models_outputs(dense, tmp_path):
    """‖(W − Ŵ) X‖² / ‖W X‖² on what hooks see."""
    folder, data = dense.folder("opt"), data_of("opt")
    job = encoders.job_on(folder, make_recipe("sparsegpt"), None, data, diagnostics=True)
    report = prune(job, tmp_path / "out")
    model = whole(stock(folder, "opt"), "opt")
    seen = model.tokens(data, [(b, at) for b in range(encoders.BLOCKS) for at in range(len(model.inputs))])
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    for linear in report["linears"]:
        (at,) = [
            i for i, group in enumerate(model.inputs) if any(f".{m.disk}.weight" in linear["weight"] for m in group)
        ]
        X, W = seen[linear["block"], at], before[linear["weight"]].double()
        lost = (X @ (W - after[linear["weight"]].double()).T).square().sum() / (X @ W.T).square().sum()
        assert linear["error"] == pytest.approx(float(lost), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept(tmp_path, dtype):
    """The mask is chosen on the stored weights, and what stays of them keeps its bits."""
    folder = families.make(tmp_path / "dense", "mistral", dtype=dtype)
    prune_by_mask(folder, tmp_path / "out", make_recipe("wanda", "by block"), data_of("mistral"))
    after, before = tensors_of(tmp_path / "out"), tensors_of(folder)
    linears = [name for name in after if "_proj" in name]
    assert len(linears) == 7 * families.BLOCKS
    for name, tensor in after.items():
        assert tensor.dtype == dtype
        stays = tensor != 0
        assert torch.equal(tensor[stays], before[name][stays])
        if name in linears:
            assert (tensor == 0).sum(1).tolist() == [tensor.shape[1] // 2] * tensor.shape[0]


def test_no_two_blocks_are_read_together(tmp_path, monkeypatch):
    folder = make_wide(tmp_path / "dense", "llama", num_hidden_layers=6)
    seen = watch_reading(monkeypatch)
    prune_by_mask(folder, tmp_path / "out", make_recipe("wanda", "by input"), TokenWindows(families.windows(2, 8)))
    assert seen.blocks == {str(block) for block in range(6)}
    assert seen.together == 1
    # One is worked on, while the next is read and the last is written.
    assert seen.alive <= 3
