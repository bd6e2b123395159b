"""Samples of equal length that a model is run on, handed out in batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ckpt_prune.measure.samples.text import fingerprint_windows


def whole_inputs(samples: "Samples", row: int) -> dict[str, Tensor] | None:
    """Return what the whole that a model is a part of is called with for one sample, images and all.

    None if samples are of the part alone.
    """
    if isinstance(samples, _Part):
        return whole_inputs(samples.samples, samples.place(row))
    own: Any = samples
    inputs: dict[str, Tensor] | None = own.whole_inputs(row) if reads_whole(samples) else None
    return inputs


def scored_tokens(samples: "Samples", rows: slice) -> Tensor | None:
    """Return which tokens a loss counts, (rows, T) bool: those of text, not of images or padding; None for all."""
    return _select_tokens(samples, rows, lambda own, part: own.scored[part] if isinstance(own, ScoredWindows) else None)


def counted_tokens(samples: "Samples", rows: slice) -> Tensor | None:
    """Return which tokens of the hidden states are no padding, (rows, T) bool; None for all."""
    return _select_tokens(samples, rows, lambda own, part: own.counted(part) if hasattr(own, "counted") else None)


def _select_tokens(samples: "Samples", rows: slice, select: Callable[[Any, slice], Tensor | None]) -> Tensor | None:
    """Return what `select` says of a whole set's samples, for those of a part of it."""
    if not isinstance(samples, _Part):
        return select(samples, rows)
    places = map(samples.place, range(*rows.indices(len(samples))))
    parts = [_select_tokens(samples.samples, slice(place, place + 1), select) for place in places]
    known = [each for each in parts if each is not None]
    return torch.cat(known) if known else None


def reads_whole(samples: "Samples") -> bool:
    """Return whether samples are of the whole that a model is a part of (`whole_inputs`)."""
    return reads_whole(samples.samples) if isinstance(samples, _Part) else hasattr(samples, "whole_inputs")


def runs_alone(samples: "Samples") -> bool:
    """Return whether each sample is run by itself: of the whole, or of as many tokens as it needs."""
    return reads_whole(samples) or varies(samples)


def varies(samples: "Samples") -> bool:
    """Return whether samples have as many tokens as they need (`TowerImages`), so that one is taken at a time."""
    return varies(samples.samples) if isinstance(samples, _Part) else bool(getattr(samples, "varies", False))


class Samples(Protocol):
    """Samples of equal length. Folds are contiguous runs of them."""

    @property
    def tokens(self) -> int:
        """Tokens of one sample inside the model."""
        ...

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the model is run on, in hex."""
        ...

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Return what the model is called with for these samples, on CPU."""
        ...


def move_batch(batch: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Move a batch to a device and cast its floats: some models leave the type of pixels to their caller (BEiT)."""
    return {
        name: values.to(device, dtype) if values.is_floating_point() else values.to(device)
        for name, values in batch.items()
    }


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Windows of a text.

    Attributes:
        windows: token ids, (N, T) int64.
        origin: how many are of which text, in words; "" if that is not known.
    """

    windows: Tensor
    origin: str = ""

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def tokens(self) -> int:
        return int(self.windows.shape[1])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids (`fingerprint_windows`)."""
        return fingerprint_windows(self.windows)

    def batch(self, rows: slice) -> dict[str, Tensor]:
        return {"input_ids": self.windows[rows]}


@dataclass(frozen=True, eq=False)
class ScoredWindows(TokenWindows):
    """Windows of which a loss counts some tokens.

    Attributes:
        scored: those, (N, T) bool.
    """

    scored: Tensor = field(default_factory=lambda: torch.empty(0))

    def called_with(self, rows: slice) -> list[dict[str, Tensor]]:
        """Return what the whole model is called with for these samples, in turn."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Part:
    """A part of samples. It has the fingerprint of the whole set."""

    samples: Samples

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def tokens(self) -> int:
        """Tokens of one sample inside the model."""
        return self.samples.tokens

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the whole set."""
        return self.samples.fingerprint

    def place(self, row: int) -> int:
        """Return the number in the whole set of a sample."""
        return row


@dataclass(frozen=True)
class SampleRange(_Part):
    """A run of samples, from `start` to before `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Return what the model is called with; rows are counted from `start`."""
        first, last, _ = rows.indices(len(self))
        return self.samples.batch(slice(self.start + first, self.start + last))

    def place(self, row: int) -> int:
        """Return the number in the whole set of a sample."""
        return self.start + row


@dataclass(frozen=True)
class SpreadSamples(_Part):
    """So many of the samples, as far apart as can be."""

    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Return what the model is called with; rows are counted among those that are left."""
        places = [self.place(row) for row in range(*rows.indices(self.count))]
        batches = [self.samples.batch(slice(place, place + 1)) for place in places]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def place(self, row: int) -> int:
        """Return the number in the whole set of a sample."""
        return row * len(self.samples) // self.count


@dataclass(frozen=True)
class ShortWindows(_Part):
    """The first tokens of windows of text, for a causal model: what it computes there is the same as in the whole."""

    length: int

    @property
    def tokens(self) -> int:
        """Tokens of one sample inside the model."""
        return self.length

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Return what the model is called with."""
        return {name: values[:, : self.length] for name, values in self.samples.batch(rows).items()}


def split_batches(samples: Samples, tokens: int) -> list[slice]:
    """Cut samples into runs of at most so many tokens, or of one sample."""
    size = 1 if varies(samples) else max(1, tokens // samples.tokens)
    return [slice(start, min(start + size, len(samples))) for start in range(0, len(samples), size)]
