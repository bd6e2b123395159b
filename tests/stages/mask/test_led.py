"""Masks of a mixture whose first block has no experts."""

from pathlib import Path
from typing import Any

import pytest

from ckpt_prune.runner.messages import messages
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.stages import FullRecipe
from tests.contract.dense import Dense
from tests.contract.models import LED


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    return Dense(tmp_path_factory.mktemp("led"))


def recipe(**mask: Any) -> FullRecipe:
    share = {} if "pattern" in mask else {"ratio": 0.5}
    return FullRecipe.model_validate({"version": 1, "name": "test", "mask": {"method": "wanda"} | mask} | share)


def test_it_is_said(dense: Dense) -> None:
    assert (
        "the mask leaves 1 block as they are (first_k_dense_replace in config.json): one mlp stands "
        "there in place of experts"
    ) in messages(prepare_plan(dense.request(LED, recipe())))


@pytest.mark.parametrize("allocation", ["owl", "alpha"])
def test_zeros_are_shared_out_over_the_others(dense: Dense, allocation: str, tmp_path: Path) -> None:
    report = dense.prune(LED, recipe(allocation=allocation), tmp_path / "out")
    first, *others = report["mask"]["shares"]["ratios"]
    assert first == 0
    assert {linear["block"] for linear in report["linears"]} == set(LED.spaced_blocks)
    sizes = [
        sum(linear["rows"] * linear["columns"] for linear in report["linears"] if linear["block"] == block)
        for block in LED.spaced_blocks
    ]
    mean = sum(ratio * size for ratio, size in zip(others, sizes, strict=True)) / sum(sizes)
    assert mean == pytest.approx(0.5, abs=1e-5)
