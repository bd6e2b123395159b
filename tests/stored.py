"""Helpers for tests of outputs: dense checkpoints made once, and a Python that lacks this package."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckpt_prune.measure.statistics.folder import Statistics


@dataclass
class Sources:
    """Dense checkpoints and their statistics, each made once.

    `make(folder, variant, dtype=, shard=)` writes a checkpoint, `calibrate(variant, folder, out, folds=)` measures it.
    """

    root: Path
    make: Callable[..., Path]
    calibrate: Callable[..., Statistics]
    _statistics: dict[tuple[str, int], Statistics] = field(default_factory=dict)

    def folder(self, variant: str, dtype: torch.dtype = torch.float32, shard: str | None = None) -> Path:
        folder = self.root / f"{variant}-{str(dtype).removeprefix('torch.')}-{shard}"
        return folder if folder.exists() else self.make(folder, variant, dtype=dtype, shard=shard)

    def statistics(self, variant: str, folds: int = 1) -> Statistics:
        if (variant, folds) not in self._statistics:
            out = self.root / f"{variant}-statistics-{folds}"
            self._statistics[variant, folds] = self.calibrate(variant, self.folder(variant), out, folds=folds)
        return self._statistics[variant, folds]


def run_elsewhere(script: str, *arguments: str, root: Path) -> None:
    """Run a script in `root` where this package is not installed, offline and on one thread; it must succeed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(root / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
