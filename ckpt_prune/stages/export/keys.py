"""The keys of `export`: an ONNX graph of the output in its folder onnx, or a GGUF file beside its weights."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from ckpt_prune.common.filenames import GRAPH_FOLDER
from ckpt_prune.common.graph_types import GGUF_FILES
from ckpt_prune.options.graphs import GraphSettings
from ckpt_prune.recipe.recipe import Recipe, StageKeys


class Export(GraphSettings, StageKeys):
    """An ONNX graph or a GGUF file as the last step of a recipe."""

    key = "export"
    summary = "End in an ONNX graph, in the output's folder onnx, or in a GGUF file."
    prunes = False
    measures_itself = True
    changes_weights = False
    later: ClassVar[Mapping[str, Any]] = {"output_type": None, "types": {}}
    writes = (GRAPH_FOLDER, *GGUF_FILES.values())

    proof: bool = Field(
        True,
        alias="validate",
        description="Compare what is exported with PyTorch, in onnxruntime or llama.cpp; outside the tolerance fails.",
    )

    @property
    def runtimes(self) -> Sequence[str]:
        return ("llama.cpp",) if self.format == "gguf" else ()

    def needs_moments(self, recipe: Recipe) -> bool:
        return self.format == "gguf" and self.rounding == "gptq"

    def needs_samples(self, recipe: Recipe) -> bool:
        return self.needs_moments(recipe)

    @classmethod
    def fill_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        spaces, export = values.get("spaces"), values.get("export")
        if not isinstance(spaces, dict) or not isinstance(export, dict):
            return values
        size, columns = export.get("block_size"), spaces.get("mlp")
        if not isinstance(columns, dict) or not isinstance(size, int):
            return values
        return values | {"spaces": spaces | {"mlp": {"multiple_of": size} | columns}}
