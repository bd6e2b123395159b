"""Graphs, each exported once for all tests."""

import pytest

from tests.graphs import Exported, exports


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """As `tests.graphs.exports`."""
    return exports(tmp_path_factory)
