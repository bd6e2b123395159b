"""Writing a graph and proving it in one go: it takes its place only if it computes what the model does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_prune.exporting.folder import GraphWriter, graph_bytes
from ckpt_prune.exporting.manifest import Manifest
from ckpt_prune.exporting.outcome import ProofSamples, Validation
from ckpt_prune.exporting.session import Provider
from ckpt_prune.exporting.validation import validate


@dataclass(frozen=True)
class Exported:
    """What became of an export.

    Attributes:
        path: the folder that was to be written.
        manifest: the folder's record; None where the graph did not pass, and nothing is left.
        validation: the comparison with PyTorch; None where it was not asked for.
        bytes: of the graph with its weights; 0 where nothing is left.
    """

    path: Path
    manifest: Manifest | None
    validation: Validation | None
    bytes: int

    @property
    def passed(self) -> bool:
        """Whether there is a graph."""
        return self.manifest is not None

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "written": self.passed,
            "out": str(self.path),
            "bytes": self.bytes,
            "manifest": None if self.manifest is None else self.manifest.model_dump(),
            "validation": None if self.validation is None else self.validation.model_dump(),
        }


def write_graph(
    writer: GraphWriter,
    samples: ProofSamples | None,
    *,
    provider: Provider = "cpu",
    tolerance: float | None = None,
    trust: bool = False,
) -> Exported:
    """Write a graph that computes what the model does, or nothing.

    Args:
        writer: of the graph, checked.
        samples: what to prove it on; None: it is not proved.
        provider: what onnxruntime runs on.
        tolerance: as in `validation.validate`.
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
    return Exported(writer.out, manifest, found[0] if found else None, size)
