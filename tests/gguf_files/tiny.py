"""Tiny random models with a tokenizer that llama.cpp has, and files of them."""

import json
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any
from zlib import decompress

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import ckpt_prune
from ckpt_prune.options.data import ProofOptions

DEMO = Path(ckpt_prune.__file__).parent / "demo" / "model"
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
ABSENT = "absent"
"""What stands for a size that a config has no key for."""
ATTENTION_FREE = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings"), ABSENT)
WINDOWED = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20, "tie_word_embeddings": True}
"""Gemma's own settings."""
GEMMA4 = WINDOWED | {
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 2048,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "final_logit_softcapping": 30.0,
}
"""Gemma 4's: heads of two sizes, and an input of its own for every block."""
LONGROPE = {
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [1.5] * 4,
        "short_factor": [1.2] * 4,
    },
    "original_max_position_embeddings": 256,
    "max_position_embeddings": 512,
}
"""Phi-3's rotary positions for long texts."""
GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
HYBRID = {"layer_types": ["conv", "full_attention", "conv"] * 2}
DELTA = {
    "head_dim": 16,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 3,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
GRANITE_4 = (
    GRANITE
    | MAMBA
    | {
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
    }
)
FALCON_H1 = MAMBA | {"mamba_d_head": 6, "mamba_d_ssm": 48, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
NEMOTRON_H = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "head_dim": 8,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "full_attention", "mlp"],
}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 6, "first_k_dense_replace": 1}
STATES = ATTENTION_FREE | {"num_hidden_layers": 2, "state_size": 12, "intermediate_size": 64}
STATES_2 = STATES | {"num_heads": 8, "head_dim": 8, "n_groups": 4, "chunk_size": 16, "intermediate_size": ABSENT}
TEXT = "".join(f"def f{i}(x, y={i}):\n    return x + {i * i} * y  # it's {i}\n\n" for i in range(200))


TABLE = (
    "eNol0wWQ10UUAOAfDDDcwRGCdKqEkndwAtJgjDRKd7cSIg3SJaF0l3R3d8PQoJSglHR3Cd8fduabtztv583OvLdBrCAIMgRBWFgQ"
    "hMcOQqtnHCJSBsEm55j2UkFc4hFOBPFJSAISk4gkfMCHJCU5yVAqSEFqUpGWNKQnHRnfPyH4mI/IxCdkITOfkpVsfEYOspOLnESS"
    "mzxEEU1e8vE5BchPQb6gMIUoShGKU4ySlOArvuQbvubb0J3oGEFpsRRlKUN5ylGRCnzPd1SmElWpQnWqUZMa1KYWdalDferRkAY0"
    "phFNaUJzmtGSFvxAK1rzI21pw0+042fa05EOdKYTXelCd7rxCz3oFWo6fehNP/oygP4MYiC/MpihDGE4w/id3xjJCEYzirGMYTzj"
    "mMgEJjOJqUxhOtP4gxnMYiZzmM085rKA+SxiIUtYzDKWsoLlrGIla1jNOtaygfVsYiNb2Mw2trKD7exiJ3vYzT72hnI7YwT7xYMc"
    "4DCHOMoRjnOMPznBSf7iNKc4yxnO8Tf/cJ4L/MslLnKFy1zlP65zjZvc4Da3uMsd7nOPhzzgMY94yhOe84yXvOA1r3jD/+/+XmSu"
    "KFP4FiqUhBg="
)
"""Compressed: what SentencePiece makes of five rules of normalization."""


def save(folder: Path, model_type: str, auto: Any = AutoModelForCausalLM, **changes: Any) -> Path:
    """A random model of a family, its norms and biases random too."""
    sizes = {key: value for key, value in {**SIZES, **changes}.items() if value != ABSENT}
    config = AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(3)
    model = auto.from_config(config, dtype=torch.float32) if hasattr(auto, "from_config") else auto(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of routers
                buffer.normal_(std=0.3)
            if name.endswith("layer_scalar"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder)
    shutil.copy(DEMO / "tokenizer.json", folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def proving(folder: Path) -> ProofOptions:
    """The options that name the text and the window on which files are compared."""
    text = folder.parent / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return ProofOptions(text=(text,), samples=1, window=48)


def save_pieces(folder: Path, **normalizer: Any) -> None:
    """Give a model a tokenizer of WordPieces whose special tokens stand elsewhere than BERT's."""
    letters = [chr(code) for code in range(33, 127)]
    words = ["[UNK]", "[PAD]", "[MASK]", "[SEP]", "[CLS]", *letters, *(f"##{each}" for each in letters)]
    words += ["def", "return", "hello", "##ello", "ete", "##ive"]
    pieces = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(**{"strip_accents": None} | normalizer)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    around = [("[CLS]", 4), ("[SEP]", 3)]
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
    )
    pieces.add_special_tokens(words[:5])
    named = {"unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]", "sep": "[SEP]", "cls": "[CLS]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=pieces, **{f"{key}_token": token for key, token in named.items()})
    fast.save_pretrained(folder)


def save_unigram(folder: Path) -> None:
    """Give a model a Unigram tokenizer as XLM-R's, whose table makes a of A, and 1/2 of one character."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁def", "▁return", "ab", "re", "n", *map(chr, range(33, 110))]
    pieces: list[tuple[str, float]] = [(word, -(index % 7) - 1.0) for index, word in enumerate(dict.fromkeys(words))]
    stored = Tokenizer(models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=3, byte_fallback=False))
    stored.normalizer = normalizers.Precompiled(decompress(b64decode(TABLE)))
    around = pre_tokenizers.Metaspace("▁", "always")
    stored.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), around])
    stored.decoder = decoders.Metaspace("▁", "always")
    ends = [("<s>", 0), ("</s>", 2)]
    stored.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    named = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=stored, **{f"{key}_token": token for key, token in named.items()})
    fast.save_pretrained(folder)


def frame_tokens(folder: Path) -> None:
    """Let a model's tokenizer put its first and its last token around a text."""
    stored, ends = Tokenizer.from_file(str(folder / "tokenizer.json")), [("<s>", 0), ("</s>", 1)]
    around = {"single": "<s> $A </s>", "pair": "<s> $A </s> </s> $B </s>"}
    stored.post_processor = processors.TemplateProcessing(**around, special_tokens=ends)
    stored.save(str(folder / "tokenizer.json"))


def add_pooling(folder: Path, dense: int = 0, **settings: Any) -> None:
    """Make a model an embedder of sentence-transformers, with two modules Dense that are `dense` wide between."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    for name, shape in (("2_Dense", (dense, 32)), ("3_Dense", (32, dense))) if dense else ():
        kinds[name] = "Dense"
        (folder / name).mkdir()
        settled = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
        (folder / name / "config.json").write_text(json.dumps(settled), encoding="utf-8")
        save_file({"linear.weight": torch.randn(shape)}, folder / name / "model.safetensors")
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings), encoding="utf-8")
