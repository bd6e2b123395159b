"""Prove that a quantised checkpoint is whole, and that it is its source, rounded."""

from dataclasses import replace
from math import isclose
from pathlib import Path

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint, read_tensors
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.packed import PACKED, SCALE, SHAPE
from ckpt_prune.checkpoint.quantised import is_packed
from ckpt_prune.checkpoint.shard import TensorInfo, read_header
from ckpt_prune.common.check import Check, run_check
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import QUANTISED_RECORD, REPORT
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.whole_model import stock_load_report
from ckpt_prune.model.containers.opening import describe_unknown
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.stages.quantize.packing import packed_shapes, require_library, unpack_codes
from ckpt_prune.stages.quantize.records import QuantizationRecord, QuantizedWeights, read_record
from ckpt_prune.stages.quantize.rounding import codes_of, weights_of
from ckpt_prune.stages.report import find_report
from ckpt_prune.verification.verify import check_digests, run_side_file_check


def is_quantized(folder: Path) -> bool:
    """Return True if this tool wrote the weights of a folder in few bits, by `quantize` or while pruning."""
    if (folder / QUANTISED_RECORD).is_file():
        return True
    return (folder / REPORT).is_file() and (folder / CONFIG).is_file() and is_packed(read_json_object(folder / CONFIG))


def verify_quantized(folder: Path, against: Path | None = None) -> list[Check]:
    """Check a folder with weights of few bits, and with `against` every weight of `quantize` against its source's.

    It loads the WHOLE model once, with stock transformers.
    """
    report = find_report(folder)
    pruned = None if report is None else report.quantize
    record, digests = (read_record(folder), {}) if pruned is None or report is None else (pruned, report.files)
    source = None
    if isinstance(record, QuantizationRecord):
        digests = record.files
        source = None if against is None else _source(folder, record, against)
    files = [name for name in digests if name.endswith(".safetensors")]
    tensors: dict[str, TensorInfo] = {}

    def headers() -> tuple[bool, str]:
        for file in files:
            tensors.update(read_header(folder / file).tensors)
        return _check_shapes(record, tensors)

    checks = [
        run_check("tensors", headers),
        run_check("finite", lambda: _check_finite(folder, tensors)),
        run_check("load", lambda: _check_load(folder)),
        run_check("digests", lambda: check_digests(folder, digests)),
        *run_side_file_check(folder),
    ]
    if source is not None:
        checks.append(run_check("rounded weights", lambda: _compare_weights(folder, record, tensors, source)))
    elif against is not None:
        why = "they were pruned before they were rounded: `ckpt-prune evaluate OUT --against MODEL` compares outputs"
        checks.append(Check("rounded weights", None, f"not compared with {against}: {why}"))
    return checks


def _source(folder: Path, record: QuantizationRecord, against: Path) -> Checkpoint:
    source = Checkpoint.open(against)
    if source.fingerprint != record.source.fingerprint:
        raise UserError(f"{folder} was not made from {source.path}: its record names {record.source.name}")
    return replace(source, config=describe_unknown(source.config))


def _check_shapes(record: QuantizedWeights, tensors: dict[str, TensorInfo]) -> tuple[bool, str]:
    for rounded in record.weights:
        module = rounded.weight.removesuffix(".weight")
        if f"{module}.{PACKED}" not in tensors or f"{module}.{SCALE}" not in tensors:
            return False, f"{module} lacks {PACKED} or {SCALE}"
        rows, words = tensors[f"{module}.{PACKED}"].shape
        scales = tensors[f"{module}.{SCALE}"]
        scheme = record.scheme_of(rounded)
        columns = scales.shape[-1] * (scheme.group_size or 0) or words * 32 // scheme.bits
        expected = packed_shapes(module, (rows, columns), scheme, scales.dtype)
        for name, (dtype, shape) in expected.items():
            info = tensors.get(name)
            if info is None or (info.dtype, info.shape) != (dtype, shape):
                return False, f"{name} is not {dtype} {list(shape)}"
    return True, f"{len(record.weights)} weights are stored as {record.words}"


def _check_finite(folder: Path, tensors: dict[str, TensorInfo]) -> tuple[bool, str]:
    floats = [info for info in tensors.values() if info.dtype.is_floating_point]
    for info in track(floats, "checking for NaN and Inf", unit="tensor"):
        if not all_finite(read_tensors(folder, [info])[info.name]):
            return False, f"{info.name} has NaN or Inf"
    return True, "no NaN, no Inf"


def _check_load(folder: Path) -> tuple[bool, str]:
    require_library()
    report = stock_load_report(folder)
    return report.clean, report.fault or "by stock transformers: no key missing, unexpected or mismatched"


def _compare_weights(
    folder: Path, record: QuantizedWeights, tensors: dict[str, TensorInfo], source: Checkpoint
) -> tuple[bool, str]:
    """Check that quantised weights are the source's, rounded under the stored scales, and all others equal."""
    source, _ = match_checkpoint(source)
    weights = {rounded.weight: rounded for rounded in record.weights}
    for name in track(list(source.tensors), "comparing", unit="tensor"):
        theirs = source.read([name])[name]
        if name not in weights:
            if name not in tensors or not torch.equal(_read(folder, tensors, name), theirs):
                return False, f"{name} is not the source's"
            continue
        module, scheme = name.removesuffix(".weight"), record.scheme_of(weights[name])
        if theirs.shape[1] % (scheme.group_size or 1):
            return False, f"{name} has {theirs.shape[1]} columns, which no groups of {scheme.group_size} make up"
        codes = unpack_codes(_read(folder, tensors, f"{module}.{PACKED}"), theirs.shape[1], scheme)
        scales = _read(folder, tensors, f"{module}.{SCALE}")
        shape = _read(folder, tensors, f"{module}.{SHAPE}").tolist()
        if record.rounding == "gptq":
            change = (weights_of(codes, scales, scheme) - theirs.double()).square().sum()
            share = float(change / theirs.double().square().sum().clamp_min(torch.finfo(torch.float64).tiny))
            if shape != list(theirs.shape) or not isclose(
                share, weights[name].error or 0.0, rel_tol=1e-6, abs_tol=1e-12
            ):
                return False, f"{name} is not as far from its source's as GPTQ left it"
        elif shape != list(theirs.shape) or not torch.equal(codes, codes_of(theirs, scales, scheme)):
            return False, f"{name} is not the source's, rounded to nearest"
    how = "rounded to nearest" if record.rounding == "nearest" else "as far off as GPTQ left them"
    others = len(source.tensors) - len(weights)
    return True, f"{len(weights)} weights are the source's, {how}; {others} tensors are its own, bit for bit"


def _read(folder: Path, tensors: dict[str, TensorInfo], name: str) -> Tensor:
    return read_tensors(folder, [tensors[name]])[name]
