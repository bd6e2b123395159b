"""Time the rotation compensation against the textbook one, which decomposes the full (d_out, d_out) matrix.

Both start from the same moments (C and W_K) and end at Q W_K; products included. For each output size two cases: a
square projection, as attention's, with 80 % of its inputs kept (k < d_out), and one four times as wide as it is tall,
as an MLP's (k > d_out). Inputs are correlated: a power-law spectrum, mixed, with a mean.

Example:
    python tools/bench_rotation.py --sizes 1024 4096
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import Fit
from ckpt_prune.compensation.rotation import procrustes


def correlated_fit(d_out: int, d_in: int, kept_share: float, device: str, seed: int = 0) -> tuple[Fit, Tensor]:
    """Moments of 4 d_in correlated tokens and the kept weights."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device)

    k = round(kept_share * d_in)
    weight = normal(d_out, d_in) / d_in**0.5
    spectrum = torch.arange(1, d_in + 1, device=device, dtype=torch.float32) ** -0.75
    spectrum = spectrum[torch.randperm(d_in, generator=generator, device=device)]
    mixing = normal(d_in, d_in) / d_in**0.5 + torch.eye(d_in, device=device)
    gram = torch.zeros(d_in, d_in, device=device)
    total = torch.zeros(d_in, device=device)
    tokens = 0
    while tokens < 4 * d_in:
        x = (normal(d_in, d_in) * spectrum) @ mixing + 0.02 * spectrum
        gram.addmm_(x.T, x)
        total += x.sum(0)
        tokens += d_in
    kept = torch.randperm(d_in, generator=generator, device=device)[:k].sort().values
    cross = weight.double() @ gram[kept].double().T
    fit = Fit(tokens, total[kept].double(), weight.double() @ total.double(), gram[kept][:, kept].double(), cross, 0.0)
    return fit, weight[:, kept].double()


def textbook(fit: Fit, weight_kept: Tensor, dtype: torch.dtype) -> Tensor:
    left, _, right = torch.linalg.svd((fit.second_moments()[1] @ weight_kept.T).to(dtype))
    return (left @ right).double() @ weight_kept


def time_action(action: Callable[[], Any], device: str) -> tuple[Any, float]:
    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    result = action()
    wait()
    return result, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024], help="d_out")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="of the decomposition")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, interleaved; the fastest counts")
    parser.add_argument("--widths", type=float, nargs="+", default=[1.0, 4.0], help="d_in as multiples of d_out")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    print(
        f"{'d_out':>6} {'k':>6} {'condition':>10} {'svd s':>8} {'ours s':>8} {'ratio':>6} {'difference':>11}",
        flush=True,
    )
    for d_out in arguments.sizes:
        for multiple in arguments.widths:
            fit, weight_kept = correlated_fit(d_out, round(multiple * d_out), 0.8, arguments.device)
            small, weight_small = correlated_fit(64, 64, 0.8, arguments.device)
            procrustes(small, weight_small), textbook(small, weight_small, dtype)  # first calls load kernels
            slow_times, fast_times = [], []
            for _ in range(arguments.repeats):
                (ours, _), seconds = time_action(lambda: procrustes(fit, weight_kept), arguments.device)  # noqa: B023
                fast_times.append(seconds)
                reference, seconds = time_action(lambda: textbook(fit, weight_kept, dtype), arguments.device)  # noqa: B023
                slow_times.append(seconds)
            slow, fast = min(slow_times), min(fast_times)
            difference = float((ours - reference).norm() / reference.norm())
            condition = condition_number(fit, weight_kept) if d_out <= 1024 else float("nan")
            print(
                f"{d_out:6d} {weight_kept.shape[1]:6d} {condition:10.1e} {slow:8.2f} {fast:8.2f} {slow / fast:6.1f} "
                f"{difference:11.1e}",
                flush=True,
            )


def condition_number(fit: Fit, weight_kept: Tensor) -> float:
    """Largest singular value of C W_Kᵀ over its smallest that is not zero by shape."""
    values = torch.linalg.svdvals(fit.second_moments()[1] @ weight_kept.T)
    return float(values[0] / values[min(weight_kept.shape) - 1])


if __name__ == "__main__":
    main()
