"""What rooms share: checkpoints of every variant, made once; and one thread, because tensors here are tiny."""

import pytest
import torch

from tests.families import calibrate, make
from tests.stored import Sources

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Sources:
    """Dense checkpoints of the language models' variants, and their statistics, each made once."""

    def measure(variant, folder, out, **options):
        return calibrate(folder, out, **options)

    return Sources(tmp_path_factory.mktemp("sources"), make, measure)
