from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ckpt_prune.calibration.statistics import Statistics
from tests.families import calibrate, make


@dataclass
class Sources:
    """Dense checkpoints and their statistics, each made once."""

    root: Path
    _statistics: dict[tuple[str, int], Statistics] = field(default_factory=dict)

    def folder(self, variant: str, dtype: torch.dtype = torch.float32, shard: str | None = None) -> Path:
        folder = self.root / f"{variant}-{str(dtype).removeprefix('torch.')}-{shard}"
        return folder if folder.exists() else make(folder, variant, dtype=dtype, shard=shard)

    def statistics(self, variant: str, folds: int = 1) -> Statistics:
        if (variant, folds) not in self._statistics:
            out = self.root / f"{variant}-statistics-{folds}"
            self._statistics[variant, folds] = calibrate(self.folder(variant), out, folds=folds)
        return self._statistics[variant, folds]


@pytest.fixture(scope="package")
def sources(tmp_path_factory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Matrices this small only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
