"""How the time of recipes grows with the width of a model: CPU seconds of whole runs on blocks of random weights.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/bench_width.py [--widths 576/1536 896/4864 ...] [--recipes NAME ...]

Each model is a made-up llama with a small vocabulary, so that blocks are nearly all of the work. A run is a process of
its own; what `--recipe magnitude` takes on the same model, which is start, reading and writing, is taken off. The last
line of a recipe is the exponent of the time in the widest input.
"""

import argparse
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
HEAD = 64
BASE = "magnitude"


def make_model(folder: Path, hidden: int, mlp: int, blocks: int) -> None:
    """Write a model of random weights that reads the smallest llama's tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD,
        vocab_size=512,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DATA / "llama-stories260k" / name).read_bytes())


def seconds(recipe: str, model: Path, samples: int) -> float:
    """CPU seconds of one prune, in a process of its own."""
    options = ["--recipe", recipe, "--ratio", "0.2", "--device", "cpu"]
    if recipe != BASE:
        text = DATA / "text-tinystories" / "calib_bos.txt"
        options += ["--text", str(text), "--samples", str(samples), "--window", "512", "--evaluate-samples", "0"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ckpt_prune", "prune", str(model), "-o", f"{folder}/out", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Time every recipe at every width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", default=["576/1536", "896/4864", "2048/5632"])
    parser.add_argument("--recipes", nargs="+", default=["ridge", "best-uniform", "best"])
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--samples", type=int, default=16)
    given = parser.parse_args()
    times: dict[str, list[tuple[int, float]]] = {}
    for width in given.widths:
        hidden, mlp = (int(number) for number in width.split("/"))
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), hidden, mlp, given.blocks)
            start = seconds(BASE, Path(folder), given.samples)
            for recipe in given.recipes:
                taken = seconds(recipe, Path(folder), given.samples) - start
                times.setdefault(recipe, []).append((mlp, taken))
                print(f"{width:<12} {recipe:<14} {taken:8.1f} s, start {start:.1f} s", flush=True)
    for recipe, points in times.items():
        (narrow, first), (wide, last) = points[0], points[-1]
        if wide > narrow:
            print(f"{recipe}: exponent {math.log(last / first) / math.log(wide / narrow):.2f}")


if __name__ == "__main__":
    main()
