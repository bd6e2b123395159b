from collections.abc import Callable

import pytest

from .twins import Twins, written_once


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twins]:
    return written_once(tmp_path_factory)
