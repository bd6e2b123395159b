"""The stage `export`: an ONNX graph of the output, in its folder onnx."""

from typing import Any, Literal

from pydantic import Field

from ckpt_prune.common.filenames import GRAPH_FOLDER
from ckpt_prune.job.stage import Stage
from ckpt_prune.options.graphs import GraphSettings


class Export(GraphSettings, Stage):
    """An ONNX graph as the last step of a recipe."""

    key = "export"
    summary = "End in an ONNX graph, in the output's folder onnx."
    prunes = False
    writes = (GRAPH_FOLDER,)

    format: Literal["onnx"] = Field("onnx", description="What is written, into the output's folder onnx.")
    proof: bool = Field(
        True,
        alias="validate",
        description="Compare the graph in onnxruntime with PyTorch; outside the tolerance fails.",
    )

    @classmethod
    def fill_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        spaces, export = values.get("spaces"), values.get("export")
        if not isinstance(spaces, dict) or not isinstance(export, dict):
            return values
        size, columns = export.get("block_size"), spaces.get("mlp")
        if not isinstance(columns, dict) or not isinstance(size, int):
            return values
        return values | {"spaces": spaces | {"mlp": {"multiple_of": size} | columns}}
