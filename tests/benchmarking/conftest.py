"""Graphs, each exported once for all tests, and processes that are waited for."""

import pytest

from ckpt_prune.benchmarking import processes
from tests.graphs import Exported, exports


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exports(tmp_path_factory)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends by itself may take as long as a busy machine needs."""
    monkeypatch.setattr(processes, "_PATIENCE", 86400.0)
