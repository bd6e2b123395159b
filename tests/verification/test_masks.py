"""`verify` on masks: outputs made by hand, each report beside weights that do or do not hold it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Check
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.verification.verify import verify
from tests.evaluation.tiny import tiny_llama
from tests.show import examples

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
        return next(record for record in self.report["linears"] if record["weight"] == name)

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
        independent = ("sparsity", "head", "kept units")
        assert [other for other in checks if other.passed is False and other.name not in independent] == []
        return next(other for other in checks if other.name == name)


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
        ("0100", "1:4", "14 masked weights: 75.0 % zeros, 1:4 holds in every group"),
        ("00011111", "unstructured", "14 masked weights: 37.5 % zeros"),
    ],
)
def test_masks_that_hold(output, kept, pattern, detail):
    masked_output = output(kept, pattern)
    masked_output.zero("lm_head.weight", "0")  # zeros elsewhere do not count
    assert masked_output.check("sparsity", against=False) == Check("sparsity", True, detail)


def too_few_zeros(masked_output: Output) -> None:
    masked_output.tensors[UP][0, 0] = masked_output.tensors[DOWN][3, 2] = masked_output.tensors[DOWN][3, 4] = 1


def too_full_a_group(masked_output: Output) -> None:
    """With zeros enough in all."""
    masked_output.tensors[UP][:2, :4] = torch.tensor([[0.0, 1, 1, 1], [0, 0, 0, 1]])


FAULTS = {
    "too few zeros": (
        ("01", "unstructured", too_few_zeros),
        f"{UP} has 191 zeros, its mask 192; 2 of 14 masked weights do not hold their mask",
    ),
    "a group that is too full": (
        ("0110", "2:4", too_full_a_group),
        f"{UP} does not hold 2:4 in 1 of its groups; 1 of 14 masked weights do not hold their mask",
    ),
    "another shape": (
        ("0110", "2:4", lambda masked_output: masked_output.linear(UP).update({"rows": 23})),
        f"{UP} has shape [24, 16], its mask [23, 16]; 1 of 14 masked weights do not hold their mask",
    ),
    "no such weight": (
        ("0110", "2:4", lambda masked_output: masked_output.linear(UP).update({"weight": "model.gone.weight"})),
        "has no tensor 'model.gone.weight'",
    ),
    "a weight of another part": (
        ("0110", "2:4", lambda masked_output: masked_output.report["mask"].update({"only": "attention"})),
        f"{UP.replace('up', 'down')} is not of the attention, which alone was masked; 10 of 14 masked weights do not",
    ),
    "rows that are no groups": (
        ("01", "1:2", lambda masked_output: masked_output.report["mask"].update({"pattern": "3:5"})),
        "down_proj.weight has rows of 24 weights, which are no groups of 5; 14 of 14 masked weights",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_masks_that_do_not_hold(output, fault):
    (kept, pattern, change), detail = FAULTS[fault]
    masked_output = output(kept, pattern)
    change(masked_output)
    check = masked_output.check("sparsity", against=False)
    assert check.passed is False
    assert detail in check.detail


@pytest.mark.parametrize("pattern", ["4:2", "half", ""])
def test_a_pattern_that_cannot_be_meant(output, pattern):
    masked_output = output()
    masked_output.report["mask"]["pattern"] = pattern
    folder = masked_output.write()
    with pytest.raises(UserError, match="is damaged: prune again"):
        verify(folder)


@pytest.mark.parametrize(
    ("kept", "detail"),
    [
        ("0111", "no mask recorded; 25.0 % of block weights are zero"),
        ("11110000", "no mask recorded; 50.0 % of block weights are zero, 4:8 holds in every group"),
    ],
)
@pytest.mark.parametrize("keys", [("mask",), ("mask", "linears", "rotation")])
def test_without_a_mask(output, kept, keys, detail):
    """Reports of before masks have none of the keys."""
    masked_output = output(kept)
    for key in keys:
        del masked_output.report[key]
    assert masked_output.check("sparsity", against=False) == Check("sparsity", None, detail)


# ---- against the dense model ---------------------------------------------------------------------------------------

SITE = {"block": 0, "space": "mlp", "units": 24, "kept": list(range(24)), "method": "none"}
NORM = "model.norm.weight"
MASKED = "14 masked weights: what is not zero is the dense model's; 7 other tensors are the dense ones, bit for bit"
REWRITTEN = "7 other tensors are the dense ones, bit for bit; 14 masked weights rewritten by sparsegpt and not compared"
RECOVERED = (
    "7 tensors outside the recovered linear modules are the dense ones, bit for bit; the weights that were recovered "
    "are not compared"
)
ROTATED = "the weights are rotated: they are not compared with the dense model's"
ROWS = "producers of 0 pruned spaces hold the dense rows, bit for bit"


def scale(*names: str, by: float = 1.5) -> Any:
    """Multiply the tensors whose names have one of these parts."""

    def change(masked_output: Output) -> None:
        for name, tensor in masked_output.tensors.items():
            if any(part in name for part in names):
                masked_output.tensors[name] = tensor * by

    return change


def widen(name: str) -> Any:
    return lambda masked_output: masked_output.tensors.update({name: masked_output.tensors[name].double()})


def zero_one(name: str) -> Any:
    """Set one number of the dense tensor to zero."""

    def change(masked_output: Output) -> None:
        masked_output.tensors[name] = load_file(masked_output.dense / FILE)[name]
        masked_output.tensors[name].view(-1)[3] = 0

    return change


RECOVERY = {"recovery": examples.recovery(on_the_fly=True)}
UNMASKED = {"mask": None, "linears": [], "sites": [SITE]}
CASES = {
    "a mask that only zeroes": ("wanda", {}, None, True, MASKED),
    "a kept weight that changed": ("wanda", {}, scale(DOWN, by=1.0001), False, f"{DOWN} has weights that are neither"),
    "a masked weight in another dtype": ("magnitude", {}, widen(DOWN), False, f"{DOWN} has weights that are neither"),
    "a zero outside masks": ("wanda", {}, zero_one(NORM), False, f"{NORM} is not the dense model's"),
    "a zero outside masks that rewrite": ("sparsegpt", {}, zero_one(NORM), False, f"{NORM} is not the dense model's"),
    "a mask that rewrites": ("sparsegpt", {}, scale("_proj"), True, REWRITTEN),
    "rotated": ("wanda", {"rotation": {"kind": "shared", "learned": []}}, scale(""), None, ROTATED),
    "rotated and recovered": (
        "wanda",
        {"rotation": {"kind": "values", "learned": []}, **RECOVERY},
        scale(""),
        None,
        ROTATED,
    ),
    "recovered": ("wanda", RECOVERY | {"sites": [SITE]}, scale("_proj"), True, RECOVERED),
    "recovered, a norm scaled": ("wanda", RECOVERY, scale("input_layernorm"), False, "and recovery does not change it"),
    "recovered, another dtype": (
        "wanda",
        RECOVERY,
        widen("lm_head.weight"),
        False,
        "lm_head.weight is not",
    ),
    "masks beside units": ("wanda", {"sites": [SITE]}, None, True, ROWS),
    "masks that rewrite beside units": ("sparsegpt", {"sites": [SITE]}, scale(UP), True, f"{ROWS}; 14 masked weights"),
    "a row that changed beside masks": ("wanda", {"sites": [SITE]}, scale(UP), False, f"{UP} does not hold the dense"),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_dense_model(output, case):
    method, report, change, passed, detail = CASES[case]
    masked_output = output(method=method)
    masked_output.report |= report
    if change is not None:
        change(masked_output)
    check = masked_output.check("kept units")
    assert check.passed is passed
    assert detail in check.detail


@pytest.mark.parametrize(
    ("name", "report", "passed"),
    [
        ("new.weight", {}, False),
        ("new.weight", RECOVERY, False),
        # Compensation opens biases of linears, which the dense model has not, and recovery trains them.
        (UP.replace("weight", "bias"), RECOVERY, True),
    ],
)
def test_a_tensor_that_the_dense_model_has_not(output, name, report, passed):
    masked_output = output()
    masked_output.report |= report
    masked_output.tensors[name] = torch.ones(24)
    with quiet_transformers():
        check = verify(masked_output.write(), masked_output.dense)[-1]
    assert check.passed is passed
    assert passed or check.detail.startswith("new.weight is not a tensor of the dense model")


# ---- units that the report keeps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "detail"),
    [
        ({}, None),
        ({"kept": [0, 24]}, "ckpt_prune.json keeps units of mlp in block 0 that the dense model has not"),
        ({"units": 25}, "ckpt_prune.json keeps units of mlp in block 0 that the dense model has not"),
        ({"kept": [0, 1]}, f"{GATE} does not hold the dense model's rows of the kept units"),
        ({"space": "qk"}, "ckpt_prune.json keeps units of qk, which the dense model has not"),
    ],
)
def test_units_that_the_weights_do_not_have(output, site, detail):
    masked_output = output("1")
    masked_output.report |= UNMASKED | {"sites": [SITE | site]}
    check = masked_output.check("kept units")
    assert check.passed is (detail is None)
    assert detail is None or check.detail == detail


def test_a_zero_in_a_row_is_no_excuse_without_a_mask(output):
    masked_output = output("1")
    masked_output.report |= UNMASKED
    zero_one(GATE)(masked_output)
    assert masked_output.check("kept units").detail == f"{GATE} does not hold the dense model's rows of the kept units"
