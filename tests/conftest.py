"""What rooms share: a folder for each test, checkpoints made once, and one thread, because tensors here are tiny."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.families import calibrate, make
from tests.stored import Sources

ROOT = Path(__file__).resolve().parents[1]

torch.set_num_threads(1)
# A fresh interpreter runs this checkout too, from whichever folder.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path) -> Iterator[Path]:
    """The working folder: one of the test's own, without anything in it.

    Not by `monkeypatch`, whose `undo` a test may call.
    """
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Sources:
    """Dense checkpoints of the language models' variants, and their statistics, each made once."""

    def measure(variant, folder, out, **options):
        return calibrate(folder, out, **options)

    return Sources(tmp_path_factory.mktemp("sources"), make, measure)
