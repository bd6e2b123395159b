"""Dense models of the rooms below, and the folders that commands run in."""

from pathlib import Path

import pytest

from tests.cli.conftest import hub, made, place
from tests.stages.recovering import pruned_by
from tests.stages.whole import make_recipe, sources_of_all
from tests.stored import Sources

__all__ = ["hub", "made", "place"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Sources:
    return sources_of_all(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def masked_llama(dense, tmp_path_factory) -> Path:
    return pruned_by(dense.folder("llama"), tmp_path_factory.mktemp("masked") / "llama", make_recipe("magnitude"), None)
