"""Reading a GGUF file as a checkpoint, so that it can be pruned. Rounded weights become float16."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ckpt_prune.checkpoint.files import sha256_files
from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.memory import available_bytes
from ckpt_prune.conversion.stock_checkpoint import Compare, NewTensor, StockCheckpoint
from ckpt_prune.gguf.architectures import (
    ALIBI,
    ARCHITECTURES,
    DIFFERENT,
    KEY,
    NORMED,
    QKV,
    QUERY,
    SHARED_WIDTH,
    VALUE,
    Architecture,
)
from ckpt_prune.gguf.encoders import CAUSAL_KEY, TOKEN_TYPES, describe_read, texts_of_pooling
from ckpt_prune.gguf.gguf_weight import GgufWeight
from ckpt_prune.gguf.keys import MIXTURE_NEUTRAL, MODEL_NEUTRAL, MODEL_WITHOUT_EFFECT, Keys
from ckpt_prune.gguf.layout import EPSILONS, LONGROPE, llama3_divisors, longrope_scale
from ckpt_prune.gguf.llama_cpp import INSTALL, has_runtime
from ckpt_prune.gguf.orders import (
    DeltaHeads,
    Order,
    as_in_checkpoint,
    join_latent,
    order_of_halves,
    order_of_heads,
    rows_of_fused,
)
from ckpt_prune.gguf.proof import prove
from ckpt_prune.gguf.reading import GgufFile, open_gguf
from ckpt_prune.gguf.source_tokenizer import tokenizer_of
from ckpt_prune.gguf.stacks import read_config, read_tensors
from ckpt_prune.gguf.types import type_of_file
from ckpt_prune.job.run import Announce
from ckpt_prune.model.containers.checking import check_shapes
from ckpt_prune.model.skeleton import (
    Names,
    RefusedConfigError,
    parameters_on_meta,
    parse_config,
    stock_class,
    stock_names,
)
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.runtimes.comparison import Proof
from ckpt_prune.show.model_card import front_matter

_DTYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_CARD = {"license": "license", "license_name": "license.name", "license_link": "license.link", "language": "languages"}
_IN_BLOCK = re.compile(r"blk\.(?P<block>0|[1-9][0-9]{0,3})\.(?P<tensor>.+)")
_LLAMA3_TABLE = "rope_freqs.weight"
_LONGROPE_TABLES = {f"{name}_factor": f"rope_factors_{name}.weight" for name in ("long", "short")}
"""Setting of rotary positions for long and for short texts → tensor."""
_READ_TABLES = {"llama3": (_LLAMA3_TABLE,), "longrope": tuple(_LONGROPE_TABLES.values())}
"""Kind of rotary positions → tensors that config.json says."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary settings that all Llama 3 models share. A file holds only factors that follow from them."""
_SIZES = ("intermediate_size", "num_key_value_heads", "head_dim", "sliding_window")
_MOST_BLOCKS = _MOST_EXPERTS = 512
_UNTURNED = 1e29
"""Divisors of rotary pairs that do not turn are larger."""
_LOCAL, _FULL = "sliding_attention", "full_attention"
_SHARED = "attention.shared_kv_layers"
_OPTIONAL = ("embedding_length_per_layer_input", "altup.active_idx", _SHARED)
"""Counts that may be 0, as they are where a file has none."""
_TWO_BASES = ("gemma3", "gemma3n", "gemma-embedding")
"""Architectures whose windows have a rotary base of their own."""
_WINDOWS = {"gemma2": 4096}
"""Architecture → the window of a file that states none."""
_YARN = (
    "llama",
    "qwen2",
    "qwen3",
    "olmo2",
    "gpt-oss",
    "mistral3",
    "mellum",
    "deepseek2",
    "deepseek32",
    "glm-dsa",
    "laguna",
)
"""Architectures in which llama.cpp's YaRN was compared with transformers'."""


def stock_of_gguf(path: Path) -> StockCheckpoint:
    """Return a GGUF file as the class of transformers that computes the same.

    Raises:
        UserError: the file is damaged, or no class of transformers is known to compute what its architecture does.
    """
    file = open_gguf(path)
    architecture = _architecture(file)
    config = read_config(file, architecture) if architecture.stacked else _config(file, architecture)
    stored = tokenizer_of(file.values, path)
    if stored.count != config["vocab_size"]:
        raise UserError(
            f"{path}: {stored.count} tokens, and token_embd.weight has {config['vocab_size']} rows; download it again"
        )
    config |= {f"{name}_token_id": index for name, index in stored.ids.items()}
    written = _by_names_of_class(config, architecture)
    try:
        names = stock_names(written, written["architectures"][0])
    except RefusedConfigError as error:
        raise UserError(f"{path}: transformers refuses such a model: {error.rule}") from error
    weights = {
        name: _in_shape(weight, names.shapes.get(name, weight.shape))
        for stacked, each in (
            read_tensors(file, config) if architecture.stacked else _tensors(file, architecture, config, names)
        )
        for name, weight in _as_saved(stacked, each, names)
    }
    weights |= _computed(architecture, written, names)
    shapes = {name: weight.shape for name, weight in weights.items()}
    check_shapes(shapes, names, str(path))
    dtype = _dtype(file)
    written["dtype"] = str(dtype).removeprefix("torch.")
    texts = _tokenizer_texts(stored.tokenizer) | texts_of_pooling(file.values, config["hidden_size"])
    notes = []
    if architecture.encodes and not architecture.stacked:
        notes.append(describe_read(file.values, file.values[f"{architecture.name}.context_length"]))
    elif not architecture.encodes:
        start = {key: config[key] for key in ("decoder_start_token_id",) if key in config}
        texts["generation_config.json"] = pretty_json({**stored.generation, **start})
    if card := {key: value for key in _CARD if _is_text(value := file.values.get(f"general.{_CARD[key]}"))}:
        texts["README.md"] = f"{front_matter(card)}\nMade from {path.name}.\n"
    kinds = sorted({info.kind.name for info in file.tensors.values()})
    return StockCheckpoint(
        path.name,
        sha256_files(path.parent, [path.name])[path.name],
        written,
        {
            name: NewTensor(dtype, weight.shape, partial(_read_rounded, f"{name} of {path}", weight, dtype))
            for name, weight in weights.items()
        },
        texts,
        notes=(f"written in {written['dtype']} from {', '.join(kinds)}", *notes),
    )


def _computed(architecture: Architecture, config: dict[str, Any], names: Names) -> dict[str, GgufWeight]:
    """Return the tensors that the class computes from config.json, and saves."""
    wanted = [name for name in names.shapes if name.endswith(tuple(architecture.computed))]
    if not wanted:
        return {}
    parsed = parse_config(config)
    with parameters_on_meta():
        buffers = dict(stock_class(config["architectures"][0], parsed)(parsed).named_buffers())
    found = {name: buffers[names.parameters(name)[0]] for name in wanted}
    return {name: GgufWeight(tuple(each.shape), each.clone) for name, each in found.items()}


def refuse_as_model(path: Path) -> None:
    """Refuse a file where a checkpoint is wanted and `convert` makes none of it, as far as its keys tell.

    Raises:
        UserError: it says why it is not converted and what to do, or that the file is damaged.
    """
    file = open_gguf(path)
    try:
        architecture = _architecture(file)
        (read_config if architecture.stacked else _config)(file, architecture)
    except UserError as error:
        reason = str(error).removeprefix(f"{path}: ").partition("; ")[0]
        validated = f"`ckpt-prune validate {shlex.quote(str(path))} --against MODEL` compares the file with it"
        raise UserError(
            f"{path} is a GGUF file, and `convert` makes no checkpoint of it ({reason}): give the checkpoint that it "
            f"was made from{f'; {validated}' if path.suffix == '.gguf' else ''}"
        ) from None


def comparison_with(
    path: Path, stock: StockCheckpoint, proving: ProofOptions, say: Announce, *, wanted: bool
) -> Compare | None:
    """Return what compares a new checkpoint with the file that it is made from; None, and a line, if nothing does.

    Args:
        path: of the file.
        stock: the checkpoint that the file becomes.
        proving: what to compare on.
        say: prints a line.
        wanted: compare.
    """
    later = f"`ckpt-prune validate {shlex.quote(str(path))} --against OUT` compares them"
    needed = 4 * sum(math.prod(tensor.shape) for tensor in stock.tensors.values()) + path.stat().st_size
    free = available_bytes()
    if not wanted:
        say(f"not compared with llama.cpp; {later}")
    elif not has_runtime():
        say(f"not compared with llama.cpp, which is not installed: {INSTALL}; then {later}")
    elif free is not None and needed > free:
        say(
            f"not compared with llama.cpp, which takes {human_bytes(needed)} of memory where {human_bytes(free)} are "
            f"free; elsewhere {later}"
        )
    else:
        ends = json.loads(stock.texts.get("generation_config.json", "{}")).get("eos_token_id")
        return partial(_compare, path, proving, ends if isinstance(ends, list) else [ends] * (ends is not None))
    return None


def _compare(path: Path, proving: ProofOptions, ends: Sequence[int], folder: Path) -> Proof:
    try:
        proof = prove(path, folder, type_of_file(open_gguf(path)), proving, ends=ends, same_weights=True)
    except UserError as error:
        raise UserError(f"{error}; nothing is written (--no-validate leaves the comparison out)") from error
    # Both have the same weights: what the file's own rounding in llama.cpp costs is no loss of the checkpoint.
    return proof.model_copy(update={"losses": ()})


def _is_text(value: Any) -> bool:
    """Whether a value is a text, or a list of texts, and not empty."""
    return bool(value) and all(isinstance(each, str) for each in (value if isinstance(value, list) else [value]))


def _tokenizer_texts(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    texts = {
        "tokenizer.json": tokenizer.backend_tokenizer.to_str(pretty=True),
        "tokenizer_config.json": pretty_json(settings | tokenizer.special_tokens_map),
    }
    templates = dict(tokenizer.chat_template or {})
    if (default := templates.pop("default", None)) is not None:
        texts["chat_template.jinja"] = default
    return texts | {f"additional_chat_templates/{name}.jinja": text for name, text in templates.items()}


def _architecture(file: GgufFile) -> Architecture:
    name = file.values.get("general.architecture")
    known = (*ARCHITECTURES, *DIFFERENT)
    candidates = [each for each in known if each.name == name]
    if not candidates:
        convertible = ", ".join(sorted({each.name for each in known}))
        raise UserError(
            f"{file.path}: GGUF files of {str(name)[:60]} are not converted; of these they are: {convertible}"
        )
    if name == "openelm":
        raise UserError(f"{file.path}: openelm is not converted; prune the checkpoint that the file was made from")
    # An OLMo 3 is an olmo2 with windows, a Mixtral a llama with experts, a Granite 4 a granite without positions.
    windows, shared = (bool(file.values.get(f"{name}.{key}")) for key in ("attention.sliding_window", SHARED_WIDTH))
    experts = any("_exps." in tensor for tensor in file.tensors)

    unrotated = file.values.get(f"{name}.rope.scaling.finetuned") is False

    gate = file.values.get(f"{name}.expert_gating_func")
    normed = bool(file.values.get(f"{name}.{NORMED}"))
    sections = any(file.values.get(f"{name}.rope.dimension_sections") or ())

    def fits(each: Architecture) -> tuple[bool, ...]:
        is_shared = (SHARED_WIDTH in each.widths) == shared
        has_gate = each.constants.get("expert_gating_func", gate) == gate
        return (
            each.experts == experts,
            is_shared,
            bool(each.window) == windows,
            bool(each.switch) or not unrotated,
            has_gate,
            bool(each.constants.get(NORMED)) == normed,
            bool(each.values) == any(f"{name}.{key}" in file.values for key in each.values),  # Bamba has no factors
            bool(each.sections) == sections,
        )

    found = max(candidates, key=fits)
    if not found.alone:
        return found
    # Models with experts that generate text by themselves store each expert.
    return replace(found, model_type=found.alone, halves={} if experts else found.halves)


def _config(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """config.json of a file. Where a key is absent, it states what llama.cpp computes, whatever the class would do."""
    keys = Keys(file.values, file.path, architecture.name)
    hidden, blocks = (keys.number(key) for key in ("embedding_length", "block_count"))
    per_block = _heads(keys, blocks) if architecture.apart else {}
    never = architecture.attends == "never"
    heads = 1 if never else per_block.get("num_attention_heads") or keys.number("attention.head_count")
    if blocks > _MOST_BLOCKS:
        raise keys.refuse("block_count", f"and llama.cpp takes {_MOST_BLOCKS} at most; download it again")
    rows = file.tensors.get("token_embd.weight")
    if rows is None or len(rows.shape) != 2:
        raise UserError(f"{file.path}: there is no token_embd.weight; download it again")
    latent = _latents(keys, architecture) if architecture.latent else {}
    two_sizes = architecture.shares and architecture.differs
    per_block |= _two_sizes(file, keys, architecture, blocks) if two_sizes else {}
    head_dim = latent.get("qk_rope_head_dim") or per_block.get("head_dim")
    head_dim = head_dim or keys.number("attention.key_length", hidden // heads, least=2)
    if architecture.value_rows:
        per_block[architecture.value_rows] = keys.number("attention.value_length", hidden // heads)
    elif not (latent or two_sizes) and keys.number("attention.value_length", hidden // heads) != head_dim:
        raise keys.refuse("attention.value_length", f"and heads of keys have {head_dim}: no class has both")
    classes = MODEL_MAPPING_NAMES if architecture.encodes else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config: dict[str, Any] = {
        "architectures": [classes[architecture.model_type]],
        "model_type": architecture.model_type,
        "vocab_size": rows.shape[0],
        "hidden_size": hidden,
        "intermediate_size": 0 if architecture.single or two_sizes else keys.number("feed_forward_length"),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        architecture.context: keys.number("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": {} if two_sizes else _rope(file, keys, architecture, head_dim),
    }
    config |= latent | per_block
    if (
        original := config["rope_parameters"].get("original_max_position_embeddings")
    ) and architecture.name in LONGROPE:
        config["original_max_position_embeddings"] = original  # classes differ in where they look
    if architecture.unrotated:
        del config["rope_parameters"]
        keys.others("rope.")
    if never:  # its config has nothing of attention or MLPs, and the file says 0
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
            del config[key]
        config["intermediate_size"] = keys.number("ssm.inner_size")
        keys.others("attention.head_count")
        keys.take("feed_forward_length")
    elif architecture.single:
        config |= _kinds(keys, blocks, "moe" if architecture.experts else "mlp")
    elif architecture.attends == "periods":
        config |= _periods(file, keys, blocks)
    elif architecture.attends == "attn_layer_indices":
        counts = _some_blocks(keys, "attention.head_count_kv", blocks)
        config["num_key_value_heads"] = max(counts)
        config["attn_layer_indices"] = [index for index, count in enumerate(counts) if count]
    elif architecture.hybrid == "kv_heads":
        config |= _mixers(keys, blocks, "conv" if "shortconv.l_cache" in architecture.counts else "linear_attention")
        config |= {"num_key_value_heads": heads} if latent else {}
    elif not (latent or architecture.apart or two_sizes):
        config["num_key_value_heads"] = keys.number("attention.head_count_kv", heads)
    if architecture.hybrid == "interval":
        config["layer_types"] = _attending(keys, blocks)
    for key, allowed in architecture.only.items():
        config[key] = allowed[0]
        if key == "sliding_window":
            config["layer_types"] = ["full_attention"] * blocks
    for key, target in architecture.values.items():
        config[target] = _factor(keys, architecture, key)
    config |= {target: keys.flag(key, absent=False) for key, target in architecture.flags.items()}
    config |= {key: config[name] for key, name in architecture.same.items()}
    usual = CONFIG_MAPPING[architecture.model_type]().to_dict()
    epsilon = next((name for name in EPSILONS if usual.get(name) is not None), "rms_norm_eps")
    config[epsilon] = keys.decimal(f"attention.{architecture.epsilon}")
    if config.get("attention_multiplier", 1) is None:
        config["attention_multiplier"] = head_dim**-0.5
    if architecture.encodes:
        _add_encoder(file, keys, architecture, config)
    if architecture.switch:
        config[architecture.switch] = "rope" if keys.flag("rope.scaling.finetuned", True) else "nope"
    if architecture.indexers:
        own = keys.entries("attention.indexer.types", int, [1] * blocks)
        config[architecture.indexers] = ["full" if each else "shared" for each in own]
    if architecture.unnormed:
        config["use_qk_norm"] = keys.number("expert_count") != architecture.unnormed
    if architecture.large or architecture.name == "gemma-embedding":
        config["query_pre_attn_scalar"] = architecture.query_scalar(blocks, hidden, heads, head_dim)
    _add_counts(keys, architecture, config)
    _add_biases(file, config)
    _add_windows(keys, architecture, config)
    if architecture.shares:
        _add_shared_keys(file, keys, architecture, config)
    rotated = keys.number("rope.dimension_count", head_dim)
    neutral: dict[str, tuple[Any, ...]] = {
        "attention.key_length_swa": (head_dim,),
        "attention.value_length_swa": (head_dim,),
        "rope.dimension_count_swa": (rotated,),
        "embedding_length_out": (0, hidden),
        NORMED: (architecture.constants.get(NORMED, False),),
    }
    if architecture.attends == "periods":
        neutral["expert_count"] = (0, 1)
    if architecture.name == "granite":
        neutral["rope.scaling.finetuned"] = (True,)
    if "attention_chunk_size" in architecture.only:  # of other sizes, which an absent key means, there are none
        neutral["attention.sliding_window"] = architecture.only["attention_chunk_size"]
        neutral["attention.sliding_window_pattern"] = (architecture.pattern,)
        neutral["rope.freq_base_swa"] = (config["rope_parameters"]["rope_theta"],)
    if architecture.sections:
        keys.take("rope.dimension_sections")  # which rotary pairs are of what: in a text all are alike
    if architecture.experts:
        neutral |= MIXTURE_NEUTRAL
        neutral["expert_weights_norm"] = (config.get("norm_topk_prob"),)
        neutral["expert_feed_forward_length"] = (0, config["intermediate_size"])
    keys.check_others(MODEL_WITHOUT_EFFECT, {**MODEL_NEUTRAL, **neutral}, experts=architecture.experts)
    if architecture.fused and architecture.dense_width not in usual and config["intermediate_size"] != 4 * hidden:
        raise keys.refuse(
            "feed_forward_length",
            f"and MLPs of {architecture.model_type} are always 4 times as wide as the model: prune the checkpoint that "
            "the file was made from",
        )
    return config


def _by_names_of_class(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return a config under the names that its class gives to keys. Older classes have no key for some sizes."""
    usual = CONFIG_MAPPING[architecture.model_type]()
    lacking = {key for key in _SIZES if architecture.fused or architecture.encodes} - usual.to_dict().keys()
    written: dict[str, Any] = {}
    for key, value in config.items():
        part, _, own = key.rpartition(".")
        if part:
            written.setdefault(part, {})[own] = value
        elif key not in lacking:
            written[usual.attribute_map.get(key, key)] = value
    return written


def _add_encoder(file: GgufFile, keys: Keys, architecture: Architecture, config: dict[str, Any]) -> None:
    """Set what encoders have otherwise: all tokens see each other, tokens have types, and there is no head."""
    if keys.flag(CAUSAL_KEY, True):
        raise keys.refuse(CAUSAL_KEY, "and no class of transformers is known to compute that")
    if "dense_2.weight" in file.tensors:
        raise keys.refuse("dense_2_feat_out", "and no modules Dense are made of it: take the checkpoint that it is of")
    if "cls.weight" in file.tensors:
        raise keys.refuse("pooling_type", "and no class with a head is made of it: take the checkpoint that it is of")
    heads = config["num_attention_heads"]
    if architecture.whole and heads * config["head_dim"] != config["hidden_size"]:
        raise keys.refuse("attention.head_count", "and heads are together as wide as the model; download it again")
    if architecture.name not in ("eurobert", "gemma-embedding") and config["num_key_value_heads"] != heads:
        raise keys.refuse("attention.head_count_kv", "and every head has keys and values of its own")
    if TOKEN_TYPES in architecture.outer:
        types = file.tensors.get("token_types.weight")
        config["type_vocab_size"] = 1 if types is None else types.shape[0]
    del config["tie_word_embeddings"]


def _latents(keys: Keys, architecture: Architecture) -> dict[str, Any]:
    """Widths of latent vectors, and of heads that are made of them."""
    rank, rotated = keys.number("attention.kv_lora_rank"), keys.number("rope.dimension_count")
    if architecture.latent == "whole":
        heads, hidden = keys.number("attention.head_count"), keys.number("embedding_length")
        return {
            "q_lora_rank": keys.number("attention.q_lora_rank"),
            "kv_lora_rank": rank,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": keys.number("attention.key_length", least=rotated + 1) - rotated,
            "v_head_dim": keys.number("attention.value_length", hidden // heads),
            "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        }
    hybrid = bool(architecture.hybrid)
    wide = {"key_length": rank + rotated, "value_length": rank} | ({} if hybrid else {"head_count_kv": 1})
    for key, expected in wide.items():
        if keys.number(f"attention.{key}", expected if hybrid else None) != expected:
            raise keys.refuse(f"attention.{key}", f"and made of a latent vector it is {expected}: convert it anew")
    return {
        "q_lora_rank": keys.number("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.number("attention.key_length_mla", least=rotated + 1) - rotated,
        "v_head_dim": keys.number("attention.value_length_mla"),
    }


def _heads(keys: Keys, blocks: int) -> dict[str, Any]:
    """How many heads of queries each block has, and of keys and values those that see all tokens."""
    counts = []
    for key in ("attention.head_count", "attention.head_count_kv"):
        counts.append(numbers := _listed(keys.take(key), blocks))
        if len(numbers) != blocks or not all(type(each) is int and each > 0 for each in numbers):
            raise keys.refuse(key, f"and there are {blocks} blocks; download it again")
    queries, shared = counts
    listed = {"num_attention_heads_per_layer": queries} if len(set(queries)) > 1 else {}
    return listed | {"num_attention_heads": queries[0], "num_key_value_heads": min(shared)}


def _two_sizes(file: GgufFile, keys: Keys, architecture: Architecture, blocks: int) -> dict[str, Any]:
    """Return the keys of a Gemma 4, whose blocks with a window have other heads than those that see all tokens."""
    local = _local_blocks(keys, blocks, architecture)
    counts = _listed(keys.take("attention.head_count_kv"), blocks)
    widths, groups = dict[bool, int](), dict[bool, Any]()
    for is_local, end in ((False, ""), (True, "_swa")):
        widths[is_local] = size = keys.number(f"attention.key_length{end}", least=2)
        if keys.number(f"attention.value_length{end}", size) != size:
            raise keys.refuse(f"attention.value_length{end}", f"and heads of keys have {size}: no class has both")
        if keys.number(f"rope.dimension_count{end}", size) != size:
            raise keys.refuse(f"rope.dimension_count{end}", f"and heads have {size}, all of which are counted")
        found = {count for count, own in zip(counts, local, strict=False) if own == is_local}
        if len(counts) != blocks or len(found) != 1 or not all(type(each) is int and each > 0 for each in found):
            raise keys.refuse("attention.head_count_kv", "and blocks of a kind have one number; download it again")
        groups[is_local] = found.pop()
    own: dict[str, Any] = {"head_dim": widths[False]}
    own |= {"num_key_value_heads": groups[False]} if groups[False] != groups[True] else {}
    values = [f"blk.{block}.attn_v.weight" in file.tensors for block in range(blocks) if not local[block]]
    return {
        "head_dim": widths[True],
        "num_key_value_heads": groups[True],
        "per_layer_config": {str(block): own for block in range(blocks) if not local[block]},
        "attention_k_eq_v": not any(values),
        "rope_parameters": {
            _FULL: _partly_turned(file, keys, widths[False]),
            _LOCAL: {"rope_type": "default", "rope_theta": keys.decimal("rope.freq_base_swa")},
        },
    }


def _partly_turned(file: GgufFile, keys: Keys, head_dim: int) -> dict[str, Any]:
    """Rotary settings of heads of which a table says that the first pairs alone turn: it divides others by 1e30."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.decimal("rope.freq_base")}
    if _LLAMA3_TABLE not in file.tensors:
        return parameters
    table = file.read(_LLAMA3_TABLE)
    turning = int((table < _UNTURNED).sum())
    factor = float(table[0]) if turning else 0.0
    if tuple(table.shape) != (head_dim // 2,) or factor <= 0 or not bool((table[:turning] == factor).all()):
        raise UserError(f"{file.path}: {_LLAMA3_TABLE} is not that of a Gemma 4, and is not converted")
    if turning == len(table) and factor == 1:
        return parameters
    share = {"rope_type": "proportional", "partial_rotary_factor": 2 * turning / head_dim}
    return parameters | share | ({"factor": factor} if factor != 1 else {})


def _add_shared_keys(file: GgufFile, keys: Keys, architecture: Architecture, config: dict[str, Any]) -> None:
    """Set the widths of MLPs and the inputs of each block where the last blocks read keys and values of others."""
    blocks, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    if rows := file.tensors.get("per_layer_token_embd.weight"):
        config["vocab_size_per_layer_input"] = rows.shape[0]
    if shared >= blocks or (shared and config["layer_types"][: blocks - shared][-2:] != [_LOCAL, _FULL]):
        raise keys.refuse(_SHARED, "and no class reads keys and values of the same blocks as llama.cpp")
    if architecture.owners and shared != max(0, blocks - architecture.owners):
        raise keys.refuse(_SHARED, f"and llama.cpp computes keys and values in the first {architecture.owners} blocks")
    if architecture.sparse:
        sparse = min(architecture.sparse, blocks)
        config["activation_sparsity_pattern"] = [0.95] * sparse + [0.0] * (blocks - sparse)
        config["intermediate_size"] = [config["intermediate_size"]] * blocks
        return
    widths = _listed(keys.take("feed_forward_length"), blocks)
    narrow, wide = ({*part} for part in (widths[: blocks - shared], widths[blocks - shared :]))
    usual, is_double = next(iter(narrow)), bool(wide - narrow)
    is_one = len(widths) == blocks and len(narrow) == 1 and type(usual) is int and usual > 0
    if not is_one or (is_double and wide != {2 * usual}):
        raise keys.refuse(
            "feed_forward_length",
            "and its class has MLPs of one width, or twice as wide ones in blocks that read keys of others; prune the "
            "checkpoint that it was made from",
        )
    config |= {"intermediate_size": usual, "use_double_wide_mlp": is_double}


def _mixers(keys: Keys, blocks: int, other: str) -> dict[str, Any]:
    """Which blocks have attention, those with heads of keys and values; the others are of type `other`."""
    counts = _some_blocks(keys, "attention.head_count_kv", blocks)
    return {
        "num_key_value_heads": max(counts),
        "layer_types": ["full_attention" if count else other for count in counts],
        **({"block_auto_adjust_ff_dim": False} if other == "conv" else {}),
    }


def _periods(file: GgufFile, keys: Keys, blocks: int) -> dict[str, Any]:
    """Which blocks have attention, those with heads of keys and values, and which have experts, by their tensors."""
    counts = _some_blocks(keys, "attention.head_count_kv", blocks)
    config: dict[str, Any] = {"num_key_value_heads": max(counts)}
    has_experts = [f"blk.{index}.ffn_down_exps.weight" in file.tensors for index in range(blocks)]
    for name, what, chosen in (("attn", "attention", list(map(bool, counts))), ("expert", "experts", has_experts)):
        every = ((period, offset) for period in range(1, blocks + 2) for offset in range(period))
        for period, offset in every:
            if chosen == [index % period == offset for index in range(blocks)]:
                config |= {f"{name}_layer_period": period, f"{name}_layer_offset": offset}
                break
        else:
            raise UserError(f"{file.path}: its blocks with {what} come at no period, as config.json would state it")
    return config


def _kinds(keys: Keys, blocks: int, columns: str) -> dict[str, Any]:
    """Which blocks have attention or columns, which are of type `columns`; the others are Mamba 2."""
    heads, widths = (_some_blocks(keys, key, blocks) for key in ("attention.head_count_kv", "feed_forward_length"))
    kinds = [
        columns if width else "full_attention" if count else "linear_attention"
        for count, width in zip(heads, widths, strict=True)
    ]
    return {"num_key_value_heads": max(heads), "intermediate_size": max(widths), "layers_block_type": kinds}


def _some_blocks(keys: Keys, key: str, blocks: int) -> list[int]:
    """The counts of a key, one for each block: 0 in some, and the same in all others."""
    counts = keys.entries(key, int)
    kinds = {count for count in counts if count}
    if len(kinds) > 1:
        raise UserError(f"{keys.where}: its blocks differ ({key}); prune the checkpoint that it was made from")
    if not kinds or len(counts) != blocks or min(counts) < 0:
        raise UserError(f"{keys.where}: {keys.prefix}.{key} has other blocks; download it again")
    return counts


def _attending(keys: Keys, blocks: int) -> list[str]:
    """Which blocks of a Qwen3.5 have attention: those that are not listed as others, or the last of every so many."""
    every = keys.number("full_attention_interval", 8 if keys.prefix == "minimax-01" else 4)
    usual = [(index + 1) % every != 0 for index in range(blocks)]
    others = keys.entries("attention.recurrent_layers", bool, usual)
    if len(others) != blocks:
        raise keys.refuse("attention.recurrent_layers", f"and there are {blocks} blocks; download it again")
    return ["linear_attention" if each else "full_attention" for each in others]


def _add_counts(keys: Keys, architecture: Architecture, config: dict[str, Any]) -> None:
    """How many experts and heads of linear attention there are, and how wide they are."""
    config[architecture.dense_width] = config["intermediate_size"]
    for key, target in {**architecture.counts, **architecture.widths}.items():
        if key in architecture.absent and keys.take(key) is None:
            continue
        is_optional = key in _OPTIONAL
        value = keys.number(key, 0 if is_optional else None, least=0 if is_optional or "shared" in key else 1)
        if value not in architecture.only.get(target, (value,)):
            raise keys.refuse(key, f"and llama.cpp computes {architecture.only[target][0]}")
        if key == "expert_count" and value > _MOST_EXPERTS:
            raise keys.refuse(key, f"and llama.cpp takes {_MOST_EXPERTS} at most; download it again")
        if target:
            config[target] = value
    if architecture.shared_width:
        config[architecture.shared_width] = config["intermediate_size"]
    if architecture.delta_heads:
        heads, size = _delta_heads(config), keys.number("ssm.inner_size")
        if heads.values % heads.keys or heads.values * heads.rows != size:
            raise keys.refuse("ssm.inner_size", f"not {heads.values} heads of {heads.rows}; download it again")
        config["linear_value_head_dim"] = heads.rows
    if architecture.channels and keys.number("ssm.inner_size") != 2 * config["hidden_size"]:
        raise keys.refuse("ssm.inner_size", f"and llama.cpp computes {2 * config['hidden_size']} alone")
    if architecture.state_space:
        for key, target in architecture.state_space.stored.items():
            config[target] = keys.number(key)
        heads, size = config[architecture.state_space.time_step_rank], keys.number("ssm.inner_size")
        if size % heads or heads % config[architecture.state_space.group_count]:
            raise keys.refuse("ssm.inner_size", f"and {heads} heads in groups do not divide it; download it again")
        config[architecture.state_space.rows] = size // heads
        if architecture.state_space.columns:
            config[architecture.state_space.columns] = size
    if architecture.leading:
        dense = min(keys.number("leading_dense_block_count", 0, least=0), config["num_hidden_layers"])
        kinds = ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense)
        if architecture.kinds:
            config["layer_types"] = [architecture.kinds[each == "sparse"] for each in kinds]
        config[architecture.leading] = kinds if architecture.leading == "mlp_layer_types" else dense
    for key, value in architecture.constants.items():
        if not architecture.experts and key != ALIBI:
            continue
        if (keys.take(key) or architecture.absent.get(key)) != value:
            raise keys.refuse(key, f"and {architecture.model_type} computes {value}")


def _delta_heads(config: Mapping[str, Any]) -> DeltaHeads:
    return DeltaHeads(*(config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "key_head_dim")))


def _factor(keys: Keys, architecture: Architecture, key: str) -> float | None:
    """A factor of an architecture. Where 1, or none at all, stands for an absent key, 0 means the same."""
    absent = architecture.absent.get(key)
    value = keys.decimal(key, absent if key not in architecture.absent else absent or 0)
    if value:
        return value
    if key in architecture.absent and absent in (None, 1.0):
        return absent
    raise keys.refuse(key, "and nothing is divided by it; download it again")


def _rope(file: GgufFile, keys: Keys, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.decimal("rope.freq_base", 10000.0)}
    if not parameters["rope_theta"]:
        raise keys.refuse("rope.freq_base", "and positions are divided by its powers; download it again")
    rotated = keys.number("rope.dimension_count", head_dim)
    if rotated % 2:
        raise keys.refuse("rope.dimension_count", "and rotary positions come in pairs; download it again")
    if architecture.partial and rotated <= head_dim:
        parameters["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise keys.refuse("rope.dimension_count", f"and {architecture.model_type} rotates whole heads, of {head_dim}")
    # Without a type llama.cpp scales linearly, and by 1 without a factor. The second key is the older one.
    kind = keys.take("rope.scaling.type") or "linear"
    factor = keys.decimal("rope.scaling.factor", 0) or keys.decimal("rope.scale_linear", 0) or 1.0
    has_table = architecture.table and _LLAMA3_TABLE in file.tensors
    if architecture.name in LONGROPE and file.tensors.keys() & set(_LONGROPE_TABLES.values()):
        return parameters | _longrope(file, keys, rotated)
    if kind == "yarn" and architecture.name in _YARN and not has_table and factor >= 1:
        # Published models of gpt-oss do not round the bounds of YaRN, as llama.cpp does.
        others: dict[str, Any] = {"truncate": False} if architecture.name == "gpt-oss" else {}
        others |= {name: keys.decimal(key, 0) for key, name in architecture.rotary.items()}
        return parameters | _yarn(keys, factor, architecture) | others
    if kind == "none" or (kind == "linear" and factor == 1):
        return _table(file, parameters, rotated) if has_table else parameters
    if kind == "linear" and not has_table:
        return parameters | {"rope_type": "linear", "factor": factor}
    raise keys.refuse("rope.scaling.type", f"a way to scale rotary positions that is not converted in {keys.prefix}")


def _longrope(file: GgufFile, keys: Keys, rotated: int) -> dict[str, Any]:
    """Settings with divisors of their own for texts that are longer than those that a model was first trained on."""
    shapes = {file.tensors[name].shape if name in file.tensors else () for name in _LONGROPE_TABLES.values()}
    if shapes != {(rotated // 2,)}:
        raise UserError(
            f"{file.path}: {' or '.join(_LONGROPE_TABLES.values())} has other rotary pairs; download it again"
        )
    context = keys.number("context_length")
    original = keys.number("rope.scaling.original_context_length", context, least=2)
    scale, expected = keys.decimal("rope.scaling.attn_factor", 1.0), longrope_scale(context, original)
    if not math.isclose(scale, expected, rel_tol=1e-3):
        raise keys.refuse("rope.scaling.attn_factor", f"and such positions are scaled by {expected:.6g}")
    tables = {setting: file.read(name).tolist() for setting, name in _LONGROPE_TABLES.items()}
    return tables | {"rope_type": "longrope", "original_max_position_embeddings": original}


def _yarn(keys: Keys, factor: float, architecture: Architecture) -> dict[str, Any]:
    context = keys.number("rope.scaling.original_context_length", keys.number("context_length"))
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    usual = 1 + 0.1 * math.log(factor)
    scale = keys.decimal("rope.scaling.attn_factor", 1.0)
    if architecture.latent == "apart":
        share = float(f"{keys.decimal('rope.scaling.yarn_log_multiplier', 0) / 0.1:.6g}")
        if not share or scale != 1:
            raise keys.refuse("rope.scaling.yarn_log_multiplier", "and no class scales attention so")
        return yarn | {"mscale": share, "mscale_all_dim": share}
    if architecture.name == "mistral3":
        scale /= 1 + 0.1 * keys.decimal("rope.scaling.yarn_log_multiplier", 0) * math.log(factor)
    # llama.cpp's converter writes this one, and its models do not read it.
    stated = keys.decimal("rope.scaling.yarn_attn_factor", 1.0)
    if stated != 1 and not math.isclose(stated, usual, rel_tol=1e-3):
        raise keys.refuse("rope.scaling.yarn_attn_factor", f"and llama.cpp computes {usual:.6g} all the same")
    return yarn if scale == 1 else yarn | {"attention_factor": scale * usual}


def _table(file: GgufFile, parameters: dict[str, Any], rotated: int) -> dict[str, Any]:
    """Settings of a Llama 3, whose table of divisors a file holds."""
    table = file.read(_LLAMA3_TABLE)
    llama3 = parameters | {"rope_type": "llama3", "factor": float(table.nan_to_num(1).max()), **_LLAMA3}
    expected = llama3_divisors(llama3, rotated) if llama3["factor"] >= 1 else table[:0]
    if table.shape != expected.shape or not torch.allclose(table.double(), expected, rtol=1e-4):
        raise UserError(f"{file.path}: {_LLAMA3_TABLE} is not that of a Llama 3, and is not converted")
    return llama3


def _add_biases(file: GgufFile, config: dict[str, Any]) -> None:
    """Flags of the classes whose biases are optional."""
    biases = {name.split(".")[2] for name in file.tensors if name.startswith("blk.") and name.endswith(".bias")}
    model_type = config["model_type"]
    if model_type in ("llama", "granite", "granite_swa"):
        config |= {"attention_bias": "attn_q" in biases, "mlp_bias": "ffn_gate" in biases}
    elif model_type == "laguna":
        gate = file.tensors.get("blk.0.attn_gate.weight")
        by_head = gate is not None and gate.shape[0] == config["num_attention_heads"]
        config["gating"] = "per-head" if by_head else "per-element"
    elif model_type == "bamba":
        config["attention_bias"] = "attn_q" in biases
    elif model_type == "falcon_h1":
        config |= {"mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors, "mamba_norm_before_gate": False}
    elif model_type == "nemotron_h":
        config |= {"attention_bias": "attn_q" in biases, "mlp_bias": "ffn_up" in biases}
    elif model_type == "granitemoehybrid":
        whole = {"layer_types": ["full_attention"] * config["num_hidden_layers"], "mamba_n_heads": 1}
        config |= {"attention_bias": "attn_q" in biases} | ({} if "layer_types" in config else whole)
    elif model_type == "seed_oss":
        config |= {"attention_bias": "attn_q" in biases, "attention_out_bias": False, "mlp_bias": False}
    elif model_type in ("glm", "glm4"):
        config["attention_bias"] = "attn_q" in biases
    elif model_type == "glm4_moe":
        config |= {"attention_bias": "attn_q" in biases, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
    elif model_type == "gpt_bigcode":
        config["multi_query"] = config["num_key_value_heads"] == 1
    elif model_type == "falcon":
        config |= _norms_of_falcon(config, two="blk.0.attn_norm_2.weight" in file.tensors)
    elif model_type in ("starcoder2", "stablelm"):
        config["use_bias" if model_type == "starcoder2" else "use_qkv_bias"] = "attn_q" in biases


def _norms_of_falcon(config: Mapping[str, Any], *, two: bool) -> dict[str, Any]:
    """Which of the Falcons it is: with one head of keys and values, with one for each of queries, or of the newer kind.

    Args:
        config: with its heads.
        two: attention and MLP have norms of their own.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    newer = two or kv_heads not in (1, heads)
    return {
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": newer,
        "multi_query": not newer and kv_heads == 1,
        "num_ln_in_parallel_attn": 2 if two else 1 if newer else None,
    }


def _add_windows(keys: Keys, architecture: Architecture, config: dict[str, Any]) -> None:
    """Which blocks see a window only, and which have no rotary positions."""
    blocks = config["num_hidden_layers"]
    if not architecture.window:
        config["sliding_window"] = None
        if architecture.pattern:
            config["no_rope_layers"] = [int((index + 1) % architecture.pattern != 0) for index in range(blocks)]
            config["no_rope_layer_interval"] = architecture.pattern
        return
    window = keys.number("attention.sliding_window", _WINDOWS.get(architecture.name, 0), least=0)
    if not window and architecture.name == "gemma2":
        raise keys.refuse("attention.sliding_window", "with which no token sees another; download it again")
    if window and architecture.pattern is None and keys.take("attention.sliding_window_pattern") is None:
        raise keys.refuse("attention.sliding_window_pattern", "and no pattern is usual there; download it again")
    local = _local_blocks(keys, blocks, architecture) if window else [False] * blocks
    config["sliding_window"] = window or config["max_position_embeddings"]
    config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in local]
    rope = config["rope_parameters"]
    if _FULL in rope:
        return
    if architecture.bases:
        turned = keys.entries("attention.rope_pattern", bool, [True] * blocks)
        config[architecture.bases] = [rope["rope_theta"] * each for each in turned]
    theta = keys.decimal("rope.freq_base_swa", 10000.0 if architecture.name in _TWO_BASES else rope["rope_theta"])
    if not theta:
        raise keys.refuse("rope.freq_base_swa", "and positions are divided by its powers; download it again")
    own_base = architecture.name in (*_TWO_BASES, "modern-bert") or architecture.local
    if own_base or architecture.model_type in ("olmo3", "mellum"):
        nearby: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        if architecture.local:
            rotated = keys.number("rope.dimension_count", config["head_dim"])
            if architecture.local == "rows":
                rotated = keys.number("rope.dimension_count_swa", rotated)
            nearby["partial_rotary_factor"] = rotated / config["head_dim"]
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": nearby}
    if not own_base and window and theta != rope["rope_theta"]:
        raise keys.refuse("rope.freq_base_swa", f"and rope.freq_base {rope['rope_theta']:g}: one counts for all blocks")


def _local_blocks(keys: Keys, blocks: int, architecture: Architecture) -> list[bool]:
    """Whether each block sees a window only: as the file lists them, or all but the last, or first, of so many."""
    pattern = keys.take("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if not all(isinstance(each, int) for each in pattern):
            raise keys.refuse("attention.sliding_window_pattern", "not a list of yes and no; download it again")
        return [bool(each) for each in (pattern + [0] * blocks)[:blocks]]
    every = keys.number("attention.sliding_window_pattern", architecture.pattern or 1, least=0)
    return [every == 0 or (index + (not architecture.first)) % every != 0 for index in range(blocks)]


def _tensors(
    file: GgufFile, architecture: Architecture, config: Mapping[str, Any], names: Names
) -> Iterator[tuple[str, GgufWeight]]:
    base = "" if architecture.encodes else f"{architecture.embedding.rpartition('.')[0]}."
    layers = f"{base}{architecture.layers}"
    outer = {mapped: module for module, mapped in architecture.outer.items()}
    orders = order_of_halves(architecture)
    if architecture.delta_heads:
        orders += order_of_heads(architecture, _delta_heads(config))
    modules = _modules(architecture, orders, layers, names)
    inner = {architecture.block[module]: module for module in modules}
    if architecture.joined and architecture.halves:
        inner["ffn_up"] = next(iter(architecture.halves)).removesuffix(".weight")
    found: dict[str, dict[str, GgufWeight]] = {}
    owners = config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    for scalar, key in architecture.scalars.items():
        for place, number in enumerate(_numbers(file, key, config["num_hidden_layers"])):
            weight = GgufWeight((1,), partial(torch.tensor, [number]))
            found.setdefault(f"{layers}.{place}.", {})[scalar] = weight
    for name, info in file.tensors.items():
        rope = config.get("rope_parameters") or {}
        read = _READ_TABLES.get(str(rope.get("rope_type")), ())
        if name in read or (name == _LLAMA3_TABLE and architecture.shares and _FULL in rope):
            continue
        base, _, kind = name.rpartition(".")
        inside = _IN_BLOCK.fullmatch(name)
        whole = inner.get(inside["tensor"]) if inside else None
        mapped = inside["tensor"].removesuffix(f".{kind}") if inside else base
        module = inner.get(mapped) if inside else outer.get(base)
        if inside and architecture.linear:  # the outputs of linear attention may have a name of their own
            alike = [each for each in modules if architecture.block[each] == mapped]
            start = f"{layers}.{inside['block']}."
            module = next((each for each in alike if f"{start}{each}.{kind}" in names.shapes), module)
        if architecture.fused and name.endswith(f".attn_qkv.{kind}"):
            module = architecture.fused
        tensor = whole or f"{module}.{kind}"
        if inside and int(inside["block"]) >= owners and module in (KEY, VALUE, "self_attn.k_norm"):
            continue  # of blocks that read those of others
        if whole is None and (module is None or kind not in ("weight", "bias")):
            raise UserError(f"{file.path}: transformers' {architecture.model_type} has no place for {name}")
        weight = GgufWeight(info.shape, partial(file.read, name))
        heads = {QUERY: config.get("num_attention_heads"), KEY: config.get("num_key_value_heads")}.get(module or "")
        if (architecture.neighbours or architecture.halved) and heads:
            if info.shape[0] % (2 * heads):
                raise UserError(f"{file.path}: {name} has {info.shape[0]} rows, and {heads} heads; download it again")
            share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
            weight = weight.pair_neighbours(heads, round(share * info.shape[0] / heads), back=architecture.neighbours)
        if module == architecture.fused and module:
            weight = weight.take(0, _fused_rows(file, name, architecture, config))
        if base.endswith("_exps") and len(info.shape) > 1:
            if info.shape[0] != config[architecture.counts["expert_count"]]:
                raise UserError(
                    f"{file.path}: {name} has {info.shape[0]} experts, and others have not; download it again"
                )
            weight = _stack(file, name)
        elif not inside and len(info.shape) == 3:
            weight = _stack(file, name)
        if architecture.state_space and name.endswith(".ssm_norm.weight"):
            weight = weight.apply(lambda tensor: tensor.flatten(), (math.prod(info.shape),))
        if name.endswith(".ssm_a"):
            weight = weight.apply(lambda decay: (-decay).double().log().float())
        start = f"{layers}.{inside['block']}." if inside else ""
        found.setdefault(start, {})[tensor] = weight.plus(-architecture.added_to(tensor))
    if architecture.name == "bert" and f"{TOKEN_TYPES}.weight" not in found.setdefault("", {}):
        shape = config["type_vocab_size"], config["hidden_size"]
        found[""][f"{TOKEN_TYPES}.weight"] = GgufWeight(shape, partial(torch.zeros, shape))
    for start, block in found.items():
        try:
            stored = join_latent(as_in_checkpoint(block, orders))
            yield from ((start + tensor, weight) for tensor, weight in stored.items())
        except ValueError as error:
            raise UserError(
                f"{file.path}: {start}{error} is not shaped as what belongs to it; download it again"
            ) from None


def _modules(architecture: Architecture, orders: Sequence[Order], layers: str, names: Names) -> list[str]:
    """Return what modules of a block may be called; of several for a tensor, that which the class has is the last."""
    parts = {name for order in orders for name in order.parts}
    apart = {f".{order.stored}" for order in orders} - {f".{name}" for name in parts}
    stored = {re.sub(r"\.\d+(?=\.)", "", name.removeprefix(layers)) for name in names.shapes} - apart
    made = {
        *architecture.others,
        *(QKV if architecture.joins else ()),
        *(each.removesuffix(".weight") for each in parts),
    }

    def rank(module: str) -> tuple[bool, bool, bool]:
        beside = f".{module.rpartition('.')[0]}."
        is_stored = not stored.isdisjoint((f".{module}", f".{module}.weight"))
        return is_stored, module in made, any(name.startswith(beside) for name in stored)

    ranks = {module: rank(module) for module in architecture.block}
    alone = {module for module, tensor in architecture.block.items() if tensor.endswith((".weight", ".bias"))}
    return sorted((module for module in ranks if module not in alone or any(ranks[module][:2])), key=ranks.__getitem__)


def _fused_rows(file: GgufFile, name: str, architecture: Architecture, config: Mapping[str, Any]) -> Tensor:
    """Return where the rows of a checkpoint's queries, keys and values stand in the tensor of a file."""
    heads, hidden = (config[key] for key in ("num_attention_heads", "hidden_size"))
    kv_heads, dim = config.get("num_key_value_heads", heads), config.get("head_dim", hidden // heads)
    if heads % kv_heads or file.tensors[name].shape[0] != (heads + 2 * kv_heads) * dim:
        rows = file.tensors[name].shape[0]
        raise UserError(f"{file.path}: {name} has {rows} rows, and {heads} and {kv_heads} heads; download it again")
    return torch.cat([*rows_of_fused(heads, kv_heads, dim, grouped=architecture.grouped)]).argsort()


def _stack(file: GgufFile, name: str) -> GgufWeight:
    """Return a tensor of several matrices, of which one is read at a time."""
    shape = file.tensors[name].shape
    reads = (partial(file.read, name, place) for place in range(shape[0]))
    return GgufWeight.stack([GgufWeight(shape[1:], read) for read in reads])


def _as_saved(name: str, weight: GgufWeight, names: Names) -> Iterator[tuple[str, GgufWeight]]:
    """Yield a tensor under the names that its class saves it: a stack of all experts, or each of them."""
    module, _, kind = name.rpartition(".")
    bare = module if kind == "weight" else f"{module}_bias"
    if kind == "weight" and name in names.shapes and len(weight.shape) == 2:
        owner = names.model.get_submodule(names.parameters(name)[0].rpartition(".")[0])
        weight = weight.transpose() if isinstance(owner, Conv1D) else weight
    if not weight.parts or name in names.shapes:
        yield name, weight
    elif bare in names.shapes:
        owner = names.model.get_submodule(names.parameters(bare)[0].rpartition(".")[0])
        shapes = [stack.shape for stack in owner.parameters() if stack.ndim == 3]
        # Some classes do not say that they are: rows of the last are then half the columns of the first.
        is_turned = getattr(owner, "is_transposed", False) or shapes[0][2] != shapes[-1][1]
        is_turned = is_turned and kind == "weight"
        yield bare, weight.transpose() if is_turned else weight
    elif f"{module}.0.{kind}" in names.shapes:
        yield from ((f"{module}.{place}.{kind}", part) for place, part in enumerate(weight.parts))
    else:
        experts, _, linear = module.rpartition(".")
        yield from ((f"{experts}.{place}.{linear}.{kind}", part) for place, part in enumerate(weight.parts))


def _listed(value: Any, blocks: int) -> list[Any]:
    """Return a value of each block: a list, or one that counts for all."""
    return value if isinstance(value, list) else [value] * blocks


def _numbers(file: GgufFile, key: str, blocks: int) -> list[float]:
    """Return the numbers of all blocks that a key lists, or that it says of all at once."""
    numbers = _listed(file.values.get(key), blocks)
    if len(numbers) != blocks or not all(isinstance(each, float) and math.isfinite(each) for each in numbers):
        raise UserError(f"{file.path}: {key} is no list of {blocks} numbers; download it again")
    return numbers


def _in_shape(weight: GgufWeight, shape: Sequence[int]) -> GgufWeight:
    """Return a tensor with the axes of one unit that its class has and GGUF has not, or the other way round."""
    alike = [size for size in weight.shape if size > 1] == [size for size in shape if size > 1]
    if not alike or tuple(shape) == weight.shape:
        return weight
    return weight.apply(lambda tensor: tensor.reshape(tuple(shape)), tuple(shape))


def _dtype(file: GgufFile) -> torch.dtype:
    """The type of most matrices; float16 for rounded ones, which it holds to a thousandth of their steps."""
    sizes: dict[torch.dtype, int] = {}
    for info in file.tensors.values():
        if len(info.shape) > 1:
            dtype = _DTYPES.get(info.kind, torch.float16)
            sizes[dtype] = sizes.get(dtype, 0) + info.bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _read_rounded(name: str, weight: GgufWeight, dtype: torch.dtype) -> Tensor:
    if weight.parts:
        return torch.stack([_read_rounded(name, part, dtype) for part in weight.parts])
    rounded = weight.read().to(dtype)
    if not torch.isfinite(rounded).all():
        raise UserError(f"{name} has NaN, Inf, or numbers beyond {dtype}: write the file anew")
    return rounded
