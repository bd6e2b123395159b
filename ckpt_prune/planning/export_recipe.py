"""The part of a recipe that ends it in an ONNX graph."""

from typing import Literal

from pydantic import Field

from ckpt_prune.planning.fields import Strict

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


class GraphSettings(Strict):
    """How a model becomes an ONNX graph."""

    task: AskedTask = Field(
        "auto",
        description="What the graph is for; auto: what the checkpoint's own head is. feature-extraction: no head.",
    )
    opset: int | None = Field(None, ge=OPSETS[0], le=OPSETS[-1], description="ONNX opset, 18 to 23. Default: 20.")
    dtype: Literal["fp32", "fp16"] = Field("fp32", description="Type of the weights and of what is computed.")
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
        description="Largest difference between onnxruntime and PyTorch that passes, in units of the largest output. "
        "Default: by dtype.",
    )


class ExportRecipe(GraphSettings):
    """An ONNX graph as the last step of a recipe."""

    format: Literal["onnx"] = Field("onnx", description="What is written, into the output's folder onnx.")
    proof: bool = Field(
        True,
        alias="validate",
        description="Compare the graph in onnxruntime with PyTorch; outside the tolerance fails.",
    )
