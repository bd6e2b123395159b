"""What a graph loses of its task's metric, and nothing else: for graphs of any tool, with or without a record."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.evaluation.batches import check_windows
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.onnx.manifest import Manifest, Source, read_manifest, runtime_versions
from ckpt_prune.onnx.metrics import Allowance, Metric, image_metric, text_metric
from ckpt_prune.onnx.outcome import ProofCheck, ProofSamples, Validation, Validations
from ckpt_prune.onnx.proof_data import proof_samples
from ckpt_prune.onnx.proofs import judged
from ckpt_prune.onnx.reference import Reference
from ckpt_prune.onnx.session import OnnxModel, Provider, provider_for
from ckpt_prune.onnx.tasks import Task, chosen_task
from ckpt_prune.onnx.validation import Dense, allowance_of, check_source, others_of
from ckpt_prune.options.commands import ValidateOptions


@dataclass(frozen=True)
class _Measured:
    """A graph to be measured."""

    graph: OnnxModel
    folder: Path
    file: str
    task: Task
    dtype: GraphType | None
    allowance: Allowance


def metric_only(
    place: Path,
    model: Path,
    options: ValidateOptions,
    *,
    provider: Provider | None = None,
    dense: Dense | None = None,
    trust: bool = False,
) -> Validations:
    """Measure the task's metric of graphs beside their model's. Nothing is written.

    A graph with a record is measured as what that says. Of another the task is what the model's class does, or
    features, where it returns no logits; its config may lie beside it, or is the model's.

    Args:
        place: a graph, or an exported folder.
        model: the WHOLE checkpoint that it is of, which is loaded in float32; text and images are read as it does.
        options: what to measure on, and what may be lost.
        provider: what onnxruntime runs on; None: what the graph is fused for, else the CPU.
        dense: another model that the metric is compared with as well.
        trust: run the checkpoint's own code, where it is not this tool's.

    Raises:
        UserError: no metric can be measured, the graph is of another model, a graph without a record has no allowance,
            or something does not load.
    """
    checkpoint = Checkpoint.open(model)
    graphs = _graphs(place, checkpoint, options, provider)
    first = next(graphs)
    task = first.task
    samples = proof_samples(checkpoint.path, task, options, trust=trust)
    if samples.windows is None and samples.images is None:
        raise UserError(f"no metric is measured on noise: give {'--text' if task.modality == 'text' else '--images'}")
    whole = load_model(checkpoint.path, device="cpu", dtype=torch.float32, trust_remote_code=trust)
    if samples.windows is not None:
        check_windows(whole, samples.windows)
    others = others_of(dense, task, trust=trust)

    def one(each: _Measured) -> Validation:
        def measure(reference: Reference, allowance: Allowance) -> Metric | str:
            return _metric(each, reference, samples, checkpoint.path, allowance)

        own = Reference(whole, each.task, set(each.graph.inputs))
        metrics, passed, said = judged(measure, own, each.allowance, others)
        if passed is None:
            raise UserError(f"{each.folder / each.file}: {said}")
        session = each.graph.session
        return Validation(
            file=each.file,
            passed=passed,
            provider=session.provider,
            note=session.note,
            dtype=each.dtype,
            tolerance=None if each.allowance.rounded else each.allowance.tolerance,
            max_loss=each.allowance.max_loss,
            against=Source(name=checkpoint.name, fingerprint=checkpoint.fingerprint),
            data=samples.description or {},
            checks=[ProofCheck(name="metric", passed=passed, detail=said)],
            cases=[],
            metrics=metrics,
            continuations=[],
            versions=runtime_versions(),
            files=sha256_files(each.folder, [each.file]),
        )

    return Validations.of([one(each) for each in chain([first], graphs)])


def recorded(graph: Path) -> Manifest | None:
    """What the folder that a graph lies in says of it; None where this tool did not write it.

    Raises:
        UserError: there is a record, and it is damaged.
    """
    if not (graph.parent / GRAPH_RECORD).is_file():
        return None
    return next((each for each in read_manifest(graph.parent).each if each.file == graph.name), None)


def _graphs(
    place: Path, checkpoint: Checkpoint, options: ValidateOptions, provider: Provider | None
) -> Iterator[_Measured]:
    """Each graph, open."""
    folder = place if place.is_dir() else place.parent
    manifest = read_manifest(place) if place.is_dir() else recorded(place)
    if manifest is None:
        yield _unrecorded(place, checkpoint, options, provider)
        return
    check_source(folder, manifest, checkpoint)
    for each in manifest.each:
        graph = OnnxModel(folder, each.file, provider=provider or provider_for(each.optimize))
        rounded = each.entry.quantised is not None
        allowance = allowance_of(each.dtype, rounded=rounded, tolerance=options.tolerance, max_loss=options.max_loss)
        yield _Measured(graph, folder, each.file, each.what, each.dtype, allowance)


def _unrecorded(path: Path, checkpoint: Checkpoint, options: ValidateOptions, provider: Provider | None) -> _Measured:
    if options.max_loss is None:
        raise UserError(
            f"{path} has no record of this tool's that says how it is rounded: say what it may lose, --max-loss 2%"
        )
    described = None if (path.parent / CONFIG).is_file() else checkpoint.path
    graph = OnnxModel(path.parent, path.name, provider=provider or "cpu", described=described)
    if any(name.endswith("logits") for name in graph.outputs):
        task = chosen_task(checkpoint.config, folder=checkpoint.path, cache=graph.cached or None)
    elif "last_hidden_state" in graph.outputs:
        task = chosen_task(checkpoint.config, folder=checkpoint.path, task="feature-extraction")
    else:
        raise UserError(f"{path} returns {', '.join(list(graph.outputs)[:3])}: neither logits nor last_hidden_state")
    return _Measured(graph, path.parent, path.name, task, None, Allowance(0.0, options.max_loss))


def _metric(
    each: _Measured, reference: Reference, samples: ProofSamples, folder: Path, allowance: Allowance
) -> Metric | str:
    if samples.images is not None:
        return image_metric(each.graph, reference, each.task.name, samples.images, allowance)
    assert samples.windows is not None
    return text_metric(each.graph, reference, each.task.name, samples.windows, folder, allowance)
