"""Wall time and memory that the parts of a run take."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ckpt_prune.common.memory import peak_bytes
from ckpt_prune.common.phases import Phase, time_phases
from ckpt_prune.job.report import BlockTime, PhaseRecord


class PhaseTimer:
    """Records of the timed parts of one run, in the order in which they ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.records: list[PhaseRecord] = []

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Record what the body takes, unless it raises."""
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        start = time.perf_counter()
        with time_phases() as phases:
            yield
        if cuda:
            torch.cuda.synchronize(self._device)
        self.records.append(
            PhaseRecord(
                name=name,
                seconds=round(time.perf_counter() - start, 3),
                peak_bytes=peak_bytes(),
                device_peak_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else None,
                phases=_round_all(phases.seconds),
                blocks=[
                    BlockTime(block=lap.block, seconds=round(lap.seconds, 4), phases=_round_all(lap.phases))
                    for lap in phases.laps
                ],
            )
        )


def _round_all(seconds: Mapping[Phase, float]) -> dict[str, float | None]:
    return {name: round(value, 4) for name, value in seconds.items()}
