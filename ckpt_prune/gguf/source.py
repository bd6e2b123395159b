"""Reading a GGUF file as a checkpoint, so that it can be pruned. Rounded weights become float16."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ckpt_prune.checkpoint.files import sha256_files
from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.common.errors import UserError
from ckpt_prune.conversion.stock_checkpoint import NewTensor, StockCheckpoint
from ckpt_prune.gguf.architectures import ARCHITECTURES, DIFFERENT, KEY, QUERY, Architecture
from ckpt_prune.gguf.layout import Weight, llama3_divisors
from ckpt_prune.gguf.reading import GgufFile, open_gguf
from ckpt_prune.gguf.tokenizer import tokenizer_of
from ckpt_prune.job.model_card import front_matter
from ckpt_prune.model.containers.checking import check_shapes
from ckpt_prune.model.descriptions import load_family
from ckpt_prune.model.skeleton import stock_names

_DTYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_CARD = {"license": "license", "license_name": "license.name", "license_link": "license.link", "language": "languages"}
_LLAMA3_TABLE = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary settings that all Llama 3 models share. A file holds only factors that follow from them."""
_EPSILONS = {
    "starcoder2": "norm_epsilon",
    "cohere": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "nemotron": "norm_eps",
}


def stock_of_gguf(path: Path) -> StockCheckpoint:
    """Return a GGUF file as the class of transformers that computes the same.

    Raises:
        UserError: the file is damaged, or no class of transformers is known to compute what its architecture does.
    """
    file = open_gguf(path)
    architecture = _architecture(file)
    config = _config(file, architecture)
    weights = dict(_tensors(file, architecture, config))
    shapes = {name: weight.shape for name, weight in weights.items()}
    check_shapes(shapes, stock_names(config, config["architectures"][0]), str(path))
    dtype = _dtype(file)
    config["dtype"] = str(dtype).removeprefix("torch.")
    texts = {"generation_config.json": pretty_json(_generation(file, config))}
    if card := {key: value for key in _CARD if (value := file.values.get(f"general.{_CARD[key]}"))}:
        texts["README.md"] = f"{front_matter(card)}\nMade from {path.name}.\n"
    texts |= _tokenizer_texts(tokenizer_of(file.values, path))
    kinds = sorted({info.kind.name for info in file.tensors.values()})
    return StockCheckpoint(
        path.name,
        sha256_files(path.parent, [path.name])[path.name],
        config,
        {
            name: NewTensor(dtype, weight.shape, partial(_read_rounded, f"{name} of {path}", weight, dtype))
            for name, weight in weights.items()
        },
        texts,
        notes=(f"written in {config['dtype']} from {', '.join(kinds)}",),
    )


def _tokenizer_texts(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    texts = {
        "tokenizer.json": tokenizer.backend_tokenizer.to_str(pretty=True),
        "tokenizer_config.json": pretty_json(settings | tokenizer.special_tokens_map),
    }
    template = tokenizer.chat_template
    return texts | ({"chat_template.jinja": template} if isinstance(template, str) else {})


def _generation(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: a second end of text stands only there."""
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    other = file.values.get("tokenizer.ggml.eot_token_id")
    return ids | ({"eos_token_id": [ids["eos_token_id"], other]} if other is not None else {})


def _architecture(file: GgufFile) -> Architecture:
    name = file.value("general.architecture", str)
    architecture = next((each for each in (*ARCHITECTURES, *DIFFERENT) if each.name == name), None)
    if architecture is None:
        convertible = ", ".join(sorted({each.name for each in (*ARCHITECTURES, *DIFFERENT)}))
        raise UserError(f"{file.path}: GGUF files of {name[:60]} are not converted; of these they are: {convertible}")
    if name == "openelm":
        raise UserError(f"{file.path}: openelm is not converted: prune the checkpoint that the file was made from")
    return architecture


def _config(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    name, family = architecture.name, load_family(architecture.model_type)

    def number(key: str) -> int:
        value = file.values.get(f"{name}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UserError(f"{file.path}: its blocks differ ({key}): prune the checkpoint that it was made from")
            return int(value[0])
        return int(file.value(f"{name}.{key}", int))

    heads, hidden = number("attention.head_count"), number("embedding_length")
    if not 1 <= number("block_count") <= 1000 or not heads or hidden < 1:
        raise UserError(f"{file.path}: {number('block_count')} blocks of {heads} heads cannot be; download it again")
    head_dim = number("attention.key_length") if f"{name}.attention.key_length" in file.values else hidden // heads
    rows = file.tensors.get("token_embd.weight")
    if rows is None or len(rows.shape) != 2:
        raise UserError(f"{file.path}: there is no token_embd.weight; download it again")
    kv_heads = number("attention.head_count_kv") if f"{name}.attention.head_count_kv" in file.values else heads
    epsilon = file.value(f"{name}.attention.{architecture.epsilon}", float)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": architecture.model_type,
        "vocab_size": rows.shape[0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        _EPSILONS.get(architecture.model_type, "rms_norm_eps"): float(f"{epsilon:.6g}"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, name, head_dim),
    }
    for key, allowed in architecture.only.items():
        config[key] = allowed[0]
    for key, target in architecture.values.items():
        if f"{name}.{key}" in file.values:
            config[target] = file.value(f"{name}.{key}", float)
    _add_biases(file, config)
    _add_windows(file, architecture, config)
    for token, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{token}_token_id"] = file.values.get(f"tokenizer.ggml.{key}_token_id")
    return config


def _rope(file: GgufFile, name: str, head_dim: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if f"{name}.rope.freq_base" in file.values:
        parameters["rope_theta"] = float(f"{file.value(f'{name}.rope.freq_base', float):.7g}")
    rotated = file.values.get(f"{name}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        parameters["partial_rotary_factor"] = rotated / head_dim
    kind = file.values.get(f"{name}.rope.scaling.type", "none")
    if kind == "linear":
        parameters |= {"rope_type": "linear", "factor": file.value(f"{name}.rope.scaling.factor", float)}
    elif kind == "none" and _LLAMA3_TABLE in file.tensors:
        table = file.read(_LLAMA3_TABLE)
        parameters |= {"rope_type": "llama3", "factor": float(table.max()), **_LLAMA3}
        expected = llama3_divisors(parameters, rotated)
        if table.shape != expected.shape or not torch.allclose(table.double(), expected, rtol=1e-4):
            raise UserError(f"{file.path}: {_LLAMA3_TABLE} is not that of a Llama 3, and is not converted")
    elif kind != "none" or "rope_factors_long.weight" in file.tensors:
        raise UserError(f"{file.path}: its rotary positions are scaled in a way that is not converted ({kind})")
    return parameters


def _add_biases(file: GgufFile, config: dict[str, Any]) -> None:
    """Flags of the classes whose biases are optional."""
    biases = {name.split(".")[2] for name in file.tensors if name.startswith("blk.") and name.endswith(".bias")}
    model_type = config["model_type"]
    if model_type in ("llama", "granite"):
        config |= {"attention_bias": "attn_q" in biases, "mlp_bias": "ffn_gate" in biases}
    elif model_type == "seed_oss":
        config |= {"attention_bias": "attn_q" in biases, "attention_out_bias": False, "mlp_bias": False}
    elif model_type in ("starcoder2", "stablelm"):
        config["use_bias" if model_type == "starcoder2" else "use_qkv_bias"] = "attn_q" in biases


def _add_windows(file: GgufFile, architecture: Architecture, config: dict[str, Any]) -> None:
    window = file.values.get(f"{architecture.name}.attention.sliding_window")
    last = [(index + 1) % (architecture.pattern or 1) == 0 for index in range(config["num_hidden_layers"])]
    if architecture.window:
        config["sliding_window"] = window
        config["layer_types"] = ["full_attention" if full else "sliding_attention" for full in last]
        config["query_pre_attn_scalar"] = config["head_dim"]
    elif architecture.pattern:
        config["no_rope_layers"] = [0 if without else 1 for without in last]
        config["no_rope_layer_interval"] = architecture.pattern
    else:
        config["sliding_window"] = None
    if architecture.name == "gemma3":
        local = float(file.values.get("gemma3.rope.freq_base_swa", 10000.0))
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }


def _tensors(file: GgufFile, architecture: Architecture, config: Mapping[str, Any]) -> Iterator[tuple[str, Weight]]:
    outer = {mapped: module for module, mapped in architecture.outer.items()}
    inner = {mapped: module for module, mapped in architecture.block.items()}
    for name, info in file.tensors.items():
        if name == _LLAMA3_TABLE and config["rope_parameters"].get("rope_type") == "llama3":
            continue
        base, _, kind = name.rpartition(".")
        parts = base.split(".", 2)
        in_block = len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit()
        module = inner.get(parts[2]) if in_block else outer.get(base)
        if module is None or kind not in ("weight", "bias"):
            raise UserError(f"{file.path}: transformers' {architecture.model_type} has no place for {name}")
        weight = Weight(info.shape, lambda name=name: file.read(name))  # type: ignore[misc]
        heads = {QUERY: config["num_attention_heads"], KEY: config["num_key_value_heads"]}.get(module)
        if architecture.neighbours and heads:
            if info.shape[0] % (2 * heads):
                raise UserError(f"{file.path}: {name} has {info.shape[0]} rows, and {heads} heads; download it again")
            weight = weight.pair_neighbours(heads, back=True)
        if architecture.norm_offset and kind == "weight" and "norm" in module:
            weight = weight.apply(lambda tensor: tensor - architecture.norm_offset)
        yield (f"model.layers.{int(parts[1])}.{module}.{kind}" if in_block else f"{module}.{kind}"), weight


def _dtype(file: GgufFile) -> torch.dtype:
    """The type of most matrices; float16 for rounded ones, which it holds to a thousandth of their steps."""
    sizes: dict[torch.dtype, int] = {}
    for info in file.tensors.values():
        if len(info.shape) > 1:
            dtype = _DTYPES.get(info.kind, torch.float16)
            sizes[dtype] = sizes.get(dtype, 0) + info.bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _read_rounded(name: str, weight: Weight, dtype: torch.dtype) -> Tensor:
    rounded = weight.read().to(dtype)
    if not torch.isfinite(rounded).all():
        raise UserError(f"{name} has NaN, Inf, or numbers beyond {dtype}: write the file anew")
    return rounded
