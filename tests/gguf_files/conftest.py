"""llama.cpp in copies of this process: a Python of its own takes longer than a tiny model."""

from collections.abc import Iterator

import pytest

from ckpt_prune.gguf import llama_cpp
from tests.forked import fork_module


@pytest.fixture(autouse=True, scope="session")
def fork_llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`tests/runtimes` starts a Python each time, as for users."""
    with pytest.MonkeyPatch.context() as patch:
        fork_module(patch, llama_cpp, tmp_path_factory.mktemp("llama-cpp"))
        yield
