"""The GGUF file at the end of a recipe."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt_prune.common.graph_types import GGUF_BITS, GGUF_FILES, GgufType
from ckpt_prune.gguf.export import ExportedGguf, export_gguf
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.llama_cpp import require_runtime
from ckpt_prune.gguf.rounding import needs_program
from ckpt_prune.gguf.tokenizer import tokenizer_values
from ckpt_prune.gguf.types import type_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import CalibrationOptions, ProofOptions
from ckpt_prune.stages.export.stage import Export


@dataclass(frozen=True)
class GgufStep:
    """The last step of a recipe with `export: {format: gguf}`, with all that can be checked before the first.

    Attributes:
        recipe: what to write.
        kind: type of the matrices.
        proving: what to compare the file on.
        trust: run code that the checkpoint brings.
    """

    recipe: Export
    kind: GgufType
    proving: ProofOptions
    trust: bool

    @classmethod
    def of(
        cls, recipe: Export, source: Model, calibration: CalibrationOptions, *, rounded: bool, trust: bool
    ) -> "GgufStep":
        """Return the step for an output that is still to be made of a model; `rounded`: to int4, before the export.

        Raises:
            UserError: llama.cpp has no such model or tokenizer, or is not installed.
        """
        if recipe.proof:
            require_runtime()
        kind = recipe.gguf_type or ("q4_0" if rounded else type_of(source.checkpoint.dtype))
        needs_program(kind)
        tokenizer_values(source.checkpoint.path, lay_out(source).values["vocab_size"])
        return cls(recipe, kind, ProofOptions(text=calibration.text, window=calibration.window), trust)

    def bytes(self, parameters: int) -> int:
        """Return what the file takes at most."""
        return int(parameters * GGUF_BITS[self.kind] // 8)

    def run(self, output: Path, say: Callable[[str], None]) -> ExportedGguf:
        """Write the file of a finished output beside its weights; if that fails, `say` is told how to make it."""
        file = output / GGUF_FILES[self.kind]
        try:
            return export_gguf(
                str(output), file, self.proving, kind=self.kind, proof=self.recipe.proof, trust=self.trust
            )
        except BaseException:
            command = ["ckpt-prune", "export", str(output), "--format", "gguf", "--dtype", self.kind, "-o", str(file)]
            say(f"{output} is complete without its GGUF file: `{shlex.join(command)}` writes it")
            raise
