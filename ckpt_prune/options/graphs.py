"""How a model becomes an ONNX graph or a GGUF file: a recipe's `export`, and options of `export`. Without torch."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import BeforeValidator, ConfigDict, WithJsonSchema, field_serializer, field_validator, model_validator

from ckpt_prune.common.fields import Strict
from ckpt_prune.common.graph_types import (
    GGUF_TYPES_IN_WORDS,
    ROUNDED_TYPES,
    ExportType,
    GgufType,
    GraphType,
    OtherTypes,
    TensorType,
)
from ckpt_prune.common.ratios import Ratio
from ckpt_prune.options.option import GRAPH, MODEL, Accepts, as_tuple, option

TaskName = Literal[
    "text-generation",
    "fill-mask",
    "text-classification",
    "token-classification",
    "question-answering",
    "image-classification",
    "feature-extraction",
    "text2text-generation",
    "automatic-speech-recognition",
]
"""What a graph is for, in the words of the Hub and of transformers' pipelines."""
AskedTask = Literal["auto", TaskName]

OPSETS = range(18, 24)
"""ONNX opsets that torch's exporter (2.13) writes. Below them it writes 18, and above them it has no operators."""


_ONE_OR_SEVERAL = {
    "anyOf": [
        {"type": "string", "enum": list(get_args(ExportType))},
        {"type": "array", "items": {"type": "string", "enum": list(get_args(ExportType))}},
    ]
}


GGUF_ALONE = {"embedding_type": "--embedding-type", "output_type": "--output-type", "types": "--tensor-type"}


def _split_types(value: Any) -> Any:
    """Make a mapping of PATTERN=TYPE. The expression may have a "=" of its own."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        if wrong := next((each for each in as_tuple(value) if "=" not in str(each)), None):
            raise ValueError(f"{wrong} is no PATTERN=TYPE, such as ffn_down=q4_k")
        pairs = [tuple(each.rsplit("=", 1)) for each in as_tuple(value)]
    for pattern, _ in pairs:
        try:
            re.compile(str(pattern))
        except re.error as error:
            raise ValueError(f"{pattern} is no regular expression: {error}") from None
    patterns = [pattern for pattern, _ in pairs]
    if twice := next((each for each in patterns if patterns.count(each) > 1), None):
        raise ValueError(f"{twice} is given more than once")
    return dict(pairs)


OtherTypesGiven = Annotated[
    Accepts[Mapping[str, TensorType] | Sequence[str], dict[str, TensorType]], BeforeValidator(_split_types)
]
"""Types by expressions: a mapping, or PATTERN=TYPE."""


class GraphSettings(Strict):
    """How a model becomes an ONNX graph or a GGUF file."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    group: ClassVar[str] = GRAPH
    task: AskedTask = option(default="auto")
    """What the graph is for. auto: what the checkpoint's own head is for. feature-extraction: no head."""
    opset: int | None = option(default=None, ge=OPSETS[0], le=OPSETS[-1])
    """ONNX opset, 18 to 23. [default: 20]"""
    dtype: Annotated[
        Accepts[ExportType | Sequence[ExportType], tuple[ExportType, ...]],
        BeforeValidator(as_tuple),
        WithJsonSchema(_ONE_OR_SEVERAL),
    ] = option(
        default=(),
        description="Type of the weights and of the computation. May be repeated: each makes a graph in OUT. int8: "
        "inputs are rounded to 8 bits, too; those of text as they come, those of images to ranges measured on "
        "--images. int4: weights in blocks of 4 bits. q4f16: the same, computed in fp16. For gguf "
        f"{GGUF_TYPES_IN_WORDS}. [default: fp32; for gguf that of the checkpoint]",
    )
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
    target_bytes: str | None = option(default=None, metavar="SIZE")
    """Bytes of the graph of int4, or of both of an encoder-decoder, to come down to: 75MB, or 30% of the tensors of
    MODEL. Weights are stored in blocks of 4 or 8 bits and of any size, or in float32, so that the least is lost within
    the size; --max-loss is what may be lost then."""
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
    Grams of the inputs on the text, images or pairs. In a recipe also those of a GGUF file, by its calibration data."""
    format: Literal["onnx", "gguf"] = option(default="onnx", group=MODEL)
    """onnx: a graph for onnxruntime. gguf: a file for llama.cpp, whose name ends in .gguf."""

    embedding_type: TensorType | None = option(default=None)
    """Type of a GGUF file's embedding, and of its head if it has one of its own. Rows of the k and i types but
    iq4_nl are multiples of 256. [default: that of the file, but q8_0 for plain types of 4 and 5 bits; a mixture gives
    q6_k or q5_k to the head]"""
    output_type: TensorType | None = option(default=None)
    """Type of a GGUF file's head, if it has one of its own. [default: that of --embedding-type, if it is given]"""
    types: OtherTypesGiven = option(
        default_factory=dict, flags=("--tensor-type",), metavar="PATTERN=TYPE", several=True
    )
    """Type of a GGUF file's matrices in whose names an expression is found, such as ffn_down=q4_k or
    'blk\\.[01]\\.=q6_k'. May be repeated; the first that matches counts, and the embedding and the head follow their
    own options first."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_type(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("format", "onnx") == "onnx" and not values.get("dtype"):
            return values | {"dtype": ("fp32",)}
        return values

    @field_validator("dtype")
    @classmethod
    def _drop_repeated(cls, value: tuple[ExportType, ...]) -> tuple[ExportType, ...]:
        return tuple(dict.fromkeys(value))

    @field_serializer("dtype")
    def _write_one_plainly(self, value: tuple[ExportType, ...]) -> ExportType | list[ExportType]:
        return value[0] if len(value) == 1 else list(value)

    @property
    def graph_types(self) -> tuple[GraphType, ...]:
        return cast(tuple[GraphType, ...], self.dtype)

    @property
    def gguf_type(self) -> GgufType | None:
        """The type of an export to GGUF; None: that of the checkpoint."""
        return cast(GgufType, self.dtype[0]) if self.dtype else None

    @property
    def other_types(self) -> OtherTypes:
        return OtherTypes(self.embedding_type, self.output_type, self.types)

    @property
    def is_rounded(self) -> bool:
        return any(each in ROUNDED_TYPES for each in self.dtype)

    @model_validator(mode="after")
    def _check_format(self) -> "GraphSettings":
        types = get_args(GraphType if self.format == "onnx" else GgufType)
        if wrong := [each for each in self.dtype if each not in types]:
            if self.format == "onnx":
                raise ValueError(
                    f"--dtype {wrong[0]} is a type of GGUF files: add --format gguf, or take {', '.join(types)}"
                )
            raise ValueError(f"--dtype {wrong[0]} does not go with --format {self.format}: take {', '.join(types)}")
        if self.format == "onnx":
            if alone := next((flag for name, flag in GGUF_ALONE.items() if getattr(self, name)), None):
                raise ValueError(f"{alone} goes with --format gguf")
            return self
        fields = GraphSettings.model_fields
        changed = [
            name
            for name in fields.keys() - {"format", "dtype", "rounding", *GGUF_ALONE}
            if getattr(self, name) != fields[name].default
        ]
        if changed:
            raise ValueError(f"--{min(changed).replace('_', '-')} does not go with --format gguf")
        if len(self.dtype) > 1:
            raise ValueError("a GGUF file has one --dtype")
        return self

    @model_validator(mode="after")
    def _check_rounded(self) -> "GraphSettings":
        plain = {"max_loss": None, "block_size": None, "rounding": "nearest"}
        changed = [name for name, value in plain.items() if getattr(self, name) != value]
        if self.target_bytes is not None and ("int4" not in self.dtype or "q4f16" in self.dtype):
            raise ValueError("--target-bytes is the size of a graph of --dtype int4: give that, too")
        if changed and not self.is_rounded and (changed, self.format) != (["rounding"], "gguf"):
            option = changed[0].replace("_", "-")
            raise ValueError(f"--{option} goes with --dtype int8, int4 or q4f16")
        return self
