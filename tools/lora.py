"""LoRA through peft on a pruned checkpoint: what recovery by LaCo is compared with, on the same data and as long.

    python tools/lora.py PRUNED --text calib.txt --samples 64 --window 256 --seconds 60 -o OUT
    python tools/lora.py PRUNED --images DIR --samples 64 --seconds 60 -o OUT

Adapters on every linear layer of the blocks, trained in float32 on the loss of the next token, or of the class for an
image classifier, and merged. Merging fills a mask's zeros up: OUT is dense, unless --keep-zeros puts them back.
Needs the extra "bench". The whole model is in memory, with the gradients' path through all of it.
"""

import argparse
import json
import math
import re
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import ckpt_prune
from ckpt_prune.architectures.skeleton import quiet_transformers
from ckpt_prune.calibration.image_files import choose_images, find_images
from ckpt_prune.calibration.image_processor import load_processor
from ckpt_prune.calibration.images import ImageSamples
from ckpt_prune.calibration.text import calibration_windows, load_tokenizer, read_text, token_stream
from ckpt_prune.errors import UserError
from ckpt_prune.evaluation.loading import auto_class, read_config
from ckpt_prune.filenames import REPORT

LR = 1e-3
"""Of 1e-4, 1e-3, 3e-3 and 1e-2 the best on held-out text for a 3 M Llama under wanda-50, 60 s: a choice by the text it
is measured on, in LoRA's favour. At billions of weights 1e-4 is usual."""
WARM_UP = 0.05
"""Share of the time over which the learning rate climbs."""
MOST_NORM = 1.0
"""Gradients are clipped to this norm, as transformers' Trainer does by default."""


@dataclass(frozen=True)
class Examples:
    """What the model is trained on: windows of tokens, each token the target of those before it, or images, classed."""

    inputs: dict[str, Tensor]
    """What the model is called with, all examples at once: `input_ids` (N, T) or `pixel_values` (N, C, H, W)."""
    classes: Tensor | None = None
    """Of images, (N,) int64."""

    def __len__(self) -> int:
        """Number of examples."""
        return len(next(iter(self.inputs.values())))

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Mean cross entropy of these examples, in nats."""
        batch = {name: values[rows] for name, values in self.inputs.items()}
        if self.classes is not None:
            return cross_entropy(model(**batch).logits, self.classes[rows])
        logits = model(**batch, use_cache=False).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def examples_of(args: argparse.Namespace) -> Examples:
    """The samples that `ckpt-prune calibrate` would choose by these options, images with their classes."""
    config = read_config(args.pruned)
    if args.images is not None:
        if auto_class(config) != "AutoModelForImageClassification":
            raise UserError(f"{args.pruned} is no image classifier")
        names = {int(index): name for index, name in config["id2label"].items()}
        found = find_images(args.images, labels=args.labels, split="calib", id2label=names)
        chosen = choose_images(found, samples=args.samples, seed=args.seed, choose=args.choose)
        images = ImageSamples(chosen, load_processor(args.pruned), tokens=lambda size: 0)
        if images.labels is None:
            raise UserError(f"{args.images}: images without classes: give --labels FILE or a sub-folder per class")
        return Examples(images.batch(slice(None)), images.labels)
    if auto_class(config) != "AutoModelForCausalLM":
        raise UserError(f"{args.pruned} is no causal language model: only those are trained on the next token")
    if args.window is None:
        raise UserError("--text needs --window")
    stream = token_stream(load_tokenizer(args.pruned), read_text(args.text), bos=args.bos)
    settings = {"samples": args.samples, "window": args.window, "seed": args.seed, "choose": args.choose}
    return Examples({"input_ids": calibration_windows(stream, **settings)})


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers inside blocks, which are the numbered modules, by name; not those pruned to no width at all."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search(r"\.\d+\.", name) and module.weight.numel()
    }


def rate_at(share: float) -> float:
    """Learning rate as a share of the highest, where this share of the time is over: up in a line, down in a cosine."""
    if share < WARM_UP:
        return share / WARM_UP
    return (1 + math.cos(math.pi * min(1.0, (share - WARM_UP) / (1 - WARM_UP)))) / 2


def shuffled(count: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches of indices without end; every epoch in another order, its last batch perhaps smaller."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(batch)


def train(model: nn.Module, examples: Examples, args: argparse.Namespace) -> dict[str, Any]:
    """Train what requires gradients for `args.seconds` of wall-clock time; the step in which they end is finished."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    model.train()
    steps = seen = 0
    start = time.monotonic()
    for rows in shuffled(len(examples), args.batch, args.seed):
        examples.loss(model, rows).backward()
        nn.utils.clip_grad_norm_(trained, MOST_NORM)
        # Asked for after the gradients: the first step's rate is then not zero.
        rate = args.lr * rate_at((time.monotonic() - start) / args.seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        steps, seen = steps + 1, seen + len(rows)
        seconds = time.monotonic() - start
        if seconds >= args.seconds:
            break
    model.eval()
    count = sum(p.numel() for p in trained)
    return {"seconds": seconds, "steps": steps, "epochs": seen / len(examples), "parameters_trained": count}


@torch.inference_mode()
def mean_loss(model: nn.Module, examples: Examples, batch: int) -> float:
    """Mean loss over all examples."""
    parts = torch.arange(len(examples)).split(batch)
    return sum(examples.loss(model, rows).item() * len(rows) for rows in parts) / len(examples)


def zero_share(model: nn.Module) -> float:
    """Share of zeros in the weights of the blocks' linear layers."""
    weights = [module.weight for module in block_linears(model).values()]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


def save(model: PreTrainedModel, dtypes: dict[str, torch.dtype], source: Path, out: Path) -> None:
    """Write a checkpoint with the source's dtypes, config and side files; the model holds the rounded weights after.

    Not the source's report and model card: they tell of other weights.
    """
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    with quiet_transformers():
        model.save_pretrained(out)
    for file in source.iterdir():
        weights = ".safetensors" in file.name or file.suffix in (".st", ".bin")
        if file.is_file() and not weights and file.name not in (REPORT, "README.md"):
            shutil.copyfile(file, out / file.name)
    model.float()


def run(args: argparse.Namespace) -> dict[str, Any]:
    for folder in (args.out, args.also_merged):
        if folder is not None and folder.exists():
            raise UserError(f"{folder} is there already: name another folder")
    torch.manual_seed(args.seed)
    examples = examples_of(args)
    model = ckpt_prune.load(args.pruned, dtype="auto")
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    model.float()
    found: dict[str, Any] = {"model": str(args.pruned), "out": str(args.out), "samples": len(examples)}
    found |= {key: getattr(args, key) for key in ("rank", "alpha", "lr", "batch", "seed", "keep_zeros")}
    found |= {"zeros_before": zero_share(model), "loss_before": mean_loss(model, examples, args.batch)}
    linears = block_linears(model)
    masks = {name: module.weight != 0 for name, module in linears.items()} if args.keep_zeros else {}
    config = LoraConfig(r=args.rank, lora_alpha=args.alpha, target_modules=list(linears))
    adapted = get_peft_model(model, config)
    found |= train(adapted, examples, args)
    merged = adapted.merge_and_unload()
    if args.also_merged is not None:
        save(merged, dtypes, args.pruned, args.also_merged)
        found["also_merged"] = {"out": str(args.also_merged), "zeros": zero_share(merged)}
        found["also_merged"]["loss"] = mean_loss(merged, examples, args.batch)
    with torch.no_grad():
        for name, mask in masks.items():
            merged.get_submodule(name).weight.mul_(mask)
    save(merged, dtypes, args.pruned, args.out)
    found |= {"zeros_after": zero_share(merged), "loss_after": mean_loss(merged, examples, args.batch)}
    found["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["loss_dense"] = None
    if args.dense is not None:
        dense = ckpt_prune.load(args.dense, dtype=torch.float32)
        found["loss_dense"] = mean_loss(dense, examples, args.batch)
    return found


def print_text(found: dict[str, Any]) -> None:
    print(
        f"{found['steps']} steps, {found['epochs']:.1f} epochs of {found['samples']} samples in "
        f"{found['seconds']:.1f} s, {found['parameters_trained']:,} parameters trained, "
        f"peak RSS {found['peak_rss_bytes'] / 2**30:.2f} GiB"
    )
    dense = "" if found["loss_dense"] is None else f" (dense model: {found['loss_dense']:.4f})"
    print(f"loss on these samples {found['loss_before']:.4f} -> {found['loss_after']:.4f}{dense}")
    before, after = found["zeros_before"], found["zeros_after"]
    filled = ": merging filled the zeros up, the model is no longer sparse; see --keep-zeros" if after < before else ""
    print(f"zeros in the blocks' linear weights {before:.2%} -> {after:.2%}{filled}")
    if "also_merged" in found:
        also = found["also_merged"]
        print(f"{also['out']}: not kept: zeros {also['zeros']:.2%}, loss {also['loss']:.4f}")
    print(f"written to {found['out']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pruned", type=Path, metavar="PRUNED", help="checkpoint folder")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--text", type=Path, nargs="+")
    data.add_argument("--images", type=Path, help="folder of images with classes, of which the split calib is taken")
    parser.add_argument("--labels", type=Path, help="CSV with file, label, split; labels.csv of the folder by default")
    parser.add_argument("--samples", type=int, required=True, help="windows or images")
    parser.add_argument("--window", type=int, help="tokens per window; needed with --text")
    parser.add_argument("--choose", choices=["random", "first"], default="random")
    parser.add_argument("--bos", choices=["auto", "always", "never"], default="auto")
    parser.add_argument("--seconds", type=float, required=True, help="wall-clock time of training alone")
    parser.add_argument("--dense", type=Path, help="also measure this model's loss on the samples, for comparison")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--lr", type=float, default=LR, help="default %(default)s, for models of millions of weights")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the samples, the adapters and the order of batches")
    parser.add_argument("--keep-zeros", action="store_true", help="zero again, after merging, what was zero in PRUNED")
    parser.add_argument("--also-merged", type=Path, metavar="OUT2", help="save here as merged, before --keep-zeros")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # peft 0.21 asks for it by the name that transformers 5.23 gave up.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    try:
        found = run(args)
    except UserError as error:
        sys.exit(f"Error: {error}")
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print_text(found)


if __name__ == "__main__":
    main()
