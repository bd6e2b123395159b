from pathlib import Path

import pytest
import torch

from tests.families import calibrate, make

from .recovering import pruned_by
from .stored import Sources
from .whole import sources_of_all, wanted


@pytest.fixture(scope="package")
def sources(tmp_path_factory) -> Sources:
    def measure(variant, folder, out, **options):
        return calibrate(folder, out, **options)

    return Sources(tmp_path_factory.mktemp("sources"), make, measure)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Sources:
    return sources_of_all(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def masked_llama(dense, tmp_path_factory) -> Path:
    return pruned_by(dense.folder("llama"), tmp_path_factory.mktemp("masked") / "llama", wanted("magnitude"), None)


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Matrices this small only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
