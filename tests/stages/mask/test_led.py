"""Masks of a mixture whose first block has an mlp in place of experts."""

from pathlib import Path
from typing import Any

import pytest

from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.stages import FullRecipe
from tests.contract.dense import Dense
from tests.contract.models import LED


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    return Dense(tmp_path_factory.mktemp("led"))


def recipe(**mask: Any) -> FullRecipe:
    share = {} if "pattern" in mask else {"ratio": 0.5}
    return FullRecipe.model_validate({"version": 1, "name": "test", "mask": {"method": "wanda"} | mask} | share)


@pytest.mark.parametrize("allocation", ["owl", "alpha"])
def test_zeros_are_shared_out_over_blocks_of_both_kinds(dense: Dense, allocation: str, tmp_path: Path) -> None:
    report = dense.prune(LED, recipe(allocation=allocation), tmp_path / "out")
    ratios = report["mask"]["shares"]["ratios"]
    model = open_model(tmp_path / "out")
    assert {linear["block"] for linear in report["linears"]} == set(range(model.blocks))
    sizes = [
        sum(linear["rows"] * linear["columns"] for linear in report["linears"] if linear["block"] == block)
        for block in range(model.blocks)
    ]
    mean = sum(ratio * size for ratio, size in zip(ratios, sizes, strict=True)) / sum(sizes)
    assert mean == pytest.approx(0.5, abs=1e-5)
