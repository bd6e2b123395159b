"""Pruned models that no stock config can describe.

Their blocks differ in width, or have biases where the stock class has no slot for one, or have queries and keys
narrower than values or wider, or without some of their rotary pairs, or fewer heads than the stock class allows, or
linear modules that are two thin ones, or no attention in some blocks.

This one file is both what `ckpt_prune.load` uses and what travels with such a checkpoint as its remote code. It needs
transformers alone. `PrunedX` is the stock class `X` of transformers, whichever it is, with every block rebuilt from the
config's own keys, which one block's entry in `per_layer_config` may override:

- `num_attention_heads`, `num_key_value_heads`, the key of the MLP's width: how many there are;
- `num_kept_heads`: heads, where the stock class also takes their dense number elsewhere, or refuses other numbers;
- `head_dim`: width of a head, as in the dense model; attention is scaled by its inverse square root;
- `qk_head_dim`: width of a query and key head, where it is narrower;
- `v_head_dim`: width of a value head, where it is narrower than in the dense model;
- `num_rotary_pairs`: rotary pairs of a query and key head, where some are gone; which ones stay, of every KV head, is a
  tensor of the block (`rotary_pairs`);
- `ckpt_prune_blocks`: where in the model the blocks are, and where in a block what is rebuilt (`Blocks`);
- `ckpt_prune_biases`: linear modules (paths within a block) that have a bias although the stock class gives them none;
- `ckpt_prune_ranks`: linear modules (paths within a block) that are the product of two, and the width between these;
- `ckpt_prune_rotations`: blocks before (`entry`) and after (`exit`) which the residual stream is turned into another
  basis, by a square matrix each. Hidden states that are recorded between blocks are in the basis of their block. The
  gains of these blocks' norms stand in other modules, so that one number is left of each. Stock classes refuse its
  shape, where they would otherwise pass over the matrices and compute something else;
- `ckpt_prune_absent`: blocks that have no attention, nor the norm that it alone reads (`Absent`);
- `ckpt_prune_slicing`: the residual stream has fewer dimensions between the blocks than `hidden_size` says, which
  embedding, final norm and head keep. Every sub-layer reads it in a basis of its own, and matrices on the skip
  connections take it from one to the next (`Slicing`). Hidden states that are recorded between blocks are so narrow.

`transformers_weights` is the key in which transformers looks up the file to read weights from. Here it holds a sentence
in place of a file name (`REFUSAL`): every other class of transformers refuses to read these weights, also where all
shapes fit it, and says the sentence. Config, tokenizer and processors load as ever. `PrunedX` takes the key off when it
loads a model, and writes it again when it saves one.
"""

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils.import_utils import is_torchdynamo_exporting

try:
    from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
except ImportError as error:
    raise ImportError(
        f"modeling_pruned.py needs transformers 5.19 or later, and this is {transformers.__version__}: "
        "pip install -U transformers"
    ) from error

WEIGHTS_KEY = "transformers_weights"
"""Config key of the file that transformers reads weights from; by default it is model.safetensors."""
REFUSAL = (
    "this class would misread a model that ckpt_prune has pruned. Load it with ckpt_prune.load, or with "
    "trust_remote_code=True by a class that auto_map in config.json names"
)
"""What stands there: the end of the error message of a class that does not rebuild the blocks."""


class AttentionPaths(TypedDict):
    """The linears of an attention: paths in a block.

    Attributes:
        heads: config key of the heads that there are, where it is not the stock class's own. The model is then built
            with its dense number: it has heads elsewhere, too (SigLIP's pooling).
    """

    query: str
    key: str
    value: str
    output: str
    heads: NotRequired[str]


class ValuePaths(TypedDict):
    """The linears whose values may be narrower: paths in a block."""

    value: str
    output: str


class WidthPaths(TypedDict):
    """The linears that share an inner width: paths in a block.

    Attributes:
        inner: those that make it.
        units: config key of the dense width, which the stock block is built at: it loses `lines` for every unit that
            is gone. Without it the width is the number of lines.
        lines: rows, or of `outer` columns, of one unit, by path.
        attributes: how much of a number of a module (a path in a block) is one unit's.
    """

    inner: list[str]
    outer: str
    units: NotRequired[str]
    lines: NotRequired[dict[str, int]]
    attributes: NotRequired[dict[str, int]]


class RotaryFacts(TypedDict):
    """Queries and keys that are turned by position, pair by pair.

    Attributes:
        pairs: of a head, in the dense model.
        neighbours: whether the two dimensions of a pair are neighbours; else they are half a head apart.
        tables: the same of cosines and sines.
    """

    pairs: int
    neighbours: bool
    tables: bool


class Blocks(TypedDict):
    """The config's `ckpt_prune_blocks`: a family's facts about its blocks.

    Attributes:
        layers: path of the list of blocks in the model.
        attention: of blocks whose heads may be any number and whose queries and keys may be narrower than values, the
            same in number; None where attention is the stock class's.
        widths: config key of an inner width that the stock class does not read, or not as it stands → where it lies.
        rotary: of blocks that may lack rotary pairs, where their attention is and what it does.
        values: of blocks whose values may be narrower under the stock class's attention, or one without some pairs.
        outside: config keys of widths that blocks may override, and that modules outside the blocks have, too.
    """

    layers: str
    attention: AttentionPaths | None
    widths: dict[str, WidthPaths]
    rotary: NotRequired[tuple[AttentionPaths, RotaryFacts]]
    values: NotRequired[ValuePaths]
    outside: NotRequired[list[str]]


class Absent(TypedDict):
    """The config's `ckpt_prune_absent`.

    Attributes:
        attention: path in a block.
        norm: path of the norm that nothing but attention reads; None where there is none.
        blocks: those that have neither.
    """

    attention: str
    norm: str | None
    blocks: list[int]


class Named(dict[str, Any]):
    """Values by name that are attributes, too, and stay JSON."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def block_configs(config: PreTrainedConfig) -> list[Named]:
    """What every block is made of, as vLLM's DeciLM reads it: whether it has attention, and the widths."""
    absent: Absent | None = getattr(config, "ckpt_prune_absent", None)
    gone = absent["blocks"] if absent is not None else []
    group = config.num_attention_heads // config.num_key_value_heads
    ffn = Named(no_op=False, intermediate_size=config.intermediate_size)
    attention = (Named(no_op=index in gone, n_heads_in_group=group) for index in range(config.num_hidden_layers))
    return [Named(attention=each, ffn=ffn) for each in attention]


class SublayerPaths(TypedDict):
    """The parts of a block that read the residual stream at one place and add to it behind: paths in the block.

    Attributes:
        norms: that the stream passes before it is read.
        reads: linears that these feed.
        writes: linears whose output is added to the stream.
    """

    norms: list[str]
    reads: list[str]
    writes: list[str]


class Slicing(TypedDict):
    """The config's `ckpt_prune_slicing`.

    Attributes:
        width: dimensions of the stream between the blocks.
        blocks: how many there are; the last one gives the stream back at its full width.
        sublayers: of every block, in order: two, or one where attention and mlp read the same stream.
        multiplier: config key of what a block multiplies by before it adds to the stream, or None.
    """

    width: int
    blocks: int
    sublayers: list[SublayerPaths]
    multiplier: str | None


_MARKED: dict[type, type] = {}


def marked_class(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The stock config class, but that what it saves refuses every stock model class; under the same name, for Auto.

    In memory such a config has no `transformers_weights`: the classes of this file load with it.
    """
    if stock in _MARKED.values():
        return stock
    if stock not in _MARKED:

        def init(self: PreTrainedConfig, **values: Any) -> None:
            values.pop(WEIGHTS_KEY, None)
            stock.__init__(self, **values)

        def to_dict(self: PreTrainedConfig) -> dict[str, Any]:
            return {**stock.to_dict(self), WEIGHTS_KEY: REFUSAL}

        described = {"__module__": __name__, "__qualname__": f"Pruned{stock.__name__}"}
        own = {"__init__": init, "to_dict": to_dict, "block_configs": property(block_configs)}
        _MARKED[stock] = type(stock.__name__, (stock,), own | described)
    return _MARKED[stock]


def mark_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Give a config the class that `marked_class` makes of its own; changed in place."""
    config.__dict__.pop(WEIGHTS_KEY, None)
    config.__class__ = marked_class(type(config))
    return config


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


def stock_config(config: PreTrainedConfig, blocks: Blocks) -> PreTrainedConfig:
    """The config that the stock class is built from: that of the first block, with what blocks of the class differ in.

    Gemma 4's have heads of two sizes, by which the class makes its rotary positions. Widths that modules outside the
    blocks have, too, are those of all.
    """
    values = config.to_dict()
    own: dict[str, dict[str, Any]] = values.pop("per_layer_config", None) or {}
    if own and blocks["attention"] is None:
        usual = type(config)(**values).to_dict().get("per_layer_config") or {}
        keys = {key for each in usual.values() for key in each}
        stock = {index: {key: each[key] for key in each.keys() & keys} for index, each in own.items()}
        if any(stock.values()):
            kept = {index: each for index, each in stock.items() if each}
            return type(config)(**values, per_layer_config=kept)
    first = layer_config(config, 0)
    for key in blocks.get("outside", []):
        setattr(first, key, vars(config)[key])
    return first


class BlockConfig:
    """The config of one block, whose attention and experts run as the model's own config says at the time."""

    def __init__(self, shared: PreTrainedConfig, own: PreTrainedConfig) -> None:
        self.__dict__.update(shared=shared, own=own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not {"shared", "own"} <= self.__dict__.keys():
            raise AttributeError(name)  # copies ask before there is anything to copy to
        return getattr(self.__dict__["shared" if name.startswith(("_attn", "_experts")) else "own"], name)


class PrunedMixin:
    """Rebuilds the blocks of the stock model it stands before in the list of base classes."""

    @classmethod
    def from_pretrained(cls, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Load as the stock class does, although the config refuses all other classes."""
        if isinstance(config, PreTrainedConfig):
            config = mark_config(copy.copy(config))
        return super().from_pretrained(*args, config=config, **kwargs)  # type: ignore[misc]

    def initialize_weights(self) -> None:
        """Make what files do not store, also what the stock model gives its blocks.

        Of a class of one's own transformers passes over modules whose own weights are all loaded, or that have none.
        """
        super().initialize_weights()  # type: ignore[misc]
        inner: Any = getattr(self, self.base_model_prefix, self)  # type: ignore[attr-defined]
        with torch.no_grad():
            inner._init_weights(inner)

    def __init__(self, config: PreTrainedConfig) -> None:
        mark_config(config)
        blocks: Blocks = config.ckpt_prune_blocks
        first = stock_config(config, blocks)
        # What the stock class is built from has blocks that it accepts; they are replaced.
        attention = blocks["attention"]
        replaced = attention is not None and "heads" not in attention
        super().__init__(_one_head(first) if replaced else first)  # type: ignore[call-arg]
        model: Any = self
        # Attention looks up its implementation when it runs: masks and blocks must read it from the same config. One
        # inside another model reads that one's.
        shared = model.config
        # What the stock class was built from may have said another number; caches read this one.
        if hasattr(first, "num_attention_heads"):
            shared.num_attention_heads = first.num_attention_heads
        config._attn_implementation = shared._attn_implementation
        if getattr(model, model.base_model_prefix, model) is model:
            shared = config
        path = blocks["layers"]
        if getattr(model, model.base_model_prefix, model) is model:  # loaded without the head that the path begins at
            path = path.removeprefix(f"{model.base_model_prefix}.")
        layers = model.get_submodule(path)
        for index in range(len(layers)):
            own = layer_config(config, index)
            layer = make_block(layers[index], own, blocks, index)
            _copy_buffers(layers[index], layer)
            # transformers that know the key always have something under it.
            uneven = getattr(config, "is_heterogeneous", bool(getattr(config, "per_layer_config", None)))
            module: Any
            for module in layer.modules():
                if hasattr(module, "config"):
                    module.config = BlockConfig(shared, own) if uneven else shared
            layers[index] = layer
        model.config = config
        model.post_init()


def make_block(stock: nn.Module, config: PreTrainedConfig, blocks: Blocks, index: int) -> nn.Module:
    """A block, of the widths its own config says.

    Args:
        stock: the block of the stock model in its place, of any widths.
        config: of this block (`layer_config`).
        blocks: where in the block what is rebuilt.
        index: of the block.
    """
    layer = _resize_block(stock, config, blocks, index)
    for path in getattr(config, "ckpt_prune_biases", None) or []:
        linear: Any = _find(layer, path)
        if linear is not None and linear.bias is None:
            linear.bias = nn.Parameter(torch.zeros(linear.out_features))
    for path, rank in (getattr(config, "ckpt_prune_ranks", None) or {}).items():
        _set(layer, path, FactoredLinear(layer.get_submodule(path), rank))
    absent: Absent | None = getattr(config, "ckpt_prune_absent", None)
    if absent is not None and index in absent["blocks"]:
        _set(layer, absent["attention"], NoAttention(layer.get_submodule(absent["attention"])))
        if absent["norm"] is not None:
            _set(layer, absent["norm"], nn.Identity())
    rotations = getattr(config, "ckpt_prune_rotations", None) or {}
    for side in ("entry", "exit"):
        if index in rotations.get(side, []):
            hidden = config.hidden_size
            setattr(layer, f"{side}_rotation", nn.Linear(hidden, hidden, bias=False))
            layer.__class__ = _turning(type(layer))
            _drop_gains(layer)
    slicing: Slicing | None = getattr(config, "ckpt_prune_slicing", None)
    if slicing is not None:
        _slice(layer, config, slicing, index)
    return layer


def _resize_block(stock_block: nn.Module, config: PreTrainedConfig, blocks: Blocks, index: int) -> nn.Module:
    """The stock block with linears of its own size, and its attention generalised where no stock one has its shape."""
    attention = blocks["attention"]
    heads = _heads(config, attention)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    narrow = getattr(config, "qk_head_dim", None) or head_dim
    values = getattr(config, "v_head_dim", None) or head_dim
    stock = attention is None or (narrow == values == head_dim and heads * head_dim == config.hidden_size)
    arguments = [config if stock else _one_head(config)]
    # Some blocks are not told their index; BEiT's are told how often training leaves them out.
    layer_class: Any = type(stock_block)
    told: dict[str, Any] = {}
    own, *others = inspect.signature(layer_class).parameters.items()
    for name, parameter in others:
        if "idx" in name or name == "layer_id":
            told[name] = index
        elif name == "layer_type" and hasattr(stock_block, "block_type"):
            told[name] = stock_block.block_type  # Bamba's keep it under another name
        elif parameter.default is parameter.empty and hasattr(stock_block, name):
            told[name] = getattr(stock_block, name)  # what the model tells its blocks, and they keep
    # GPT's are told sizes first, and keep none of them.
    made_of_config = own[0] == "config" or not hasattr(config, own[0])
    layer: nn.Module = layer_class(*arguments, **told) if made_of_config else copy.deepcopy(stock_block)
    if attention is not None and not stock:
        _narrow(layer, config, attention, heads, head_dim, narrow, values)
    _drop_pairs(layer, config, blocks)
    for key, paths in blocks["widths"].items():
        width = getattr(config, key, None)
        if width is not None and "units" in paths:
            _narrow_by(layer, paths, getattr(config, paths["units"]) - width)
        elif width is not None:
            for path in paths["inner"]:
                _replace(layer, path, rows=width)
            _replace(layer, paths["outer"], columns=width)
    if "values" in blocks and attention is None and values < head_dim:
        _narrow_values(layer, blocks["values"], head_dim, values)
        if not _lacks_pairs(config, blocks):
            _pad_values(layer, blocks["values"], head_dim, values)
    return layer


def _narrow_by(layer: nn.Module, paths: WidthPaths, gone: int) -> None:
    """Take so many units from a block of the dense width."""
    for path in paths["inner"]:
        _, rows = _sizes(layer.get_submodule(path))
        _replace(layer, path, rows=rows - gone * paths["lines"][path])
    columns, _ = _sizes(layer.get_submodule(paths["outer"]))
    _replace(layer, paths["outer"], columns=columns - gone * paths["lines"][paths["outer"]])
    for path, each in paths["attributes"].items():
        owner, _, name = path.rpartition(".")
        module = layer.get_submodule(owner)
        setattr(module, name, getattr(module, name) - gone * each)


def _heads(config: PreTrainedConfig, attention: AttentionPaths | None) -> int:
    """Heads of a block."""
    key = attention.get("heads", "num_attention_heads") if attention is not None else "num_attention_heads"
    return int(getattr(config, key, None) or getattr(config, "num_attention_heads", None) or 1)  # RWKV has none


def _one_head(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of one head, which every stock class accepts."""
    shell = copy.copy(config)
    shell.num_attention_heads = 1
    return shell


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
    """An RMSNorm or LayerNorm whose gains are one number, and whose biases are."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.centred = "LayerNorm" in type(norm).__name__
        self.eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
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
        if "Norm" in type(child).__name__ and not isinstance(child, PlainNorm):
            setattr(layer, name, PlainNorm(child))


# ---- linears of low rank ----------------------------------------------------------------------------------------


class FactoredLinear(nn.Module):
    """A linear whose weight is the product of two thin ones.

    Args:
        linear: the stock one, whose bias it has.
        rank: outputs of the first and inputs of the second.
    """

    def __init__(self, linear: Any, rank: int) -> None:
        super().__init__()
        self.in_features, self.out_features = _sizes(linear)
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.down = nn.Linear(self.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, self.out_features, bias=False, **like)
        self.bias = None if linear.bias is None else nn.Parameter(torch.zeros(self.out_features, **like))

    @property
    def weight(self) -> Tensor:
        """The product, (outputs, inputs), for stock code that looks at it."""
        product: Tensor = self.up.weight @ self.down.weight
        return product

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Through both, and the bias."""
        product: Tensor = self.up(self.down(hidden_states))
        return product if self.bias is None else product + self.bias


# ---- blocks of a narrower stream --------------------------------------------------------------------------------


SKIPS = ("first_skip", "second_skip")
"""Modules of a block that take the stream past its sub-layers, from one basis to the next."""


class Stream:
    """The stream of a block while the stock code runs. It is no module, and not part of what that code sees.

    Attributes:
        states: as the sub-layer that runs reads them, (B, T, width).
    """

    states: Any = None


class StreamNorm(PlainNorm):
    """An RMSNorm of the block's own stream, whatever the stock code passes it.

    A LayerNorm becomes one: what adds to the stream has no mean any more.

    Args:
        stream: of the block.
    """

    def __init__(self, norm: Any, stream: Stream) -> None:
        super().__init__(norm)
        self.centred, self.stream = False, stream

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the block's stream, in the shape of what is passed."""
        states = self.stream.states
        return super().forward(states.reshape(*hidden_states.shape[:-1], states.shape[-1]))


class Between:
    """Stands behind what attention adds to the stream: takes the stream on to the mlp, and on to the block's end.

    The stock code adds what this returns to zeros, and to that what the mlp gives: the block's output.

    Args:
        stream: of the block.
        multiplier: what the block multiplies by before it adds.
    """

    def __init__(self, layer: Any, stream: Stream, multiplier: float) -> None:
        self.layer, self.stream, self.multiplier = layer, stream, multiplier

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """A forward hook."""
        states = self.stream.states
        skipped: Tensor = self.layer.first_skip(states)
        self.stream.states = skipped + output.reshape(skipped.shape) * self.multiplier
        onward: Tensor = self.layer.second_skip(self.stream.states) / self.multiplier
        return onward.reshape(*output.shape[:-1], onward.shape[-1])


def _slice(layer: Any, config: PreTrainedConfig, slicing: Slicing, index: int) -> None:
    """Let a block read and write a stream of fewer dimensions."""
    width, stream = slicing["width"], Stream()
    for place, paths in enumerate(slicing["sublayers"]):
        ends = index == slicing["blocks"] - 1 and place == len(slicing["sublayers"]) - 1
        out = config.hidden_size if ends else width
        for path in paths["norms"]:
            _set(layer, path, StreamNorm(layer.get_submodule(path), stream))
        for path in paths["reads"]:
            _replace(layer, path, columns=width)
        for path in paths["writes"]:
            _replace(layer, path, rows=out)
        setattr(layer, SKIPS[place], nn.Linear(width, out, bias=False))
    if len(slicing["sublayers"]) > 1:
        (writes,) = slicing["sublayers"][0]["writes"]
        multiplier = float(getattr(config, slicing["multiplier"])) if slicing["multiplier"] else 1.0
        layer.get_submodule(writes).register_forward_hook(Between(layer, stream, multiplier))
    if index == 0:
        layer.entry_slice = nn.Linear(config.hidden_size, width, bias=False)
    layer.narrow_stream = stream
    layer.__class__ = _derive_sliced(type(layer))


_SLICED: dict[type, type] = {}


def _derive_sliced(layer_class: type[nn.Module]) -> type:
    """A block's class that reads its stream beside the stock code; under the same name, for device maps."""
    if layer_class in _SLICED.values():
        return layer_class
    if layer_class not in _SLICED:

        def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if hasattr(self, "entry_slice"):
                hidden_states = self.entry_slice(hidden_states)
            self.narrow_stream.states = hidden_states
            if hasattr(self, SKIPS[1]):
                # What the stock code takes past attention is not the stream: `Between` is.
                passed = hidden_states.new_zeros(*hidden_states.shape[:-1], self.second_skip.out_features)
            else:
                passed = self.first_skip(hidden_states)
            output = layer_class.forward(self, passed, *args, **kwargs)
            self.narrow_stream.states = None
            return output

        _SLICED[layer_class] = type(layer_class.__name__, (layer_class,), {"forward": forward})
    return _SLICED[layer_class]


# ---- attention whose queries and keys have a width of their own -------------------------------------------------


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name of the argument that takes the keys and values of earlier tokens; None if there is none.

    It is `cache` from transformers 5.24 on and `past_key_values` before; some attention modules say `layer_past`. The
    signature decides, because older versions pass other things as `cache`, and a class from a checkpoint's own code
    may have the old name under any version.
    """
    takes = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values", "layer_past") if name in takes), None)


def _derive(prefix: str, attention: type[nn.Module], forward: Callable[..., Any]) -> type:
    """A class of the stock attention with another forward, which finds the cache under `cache_name`."""
    name = getattr(attention, "cache_name", None) or cache_argument(attention.forward)
    added = {"forward": forward, "cache_name": name}
    return type(f"{prefix}{attention.__name__}", (attention,), added)


def _update(cache: Any, key: Tensor, value: Tensor, module: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens so far, these among them; a cache in pages changes the keywords."""
    updated: tuple[Tensor, Tensor] = cache.update(key, value, module.layer_idx, kwargs=kwargs)
    return updated


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
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of any number of heads and any width of queries, keys and values, in place of a stock forward."""
    shape = hidden_states.shape[:-1]

    def heads(name: str) -> Tensor:
        projected: Tensor = getattr(self, name)(hidden_states)
        return projected.view(*shape, self.narrow_heads, -1).transpose(1, 2)

    names = self.narrow_names
    query, key, value = heads(names[0]), heads(names[1]), heads(names[2])
    cache = kwargs.pop(self.cache_name, None)
    if cache is not None:
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        key, value = _update(cache, key, value, self, kwargs)
    implementation, width = self.config._attn_implementation, value.shape[-1]
    if implementation == "sdpa" and query.device.type == "cpu" and not is_torchdynamo_exporting():
        # The fused CPU kernel wants one width for all three, and without it attention takes longer than in the dense
        # model. Zeros change no logit; the cache above holds the narrow ones. An exported graph has no such kernel.
        missing = width - key.shape[-1]
        query, key = (nn.functional.pad(states, (0, max(0, missing))) for states in (query, key))
        value = nn.functional.pad(value, (0, max(0, -missing)))
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, plain_attention)
    dropout = self.narrow_dropout if self.training else 0.0
    output, weights = attend(
        self, query, key, value, attention_mask, dropout=dropout, scaling=self.narrow_scaling, **kwargs
    )
    output = output[..., :width].reshape(*shape, -1).contiguous()
    return (getattr(self, names[3])(output) if names[3] else output), weights


def _sizes(linear: Any) -> tuple[int, int]:
    """Inputs and outputs."""
    return (linear.nx, linear.nf) if isinstance(linear, Conv1D) else (linear.in_features, linear.out_features)


def _linear(old: Any, columns: int, rows: int) -> nn.Module:
    """A linear of another size, of the same kind, with a bias where the old one has one."""
    if isinstance(old, Conv1D):
        made: nn.Module = Conv1D(rows, columns).to(old.weight.device, old.weight.dtype)
        return made
    return nn.Linear(columns, rows, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype)


def _find(layer: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None in a block of another kind, which has none."""
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None


def _copy_buffers(stock: nn.Module, layer: nn.Module) -> None:
    """Give a block the buffers that the stock model gives its blocks, which these do not make themselves."""
    for path, buffer in stock.named_buffers():
        owner, _, name = path.rpartition(".")
        module = _find(layer, owner)
        if module is not None and not hasattr(module, name):
            module.register_buffer(name, buffer.clone(), persistent=False)


def _set(layer: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(layer.get_submodule(owner), name, module)


def _replace(layer: nn.Module, path: str, *, columns: int | None = None, rows: int | None = None) -> None:
    old: Any = layer.get_submodule(path)
    dense_columns, dense_rows = _sizes(old)
    _set(layer, path, _linear(old, columns or dense_columns, rows or dense_rows))


def _narrow(
    layer: nn.Module,
    config: PreTrainedConfig,
    paths: AttentionPaths,
    heads: int,
    head_dim: int,
    narrow: int,
    values: int,
) -> None:
    """Give a block's attention `heads` heads, queries and keys of `narrow` dimensions, and values of `values`."""
    owner = paths["query"].rpartition(".")[0]
    for path, width in ((paths["query"], narrow), (paths["key"], narrow), (paths["value"], values)):
        _replace(layer, path, columns=config.hidden_size, rows=heads * width)
    _replace(layer, paths["output"], columns=heads * values)
    attention: Any = layer.get_submodule(owner)
    # Where the output projection stands elsewhere in the block, attention does not call it.
    own = [paths["query"], paths["key"], paths["value"], paths["output"]]
    attention.narrow_heads = heads
    attention.narrow_names = [path.removeprefix(f"{owner}.") if path.startswith(f"{owner}.") else None for path in own]
    attention.narrow_scaling = head_dim**-0.5
    attention.narrow_dropout = _attention_dropout(config)
    attention.__class__ = _derive_narrow(type(attention))


def _attention_dropout(config: PreTrainedConfig) -> float:
    for key in ("attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(config, key):
            return float(getattr(config, key))
    return 0.0


_NARROWED: dict[type, type] = {}


def _derive_narrow(attention: type[nn.Module]) -> type:
    """The stock attention class with `narrow_forward` in place of its own; one class for each stock one."""
    if attention not in _NARROWED:
        _NARROWED[attention] = _derive("Narrow", attention, narrow_forward)
    return _NARROWED[attention]


# ---- blocks without attention -----------------------------------------------------------------------------------


class NoAttention(nn.Module):
    """Stands where a block has no attention: it adds zeros to the stream.

    Models ask the cache of one block how many tokens there are, and an empty tensor counts as none. So it is given a
    key and a value of each token that are one zero each.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.cache_name = cache_argument(attention.forward)
        self.layer_idx = getattr(attention, "layer_idx", None)

    def forward(self, hidden_states: Tensor, *_: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Zeros of the shape of the states, and no attention weights."""
        cache = kwargs.pop(self.cache_name, None) if self.cache_name else None
        if cache is not None:
            zeros = hidden_states.new_zeros(*hidden_states.shape[:2], 1).unsqueeze(1)
            _update(cache, zeros, zeros, self, kwargs)
        return torch.zeros_like(hidden_states), None


# ---- attention without some of its rotary pairs -----------------------------------------------------------------


def turn(states: Tensor, cosines: Tensor, sines: Tensor, *, neighbours: bool) -> Tensor:
    """Queries or keys turned by position, pair by pair.

    Args:
        states: (..., 2 P).
        cosines: (..., P).
        sines: (..., P).
        neighbours: whether the two dimensions of a pair are neighbours; else they are P apart.
    """
    first, second = (states[..., ::2], states[..., 1::2]) if neighbours else states.chunk(2, -1)
    turned = first * cosines - second * sines, second * cosines + first * sines
    return (torch.stack(turned, -1).flatten(-2) if neighbours else torch.cat(turned, -1)).to(states.dtype)


def of_pairs(table: Tensor, *, neighbours: bool) -> Tensor:
    """Cosines or sines as blocks are passed them, (..., 2 P), once for every pair, (..., P)."""
    return table[..., ::2] if neighbours else table[..., : table.shape[-1] // 2]


def paired_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention whose KV heads have rotary pairs of their own, in place of a stock forward."""
    shape, facts = hidden_states.shape[:-1], self.paired_facts
    kv_heads = self.paired_heads

    def heads(name: str, count: int) -> Tensor:
        projected: Tensor = getattr(self, name)(hidden_states)
        return projected.view(*shape, count, -1).transpose(1, 2)

    names, groups = self.paired_names, self.num_key_value_groups
    query, key, value = heads(names[0], kv_heads * groups), heads(names[1], kv_heads), heads(names[2], kv_heads)
    tables = []
    for table in position_embeddings:
        own = of_pairs(table, neighbours=facts["tables"])[..., self.rotary_pairs.long()]
        tables.append(own.reshape(*own.shape[:2], kv_heads, -1).transpose(1, 2))
    key = turn(key, tables[0], tables[1], neighbours=facts["neighbours"])
    cosines, sines = (table.repeat_interleave(groups, 1) for table in tables)
    query = turn(query, cosines, sines, neighbours=facts["neighbours"])
    cache = kwargs.pop(self.cache_name, None)
    if cache is not None:
        key, value = _update(cache, key, value, self, kwargs)
    implementation, width = self.config._attn_implementation, value.shape[-1]
    if implementation == "sdpa" and query.device.type == "cpu" and not is_torchdynamo_exporting():
        # As in `narrow_forward`.
        missing = width - key.shape[-1]
        query, key = (nn.functional.pad(states, (0, max(0, missing))) for states in (query, key))
        value = nn.functional.pad(value, (0, max(0, -missing)))
    modules = (sys.modules[each.__module__] for each in type(self).__mro__)
    stock = next(module for module in modules if hasattr(module, "eager_attention_forward"))
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, stock.eager_attention_forward)
    softcap = getattr(self, "attn_logit_softcapping", None)
    output, weights = attend(
        self,
        query,
        key,
        value,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        sliding_window=getattr(self, "sliding_window", getattr(self.config, "sliding_window", None)),
        **({} if softcap is None else {"softcap": softcap}),
        **kwargs,
    )
    output = getattr(self, names[3])(output[..., :width].reshape(*shape, -1).contiguous())
    return nn.functional.dropout(output, getattr(self, "residual_dropout", 0.0), self.training), weights


def _lacks_pairs(config: PreTrainedConfig, blocks: Blocks) -> bool:
    """Whether a block's queries and keys are without some of their rotary pairs."""
    kept = getattr(config, "num_rotary_pairs", None)
    return "rotary" in blocks and kept is not None and kept != blocks["rotary"][1]["pairs"]


def _drop_pairs(layer: nn.Module, config: PreTrainedConfig, blocks: Blocks) -> None:
    """Narrow a block's queries and keys to the rotary pairs that are left, if some are gone."""
    if not _lacks_pairs(config, blocks):
        return
    (paths, facts), kept = blocks["rotary"], config.num_rotary_pairs
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    _replace(layer, paths["query"], rows=heads * 2 * kept)
    _replace(layer, paths["key"], rows=kv_heads * 2 * kept)
    owner = paths["query"].rpartition(".")[0]
    attention: Any = layer.get_submodule(owner)
    own = [paths["query"], paths["key"], paths["value"], paths["output"]]
    attention.paired_names = [path.removeprefix(f"{owner}.") for path in own]
    attention.paired_facts, attention.paired_heads = facts, kv_heads
    attention.register_buffer("rotary_pairs", torch.arange(kept, dtype=torch.int16).repeat(kv_heads))
    attention.__class__ = _derive_paired(type(attention))


_PAIRED: dict[type, type] = {}


def _derive_paired(attention: type[nn.Module]) -> type:
    """The stock attention class with `paired_forward` in place of its own; one class for each stock one."""
    if attention not in _PAIRED:
        _PAIRED[attention] = _derive("Paired", attention, paired_forward)
    return _PAIRED[attention]


# ---- values with a width of their own, under a stock attention --------------------------------------------------


class NarrowCache:
    """Stands before a cache, or none: takes the zeros off the values that a stock attention keeps.

    Args:
        cache: what keeps keys and values; None keeps nothing.
        width: of values.
        padded: whether attention is given the zeros back.
    """

    def __init__(self, cache: Any, width: int, padded: bool) -> None:
        self.narrow_cache, self.narrow_width, self.narrow_padded = cache, width, padded

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far, these among them."""
        missing = value.shape[-1] - self.narrow_width
        value = value[..., : self.narrow_width]
        if self.narrow_cache is not None:
            key, value = self.narrow_cache.update(key, value, *args, **kwargs)
        return key, nn.functional.pad(value, (0, missing)) if self.narrow_padded else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("narrow_cache"), name)


class PaddedValues(nn.Linear):
    """Makes narrow values, and zeros up to the width that a stock attention takes them in."""

    narrow_width: int
    narrow_missing: int

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Heads of values, each as wide as a head of keys."""
        values = super().forward(hidden_states)
        heads = values.view(*values.shape[:-1], -1, self.narrow_width)
        return nn.functional.pad(heads, (0, self.narrow_missing)).flatten(-2)


def _without_zeros(linear: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Return what the output projection reads of heads that attention has mixed with their zeros."""
    columns, _ = _sizes(linear)
    (mixed,) = inputs
    if mixed.shape[-1] == columns:
        return None
    heads = mixed.view(*mixed.shape[:-1], columns // linear.narrow_width, -1)
    return (heads[..., : linear.narrow_width].flatten(-2),)


def _narrow_values(layer: nn.Module, paths: ValuePaths, head_dim: int, width: int) -> None:
    """Give a block's attention values of `width` dimensions."""
    columns, _ = _sizes(layer.get_submodule(paths["output"]))
    _, rows = _sizes(layer.get_submodule(paths["value"]))
    _replace(layer, paths["output"], columns=columns // head_dim * width)
    _replace(layer, paths["value"], rows=rows // head_dim * width)


def _pad_values(layer: nn.Module, paths: ValuePaths, head_dim: int, width: int) -> None:
    """Let a stock attention, whatever it does with queries and keys, have narrow values.

    Its forward sees zeros between the projection and the cache: what it attends to is narrow, and so is what it hands
    to the output projection. On a CPU the fused kernel is given them once more.
    """
    output: Any = layer.get_submodule(paths["output"])
    output.narrow_width = width
    # A hook, and the first one: others are to see the narrow input.
    output.register_forward_pre_hook(_without_zeros)
    value: Any = layer.get_submodule(paths["value"])
    value.__class__ = PaddedValues
    value.narrow_width, value.narrow_missing = width, head_dim - width
    attention: Any = layer.get_submodule(paths["value"].rpartition(".")[0])
    attention.narrow_width = width
    attention.__class__ = _derive_cached(type(attention))


_VALUED: dict[type, type] = {}


def _derive_cached(attention: type[nn.Module]) -> type:
    """The stock attention class behind a `NarrowCache`; one class for each stock one."""
    if attention not in _VALUED:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # As in `narrow_forward`.
            on_cpu = self.config._attn_implementation == "sdpa" and next(self.parameters()).device.type == "cpu"
            cache = kwargs.get(self.cache_name)
            kwargs[self.cache_name] = NarrowCache(cache, self.narrow_width, on_cpu and not is_torchdynamo_exporting())
            return attention.forward(self, *args, **kwargs)

        _VALUED[attention] = _derive("Narrow", attention, forward)
    return _VALUED[attention]


# ---- the classes ------------------------------------------------------------------------------------------------


def __getattr__(name: str) -> type:
    """`PrunedX` for any stock class X of a model or its config, made when it is first asked for."""
    stock = getattr(transformers, name.removeprefix("Pruned"), None) if name.startswith("Pruned") else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedConfig):
        return marked_class(stock)
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    described = {"__module__": __name__, "__doc__": f"{stock.__name__} with its own widths in every block."}
    found: Any = type(name, (PrunedMixin, stock), described)
    found.config_class = marked_class(found.config_class)
    _keep_renamings(name, stock)
    globals()[name] = found
    made: type = found
    return made


def _keep_renamings(name: str, stock: type[PreTrainedModel]) -> None:
    """Register the stock class's renamings of published names for the class made of it.

    transformers keeps its renamings from classes that are not its own, unless they ask for them. Those of a base model
    inside a class with a head apply all the same, as that one is stock.
    """
    renamings = get_checkpoint_conversion_mapping(stock.__name__)
    if renamings is None and stock.config_class is not None and MODEL_MAPPING.get(stock.config_class, None) is stock:
        renamings = get_checkpoint_conversion_mapping(stock.config_class.model_type)
    if renamings is not None:
        register_checkpoint_conversion_mapping(name, renamings, overwrite=True)
