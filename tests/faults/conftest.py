"""One machine for all trials of a run."""

import pytest

from tests.faults.jobs import make_inputs
from tests.faults.trial import Machine


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("faults")
    make_inputs(folder, graphs=False)
    return Machine(folder)
