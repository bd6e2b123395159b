"""Samples of several texts or folders, in equal shares, mixed evenly."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def deal_shares(counts: Sequence[int], samples: int, skip: int = 0) -> list[range]:
    """Return the samples that each source gives, as places in its own order.

    Samples are dealt in turn to sources that have any left: where one has fewer than its share, the others give more.

    Args:
        counts: samples that the sources have.
        samples: how many to take of all together; all if there are fewer.
        skip: pass over the samples that so many would be, and take others.
    """
    ends = zip(_deal(counts, skip), _deal(counts, skip + samples), strict=True)
    return [range(start, stop) for start, stop in ends]


def mix_evenly(counts: Sequence[int]) -> Tensor:
    """Return an order of so many samples of each source, one source behind the other, in which every fold has all."""
    places = torch.cat([(torch.arange(count) + 0.5) / max(1, count) for count in counts])
    return places.argsort(stable=True)


def name_sources(files: Sequence[Path], counts: Sequence[int]) -> list[str]:
    """Return the name of the file of each sample, so many of each, as `mix_evenly` orders them; none of one file."""
    if len(counts) < 2:
        return []
    short = [path.name for path in files]
    names = short if len(set(short)) == len(short) else [str(path) for path in files]
    of_samples = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    return [of_samples[place] for place in mix_evenly(counts).tolist()]


def _deal(counts: Sequence[int], total: int) -> list[int]:
    shares, left = [0] * len(counts), min(total, sum(counts))
    while left:
        for index, count in enumerate(counts):
            if left and shares[index] < count:
                shares[index] += 1
                left -= 1
    return shares
