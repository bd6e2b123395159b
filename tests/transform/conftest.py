import pytest
import torch

from tests.families import calibrate, make

from .stored import Sources


@pytest.fixture(scope="package")
def sources(tmp_path_factory) -> Sources:
    def measure(variant, folder, out, **options):
        return calibrate(folder, out, **options)

    return Sources(tmp_path_factory.mktemp("sources"), make, measure)


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Matrices this small only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
