"""What a model is run on while it is measured: samples of equal length, handed out in batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ckpt_prune.measure.samples.text import fingerprint_windows


class Samples(Protocol):
    """Calibration samples; folds are contiguous runs of them."""

    @property
    def tokens(self) -> int:
        """Tokens of one sample inside the model."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of what the model is run on."""
        ...

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """What the model is called with for these samples, on CPU."""
        ...


def move_batch(batch: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """A batch where a model runs, pixels in the type of its weights: some models leave that to their caller (BEiT)."""
    return {
        name: values.to(device, dtype) if values.is_floating_point() else values.to(device)
        for name, values in batch.items()
    }


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Windows of a text.

    Attributes:
        windows: token ids, (N, T) int64.
    """

    windows: Tensor

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.windows)

    @property
    def tokens(self) -> int:
        """Tokens of a window."""
        return int(self.windows.shape[1])

    @property
    def fingerprint(self) -> str:
        """Hash of the token ids (`text_fingerprint`)."""
        return fingerprint_windows(self.windows)

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """`input_ids` of these windows."""
        return {"input_ids": self.windows[rows]}


@dataclass(frozen=True)
class SampleRange:
    """Some samples of a row, from `start` to before `stop`.

    The fingerprint is that of the whole row.
    """

    samples: Samples
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Of each."""
        return self.samples.tokens

    @property
    def fingerprint(self) -> str:
        """Of all of them."""
        return self.samples.fingerprint

    def __len__(self) -> int:
        return self.stop - self.start

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """What the model is called with for these, counted from `start`."""
        first, last, _ = rows.indices(len(self))
        return self.samples.batch(slice(self.start + first, self.start + last))


def split_batches(samples: Samples, tokens: int) -> list[slice]:
    """Runs of samples of at most so many tokens, or of one sample."""
    size = max(1, tokens // samples.tokens)
    return [slice(start, min(start + size, len(samples))) for start in range(0, len(samples), size)]
