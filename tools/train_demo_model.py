"""Train the small Llama that the package carries (`ckpt_prune/demo/model`).

A byte-level BPE tokenizer and a Llama of about 3 million parameters are trained on the running Python's standard
library (`ckpt_prune.datasets.standard_library`), without the held-out modules. About 20 minutes on two free cores.

    python tools/train_demo_model.py --out ckpt_prune/demo/model
"""

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ckpt_prune.datasets import standard_library

WINDOW, BATCH, VOCABULARY = 256, 16, 2048


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE; tokens 0 and 1 are the begin and end marks, which the text itself never holds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text[i : i + 10_000] for i in range(0, len(text), 10_000)), trainer)
    return tokenizer


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, ids: torch.Tensor, windows: int) -> float:
    """Exp of the mean loss over the first `windows` windows, the first token of each unscored."""
    rows = ids[: windows * WINDOW].view(windows, WINDOW)
    return math.exp(sum(model(input_ids=r[None], labels=r[None]).loss.item() for r in rows) / windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak rate of embeddings and norms (AdamW)")
    parser.add_argument("--lr-blocks", type=float, default=2e-2, help="peak rate of the blocks' matrices (Muon)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train_text, held_out_text = (
        standard_library.read_corpus(held_out=False),
        standard_library.read_corpus(held_out=True),
    )
    tokenizer = train_tokenizer(train_text)
    train = torch.tensor(tokenizer.encode(train_text).ids)
    held_out = torch.tensor(tokenizer.encode(held_out_text).ids)
    print(f"{len(train):,} training tokens, {len(held_out):,} held out", flush=True)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=544,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    print(f"{model.num_parameters():,} parameters", flush=True)
    # Muon for the matrices inside blocks, AdamW for the rest: the same loss in about half the steps of AdamW alone.
    blocks = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "layers" not in name]
    optimisers = [
        torch.optim.Muon(blocks, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [args.lr_blocks, args.lr]
    start = time.monotonic()
    for step in range(args.steps):
        for optimiser, peak in zip(optimisers, peaks, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, args.steps, peak)
        offsets = torch.randint(len(train) - WINDOW, (BATCH,))
        rows = torch.stack([train[i : i + WINDOW] for i in offsets.tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        if (step + 1) % 100 == 0:
            model.eval()
            measured = perplexity(model, held_out, 16)
            model.train()
            seconds = time.monotonic() - start
            print(f"step {step + 1}  loss {loss.item():.3f}  held-out ppl {measured:.2f}  {seconds:.0f} s", flush=True)
    model.eval()
    model = model.to(torch.bfloat16)
    model.save_pretrained(args.out)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(args.out)
    print(f"held-out perplexity {perplexity(model.float(), held_out, 64):.3f}, window {WINDOW}, 64 windows")


if __name__ == "__main__":
    main()
