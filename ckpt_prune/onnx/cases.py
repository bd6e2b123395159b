"""Which inputs a graph is compared with PyTorch on: batches, lengths, padding, and texts cut for the cache."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Padding = Literal["none", "left", "right"]

LONG = 24
"""Tokens of the longer batch cases, and of the text that goes through the cache in chunks."""
STEPS = 16
"""Tokens that are generated."""
IMAGE_BATCHES = (1, 2, 5)
NOISE = 8
"""Windows, or images, where there is no data."""


@dataclass(frozen=True)
class TextCase:
    """A batch of texts."""

    ids: Tensor
    """int64 (B, T)."""
    keep: Tensor
    """bool (B, T): false where a token is padding."""
    padding: Padding
    chunks: tuple[int, ...] = ()
    """How many tokens go through the cache at a time, T in all; empty: all in one pass."""
    segments: Tensor | None = None
    """int64 (B, T), the `token_type_ids`: one in the second half of each text. None: all zeros."""


def text_cases(windows: Tensor, *, pad: int, left: bool, segments: bool = False) -> list[TextCase]:
    """Batches of several sizes and lengths, of the windows' own tokens.

    Args:
        windows: int64 (N, T).
        pad: token that stands where there is none.
        left: pad a batch on the left too, as generation does.
        segments: texts of a batch are in two segments; one text alone is in one.
    """
    window = windows.shape[1]
    long = min(LONG, window)
    cases = [_case(windows, 1, 1, "none", pad), _case(windows, 1, min(16, window), "none", pad)]
    cases.append(_case(windows, 2, min(7, window), "right", pad))
    cases.append(_case(windows, 3, long, "left" if left else "right", pad))
    cases.append(_case(windows, 1, window, "none", pad))
    # In a short context several come out alike.
    found = list({(case.ids.shape, case.padding): case for case in cases}.values())
    return [_in_two(case) if segments and len(case.ids) > 1 else case for case in found]


def _in_two(case: TextCase) -> TextCase:
    """With the second half of each text, padding apart, as a segment of its own."""
    place = case.keep.cumsum(1)  # 1 for a text's first token
    second = case.keep & (2 * place > case.keep.sum(1, keepdim=True) + 1)
    return replace(case, segments=second.long())


def chunk_cases(windows: Tensor, *, pad: int) -> list[TextCase]:
    """Texts that go through the cache in chunks of several sizes: one, one token by token, and a left-padded batch.

    The first chunk of a padded text has at least one token of it: before that there is nothing to look at.
    """
    long = min(LONG, windows.shape[1])
    first = (long + 1) // 2
    cases = [
        _case(windows, 1, long, "none", pad, _cut(long, (5, 1, 7))),
        _case(windows, 2, min(6, long), "none", pad, (1,) * min(6, long)),
        _case(windows, 3, long, "left", pad, _cut(long, (first, 1)), most=first - 1),
    ]
    return [case for case in cases if len(case.chunks) > 1]


def prompts(windows: Tensor, *, pad: int, context: int | None) -> list[TextCase]:
    """What generation starts from: a text, and two of unequal length padded on the left.

    Args:
        windows: int64 (N, T).
        pad: token that stands where there is none.
        context: tokens that the model reads at most, generated ones included.
    """
    room = windows.shape[1] if context is None else min(windows.shape[1], context // 2)
    length = max(1, min(8, room))
    return [_case(windows, 1, length, "none", pad), _case(windows, 2, length, "left", pad)]


def noise_windows(vocabulary: int, window: int, seed: int) -> Tensor:
    """Random token ids, int64 (`NOISE`, window)."""
    return torch.randint(vocabulary, (NOISE, window), generator=torch.Generator().manual_seed(seed))


def noise_pixels(size: tuple[int, int, int], seed: int) -> Tensor:
    """Standard normal pixels, float32 (`NOISE`, C, H, W)."""
    return torch.randn(NOISE, *size, generator=torch.Generator().manual_seed(seed))


def image_batches(pixels: Tensor) -> list[Tensor]:
    """Batches of `IMAGE_BATCHES`, each (B, C, H, W), of images (N, C, H, W) taken in turn."""
    return [pixels[torch.arange(batch) % len(pixels)] for batch in IMAGE_BATCHES]


def _case(
    windows: Tensor,
    batch: int,
    length: int,
    padding: Padding,
    pad: int,
    chunks: tuple[int, ...] = (),
    most: int | None = None,
) -> TextCase:
    """A batch of consecutive pieces of the windows, each window cut from its start.

    The first text of a padded batch has no padding, the last the most.
    """
    per_window = windows.shape[1] // length
    pieces = windows[:, : per_window * length].reshape(-1, length)
    ids = pieces[torch.arange(batch) % len(pieces)].clone()
    keep = torch.ones_like(ids, dtype=torch.bool)
    most = length // 2 if most is None else min(most, length // 2)
    if padding != "none":
        for row in range(1, batch):
            padded = row * most // (batch - 1)
            keep[row, slice(padded) if padding == "left" else slice(length - padded, length)] = False
    ids[~keep] = pad
    return TextCase(ids, keep, padding if not bool(keep.all()) else "none", chunks)


def _cut(total: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes as far as they fit, and what is left."""
    chunks: list[int] = []
    for size in sizes:
        if sum(chunks) + size < total:
            chunks.append(size)
    return (*chunks, total - sum(chunks))
