"""Time learning rotations: QR (DenoiseRotator appendix C) against the Cayley transform, step by step in turns.

For each problem, seconds per step, and seconds to the entropy that QR has after each number of steps of --targets. QR
runs at its constant rate of 0.01. The Cayley rotator decays its rate over a budget of steps, so it runs once with each
of --budgets, and the soonest counts (the row says which). Problems: one block of a checkpoint on calibration text, R1
and R2, and planted ones (sparse weights behind a random rotation, inputs with a power-law spectrum), R1 only. The loss
is Wanda's unless said.

    OMP_NUM_THREADS=1 python tools/bench_rotator.py
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ckpt_prune.measure.samples.text import load_tokenizer, read_text, tokenise_text
from ckpt_prune.recipe.names import Backbone
from ckpt_prune.recipe.names import RetractionName as MethodName
from ckpt_prune.stages.rotation.descent import CLIP, learning_rate
from ckpt_prune.stages.rotation.importance import Side, Term, objective, sensitivity
from ckpt_prune.stages.rotation.keys import Rotation
from ckpt_prune.stages.rotation.orthogonal import RETRACTIONS, clip_slopes, identity, make_rotator

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Problem:
    """A loss to descend on; `heads` is the shape of R2 or None."""

    name: str
    terms: list[Term]
    backbone: Backbone
    hidden: int
    heads: tuple[int, int, int] | None


class Descent:
    """One method on one problem, a step at a time, its own clock running only meanwhile."""

    def __init__(self, problem: Problem, method: MethodName, steps: int, device: str) -> None:
        self.problem, self.method, self.training = (
            problem,
            method,
            Rotation(kind="per-layer", steps=steps, retraction=method),
        )
        self.device, self.seconds, self.entropies = device, [0.0], list[float]()
        shapes = [(problem.hidden, problem.hidden), problem.heads]
        self.rotators = [
            None if shape is None else make_rotator(method, identity(shape, dtype=torch.float32).to(device))
            for shape in shapes
        ]

    @property
    def done(self) -> bool:
        """Whether all steps are taken and the last rotation is measured."""
        return len(self.entropies) > self.training.steps

    def advance(self) -> None:
        """Measure, and take a step unless it was the last."""
        start = time.perf_counter()
        here = [None if r is None else r.rotation().clone().requires_grad_() for r in self.rotators]
        total = 0.0
        for term in self.problem.terms:
            loss = objective([term], self.problem.backbone, *here)
            loss.backward()
            total += float(loss.detach())
        self.entropies.append(total)
        if not self.done:
            both = zip(self.rotators, here, strict=True)
            moved = [(r, q.grad) for r, q in both if r is not None and q is not None and q.grad is not None]
            slopes = clip_slopes([one.slope(gradient) for one, gradient in moved], CLIP)
            for (one, _), slope in zip(moved, slopes, strict=True):
                one.step(slope, learning_rate(self.training, len(self.entropies) - 1))
            if self.device.startswith("cuda"):
                torch.cuda.synchronize()
            self.seconds.append(self.seconds[-1] + time.perf_counter() - start)

    def time_to(self, entropy: float) -> tuple[float, int] | None:
        """Return the seconds and steps to an entropy; None if it is not reached."""
        steps = next((step for step, value in enumerate(self.entropies) if value <= entropy), None)
        return None if steps is None else (self.seconds[steps], steps)


@dataclass
class _Grams:
    """Sums x xᵀ of modules' inputs, divided by the norm's gain where it is folded into the weights."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def watch(self, module: torch.nn.Module, name: str, gain: Tensor | None) -> None:
        def see(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].flatten(0, -2).double()
            x = x if gain is None else x / gain.double()
            self.sums[name] = self.sums.get(name, 0) + x.T @ x

        module.register_forward_pre_hook(see)


def checkpoint_problem(folder: Path, text: Path, block: int, windows: int, backbone: Backbone) -> Problem:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    config = model.config
    window = min(config.max_position_embeddings, 512)
    stream = tokenise_text(load_tokenizer(folder), read_text([text]))
    layer = model.model.layers[block]
    attention, mlp = layer.self_attn, layer.mlp
    before, after = layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data
    grams = _Grams()
    grams.watch(attention.q_proj, "attention", before)
    grams.watch(attention.o_proj, "o", None)
    grams.watch(mlp.up_proj, "mlp", after)
    grams.watch(mlp.down_proj, "down", None)
    with torch.inference_mode():
        for row in stream[: windows * window].view(windows, window).split(8):
            model.model(row, use_cache=False)
    sides: list[tuple[torch.nn.Linear, str, Tensor | None, Side | None, Side | None]] = [
        (attention.q_proj, "attention", before, None, "residual"),
        (attention.k_proj, "attention", before, None, "residual"),
        (attention.v_proj, "attention", before, "heads", "residual"),
        (attention.o_proj, "o", None, "residual", "heads"),
        (mlp.gate_proj, "mlp", after, None, "residual"),
        (mlp.up_proj, "mlp", after, None, "residual"),
        (mlp.down_proj, "down", None, "residual", None),
    ]
    terms = []
    for module, gram, gain, left, right in sides:
        weight = module.weight.data if gain is None else module.weight.data * gain
        inputs = sensitivity(grams.sums[gram], backbone, right is not None)
        terms.append(Term(gram, weight, None if inputs is None else inputs.float(), left, right))
    heads = (config.num_key_value_heads, attention.head_dim, attention.head_dim)
    return Problem(f"{folder.name} block {block}, {backbone}", terms, backbone, config.hidden_size, heads)


def planted_problem(d: int, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def sparse(rows: int, columns: int) -> Tensor:
        return normal(rows, columns) ** 3 * (torch.rand(rows, columns, generator=generator) < 0.3)

    turned = torch.linalg.qr(normal(d, d))[0]
    noise = normal(d, d)
    spectrum = torch.diag(torch.arange(1, d + 1).float() ** -0.5)
    gram = sensitivity(turned @ (spectrum + 0.1 * noise @ noise.T / d) @ turned.T, "wanda", True)
    assert gram is not None
    terms = [
        Term("q", sparse(d, d) @ turned.T, gram.float(), None, "residual"),
        Term("up", sparse(2 * d, d) @ turned.T, gram.float(), None, "residual"),
        Term("down", turned @ sparse(d, 2 * d), torch.ones(2 * d), "residual", None),
    ]
    return Problem(f"planted, d = {d}", terms, "wanda", d, None)


def bench(problem: Problem, targets: list[int], budgets: list[int], device: str) -> None:
    terms = [
        Term(t.name, t.weight.to(device), None if t.inputs is None else t.inputs.to(device), t.left, t.right)
        for t in problem.terms
    ]
    problem = Problem(problem.name, terms, problem.backbone, problem.hidden, problem.heads)
    for method in RETRACTIONS:  # first calls load kernels
        Descent(problem, method, 1, device).advance()
    paper = Descent(problem, "qr", max(targets), device)
    ours = [Descent(problem, "cayley", budget, device) for budget in budgets]
    while not all(run.done for run in (paper, *ours)):
        for run in (paper, *ours):
            if not run.done:
                run.advance()
    seconds = sum(run.seconds[-1] for run in ours) / sum(budgets)
    for target in targets:
        # The lowest so far, as is kept: QR's entropy is not monotone either.
        entropy = min(paper.entropies[: target + 1])
        spent = paper.seconds[target]
        reached = [(*cost, run.training.steps) for run in ours if (cost := run.time_to(entropy))]
        best = min(reached) if reached else None
        there = "not reached | –" if best is None else f"{best[0]:.2f} ({best[1]} of {best[2]}) | {spent / best[0]:.1f}"
        finals = ", ".join(f"{min(run.entropies):.0f} in {run.training.steps}" for run in ours)
        print(
            f"| {problem.name} | {paper.entropies[0]:.0f} | {paper.seconds[-1] / max(targets):.4f} | {seconds:.4f} "
            f"| {target} | {entropy:.0f} | {spent:.2f} | {there} | {finals} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=SHARED / "llama-pycode-16m", help="a llama-like folder")
    parser.add_argument("--text", type=Path, default=SHARED / "text-pycode" / "calib.txt")
    parser.add_argument("--block", type=int, default=3)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--backbones", nargs="*", default=["wanda", "sparsegpt"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[512, 1024], help="of planted problems")
    parser.add_argument("--targets", type=int, nargs="+", default=[100, 400], help="QR steps whose entropy to reach")
    parser.add_argument("--budgets", type=int, nargs="+", default=[25, 50, 100, 200], help="steps of the other")
    parser.add_argument("--most", type=int, default=100, help="QR steps at planted sizes over 512, which take longest")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(
        "| problem | entropy before | QR s/step | Cayley s/step | QR steps | QR entropy | QR s "
        "| Cayley s to it (steps) | ratio | Cayley's entropies |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for backbone in arguments.backbones:
        problem = checkpoint_problem(arguments.checkpoint, arguments.text, arguments.block, arguments.windows, backbone)
        bench(problem, arguments.targets, arguments.budgets, arguments.device)
    for size in arguments.sizes:
        small = size <= 512
        targets = [target for target in arguments.targets if small or target <= arguments.most]
        budgets = [budget for budget in arguments.budgets if small or budget <= arguments.most]
        bench(planted_problem(size), targets, budgets, arguments.device)


if __name__ == "__main__":
    main()
