"""The proof that onnxruntime computes what PyTorch does: an exported graph against the checkpoint it was made from."""

from pathlib import Path

import torch

from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.errors import UserError
from ckpt_prune.evaluation.loading import load_model
from ckpt_prune.exporting.manifest import Source, read_manifest, runtime_versions
from ckpt_prune.exporting.outcome import ProofSamples, Validation
from ckpt_prune.exporting.proofs import ImageProof, TextProof
from ckpt_prune.exporting.reference import Reference
from ckpt_prune.exporting.session import Provider

TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2}
"""By the graph's type: the largest difference that passes, in units of the case's largest output."""


def validate(
    folder: Path,
    model: Path,
    samples: ProofSamples,
    *,
    provider: Provider = "cpu",
    tolerance: float | None = None,
    trust: bool = False,
) -> Validation:
    """Hold a graph against the model it was made from.

    The WHOLE model is loaded, with the checkpoint's own values in float32 on the CPU whatever the graph's type is, so
    that what is measured holds all that the export did.

    A case passes where the largest difference is at most `tolerance` times the largest output in PyTorch, and the mean
    difference a tenth of that. By default 1e-4 in fp32: rounding moves outputs by 1e-7 to 1e-5 of the largest one. In
    fp16 2e-2: one rounding is 5e-4, and they add up over layers to a few 1e-3. A wrong weight, mask or position moves
    them by 1e-1 and more.

    Args:
        folder: an exported folder.
        model: the checkpoint it was made from.
        samples: what to compare on.
        provider: what onnxruntime runs on.
        tolerance: see above.
        trust: run the checkpoint's own code, where it is not this tool's.

    Returns:
        What came out, also where the graph is damaged or wrong.

    Raises:
        UserError: the folder is no export, or not of this model; the model does not load or fails on the samples.
    """
    manifest = read_manifest(folder)
    checkpoint = Checkpoint.open(model)
    if manifest.source.fingerprint != checkpoint.fingerprint:
        raise UserError(f"{folder} was not made from {checkpoint.path}: its record names {manifest.source.name}")
    wrong = samples.images if manifest.modality == "text" else samples.windows
    if wrong is not None:
        raise UserError(f"{folder} reads {manifest.modality}: it cannot be compared on the other")
    whole = load_model(checkpoint.path, device="cpu", dtype=torch.float32, trust_remote_code=trust)
    reference = Reference(whole, manifest.what, {port.name for port in manifest.inputs})
    allowed = TOLERANCES[manifest.dtype] if tolerance is None else tolerance
    kind = TextProof if manifest.modality == "text" else ImageProof
    proof = kind(folder, manifest, reference, samples, allowed)
    proof.run(provider)
    return Validation(
        passed=all(check.passed is not False for check in proof.checks),
        provider="cpu" if proof.graph is None else proof.graph.session.provider,
        note=None if proof.graph is None else proof.graph.session.note,
        dtype=manifest.dtype,
        tolerance=allowed,
        against=Source(name=checkpoint.name, fingerprint=checkpoint.fingerprint),
        data=samples.description or {"what": "noise", "seed": samples.seed},
        checks=proof.checks,
        cases=proof.cases,
        metrics=proof.metrics,
        versions=runtime_versions(),
        files=proof.present,
    )
