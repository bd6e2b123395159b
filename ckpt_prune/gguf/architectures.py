"""Which architecture of llama.cpp computes what a family of transformers computes: names, keys and rules, as data.

A family's own architecture has one shape for all blocks. Two have shapes per block: `deci` (a Llama, with biases) and
`openelm` (a Llama with norms of queries and keys, and a tied head). Both are used only where blocks differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from gguf import MODEL_ARCH_NAMES, ExpertGatingFuncType, get_tensor_name_map

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install

OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
QUERY, KEY, VALUE, OUTPUT = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"
QKV = {QUERY: "attn_q", KEY: "attn_k", VALUE: "attn_v"}
ATTENTION = QKV | {OUTPUT: "attn_output"}
GATED = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
FUSED_GATES, GATES = "mlp.gate_up_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")
PER_LAYER_OUTER = OUTER | {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
"""Tensors that give each block of Gemma 3n or 4 its own input for each token."""
ALTUP_OUTER = {"model.altup_projections": "altup_proj", "model.altup_unembed_projections": "altup_unembd_proj"}
"""Several streams of hidden states, of which each block of a Gemma 3n computes one."""
SHORT_NAMES = {"encoder": "enc", "decoder": "dec"}
"""Stack → how names of its tensors begin in a file."""
_UNREAD = ("nextn.", "attn_rot_embd", "cross_attn_rel_b")
"""Beginnings of tensors that llama.cpp does not compute with."""
_ENDS = {"attn_sinks": ".weight", "layer_output_scale": ".weight", "altup_correct_scale": ".weight"}
"""Tensors that are a weight in a file, and no module's in transformers."""


@cache
def named_by_gguf(name: str, stack: str = "") -> Mapping[str, str]:
    """Return module of a block → tensor of an architecture, for all names that gguf-py knows families to give.

    Args:
        stack: encoder or decoder, of an architecture that has both.
    """
    number = next((number for number, each in MODEL_ARCH_NAMES.items() if each == name), None)
    if number is None:
        raise UserError(f"the package gguf that is installed does not know {name} of llama.cpp: {install('gguf')}")
    before, inside = (f"{stack}.block.0.", f"{SHORT_NAMES[stack]}.blk.0.") if stack else (".0.", "blk.0.")
    found: dict[str, str] = {}
    for module, (_, whole) in get_tensor_name_map(number, 1).mapping.items():
        module, tensor = module.partition(before)[2], whole.removeprefix(inside)
        if not module or tensor == whole or tensor.startswith(_UNREAD):
            continue
        if tensor == "exp_probs_b":  # a bias that stands by itself
            module, tensor = module.replace("e_score_correction", "e_score_correction_bias"), f"{tensor}.bias"
        if module.endswith("dt_proj"):
            found[module.replace("dt_proj", "dt_bias")] = f"{tensor}.bias"
        found[module] = tensor + _ENDS.get(tensor, "")
    return found


class StateSpaceKeys(NamedTuple):
    """Keys of config.json with the sizes of Mamba 2, by the names of GGUF keys.

    `rows` are those of a head, `columns` those of all heads, if a key says it.
    """

    conv_kernel: str
    state_size: str
    group_count: str
    time_step_rank: str
    rows: str
    columns: str = ""

    @property
    def stored(self) -> dict[str, str]:
        """GGUF key → key of config.json."""
        return {f"ssm.{name}": key for name, key in self._asdict().items() if name not in ("rows", "columns")}


BERT_OUTER = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
RANK = {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}
"""Modules of a head that gives one score of two texts, by the names that RoBERTa has."""
ENCODER_DECODER = "t5"
"""The architecture that has both."""
DENSE = ("2_Dense.linear", "3_Dense.linear")
"""Modules of sentence-transformers behind the pooling of EmbeddingGemma, which llama.cpp has, too."""
SILU = ("silu", "swish")
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


@dataclass(frozen=True)
class Architecture:
    """The names and computations of a model in llama.cpp.

    Attributes:
        name: of the architecture in llama.cpp.
        model_type: of the config.json that it computes.
        others: of `block`, those that gguf-py has otherwise, or not at all.
        outer: module outside the blocks → tensor in GGUF.
        neighbours: llama.cpp rotates pairs of neighbouring rows where transformers rotates the halves of a head, so
            that rows of q and k are reordered.
        halved: the other way round: transformers rotates neighbours, and llama.cpp halves.
        norm_offset: what is added to the weights of norms.
        values: GGUF key, without the architecture's name → key of config.json.
        absent: GGUF key → what llama.cpp takes for it where a file lacks it. Without one, a file must have it.
        A 0 means the same.
        only: key of config.json → the values that llama.cpp computes.
        biases: modules that may have a bias; None: any.
        window: llama.cpp applies the config's sliding window. Elsewhere the context is cut to the window. "some": some
            blocks must have it; "pattern": all must but the exceptions of `pattern`; "any": none need have it.
        pattern: block → whether it is an exception (full attention, no rotary positions): the last of every N.
        large: number of blocks of the model of 27 B, in which llama.cpp scales attention by hidden size / heads.
        table: llama.cpp divides rotary frequencies by a table.
        partial: transformers' class can rotate a part of each head.
        constants: further GGUF keys that it asks for, with their values.
        epsilon: GGUF key of the norms' epsilon.
        differs: blocks may have different shapes.
        whole: heads of queries, or also those of keys and values, must be together as wide as the model. If a norm
            takes all of them together ("kv_heads"), none may be added.
        counts: GGUF key → key of config.json with a whole number.
        own_keys: every head of queries has one of keys and values.
        widths: GGUF key that says how many columns each expert, or all shared ones, have → key of config.json; "" if
            that follows from others.
        hybrid: blocks without attention have another mixer of tokens, and the file says which by no heads of keys and
            values ("kv_heads") or by how often attention comes ("interval").
        state_space: keys of config.json with the sizes of the Mamba 2 that blocks have.
        factors: module → keys of config.json with what its weights are multiplied by; behind a dot the place in a list,
            behind a stroke what llama.cpp itself multiplies by: a number, or "scale" for that of attention.
        row_factors: key of config.json with a factor for each part of what the input projection of Mamba 2 makes.
        single: a block is attention, Mamba, an MLP, or experts, and nothing else.
        linear: tensor of blocks whose attention is linear, and whose projections have the names of attention.
        same: key of config.json → key that has the same value.
        computed: tensors of a block that follow from config.json.
        attends: how config.json says which blocks of a hybrid have attention: a kind for each block, a list of these
            blocks, or a period and an offset, which also say which have experts. "never": no block has any.
        unrotated: there are no rotary positions.
        switch: key of config.json that is "rope" if there are rotary positions; the file says so in a key of its own.
        gated: queries come with a gate, head by head in one module.
        sections: the file says which rotary pairs are for time, height and width, which in a text are all the same: by
            turns, where llama.cpp rotates none that config.json leaves over, or as it is "stated" there.
        leading: key of config.json that says how many blocks have no experts, if the first have none, or which
            ("mlp_layer_types").
        dense_width: key of config.json that says how many columns blocks without experts have.
        halves: tensor with rows of gate and of up → the two tensors that it is split into.
        alternating: rows of gate and of up take turns in it.
        joined: rows of gate and of up are one tensor there, all of gate first.
        layers: module beside the embedding that holds the blocks.
        wholes: types of models that also see, of which it computes the part that generates text.
        alone: type of a model that generates text by itself and computes the same; "" if its own does.
        latent: keys and values of all heads are made of one latent vector of a token (MLA), by two matrices of which
            one is multiplied into queries ("apart"), or by one as it is stored ("whole").
        scalars: tensor of a block with one number → GGUF key, as it stands, that lists these numbers of all blocks.
        bases: key of config.json with the base of rotary positions in each block, 0 where there are none.
        rotary: GGUF key → key of config.json's rope_parameters with a number, if YaRN scales positions.
        shares: the last blocks may read keys and values that others made, and values may be the keys.
        owners: how many blocks have their own where others read them; 0: the file says it.
        sparse: so many of the first blocks keep the largest twentieth of their columns, for each token.
        first: the exception of `pattern` is the first of every N.
        apart: heads, of queries or of keys and values, may differ in number between blocks, and columns may not.
        local: rotary positions of blocks with a window have a base of their own, or also other rows of heads ("rows").
        value_rows: key of config.json with the rows of each head of values, if they are not those of keys.
        shared_width: key of config.json with the columns of the shared expert, of which each other has as many.
        kinds: of attention, of blocks without and with experts.
        indexers: key of config.json that says which blocks have an indexer of their own ("full"), if not all have.
        unsunk: the family has no sinks of attention, so that the file gets some that draw nothing.
        unnormed: with so many experts llama.cpp norms no queries and keys, and with others it does.
        fused: module that makes queries, keys and values at once, which a file has in one tensor, too: all queries,
            then all keys, then all values.
        grouped: in the checkpoint each head of keys stands behind the queries that share it, and its values behind it.
        flags: GGUF key → key of config.json that is true or false.
        context: key of config.json with the most tokens of a text.
        gelu: key of config.json with the activation, which llama.cpp computes as GELU by tanh and looks up in a table;
            "erf" or "tanh": what its class always computes.
        encodes: it makes hidden states of a text, of which all tokens see each other, and generates none. Names of its
            modules are those of the base model.
        stacked: it is an encoder with a decoder behind it, or such an encoder (`stacks`); `block` says nothing.
        named_as: another architecture, whose table in gguf-py is used if that has none for this one.
    """

    name: str
    model_type: str
    others: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    neighbours: bool = False
    halved: bool = False
    norm_offset: int = 0
    values: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, float | None] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    biases: frozenset[str] | None = None
    window: Literal["", "any", "some", "pattern"] = ""
    pattern: int | None = None
    large: int | None = None
    table: bool = False
    partial: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    epsilon: str = "layer_norm_rms_epsilon"
    differs: bool = False
    whole: Literal["", "heads", "kv_heads"] = ""
    counts: Mapping[str, str] = field(default_factory=dict)
    own_keys: bool = False
    widths: Mapping[str, str] = field(default_factory=dict)
    hybrid: Literal["", "kv_heads", "interval"] = ""
    state_space: StateSpaceKeys | None = None
    factors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    row_factors: str = ""
    single: bool = False
    linear: str = ""
    same: Mapping[str, str] = field(default_factory=dict)
    computed: frozenset[str] = frozenset()
    attends: Literal["layer_types", "attn_layer_indices", "periods", "never"] = "layer_types"
    unrotated: bool = False
    switch: str = ""
    gated: bool = False
    sections: Literal["", "turns", "stated"] = ""
    leading: str = ""
    dense_width: str = "intermediate_size"
    halves: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    alternating: bool = False
    joined: bool = False
    layers: str = "layers"
    wholes: tuple[str, ...] = ()
    alone: str = ""
    latent: Literal["", "apart", "whole"] = ""
    scalars: Mapping[str, str] = field(default_factory=dict)
    bases: str = ""
    rotary: Mapping[str, str] = field(default_factory=dict)
    shares: bool = False
    owners: int = 0
    sparse: int = 0
    first: bool = False
    apart: bool = False
    local: Literal["", "base", "rows"] = ""
    value_rows: str = ""
    shared_width: str = ""
    kinds: tuple[str, ...] = ()
    indexers: str = ""
    unsunk: bool = False
    unnormed: int = 0
    fused: str = ""
    grouped: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)
    context: str = "max_position_embeddings"
    gelu: str = ""
    encodes: bool = False
    stacked: bool = False
    named_as: str = ""

    @cached_property
    def block(self) -> Mapping[str, str]:
        """Module of a block in transformers → tensor in GGUF, without "blk.N." and ".weight" or ".bias".

        Those of other families are among them. A tensor that is no weight or bias of a module has its whole name, and
        so has what it becomes.
        """
        return {**named_by_gguf(self.named_as or self.name), **(QKV if self.joins else {}), **self.others}

    @property
    def embedding(self) -> str:
        """The module of the embedding, which stands beside the blocks."""
        return next(module for module, tensor in self.outer.items() if tensor == "token_embd")

    @property
    def head(self) -> str:
        """The module of the head, of which a file has no tensor if it is the embedding."""
        return next(module for module, tensor in self.outer.items() if tensor == "output")

    @property
    def joins(self) -> bool:
        """Whether a file has queries, keys and values in one tensor."""
        return bool(self.fused) or self.name == "openelm"

    @property
    def experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return "expert_count" in self.counts

    @property
    def delta_heads(self) -> bool:
        """Whether heads of linear attention come in groups, which have orders of their own."""
        return "ssm.group_count" in self.counts

    @property
    def channels(self) -> bool:
        """Whether it has Mamba of the first kind, whose channels have states of their own."""
        return "ssm_x" in self.block.values()

    @property
    def channels_alone(self) -> bool:
        """Whether blocks have nothing else. Channels are then their columns, twice as many as the model is wide."""
        return self.channels and self.attends == "never"

    def added_to(self, tensor: str) -> int:
        """Return what is added to a tensor: `norm_offset` to norms, but for those of linear attention."""
        is_norm = tensor.endswith("norm.weight") and not tensor.startswith("linear_attn.")
        return self.norm_offset if is_norm else 0

    def query_scalar(self, blocks: int, hidden: int, heads: int, head_dim: int) -> int:
        """Return the number by whose root llama.cpp divides products of queries and keys."""
        return hidden // heads if blocks == self.large else head_dim


_SILU = {"hidden_act": SILU}
_GELU = {"hidden_activation": (*TANH_GELU, None)}
_NONE: frozenset[str] = frozenset()
_INPUTS = frozenset({QUERY, KEY, VALUE})
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

ALIBI = "attention.max_alibi_bias"
"""Key of the largest slope of what is subtracted from products of queries and keys, the more the farther apart."""
DELTA_HEADS = "ssm.time_step_rank"
"""Key of the heads of values of a gated delta net; of the rank of time steps in Mamba of the first kind."""
SHARED_WIDTH = "expert_shared_feed_forward_length"
EVERY = "interleave_moe_layer_step"
"""Key that says how often a block has experts, if not all have: the last of every so many."""
INDEXED = "attention.indexer.top_k"
"""Key that says how many tokens another sees, which an indexer chooses."""
_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_WIDTHS = _WIDTH | {SHARED_WIDTH: "shared_expert_intermediate_size"}
_GRANITE = {
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
}
_GRANITE_ABSENT = {"residual_scale": 1.0, "embedding_scale": 1.0, "attention.scale": None}
_GRANITE_EXPERTS = {
    "block_sparse_moe.gate_linear": "ffn_gate_exps",
    "block_sparse_moe.up_linear": "ffn_up_exps",
    "shared_mlp.gate_linear": "ffn_gate_shexp",
    "shared_mlp.up_linear": "ffn_up_shexp",
}
_GRANITE_HALVES = {
    f"{module}.input_linear.weight": (f"{module}.gate_linear.weight", f"{module}.up_linear.weight")
    for module in ("block_sparse_moe", "shared_mlp")
}
_GRANITE_DENSE = {
    "shared_mlp.gate_linear": "ffn_gate",
    "shared_mlp.up_linear": "ffn_up",
    "shared_mlp.output_linear": "ffn_down",
}
_MAMBA = StateSpaceKeys("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")
_SINKS = {"self_attn.sinks": "attn_sinks.weight"}
_OSS_ONLY: dict[str, tuple[Any, ...]] = {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}
_EXPERT_HALVES = {"mlp.experts.gate_up_proj.weight": ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight")}
_OSS_HALVES = {
    f"mlp.experts.gate_up_proj.{kind}": (f"mlp.experts.gate_proj.{kind}", f"mlp.experts.up_proj.{kind}")
    for kind in ("weight", "bias")
}
_ROUTED_BESIDE = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_proj": "ffn_gate_exps",
    "experts.up_proj": "ffn_up_exps",
}
"""Experts of a Gemma 4, beside the MLP of each block."""
_GEMMA4_HALVES = {"experts.gate_up_proj.weight": ("experts.gate_proj.weight", "experts.up_proj.weight")}
_CHOSEN = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_SIGMOID = {"expert_gating_func": int(ExpertGatingFuncType.SIGMOID)}
_SIGMOID_SUM = _SIGMOID | {"expert_weights_norm": True}
_SCALED = {"expert_weights_scale": "routed_scaling_factor"}
_LEADING = "first_k_dense_replace"
_ONE_GROUP: dict[str, tuple[Any, ...]] = {"n_group": (1,), "topk_group": (1,)}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_INTERLEAVED: dict[str, tuple[Any, ...]] = {"rope_interleave": (True,)}
_ROUTED_COUNTS = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
}
_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    DELTA_HEADS: "linear_num_value_heads",
}
_SHARED_KEYS = {"attention.shared_kv_layers": "num_kv_shared_layers"}
_PER_LAYER_WIDTH = {"embedding_length_per_layer_input": "hidden_size_per_layer_input"}
_LFM2 = OUTER | {"model.embedding_norm": "token_embd_norm"}
_INDEXER_COUNTS = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    INDEXED: "index_topk",
}
_XIELU = {f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")}
_ENCODES: dict[str, tuple[Any, ...]] = {
    "hidden_act": (*TANH_GELU, "gelu"),
    "position_embedding_type": ("absolute", None),
}
_UNTIED: dict[str, tuple[Any, ...]] = {"tie_word_embeddings": (False,)}
_EXPERTS_ALONE: dict[str, tuple[Any, ...]] = {"mlp_only_layers": ([], None), "decoder_sparse_step": (1,)}

_FINAL_LAYERNORM = {"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"}
_BACKBONE = {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"}
NORMED = "ssm.dt_b_c_rms"
"""Key that says that B, C and time steps of a Mamba are normed, without weights."""


def _mamba(model_type: str, **more: Any) -> Architecture:
    """Return an architecture of blocks that are a Mamba and nothing else."""
    name = {"falcon_mamba": "mamba"}.get(model_type, model_type)
    needed = dict.fromkeys(("feed_forward_length", "attention.head_count", "attention.head_count_kv"), 0)
    return Architecture(name, model_type, outer=_BACKBONE, single=True, attends="never",
                        biases=frozenset({"mixer.conv1d", "mixer.dt_proj"}), unrotated=True, only=_SILU | {
                        "expand": (2,), "use_bias": (False,), "use_conv_bias": (True,)},
                        constants=needed | more.pop("constants", {}), **more)  # fmt: skip


def _granite_4(name: str, names: Mapping[str, str], **mixture: Any) -> Architecture:
    """Return an architecture of Granite 4: with Mamba 2 in some blocks, or with attention in all."""
    only, biases, more = dict[str, tuple[Any, ...]](), frozenset(ATTENTION), dict[str, Any]()
    if name == "granitehybrid":
        biases |= {"mamba.conv1d"}
        only, more = {"mamba_conv_bias": (True,), "mamba_expand": (2,)}, {"hybrid": "kv_heads", "state_space": _MAMBA}
    if name == "granitemoe":
        only = {"position_embedding_type": ("rope",)}
    else:
        more["switch"] = "position_embedding_type"
    if not mixture:
        only, more["widths"] = only | {"num_local_experts": (0,)}, {"feed_forward_length": "shared_intermediate_size"}
    return Architecture(name, "granitemoehybrid", names, neighbours=True, only=_SILU | only, biases=biases, table=True,
                        absent=_GRANITE_ABSENT, values=_GRANITE, halves=_GRANITE_HALVES, **more, **mixture)  # fmt: skip


_NEMOTRON_H = {
    "mixer.out_proj": "ssm_out",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
}


def _nemotron_h(name: str, **experts: Any) -> Architecture:
    """Return an architecture of Nemotron-H: each block is only Mamba 2, attention, or an MLP or experts."""
    only = experts.pop("only", {}) | _UNTIED | {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": SILU}
    only["use_conv_bias"] = (True,)
    biases = frozenset(f"mixer.{each}_proj" for each in ("q", "k", "v", "o", "up", "down")) | {"mixer.conv1d"}
    keys = StateSpaceKeys("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim")
    # llama.cpp asks for the epsilon of either kind of norms, and computes with that of RMS norms.
    values = {"attention.layer_norm_epsilon": "layer_norm_epsilon"} | experts.pop("values", {})
    return Architecture(name, "nemotron_h", _NEMOTRON_H, _BACKBONE, only=only, biases=biases, values=values,
                        differs=True, hybrid="kv_heads", single=True, unrotated=True, state_space=keys,
                        **experts)  # fmt: skip


# llama.cpp looks for this norm by a name without ".weight".
_FALCON_H1 = {"pre_ff_layernorm.weight": "ffn_norm"}
_FALCON_FACTORS = {
    "model.embed_tokens": ("embedding_multiplier",),
    "lm_head": ("lm_head_multiplier",),
    QUERY: ("attention_in_multiplier",),
    KEY: ("attention_in_multiplier", "key_multiplier"),
    VALUE: ("attention_in_multiplier",),
    OUTPUT: ("attention_out_multiplier",),
    "mamba.in_proj": ("ssm_in_multiplier",),
    "mamba.out_proj": ("ssm_out_multiplier",),
    "feed_forward.gate_proj": ("mlp_multipliers.0",),
    "feed_forward.down_proj": ("mlp_multipliers.1",),
}

_WORDS = {"transformer.wte": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output"}
_TANH_GELU = ("gelu_new", *TANH_GELU)
_GPT2_ONLY = {"activation_function": _TANH_GELU, "scale_attn_weights": (True,), "add_cross_attention": (False,)}
_GELU_OF_EITHER_KIND = ("gelu", *TANH_GELU)

ARCHITECTURES = (
    Architecture("llama", "llama", neighbours=True, only=_SILU, table=True),
    Architecture("llama", "mistral", neighbours=True, only=_SILU, table=True),
    Architecture("qwen2", "qwen2", only=_SILU | {"use_sliding_window": (False,)}, biases=_INPUTS),
    Architecture("qwen3", "qwen3", only=_SILU | {"use_sliding_window": (False,)}, biases=_NONE),
    Architecture("seed_oss", "seed_oss", only=_SILU, biases=_INPUTS),
    Architecture("smollm3", "smollm3", neighbours=True, only=_SILU | {"use_sliding_window": (False,)}, biases=_NONE,
                 pattern=4),
    Architecture("gemma", "gemma", norm_offset=1, only=_GELU, biases=_NONE),
    Architecture("gemma2", "gemma2", norm_offset=1, values=_SOFTCAPS, only=_GELU,
                 biases=_NONE, window="some", pattern=2, large=46,
                 absent={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    Architecture("gemma3", "gemma3_text", norm_offset=1, only=_GELU |
                 {"attn_logit_softcapping": (None,)}, biases=_NONE, window="any", pattern=6, large=62,
                 values={"final_logit_softcapping": "final_logit_softcapping"},
                 absent={"final_logit_softcapping": None}),
    Architecture("gemma3n", "gemma3n_text", outer=PER_LAYER_OUTER | ALTUP_OUTER, biases=_NONE, window="some",
                 pattern=5, shares=True, owners=20, sparse=10,
                 only={"hidden_activation": TANH_GELU, "final_logit_softcapping": (30.0,),
                       "altup_num_inputs": (4,), "altup_active_idx": (0,), "altup_correct_scale": (True,),
                       "laurel_rank": (64,), "hidden_size_per_layer_input": (256,)},
                 values={"final_logit_softcapping": "final_logit_softcapping"},
                 counts=_SHARED_KEYS | _PER_LAYER_WIDTH | {
                     "altup.num_inputs": "altup_num_inputs", "altup.active_idx": "altup_active_idx"}),
    *(Architecture("gemma4", each, experts, PER_LAYER_OUTER, biases=_NONE, window="some", shares=True,
                   differs=True, values={"final_logit_softcapping": "final_logit_softcapping"},
                   absent={"final_logit_softcapping": None}, halves=halves, widths=widths, constants=constants,
                   counts=_SHARED_KEYS | counts, only=only | {
                       "hidden_activation": TANH_GELU, "use_bidirectional_attention": (None, "vision")})
      for each, experts, halves, counts, widths, constants, only in (
          ("gemma4_text", {}, {}, _PER_LAYER_WIDTH, {}, {}, {"enable_moe_block": (False,)}),
          ("gemma4_text", _ROUTED_BESIDE, _GEMMA4_HALVES, _PER_LAYER_WIDTH | _CHOSEN | {
              "expert_used_count": "top_k_experts"}, _WIDTH, {}, {"enable_moe_block": (True,)}),
          ("gemma4_unified_text", {}, {}, {}, {}, dict.fromkeys(_PER_LAYER_WIDTH, 0), {}),
      )),
    Architecture("phi3", "phi3", joined=True, halves={FUSED_GATES: GATES},
                 only=_SILU, biases=_NONE, constants={"attention.sliding_window": 0}, partial=True,
                 fused="self_attn.qkv_proj"),
    Architecture("olmo2", "olmo2", only=_SILU, biases=_NONE),
    Architecture("olmo2", "olmo3", only=_SILU, biases=_NONE, window="any", pattern=4),
    Architecture("granite", "granite", neighbours=True, only=_SILU, table=True, absent=_GRANITE_ABSENT,
                 values=_GRANITE),
    Architecture("starcoder2", "starcoder2", only={"hidden_act": TANH_GELU}, epsilon="layer_norm_epsilon"),
    Architecture("command-r", "cohere", only=_SILU, biases=_NONE,
                 values={"logit_scale": "logit_scale"}, absent={"logit_scale": 1.0}, epsilon="layer_norm_epsilon"),
    Architecture("ernie4_5", "ernie4_5", only=_SILU | {"use_bias": (False,)}, biases=_NONE),
    Architecture("stablelm", "stablelm", only=_SILU | {"use_parallel_residual": (False,), "qk_layernorm": (False,)},
                 biases=_INPUTS | {"input_layernorm", "post_attention_layernorm", "model.norm"},
                 epsilon="layer_norm_epsilon", constants={"use_parallel_residual": False}, partial=True),
    Architecture("nemotron", "nemotron", norm_offset=1, only={"hidden_act": ("relu2",)}, epsilon="layer_norm_epsilon",
                 partial=True),
    Architecture("arcee", "arcee", neighbours=True, only={"hidden_act": ("relu2",)}, biases=_NONE),
    Architecture("cohere2", "cohere2", only=_SILU, biases=_NONE,
                 values={"logit_scale": "logit_scale"}, absent={"logit_scale": None}, epsilon="layer_norm_epsilon",
                 window="some", pattern=4),
    Architecture("exaone4", "exaone4", only=_SILU | {"sliding_window": (None,)}, biases=_NONE, table=True,
                 whole="heads"),
    Architecture("glm4", "glm4", only=_SILU, biases=_INPUTS, partial=True, joined=True,
                 halves={FUSED_GATES: GATES}),
    Architecture("hunyuan-dense", "hunyuan_v1_dense", only=_SILU, biases=_NONE),
    Architecture("llama", "mixtral", neighbours=True, only=_SILU, biases=_NONE,
                 counts=_CHOSEN | {"expert_count": "num_local_experts"}),
    Architecture("qwen2moe", "qwen2_moe", biases=_INPUTS, only=_SILU |
                 _EXPERTS_ALONE | {"norm_topk_prob": (False,), "use_sliding_window": (False,)},
                 counts=_CHOSEN, widths=_WIDTHS),
    Architecture("qwen3moe", "qwen3_moe", biases=_NONE, only=_SILU |
                 _EXPERTS_ALONE | {"norm_topk_prob": (True,), "use_sliding_window": (False,)},
                 counts=_CHOSEN, widths=_WIDTH),
    Architecture("olmoe", "olmoe", biases=_NONE, only=_SILU |
                 {"norm_topk_prob": (False,), "clip_qkv": (None,)}, counts=_CHOSEN, whole="kv_heads"),
    *(Architecture("granitemoe", each, _GRANITE_EXPERTS, neighbours=True, only=_SILU, biases=_NONE, table=True,
                   absent=_GRANITE_ABSENT, values=_GRANITE, halves=_GRANITE_HALVES, widths=widths,
                   counts=_CHOSEN | {"expert_count": "num_local_experts"})
      for each, widths in (("granitemoe", {}), ("granitemoeshared", {SHARED_WIDTH: "shared_intermediate_size"}))),
    *(_granite_4(name, _GRANITE_DENSE) for name in ("granitehybrid", "granite")),
    *(_granite_4(name, _GRANITE_EXPERTS, widths={SHARED_WIDTH: "shared_intermediate_size"},
                 counts=_CHOSEN | {"expert_count": "num_local_experts"}) for name in ("granitehybrid", "granitemoe")),
    Architecture("falcon-h1", "falcon_h1", _FALCON_H1, _FINAL_LAYERNORM,
                 biases=frozenset({"mamba.conv1d"}), only=_SILU | {"mamba_conv_bias": (True,)},
                 state_space=_MAMBA._replace(columns="mamba_d_ssm"),
                 factors=_FALCON_FACTORS, row_factors="ssm_multipliers"),
    _nemotron_h("nemotron_h"),
    _nemotron_h("nemotron_h_moe", values=_SCALED,
                only=_ONE_GROUP | {"norm_topk_prob": (True,), "n_shared_experts": (1,)}, constants={
                "expert_weights_norm": True, "expert_shared_count": 1}, absent={"moe_latent_size": None},
                counts=_CHOSEN | {"expert_count": "n_routed_experts", "moe_latent_size": "moe_latent_size"},
                widths=_WIDTH | {SHARED_WIDTH: "moe_shared_expert_intermediate_size"}),
    Architecture("gpt-oss", "gpt_oss", {"mlp.experts.down_proj.shift": "ffn_down_exps.bias"},
                 only=_SILU | _OSS_ONLY, window="some", pattern=2,
                 counts=_CHOSEN | {"expert_count": "num_local_experts"}, halves=_OSS_HALVES, alternating=True,
                 widths=dict.fromkeys(_WIDTH, "intermediate_size")),
    Architecture("lfm2", "lfm2", outer=_LFM2, only={"conv_bias": (False,)}, biases=_NONE,
                 whole="heads", counts={"shortconv.l_cache": "conv_L_cache"}, hybrid="kv_heads"),
    Architecture("lfm2moe", "lfm2_moe", outer=_LFM2, biases=_NONE, whole="heads", only={
                 "conv_bias": (False,), "norm_topk_prob": (True,), "routed_scaling_factor": (1.0,),
                 "use_expert_bias": (True,)}, counts=_CHOSEN | {"shortconv.l_cache": "conv_L_cache"},
                 widths=_WIDTH, constants=_SIGMOID, hybrid="kv_heads",
                 leading="num_dense_layers"),
    Architecture("qwen3next", "qwen3_next", biases=_NONE,
                 norm_offset=1, only=_SILU | _EXPERTS_ALONE | {"norm_topk_prob": (True,)}, counts=_CHOSEN | _DELTA,
                 widths=_WIDTHS, partial=True, hybrid="interval", gated=True),
    Architecture("qwen35", "qwen3_5_text", biases=_NONE, norm_offset=1,
                 only=_SILU, counts=_DELTA, partial=True, hybrid="interval", gated=True, sections="turns"),
    Architecture("qwen35moe", "qwen3_5_moe_text", biases=_NONE,
                 norm_offset=1, only=_SILU, counts=_CHOSEN | _DELTA, widths=_WIDTHS, partial=True,
                 hybrid="interval", gated=True, sections="turns"),
    Architecture("ernie4_5-moe", "ernie4_5_moe", {
                 "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"}, only=_SILU | {
                 "moe_layer_interval": (1,)}, biases=_NONE, leading="moe_layer_start_index", counts={
                 "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
                 "expert_shared_count": "moe_num_shared_experts"}, widths=_WIDTH | {SHARED_WIDTH: ""},
                 constants={"interleave_moe_layer_step": 1}),
    Architecture("glm4moe", "glm4_moe", biases=_INPUTS, only=_SILU | _ONE_GROUP | {
                 "norm_topk_prob": (True,)}, partial=True, leading=_LEADING, values=_SCALED,
                 counts=_CHOSEN | _ROUTED_COUNTS, widths=_WIDTH, constants=_SIGMOID_SUM),
    Architecture("dots1", "dots1", biases=_NONE, leading=_LEADING, values=_SCALED,
                 only=_SILU | _ONE_GROUP | {"norm_topk_prob": (True,)}, counts=_CHOSEN | _ROUTED_COUNTS,
                 widths=_WIDTH, constants=_SIGMOID_SUM, own_keys=True),
    Architecture("mistral3", "ministral3", neighbours=True, only=_SILU, biases=_NONE,
                 rotary={"attention.temperature_scale": "llama_4_scaling_beta"}),
    *(Architecture("apertus", each, biases=_NONE, only=only | _UNTIED | {"hidden_act": ("xielu",)}, table=True,
                   scalars=_XIELU)
      for each, only in (("apertus", {}), ("apertus1p5_text", {"output_vocab_size": (None,)}))),
    Architecture("afmoe", "afmoe", biases=_NONE,
                 window="pattern", pattern=4, leading="num_dense_layers", only=_SILU | {"mup_enabled": (True,)},
                 values={"expert_weights_scale": "route_scale"}, widths=_WIDTH, constants=_SIGMOID_SUM,
                 counts=_CHOSEN | {"expert_shared_count": "num_shared_experts"}),
    Architecture("minimax-m2", "minimax_m2", {
                 "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"}, only=_SILU | _UNTIED, biases=_NONE,
                 partial=True, counts=_CHOSEN | {"expert_count": "num_local_experts"}, constants=_SIGMOID,
                 widths=dict.fromkeys(_WIDTH, "intermediate_size")),
    Architecture("hunyuan-moe", "hunyuan_v1_moe", only=_SILU, biases=_NONE,
                 counts=_CHOSEN | {"expert_used_count": "moe_topk"},
                 widths=dict.fromkeys((*_WIDTH, SHARED_WIDTH), "intermediate_size")),
    Architecture("exaone-moe", "exaone_moe", {
                 "mlp.e_score_correction_bias": "exp_probs_b.bias"}, biases=_NONE, window="some", pattern=4,
                 leading=_LEADING, values=_SCALED, only=_SILU | _ONE_GROUP | _UNTIED | {"norm_topk_prob": (True,)},
                 counts=_CHOSEN | {"expert_shared_count": "num_shared_experts"}, widths=_WIDTH | {SHARED_WIDTH: ""},
                 constants=_SIGMOID_SUM),
    Architecture("mellum", "mellum", named_as="dots1", biases=_NONE, window="any", pattern=4, only=_SILU |
                 _UNTIED | {"norm_topk_prob": (True,)}, counts=_CHOSEN | {"expert_count": "num_local_experts"},
                 widths=_WIDTH),
    Architecture("hy_v3", "hy_v3", {"mlp.expert_bias": "exp_probs_b"}, named_as="dots1", biases=_NONE,
                 only=_SILU, leading="mlp_layer_types",
                 values={"expert_weights_scale": "router_scaling_factor"}, constants=_SIGMOID_SUM,
                 counts=_CHOSEN | {"expert_shared_count": "num_shared_experts"}, widths=_WIDTH | {SHARED_WIDTH: ""}),
    Architecture("cohere2moe", "cohere2_moe", named_as="dots1", biases=_NONE, window="some",
                 values={"logit_scale": "logit_scale"}, leading="mlp_layer_types",
                 dense_width="prefix_dense_intermediate_size", epsilon="layer_norm_epsilon", only=_SILU | {
                 "rms_norm_eps": (None,), "expert_selection_fn": ("sigmoid",), "norm_topk_prob": (True,),
                 "shared_expert_combination_strategy": ("average",), "prefix_dense_sliding_window_pattern": (1,)},
                 counts=_CHOSEN | {"expert_shared_count": "num_shared_experts"}, constants=_SIGMOID_SUM,
                 widths=dict.fromkeys(_WIDTH, "intermediate_size") | {SHARED_WIDTH: ""}),
    Architecture("glm4moe", "solar_open", biases=_NONE, only=_SILU | _ONE_GROUP | {"norm_topk_prob": (True,)},
                 values=_SCALED, counts=_CHOSEN | _ROUTED_COUNTS, widths=_WIDTH,
                 constants=_SIGMOID_SUM | {"leading_dense_block_count": 0}),
    Architecture("granite_swa", "granite_swa", _SINKS, named_as="llama", neighbours=True,
                 only=_SILU, table=True, absent=_GRANITE_ABSENT, values=_GRANITE, window="some",
                 bases="layer_rope_theta"),
    *(Architecture("llama", each, neighbours=True, only=_SILU)
      for each in ("iquestcoder", "internlm3", "emu3_text_model")),
    Architecture("jais2", "jais2", only={"hidden_act": ("relu2",), "attention_bias": (True,), "mlp_bias": (True,)},
                 epsilon="layer_norm_epsilon"),
    Architecture("olmo", "olmo", neighbours=True, only=_SILU, biases=_NONE, whole="heads",
                 epsilon="layer_norm_epsilon", values={"attention.clamp_kqv": "clip_qkv"},
                 absent={"attention.clamp_kqv": None}),
    Architecture("deepseek2", "deepseek_v2", biases=_NONE, latent="apart",
                 leading=_LEADING, only=_SILU | {"topk_method": ("greedy",), "norm_topk_prob": (False,)},
                 values=_SCALED, absent={"expert_gating_func": int(ExpertGatingFuncType.SOFTMAX)},
                 counts=_CHOSEN | _ROUTED_COUNTS, widths=_WIDTH,
                 constants={"expert_gating_func": int(ExpertGatingFuncType.SOFTMAX)}),
    *(Architecture("deepseek2", each, biases=_NONE, latent="apart", leading=leading,
                   only=_SILU | _INTERLEAVED | {"norm_topk_prob": (True,)}, values=_SCALED,
                   counts=_CHOSEN | _ROUTED_COUNTS | _GROUPS, widths=_WIDTH, constants=_SIGMOID_SUM)
      for each, leading in (("deepseek_v3", _LEADING), ("glm4_moe_lite", "mlp_layer_types"), ("sarvam_mla", _LEADING))),
    Architecture("deepseek2", "youtu", biases=_NONE, latent="apart", leading=_LEADING,
                 only=_SILU | _INTERLEAVED, constants={"expert_shared_count": 0},
                 widths=dict.fromkeys(_WIDTH, "")),
    Architecture("qwen2vl", "qwen2", only=_SILU | {"use_sliding_window": (False,)}, biases=_INPUTS, sections="stated",
                 whole="heads", wholes=("qwen2_vl", "qwen2_5_vl")),
    Architecture("qwen3vl", "qwen3", only=_SILU | {"use_sliding_window": (False,)}, biases=_NONE,
                 sections="turns", wholes=("qwen3_vl",)),
    Architecture("qwen3vlmoe", "qwen3_vl_moe_text", biases=_NONE, only=_SILU |
                 _EXPERTS_ALONE | {"norm_topk_prob": (True, None), "use_sliding_window": (False, None)},
                 counts=_CHOSEN, widths=_WIDTH, sections="turns", wholes=("qwen3_vl_moe",), halves=_EXPERT_HALVES,
                 alone="qwen3_moe"),
    Architecture("glm4", "glm4v_text", only=_SILU, biases=_INPUTS, partial=True, joined=True, sections="stated",
                 halves={FUSED_GATES: GATES}, halved=True, alone="glm4"),
    Architecture("glm4moe", "glm4v_moe_text", biases=_INPUTS, only=_SILU | _ONE_GROUP | {
                 "norm_topk_prob": (True,)}, partial=True, leading=_LEADING, values=_SCALED, sections="stated",
                 counts=_CHOSEN | _ROUTED_COUNTS, widths=_WIDTH, constants=_SIGMOID_SUM, alone="glm4_moe"),
    Architecture("phi2", "phi", outer=_FINAL_LAYERNORM, partial=True, whole="heads",
                 only=_UNTIED | {"hidden_act": TANH_GELU, "qk_layernorm": (False,)}, epsilon="layer_norm_epsilon"),
    Architecture("chatglm", "glm", joined=True, halves={FUSED_GATES: GATES},
                 only=_SILU, biases=_INPUTS, partial=True, whole="heads"),
    Architecture("granite_swa", "granitemoe_swa", _SINKS | {
                 "block_sparse_moe.router": "ffn_gate_inp", "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
                 "block_sparse_moe.experts.up_proj": "ffn_up_exps",
                 "block_sparse_moe.experts.down_proj": "ffn_down_exps"}, named_as="llama", neighbours=True,
                 biases=_NONE, table=True, only=_SILU | {"shared_intermediate_size": (0,)}, absent=_GRANITE_ABSENT,
                 values=_GRANITE, window="some", bases="layer_rope_theta",
                 counts=_CHOSEN | {"expert_count": "num_local_experts"},
                 halves={"block_sparse_moe.experts.gate_up_proj.weight": (
                 "block_sparse_moe.experts.gate_proj.weight", "block_sparse_moe.experts.up_proj.weight")}),
    *(Architecture("jamba", "jamba", outer=_FINAL_LAYERNORM, attends="periods", hybrid="kv_heads",
                   biases=frozenset({"mamba.conv1d", "mamba.dt_proj"}), unrotated=True, whole="heads",
                   counts=experts | {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
                   DELTA_HEADS: "mamba_dt_rank"}, only=_SILU | {
                   "mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "mamba_expand": (2,)})
      for experts in ({}, _CHOSEN)),
    Architecture("minimax-01", "minimax", {"self_attn.norm": "attn_norm_2",
                 "self_attn.qkv_proj": "attn_qkv", "self_attn.output_gate": "attn_gate",
                 "self_attn.out_proj": "attn_output"}, named_as="minimax-m2", biases=_NONE, hybrid="interval",
                 linear="attn_norm_2", computed=frozenset(
                     f"self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
                 values={"residual_scale": "full_attn_alpha_factor"}, same=dict.fromkeys(
                     ("linear_attn_alpha_factor", "mlp_alpha_factor"), "full_attn_alpha_factor"), only=_SILU | {
                     f"{part}_beta_factor": (1,) for part in ("full_attn", "linear_attn", "mlp")} | {
                     "rope_parameters.partial_rotary_factor": (1.0, None)},
                 counts=_CHOSEN | {"expert_count": "num_local_experts"}),
    *(_mamba(each, constants=normed, counts={
        "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", DELTA_HEADS: "time_step_rank"})
      for each, normed in (("mamba", {}), ("falcon_mamba", {NORMED: True}))),
    _mamba("mamba2", state_space=StateSpaceKeys(
        "conv_kernel", "state_size", "n_groups", "num_heads", "head_dim")),
    Architecture("granitehybrid", "bamba", outer=_FINAL_LAYERNORM, neighbours=True,
                 biases=frozenset(ATTENTION) | {"mamba.conv1d"},
                 partial=True, hybrid="kv_heads", attends="attn_layer_indices", state_space=_MAMBA, only=_SILU | {
                 "mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "mamba_expand": (2,), "mlp_bias": (False,)}),
    Architecture("kimi-linear", "kimi_linear", {"self_attn.dt_bias": "ssm_dt.bias"} | {
                 module.replace("mlp", "block_sparse_moe"): tensor for module, tensor in GATED.items()} | {
                 "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias"}, biases=_NONE, latent="apart",
                 linear="ssm_f_a", same={"linear_num_heads": "num_attention_heads"}, absent=dict.fromkeys(_GROUPS),
                 hybrid="kv_heads", unrotated=True, leading="mlp_layer_types", values=_SCALED,
                 only=_SILU | _UNTIED | {"norm_topk_prob": (True,), "q_lora_rank": (None,)},
                 widths=_WIDTH, constants=_SIGMOID, counts=_CHOSEN | _GROUPS | {
                 "expert_shared_count": "num_shared_experts", "ssm.conv_kernel": "linear_conv_kernel_dim",
                 "kda.head_dim": "linear_head_dim"}),
    Architecture("exaone", "exaone", outer=_WORDS, only=_SILU, biases=_NONE, table=True, layers="h"),
    Architecture("llama4", "llama4_text", biases=_NONE, table=True, pattern=4,
                 only=_SILU | {"attention_chunk_size": (8192,), "attn_temperature_tuning": (True,),
                       "floor_scale": (8192,), "attn_scale": (0.1,)}, unnormed=128, dense_width="intermediate_size_mlp",
                 counts=_CHOSEN | {"expert_count": "num_local_experts", EVERY: EVERY},
                 widths=dict.fromkeys(_WIDTH, "intermediate_size"), halves={
                 "feed_forward.experts.gate_up_proj.weight": (
                 "feed_forward.experts.gate_proj.weight", "feed_forward.experts.up_proj.weight")}),
    Architecture("minicpm3", "minicpm3", biases=_NONE, latent="whole", only=_SILU,
                 factors={"model.embed_tokens": ("scale_emb/12",), OUTPUT: ("scale_depth/1.4",),
                          "mlp.down_proj": ("scale_depth/1.4",), "lm_head": ("dim_model_base/256",)}),
    Architecture("llama", "helium", only=_SILU, whole="heads"),
    *(Architecture("granite_swa", each, _SINKS, named_as="llama", neighbours=True, only=_SILU,
                   table=True, window="some", constants={"logit_scale": 1.0}, unsunk=True)
      for each in ("cwm", "ministral")),
    *(Architecture(name, each, named_as="glm-dsa", latent="apart", leading=_LEADING,
                   biases=frozenset({"self_attn.indexer.k_norm"}), only=_SILU | {"norm_topk_prob": (True,)},
                   values=_SCALED, counts=_CHOSEN | _ROUTED_COUNTS | _GROUPS | _INDEXER_COUNTS, widths=_WIDTH,
                   constants=_SIGMOID_SUM, indexers=indexers)
      for name, each, indexers in (("deepseek32", "deepseek_v32", ""), ("glm-dsa", "glm_moe_dsa", "indexer_types"))),
    Architecture("laguna", "laguna", {"self_attn.g_proj": "attn_gate",
                 "mlp.experts.e_score_correction_bias": "exp_probs_b.bias"}, named_as="dots1", biases=_NONE,
                 window="any", pattern=4, first=True, apart=True, local="rows", partial=True,
                 leading="mlp_layer_types", only=_SILU | {
                 "moe_router_logit_softcapping": (0.0,), "moe_apply_router_weight_on_input": (False,)},
                 values={"expert_weights_scale": "moe_routed_scaling_factor"}, counts=_CHOSEN, widths=_WIDTHS,
                 constants=_SIGMOID_SUM),
    Architecture("mimo2", "mimo_v2_flash", biases=_NONE, window="some", apart=True,
                 local="base", partial=True, leading="mlp_layer_types", value_rows="v_head_dim", only=_SILU | _UNTIED |
                 _ONE_GROUP | {"norm_topk_prob": (True,), "routed_scaling_factor": (1.0,)},
                 values={"attention.value_scale": "attention_value_scale"}, absent={"attention.value_scale": None},
                 counts=_CHOSEN | {"expert_count": "n_routed_experts"}, widths=_WIDTH),
    Architecture("bailingmoe2", "sarvam_moe", outer={
                 "model.word_embeddings": "token_embd", "model.norm": "output_norm", "lm_head": "output"}, biases=_NONE,
                 partial=True, whole="heads", leading=_LEADING, values=_SCALED, widths=_WIDTH, constants=_SIGMOID_SUM,
                 only=_SILU | _UNTIED | {"norm_topk_prob": (True,), "use_qk_norm": (True,)},
                 counts=_CHOSEN | _ROUTED_COUNTS | _GROUPS, fused="attention.query_key_value"),
    Architecture("minimax-m3", "minimax_m3_vl_text", {
                 f"mlp.experts.{each}": f"ffn_{role}_exps" for each, role in (
                     ("w1", "gate"), ("w2", "down"), ("w3", "up"))} | {
                 f"self_attn.indexer.{each}": f"indexer.{each}" for each in ("q_proj", "k_proj", "q_norm", "k_norm")},
                 named_as="dots1", norm_offset=1, biases=_NONE, partial=True, leading="mlp_layer_types",
                 dense_width="dense_intermediate_size", shared_width="shared_intermediate_size", values=_SCALED,
                 kinds=("full_attention", "minimax_m3_sparse"), widths=dict.fromkeys(_WIDTH, "intermediate_size"),
                 only=_SILU | _UNTIED | _OSS_ONLY, constants=_SIGMOID_SUM | {"expert_shared_count": 1},
                 counts=_CHOSEN | _INDEXER_COUNTS | {
                     "expert_count": "num_local_experts", INDEXED: "index_topk_blocks",
                     "attention.indexer.block_size": "index_block_size",
                     "attention.indexer.local_blocks": "index_local_blocks"},
                 halves={f"mlp.{each}gate_up_proj.weight": (
                     f"mlp.{each}gate_proj.weight", f"mlp.{each}up_proj.weight")
                     for each in ("", "experts.", "shared_experts.")}),
    Architecture("granitemoe", "aria_text", {"mlp.experts.fc2": "ffn_down_exps"}, neighbours=True, only=_SILU,
                 biases=_NONE, table=True, constants={"logit_scale": 1.0}, widths={SHARED_WIDTH: ""},
                 counts={"expert_count": "moe_num_experts", "expert_used_count": "moe_topk"},
                 halves={"mlp.experts.fc1.weight": ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight")}),
    Architecture("glm4", "hyperclovax", {"post_attention_layernorm": "ffn_norm", "post_norm1": "post_attention_norm",
                 "post_norm2": "post_ffw_norm"}, neighbours=True, joined=True,
                 only=_SILU | {"use_post_norm": (True,), "mlp_bias": (False,)}, biases=_INPUTS, factors={
                 "model.embed_tokens": ("embedding_multiplier",), "lm_head": ("logits_scaling",),
                 QUERY: ("attention_multiplier/scale",), "post_norm1": ("residual_multiplier",),
                 "post_norm2": ("residual_multiplier",)}),
    Architecture("gpt2", "gpt2", outer=_WORDS | {"transformer.wpe": "position_embd"}, layers="h", whole="heads",
                 unrotated=True, only=_GPT2_ONLY | {"scale_attn_by_inverse_layer_idx": (False,)}, dense_width="n_inner",
                 epsilon="layer_norm_epsilon", fused="attn.c_attn", gelu="activation_function"),
    Architecture("gptneox", "gpt_neox", outer={
                 "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output"},
                 only=_UNTIED | {"hidden_act": _GELU_OF_EITHER_KIND, "attention_bias": (True,)}, partial=True,
                 whole="heads", flags={"use_parallel_residual": "use_parallel_residual"}, gelu="hidden_act",
                 epsilon="layer_norm_epsilon", fused="attention.query_key_value", grouped=True),
    Architecture("falcon", "falcon", outer={"transformer.word_embeddings": "token_embd",
                 "transformer.ln_f": "output_norm", "lm_head": "output"}, layers="h",
                 biases=frozenset({"input_layernorm", "ln_mlp", "ln_attn", "transformer.ln_f"}), only={
                 "alibi": (False,), "bias": (False,), "parallel_attn": (True,), "activation": _GELU_OF_EITHER_KIND},
                 whole="heads", dense_width="ffn_hidden_size", epsilon="layer_norm_epsilon", gelu="activation",
                 fused="self_attention.query_key_value", grouped=True),
    Architecture("bloom", "bloom", outer={"transformer.word_embeddings": "token_embd",
                 "transformer.word_embeddings_layernorm": "token_embd_norm", "transformer.ln_f": "output_norm",
                 "lm_head": "output"}, layers="h", whole="heads",
                 unrotated=True, only={"apply_residual_connection_post_layernorm": (False,)}, context="seq_length",
                 epsilon="layer_norm_epsilon", gelu="tanh", fused="self_attention.query_key_value", grouped=True),
    Architecture("mpt", "mpt", outer={"transformer.wte": "token_embd",
                 "transformer.norm_f": "output_norm", "lm_head": "output"}, layers="blocks", whole="heads",
                 unrotated=True, biases=_NONE, only={"attn_config.softmax_scale": (None,)}, context="max_seq_len",
                 values={"attention.clamp_kqv": "attn_config.clip_qkv"}, absent={"attention.clamp_kqv": None},
                 constants={ALIBI: 8.0}, epsilon="layer_norm_epsilon", gelu="erf", fused="attn.Wqkv"),
    Architecture("starcoder", "gpt_bigcode", outer=_WORDS | {"transformer.wpe": "position_embd"}, layers="h",
                 whole="heads", unrotated=True, only=_GPT2_ONLY, dense_width="n_inner", epsilon="layer_norm_epsilon",
                 fused="attn.c_attn", grouped=True, gelu="activation_function"),
    *(Architecture("bert", each, outer=BERT_OUTER | RANK, whole="heads", unrotated=True, only=_ENCODES, encodes=True,
                   epsilon="layer_norm_epsilon", layers="encoder.layer", constants={"attention.causal": False},
                   gelu="hidden_act")
      for each in ("bert", "roberta", "xlm-roberta", "camembert")),
    Architecture("bert", "distilbert", outer={key: BERT_OUTER[key] for key in BERT_OUTER if "types" not in
                 BERT_OUTER[key]}, whole="heads", unrotated=True, only={"activation": ("gelu",)}, encodes=True,
                 epsilon="layer_norm_epsilon", layers="transformer.layer", constants={"attention.causal": False,
                 "attention.layer_norm_epsilon": 1e-12}, gelu="activation"),
    Architecture("nomic-bert", "nomic_bert", outer={"emb_ln": "token_embd_norm"} | {key: BERT_OUTER[key] for key in
                 BERT_OUTER if "Layer" not in key and "position" not in key}, whole="heads", only=_SILU, encodes=True,
                 biases=frozenset({"norm1", "norm2", "emb_ln"}), epsilon="layer_norm_epsilon", layers="encoder.layers",
                 constants={"attention.causal": False}, fused="attn.Wqkv"),
    Architecture("eurobert", "eurobert", outer={"embed_tokens": "token_embd", "norm": "output_norm"}, biases=_NONE,
                 whole="heads", only=_SILU, encodes=True, constants={"attention.causal": False}),
    Architecture("gemma-embedding", "gemma3_text", outer={
                 "embed_tokens": "token_embd", "norm": "output_norm", DENSE[0]: "dense_2", DENSE[1]: "dense_3"},
                 norm_offset=1, biases=_NONE, window="any", pattern=6, encodes=True,
                 only=_GELU | {"use_bidirectional_attention": (True,), "attn_logit_softcapping": (None,)},
                 constants={"attention.causal": False}),
    Architecture("modern-bert", "modernbert", outer={"embeddings.tok_embeddings": "token_embd",
                 "embeddings.norm": "token_embd_norm", "final_norm": "output_norm"}, whole="heads", encodes=True,
                 only={"hidden_activation": ("gelu",)}, biases=_NONE, window="some",
                 epsilon="layer_norm_epsilon", constants={"attention.causal": False},
                 counts={"attention.sliding_window": "local_attention"},
                 halves={"mlp.Wi.weight": GATES}, joined=True,
                 fused="attn.Wqkv", pattern=3, first=True),
    *(Architecture(name, each, encodes=encodes, stacked=True,
                   constants={"attention.causal": False} if encodes else {})
      for each in ("t5", "mt5", "umt5") for name, encodes in ((ENCODER_DECODER, False), ("t5encoder", True))),
)  # fmt: skip
"""Architectures whose blocks all have one shape, by `model_type`."""
OTHERWISE = {
    "deepseek_v4": "llama.cpp's deepseek4 has several streams and compressed attention, which nothing here maps",
    "bailing_hybrid": "llama.cpp's bailingmoe3 has linear attention that nothing here maps",
    "phimoe": "llama.cpp divides by the root mean square where transformers has LayerNorm, and the weights of a "
    "token's experts sum to 1 there, where each is about 1 in transformers",
    "gptj": "llama.cpp has its name, and no code that computes it",
    "olmo_hybrid": "llama.cpp has no code that computes it",
    "dbrx": "transformers rotates by rope_parameters, and not by the attn_config.rope_theta that published ones have",
}
"""Family → why llama.cpp does not compute it, or what its architecture of that name computes otherwise."""
EXPERT_COUNTS = {each.counts["expert_count"] for each in ARCHITECTURES if each.experts}
"""Keys of config.json that say how many experts the mixtures here have."""

_DECI = ("llama", "mistral", "qwen2", "seed_oss", "granite", "phi3")
DIFFERENT = (
    *(Architecture("deci", each, neighbours=True, only=_SILU, differs=True, table=True) for each in _DECI),
    Architecture("openelm", "qwen3", only=_SILU | {"use_sliding_window": (False,)}, biases=_NONE,
                 differs=True),
)  # fmt: skip
"""Architectures whose blocks may differ."""


def takes_different_blocks(model_type: str, *, tied: bool) -> bool:
    """Return whether llama.cpp has an architecture for a family whose blocks differ in width."""
    different = [each for each in (*ARCHITECTURES, *DIFFERENT) if each.differs and each.model_type == model_type]
    return any(tied or each.name != "openelm" for each in different)
