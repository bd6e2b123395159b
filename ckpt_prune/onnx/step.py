"""The graph of a recipe that has `export`: made once the output is there, checked before anything is."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.filenames import GRAPH_FOLDER
from ckpt_prune.onnx.folder import GraphWriter, graphs_bytes
from ckpt_prune.onnx.outcome import ProofSamples
from ckpt_prune.onnx.proof_data import proof_samples
from ckpt_prune.onnx.rounding import check_rounded
from ckpt_prune.onnx.session import provider_for
from ckpt_prune.onnx.tasks import check_padding, chosen_task
from ckpt_prune.onnx.writing import Exported, write_graph
from ckpt_prune.options.data import CalibrationOptions, ImageOptions, ProofOptions
from ckpt_prune.options.graphs import GraphSettings
from ckpt_prune.stages.export.stage import Export


@dataclass(frozen=True)
class GraphStep:
    """The last step of a recipe, with all that can be checked before the first."""

    recipe: Export
    samples: ProofSamples | None
    trust: bool

    @classmethod
    def of(
        cls,
        recipe: Export,
        source: Checkpoint,
        calibration: CalibrationOptions,
        images: ImageOptions,
        *,
        trust: bool,
    ) -> "GraphStep":
        """The step for an output that is still to be made.

        Args:
            recipe: what graph.
            source: the model that is pruned: it reads what its output will.
            calibration: its text, in its windows, is what the graph is proved on.
            images: the same of a vision model.
            trust: run the checkpoint's own code, where it is not this tool's.

        Raises:
            UserError: the model cannot do the task, or the data is too short.
        """
        task = chosen_task(source.config, folder=source.path, task=recipe.task, cache=recipe.cache)
        check_padding(source.config, task)
        check_rounded(recipe, task, images=images.images is not None, provider=provider_for(recipe.optimize))
        samples = None
        if recipe.proof or recipe.quantised:
            asked = ProofOptions(
                text=calibration.text,
                window=calibration.window,
                images=images.images,
                labels=images.labels,
                max_corrupt=images.max_corrupt,
            )
            samples = proof_samples(source.path, task, asked, trust=trust, split="calib", rounded=recipe.quantised)
        return cls(recipe, samples, trust)

    def bytes(self, parameters: int) -> int:
        """Size of the graph of so many parameters."""
        return graphs_bytes(self.recipe, parameters)

    def run(self, output: Path, say: Callable[[str], None]) -> Exported:
        """Write the graph of a finished output into its folder `onnx`.

        Args:
            output: the finished output.
            say: told how to make the graph later, where it cannot be made now.

        Raises:
            UserError: it cannot be made.
        """
        out = output / GRAPH_FOLDER
        try:
            # What a killed run left is dropped; a graph that is there is not replaced.
            writer = GraphWriter(Checkpoint.open(output), out, self.recipe, overwrite=not out.exists())
            return write_graph(
                writer,
                self.samples if self.recipe.proof else None,
                measured=self.samples,
                tolerance=self.recipe.tolerance,
                max_loss=self.recipe.max_loss,
                trust=self.trust,
            )
        except BaseException:
            say(f"{output} is complete without its graph: `{self._command(output, out)}` writes it")
            raise

    def _command(self, output: Path, out: Path) -> str:
        """The command that does this step alone."""
        words = ["ckpt-prune", "export", str(output), "-o", str(out)]
        for name, field in GraphSettings.model_fields.items():
            value, option = getattr(self.recipe, name), name.replace("_", "-")
            if value == field.default:
                continue
            if isinstance(value, tuple):
                words += [word for each in value for word in (f"--{option}", each)]
            elif isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{option}")
            else:
                words += [f"--{option}", f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join(words if self.recipe.proof else [*words, "--no-validate"])
