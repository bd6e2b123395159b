"""How fast this machine is at what runs are made of, measured in about a second."""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from ckpt_prune.calibration.products import add_gram, gram_flops
from ckpt_prune.memory import resident

_REPEATS = 5
"""The fastest of so many counts, with one thread and with all: what else runs on the machine only slows one down, and
where threads wait for each other in a small operation, by a time slice each time."""
_DISK_BYTES = 2**24


@dataclass(frozen=True)
class Rates:
    """What this process does in a second with the threads it has.

    Attributes:
        gemm: FLOPs of matrix products in the type that blocks run in.
        grams: FLOPs of Grams of tokens in that type, which are added up in float32.
        single: FLOPs of other float32 matrix products.
        wide: FLOPs of float64 matrix products.
        factor: FLOPs of float64 Cholesky factors, n³ / 3 each.
        eigen: FLOPs of float64 decompositions of symmetric matrices, counted as 9 n³.
        moved: bytes that element-wise operations read and write.
        reduced: numbers that are squared and added up column by column in float64.
        calls: operations, however small.
        disk: bytes written, and waited for.
        hashed: bytes that SHA-256 is taken of.
        resident: bytes of memory that the process has before it begins.
    """

    gemm: float
    grams: float
    single: float
    wide: float
    factor: float
    eigen: float
    moved: float
    reduced: float
    calls: float
    disk: float
    hashed: float
    resident: int


@cache
def measured_rates(device: torch.device, compute_dtype: torch.dtype) -> Rates:
    """Measure a machine, once in a process.

    Args:
        device: where blocks run and closed forms are solved.
        compute_dtype: in which blocks run.
    """

    def fastest(work: Callable[[], object]) -> float:
        times = []
        for threads in sorted({1, all_threads}):
            torch.set_num_threads(threads)
            for _ in range(_REPEATS):
                start = time.perf_counter()
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - start)
        return max(min(times), 1e-9)

    all_threads = torch.get_num_threads()
    try:
        return _rates(device, compute_dtype, fastest)
    finally:
        torch.set_num_threads(all_threads)


def _rates(device: torch.device, compute_dtype: torch.dtype, fastest: Callable[[Callable[[], object]], float]) -> Rates:
    with torch.no_grad():
        rows = torch.ones(2048, 576, dtype=compute_dtype, device=device)
        square = torch.ones(576, 576, dtype=compute_dtype, device=device)
        wide_rows, wide_square = rows.float(), square.float()
        products = 2 * 2048 * 576 * 576
        gemm = products / fastest(lambda: rows @ square)
        wide = torch.eye(384, dtype=torch.float64, device=device).add_(0.1)
        narrow = wide[:192, :192].contiguous()
        many = torch.ones(4096, 1024, device=device)
        few = torch.ones(8, device=device)
        return Rates(
            gemm=gemm,
            grams=gram_flops(2048, 576) / fastest(lambda: add_gram(wide_square, rows)),
            single=gemm if compute_dtype == torch.float32 else products / fastest(lambda: wide_rows @ wide_square),
            wide=2 * 384**3 / fastest(lambda: wide @ wide),
            factor=384**3 / 3 / fastest(lambda: torch.linalg.cholesky_ex(wide)),
            eigen=9 * 192**3 / fastest(lambda: torch.linalg.eigh(narrow)),
            moved=8 * many.numel() / fastest(lambda: torch.nn.functional.silu(many)),
            reduced=many.numel() / fastest(lambda: many.double().square().sum(0)),
            calls=500 / fastest(lambda: [few + 1 for _ in range(500)]),
            disk=_DISK_BYTES / _disk_seconds(),
            hashed=2**22 / fastest(lambda: hashlib.sha256(bytes(2**22)).digest()),
            resident=resident() or 0,
        )


def _disk_seconds() -> float:
    with tempfile.TemporaryFile(buffering=0) as file:  # without a name, so that nothing is left of it
        start = time.perf_counter()
        file.write(bytes(_DISK_BYTES))
        os.fsync(file.fileno())
        return max(time.perf_counter() - start, 1e-9)
