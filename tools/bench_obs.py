"""Time structured optimal-brain-surgeon removal of all columns against the textbook update, column by column.

The textbook version keeps the whole inverse H and the whole weight and updates both after every column. It gives the
same order and costs, and takes 2 d² + 2 d_out d flops a column at the speed of memory. It is timed for small widths
only. Both are float64 and include everything from the Gram on (factorisation, inverse). Costs are compared as
max |ours / textbook − 1|.

Inputs are made up: G = Σ x xᵀ over 2 d tokens x = s ∘ (z + F u), z (d) and u (d / 8) standard normal, F (d, d / 8)
normal of variance 8 / d. So every column has half of its energy in common with others. The sizes s have the log-normal
spread of an MLP's activations (deviation 1). W is standard normal. Gram and weight are float32, as
calibration leaves them.

Example:
    OMP_NUM_THREADS=1 PYTHONPATH=. python tools/bench_obs.py --widths 1024 4096
"""

import argparse

import torch
from torch import Tensor

from ckpt_prune.scoring.obs import DAMP, remove_greedily
from tools.bench_rotation import time_action

TOKENS = 2
"""Tokens, as multiples of the width."""
CHUNK = 1024
"""Tokens at a time."""


def layer(d_out: int, d: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """W (d_out, d) and G (d, d), both float32."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    shared = max(1, d // 8)
    sizes, loadings, gram = normal(d).exp(), normal(d, shared) / shared**0.5, torch.zeros(d, d, device=device)
    for start in range(0, TOKENS * d, CHUNK):
        count = min(CHUNK, TOKENS * d - start)
        x = (normal(count, d) + normal(count, shared) @ loadings.T) * sizes
        gram.addmm_(x.T, x)
    return normal(d_out, d), gram


def textbook(weight: Tensor, gram: Tensor, damp: float) -> tuple[Tensor, Tensor]:
    """Order and costs, with H and W updated as a whole after every column."""
    W, G = weight.double(), gram.double()
    G.diagonal().add_(damp * G.diagonal().mean())
    H = torch.cholesky_inverse(torch.linalg.cholesky(G))
    gone = torch.zeros(len(H), dtype=torch.bool, device=H.device)
    order, costs, total = torch.empty(len(H), dtype=torch.int64), torch.empty(len(H), dtype=torch.float64), 0.0
    energy = W.square().sum(0)
    for step in range(len(H)):
        worth = (energy / H.diagonal()).masked_fill_(gone, float("inf"))
        j = int(worth.argmin())
        total += float(worth[j])
        order[step], costs[step] = j, total
        direction, column = H[j] / H[j, j], W[:, j].clone()
        H.addr_(H[:, j].clone(), direction, alpha=-1)
        W.addr_(column, direction, alpha=-1)
        energy = W.square().sum(0)
        gone[j] = True
        H[j, j] = 1
    return order, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 4096, 11008], help="d")
    parser.add_argument("--outputs", type=int, default=4096, help="d_out at most; never more than d")
    parser.add_argument("--textbook", type=int, default=1024, help="largest width the textbook version is timed at")
    parser.add_argument("--devices", nargs="+", default=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}\n")
    print(
        "| device | d | d_out | s | Gflop/s | peak, (d, d) float64 | textbook s | ratio | same order | largest error |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for device in arguments.devices:
        remove_greedily(*layer(64, 256, device))  # first calls load kernels
        for d in arguments.widths:
            weight, gram = layer(min(d, arguments.outputs), d, device)
            bytes_before = 0
            if device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
                bytes_before = torch.cuda.memory_allocated()
            removal, seconds = time_action(lambda: remove_greedily(weight, gram), device)  # noqa: B023
            peak = "-"
            if device.startswith("cuda"):
                peak = f"{(torch.cuda.max_memory_allocated() - bytes_before) / (8 * d * d):.1f}"
            flops = 2 * d**3 + len(weight) * d**2
            cells = ["-"] * 4
            if d <= arguments.textbook:
                (order, costs), slow = time_action(lambda: textbook(weight, gram, DAMP), device)  # noqa: B023
                difference = float((removal.costs.cpu() / costs - 1).abs().max())
                same = "yes" if torch.equal(removal.order.cpu(), order) else "no"
                cells = [f"{slow:.2f}", f"{slow / seconds:.1f}", same, f"{difference:.0e}"]
            print(
                f"| {device} | {d} | {len(weight)} | {seconds:.2f} | {flops / seconds / 1e9:.0f} | {peak} | "
                f"{' | '.join(cells)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
