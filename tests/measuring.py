"""What a job measures first, in a scratch folder that lives as long as it is looked at."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.runner.settle import Settled
from ckpt_prune.stages.spaces import measure_dense as measuring


@contextmanager
def measured(settled: Settled, beside: Path) -> Iterator[Settled]:
    """The job with all the moments it needs, its widths decided."""
    with tempfile.TemporaryDirectory(dir=beside) as scratch:
        yield measuring.measured(settled, Path(scratch) / "measured", Journal(Path(scratch), "job"))
