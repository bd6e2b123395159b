"""Windows of a model's tokens, as a model with fewer tokens writes and reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.measure.samples.samples import ScoredWindows

TokenParts = Callable[[int], Sequence[int]]
"""A model's token → the tokens of a model with fewer that stand in its place."""


@dataclass(frozen=True, eq=False)
class WrittenWindows(ScoredWindows):
    """Windows in other tokens. The first token of each is not predicted, nor is what fills it up at its end."""

    def called_with(self, rows: slice) -> list[dict[str, Tensor]]:
        return [{"input_ids": self.windows[rows]}]


def write_with(windows: Tensor, parts: TokenParts) -> WrittenWindows:
    """Return windows (windows, length) as a model with fewer tokens writes them, filled up at their ends."""
    written = [[parts(token) for token in window] for window in windows.tolist()]
    flat = [[part for token in window for part in token] for window in written]
    longest = max(map(len, flat))
    ids = torch.tensor([ids + ids[:1] * (longest - len(ids)) for ids in flat])
    places, first = torch.arange(longest), torch.tensor([len(window[0]) for window in written])
    lengths = torch.tensor([len(ids) for ids in flat])
    return WrittenWindows(ids, scored=(places >= first[:, None]) & (places < lengths[:, None]))
