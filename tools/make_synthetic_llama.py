"""Write a Llama-shaped checkpoint of random weights, streamed, to measure memory and time at real sizes.

    python tools/make_synthetic_llama.py OUT                 # Llama-7B: 13.5 GB in bf16
    python tools/make_synthetic_llama.py OUT --layers 2      # two of its blocks, for the Gram path

The tokenizer is the packaged model's, so that `calibrate` runs too. Weights have the spread of a trained model's
(normal, 0.02); they compute nothing meaningful.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig

from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.progress import track
from ckpt_prune.demo.run import model_folder
from ckpt_prune.model.skeleton import build_skeleton

SHARD_BYTES = 4 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads or args.heads,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        dtype=args.dtype,
        architectures=["LlamaForCausalLM"],
    )
    shapes = {n: tuple(t.shape) for n, t in build_skeleton(config, "LlamaForCausalLM").state_dict().items()}
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += nbytes
    layout = {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": s for i, s in enumerate(shards)}
    generator = torch.Generator().manual_seed(0)
    with Staging(args.out, job="synthetic") as staging:
        writer = CheckpointWriter(staging, layout, sharded=True)
        for name, shape in track(shapes.items(), "writing", total=len(shapes), unit="tensor"):
            ones = name.endswith("norm.weight")
            tensor = torch.ones(shape) if ones else torch.empty(shape).normal_(std=0.02, generator=generator)
            writer.write(name, tensor.to(dtype))
        writer.commit("all")
        writer.write_json("config.json", config.to_dict())
        for file in ("tokenizer.json", "tokenizer_config.json"):
            writer.copy(model_folder() / file)
        writer.finish()


if __name__ == "__main__":
    main()
