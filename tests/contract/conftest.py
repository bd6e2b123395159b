"""The dense checkpoints of all cases, made once for all tests."""

import pytest

from .dense import Dense


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    return Dense(tmp_path_factory.mktemp("contract"))
