"""The contents of a checkpoint's GGUF file: architecture, keys, and tensors that are read one at a time."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.graph_types import GGUF_ROWS, GgufType
from ckpt_prune.gguf.architectures import (
    ARCHITECTURES,
    ATTENTION,
    DELTA_HEADS,
    DENSE,
    DIFFERENT,
    EVERY,
    FUSED_GATES,
    GATED,
    GATES,
    INDEXED,
    KEY,
    OTHERWISE,
    OUTPUT,
    QUERY,
    RANK,
    SHARED_WIDTH,
    VALUE,
    Architecture,
)
from ckpt_prune.gguf.contents import BLOCK, POOLING_KEY, CannotMapError, Layout, describe_filled
from ckpt_prune.gguf.encoders import (
    RANKS,
    TOKEN_TYPES,
    TYPES_KEY,
    describe_left_out,
    is_left_out,
    place_of_score,
    pooling_of,
    read_dense,
    reads_texts,
    score_of,
)
from ckpt_prune.gguf.gguf_weight import GgufWeight
from ckpt_prune.gguf.orders import (
    DeltaHeads,
    as_in_file,
    order_of_halves,
    order_of_heads,
    rows_of_fused,
    split_latent,
)
from ckpt_prune.gguf.stacks import is_stacked, lay_out_stacks
from ckpt_prune.gguf.state_space import StateSpace, reason_against, shape_tensors
from ckpt_prune.model.composites import head_of_whole, whole_of_stack
from ckpt_prune.model.containers.no_attention import ABSENT_KEY
from ckpt_prune.model.context import reserved_positions
from ckpt_prune.model.model import Model
from ckpt_prune.model.runtimes import changes_of_config, refusal
from ckpt_prune.model.skeleton import is_stored_buffer, parse_config

_INPUTS = tuple(f"{module}.weight" for module in (QUERY, KEY, VALUE))
_GENERATES, _HEAD = ("ForCausalLM", "LMHeadModel"), "lm_head.weight"
_NO_SINK = -1e30
"""A sink whose share of attention is 0."""
_TOKENS_PER_LAYER = "model.embed_tokens_per_layer.weight"
_POSITIONS = "position_embd"
_MIXERS = ("shortconv.", "ssm_")
"""Beginnings of names of what mixes tokens without attention."""
LONGROPE = ("phi3", "minicpm3")
"""Architectures that have divisors of rotary frequencies for long and for short texts."""
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_YARN: dict[str, Any] = {"beta_fast": 32, "beta_slow": 1} | dict.fromkeys(
    ("attention_factor", "truncate", "mscale", "mscale_all_dim")
)
"""Settings of YaRN that may be stated → the value that llama.cpp has; None: any."""
_YARN_KEYS = {"rope_type", "type", "rope_theta", "factor", "max_position_embeddings", _ORIGINAL, *_YARN}
EPSILONS = ("layer_norm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
"""Keys of config.json with the epsilon of norms, of which classes have one or another."""
_CONTEXT = 2048
"""Tokens of a text where config.json does not say it, as of many BLOOMs: positions that are no table have no end."""
_STATES = 2**20
"""Tokens of a text of a model without attention, which has no most, as llama.cpp's converter states it."""
_EXPERT = re.compile(r"(?P<before>.+)\.(?P<number>\d+)(?P<after>\..+)")


Block = Mapping[str, GgufWeight]
"""Name of a tensor in its block, such as "self_attn.q_proj.weight" → the tensor."""


class BlockShape(NamedTuple):
    """Counts of a block.

    Attributes:
        heads: of queries; 0 without attention.
        kv_heads: of keys and values.
        columns: of its MLP, or of each of its experts; 0 without either.
        experts: whether it has experts.
        shared: columns of all its shared experts together, or of the MLP beside its experts.
    """

    heads: int
    kv_heads: int
    columns: int
    experts: bool = False
    shared: int = 0

    @property
    def group(self) -> int:
        """Heads of queries that share one of keys and values."""
        return self.heads // max(1, self.kv_heads)


@dataclass(frozen=True, eq=False)
class GgufSource:
    """The tensors of a checkpoint, outside the blocks and in each, by the names of transformers.

    Attributes:
        candidates: architectures of llama.cpp for its family, which say what its modules are.
        left_out: tensors of an encoder's head.
    """

    model: Model
    outer: Block
    blocks: tuple[Block, ...]
    candidates: tuple[Architecture, ...]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Model, read: Callable[[str], Tensor] | None = None) -> "GgufSource":
        """Sort the tensors of a model; `read` returns one by name, by default as it is stored."""
        model = with_head(model)
        read = read or partial(_read, model)
        checkpoint, family, start = model.checkpoint, model.family, model.family.blocks_prefix
        model_type = str(checkpoint.config["model_type"])
        architecture = (checkpoint.config.get("architectures") or [model.family.architecture])[0]
        beside = None if architecture.endswith(_GENERATES) else head_of_whole(checkpoint)
        generates = architecture.endswith(_GENERATES) or beside is not None
        # A decoder whose last hidden states are embeddings has no head, or does without.
        generates |= model.family.used_for == "sentence-similarity" and all(
            each.model_type != model_type for each in ARCHITECTURES if each.encodes
        )
        encoder = None if generates else _encoder(model_type, architecture)
        # Names of encoders are those of the base model, and what is not of it is a head.
        base = "" if encoder is None else start.removesuffix(f"{encoder.layers}.")
        left_out: list[str] = []
        tied = checkpoint.config.get("tie_word_embeddings", getattr(model.config, "tie_word_embeddings", False))
        tied = tied and beside is None
        head = f"{family.head or 'lm_head'}.weight"
        before = "" if family.prefixed else f"{family.base}."  # names of the base model, as GPT-2 is published
        outer: dict[str, GgufWeight] = {}
        blocks: list[dict[str, GgufWeight]] = [{} for _ in range(model.blocks)]
        for name, info in checkpoint.tensors.items():
            if is_stored_buffer(name) or (tied and name == head):
                continue
            weight = GgufWeight(tuple(info.shape), partial(read, name))
            index, _, inner = name.removeprefix(start).partition(".")
            inside = name.startswith(start) and index.isdigit() and int(index) < len(blocks)
            if encoder is not None and (not name.startswith(base) or is_left_out(name.removeprefix(base))):
                scores = place_of_score(name.removeprefix(base)) if architecture.endswith(RANKS) else None
                if scores is None:
                    left_out.append(name)
                else:
                    outer[scores] = weight
                continue
            whole = name if name == head or name.startswith(before) else before + name
            whole = whole if encoder is None else name.removeprefix(base)
            if not inside and encoder is not None and encoder.outer.get(_module(whole)) == _POSITIONS:
                weight = weight.take(0, torch.arange(reserved_positions(model.config), weight.shape[0]))
            (blocks[int(index)] if inside else outer)[inner if inside else whole] = weight
        if encoder is not None and DENSE[0] in encoder.outer:
            outer |= read_dense(checkpoint.path, int(model.config.hidden_size))
        stacked = [_stack(block) for block in blocks]
        within = checkpoint.within
        seeing = "" if within is None else within.whole.config.get("model_type")
        candidates = _candidates(model_type, stacked, seeing) if encoder is None else (encoder,)
        halves = [order for architecture in candidates[:1] for order in order_of_halves(architecture)]
        split = tuple(as_in_file(block, halves) for block in stacked)
        source = cls(model, _stack(outer), split, candidates, tuple(left_out))
        fused = next((each for each in candidates if each.fused), None)
        if fused is None:
            return source
        return replace(source, blocks=tuple(source._split_fused(fused, *each) for each in enumerate(split)))

    def _split_fused(self, architecture: Architecture, index: int, block: Block) -> Block:
        """Return a block with queries, keys and values apart, and the rows of each in the order of a file."""
        output, split = self.find(block, "attn_output"), dict(block)
        for kind in ("weight", "bias"):
            if output is None or (fused := split.pop(f"{architecture.fused}.{kind}", None)) is None:
                continue
            heads, dim = output.shape[1] // self.head_dim, self.head_dim
            kv_heads = (fused.shape[0] // dim - heads) // 2
            if kv_heads < 1 or fused.shape[0] != (heads + 2 * kv_heads) * dim or heads % kv_heads:
                raise self._other_heads(index)
            rows = rows_of_fused(heads, kv_heads, dim, grouped=architecture.grouped)
            split |= {f"{part}.{kind}": fused.take(0, own) for part, own in zip((QUERY, KEY, VALUE), rows, strict=True)}
        return split

    def value(self, key: str) -> Any:
        """Return a value of config.json that all blocks share, or the default of its class; of a part behind a dot."""
        part, _, own = key.rpartition(".")
        if part:
            owner = getattr(self.model.config, part, None)
            return owner.get(own) if isinstance(owner, Mapping) else getattr(owner, own, None)
        stated = self.model.checkpoint.config.get(key, "auto")
        return getattr(self.model.config, key, None) if stated == "auto" else stated

    def count(self, key: str) -> int:
        """Return a whole number of config.json, which may be stated of each block.

        Raises:
            CannotMapError: it is none, or blocks differ in it.
        """
        stated = self.value(key)
        numbers = stated if isinstance(stated, list) and stated else [stated]
        if type(numbers[0]) is not int or any(each != numbers[0] for each in numbers):
            raise CannotMapError(
                f"{key} of config.json is one whole number for all blocks, and here {str(stated)[:40]}"
            )
        return numbers[0]

    @property
    def embeds(self) -> bool:
        """Whether its last hidden states are used as embeddings."""
        return self.model.family.used_for == "sentence-similarity"

    @property
    def tied(self) -> bool:
        return not self.candidates or f"{self.candidates[0].head}.weight" not in self.outer

    @cached_property
    def modules(self) -> Mapping[str, str]:
        """Module of a block → tensor in GGUF, whichever architecture it is."""
        known = {module: tensor for each in self.candidates for module, tensor in each.block.items()}
        return ATTENTION | GATED | known

    def find(self, block: Block, *tensors: str) -> GgufWeight | None:
        """Return the weight of a block that is one of these tensors in GGUF."""
        names = [name for name in block if name.endswith(".weight") and self.modules.get(_module(name)) in tensors]
        return block[names[0]] if names else None

    def is_linear(self, block: Block) -> bool:
        """Whether a block has linear attention, whose projections have the names of attention."""
        return any(each.linear and self.find(block, each.linear) is not None for each in self.candidates)

    def is_recurrent(self, block: Block) -> bool:
        """Whether a block has a mixer of tokens other than attention."""
        return self.is_linear(block) or any(self.modules.get(_module(name), "").startswith(_MIXERS) for name in block)

    @cached_property
    def has_gates(self) -> bool:
        """Whether queries come with a gate, in the same module."""
        return any(each.gated for each in self.candidates)

    @property
    def shares(self) -> bool:
        """Whether blocks may lack keys, or values."""
        return any(each.shares for each in self.candidates)

    @cached_property
    def is_latent(self) -> bool:
        """Whether keys and values of all heads are made of one latent vector of a token."""
        return any(each.latent for each in self.candidates)

    @cached_property
    def head_dim(self) -> int:
        """Rows of q and k per head; of v if they are made of a latent vector."""
        if self.is_latent:
            return int(self.value("v_head_dim"))
        heads = self.value("num_attention_heads")
        return int(self.value("head_dim") or (self.value("hidden_size") // heads if heads else 0))

    @cached_property
    def value_dim(self) -> int | None:
        """Rows of v per head, if they are not those of q and k."""
        key = next((each.value_rows for each in self.candidates if each.value_rows), "")
        return int(self.value(key)) if key else None

    @cached_property
    def stated(self) -> dict[int, Mapping[str, Any]]:
        """Block → what config.json, or its class, says of it alone."""
        both = (self.model.config.to_dict(), self.model.checkpoint.config)
        values = [config.get("per_layer_config") or {} for config in both]
        return {int(name): own for each in values for name, own in each.items() if str(name).isdigit()}

    @cached_property
    def head_dims(self) -> tuple[int, ...]:
        """Rows of q and k per head, in every block."""
        return tuple(
            int(self.stated.get(index, {}).get("head_dim") or self.head_dim) for index in range(len(self.blocks))
        )

    @cached_property
    def shapes(self) -> tuple[BlockShape, ...]:
        """Counts of every block, by the shapes of its tensors."""
        return tuple(self._shape(index, block) for index, block in enumerate(self.blocks))

    def _shape(self, index: int, block: Block) -> BlockShape:
        routed, dense = self.find(block, "ffn_down_exps"), self.find(block, "ffn_down")
        down, output = routed or dense, self.find(block, "attn_output")
        if self.is_linear(block):
            output = None  # it is no attention's
        shared = self.find(block, "ffn_down_shexp") or (dense if routed else None)
        experts = routed is not None, 0 if shared is None else shared.shape[1]
        single = any(each.single for each in self.candidates)
        needless = single or index in self.without_attention or self.is_recurrent(block)
        if self.candidates[0].channels_alone:
            down = self.find(block, "ssm_out")
        columns = 0 if down is None else down.shape[-1]
        if output is None and needless and (single or down is not None):
            return BlockShape(0, 0, columns, *experts)
        if output is None or (down is None and not single):
            config = self.model.checkpoint.config
            raise CannotMapError(
                refusal("llama.cpp", str(config["model_type"]), changes_of_config(config), generates=True)
                or f"block {index} has no {OUTPUT}.weight, or none that puts its columns back (down_proj)"
            )
        dim = self.head_dims[index]
        value_dim = self.value_dim or dim
        heads = output.shape[1] // value_dim
        if self.is_latent:
            kv_heads, fits = heads, True
        else:
            found = [self.find(block, each) for each in ("attn_q", "attn_k", "attn_v")]
            rows = [each.shape[0] for each in found if each is not None]
            read = self.stated.get(index, {}).get("num_key_value_heads") or self.value("num_key_value_heads")
            kv_heads = rows[1] // dim if len(rows) > 1 else int(read)
            expected = [(1 + self.has_gates) * heads * dim, kv_heads * dim, kv_heads * value_dim]
            fits = rows == (expected[: len(rows)] if self.shares else expected)
        if not fits:
            raise self._other_heads(index)
        return BlockShape(heads, kv_heads, columns, *experts)

    @cached_property
    def without_attention(self) -> set[int]:
        """Blocks that have none, by config.json."""
        return set((self.model.checkpoint.config.get(ABSENT_KEY) or {}).get("blocks", ()))

    def check_heads(self) -> None:
        """Refuse blocks whose heads are not as many as config.json says: they have other rows."""
        for index, shape in enumerate(self.shapes):
            stated, listed = self.stated.get(index, {}), self.value("num_attention_heads_per_layer") or {}
            usual = listed[index] if listed else self.value("num_attention_heads")
            # Of classes whose heads are always as wide as the model: how many units the space has.
            kept = stated.get("num_kept_heads", self.value("num_kept_heads"))
            fits = shape.heads == stated.get("num_attention_heads", usual) if kept is None else kept in shape[:2]
            block = self.blocks[index]
            attends = self.find(block, "attn_output") is not None and (shape.heads or not self.is_recurrent(block))
            if attends and not fits:
                raise self._other_heads(index)

    def _other_heads(self, index: int) -> CannotMapError:
        return CannotMapError(
            f"all heads have {self.head_dims[index]} rows of q, k and v each, and those of block {index} have others"
        )

    def fill(self, shapes: Sequence[BlockShape]) -> "GgufSource":
        """Return the same, computing the same, in blocks of these shapes: what is added is zero.

        Added heads attend to all tokens alike, and no column of o_proj takes them up.
        """
        blocks = map(self._fill_block, self.blocks, self.shapes, shapes, self.head_dims)
        return replace(self, blocks=tuple(blocks))

    def _fill_block(self, block: Block, now: BlockShape, then: BlockShape, dim: int) -> Block:
        heads = (now.kv_heads, now.group, dim), (then.kv_heads, then.group, dim)
        queries = tuple((*each[:2], (1 + self.has_gates) * dim) for each in heads)
        groups = (now.kv_heads, dim), (then.kv_heads, dim)
        columns, shared = (((getattr(now, name),), (getattr(then, name),)) for name in ("columns", "shared"))
        places = {
            **({"attn_gate": (0, heads)} if now.heads else {}),
            "attn_sinks.weight": (0, tuple(each[:2] for each in heads)),
            **{"attn_q": (0, queries), "attn_k": (0, groups), "attn_v": (0, groups), "attn_output": (1, heads)},
            **dict.fromkeys(("ffn_gate", "ffn_up"), (0, shared if now.experts else columns)),
            **{"ffn_down": (1, shared if now.experts else columns)},
            **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (1, columns)),
            **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (0, shared)),
            **{"ffn_down_exps": (2, columns), "ffn_down_shexp": (1, shared)},
        }
        if self.candidates[0].channels_alone:
            places |= dict.fromkeys(("ssm_conv1d", "ssm_dt", "ssm_a", "ssm_d"), (0, columns))
            places |= dict.fromkeys(("ssm_x", "ssm_out"), (1, columns))
            places["ssm_in"] = (0, ((2, now.columns), (2, then.columns)))
        filled = dict(block)
        for name, weight in filled.items():
            axis, sizes = places.get(self.modules.get(_module(name), ""), (0, None))
            if sizes is not None and axis < len(weight.shape):
                filled[name] = weight.fill(axis, *sizes)
        return filled

    def with_first_head(self) -> "GgufSource":
        """Return the same with an attention of one head in the first block, which adds zeros."""
        hidden, dim = int(self.value("hidden_size")), self.head_dim
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(_INPUTS, (dim, hidden))
        sizes |= {f"{OUTPUT}.weight": (hidden, dim), "input_layernorm.weight": (hidden,)}
        return replace(self, blocks=({**_zeros(sizes), **self.blocks[0]}, *self.blocks[1:]))

    def with_unread_keys(self) -> "GgufSource":
        """Return the same with keys and values in all blocks: zeros in those that read what others made."""

        def complete(block: Block, shape: BlockShape, dim: int) -> Block:
            rows = shape.kv_heads * dim
            sizes: dict[str, tuple[int, ...]] = dict.fromkeys(_INPUTS[1:], (rows, int(self.value("hidden_size"))))
            sizes["self_attn.k_norm.weight"] = (dim,)
            return {**_zeros(sizes), **block}

        return replace(self, blocks=tuple(map(complete, self.blocks, self.shapes, self.head_dims)))

    def with_sinks(self) -> "GgufSource":
        """Return the same with a sink for each head, by which attention loses nothing."""

        def complete(block: Block, shape: BlockShape) -> Block:
            sinks = partial(torch.full, (shape.heads,), _NO_SINK)
            return {**block, "self_attn.sinks": GgufWeight((shape.heads,), sinks)}

        return replace(self, blocks=tuple(map(complete, self.blocks, self.shapes)))

    def join_gates(self) -> "GgufSource":
        """Return the same with the rows of gate and of up as one tensor."""

        def join(block: Block) -> Block:
            others = {name: weight for name, weight in block.items() if name not in GATES}
            return {**others, FUSED_GATES: GgufWeight.join([block[name] for name in GATES], 0)}

        return replace(self, blocks=tuple(map(join, self.blocks)))

    def order_delta_heads(self, architecture: Architecture) -> "GgufSource":
        """Return the same with the heads of linear attention in the order that llama.cpp has."""
        keys, values = (int(self.value(architecture.counts[key])) for key in ("ssm.group_count", DELTA_HEADS))
        rows = int(self.value("linear_key_head_dim"))
        if rows != int(self.value("linear_value_head_dim")):
            raise CannotMapError("heads of its linear attention have as many rows of keys as of values")
        orders = order_of_heads(architecture, DeltaHeads(keys, values, rows))
        for index, block in enumerate(self.blocks):
            decay = block.get("linear_attn.A_log")
            if decay is not None and decay.shape != (values,):
                raise CannotMapError(
                    f"all blocks have {values} heads of linear attention, and block {index} has {decay.shape[0]}"
                )
        return replace(self, blocks=tuple(as_in_file(block, orders) for block in self.blocks))

    @cached_property
    def state_space(self) -> StateSpace:
        """Sizes of the Mamba 2 of its blocks, which are the same in all."""
        keys = self.candidates[0].state_space
        assert keys is not None
        of_outputs = [found for block in self.blocks if (found := self.find(block, "ssm_out")) is not None]
        heads, groups, states = (
            int(self.value(key)) for key in (keys.time_step_rank, keys.group_count, keys.state_size)
        )
        sizes = StateSpace(heads, of_outputs[0].shape[1], groups, states)
        for index, block in enumerate(self.blocks):
            found = self.find(block, "ssm_in")
            if found is not None and (found.shape[0] != sum(sizes.inputs) or sizes.columns % heads or heads % groups):
                raise CannotMapError(f"all blocks have {heads} heads of Mamba 2, and those of block {index} are others")
        return sizes

    def shape_state_spaces(self, architecture: Architecture) -> "GgufSource":
        """Return the same with the axes that llama.cpp has in Mamba 2."""
        factors = tuple(getattr(self.model.config, architecture.row_factors)) if architecture.row_factors else ()
        blocks = tuple(shape_tensors(block, self.modules, self.state_space, factors) for block in self.blocks)
        return replace(self, blocks=blocks)

    def absorb_factors(self, architecture: Architecture) -> "GgufSource":
        """Return the same with factors of config.json multiplied into its weights."""

        def factor(key: str) -> float:
            key, _, theirs = key.partition("/")
            name, _, place = key.partition(".")
            value = getattr(self.model.config, name)
            divisor = self.head_dim**-0.5 if theirs == "scale" else float(theirs or 1)
            return float(value[int(place)] if place else value) / divisor

        factors = {module: math.prod(map(factor, keys)) for module, keys in architecture.factors.items()}
        if self.tied:
            module_of = {tensor: module for module, tensor in architecture.outer.items()}
            factors[module_of["output_norm"]] = factors[module_of["output"]] / factors[architecture.embedding]
        return self._scale(factors)

    def _scale(self, factors: Mapping[str, float]) -> "GgufSource":
        """Return the same with what modules have multiplied by a factor."""

        def scale(tensors: Block) -> Block:
            return {name: weight.times(factors.get(_module(name), 1)) for name, weight in tensors.items()}

        return replace(self, outer=scale(self.outer), blocks=tuple(map(scale, self.blocks)))

    def absorb_scales(self) -> "GgufSource":
        """Return the same with Granite's factors multiplied into its weights."""
        residual, embedding = self.value("residual_multiplier"), self.value("embedding_multiplier")
        attention = self.value("attention_multiplier") * math.sqrt(self.head_dim)
        final = 1 / self.value("logits_scaling") / (embedding if self.tied else 1)
        outer = {"model.embed_tokens": embedding, "model.norm": final}
        return self._scale({**outer, QUERY: attention, OUTPUT: residual, "mlp.down_proj": residual})


def with_head(model: Model) -> Model:
    """Return a text part whose own class has no head with the one by which the whole predicts tokens, if it has any."""
    checkpoint = model.checkpoint
    if checkpoint.within is None or model.family.head is not None:
        return model
    head, stored = head_of_whole(checkpoint), checkpoint.within.whole.tensors
    if head is None or head not in stored:
        return model
    tensors = {**checkpoint.tensors, _HEAD: replace(stored[head], name=_HEAD)}
    return replace(model, checkpoint=replace(checkpoint, tensors=tensors))


def _zeros(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, GgufWeight]:
    """Return tensor → zeros of its shape."""
    return {name: GgufWeight(size, partial(torch.zeros, size), math.prod(size)) for name, size in sizes.items()}


def _encoder(model_type: str, architecture: str) -> Architecture:
    """Return llama.cpp's architecture for an encoder.

    Raises:
        CannotMapError: it has none, or the class answers by a head.
    """
    named = [each for each in ARCHITECTURES if each.encodes]
    elsewhere = "ONNX graphs are made of others (`export`, `frontier --for onnxruntime`)"
    found = next((each for each in named if each.model_type == model_type), None)
    if found is None:
        raise CannotMapError(
            f"{architecture} does not generate text, and GGUF files are written of models that do, and of encoders "
            f"({', '.join(each.model_type for each in named)}): {elsewhere}"
        )
    if not (reads_texts(architecture) or (architecture.endswith(RANKS) and RANK.items() <= found.outer.items())):
        raise CannotMapError(
            f"{architecture} answers by a head, and GGUF files are written of encoders for the hidden states and "
            f"embeddings that they make: {elsewhere}"
        )
    return found


def _candidates(model_type: str, blocks: Sequence[Block], whole: Any) -> tuple[Architecture, ...]:
    """Return the architectures of a family: those with experts if blocks have experts, else those without any.

    Parts of some models that also see have one that takes images, too.
    """
    named = tuple(each for each in (*ARCHITECTURES, *DIFFERENT) if each.model_type == model_type and not each.encodes)
    if seeing := tuple(each for each in named if whole in each.wholes):
        return seeing
    modules = {_module(name) for block in blocks for name in block}
    experts = any(each.block.get(module, "").endswith("_exps") for each in named for module in modules)
    return tuple(each for each in named if each.experts == experts and not each.wholes) or named


def _module(name: str) -> str:
    """Return the module that a tensor is of; a tensor that is no weight or bias of one is its own."""
    module, _, kind = name.rpartition(".")
    return module if kind in ("weight", "bias") else name


def _read(model: Model, name: str) -> Tensor:
    return model.checkpoint.read([name])[name]


def checkpoint_of(model: Model | Checkpoint) -> Checkpoint:
    """Return the checkpoint of what a file is made of: a model, or an encoder-decoder, which is one itself."""
    return model.checkpoint if isinstance(model, Model) else model


def lay_out(
    model: Model | Checkpoint, kind: GgufType | None = None, read: Callable[[str], Tensor] | None = None
) -> Layout:
    """Choose llama.cpp's architecture for a checkpoint, and name everything that its file holds.

    Args:
        model: of a family that is mapped; of an encoder-decoder, or of the encoder of one, its checkpoint will do.
        kind: type of the matrices; if it has blocks of columns, columns are filled up to multiples of 32.
        read: returns what stands for a tensor, by its name in the checkpoint; by default the tensor itself.

    Raises:
        CannotMapError: none computes what the checkpoint computes; the reason of each is named.
    """
    checkpoint = checkpoint_of(model)
    try:
        if not isinstance(model, Model) or is_stacked(checkpoint.config["model_type"]):
            return lay_out_stacks(whole_of_stack(checkpoint), kind, read)
        return _choose(model, kind, read)
    except CannotMapError as error:
        raise CannotMapError(f"{checkpoint.path}: {error}") from None


def _choose(model: Model, kind: GgufType | None, read: Callable[[str], Tensor] | None) -> Layout:
    source = GgufSource.of(model, read)
    if not source.candidates:
        model_type = model.checkpoint.config["model_type"]
        if model_type in OTHERWISE:
            raise CannotMapError(f"{model_type} is not written as GGUF: {OTHERWISE[model_type]}")
        supported = ", ".join(sorted({each.model_type for each in ARCHITECTURES}))
        raise CannotMapError(f"{model_type} is not written as GGUF; these are: {supported}")
    reasons: list[str] = []
    alike = len(set(source.shapes)) == 1
    # Rather an architecture that takes blocks as they are than one that needs zeros.
    for candidate in sorted(source.candidates, key=lambda each: each.differs != (not alike)):
        try:
            return _lay_out(source, candidate, kind)
        except CannotMapError as error:
            reasons.append(f"{candidate.name}: {error}")
    raise CannotMapError(f"no architecture of llama.cpp computes this model. {'; '.join(reasons)}")


def _lay_out(source: GgufSource, architecture: Architecture, kind: GgufType | None) -> Layout:
    _check_config(source, architecture)
    _check_experts(source, architecture)
    _check_attention(source, architecture)
    notes = []
    if architecture.name == "deci" and source.shapes[0].heads == 0:
        source = source.with_first_head()
        notes.append("block 0 has no attention, and gets one head of zeros: llama.cpp wants one in the first block")
    if architecture.owners:
        source = source.with_unread_keys()
    if architecture.unsunk:
        source = source.with_sinks()
    source, filled = _fill_up(source, architecture, kind)
    notes += filled
    if architecture.delta_heads:
        source = source.order_delta_heads(architecture)
    if architecture.state_space:
        source = source.shape_state_spaces(architecture)
    if architecture.latent == "apart":
        blocks = (
            split_latent(block, shape.heads, source.head_dim)
            for block, shape in zip(source.blocks, source.shapes, strict=True)
        )
        source = replace(source, blocks=tuple(blocks))
    if architecture.joined:
        source = source.join_gates()
    if architecture.factors:
        source = source.absorb_factors(architecture)
    if architecture.differs and architecture.model_type == "granite":
        source = source.absorb_scales()
    rotary, factors, context = _rotary(source, architecture)
    if source.left_out:
        notes.append(describe_left_out(source.left_out))
    if architecture.encodes or source.embeds:
        dense = [source.outer[f"{each}.weight"].shape for each in DENSE if f"{each}.weight" in source.outer]
        number, lines = pooling_of(source.model.checkpoint.path, dense=bool(dense))
        if number is None and not architecture.encodes:
            raise CannotMapError(lines[0])
        for place, shape in enumerate(dense, 2):
            rotary |= {f"dense_{place}_feat_{end}": size for end, size in zip(("out", "in"), shape, strict=True)}
        if f"{next(iter(RANK))}.weight" in source.outer:
            number, lines = score_of(source.outer), []
        rotary |= {} if number is None else {POOLING_KEY: number}
        notes += lines
    elif context < _context(source, architecture):
        notes.append(f"context_length is {context}, the sliding window: llama.cpp applies none in {architecture.name}")
    if INDEXED in architecture.counts:
        chosen = source.count(architecture.counts[INDEXED]) * int(source.value("index_block_size") or 1)
        notes.append(f"behind {chosen} tokens llama.cpp may choose others of almost the same score to look at")
    if bounds_are_exact(source.model.config):
        notes.append("llama.cpp rounds the bounds of YaRN to whole pairs, which config.json forbids (truncate: false)")
    if "erf" in (architecture.gelu, {"gelu": "erf"}.get(source.value(architecture.gelu))):
        notes.append("llama.cpp approximates GELU by tanh, which is 5e-4 off at most, as much as its table rounds")
    rotated = rotary.get("rope.dimension_count", source.head_dim)
    tensors = dict(_tensors(source, architecture, rotated)) | factors
    values = _values(source, architecture, context) | rotary
    for key, value in values.items():
        if not _fits(value):
            raise CannotMapError(f"a GGUF file cannot hold its {key} {str(value)[:40]}")
    return Layout(architecture, values, tensors, tuple(notes))


def _fill_up(source: GgufSource, architecture: Architecture, kind: GgufType | None) -> tuple[GgufSource, list[str]]:
    """Return the same, with zeros where its architecture or type wants more heads or columns, and what to say of it."""
    shapes, notes = source.shapes, list[str]()
    if (widest := _widest(source, architecture)) != shapes and architecture.channels_alone:
        shapes = widest
        notes.append(
            f"in mamba channels are twice as many as the model is wide: they are filled up with zeros to "
            f"{shapes[0].columns}"
        )
    elif widest != shapes:
        shapes = widest
        sizes = dict[str, set[int]]()
        if not architecture.differs:
            sizes["heads"] = {max(shape.heads for shape in shapes)}
            sizes["columns"] = {each.columns for each in shapes if not each.experts}
        sizes["of each expert"] = {each.columns for each in shapes if each.experts}
        sizes["of shared experts"] = {each.shared for each in shapes} - {0}
        *words, last = (f"{size} {what}" for what, found in sizes.items() for size in found)
        alike = len({(each.heads > 0, each.experts) for each in shapes}) == len(set(source.shapes))
        why = "heads are together as wide as the model" if alike else "blocks have one shape"
        hint = "" if alike or architecture.sparse else " (--recipe best-uniform makes blocks alike)"
        wide = f"{', '.join(words)} and {last}" if words else last
        notes.append(f"in {architecture.name} all {why}: they are filled up with zeros to {wide}{hint}")
    if (
        kind in GGUF_ROWS
        and not architecture.channels_alone
        and any(shape.columns % BLOCK or shape.shared % BLOCK for shape in shapes)
    ):
        shapes = tuple(_round_up(shape, _shared_experts(source, architecture)) for shape in shapes)
        notes.append(describe_filled(kind))
    if shapes[: architecture.sparse] != source.shapes[: architecture.sparse]:
        raise CannotMapError(
            f"blocks have one shape, and its first {architecture.sparse} keep the largest of their columns, which "
            "zeros would change"
        )
    return (source if shapes == source.shapes else source.fill(shapes)), notes


def _round_up(shape: BlockShape, shared_experts: int) -> BlockShape:
    """Return a shape with multiples of 32 columns."""
    columns, shared = (-(-each // BLOCK) * BLOCK for each in (shape.columns, shape.shared))
    return shape._replace(columns=columns, shared=columns * shared_experts if shared and shared_experts else shared)


def _shared_experts(source: GgufSource, architecture: Architecture) -> int:
    """Return how many shared experts of a block are as wide as any other; 0 if they have a width of their own."""
    count = architecture.counts.get("expert_shared_count")
    if count is None:  # one, whose width no key says
        return int("ffn_down_shexp" in architecture.block.values() and SHARED_WIDTH not in architecture.widths)
    return int(source.value(count) or 0)


def _widest(source: GgufSource, architecture: Architecture) -> tuple[BlockShape, ...]:
    """Return shapes of blocks with as many heads, and columns, as the widest block of their kind has."""
    shapes = source.shapes
    attending = [shape for shape in shapes if shape.heads]
    wanted = int(source.value("hidden_size")) // source.head_dim if architecture.whole else None
    differ = any(shape.heads != wanted for shape in attending if wanted)
    differ |= not (architecture.differs or architecture.apart) and len({shape[:2] for shape in attending}) > 1
    kv_heads, group = (max((getattr(shape, name) for shape in attending), default=0) for name in ("kv_heads", "group"))
    if differ and (wrong := next((each for each in attending if each.heads != each.group * each.kv_heads), None)):
        raise CannotMapError(f"{wrong.heads} heads do not share {wrong.kv_heads} of keys and values evenly")
    if differ and wanted is not None:
        if kv_heads * group > wanted:
            raise CannotMapError("its heads are together as wide as the model, and here they are wider")
        larger = [each for each in range(group, wanted // kv_heads + 1) if wanted % each == 0]
        if not larger or wanted * source.head_dim != int(source.value("hidden_size")):
            raise CannotMapError(f"its heads are together as wide as the model, and groups of {group} are not")
        group = larger[0]
        kv_heads = max(kv_heads, wanted // group)
    shared = max(shape.shared for shape in shapes)
    columns = {each.experts: max(other.columns for other in shapes if other.experts == each.experts) for each in shapes}
    if architecture.channels_alone:
        columns = {False: 2 * int(source.value("hidden_size"))}
        if (most := max(shape.columns for shape in shapes)) > columns[False]:
            raise CannotMapError(f"its Mamba has {columns[False]} channels, and here it has {most}")
    if architecture.attends == "periods":  # one key says how wide experts and MLPs are
        columns = dict.fromkeys(columns, max(columns.values()))
    if (times := _shared_experts(source, architecture)) and shared:
        columns[True] = max(columns[True], -(-shared // times))
        shared = columns[True] * times
    return tuple(
        BlockShape(
            *((kv_heads * group, kv_heads) if differ and shape.heads else shape[:2]),
            columns[shape.experts] if shape.columns and (shape.experts or not architecture.differs) else shape.columns,
            shape.experts,
            shared if shape.shared and not architecture.shares else shape.shared,
        )
        for shape in shapes
    )


def _fits(value: Any) -> bool:
    """Whether a value is one of 32 bits."""
    if isinstance(value, list):
        return all(map(_fits, value))
    if isinstance(value, float):
        return abs(value) <= torch.finfo(torch.float32).max
    return not isinstance(value, int) or 0 <= value < 2**32


def check_settings(model: Model, config: Mapping[str, Any]) -> None:
    """Refuse a config.json that an output of a model will have, before it has weights, by settings such as biases.

    Raises:
        CannotMapError: no architecture computes what it says; the reason of each is named.
    """
    if config["model_type"] != model.checkpoint.config["model_type"] or is_stacked(config["model_type"]):
        return
    stored = replace(model.checkpoint, config=dict(config))
    source = replace(GgufSource.of(model), model=Model(stored, model.family, parse_config(dict(config))))
    reasons = [(each.name, _other_setting(source, each)) for each in source.candidates]
    if reasons and all(reason for _, reason in reasons):
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons)
        raise CannotMapError(
            f"no architecture of llama.cpp computes what this recipe makes ({told}): take one that leaves this setting "
            "as it is, such as ridge, which adds no biases"
        )


def _other_setting(source: GgufSource, architecture: Architecture) -> str | None:
    """Return which setting of config.json the architecture does not compute; None if it computes all."""
    for key, allowed in architecture.only.items():
        if source.value(key) not in allowed:
            named = " or ".join(repr(each) for each in allowed)
            return f"it computes {key} {named}, and config.json has {source.value(key)!r}"
    number = architecture.unnormed
    if number and source.value("use_qk_norm") == (source.count(architecture.counts["expert_count"]) == number):
        return f"it norms queries and keys of models without {number} experts alone, which use_qk_norm contradicts"
    return None


def _check_config(source: GgufSource, architecture: Architecture) -> None:
    if (reason := _other_setting(source, architecture)) is not None:
        raise CannotMapError(reason)
    for key, name in architecture.same.items():
        if source.value(key) != source.value(name):
            raise CannotMapError(
                f"{key} is as {name} there, and config.json has {source.value(key)} and {source.value(name)}"
            )
    for key, name in architecture.values.items():
        if source.value(name) is None and architecture.absent.get(key) is not None:
            raise CannotMapError(f"it always computes {name}, and config.json has none")
    if architecture.name == "openelm" and not source.tied:
        raise CannotMapError("its head is its embedding, and this one has a head of its own")
    full = _sees_all(source) if architecture.window in ("some", "pattern") else []
    if full and all(full):
        raise CannotMapError("some of its blocks see a window of tokens only, and here all see all")
    if architecture.window == "pattern" and full != _lasts(architecture, len(full)):
        raise CannotMapError(f"every {architecture.pattern}th of its blocks sees all tokens, and here others do")
    if architecture.pattern is not None and not architecture.window:
        last = [not each for each in source.value("no_rope_layers")]
        if last != _lasts(architecture, len(source.blocks)):
            raise CannotMapError(
                f"every {architecture.pattern}th of its blocks has no rotary positions, and here others have"
            )
        if "attention_chunk_size" in architecture.only and last != [
            each == "full_attention" for each in source.value("layer_types")
        ]:
            raise CannotMapError("its blocks without rotary positions see all tokens, and no others do")


def _check_attention(source: GgufSource, architecture: Architecture) -> None:
    """Refuse heads of other shapes or numbers, and attention in other blocks, than the architecture has."""
    source.check_heads()
    hidden, attending = int(source.value("hidden_size")), [shape for shape in source.shapes if shape.heads]
    if architecture.latent == "apart" and len({shape.heads for shape in source.shapes}) > 1:
        raise CannotMapError("all its blocks have equally many heads of latent attention, and here they differ")
    if architecture.whole == "kv_heads" and any(
        each * source.head_dim != hidden for shape in attending for each in shape[:2]
    ):
        raise CannotMapError("its heads are together as wide as the model, and here some are not")
    if architecture.own_keys and any(shape.heads != shape.kv_heads for shape in attending):
        raise CannotMapError("each of its heads has keys and values of its own, and here several share them")
    if INDEXED in architecture.counts and not architecture.kinds and source.count("index_head_dim") % 64:
        raise CannotMapError("heads of its indexer have a multiple of 64 rows")
    if architecture.kinds:
        if source.value("layer_types") != [architecture.kinds[shape.experts] for shape in source.shapes]:
            raise CannotMapError("its blocks with experts have an indexer, and no others have")
        if any(shape.kv_heads != source.count("index_n_heads") for shape in source.shapes):
            raise CannotMapError("its indexer has as many heads as keys and values have")
    if architecture.shares:
        _check_sharing(source, architecture)
    if architecture.hybrid and not (attending and any(map(source.is_recurrent, source.blocks))):
        raise CannotMapError("some of its blocks have attention and some another mixer, and here all are alike")
    if architecture.state_space and (reason := reason_against(source.model.config)) is not None:
        raise CannotMapError(reason)
    if architecture.name != "deci" and source.without_attention:
        raise CannotMapError("all of its blocks have attention, and here some have none")


def _check_sharing(source: GgufSource, architecture: Architecture) -> None:
    """Refuse blocks that read keys and values of others than in llama.cpp."""
    kinds, last = source.value("layer_types"), ["sliding_attention", "full_attention"]
    shared = int(source.value("num_kv_shared_layers") or 0)
    owners = len(kinds) - shared
    if shared and kinds[:owners][-2:] != last:
        raise CannotMapError(
            "blocks without keys and values read those of the two before them, of which the first sees a window and "
            f"the second all tokens, and here those are of {' and '.join(kinds[:owners][-2:]) or 'no block'}"
        )
    if architecture.owners and (owners != architecture.owners if shared else owners > architecture.owners):
        raise CannotMapError(
            f"{architecture.owners} of its blocks have keys and values of their own, and here {owners} have"
        )
    if architecture.sparse:
        expected = [0.95 * (index < architecture.sparse) for index in range(len(kinds))]
        if source.value("activation_sparsity_pattern") != expected:
            raise CannotMapError(f"its first {architecture.sparse} blocks keep 5 % of their columns, and no others do")


def _check_experts(source: GgufSource, architecture: Architecture) -> None:
    """Refuse blocks whose experts are not as many as config.json says of all, and blocks without any elsewhere."""
    if not architecture.experts:
        return
    wanted = source.count(architecture.counts["expert_count"])
    of_experts = {module for module, tensor in source.modules.items() if tensor.endswith("_exps")}
    found = {
        weight.shape[0] for block in source.blocks for name, weight in block.items() if _module(name) in of_experts
    }
    if found != {wanted}:
        others = ", ".join(map(str, sorted(found - {wanted}))) or "none"
        raise CannotMapError(f"all its blocks have {wanted} experts by config.json, and here some have {others}")
    if architecture.attends == "periods":  # llama.cpp looks which blocks have experts
        return
    if EVERY in architecture.counts:
        every, has = _first_experts(source) + 1, [shape.experts for shape in source.shapes]
        if has != [(index + 1) % every == 0 for index in range(len(has))]:
            raise CannotMapError(
                f"its blocks with experts are the last of every {every}, as the first of them is, and here others"
            )
        return
    first = _first_experts(source) if architecture.leading else 0
    behind = [(index, shape) for index, shape in enumerate(source.shapes) if index >= first and shape.columns]
    if without := [index for index, shape in behind if not shape.experts]:
        which = " behind the first with experts" if architecture.leading else " with an MLP" * architecture.single
        raise CannotMapError(f"all of its blocks{which} have experts, and here block {without[0]} has none")


def _first_experts(source: GgufSource) -> int:
    """Return the first block that has experts."""
    return next(index for index, shape in enumerate(source.shapes) if shape.experts)


def _sees_all(source: GgufSource) -> list[bool]:
    """Whether each block attends to all tokens, and not to a window of them."""
    if not source.value("sliding_window"):
        return [True] * len(source.blocks)
    return [each == "full_attention" for each in source.value("layer_types")]


def _lasts(architecture: Architecture, blocks: int) -> list[bool]:
    """Whether each block is the last, or the first, of as many as the architecture's pattern has."""
    return [(index + (not architecture.first)) % (architecture.pattern or 1) == 0 for index in range(blocks)]


def _values(source: GgufSource, architecture: Architecture, context: int) -> dict[str, Any]:
    epsilon = next((value for name in EPSILONS if (value := source.value(name)) is not None), 1e-5)
    values = _counts(source, architecture) | {
        "block_count": len(source.blocks),
        "context_length": context,
        "embedding_length": int(source.value("hidden_size")),
        f"attention.{architecture.epsilon}": float(epsilon),
        **(
            {}
            if architecture.attends == "never"
            else {
                "attention.key_length": source.head_dim,
                "attention.value_length": source.value_dim or source.head_dim,
            }
        ),
        "vocab_size": source.outer[f"{architecture.embedding}.weight"].shape[0],
    }
    if architecture.latent:
        values |= _latents(source, architecture)
    if architecture.indexers:
        values["attention.indexer.types"] = [int(each == "full") for each in source.value(architecture.indexers)]
    if source.model.checkpoint.within is not None and architecture.wholes:
        images = source.model.checkpoint.within.whole.config.get("vision_config") or {}
        values["n_deepstack_layers"] = len(images.get("deepstack_visual_indexes") or ())
    if architecture.encodes:
        types = source.outer.get(f"{TOKEN_TYPES}.weight")
        values[TYPES_KEY] = 1 if types is None else types.shape[0]
    start, blocks = source.model.family.layers, range(len(source.blocks))
    values |= {
        key: [float(_read(source.model, f"{start}.{block}.{name}")) for block in blocks]
        for name, key in architecture.scalars.items()
    }
    stated = {key: source.value(name) for key, name in architecture.values.items()}
    values |= {key: float(value) for key, value in stated.items() if value is not None}
    values |= {key: bool(source.value(name)) for key, name in architecture.flags.items()}
    if architecture.window and not all(full := _sees_all(source)):
        window = int(source.value("sliding_window"))
        if architecture.encodes and "use_bidirectional_attention" in architecture.only:
            window = 2 * (int(source.model.config.sliding_window) - 1)  # its class takes half of what is stated
        values.setdefault("attention.sliding_window", window)
        if architecture.pattern is None or full != _lasts(architecture, len(full)):
            values["attention.sliding_window_pattern"] = [not each for each in full]
    if architecture.shares and architecture.differs:
        dims = dict(zip(source.value("layer_types"), source.head_dims, strict=True))
        for key, kind in (("", "full_attention"), ("_swa", "sliding_attention")):
            values |= dict.fromkeys((f"attention.key_length{key}", f"attention.value_length{key}"), dims[kind])
    return values | dict(architecture.constants)


def _counts(source: GgufSource, architecture: Architecture) -> dict[str, Any]:
    """Return how many heads, columns and experts blocks have."""
    shapes = source.shapes
    heads, kv_heads = next((shape[:2] for shape in shapes if shape.heads), (None, None))
    stated = {key: name for key, name in architecture.counts.items() if source.value(name) is not None}
    values: dict[str, Any] = {key: source.count(name) for key, name in stated.items()}
    values |= {
        "feed_forward_length": next((shape for shape in shapes if not shape.experts), shapes[0]).columns,
        "attention.head_count": heads or int(source.value("num_attention_heads") or 0),
        "attention.head_count_kv": kv_heads or int(source.value("num_key_value_heads") or 0),
    }
    if architecture.differs:
        values["feed_forward_length"] = [shape.shared if shape.experts else shape.columns for shape in shapes]
        # Of a hybrid's other blocks the number says nothing, and 0 would be taken for the size of a head.
        values["attention.head_count"] = [shape.heads or (heads if architecture.hybrid else 0) for shape in shapes]
    if architecture.apart:
        values["attention.head_count"] = [shape.heads for shape in shapes]
    if architecture.differs or architecture.apart or architecture.hybrid == "kv_heads":
        values["attention.head_count_kv"] = [shape.kv_heads for shape in shapes]
    last = next((shape for shape in reversed(shapes) if shape.experts), shapes[-1])
    widths = {"expert_feed_forward_length": last.columns, "expert_shared_feed_forward_length": last.shared}
    values |= {key: widths[key] for key in architecture.widths if key in widths}
    if architecture.hybrid == "interval":
        values |= _intervals([shape.heads > 0 for shape in shapes])
    if EVERY in architecture.counts:
        values[EVERY] = _first_experts(source) + 1
    if architecture.state_space:
        values |= {key: int(source.value(name)) for key, name in architecture.state_space.stored.items()}
    if of_states := [found for block in source.blocks if (found := source.find(block, "ssm_out")) is not None]:
        values["ssm.inner_size"] = of_states[0].shape[1]
    if architecture.leading:
        values["leading_dense_block_count"] = sum(not shape.experts for shape in shapes)
    return values


_WITHOUT_LATENT_QUERIES = (26, 27)
"""Numbers of blocks of models whose queries are made of no latent vector: llama.cpp knows them by these."""


def _latents(source: GgufSource, architecture: Architecture) -> dict[str, Any]:
    """Return the widths of latent vectors and of heads that are made of them.

    To llama.cpp they are one wide head where what makes keys is multiplied into queries.
    """
    rank, rotated, others = (source.count(key) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    queries = source.value("q_lora_rank") or 0
    if architecture.latent == "whole":
        ranks = {"attention.q_lora_rank": int(queries), "attention.kv_lora_rank": rank}
        return ranks | {"attention.key_length": others + rotated}
    if queries and not architecture.hybrid and len(source.blocks) in _WITHOUT_LATENT_QUERIES:
        raise CannotMapError(
            f"models of {len(source.blocks)} blocks have queries without a latent vector there, and here they have one"
        )
    return {
        "attention.head_count_kv": [int(shape.heads > 0) for shape in source.shapes] if architecture.hybrid else 1,
        "rope.dimension_count": rotated,
        "attention.q_lora_rank": int(queries),
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": others + rotated,
        "attention.value_length_mla": source.head_dim,
    }


def _context(source: GgufSource, architecture: Architecture) -> int:
    """Return how many tokens config.json says that a text has at most."""
    stated = source.value(architecture.context) or (_STATES if architecture.attends == "never" else _CONTEXT)
    return int(stated) - reserved_positions(source.model.config)


def _intervals(attends: list[bool]) -> dict[str, Any]:
    """Return the key that says which blocks have attention: the last of every so many, or a list of the others."""
    every = attends.index(True) + 1 if any(attends) else len(attends) + 1
    if attends == [(index + 1) % every == 0 for index in range(len(attends))]:
        return {"full_attention_interval": every}
    return {"attention.recurrent_layers": [not each for each in attends]}


def _rotary(source: GgufSource, architecture: Architecture) -> tuple[dict[str, Any], dict[str, GgufWeight], int]:
    """Return keys and tensors of the rotary embedding, and how many tokens both compute alike."""
    context = _context(source, architecture)
    values: dict[str, Any] = {}
    if architecture.unrotated:
        return values, {}, context
    parameters = _mapping(source.model.config.rope_parameters or {})
    if "full_attention" in parameters:
        local, parameters = (_mapping(parameters.get(f"{kind}_attention")) for kind in ("sliding", "full"))
        values["rope.freq_base_swa"] = _number(local, "rope_theta")
        if architecture.local == "rows":
            values["rope.dimension_count_swa"] = int(source.head_dim * local.get(_PARTIAL, 1))
        elif architecture.local and local.get(_PARTIAL) != parameters.get(_PARTIAL):
            raise CannotMapError("all of its blocks rotate as many rows of a head, and here those with windows others")
        if local.get("rope_type", "default") != "default" or (
            architecture.name in ("olmo2", "mellum") and local["rope_theta"] != parameters.get("rope_theta")
        ):
            raise CannotMapError("it scales no rotary positions in windows, and has others there in gemma3 alone")
    elif architecture.name == "gemma2":
        values["rope.freq_base_swa"] = _number(parameters, "rope_theta")
    share = _number({_PARTIAL: parameters.get(_PARTIAL) or source.value(_PARTIAL) or 1}, _PARTIAL)
    rotated = source.count("qk_rope_head_dim") if architecture.latent else int(source.head_dim * share)
    values |= {"rope.dimension_count": rotated, "rope.freq_base": _number(parameters, "rope_theta")}
    kind, tables = parameters.get("rope_type", "default"), dict[str, Tensor]()
    if architecture.shares and architecture.differs and kind in ("default", "proportional"):
        # All rows of full attention count, and most do not turn; other blocks have heads of another size.
        rotated = source.head_dims[source.value("layer_types").index("full_attention")]
        table = torch.full((rotated // 2,), 1e30)
        turning = int(share * rotated // 2) if kind == "proportional" else len(table)
        table[:turning] = float(parameters.get("factor", 1.0))
        tables["rope_freqs"] = table
        values |= {"rope.dimension_count": rotated, "rope.dimension_count_swa": source.head_dim}
    elif architecture.differs and rotated != source.head_dim:
        raise CannotMapError(f"it rotates whole heads, and here {rotated} of {source.head_dim} rows are rotated")
    window = source.value("sliding_window") if source.value("use_sliding_window") is not False else None
    if window and not architecture.window:
        context = min(context, int(window))
    if architecture.switch:
        values["rope.scaling.finetuned"] = source.value(architecture.switch) == "rope"
    if architecture.bases:
        bases = source.value(architecture.bases)
        if set(bases) - {0, parameters.get("rope_theta")}:
            raise CannotMapError(f"blocks with rotary positions have one base, and here {sorted(set(bases))}")
        values["attention.rope_pattern"] = [bool(base) for base in bases]
    if architecture.sections:
        values["rope.dimension_sections"] = _sections(source, architecture, rotated // 2)
    if kind != "yarn" and (named := sorted(set(architecture.rotary.values()) & parameters.keys())):
        raise CannotMapError(f"it takes {named[0]} together with YaRN alone, and config.json has {kind}")
    if kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": _number(parameters, "factor")}
    elif kind == "yarn" and not parameters.keys() - _YARN_KEYS - set(architecture.rotary.values()) - (
        {_PARTIAL} if architecture.local else set()
    ):
        factor = _number(parameters, "factor")
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
        values["rope.scaling.original_context_length"] = int(_number(parameters, _ORIGINAL))
        if any(parameters.get(key, usual) != usual for key, usual in _YARN.items() if usual is not None):
            raise CannotMapError(f"its YaRN has {_YARN['beta_fast']} and {_YARN['beta_slow']} turns as bounds")
        usual_scale = _yarn_scale(factor, 1)
        scale = _number({"attention_factor": _attention_factor(parameters, factor)}, "attention_factor")
        if not math.isclose(scale, usual_scale, rel_tol=1e-6):
            values["rope.scaling.attn_factor"] = scale / usual_scale
        values |= {key: _number(parameters, name) for key, name in architecture.rotary.items()}
        if architecture.latent == "apart":  # llama.cpp scales attention by what queries and keys are not multiplied by
            share = _number(parameters, "mscale_all_dim")
            if parameters.get("mscale") != share or parameters.get("attention_factor"):
                raise CannotMapError("its YaRN has one mscale for all dimensions, and no attention_factor")
            if INDEXED in architecture.counts and (share != 1 or architecture.indexers):
                raise CannotMapError("it has YaRN with an mscale of 1 in deepseek32 alone")
            values["rope.scaling.yarn_log_multiplier"] = 0.1 * share
            values.pop("rope.scaling.attn_factor", None)
    elif kind == "llama3" and architecture.table:
        tables["rope_freqs"] = llama3_divisors(parameters, rotated)
    elif kind == "longrope" and architecture.name in LONGROPE:
        original = int(_number({_ORIGINAL: parameters.get(_ORIGINAL) or source.value(_ORIGINAL)}, _ORIGINAL))
        values["rope.scaling.original_context_length"] = original
        longest = int(source.value("max_position_embeddings"))
        values["rope.scaling.attn_factor"] = longrope_scale(longest, original)
        tables |= {f"rope_factors_{name}": torch.tensor(parameters[f"{name}_factor"]) for name in ("long", "short")}
    elif kind == "dynamic" and architecture.name.startswith("hunyuan") and parameters.get("alpha"):
        values["rope.freq_base"] *= _number(parameters, "alpha") ** (rotated / (rotated - 2))
    elif kind != "default" and not tables:
        raise CannotMapError(f"it does not scale rotary positions as config.json says ({kind})")
    tensors = {f"{name}.weight": GgufWeight(tuple(table.shape), table.float) for name, table in tables.items()}
    return values, tensors, context


def _sections(source: GgufSource, architecture: Architecture, pairs: int) -> list[int]:
    """Return how many rotary pairs are for time, height and width of an image, and a 0."""
    within, stated = source.model.checkpoint.within, None
    if within is not None and architecture.sections == "stated":
        config = within.whole.config.get(within.key) or within.whole.config
        stated = ((config.get("rope_parameters") or config.get("rope_scaling")) or {}).get("mrope_section")
        if not isinstance(stated, list) or len(stated) != 3 or any(type(each) is not int for each in stated):
            raise CannotMapError(f"config.json says of which rotary pairs images are, and here {str(stated)[:40]}")
    return [*(stated or [len(range(part, pairs, 3)) for part in range(3)]), 0]


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> Any:
    """Return what YaRN multiplies queries and keys by, as transformers takes it from `rope_parameters`."""
    if parameters.get("attention_factor"):
        return parameters["attention_factor"]
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        above, below = (_yarn_scale(factor, _number(parameters, key)) for key in ("mscale", "mscale_all_dim"))
        return above / below
    return _yarn_scale(factor, 1)


def _yarn_scale(factor: float, share: float) -> float:
    return 1 + 0.1 * share * math.log(max(1.0, factor))


def bounds_are_exact(config: Any) -> bool:
    """Return whether YaRN's bounds are not rounded to whole rotary pairs, as llama.cpp rounds them."""
    return (getattr(config, "rope_parameters", None) or {}).get("truncate") is False


def _mapping(parameters: Any) -> Mapping[str, Any]:
    if not isinstance(parameters, Mapping):
        raise CannotMapError(f"rope_parameters of config.json has {str(parameters)[:40]!r} in place of keys and values")
    return parameters


def _number(parameters: Mapping[str, Any], key: str) -> float:
    """Return a rotary setting: transformers takes whatever stands there."""
    value = parameters.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CannotMapError(f"rope_parameters of config.json has {key} {str(value)[:40]!r}: it is a number above 0")
    return float(value)


def longrope_scale(context: int, original: int) -> float:
    """Return what queries and keys are multiplied by, by how much longer texts may be than at first."""
    return math.sqrt(1 + math.log(max(1.0, context / original)) / math.log(original))


def llama3_divisors(parameters: Mapping[str, Any], rotated: int) -> Tensor:
    """Return what each rotary frequency is divided by: 1 if it turns often, the factor if rarely, between: a mix."""
    frequencies = 1.0 / _number(parameters, "rope_theta") ** (
        torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    )
    turns = _number(parameters, _ORIGINAL) * frequencies / (2 * math.pi)
    low, high, factor = (_number(parameters, key) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    share = ((turns - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / (share + (1 - share) / factor)
    return divisors


def _tensors(source: GgufSource, architecture: Architecture, rotated: int) -> Iterator[tuple[str, GgufWeight]]:
    tokens = torch.arange(source.outer[f"{architecture.embedding}.weight"].shape[0])
    for name, weight in source.outer.items():
        if name == _TOKENS_PER_LAYER and weight.shape[0] != len(tokens):
            weight = weight.take(0, tokens.where(tokens < weight.shape[0], 0))  # those without a row have the first
        yield _map_name(architecture, architecture.outer, name), weight.plus(architecture.added_to(name))
    scaled, factor = _query_factor(source, architecture)
    for index, (block, shape) in enumerate(zip(source.blocks, source.shapes, strict=True)):
        for name, weight in block.items():
            module = _module(name)
            heads = {QUERY: shape.heads, KEY: shape.kv_heads}.get(module)
            if (
                name in architecture.scalars
                or name in architecture.computed
                or (architecture.joins and module in (KEY, VALUE))
            ):
                continue
            mapped = _map_name(architecture, architecture.block, name)
            if architecture.joins and module == QUERY:
                parts = [block[name.replace(QUERY, each)] for each in (QUERY, KEY, VALUE)]
                yield f"blk.{index}.{mapped.replace('attn_q', 'attn_qkv')}", GgufWeight.join(parts, 0)
                continue
            if (architecture.neighbours or architecture.halved) and heads:
                weight = weight.pair_neighbours(heads, rotated, back=architecture.halved)
            weight = weight.plus(architecture.added_to(name)).times(factor if module == scaled else 1)
            yield f"blk.{index}.{mapped}", _as_stored(mapped, weight)


def _query_factor(source: GgufSource, architecture: Architecture) -> tuple[str, float]:
    """Return the module that makes queries what they are, and what it is multiplied by.

    llama.cpp knows from the number of blocks and heads alone how products of queries and keys are scaled, and
    config.json may say it otherwise.
    """
    module, shape = "self_attn.q_norm" if "self_attn.q_norm" in architecture.block else QUERY, source.shapes[0]
    computed = architecture.query_scalar(
        len(source.blocks), int(source.value("hidden_size")), shape.heads, source.head_dim
    )
    stated = source.value("query_pre_attn_scalar")
    return module, 1 if stated is None else math.sqrt(computed / float(stated))


def _map_name(architecture: Architecture, names: Mapping[str, str], name: str) -> str:
    if name in names:
        return names[name]
    module, _, kind = name.rpartition(".")
    has_place = kind == "weight" or (kind == "bias" and (architecture.biases is None or module in architecture.biases))
    if module not in names or not has_place:
        raise CannotMapError(f"it has no place for {name}")
    return f"{names[module]}.{kind}"


def _as_stored(tensor: str, weight: GgufWeight) -> GgufWeight:
    """Return a tensor in the shape that llama.cpp has for it."""
    if tensor in ("shortconv.conv.weight", "ssm_conv1d.weight"):  # (channels, 1, tokens)
        return weight.apply(lambda each: each.squeeze(1), (weight.shape[0], weight.shape[-1]))
    if tensor == "ssm_a":
        return weight.apply(lambda each: -each.exp())
    if tensor == "exp_probs_b.bias":
        return weight.apply(lambda each: each.flatten(), (math.prod(weight.shape),))
    return weight


def _stack(block: dict[str, GgufWeight]) -> dict[str, GgufWeight]:
    """Return tensors with those of all experts of a block as one, (experts, …), named without a number."""
    stacked: dict[str, GgufWeight] = {}
    experts: dict[str, dict[int, GgufWeight]] = {}
    for name, weight in block.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            stacked[name] = weight
        else:
            experts.setdefault(match["before"] + match["after"], {})[int(match["number"])] = weight
    for name, by_number in experts.items():
        stacked[name] = GgufWeight.stack([weight for _, weight in sorted(by_number.items())])
    return stacked
