"""The inputs on which a graph is compared with PyTorch, and how far two outputs are apart."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckpt_prune.onnx.records import Padding
from ckpt_prune.onnx.stored import Output, StoredTensor, read_stored

LONG = 24
"""Tokens of the longer batch cases, and of the text that goes through the cache in chunks."""
STEPS = 8
"""Tokens that are generated."""
IMAGE_BATCHES = (1, 2, 5)
NOISE = 8
"""Windows, or images, if there is no data."""
FLOOR = 1e-3
"""Share of the largest reference element: relative differences of smaller elements are taken relative to it instead,
since an element that is zero but for rounding errors has no meaningful relative difference."""
CHUNK = 1 << 18
"""Elements compared at a time, in float64: few enough for their memory to be used again. The system clears all other
memory first, which takes as long as comparing."""


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


def make_text_cases(windows: Tensor, *, pad: int, left: bool, segments: bool = False) -> list[TextCase]:
    """Batches of several sizes and lengths, of the windows' own tokens.

    Args:
        windows: int64 (N, T).
        pad: token that stands for padding.
        left: pad a batch on the left too, as generation does.
        segments: texts of a batch are in two segments; one text alone is in one.
    """
    window = windows.shape[1]
    long = min(LONG, window)
    cases = [
        _make_case(windows, 1, 1, "none", pad),
        _make_case(windows, 1, min(16, window), "none", pad),
        _make_case(windows, 2, min(7, window), "right", pad),
        _make_case(windows, 3, long, "left" if left else "right", pad),
        _make_case(windows, 1, window, "none", pad),
    ]
    # In a short context several are alike.
    cases = list({(case.ids.shape, case.padding): case for case in cases}.values())
    return [_in_two_segments(case) if segments and len(case.ids) > 1 else case for case in cases]


def _in_two_segments(case: TextCase) -> TextCase:
    place = case.keep.cumsum(1)  # 1 for a text's first token
    second = case.keep & (2 * place > case.keep.sum(1, keepdim=True) + 1)
    return replace(case, segments=second.long())


def make_chunk_cases(windows: Tensor, *, pad: int) -> list[TextCase]:
    """Texts that go through the cache in chunks of several sizes: one, one token by token, and a left-padded batch.

    The first chunk of a padded text has at least one token of it: before that there is nothing to look at.
    """
    long = min(LONG, windows.shape[1])
    first = (long + 1) // 2
    cases = [
        _make_case(windows, 1, long, "none", pad, cut(long, (5, 1, 7))),
        _make_case(windows, 2, min(6, long), "none", pad, (1,) * min(6, long)),
        _make_case(windows, 3, long, "left", pad, cut(long, (first, 1)), most=first - 1),
    ]
    return [case for case in cases if len(case.chunks) > 1]


def make_prompts(windows: Tensor, *, pad: int, context: int | None) -> list[TextCase]:
    """Return prompts for generation: a text, and two of unequal length padded on the left; half the context at most."""
    room = windows.shape[1] if context is None else min(windows.shape[1], context // 2)
    length = max(1, min(8, room))
    return [_make_case(windows, 1, length, "none", pad), _make_case(windows, 2, length, "left", pad)]


def make_noise_windows(vocabulary: int, window: int, seed: int) -> Tensor:
    """Random token ids, int64 (`NOISE`, window)."""
    return torch.randint(vocabulary, (NOISE, window), generator=torch.Generator().manual_seed(seed))


def make_noise_pixels(size: tuple[int, int, int], seed: int) -> Tensor:
    """Standard normal pixels, float32 (`NOISE`, C, H, W)."""
    return torch.randn(NOISE, *size, generator=torch.Generator().manual_seed(seed))


def make_image_batches(pixels: Tensor) -> list[Tensor]:
    """Batches of `IMAGE_BATCHES`, each (B, C, H, W), of images (N, C, H, W) taken in turn."""
    return [pixels[torch.arange(batch) % len(pixels)] for batch in IMAGE_BATCHES]


def _make_case(
    windows: Tensor,
    batch: int,
    length: int,
    padding: Padding,
    pad: int,
    chunks: tuple[int, ...] = (),
    most: int | None = None,
) -> TextCase:
    """Return a batch of consecutive pieces of the windows, each window cut from its start.

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


def cut(total: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes as far as they fit, and what remains."""
    chunks: list[int] = []
    for size in sizes:
        if sum(chunks) + size < total:
            chunks.append(size)
    return (*chunks, total - sum(chunks))


@dataclass(frozen=True)
class Difference:
    """One tensor beside its reference b; figures are over all positions and units."""

    max_abs: float
    """Infinite if one side is not a finite number and the other is not equal to it."""
    mean_abs: float
    max_rel: float
    """The largest |a − b| / max(|b|, `FLOOR` × `largest`)."""
    mean_rel: float
    largest: float
    """Largest finite |b|."""
    agreement: float | None
    """Share of positions whose largest unit is the same on both sides; None if units are no classes."""
    worst: tuple[int, int]
    """Position and unit of the largest difference."""


def flatten_positions(values: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return a result (B, ...), or (B, T, ...) with `keep`, bool (B, T), as (positions, units), without padding."""
    rows = values
    if keep is not None:
        rows = values.flatten(0, 1) if bool(keep.all()) else values[keep]
    return rows.reshape(len(rows), -1)


def flatten_output(output: Output, keep: Tensor | None) -> Output:
    """Do what `flatten_positions` does. An output on disk stays there if no position is padding."""
    if isinstance(output, StoredTensor) and keep is not None and bool(keep.all()):
        return output.flatten()
    return flatten_positions(read_stored(output), keep)


def compare_outputs(ours: Output, theirs: Tensor, *, classes: bool = False) -> Difference:
    """Compare (N, units) with a reference of the same shape, in float64.

    Equal infinities are no difference. A NaN is one, also if both have it. With `classes`, units are classes or tokens,
    of which the largest counts.
    """
    if ours.shape != theirs.shape or theirs.dim() != 2 or theirs.numel() == 0:
        raise ValueError(f"cannot compare {list(ours.shape)} with {list(theirs.shape)}")
    rows = max(1, CHUNK // theirs.shape[1])
    chunks = [(start, theirs[start : start + rows]) for start in range(0, len(theirs), rows)]
    largest = max(_largest(part) for _, part in chunks)
    most, most_rel, total, total_rel, same = -1.0, 0.0, 0.0, 0.0, 0
    worst = (0, 0)
    for start, part in chunks:
        outputs = ours[start : start + len(part)]
        expected = part.to(torch.float64, copy=True)
        errors = outputs.to(torch.float64, copy=True).sub_(expected).abs_()
        # One sum tells whether there is anything but numbers, which is rare and needs several passes.
        if not math.isfinite(subtotal := errors.sum().item()):
            errors = torch.where(outputs == part, 0.0, errors).nan_to_num_(math.inf, math.inf)
            subtotal = errors.sum().item()
        place = int(errors.argmax())
        if (here := errors.flatten()[place].item()) > most:
            most, worst = here, (start + place // part.shape[1], place % part.shape[1])
        relative = errors / expected.abs_().clamp_min_(FLOOR * largest)
        if largest == 0:  # a difference of zero is none, whatever it is relative to
            relative = torch.where(errors == 0, 0.0, relative)
        relative.nan_to_num_(math.inf, math.inf)
        most_rel = max(most_rel, relative.max().item())
        total, total_rel = total + subtotal, total_rel + relative.sum().item()
        same += int((outputs.argmax(1) == part.argmax(1)).sum()) if classes else 0
    count = theirs.numel()
    agreement = same / len(theirs) if classes else None
    return Difference(most, total / count, most_rel, total_rel / count, largest, agreement, worst)


def _largest(values: Tensor) -> float:
    """Return the largest finite absolute value; 0 if none is finite."""
    largest = max(abs(float(value)) for value in values.aminmax())
    if math.isfinite(largest):
        return largest
    return float(torch.where(values.isfinite(), values.abs(), 0.0).max())
