"""Rounding rows of weights to the types of GGUF files: by gguf-py, and by ggml's own functions (package libgguf)."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install
from ckpt_prune.common.finite import all_finite
from ckpt_prune.rounding.codes import decode
from ckpt_prune.sparsity.steps import find_steps

Array = np.ndarray[Any, Any]
_CHUNK = 2**22
"""Elements that are rounded at once."""
_BY_GGUF_PY = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q5_1, Kind.Q4_0, Kind.Q4_1, Kind.MXFP4)
"""Types that gguf-py rounds to, without regard to how much each input matters."""


def check_rounding(kinds: Collection[Kind], *, weighted: bool) -> None:
    """Refuse types that only ggml's own functions round to, and importance, if these are not installed."""
    others = sorted(kind.name.lower() for kind in set(kinds) - {*_BY_GGUF_PY})
    if others or weighted:
        what = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'}" if others else "by importance weights are"
        require_ggml(f"{what} rounded", ", or take q8_0 or q4_0 without importance")


def require_ggml(done: str, otherwise: str = "") -> None:
    """Refuse what only ggml's own functions do, if they are not installed: `done` says what they would do."""
    if find_spec("libgguf") is None:
        raise UserError(f"{done} by ggml, whose functions are not installed: {install('llamacpp')}{otherwise}")


def encode(name: str, tensor: Tensor, kind: Kind, importance: Array | None = None) -> Iterator[Array]:
    """Yield a tensor's rows as bytes of a type, some rows at a time.

    Args:
        name: of the tensor, for messages.
        tensor: (…, columns).
        kind: type to round to.
        importance: how much an error in each column matters, (columns,) float32, or of experts (experts, columns);
            None: all alike.

    Raises:
        UserError: a weight is NaN, Inf, or beyond float16.
    """
    if importance is not None and importance.ndim > 1:
        for part, own in zip(tensor, importance, strict=True):
            yield from encode(name, part, kind, own)
        return
    if not all_finite(tensor):
        raise UserError(f"{name} has NaN or Inf: repair the checkpoint first")
    rows = tensor.reshape(-1, tensor.shape[-1])
    size = max(1, _CHUNK // rows.shape[1])

    def encode_rows(start: int) -> Array:
        part = np.ascontiguousarray(rows[start : start + size].float().numpy())
        if kind == Kind.F16 and np.abs(part).max(initial=0) > np.finfo(np.float16).max:
            raise UserError(f"{name} has weights beyond the range of float16: give --dtype bf16 or f32")
        kept = _keep_steps(part) if kind == Kind.Q4_0 else None
        if kept is not None:
            return kept
        if kind == Kind.MXFP4 or (kind in _BY_GGUF_PY and importance is None):
            return gguf.quantize(part, kind)
        import libgguf

        rounded: Array = libgguf.quantize_rows(part, kind, importance)
        return rounded

    starts = range(0, rows.shape[0], size)
    if kind in _BY_GGUF_PY and importance is None:  # quick: one part in memory, where the pool holds all
        yield from map(encode_rows, starts)
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        yield from pool.map(encode_rows, starts)


def load_rows(file: Path) -> Iterator[Array]:
    """Yield the rows of a rounded matrix, which stays on disk until it is read."""
    yield np.load(file, mmap_mode="r")


def round_rows(rows: Tensor, kind: Kind, importance: Array | None = None) -> Tensor:
    """Return rows, (n, columns) float32, as a type holds them. Args: `encode`."""
    return decode(np.concatenate([*encode("rows", rows, kind, importance)]), kind)


def _keep_steps(rows: Array) -> Array | None:
    """Return rows as bytes of q4_0 if they have its steps already, as `quantize` leaves them; else None.

    gguf-py would find the steps again only in blocks that reach code -8.
    """
    grid = find_steps(rows.reshape(-1, 32))
    if grid is None:
        return None
    steps, codes = grid
    fields = (codes + 8).astype(np.uint8)
    packed = [steps[:, None].astype(np.float16).view(np.uint8), fields[:, :16] | (fields[:, 16:] << 4)]
    return np.concatenate(packed, axis=1).reshape(len(rows), -1)
