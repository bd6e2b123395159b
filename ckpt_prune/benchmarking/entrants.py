"""The two that are compared, and their graphs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckpt_prune.benchmarking.workload import Reads, reads_of
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.model_folder import resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_FOLDER, GRAPH_RECORD
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.job.graph_settings import GraphSettings
from ckpt_prune.onnx.folder import GraphWriter
from ckpt_prune.onnx.manifest import Manifest, read_manifest
from ckpt_prune.onnx.tasks import Task, chosen_task

Say = Callable[[str], None]


@dataclass(frozen=True)
class GraphWish:
    """What graph is wanted of a checkpoint; None where any will do, or else what `GraphSettings` has by default."""

    optimize: Literal["none", "cpu", "cuda"] | None = None
    dtype: GraphType | None = None

    def chosen(self, manifest: Manifest) -> Manifest:
        """Of a folder's graphs the one that is wanted, or the first."""
        there = [each.dtype for each in manifest.graphs]
        return manifest.of(self.dtype if self.dtype in there else there[0])

    def refuses(self, manifest: Manifest) -> str | None:
        """Why a graph that is there already is not what is wanted; None where it is."""
        if self.dtype not in (None, manifest.dtype):
            return f"it is {manifest.dtype}"
        if self.optimize not in (None, manifest.optimize):
            return f"it was written with --optimize {manifest.optimize}"
        return None


@dataclass(frozen=True)
class Entrant:
    """One of the two."""

    label: Literal["A", "B"]
    name: str
    """As the user gave it."""
    folder: Path
    checkpoint: Checkpoint | None
    """None of an exported folder."""
    graph: Path | None = None
    """Folder of its graph, where there is one."""
    manifest: Manifest | None = None
    """The graph's record."""

    def reads(self, *, trust: bool) -> Reads:
        """What it takes."""
        return reads_of(self.folder, self.manifest, trust=trust)


def open_entrant(label: Literal["A", "B"], name: str, wish: GraphWish, say: Say, *, onnx: bool) -> Entrant:
    """Open a checkpoint, or a folder written by `ckpt-prune export`.

    Args:
        label: which of the two it is.
        name: a folder or a Hub id.
        wish: what graph is wanted.
        say: is told whether the graph in a checkpoint's folder `onnx` is taken.
        onnx: whether a checkpoint's graph is wanted at all.

    Raises:
        UserError: it is neither, or it is damaged, or a graph that is not the one wanted.
    """
    folder = resolve_model(name)
    if (folder / GRAPH_RECORD).is_file():
        manifest = wish.chosen(read_manifest(folder))
        if (reason := wish.refuses(manifest)) is not None:
            raise UserError(f"{name} is an exported graph, and {reason}: give the checkpoint, or leave that option out")
        return Entrant(label, name, folder, None, folder, manifest)
    checkpoint = Checkpoint.open(folder)
    entrant = Entrant(label, name, folder, checkpoint)
    own = folder / GRAPH_FOLDER
    if not onnx or not (own / GRAPH_RECORD).is_file():
        return entrant
    manifest = wish.chosen(read_manifest(own))
    reason = wish.refuses(manifest)
    task = chosen_task(checkpoint.config, folder=checkpoint.path)
    if manifest.source.fingerprint != checkpoint.fingerprint:
        reason = "it was made of other weights"
    elif manifest.what != task:
        reason = f"it is {_purpose(manifest.what)}, not {_purpose(task)}"
    if reason is not None:
        say(f"{name}: the graph in {own} is not used: {reason}")
        return entrant
    say(f"{name}: the graph is that in {own}")
    return replace(entrant, graph=own, manifest=manifest)


def _purpose(task: Task) -> str:
    return f"for {task.name}{' with a cache' if task.cached else ''}"


def with_graph(entrant: Entrant, wish: GraphWish, scratch: Path, say: Say, *, trust: bool) -> Entrant:
    """The entrant with a graph, exported now where it has none.

    Raises:
        UserError: it cannot be exported.
    """
    if entrant.graph is not None or entrant.checkpoint is None:
        return entrant
    say(f"{entrant.name}: exporting a graph, for this run only")
    out = scratch / entrant.label
    asked = {"dtype": wish.dtype or "fp32", "optimize": wish.optimize or "none"}
    try:
        writer = GraphWriter(entrant.checkpoint, out, GraphSettings.model_validate(asked))
        manifest = writer.write(trust=trust)
    except UserError as error:
        raise UserError(f"{entrant.name} in onnxruntime: {error}") from error
    return replace(entrant, graph=out, manifest=manifest)
