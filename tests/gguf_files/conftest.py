"""llama.cpp in copies of this process: a Python of its own takes longer than a tiny model."""

from collections.abc import Iterator

import pytest

from ckpt_prune.gguf import llama_cpp
from tests.forked import fork_module


@pytest.fixture(autouse=True, scope="session")
def fork_llama_cpp(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--thorough` as for users; `tests/runtimes` starts a Python each time."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.config.getoption("--thorough"):
            fork_module(patch, llama_cpp, tmp_path_factory.mktemp("llama-cpp"))
        yield
