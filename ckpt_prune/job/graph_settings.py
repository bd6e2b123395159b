"""How a model becomes an ONNX graph: the keys of a recipe and the options of `export` alike. Without torch."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, field_serializer, field_validator, model_validator

from ckpt_prune.common.graph_types import ROUNDED_TYPES, GraphType
from ckpt_prune.common.ratios import Ratio
from ckpt_prune.job.fields import Strict

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


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_ONE_OR_SEVERAL = {
    "anyOf": [
        {"type": "string", "enum": list(get_args(GraphType))},
        {"type": "array", "minItems": 1, "items": {"type": "string", "enum": list(get_args(GraphType))}},
    ]
}


class GraphSettings(Strict):
    """How a model becomes an ONNX graph."""

    task: AskedTask = Field(
        "auto",
        description="What the graph is for; auto: what the checkpoint's own head is. feature-extraction: no head.",
    )
    opset: int | None = Field(None, ge=OPSETS[0], le=OPSETS[-1], description="ONNX opset, 18 to 23. Default: 20.")
    dtype: Annotated[tuple[GraphType, ...], BeforeValidator(_several), WithJsonSchema(_ONE_OR_SEVERAL)] = Field(
        ("fp32",),
        description="Type of the weights and of what is computed; may be repeated, and each is a graph in OUT. int8: "
        "inputs too are rounded to 8 bits, of text as they come, of images to ranges measured on --images. int4: "
        "weights in blocks of 4 bits; q4f16: the same computed in fp16.",
    )
    cache: bool | None = Field(
        None,
        description="Keys and values of earlier tokens as inputs and outputs. Default: where text is generated.",
    )
    optimize: Literal["cpu", "cuda", "none"] = Field(
        "none",
        description="Fuse into onnxruntime's own operators for this provider; such a graph runs in onnxruntime alone. "
        "none: ONNX's operators, which onnxruntime fuses itself as it loads them.",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest difference between onnxruntime and PyTorch that passes in fp32 and fp16, in units of the "
        "largest output. Default: by dtype.",
    )
    max_loss: Ratio | None = Field(
        None,
        gt=0,
        lt=1,
        description="What rounding to int8 or int4 may cost the task's metric: of a perplexity, the share it grows by; "
        "of top-1, agreement or cosine, how much is lost. 0.01 or 1%. Weights that cost too much are stored in 8 bits, "
        "with inputs as they are. Default: 2% for int8, 10% for int4 and q4f16.",
    )
    block_size: Literal[16, 32, 64, 128, 256] | None = Field(
        None,
        description="Weights that share a scale, along the inputs. Default: 32, the last block padded where a width is "
        "no multiple.",
    )
    symmetric: bool = Field(
        False, description="Blocks have no zero of their own: a little smaller, and less exact in 4 bits."
    )
    accuracy_level: Literal[0, 1, 2, 3, 4] = Field(
        4,
        description="What onnxruntime may compute products of blocks in: 1 float32, 2 float16, 3 bfloat16, 4 inputs "
        "rounded to int8 block by block, the fastest on a CPU; 0 leaves it to onnxruntime.",
    )
    rounding: Literal["nearest", "gptq"] = Field(
        "nearest",
        description="How weights of int4 and q4f16 are rounded: to the nearest, or so that later inputs make up for it "
        "(GPTQ), by Grams of inputs measured on the text or images.",
    )

    @field_validator("dtype")
    @classmethod
    def _once(cls, value: tuple[GraphType, ...]) -> tuple[GraphType, ...]:
        if not value:
            raise ValueError("at least one type is needed")
        return tuple(dict.fromkeys(value))

    @field_serializer("dtype")
    def _plain(self, value: tuple[GraphType, ...]) -> GraphType | list[GraphType]:
        """One as people write it."""
        return value[0] if len(value) == 1 else list(value)

    @property
    def quantised(self) -> bool:
        """Whether any of the graphs is rounded."""
        return any(each in ROUNDED_TYPES for each in self.dtype)

    @model_validator(mode="after")
    def _for_quantised(self) -> "GraphSettings":
        plain = {"max_loss": None, "block_size": None, "rounding": "nearest"}
        asked = [name for name, value in plain.items() if getattr(self, name) != value]
        if asked and not self.quantised:
            option = asked[0].replace("_", "-")
            raise ValueError(f"--{option} goes with --dtype int8, int4 or q4f16")
        return self
