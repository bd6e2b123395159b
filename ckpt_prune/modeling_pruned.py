"""Pruned models that no stock config can describe.

Their blocks differ in width, or have biases where the stock class has no slot for one, or have queries and keys
narrower than values, or fewer heads than the stock class allows.

This one file is both what `ckpt_prune.load` uses and what travels with such a checkpoint as its remote code. It needs
transformers alone. Each class is the stock one with every block rebuilt from the config's own keys, which one block's
entry in `per_layer_config` may override:

- `num_attention_heads`, `num_key_value_heads`, the key of the MLP's width: how many there are;
- `head_dim`: width of a value head, as in the dense model; attention is scaled by its inverse square root;
- `qk_head_dim`: width of a query and key head, where it is narrower;
- `ckpt_prune_biases`: linear modules (paths within a block) that have a bias although the stock class gives them none;
- `ckpt_prune_rotations`: blocks before (`entry`) and after (`exit`) which the residual stream is turned into another
  basis, by a square matrix each. Hidden states that are recorded between blocks are in the basis of their block. The
  gains of these blocks' norms stand in other modules, so that one number is left of each. Stock classes refuse its
  shape, where they would otherwise pass over the matrices and compute something else.
"""

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    Dinov2ForImageClassification,
    Dinov2Model,
    LlamaForCausalLM,
    MistralForCausalLM,
    OPTForCausalLM,
    OPTModel,
    PreTrainedConfig,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SeedOssForCausalLM,
    ViTForImageClassification,
    ViTModel,
)
from transformers.cache_utils import EncoderDecoderCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_torchdynamo_exporting


def layer_config(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """The config of one block: the model's, with that block's overrides, and none of the others'."""
    overrides: Any = getattr(config, "per_layer_config", None) or {}
    if not isinstance(overrides, dict):
        # transformers that know the key hand out finished configs instead of the mapping.
        return copy.copy(overrides[index])
    own = copy.copy(config)
    own.per_layer_config = None
    own_overrides: dict[str, Any] = overrides.get(str(index)) or overrides.get(index) or {}
    for key, value in own_overrides.items():
        setattr(own, key, value)
    return own


class PrunedMixin:
    """Rebuilds the blocks of the stock model it stands before in the list of base classes.

    Attributes:
        layers_path: where the list of blocks is in the model with a head.
    """

    layers_path = "model.layers"

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(self.shell_config(config))  # type: ignore[call-arg]
        model: Any = self
        # Attention looks up its implementation when it runs: masks and blocks must read it from the same config.
        shared = model.config
        # What the stock class was built from may have said another number (`shell_config`); caches read this one.
        shared.num_attention_heads = layer_config(config, 0).num_attention_heads
        config._attn_implementation = shared._attn_implementation
        start, _, rest = self.layers_path.partition(".")
        alone = not hasattr(model, start)
        if alone:
            shared = config
        layers = model.get_submodule(rest if alone else self.layers_path)
        for index in range(len(layers)):
            layer = self.make_block(type(layers[index]), layer_config(config, index), index)
            for module in layer.modules():
                if hasattr(module, "config"):
                    module.config = shared
            layers[index] = layer
        model.config = config
        model.post_init()

    @classmethod
    def shell_config(cls, config: PreTrainedConfig) -> PreTrainedConfig:
        """A config that the stock class can be built from; its blocks are replaced."""
        return layer_config(config, 0)

    @classmethod
    def make_block(cls, layer_class: type[nn.Module], config: PreTrainedConfig, index: int) -> nn.Module:
        """Block `index`, of the widths its own config says."""
        layer = cls.build(layer_class, config, index)
        for path in getattr(config, "ckpt_prune_biases", None) or []:
            linear = layer.get_submodule(cls.module_path(path))
            if linear.bias is None:
                linear.bias = nn.Parameter(torch.zeros(linear.out_features))
        rotations = getattr(config, "ckpt_prune_rotations", None) or {}
        for side in ("entry", "exit"):
            if index in rotations.get(side, []):
                hidden = config.hidden_size
                setattr(layer, f"{side}_rotation", nn.Linear(hidden, hidden, bias=False))
                layer.__class__ = _turning(type(layer))
                _drop_gains(layer)
        return layer

    @classmethod
    def build(cls, layer_class: type[nn.Module], config: PreTrainedConfig, index: int) -> nn.Module:
        """The stock block of this config."""
        return layer_class(config, index)

    @classmethod
    def module_path(cls, path: str) -> str:
        """Path in the model of a linear that `ckpt_prune_biases` names as it stands on disk."""
        return path


# ---- blocks with a basis of their own ---------------------------------------------------------------------------


_TURNING: dict[type, type] = {}


def _turning(layer_class: type[nn.Module]) -> type:
    """A block's class that turns the residual stream as it enters and leaves; under the same name, for device maps."""
    if layer_class in _TURNING.values():
        return layer_class
    if layer_class not in _TURNING:

        def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            entry, leave = (getattr(self, name, None) for name in ("entry_rotation", "exit_rotation"))
            if entry is not None:
                hidden_states = entry(hidden_states)
            output = layer_class.forward(self, hidden_states, *args, **kwargs)
            if leave is None:
                return output
            return (leave(output[0]), *output[1:]) if isinstance(output, tuple) else leave(output)

        _TURNING[layer_class] = type(layer_class.__name__, (layer_class,), {"forward": forward})
    return _TURNING[layer_class]


class PlainNorm(nn.Module):
    """An RMSNorm or LayerNorm whose gains are one number, and whose biases are.

    Args:
        norm: the stock one.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.centred = isinstance(norm, nn.LayerNorm)
        self.eps = norm.eps if self.centred else norm.variance_epsilon
        self.weight = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1)) if getattr(norm, "bias", None) is not None else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise over the last axis, in float32 as the stock RMSNorm does."""
        if self.centred:
            normed = nn.functional.layer_norm(hidden_states, hidden_states.shape[-1:], eps=self.eps) * self.weight
            return normed if self.bias is None else normed + self.bias
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_states.dtype)


def _drop_gains(layer: nn.Module) -> None:
    for name, child in layer.named_children():
        if hasattr(child, "variance_epsilon") or isinstance(child, nn.LayerNorm):
            setattr(layer, name, PlainNorm(child))


# ---- attention whose queries and keys have a width of their own -------------------------------------------------


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax attention in the open, for the "eager" implementation.

    Args:
        module: the attention.
        query: (B, H, T, d').
        key: (B, H, T, d').
        value: (B, H, T, d).
        attention_mask: added to the logits, or None.
        scaling: factor of the logits.
        dropout: share of weights dropped in training.
        kwargs: of other implementations, not used here.

    Returns:
        The output (B, T, H, d) and the attention weights.
    """
    logits = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = logits.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def narrow_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of any number of heads and any width of queries, keys and values, in place of a stock forward."""
    shape = hidden_states.shape[:-1]

    def heads(name: str) -> Tensor:
        projected: Tensor = getattr(self, name)(hidden_states)
        return projected.view(*shape, self.narrow_heads, -1).transpose(1, 2)

    names = self.narrow_names
    query, key, value = heads(names[0]), heads(names[1]), heads(names[2])
    if past_key_values is not None:
        if isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = past_key_values.self_attention_cache
        key, value = past_key_values.update(key, value, self.layer_idx)
    implementation = self.config._attn_implementation
    if implementation == "sdpa" and query.device.type == "cpu" and not is_torchdynamo_exporting():
        # The fused CPU kernel wants one width for all three, and without it attention takes longer than in the dense
        # model. Zeros change no logit; the cache above holds the narrow keys. An exported graph has no such kernel.
        missing = value.shape[-1] - key.shape[-1]
        query, key = (nn.functional.pad(states, (0, missing)) for states in (query, key))
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, plain_attention)
    dropout = self.narrow_dropout if self.training else 0.0
    output, weights = attend(
        self, query, key, value, attention_mask, dropout=dropout, scaling=self.narrow_scaling, **kwargs
    )
    output = output.reshape(*shape, -1).contiguous()
    return (getattr(self, names[3])(output) if names[3] else output), weights


def _linear(old: Any, columns: int, rows: int) -> nn.Linear:
    """A linear of another size, with a bias where the old one has one."""
    return nn.Linear(columns, rows, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype)


class NarrowMixin(PrunedMixin):
    """For families whose queries and keys may be narrower than the values, and whose heads may be any number.

    Attributes:
        attention: path of the attention in a block.
        projections: in the attention: query, key, value, and the output projection or None where it stands elsewhere.
        output: path of the output projection in a block.
        inner, outer: the linears into and out of the MLP.
        mlp_key: config key of the MLP's width.
        indexed: whether a block is told its index when it is built.
        disk: start of an on-disk path in a block → path in the model, first match first.
    """

    layers_path = "vit.layers"
    attention = "attention"
    projections: tuple[str, str, str, str | None] = ("q_proj", "k_proj", "v_proj", "o_proj")
    output = "attention.o_proj"
    inner: tuple[str, ...] = ("mlp.fc1",)
    outer = "mlp.fc2"
    mlp_key = "intermediate_size"
    indexed = False
    disk: ClassVar[dict[str, str]] = {
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    }

    @classmethod
    def shell_config(cls, config: PreTrainedConfig) -> PreTrainedConfig:
        """One head, which every stock class accepts."""
        shell = layer_config(config, 0)
        shell.num_attention_heads = 1
        return shell

    @classmethod
    def build(cls, layer_class: type[nn.Module], config: PreTrainedConfig, index: int) -> nn.Module:
        """The stock block with its linears resized, and its attention generalised where no stock one has its shape."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        narrow = getattr(config, "qk_head_dim", None) or head_dim
        stock = narrow == head_dim and heads * head_dim == config.hidden_size
        shell = config if stock else cls.shell_config(config)
        layer = layer_class(shell, index) if cls.indexed else layer_class(shell)
        if not stock:
            cls._narrow(layer, config, heads, head_dim, narrow)
        width = getattr(config, cls.mlp_key, None)
        if width is not None:
            for path in cls.inner_of(config):
                cls._replace(layer, path, rows=width)
            cls._replace(layer, cls.outer_of(config), columns=width)
        return layer

    @classmethod
    def _narrow(cls, layer: nn.Module, config: PreTrainedConfig, heads: int, head_dim: int, narrow: int) -> None:
        attention: Any = layer.get_submodule(cls.attention)
        query, key, value, _ = cls.projections
        for name, width in ((query, narrow), (key, narrow), (value, head_dim)):
            setattr(attention, name, _linear(getattr(attention, name), config.hidden_size, heads * width))
        cls._replace(layer, cls.output, columns=heads * head_dim)
        attention.narrow_heads, attention.narrow_names = heads, cls.projections
        attention.narrow_scaling = head_dim**-0.5
        attention.narrow_dropout = _attention_dropout(config)
        attention.__class__ = _narrowed(type(attention))

    @classmethod
    def inner_of(cls, config: PreTrainedConfig) -> tuple[str, ...]:
        """Linears into the MLP."""
        return cls.inner

    @classmethod
    def outer_of(cls, config: PreTrainedConfig) -> str:
        """The linear out of the MLP."""
        return cls.outer

    @classmethod
    def module_path(cls, path: str) -> str:
        """Path in the model of a linear that is named as it stands on disk."""
        return cls.disk.get(path, path)

    @staticmethod
    def _replace(layer: nn.Module, path: str, *, columns: int | None = None, rows: int | None = None) -> None:
        owner, _, name = path.rpartition(".")
        old: Any = layer.get_submodule(path)
        setattr(layer.get_submodule(owner), name, _linear(old, columns or old.in_features, rows or old.out_features))


def _attention_dropout(config: PreTrainedConfig) -> float:
    for key in ("attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(config, key):
            return float(getattr(config, key))
    return 0.0


_NARROWED: dict[type, type] = {}


def _narrowed(attention: type) -> type:
    """The stock attention class with `narrow_forward` in place of its own; one class for each stock one."""
    if attention not in _NARROWED:
        _NARROWED[attention] = type(f"Narrow{attention.__name__}", (attention,), {"forward": narrow_forward})
    return _NARROWED[attention]


# ---- the classes ------------------------------------------------------------------------------------------------


class PrunedLlamaForCausalLM(PrunedMixin, LlamaForCausalLM):
    """Llama with its own widths in every block."""


class PrunedMistralForCausalLM(PrunedMixin, MistralForCausalLM):
    """Mistral with its own widths in every block."""


class PrunedQwen2ForCausalLM(PrunedMixin, Qwen2ForCausalLM):
    """Qwen2 with its own widths in every block."""


class PrunedQwen3ForCausalLM(PrunedMixin, Qwen3ForCausalLM):
    """Qwen3 with its own widths in every block."""


class PrunedSeedOssForCausalLM(PrunedMixin, SeedOssForCausalLM):
    """Seed-OSS with its own widths in every block."""


class PrunedViTForImageClassification(NarrowMixin, ViTForImageClassification):
    """ViT classifier with its own widths in every block."""


class PrunedViTModel(NarrowMixin, ViTModel):
    """ViT with its own widths in every block."""


class _DeiTMixin(NarrowMixin):
    layers_path = "deit.layers"


class PrunedDeiTForImageClassification(_DeiTMixin, DeiTForImageClassification):
    """DeiT classifier with its own widths in every block."""


class PrunedDeiTForImageClassificationWithTeacher(_DeiTMixin, DeiTForImageClassificationWithTeacher):
    """Distilled DeiT classifier with its own widths in every block."""


class PrunedDeiTModel(_DeiTMixin, DeiTModel):
    """DeiT with its own widths in every block."""


class _Dinov2Mixin(NarrowMixin):
    layers_path = "dinov2.encoder.layer"

    @classmethod
    def inner_of(cls, config: PreTrainedConfig) -> tuple[str, ...]:
        """Gate and up where the MLP is a SwiGLU."""
        return ("mlp.gate_proj", "mlp.up_proj") if config.use_swiglu_ffn else ("mlp.fc1",)

    @classmethod
    def outer_of(cls, config: PreTrainedConfig) -> str:
        """The linear out of either MLP."""
        return "mlp.down_proj" if config.use_swiglu_ffn else "mlp.fc2"


class PrunedDinov2ForImageClassification(_Dinov2Mixin, Dinov2ForImageClassification):
    """DINOv2 classifier with its own widths in every block."""


class PrunedDinov2Model(_Dinov2Mixin, Dinov2Model):
    """DINOv2 with its own widths in every block."""


class _OPTMixin(NarrowMixin):
    layers_path = "model.decoder.layers"
    attention = "self_attn"
    projections = ("q_proj", "k_proj", "v_proj", "out_proj")
    output = "self_attn.out_proj"
    inner, outer = ("fc1",), "fc2"
    mlp_key = "ffn_dim"
    indexed = True
    disk: ClassVar[dict[str, str]] = {}


class PrunedOPTForCausalLM(_OPTMixin, OPTForCausalLM):
    """OPT with its own widths in every block."""


class PrunedOPTModel(_OPTMixin, OPTModel):
    """OPT without a head, with its own widths in every block."""


class _BertMixin(NarrowMixin):
    layers_path = "bert.encoder.layer"
    attention = "attention.self"
    projections = ("query", "key", "value", None)
    output = "attention.output.dense"
    inner, outer = ("intermediate.dense",), "output.dense"
    indexed = True
    disk: ClassVar[dict[str, str]] = {}


class PrunedBertForMaskedLM(_BertMixin, BertForMaskedLM):
    """BERT for masked tokens, with its own widths in every block."""


class PrunedBertForPreTraining(_BertMixin, BertForPreTraining):
    """BERT with both heads it was trained with, with its own widths in every block."""


class PrunedBertForSequenceClassification(_BertMixin, BertForSequenceClassification):
    """BERT sequence classifier with its own widths in every block."""


class PrunedBertForTokenClassification(_BertMixin, BertForTokenClassification):
    """BERT token classifier with its own widths in every block."""


class PrunedBertForQuestionAnswering(_BertMixin, BertForQuestionAnswering):
    """BERT for extractive answers, with its own widths in every block."""


class PrunedBertModel(_BertMixin, BertModel):
    """BERT without a head, with its own widths in every block."""


# transformers keeps its renamings of published names from classes that are not its own, unless they ask for them.
# Only a base model alone has to: one inside a class with a head is the stock one.
for _pruned, _stock in (
    (PrunedViTModel, "ViTModel"),
    (PrunedDeiTModel, "DeiTModel"),
    (PrunedDinov2Model, "Dinov2Model"),
):
    _renamings = get_checkpoint_conversion_mapping(_stock)
    if _renamings is not None:
        register_checkpoint_conversion_mapping(_pruned.__name__, _renamings, overwrite=True)
