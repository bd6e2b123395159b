"""The two models that are compared: their graphs, and what they cost on paper."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_prune.benchmarking.participants import Label, Phase
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.model_folder import resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_FOLDER, GRAPH_RECORD
from ckpt_prune.model.context import reserved_positions
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.onnx.export import GraphWriter
from ckpt_prune.onnx.records import Manifest, read_manifest
from ckpt_prune.onnx.tasks import GraphTask, choose_task
from ckpt_prune.options.commands import BenchmarkOptions
from ckpt_prune.options.graphs import GraphSettings

Say = Callable[[str], None]


@dataclass(frozen=True)
class BenchmarkModel:
    """One of the two."""

    label: Label
    name: str
    """The path that the user gave."""
    folder: Path
    checkpoint: Checkpoint | None
    """None of an exported folder."""
    graph: Path | None = None
    """Folder of its graph, if there is one."""
    manifest: Manifest | None = None
    """The graph's record."""


def open_model(label: Label, name: str, options: BenchmarkOptions, say: Say) -> BenchmarkModel:
    """Open a checkpoint, or a folder written by `ckpt-prune export`.

    With `options.onnx` a suitable graph in a checkpoint's folder `onnx` is used, and `say` gets a line about it.
    """
    folder = resolve_model(name)
    if (folder / GRAPH_RECORD).is_file():
        manifest = _pick_graph(read_manifest(folder), options)
        if (reason := _why_unsuitable(manifest, options)) is not None:
            raise UserError(f"{name} is an exported graph, and {reason}: give the checkpoint, or leave that option out")
        return BenchmarkModel(label, name, folder, None, folder, manifest)
    checkpoint = Checkpoint.open(folder)
    model = BenchmarkModel(label, name, folder, checkpoint)
    graph = folder / GRAPH_FOLDER
    if not options.onnx or not (graph / GRAPH_RECORD).is_file():
        return model
    manifest = _pick_graph(read_manifest(graph), options)
    reason = _why_unsuitable(manifest, options)
    task = choose_task(checkpoint.config, folder=checkpoint.path)
    if manifest.source.fingerprint != checkpoint.fingerprint:
        reason = "it was made of other weights"
    elif manifest.full_task != task:
        reason = f"it is {_describe_task(manifest.full_task)}, not {_describe_task(task)}"
    if reason is not None:
        say(f"{name}: the graph in {graph} is not used: {reason}")
        return model
    say(f"{name}: using the graph in {graph}")
    return replace(model, graph=graph, manifest=manifest)


def _pick_graph(manifest: Manifest, options: BenchmarkOptions) -> Manifest:
    """Return the graph of the type that is asked for, or the first."""
    types = [graph.dtype for graph in manifest.graphs]
    return manifest.select(options.dtype if options.dtype in types else types[0])


def _why_unsuitable(manifest: Manifest, options: BenchmarkOptions) -> str | None:
    if options.dtype not in (None, manifest.dtype):
        return f"it is {manifest.dtype}"
    if options.optimize not in (None, manifest.optimize):
        return f"it was written with --optimize {manifest.optimize}"
    return None


def _describe_task(task: GraphTask) -> str:
    return f"for {task.name}{' with a cache' if task.cached else ''}"


def add_graph(model: BenchmarkModel, options: BenchmarkOptions, scratch: Path, say: Say) -> BenchmarkModel:
    """Export a graph for this run if the model has none; its weights are all rounded alike."""
    if model.graph is not None or model.checkpoint is None:
        return model
    say(f"{model.name}: exporting a graph, for this run only")
    out = scratch / model.label
    settings = {"dtype": options.dtype or "fp32", "optimize": options.optimize or "none"}
    try:
        writer = GraphWriter(model.checkpoint, out, GraphSettings.model_validate(settings))
        manifest = writer.write(trust=options.trust_remote_code)
    except UserError as error:
        raise UserError(f"{model.name} in onnxruntime: {error}") from error
    return replace(model, graph=out, manifest=manifest)


@dataclass(frozen=True)
class Costs:
    """Parameters of a model, and the coefficients of its FLOPs as a polynomial in the number of tokens.

    Every linear is applied to every token, pooled ones once; scores and their product with the values are over pairs
    of tokens (`model.cost.cost_of`). So the coefficients also say what one more token costs.
    """

    parameters: int
    once: int
    per_token: int
    per_pair: int

    def flops(self, workload: Workload, phase: Phase) -> int:
        """FLOPs of one timing of a phase: of the whole batch, or in decode of one step, the mean over all steps.

        Step i after T tokens has one query over T + i keys, i from 1.
        """
        if workload.modality == "image":
            return workload.batch * self.once
        tokens, steps = workload.tokens, workload.steps
        if phase == "decode":
            keys = steps * tokens + steps * (steps + 1) // 2
            return workload.batch * (self.once + self.per_token + self.per_pair * keys // steps)
        return workload.batch * (self.once + self.per_token * tokens + self.per_pair * tokens**2)


def count_costs(checkpoint: Checkpoint) -> Costs | None:
    """Return the costs of a checkpoint; None if its family has no description."""
    try:
        model = Model.of(checkpoint)
    except UserError:
        return None
    cost = cost_of(model)
    if model.family.modality == "image":
        return Costs(cost.parameters, once=cost.flops, per_token=0, per_pair=0)

    def count_flops(tokens: int) -> int:
        config = copy.copy(model.config)
        config.max_position_embeddings = tokens + reserved_positions(model.config)
        return cost_of(model.with_config(config)).flops

    # Three points determine the parabola. Tokens are shared out among experts, to each a whole number of them.
    experts = model.family.experts
    step = 1 if experts is None else model.dimension(experts.count)
    one, two, three = (count_flops(step * each) for each in (1, 2, 3))
    of_pairs = (three - 2 * two + one) // 2
    of_tokens = two - one - 3 * of_pairs
    once = one - of_tokens - of_pairs
    return Costs(cost.parameters, once, per_token=of_tokens // step, per_pair=of_pairs // step**2)
