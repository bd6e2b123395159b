"""Writing a graph and proving it, for the commands that end in one."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.checkpoint.units import human_bytes
from ckpt_prune.cli.proof import ProofOptions, proof_lines, proof_samples
from ckpt_prune.exporting.folder import GraphWriter, dtype_of, graph_bytes
from ckpt_prune.exporting.manifest import Manifest
from ckpt_prune.exporting.outcome import ProofSamples, Validation
from ckpt_prune.exporting.session import Provider, provider_for
from ckpt_prune.exporting.tasks import chosen_task
from ckpt_prune.exporting.validation import validate
from ckpt_prune.filenames import GRAPH_FOLDER
from ckpt_prune.options import CalibrationOptions, ImageOptions
from ckpt_prune.planning.export_recipe import ExportRecipe, GraphSettings


@dataclass(frozen=True)
class Outcome:
    """What became of an export."""

    out: Path
    manifest: Manifest | None
    """The folder's record; None where the graph did not pass, and nothing is left."""
    validation: Validation | None
    """None where it was not asked for."""
    bytes: int
    """Size of the graph with its weights; 0 where nothing is left."""

    @property
    def passed(self) -> bool:
        """Whether there is a graph."""
        return self.manifest is not None

    def json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "written": self.passed,
            "out": str(self.out),
            "bytes": self.bytes,
            "manifest": None if self.manifest is None else self.manifest.model_dump(),
            "validation": None if self.validation is None else self.validation.model_dump(),
        }

    def lines(self) -> list[str]:
        """For people."""
        found = [] if self.validation is None else proof_lines(self.validation)
        if self.manifest is None:
            return [
                *found,
                f"the graph does not compute what the model does: nothing is written to {self.out}",
            ]
        what = self.manifest
        cache = ", with cache" if what.cached else ""
        if self.validation is None:
            found.append("not compared with PyTorch: `ckpt-prune validate` does it")
        return [
            *found,
            f"{what.task}{cache}, {what.dtype}, opset {what.opset}, {human_bytes(self.bytes)}: written to {self.out}",
        ]


def write_graph(
    writer: GraphWriter,
    samples: ProofSamples | None,
    *,
    provider: Provider = "cpu",
    tolerance: float | None = None,
    trust: bool = False,
) -> Outcome:
    """Write a graph that computes what the model does, or nothing.

    Args:
        writer: of the graph, checked.
        samples: what to prove it on; None: it is not proved.
        provider: what onnxruntime runs on.
        tolerance: as in `export.validation.validate`.
        trust: run the checkpoint's own code, where it is not this tool's.
    """
    found: list[Validation] = []

    def prove(folder: Path) -> bool:
        assert samples is not None
        validation = validate(folder, writer.source.path, samples, provider=provider, tolerance=tolerance, trust=trust)
        validation.write(folder)
        found.append(validation)
        return validation.passed

    manifest = writer.write(prove=prove if samples is not None else None, trust=trust)
    size = graph_bytes(writer.out) if manifest is not None else 0
    return Outcome(writer.out, manifest, found[0] if found else None, size)


@dataclass(frozen=True)
class GraphStep:
    """The last step of a recipe, with all that can be checked before the first."""

    recipe: ExportRecipe
    samples: ProofSamples | None
    trust: bool

    @classmethod
    def of(
        cls,
        recipe: ExportRecipe,
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
        task = chosen_task(source.config, task=recipe.task, cache=recipe.cache)
        samples = None
        if recipe.proof:
            asked = ProofOptions(
                text=calibration.text,
                window=calibration.window,
                images=images.images,
                labels=images.labels,
                max_corrupt=images.max_corrupt,
            )
            samples = proof_samples(source.path, task, asked, trust=trust, split="calib")
        return cls(recipe, samples, trust)

    def bytes(self, parameters: int) -> int:
        """Size of the graph of so many parameters."""
        return parameters * dtype_of(self.recipe).itemsize

    def run(self, output: Path) -> Outcome:
        """Write the graph of a finished output into its folder `onnx`; says what is left where that fails."""
        out = output / GRAPH_FOLDER
        try:
            # What a killed run left is dropped; a graph that is there is not replaced.
            writer = GraphWriter(Checkpoint.open(output), out, self.recipe, overwrite=not out.exists())
            return write_graph(
                writer,
                self.samples,
                provider=provider_for(self.recipe.optimize),
                tolerance=self.recipe.tolerance,
                trust=self.trust,
            )
        except BaseException:
            click.echo(f"{output} is complete without its graph: `{self._command(output, out)}` writes it", err=True)
            raise

    def _command(self, output: Path, out: Path) -> str:
        """The command that does this step alone."""
        words = ["ckpt-prune", "export", str(output), "-o", str(out)]
        for name, field in GraphSettings.model_fields.items():
            value = getattr(self.recipe, name)
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{name}")
            elif value != field.default:
                words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join(words if self.recipe.proof else [*words, "--no-validate"])
