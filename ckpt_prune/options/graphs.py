"""How a model becomes an ONNX graph: the keys of a recipe's `export`, and options of `export`. Without torch."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, WithJsonSchema, field_serializer, field_validator, model_validator

from ckpt_prune.common.fields import Strict
from ckpt_prune.common.graph_types import ROUNDED_TYPES, GraphType
from ckpt_prune.common.ratios import Ratio
from ckpt_prune.options.option import GRAPH, Accepts, as_tuple, option

TaskName = Literal[
    "text-generation",
    "fill-mask",
    "text-classification",
    "token-classification",
    "question-answering",
    "image-classification",
    "feature-extraction",
]
"""What a graph is for, in the words of the Hub and of transformers' pipelines."""
AskedTask = Literal["auto", TaskName]

OPSETS = range(18, 24)
"""ONNX opsets that torch's exporter (2.13) writes. Below them it writes 18, and above them it has no operators."""


_ONE_OR_SEVERAL = {
    "anyOf": [
        {"type": "string", "enum": list(get_args(GraphType))},
        {"type": "array", "minItems": 1, "items": {"type": "string", "enum": list(get_args(GraphType))}},
    ]
}


class GraphSettings(Strict):
    """How a model becomes an ONNX graph."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    group: ClassVar[str] = GRAPH
    task: AskedTask = option(default="auto")
    """What the graph is for. auto: what the checkpoint's own head is for. feature-extraction: no head."""
    opset: int | None = option(default=None, ge=OPSETS[0], le=OPSETS[-1])
    """ONNX opset, 18 to 23. [default: 20]"""
    dtype: Annotated[
        Accepts[GraphType | Sequence[GraphType], tuple[GraphType, ...]],
        BeforeValidator(as_tuple),
        WithJsonSchema(_ONE_OR_SEVERAL),
    ] = option(default=("fp32",))
    """Type of the weights and of the computation. May be repeated: each makes a graph in OUT. int8: inputs are rounded
    to 8 bits, too; those of text as they come, those of images to ranges measured on --images. int4: weights in blocks
    of 4 bits. q4f16: the same, computed in fp16."""
    cache: bool | None = option(default=None)
    """Make keys and values of earlier tokens inputs and outputs. [default: if the model generates text]"""
    optimize: Literal["cpu", "cuda", "none"] = option(default="none")
    """Fuse operators for this provider into onnxruntime's own; only onnxruntime runs such a graph. none: keep ONNX's
    operators, which onnxruntime fuses when it loads them."""
    tolerance: float | None = option(default=None, gt=0)
    """Largest difference between onnxruntime and PyTorch that passes in fp32 and fp16, as a share of the largest
    output. [default: by dtype]"""
    max_loss: Accepts[float | str | None, Ratio | None] = option(default=None, gt=0, lt=1)
    """What rounding to int8 or int4 may cost of the task's metric, such as 0.01 or 1%: the share by which a perplexity
    grows, or what top-1, agreement or cosine loses. Weights that cost too much are stored in 8 bits, with inputs as
    they are. [default: 2% for int8, 10% for int4 and q4f16]"""
    block_size: Literal[16, 32, 64, 128, 256] | None = option(default=None)
    """Weights that share a scale, along the inputs. [default: 32; the last block is padded if a width is no
    multiple]"""
    symmetric: bool = option(default=False)
    """Give blocks no zero point of their own: a little smaller, and less exact in 4 bits."""
    accuracy_level: Literal[0, 1, 2, 3, 4] = option(default=4)
    """Type in which onnxruntime may multiply blocks: 1 float32, 2 float16, 3 bfloat16, 4 inputs rounded to int8 block
    by block, the fastest on a CPU. 0: onnxruntime decides."""
    rounding: Literal["nearest", "gptq"] = option(default="nearest")
    """How weights of int4 and q4f16 are rounded: to the nearest, or so that later inputs make up for it (GPTQ), by
    Grams of the inputs on the text or images."""

    @field_validator("dtype")
    @classmethod
    def _drop_repeated(cls, value: tuple[GraphType, ...]) -> tuple[GraphType, ...]:
        if not value:
            raise ValueError("at least one type is needed")
        return tuple(dict.fromkeys(value))

    @field_serializer("dtype")
    def _write_one_plainly(self, value: tuple[GraphType, ...]) -> GraphType | list[GraphType]:
        return value[0] if len(value) == 1 else list(value)

    @property
    def is_rounded(self) -> bool:
        """True if any of the graphs is rounded."""
        return any(each in ROUNDED_TYPES for each in self.dtype)

    @model_validator(mode="after")
    def _check_rounded(self) -> "GraphSettings":
        plain = {"max_loss": None, "block_size": None, "rounding": "nearest"}
        asked = [name for name, value in plain.items() if getattr(self, name) != value]
        if asked and not self.is_rounded:
            option = asked[0].replace("_", "-")
            raise ValueError(f"--{option} goes with --dtype int8, int4 or q4f16")
        return self
