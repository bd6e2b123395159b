"""Writing a graph and proving it in one go: it takes its place only if it computes what the model does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.onnx.folder import GraphWriter, graph_bytes
from ckpt_prune.onnx.manifest import Manifest
from ckpt_prune.onnx.outcome import ProofSamples, Validations
from ckpt_prune.onnx.session import Provider
from ckpt_prune.onnx.validation import Dense, validate


@dataclass(frozen=True)
class Exported:
    """What became of an export.

    Attributes:
        path: the folder that was to be written.
        manifest: the folder's record; None where the graph did not pass, and nothing is left.
        validation: the comparison with PyTorch; None where it was not asked for.
        bytes: of each graph with its weights, by its type; empty where nothing is left.
    """

    path: Path
    manifest: Manifest | None
    validation: Validations | None
    bytes: dict[GraphType, int]

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
    measured: ProofSamples | None = None,
    provider: Provider | None = None,
    tolerance: float | None = None,
    max_loss: float | None = None,
    dense: Dense | None = None,
    trust: bool = False,
) -> Exported:
    """Write a graph that computes what the model does, or nothing.

    Args:
        writer: of the graph, checked.
        samples: what to prove it on; None: it is not proved.
        measured: what rounding is measured on.
        provider: as in `validation.validate`.
        tolerance: as there.
        max_loss: as there.
        dense: as there.
        trust: run the checkpoint's own code, where it is not this tool's.
    """
    found: list[Validations] = []

    def prove(folder: Path) -> bool:
        assert samples is not None
        validation = validate(
            folder,
            writer.source.path,
            samples,
            provider=provider,
            tolerance=tolerance,
            max_loss=max_loss,
            dense=dense,
            trust=trust,
        )
        validation.write(folder)
        found.append(validation)
        return validation.passed

    manifest = writer.write(prove=prove if samples is not None else None, measured=measured, trust=trust)
    graphs = [] if manifest is None else manifest.graphs
    size = {each.dtype: graph_bytes(writer.out, each.file) for each in graphs}
    return Exported(writer.out, manifest, found[0] if found else None, size)
