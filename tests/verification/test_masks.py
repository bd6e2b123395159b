"""`verify` on masks: outputs made by hand, each report beside weights that do or do not hold it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.verification.verify import Check, verify
from tests.evaluation.tiny import tiny_llama
from tests.reporting import examples

UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "dense"
    with quiet_transformers():
        tiny_llama().save_pretrained(folder)
    return folder


class Output:
    """An output made by hand: weights and a report that a test may change before it is checked."""

    def __init__(self, dense: Path, folder: Path, kept: str, pattern: str, method: str) -> None:
        self.dense, self.folder = dense, folder
        self.tensors = load_file(dense / FILE)
        linears = [name for name in self.tensors if ".layers." in name and self.tensors[name].ndim == 2]
        self.report = examples.report(
            [],
            source={"name": "dense", "fingerprint": Checkpoint.open(dense).fingerprint},
            container={"model_type": "llama", "padded": []},
            files={},
            mask={"method": method, "pattern": pattern, "ratio": 0.5, "more": 1},
            rotation=None,
            linears=[self.zero(name, kept) for name in sorted(linears)],
        )

    def zero(self, name: str, kept: str) -> dict[str, Any]:
        """Zero a weight's columns where `kept` says 0, over and over, and say so as the report does."""
        weight = self.tensors[name]
        weight.view(-1, len(kept)).mul_(torch.tensor([float(digit) for digit in kept]))
        rows, columns = weight.shape
        zeros = int((weight == 0).sum())
        return {"block": 0, "weight": name, "rows": rows, "columns": columns, "zeros": zeros, "damp": None, "dead": 0}

    def linear(self, name: str) -> dict[str, Any]:
        return next(each for each in self.report["linears"] if each["weight"] == name)

    def write(self) -> Path:
        self.folder.mkdir()
        (self.folder / "config.json").write_text((self.dense / "config.json").read_text())
        save_file(self.tensors, self.folder / FILE, metadata={"format": "pt"})
        (self.folder / "ckpt_prune.json").write_text(json.dumps(self.report))
        return self.folder

    def check(self, name: str, *, against: bool = True) -> Check:
        """The one check; all others pass or have nothing to check."""
        with quiet_transformers():
            checks = verify(self.write(), self.dense if against else None)
        own = ("sparsity", "head", "kept units")
        assert [each for each in checks if each.passed is False and each.name not in own] == []
        return next(each for each in checks if each.name == name)


@pytest.fixture
def output(dense, tmp_path):
    def make(kept: str = "0110", pattern: str = "2:4", method: str = "wanda") -> Output:
        return Output(dense, tmp_path / "out", kept, pattern, method)

    return make


# ---- sparsity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "pattern", "detail"),
    [
        ("0110", "2:4", "14 masked weights: 50.0 % zeros, 2:4 holds in every group"),
        ("11110000", "4:8", "14 masked weights: 50.0 % zeros, 4:8 holds in every group"),
        ("01", "2:4", "14 masked weights: 50.0 % zeros, 2:4 holds in every group"),
        ("0100", "1:4", "14 masked weights: 75.0 % zeros, 1:4 holds in every group"),
        ("01", "1:2", "14 masked weights: 50.0 % zeros, 1:2 holds in every group"),
        ("00011111", "unstructured", "14 masked weights: 37.5 % zeros"),
    ],
)
def test_masks_that_hold(output, kept, pattern, detail):
    assert output(kept, pattern).check("sparsity") == Check("sparsity", True, detail)


def test_more_zeros_than_the_mask_made_are_no_fault(output):
    made = output()
    made.zero(DOWN, "0100")
    assert made.check("sparsity").passed


def test_one_masked_weight(output):
    made = output()
    made.report["linears"] = made.report["linears"][:1]
    assert made.check("sparsity").detail == "1 masked weight: 50.0 % zeros, 2:4 holds in every group"


def test_too_few_zeros(output):
    made = output("01", "unstructured")
    made.tensors[UP][0, 0] = made.tensors[DOWN][3, 2] = made.tensors[DOWN][3, 4] = 1
    assert made.check("sparsity") == Check(
        "sparsity", False, f"{UP} has 191 zeros, its mask 192; 2 of 14 masked weights do not hold their mask"
    )


def test_a_group_that_is_too_full(output):
    """With zeros enough in all."""
    made = output()
    made.tensors[UP][:2, :4] = torch.tensor([[0.0, 1, 1, 1], [0, 0, 0, 1]])
    assert made.check("sparsity") == Check(
        "sparsity", False, f"{UP} does not hold 2:4 in 1 of its groups; 1 of 14 masked weights do not hold their mask"
    )


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rows": 23}, f"{UP} has shape [24, 16], its mask [23, 16]; 1 of 14 masked weights do not hold their mask"),
        ({"weight": "model.gone.weight"}, "has no tensor 'model.gone.weight'"),
    ],
)
def test_a_report_of_other_weights(output, changes, fault):
    made = output()
    made.linear(UP).update(changes)
    found = made.check("sparsity", against=False)
    assert found.passed is False
    assert fault in found.detail


def test_rows_that_are_no_groups(output):
    made = output("01", "1:2")
    made.report["mask"]["pattern"] = "3:5"
    assert made.check("sparsity").detail.startswith(
        "model.layers.0.mlp.down_proj.weight has rows of 24 weights, which are no groups of 5; 14 of 14 masked weights"
    )


@pytest.mark.parametrize("pattern", ["4:2", "half", "2:4:8", ""])
def test_a_pattern_that_cannot_be_meant(output, pattern):
    made = output()
    made.report["mask"]["pattern"] = pattern
    folder = made.write()
    with pytest.raises(UserError, match="is damaged: prune again"):
        verify(folder)


@pytest.mark.parametrize(
    ("kept", "detail"),
    [
        ("1", "no mask recorded; 0.0 % of block weights are zero"),
        ("0111", "no mask recorded; 25.0 % of block weights are zero"),
        ("0011", "no mask recorded; 50.0 % of block weights are zero, 2:4 holds in every group"),
        ("11110000", "no mask recorded; 50.0 % of block weights are zero, 4:8 holds in every group"),
    ],
)
@pytest.mark.parametrize("keys", [("mask",), ("linears",), ("mask", "linears", "rotation")])
def test_without_a_mask(output, kept, keys, detail):
    """Reports of before masks have none of the keys."""
    made = output(kept)
    for key in keys:
        del made.report[key]
    assert made.check("sparsity") == Check("sparsity", None, detail)


def test_a_mask_that_is_null(output):
    made = output()
    made.report |= {"mask": None, "linears": []}
    assert made.check("sparsity").detail.startswith("no mask recorded; 50.0 % of block")


def test_zeros_elsewhere_do_not_count(output):
    made = output("1")
    made.report |= {"mask": None}
    made.zero("lm_head.weight", "0")
    assert made.check("sparsity", against=False).detail == "no mask recorded; 0.0 % of block weights are zero"


def test_a_checkpoint_of_others(dense):
    with quiet_transformers():
        found = next(check for check in verify(dense) if check.name == "sparsity")
    assert found == Check("sparsity", None, "no mask recorded; 0.0 % of block weights are zero")


# ---- against the dense model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_a_mask_that_only_zeroes(output, method):
    assert output(method=method).check("kept units") == Check(
        "kept units",
        True,
        "14 masked weights: what is not zero is the dense model's; 7 other tensors are the dense ones, bit for bit",
    )


def test_a_kept_weight_that_changed(output):
    made = output()
    made.tensors[DOWN][3, 1] *= 1.0001
    assert made.check("kept units") == Check(
        "kept units", False, f"{DOWN} has weights that are neither zero nor the dense model's"
    )


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_another_tensor_that_changed(output, method):
    """A zero is no excuse where there is no mask."""
    made = output(method=method)
    made.tensors["model.norm.weight"][3] = 0
    assert made.check("kept units") == Check(
        "kept units", False, "model.norm.weight has no mask and is not the dense model's"
    )


def test_a_mask_in_another_dtype(output):
    made = output()
    made.tensors[DOWN] = made.tensors[DOWN].double()
    assert made.check("kept units").detail == f"{DOWN} has weights that are neither zero nor the dense model's"


def test_a_tensor_that_the_dense_model_has_not(output):
    made = output()
    made.tensors["new.weight"] = torch.zeros(2)
    with quiet_transformers():
        found = verify(made.write(), made.dense)[-1]
    assert found == Check("kept units", False, "new.weight is not a tensor of the dense model")


def test_a_mask_that_rewrites(output):
    made = output(method="sparsegpt")
    for linear in made.report["linears"]:
        made.tensors[linear["weight"]] *= 1.5
    assert made.check("kept units") == Check(
        "kept units",
        True,
        "7 other tensors are the dense ones, bit for bit; 14 masked weights rewritten by sparsegpt and not compared",
    )


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("sites", [False, True])
def test_a_rotation_leaves_nothing_to_compare(output, method, sites):
    made = output(method=method)
    made.report["rotation"] = {"kind": "shared", "learned": []}
    made.report["sites"] = [SITE] * sites
    for name in made.tensors:
        made.tensors[name] *= 1.5
    assert made.check("kept units") == Check(
        "kept units", None, "the weights are rotated: they are not compared with the dense model's"
    )


RECOVERED = Check(
    "kept units",
    True,
    "7 tensors outside the recovered linear modules are the dense ones, bit for bit; the weights that were recovered "
    "are not compared",
)


@pytest.mark.parametrize("sites", [False, True])
def test_recovered_weights_are_not_compared(output, sites):
    made = output()
    made.report |= {"recovery": examples.recovery(), "sites": [SITE] * sites}
    for name in made.tensors:
        made.tensors[name] *= 1.5 if "_proj" in name else 1
    assert made.check("kept units") == RECOVERED


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"],
)
@pytest.mark.parametrize("change", [lambda t: t * 1.0001, lambda t: t.double(), torch.zeros_like])
def test_what_recovery_leaves_alone_is_compared(output, name, change):
    made = output()
    made.report["recovery"] = examples.recovery(on_the_fly=True)
    made.tensors[name] = change(made.tensors[name])
    assert made.check("kept units") == Check(
        "kept units", False, f"{name} is no weight that recovery changes and is not the dense model's"
    )


def test_a_tensor_that_the_dense_model_has_not_in_a_recovered_one(output):
    made = output()
    made.report["recovery"] = examples.recovery(on_the_fly=True)
    made.tensors["new.weight"] = torch.zeros(2)
    with quiet_transformers():
        found = verify(made.write(), made.dense)[-1]
    assert found.passed is False
    assert found.detail.startswith("new.weight is no weight that recovery changes")


def test_a_bias_that_was_opened_is_recovered_too(output):
    """Compensation adds them to linears; the dense model has none."""
    made = output()
    made.report["recovery"] = examples.recovery(on_the_fly=True)
    made.tensors[UP.replace("weight", "bias")] = torch.ones(24)
    with quiet_transformers():
        found = verify(made.write(), made.dense)[-1]
    assert found == RECOVERED


@pytest.mark.parametrize("recovery", [None, examples.recovery(on_the_fly=True)])
def test_rotated_and_recovered_leaves_nothing_to_compare(output, recovery):
    made = output()
    made.report |= {"rotation": {"kind": "values", "learned": []}, "recovery": recovery}
    for name in made.tensors:
        made.tensors[name] *= 1.5
    assert made.check("kept units") == Check(
        "kept units", None, "the weights are rotated: they are not compared with the dense model's"
    )


SITE = {"block": 0, "space": "mlp", "units": 24, "kept": list(range(24)), "method": "none"}


@pytest.mark.parametrize(
    ("method", "detail"),
    [
        ("wanda", "producers of 0 pruned spaces hold the dense rows, bit for bit"),
        (
            "sparsegpt",
            "producers of 0 pruned spaces hold the dense rows, bit for bit; 14 masked weights rewritten by sparsegpt "
            "and not compared",
        ),
    ],
)
def test_masks_beside_units(output, method, detail):
    """The rows of kept units are masked too."""
    made = output(method=method)
    made.report["sites"] = [SITE]
    if method == "sparsegpt":
        made.tensors[UP] *= 1.5
    assert made.check("kept units") == Check("kept units", True, detail)


def test_a_kept_row_that_changed_beside_masks(output):
    made = output()
    made.report["sites"] = [SITE]
    made.tensors[UP][3, 1] = 7
    assert made.check("kept units").detail == f"{UP} does not hold the dense model's rows of the kept units"


def test_a_zero_is_no_excuse_where_there_is_no_mask(output):
    made = output()
    made.report |= {"sites": [SITE], "linears": [made.linear(DOWN)]}
    made.tensors[UP] = load_file(made.dense / FILE)[UP]
    made.tensors[UP][3, 1] = 0
    gate = UP.replace("up_proj", "gate_proj")
    made.tensors[gate] = load_file(made.dense / FILE)[gate]
    assert made.check("kept units").detail == f"{UP} does not hold the dense model's rows of the kept units"


# ---- units that the report keeps -----------------------------------------------------------------------------------


def unpruned(dense: Path, folder: Path, **site: Any) -> Path:
    """The dense model under another name, and a report that says something of units of its first block."""
    folder.mkdir()
    for name in ("config.json", FILE):
        (folder / name).write_bytes((dense / name).read_bytes())
    told = examples.site(0, **({"units": 24, "kept": list(range(24)), "method": "none"} | site))
    source = {"name": "dense", "fingerprint": Checkpoint.open(dense).fingerprint}
    container = {"model_type": "llama", "padded": []}
    report = examples.report([told], source=source, container=container, files={})
    (folder / "ckpt_prune.json").write_text(json.dumps(report))
    return folder


@pytest.mark.parametrize(
    ("site", "detail"),
    [
        ({}, None),
        ({"kept": [0, 24]}, "ckpt_prune.json keeps units of mlp in block 0 that the dense model has not"),
        ({"units": 25}, "ckpt_prune.json keeps units of mlp in block 0 that the dense model has not"),
        (
            {"kept": [0, 1]},
            "model.layers.0.mlp.gate_proj.weight does not hold the dense model's rows of the kept units",
        ),
        ({"space": "qk"}, "ckpt_prune.json keeps units of qk, which the dense model has not"),
    ],
)
def test_units_that_the_weights_do_not_have(dense: Path, tmp_path: Path, site: dict[str, Any], detail: str | None):
    with quiet_transformers():
        check = next(
            each for each in verify(unpruned(dense, tmp_path / "out", **site), dense) if each.name == "kept units"
        )
    assert check.passed is (detail is None)
    assert detail is None or check.detail == detail
