"""Small random twins of a stock class: the user's config with small sizes, its kinds of blocks kept.

Which config keys a class derives from others is not written anywhere, so sizes are tried until the class takes them
and computes something.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.model.image_inputs import are_images, image_inputs
from ckpt_prune.model.skeleton import build_skeleton, parse_config, stock_class

VOCABULARY, POSITIONS, TOKENS = 101, 128, 24
IMAGES, IMAGE, PATCH, WINDOW, MERGED = 2, 64, 8, 2, 2
"""Images of a twin, their height and width, of the largest patches that they are cut into, of windows of patches, and
of what is merged."""
CHUNK = 8
"""Tokens that linear attention takes at a time."""
MOST_WEIGHTS = 30_000_000
"""A twin that is larger was not made small."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a twin: no two of what meets in one block are alike, so that none is taken for another."""

    hidden: int
    heads: int
    groups: int
    head: int
    mlp: int
    expert_mlp: int
    shared_mlp: int
    experts: int
    ratio: int
    stage: int


FIRST = Sizes(
    hidden=120, heads=15, groups=5, head=16, mlp=72, expert_mlp=56, shared_mlp=88, experts=7, ratio=3, stage=24
)
OTHER = Sizes(
    hidden=192, heads=8, groups=4, head=64, mlp=104, expert_mlp=48, shared_mlp=120, experts=9, ratio=2, stage=48
)
"""Spaces are found in a twin of the first sizes and proven in one of the others."""

KEYS: dict[str, str] = {
    "hidden": r"hidden_size|d_model|n_embd|embedding_dim|emb_dim|embedding_size|word_embed_proj_dim|"
    r"(in|out)put_embedding_size|attention_hidden_size|lru_width|hidden_dim|"
    r"adapter_(in|out|input)_(dim|size)|intra_bottleneck_size|true_hidden_size|embed_dim",
    "mlp": r"intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size|(de|en)coder_ffn_dim|block_ff_dim|dff|dim_ff|"
    r"d_inner|feed_forward_size|mlp_dim",
    "expert_mlp": r"moe_intermediate_size|expert_ffn_hidden_size|dense_intermediate_size",
    "shared_mlp": r"(moe_)?shared_(experts?_)?intermediate_size|intermediate_size_mlp",
    "heads": r"num_attention_heads(_per_layer)?|n_heads?|num_heads|(de|en)coder_attention_heads|attention_heads|"
    r"num_(de|en)coder_attention_heads|swa_num_attention_heads|linear_num_heads",
    "groups": r"(swa_)?num_key_value_heads|num_kv_heads|multi_query_group_num|kv_n_heads|num_query_groups",
    "head": r"(swa_|global_)?head_dim|kv_channels|d_head|dim_head|attention_head_size|d_kv",
    "experts": r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts",
}
_NUMBERS: dict[str, int] = {
    r"\w*vocab_size(_per_layer_input)?": VOCABULARY,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length": POSITIONS,
    r"max_\w+_positions": POSITIONS,
    r"num_experts_per_tok(en)?|moe_topk|top_k_experts|experts_per_token|moe_k|moe_top_k": 2,
    r"linear_num_key_heads": 3,
    r"linear_num_value_heads": 15,
    r"num_mem_blocks|moe_num_shared_experts|num_shared_experts|num_global_layers": 2,
    r"n_group|topk_group|num_expert_group|n_groups": 1,
    r"mamba_n_?groups": 2,
    r"num_nextn_predict_layers|num_mtp_layers|mtp_num_hidden_layers": 0,
    r"linear_key_head_dim|linear_head_dim": 14,
    r"linear_value_head_dim": 12,
    r"qk_nope_head_dim": 18,
    r"qk_rope_head_dim": 8,
    r"v_head_dim": 22,
    r"index_head_dim": 34,
    r"index_n_heads|index_topk_blocks|num_codebooks": 2,
    r"q_lora_rank|kv_lora_rank|laurel_rank|adapter_rank|gated_norm_rank|\w+_lora_rank": 28,
    r"index_topk|indexer_budget": 16,
    r"indexer_head_dim": 80,
    r"indexer_n_heads": 2,
    r"indexer_kv_heads": 1,
    r"indexer_compress_ratio": 4,
    r"ssm_state_size|mamba_d_state|state_size": 12,
    r"mamba_num_heads|mamba_n_heads|n_mamba_heads": 4,
    r"time_step_rank|mamba_dt_rank": 7,
    r"mamba_chunk_size|chunk_size|block_multiple_of|ffn_round_up_to_multiple_of|attention_(chunk_size|window)": CHUNK,
    r"hidden_size_per_layer_input": 20,
    r"n_shared_experts": 2,
    r"expert_layer_period|attn_layer_period|decoder_sparse_step|\w*_interval|\w*every_n_layers|"
    r"\w*sliding_window_pattern|layer_group_size": 2,
    r"first_k_dense_replace|num_dense_layers|expert_layer_offset|attn_layer_offset|moe_layer_start_index": 1,
    r"rotary_dim": 8,
    r"local_radius": 7,
    r"image_size": IMAGE,
    r"pooling_kernel_size|spatial_merge_size|temporal_patch_size": MERGED,
    r"out_hidden_size": 136,
    r"base_channels": 32,
}
"""Config keys that are no axis of a space → a small number."""
_STAGES = r"depths?"
_WIDTHS = r"embed_dims?|hidden_sizes"
"""Config keys that list how many blocks each stage of a model of images has, and how wide stages are."""
RATIO = r"mlp_ratios?"
"""Config keys that state columns of MLPs as a multiple of the hidden size."""
_BACKBONE = ("_out_features", "_out_indices", "out_features", "out_indices", "stage_names", "pool_scales")
"""Keys that name blocks which other models read, by numbers that a small model may not have."""
_LAYERS = r"num_hidden_layers|n_layers?|num_layers|(de|en)coder_layers|num_(de|en)coder_layers|num_blocks|depth"
_SHARING = "num_kv_shared_layers"
"""The config key of how many of the last blocks read keys and values of others."""
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_TOKEN = re.compile(r"(\w*_)?(token_id|token_index)|unk_index|mask_index")
_MOST_COUNT = 2
_MOST_LAYERS = 6


@dataclass(frozen=True)
class Twin:
    """A small random model of a stock class.

    Attributes:
        model: float32, in evaluation, on the CPU.
        config: its config.json.
        parsed: the same as transformers has it.
        batch: what it is called with: text (2, `TOKENS`), and of an encoder-decoder the text that it makes of it; or
            images (`image_inputs`).
    """

    model: nn.Module
    config: dict[str, Any]
    parsed: Any
    batch: dict[str, Tensor]
    architecture: str
    sizes: Sizes

    def places(self, states: Tensor) -> tuple[int, int]:
        """Return samples and tokens of the batch, of whose states all tokens may stand in one axis."""
        return (IMAGES, states[..., 0].numel() // IMAGES) if are_images(self.batch) else (2, TOKENS)

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """Return logits, or the last hidden states of a class without a head, of images with what is pooled of them."""
        return run(self.model, self.batch)


def run(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    options = {"use_cache": False} if {"input_ids", "decoder_input_ids"} & batch.keys() else {}
    outputs: Any = model(**batch, **options)
    logits = getattr(outputs, "logits", None)
    result: Tensor = outputs[0] if logits is None else logits
    pooled = getattr(outputs, "pooler_output", None)
    if logits is None and isinstance(pooled, Tensor) and are_images(batch):  # what models of text are handed
        return torch.cat([result.flatten(), pooled.flatten()])
    return result


def small_configs(config: Mapping[str, Any], sizes: Sizes) -> Iterator[tuple[dict[str, Any], Sizes]]:
    """Yield configs to try: first with every size free, then with those that classes derive or check against others."""
    parsed = parse_config(dict(config))
    full = _listed(parsed.to_dict())
    full.pop("auto_map", None)
    may_state_head = "head_dim" not in parsed.attribute_map  # by which latent attention means a part of a head
    divided = {"head": sizes.hidden // sizes.heads}
    alone = {"groups": sizes.heads}
    even = {"heads": 12, "groups": 2}  # some classes halve groups, or have twice as many in some blocks
    for fills, keeps_lists in product((False, True), (True, False)):
        for changes in ({}, divided, alone, divided | alone, even):
            changed = replace(sizes, **changes)
            small = _shrunk(full, vars(changed), keeps_lists)
            if may_state_head and "num_attention_heads" in small and small.get("head_dim") is None:
                yield small | {"head_dim": changed.head}, changed  # many classes read it from a config
            if fills:  # defaults that a published config states and the class does not
                small |= {key: fill_in(key, value, vars(changed)) for key, value in small.items()}
            yield small, changed


def _listed(value: Any) -> Any:
    """Return values of a config as JSON has them: some classes' defaults are tuples."""
    if isinstance(value, dict):
        return {str(key): _listed(own) for key, own in value.items()}
    return [_listed(own) for own in value] if isinstance(value, list | tuple) else value


def fill_in(key: str, value: Any, roles: Mapping[str, int]) -> Any:
    """Return a number for a config key that has none, if its name says of which size it is; also inside configs."""
    if isinstance(value, dict):
        return {inner: fill_in(inner, own, roles) for inner, own in value.items()}
    if value is not None or key.endswith(("_token_id", "layers", "_lora_rank")):
        return value
    number = _small_number(key, 10**6, roles)
    return None if number == 10**6 else number


def _shrunk(values: Mapping[str, Any], roles: Mapping[str, int], keeps_lists: bool) -> dict[str, Any]:
    """Return a config, or one inside it, with small numbers in place of large ones."""
    small: dict[str, Any] = {}
    counts = [key for key, value in values.items() if re.fullmatch(_LAYERS, key) and isinstance(value, int)]
    depth = max((values[key] for key in counts), default=0)
    blocks = _picked_blocks(values, depth)
    hidden = next((values[key] for key in _HIDDEN if values.get(key)), 0)
    has_stages = any(isinstance(value, list) and re.fullmatch(_STAGES, key) for key, value in values.items())
    # All patches read one another, but in windows, whose size classes derive from that of patches: few of them, then.
    has_patches = not (has_stages or {"vocab_size", "window_size"} & values.keys())
    for key, value in values.items():
        if key in _BACKBONE:
            continue
        if re.fullmatch(RATIO, key) and value:
            ratio = roles["ratio"]
            small[key] = [type(own)(ratio) for own in value] if isinstance(value, list) else type(value)(ratio)
        elif re.fullmatch(_STAGES, key) and isinstance(value, list):
            # Some classes read one block's number at the number of its stage (cvt): it has as many as that, then.
            small[key] = [2 if keeps_lists else max(2, number) for number in range(1, len(value) + 1)]
        elif key == "window_size" and has_stages:
            small[key] = min(WINDOW, value)
        elif key == "patch_size" and has_patches and isinstance(value, int):
            small[key] = PATCH if value > MERGED else value
        elif key == "hidden_size" and has_stages:
            continue  # of the last stage, which follows
        elif re.fullmatch(_WIDTHS, key) and has_stages:
            small[key] = _small_widths(value, roles["stage"])
        elif key == "per_layer_config":
            small[key] = _shrunk_overrides(value, values, blocks, roles)
        elif isinstance(value, dict):
            small[key] = (
                value
                if key.startswith(("id2label", "label2id", "task_"))
                else _shrunk_inner(key, value, roles, keeps_lists)
            )
        elif isinstance(value, list):
            if depth and len(value) in (depth, values.get("encoder_layers")):  # LED's windows are its encoder's
                if keeps_lists or key not in ("layer_types", "mlp_layer_types", "layers_block_type"):
                    numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in value)
                    picked = [value[min(block, len(value) - 1)] for block in blocks]
                    small[key] = [_small_number(key, each, roles) for each in picked] if numbers else picked
            elif key == "eos_token_id":
                small[key] = 2
            elif key == "image_size":
                small[key] = [IMAGE for _ in value]
            elif key == "downsample_channels":  # what follows is as wide as the last
                small[key] = [*value[:-1], roles["hidden"]]
            elif key == "patch_size":
                small[key] = [min(each, PATCH) for each in value]
            elif depth and _numbers_blocks(key, value):
                small[key] = [each if each < 0 else blocks.index(each) for each in value if each < 0 or each in blocks]
            else:
                small[key] = value
        elif value is None and re.fullmatch(KEYS["mlp"], key):
            small[key] = roles["mlp"]
        elif isinstance(value, bool) or not isinstance(value, int):
            small[key] = value
        elif key in counts:
            small[key] = len(blocks)
        elif key == _SHARING:
            small[key] = sum(block >= depth - value for block in blocks)
        else:
            times = value // hidden if hidden and value > 0 and value % hidden == 0 else 1
            is_hidden = re.fullmatch(KEYS["hidden"], key) and not key.startswith("adapter_")
            small[key] = _small_number(key, value, roles) * (times if is_hidden else 1)
    _relate(small, values)
    return small


def _small_widths(value: Any, first: int) -> Any:
    """Return widths of stages in the same proportion, the least that divides all of them as `first`."""
    if isinstance(value, int):
        return first
    return [width // gcd(*value) * first for width in value]


def _shrunk_overrides(
    overrides: Mapping[str, Any], values: Mapping[str, Any], blocks: list[int], roles: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Return what blocks have instead of the config's numbers, small and in the same ratio to them."""
    small: dict[str, dict[str, Any]] = {}
    for name, own in overrides.items():
        if int(name) in blocks:
            changed = small[str(blocks.index(int(name)))] = dict(own)
            for key, value in own.items():
                usual = values.get(key)
                if (
                    isinstance(value, int)
                    and isinstance(usual, int)
                    and not isinstance(value, bool)
                    and value
                    and usual
                ):
                    size = _small_number(key, usual, roles)
                    changed[key] = size * value // usual if size * value % usual == 0 else size
    return small


def _shrunk_inner(key: str, value: dict[str, Any], roles: Mapping[str, int], keeps_lists: bool) -> dict[str, Any]:
    inner = _shrunk(value, roles, keeps_lists)
    section = inner.get("mrope_section")
    if section:
        rotated = int(roles["head"] * float(value.get("partial_rotary_factor", 1.0)))
        each, rest = divmod(rotated // 2, len(section))
        odd = min(range(len(section)), key=lambda place: section.count(section[place]))  # others stay alike
        inner["mrope_section"] = [each + rest * (place == odd) for place in range(len(section))]
    return inner


def _small_number(key: str, value: int, roles: Mapping[str, int]) -> int:
    if _TOKEN.fullmatch(key):
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        return special.get(key, min(value, VOCABULARY - 1) if value >= 0 else value)
    if key == "patch_size":
        return min(value, PATCH)
    for role, pattern in KEYS.items():
        if re.fullmatch(pattern, key):
            return roles[role] if value > 0 else value
    for pattern, number in _NUMBERS.items():
        if re.fullmatch(pattern, key):
            return number if value > 0 and (number > _MOST_COUNT or "shared" in key) else min(number, value)
    return value


def _picked_blocks(values: Mapping[str, Any], depth: int) -> list[int]:
    """Return blocks that stand for all: the first of every kind that per-layer lists tell apart, four at least.

    A single one stands twice, as nothing else tells the number in its name.
    """
    if depth == 1:
        return [0, 0]
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == depth]
    numbers = [value for key, value in values.items() if _numbers_blocks(key, value) and len(value) != depth]
    last = range(depth - (values.get(_SHARING) or 0), depth)
    kinds: dict[str, int] = {}
    for block in range(depth):
        kinds.setdefault(str([each[block] for each in lists] + [block in each for each in (*numbers, last)]), block)
    picked = sorted(kinds.values())[:_MOST_LAYERS]
    more = [block for block in range(depth) if block not in picked]
    return sorted(picked + more[: max(0, min(4, depth) - len(picked))])


def _numbers_blocks(key: str, value: Any) -> bool:
    """Return whether a value of a config lists numbers of blocks."""
    if not isinstance(value, list) or not re.search(r"layer|idx|indexes", key):
        return False
    return bool(value) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def _relate(small: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Keep what a class checks or derives: products of two sizes that make up a third."""
    hidden = next((small[key] for key in _HIDDEN if small.get(key)), None)
    if hidden is None:
        return
    inner = hidden * int(values.get("mamba_expand") or values.get("expand") or 2)
    inner = small["mamba_d_ssm"] = hidden * 2 if small.get("mamba_d_ssm") else inner
    if not values.get("mamba_d_ssm"):
        small.pop("mamba_d_ssm")
    for heads, width in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
        ("n_mamba_heads", "mamba_head_dim"),
    ):
        if small.get(heads) and small.get(width):
            small[width] = inner // small[heads]
    if "num_position_embeddings" in small and "spatial_merge_size" not in small:  # none is made of others (Molmo 2)
        small["num_position_embeddings"] = (IMAGE // small["patch_size"]) ** 2
    if small.get("max_num_tiles"):  # all of them are tokens of one image
        small["patch_size"] = IMAGE // 2
    if small.get("pixel_shuffle_ratio"):  # what reads shuffled patches is as wide as the MLPs of blocks (Llama 4)
        small["intermediate_size"] = int(hidden / small["pixel_shuffle_ratio"] ** 2)
    if small.get("model_type") == "mamba2":
        small["num_heads"], small["head_dim"] = 4, inner // 4
    if small.get("attention_head_dim") and small.get("num_attention_heads"):
        small["attention_head_dim"] = small["head_dim"] = 2 * hidden // small["num_attention_heads"]
    if small.get("qk_head_dim") and small.get("qk_nope_head_dim"):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    nope, rope = (values.get(key) or 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if nope and rope:
        overrides = (values.get("per_layer_config") or {}).values()
        widths = {0, nope, *(own["qk_nope_head_dim"] for own in overrides if "qk_nope_head_dim" in own)}
        for key in small:
            if re.fullmatch(KEYS["head"], key) and (values.get(key) or 0) - rope in widths:
                small[key] = small["qk_rope_head_dim"] + small["qk_nope_head_dim"] * (values[key] - rope) // nope


def build_twin(config: Mapping[str, Any], architecture: str, sizes: Sizes) -> Twin:
    """Build the twin of a config.json; UserError with the commonest reason if the class cannot be made small."""
    reasons: list[str] = []
    tried: list[dict[str, Any]] = []
    for small, changed in small_configs(config, sizes):
        if small in tried:
            continue
        tried.append(small)
        try:
            return _build(small, architecture, changed)
        except Exception as error:  # whatever the class runs into with sizes that it does not take
            reasons.append(one_line(error))
    reason = commonest_reason(reasons)
    raise UserError(
        f"{architecture} cannot be built small ({len(tried)} configs tried; most fail with: {reason[:160]})"
    )


def commonest_reason(reasons: Sequence[str]) -> str:
    """Return why most configs failed, whatever the numbers in it; of several reasons that of the first config.

    The first ones have every size of the user's config; the last ones differ most from it.
    """
    alike = [re.sub(r"\d+", "0", reason) for reason in reasons]
    return reasons[alike.index(max(alike, key=alike.count))]


def _build(small: dict[str, Any], architecture: str, sizes: Sizes) -> Twin:
    parsed = parse_config(small)
    skeleton = build_skeleton(parsed, architecture)
    weights = sum(each.numel() for each in skeleton.parameters())
    if weights > MOST_WEIGHTS:
        raise UserError(f"it still has {weights / 1e6:.0f} million parameters")
    return make_twin(small, architecture, sizes)


def make_twin(small: dict[str, Any], architecture: str, sizes: Sizes) -> Twin:
    """Build a model of a small config with random weights, far from initial ones: none is zero or one by accident."""
    parsed = make_skeleton_config(small)
    model = make_model(parsed, architecture)
    tokens = torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens}
    if model.main_input_name == "input_features":  # of sounds: two frames make a token
        frames = (2, parsed.num_mel_bins, 2 * parsed.max_source_positions)
        batch = {"input_features": torch.randn(frames, generator=torch.Generator().manual_seed(1))}
    batches = [batch]
    if "input_ids" not in signature(model.forward).parameters:
        batches = [*image_inputs(model, IMAGES, (IMAGE, IMAGE))] or batches
    if getattr(parsed, "is_encoder_decoder", False):
        batches[0]["decoder_input_ids"] = tokens.flip(0, 1)
    errors = list[Exception]()
    for batch in batches:
        twin = Twin(model, small, parsed, batch, architecture, sizes)
        try:
            outputs = twin.outputs()
        except Exception as error:  # whatever a class runs into with images in another form than its own
            errors.append(error)
            continue
        if not bool(torch.isfinite(outputs).all()):
            raise UserError("its outputs are not finite")
        return twin
    raise errors[0]


def make_model(parsed: Any, architecture: str) -> Any:
    """Return a stock model of random weights, float32, in evaluation."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = stock_class(architecture, parsed)(parsed)
        # Logits of T5's attention are not divided by the root of their width: large ones would let rounding decide.
        randomise(model, 0.5 if getattr(parsed, "is_encoder_decoder", False) else 1.5)
    return model.float().eval()


def make_skeleton_config(config: dict[str, Any]) -> Any:
    """Return a config of transformers under which every operation is a plain one."""
    parsed = parse_config(config)
    set_eager(parsed)
    return parsed


def set_eager(parsed: Any) -> None:
    """Let attention and experts run as plain operations, in which every unit is apart from the others."""
    for key in ("_attn_implementation", "_experts_implementation"):
        with suppress(Exception):
            setattr(parsed, key, "eager")


@torch.no_grad()
def randomise(model: nn.Module, gain: float) -> None:
    for name, weight in model.named_parameters():
        noise = torch.randn_like(weight, dtype=torch.float32)
        is_scale = weight.dim() == 1 and name.endswith("weight")
        values = noise / weight.shape[-1] ** 0.5 * gain if weight.dim() > 1 else noise * 0.3 + float(is_scale)
        weight.copy_(values)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
