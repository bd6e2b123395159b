"""Tiny sentence-transformers folders, written as that package writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.encoders import CONTEXT, HIDDEN, make
from tests.evaluation.tiny import tiny_tokenizer

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def make_sentences(
    folder: Path,
    *,
    modes: tuple[str, ...] = ("mean_tokens",),
    dense: bool = False,
    normal: bool = True,
    **settings: Any,
) -> Path:
    """A BertModel with pooling, and behind it a layer and a normalisation where asked."""
    make(folder, "bert-model")
    tokenizer = tiny_tokenizer("<s> $A </s>")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    kinds = ["Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normal else [])]
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, kind in enumerate(kinds, start=1):
        modules.append(
            {
                "idx": index,
                "name": str(index),
                "path": f"{index}_{kind}",
                "type": f"sentence_transformers.models.{kind}",
            }
        )
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": CONTEXT, **settings}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, **{f"pooling_mode_{mode}": mode in modes for mode in MODES}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if dense:
        width, inner = HIDDEN * len(modes), folder / "2_Dense"
        inner.mkdir()
        config = {"in_features": width, "out_features": 5, "bias": True}
        (inner / "config.json").write_text(
            json.dumps(config | {"activation_function": "torch.nn.modules.activation.Tanh"})
        )
        torch.manual_seed(2)
        save_file({"linear.weight": torch.randn(5, width), "linear.bias": torch.randn(5)}, inner / "model.safetensors")
    return folder
