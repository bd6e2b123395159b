"""The proof that onnxruntime computes what PyTorch does: an exported graph against the checkpoint it was made from."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.model_folder import resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.onnx.manifest import Manifest, Source, read_manifest, runtime_versions
from ckpt_prune.onnx.metrics import Allowance
from ckpt_prune.onnx.outcome import ProofSamples, Validation, Validations
from ckpt_prune.onnx.proofs import ImageProof, Other, TextProof
from ckpt_prune.onnx.reference import Reference
from ckpt_prune.onnx.session import Provider, provider_for
from ckpt_prune.onnx.tasks import Task

TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2}
"""By the graph's type: the largest difference that passes, in units of the case's largest output."""


MAX_LOSS = {"int8": 0.02, "int4": 0.1, "q4f16": 0.1}
"""By the graph's type: what rounding may cost the task's metric."""


@dataclass(frozen=True)
class Dense:
    """Another model that a graph is held against: what pruning and rounding cost together."""

    folder: Path
    max_loss: float | None = None
    """What they may; None: it is only measured."""


def dense_of(name: str | None, max_loss: float | None) -> Dense | None:
    """The dense model that is named, fetched where it is on the Hub.

    Raises:
        UserError: it is not to be had, or an allowance without it.
    """
    if name is None:
        if max_loss is not None:
            raise UserError("--max-loss-dense goes with --dense MODEL")
        return None
    return Dense(resolve_model(name), max_loss)


def validate(
    folder: Path,
    model: Path,
    samples: ProofSamples,
    *,
    provider: Provider | None = None,
    tolerance: float | None = None,
    max_loss: float | None = None,
    dense: Dense | None = None,
    trust: bool = False,
) -> Validations:
    """Hold the graphs of a folder against the model they were made from.

    The WHOLE model is loaded, with the checkpoint's own values in float32 on the CPU whatever the graph's type is, so
    that what is measured holds all that the export did.

    A case passes where the largest difference is at most `tolerance` times the largest output in PyTorch, and the mean
    difference a tenth of that. By default 1e-4 in fp32: rounding moves outputs by 1e-7 to 1e-5 of the largest one. In
    fp16 2e-2: one rounding is 5e-4, and they add up over layers to a few 1e-3. A wrong weight, mask or position moves
    them by 1e-1 and more. Of a graph that is rounded to int8 or int4 outputs must be finite, and of the task's metric
    no more may be lost than `max_loss`, by default 2 % in int8 and 10 % in int4.

    Args:
        folder: an exported folder.
        model: the checkpoint it was made from.
        samples: what to compare on.
        provider: what onnxruntime runs on; None: what the graph is fused for, else the CPU.
        tolerance: see above.
        max_loss: see above.
        dense: another model that the metric is compared with as well.
        trust: run the checkpoint's own code, where it is not this tool's.

    Returns:
        What came out, also where the graph is damaged or wrong.

    Raises:
        UserError: the folder is no export, or not of this model; a model does not load or fails on the samples; or a
            graph cannot be run on the provider.
    """
    manifest = read_manifest(folder)
    checkpoint = Checkpoint.open(model)
    check_source(folder, manifest, checkpoint)
    wrong = samples.images if manifest.modality == "text" else samples.windows
    if wrong is not None:
        raise UserError(f"{folder} reads {manifest.modality}: it cannot be compared on the other")
    whole = load_model(checkpoint.path, device="cpu", dtype=torch.float32, trust_remote_code=trust)
    others = others_of(dense, manifest.what, trust=trust)
    found = []
    for each in manifest.each:
        reference = Reference(whole, each.what, {port.name for port in each.inputs})
        rounded = each.entry.quantised is not None
        allowance = allowance_of(each.dtype, rounded=rounded, tolerance=tolerance, max_loss=max_loss)
        kind = TextProof if each.modality == "text" else ImageProof
        proof = kind(folder, each, reference, samples, allowance, others)
        proof.run(provider or provider_for(each.optimize))
        found.append(
            Validation(
                file=each.file,
                passed=all(check.passed is not False for check in proof.checks),
                provider="cpu" if proof.graph is None else proof.graph.session.provider,
                note=None if proof.graph is None else proof.graph.session.note,
                dtype=each.dtype,
                tolerance=None if rounded else allowance.tolerance,
                max_loss=allowance.max_loss,
                against=Source(name=checkpoint.name, fingerprint=checkpoint.fingerprint),
                data=samples.description or {"what": "noise", "seed": samples.seed},
                checks=proof.checks,
                cases=proof.cases,
                metrics=proof.metrics,
                continuations=proof.continuations,
                versions=runtime_versions(),
                files=proof.present,
            )
        )
    return Validations.of(found)


def check_source(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> None:
    """Refuse a model that a folder was not made from.

    Raises:
        UserError: its record names another.
    """
    if manifest.source.fingerprint != checkpoint.fingerprint:
        raise UserError(f"{folder} was not made from {checkpoint.path}: its record names {manifest.source.name}")


def own_source(folder: Path, manifest: Manifest) -> Path:
    """The model that a folder was made from, where it is at hand: the folder lies in it, or beside it.

    Raises:
        UserError: neither has the fingerprint that the record names.
    """
    above = folder.resolve().parent
    for place in (above, above / Path(manifest.source.name).name):
        if not (place / CONFIG).is_file():
            continue
        try:
            if Checkpoint.open(place).fingerprint == manifest.source.fingerprint:
                return place
        except UserError:  # another folder, or one that changed
            continue
    raise UserError(
        f"{folder} neither lies in nor beside {manifest.source.name}, which it was made from: give --against MODEL"
    )


def others_of(dense: Dense | None, task: Task, *, trust: bool) -> list[Other]:
    """What else the metric is compared with, loaded WHOLE.

    Raises:
        UserError: it does not load.
    """
    if dense is None:
        return []
    other = Checkpoint.open(dense.folder)
    loaded = load_model(other.path, device="cpu", dtype=torch.float32, trust_remote_code=trust)
    return [(other.name, Reference(loaded, task, set()), dense.max_loss)]


def allowance_of(dtype: GraphType, *, rounded: bool, tolerance: float | None, max_loss: float | None) -> Allowance:
    """How far a graph of a type may be from its model; None is what the type has by default."""
    return Allowance(
        TOLERANCES.get(dtype, 0.0) if tolerance is None or rounded else tolerance,
        (MAX_LOSS[dtype] if max_loss is None else max_loss) if rounded else None,
    )
