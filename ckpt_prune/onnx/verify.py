"""Proving that an exported folder is whole: its graph loads, is finite, and is the one that passed."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import VALIDATION
from ckpt_prune.common.progress import track
from ckpt_prune.onnx.integrity import check_files, check_operators, present_files
from ckpt_prune.onnx.manifest import Manifest, read_manifest
from ckpt_prune.onnx.outcome import read_validation
from ckpt_prune.onnx.reading import read_graph
from ckpt_prune.onnx.session import open_session, provider_for
from ckpt_prune.verification.verify import Check, run_check


def verify_graph(folder: Path, source: Path | None = None) -> list[Check]:
    """Check an exported folder without running its graph on anything.

    Args:
        folder: as `ckpt-prune export` wrote it.
        source: the checkpoint that it should be of.

    Raises:
        UserError: the folder is no export, or an unfinished one, or its record is damaged.
    """
    refuse_unfinished(folder)
    whole = read_manifest(folder)
    checks: list[Check] = []
    for manifest in whole.each:
        found = _of_graph(folder, manifest)
        several = len(whole.graphs) > 1
        checks += [replace(check, name=f"{manifest.file}: {check.name}") for check in found] if several else found
    if source is not None:
        checks.append(run_check("source", lambda: _source(whole, source)))
    return checks


def _of_graph(folder: Path, manifest: Manifest) -> list[Check]:
    present = present_files(folder, manifest)
    return [
        run_check("files", lambda: check_files(folder, manifest, present)),
        run_check("checker", lambda: check_operators(folder, manifest)),
        run_check("finite", lambda: _finite(folder / manifest.file)),
        run_check("load", lambda: _load(folder, manifest)),
        run_check("validation", lambda: _validation(folder, manifest, present)),
    ]


def _finite(path: Path) -> tuple[bool, str]:
    weights = read_graph(path).graph.initializers
    try:
        for name, value in track(list(weights.items()), "checking for NaN and Inf", unit="tensor"):
            tensor = value.const_value
            if tensor is not None and tensor.dtype.is_floating_point() and not np.isfinite(tensor.numpy()).all():
                return False, f"{name} has NaN or Inf"
    except Exception as error:  # protobuf's and onnx_ir's exceptions share no base class
        raise UserError(f"{path.name} cannot be read: {' '.join(str(error).split())[:300]}") from error
    return True, f"no NaN, no Inf in {len(weights)} tensors"


def _load(folder: Path, manifest: Manifest) -> tuple[bool | None, str]:
    wanted = provider_for(manifest.optimize)
    try:
        session = open_session(folder / manifest.file, provider=wanted)
    except UserError as error:
        # Operators for CUDA alone say nothing on a machine without it.
        return (None if wanted == "cuda" else False), str(error)
    inner = session.inner
    loaded = f"onnxruntime loads it: {len(inner.get_inputs())} inputs, {len(inner.get_outputs())} outputs"
    return True, loaded if session.note is None else f"{loaded}; {session.note}"


def _validation(folder: Path, manifest: Manifest, present: dict[str, str]) -> tuple[bool | None, str]:
    if not (folder / VALIDATION).is_file():
        return None, f"no {VALIDATION}: not compared with PyTorch, `ckpt-prune validate` does it"
    found = next((each for each in read_validation(folder).graphs if each.file == manifest.file), None)
    if found is None:
        return None, f"{VALIDATION} has nothing of {manifest.file}: `ckpt-prune validate` compares it with PyTorch"
    if found.files != present or found.against.fingerprint != manifest.source.fingerprint:
        return False, f"{VALIDATION} is not about these files: run `ckpt-prune validate`"
    if not found.passed:
        return False, f"{VALIDATION} says that the graph does not compute what the model does"
    held = "within the tolerance" if found.max_loss is None else f"at most {found.max_loss:.4g} of the metric is lost"
    return True, f"compared with PyTorch on {len(found.cases)} inputs, on {found.provider}: {held}"


def _source(manifest: Manifest, source: Path) -> tuple[bool, str]:
    checkpoint = Checkpoint.open(source)
    if manifest.source.fingerprint != checkpoint.fingerprint:
        return False, f"it was exported from another model than {source}: its record names {manifest.source.name}"
    return True, f"exported from {source}"
