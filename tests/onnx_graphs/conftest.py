"""Graphs, each exported once for all tests."""

import pytest

from tests.graphs import Exported, exports


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Export graphs as `tests.graphs.exports` does."""
    return exports(tmp_path_factory)
