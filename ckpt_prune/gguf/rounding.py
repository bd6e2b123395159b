"""Rounding rows of weights to the types of GGUF files: by gguf-py, and mixtures by llama.cpp itself."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ckpt_prune.common.child_process import program_command
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.graph_types import EmbeddingType, GgufType, MixedGgufType
from ckpt_prune.sparsity.steps import find_steps

Array = np.ndarray[Any, Any]
_PROGRAM = "llama-quantize"
_CHUNK = 2**22
"""Elements that are rounded at once."""
_BY_LLAMA_CPP = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
"""Types that gguf-py reads and does not write."""


def needs_program(chosen: GgufType, embedding: EmbeddingType | None = None) -> bool:
    """Return whether llama.cpp's own program rounds a file, since xllamacpp does not.

    Args:
        chosen: type of the file.
        embedding: type of its embedding, if it has one of its own.

    Raises:
        UserError: neither is there.
    """
    by_llama_cpp = chosen in get_args(MixedGgufType) or (embedding or "").endswith("_k")
    if not by_llama_cpp or _rounder() is not None:
        return False
    if shutil.which(_PROGRAM) is None:
        raise UserError(
            f"{chosen} is rounded by llama.cpp, which is not installed: {install('llamacpp')} (package "
            f"xllamacpp), or put its program {_PROGRAM} on the PATH"
        )
    return True


def run_program(plain: Path, rounded: Path, chosen: GgufType, embedding: EmbeddingType | None = None) -> None:
    """Round a file by llama.cpp's own program."""
    options = ("--token-embedding-type", "--output-tensor-type") if embedding else ()
    given = [word for option in options for word in (option, str(embedding))]
    program = Path(shutil.which(_PROGRAM) or _PROGRAM).absolute()
    words = [*given, str(plain), str(rounded), chosen.upper(), str(torch.get_num_threads())]
    done = subprocess.run(
        program_command(str(program), *words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"error|failed|assert|invalid", line, re.IGNORECASE)]
        last_line = (telling or lines or ["it said nothing"])[-1]
        raise UserError(f"{_PROGRAM} cannot write {chosen}: {last_line[:300]} (exit code {done.returncode})")


def encode(name: str, tensor: Tensor, kind: Kind) -> Iterator[Array]:
    """Yield a tensor's rows as bytes of a type, some rows at a time.

    Raises:
        UserError: a weight is NaN, Inf, or beyond float16.
    """
    if not all_finite(tensor):
        raise UserError(f"{name} has NaN or Inf: repair the checkpoint first")
    rows = tensor.reshape(-1, tensor.shape[-1])
    size = max(1, _CHUNK // rows.shape[1])

    def encode_rows(start: int) -> Array:
        part = np.ascontiguousarray(rows[start : start + size].float().numpy())
        if kind == Kind.F16 and np.abs(part).max(initial=0) > np.finfo(np.float16).max:
            raise UserError(f"{name} has weights beyond the range of float16: give --dtype bf16 or f32")
        if kind in _BY_LLAMA_CPP:
            return _by_llama_cpp(part, kind)
        kept = _keep_steps(part) if kind == Kind.Q4_0 else None
        return gguf.quantize(part, kind) if kept is None else kept

    starts = range(0, rows.shape[0], size)
    if kind not in _BY_LLAMA_CPP:
        yield from map(encode_rows, starts)
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        yield from pool.map(encode_rows, starts)


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


def _by_llama_cpp(rows: Array, kind: Kind) -> Array:
    rounder = _rounder()
    assert rounder is not None
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    count, width = rows.shape
    out = np.empty((count, width // elements * size), np.uint8)
    rounder(int(kind), rows.ctypes.data, out.ctypes.data, 0, count, width, None)
    return out


@cache
def _rounder() -> Callable[..., int] | None:
    """Return ggml's function of xllamacpp's library; None if it is not installed, or keeps it to itself."""
    library = find_spec("xllamacpp.xllamacpp") if find_spec("xllamacpp") is not None else None
    if library is None or library.origin is None:
        return None
    try:
        function = ctypes.CDLL(library.origin).ggml_quantize_chunk
    except (OSError, AttributeError):
        return None
    number, data = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, data, data, number, number, number, data]
    function.restype = ctypes.c_size_t
    return function
