"""One folder of files to change for all tests."""

from pathlib import Path

import pytest

from tests.fuzz.targets import make_place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("fuzz"), graphs=False)
