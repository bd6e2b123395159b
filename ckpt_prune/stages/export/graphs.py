"""ONNX graphs as the last step of a recipe."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.filenames import GRAPH_FOLDER
from ckpt_prune.job.job import Job
from ckpt_prune.model.composites import whole_of_stack
from ckpt_prune.onnx.export import Exported, GraphWriter, ProvenGraphs, estimate_graphs_bytes
from ckpt_prune.onnx.proof import Dense
from ckpt_prune.options.graphs import GraphSettings
from ckpt_prune.stages.export.keys import Export


@dataclass(frozen=True)
class Graphs:
    """The graphs, with all that can be checked before the first block."""

    key: ClassVar[str] = "onnx"
    noun: ClassVar[str] = "graph"
    recipe: Export
    proven: ProvenGraphs

    @classmethod
    def of(cls, recipe: Export, job: Job) -> "Graphs":
        """Return the graphs of an output that is still to be made; its model reads what the output will."""
        source = whole_of_stack(job.model.checkpoint)
        # A base model is no dense one, and nothing is compared token by token with one of more tokens.
        dense = None if source.adapter is not None or source.rewritten else Dense(source.path)
        proven = ProvenGraphs.of(
            recipe, source, job.proving, proof=recipe.proof, dense=dense, trust=job.trust, split="calib"
        )
        return cls(recipe, proven)

    def bytes(self, parameters: int) -> int:
        return estimate_graphs_bytes(self.recipe, parameters)

    def is_done(self, output: Path) -> bool:
        return (output / GRAPH_FOLDER).exists()

    def run(self, output: Path) -> Exported:
        """Write the graphs of an output into its folder `onnx`."""
        out, recipe = output / GRAPH_FOLDER, self.recipe
        return self.proven.write(GraphWriter(Checkpoint.open(output, packed=True), out, recipe, overwrite=True))

    def command(self, output: Path) -> str:
        words = ["ckpt-prune", "export", str(output), "-o", str(output / GRAPH_FOLDER)]
        for name, field in GraphSettings.model_fields.items():
            value, option = getattr(self.recipe, name), name.replace("_", "-")
            if value in (field.get_default(call_default_factory=True), ("fp32",)):
                continue
            if isinstance(value, tuple):
                words += [word for each in value for word in (f"--{option}", each)]
            elif isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{option}")
            else:
                words += [f"--{option}", f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join(words if self.recipe.proof else [*words, "--no-validate"])
