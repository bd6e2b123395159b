"""Proving that a checkpoint is whole: it loads, it is finite, and it is what its report says it is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ckpt_prune._version import __version__
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.digests import find_changed_files
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.json_files import parse_json_object, read_json_object
from ckpt_prune.common.check import Check, run_check
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.progress import track
from ckpt_prune.conversion.stock_checkpoint import find_conversion
from ckpt_prune.evaluation.whole_model import stock_load_report
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.model.composites import (
    composite_names,
    extract_part,
    has_parts,
    has_stacks,
    is_composite,
    load_composite,
)
from ckpt_prune.model.containers.checking import check_shapes
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.containers.opening import describe_unknown
from ckpt_prune.model.containers.remote import MLX_MODULE, REMOTE_MODULE, is_own_code, remote_class
from ckpt_prune.model.descriptions import OUTSIDE_KEY, family_for_config, read_description
from ckpt_prune.model.matching import match_family
from ckpt_prune.model.skeleton import quiet_transformers
from ckpt_prune.model.supported import attach_description
from ckpt_prune.modeling_pruned import WEIGHTS_KEY
from ckpt_prune.stages.folders import find_functions
from ckpt_prune.stages.report import Report, find_report
from ckpt_prune.verification.kept import check_head, check_kept, moves_stream, shape_source

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", TOKENIZER_CONFIG)


def check_side_files(folder: Path) -> tuple[bool | None, str]:
    """Load the tokenizer and generation_config.json of a folder, as far as it has them.

    None if a tokenizer cannot be loaded here, because it needs code of its own or a package.
    """
    loaded = []
    if (folder / GENERATION_CONFIG_NAME).is_file():
        _load_generation_config(folder)
        loaded.append(GENERATION_CONFIG_NAME)
    present = [name for name in TOKENIZERS if (folder / name).is_file()]
    if present:
        if (folder / TOKENIZER_CONFIG).is_file() and "auto_map" in read_json_object(folder / TOKENIZER_CONFIG):
            return None, "the tokenizer needs code of its own, which is not run"
        if present[0] == "tokenizer.model" and find_spec("sentencepiece") is None:
            return None, "the tokenizer is not loaded: without a tokenizer.json that takes the package sentencepiece"
        load_tokenizer(folder)
        loaded.append("tokenizer")
    return True, f"{' and '.join(reversed(loaded))} load{'s' if len(loaded) == 1 else ''}"


def _load_generation_config(folder: Path) -> None:
    path = folder / GENERATION_CONFIG_NAME
    try:
        with quiet_transformers():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises anything here
        read_json_object(path)
        raise UserError(f"{path} cannot be loaded: {one_line(error)}") from error


_CARD = "README.md"
_MISREAD = (
    "a former version wrote it, and stock classes that its shapes fit misread it: prune again, or save it by "
    "ckpt_prune.load(OUT).save_pretrained(NEW)"
)


def verify(folder: Path, against: Path | None = None, family: Path | None = None) -> list[Check]:
    """Check a checkpoint; with `against` also that what stays is what the dense model had.

    Loads the WHOLE model once, with stock transformers. An output with remote code of this tool is loaded by
    `ckpt_prune.load`: the code in the folder is not run.

    Args:
        family: description of the dense model's family; by default the one that the checkpoint carries.
    """
    refuse_unfinished(folder)
    checkpoint = Checkpoint.open(folder)
    report = _read_report(folder)
    if report is None and not (has_stacks(checkpoint.config) or is_composite(checkpoint.config)):
        checkpoint = replace(checkpoint, config=describe_unknown(checkpoint.config))
    description = checkpoint.config.get(OUTSIDE_KEY)
    if family is not None:
        description = parse_json_object(read_description(family).encode())
    dense = None if against is None else open_dense(folder, report, against, description)
    part = checkpoint if report is None or report.part is None else extract_part(checkpoint, report.part)
    checks = [
        run_check("tensors", lambda: _check_tensors(checkpoint)),
        run_check("finite", lambda: _check_finite(checkpoint)),
        run_check("load", lambda: _check_load(checkpoint)),
        run_check("digests", lambda: _check_digests(folder, report)),
        *_check_pruned(part, None, report),
        *run_side_file_check(folder),
    ]
    if report is not None and dense is not None:
        checks += _check_against(part, dense, report)
    others = list[str]()
    for other in [] if report is None else map(Report.read, report.others):
        assert other.part is not None
        if dense is None or dense.within is None:
            checks += _check_pruned(extract_part(checkpoint, other.part), None, other)
        elif _has_all_parts(dense.within.whole, report):  # and none was pruned before
            whole = dense.within.whole
            checks += _check_pruned(extract_part(checkpoint, other.part), extract_part(whole, other.part), other)
            others.append(other.part)
    if part.within is not None and dense is not None:
        checks.append(run_check("other parts", lambda: _check_other_parts(part, dense, others)))
    return checks


def _has_all_parts(whole: Checkpoint, report: Report | None) -> bool:
    """Return whether a model is the one that was there before the first of several parts was pruned."""
    first = None if report is None or not report.others else Report.read(report.others[-1])
    return first is not None and first.source.fingerprint == extract_part(whole, str(first.part)).fingerprint


def _check_pruned(checkpoint: Checkpoint, dense: Checkpoint | None, report: Report | None) -> list[Check]:
    """Check what was pruned, a whole model or a part of one, and with `dense` what stays of it."""
    checks = [check for checks_of in find_functions("checks", "verify") for check in checks_of(checkpoint, report)]
    checks = _name_part(checks, report)
    return checks if dense is None or report is None else [*checks, *_check_against(checkpoint, dense, report)]


def _check_against(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> list[Check]:
    """Check that what stays of a model, or of a part of one, is what the dense one had."""
    checks = list[Check]()
    if moves_stream(report):
        checks.append(run_check("head", lambda: check_head(checkpoint, shape_source(dense, report), report)))
    checks.append(run_check("kept units", lambda: check_kept(checkpoint, shape_source(dense, report), report)))
    against_dense = find_functions("checks_against", "verify")
    checks += [check for checks_of in against_dense for check in checks_of(checkpoint, dense, report)]
    return _name_part(checks, report)


def _name_part(checks: Sequence[Check], report: Report | None) -> list[Check]:
    """Return checks under names that say which part of a model they are of."""
    if report is None or report.part is None:
        return list(checks)
    return [replace(check, name=f"{check.name} ({report.part})") for check in checks]


def run_side_file_check(folder: Path) -> list[Check]:
    """Check the tokenizer and generation_config.json, if the folder has one of them."""
    present = any((folder / name).is_file() for name in (*TOKENIZERS, GENERATION_CONFIG_NAME))
    return [run_check("side files", lambda: check_side_files(folder))] if present else []


def check_digests(folder: Path, digests: Mapping[str, str]) -> tuple[bool, str]:
    """Compare files of a folder with their recorded SHA-256."""
    gone, changed = find_changed_files(folder, digests)
    if gone is not None:
        return False, f"{gone} is gone"
    if changed:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        return False, f"{changed[0]} changed since it was written{more}"
    return True, f"{len(digests)} file(s) as written"


def _read_report(folder: Path) -> Report | None:
    path = folder / REPORT
    try:
        report = find_report(folder)
        if report is None:
            return None
        if "files" not in report.model_fields_set:
            raise UserError(f"{path} has no digests")
        for check_report in find_functions("check_report", "verify"):
            check_report(report)
    except (UserError, ValueError) as error:
        raise UserError(f"{path} is damaged: prune again") from error
    return report


def open_dense(folder: Path, report: Report | None, against: Path, description: Mapping[str, Any] | None) -> Checkpoint:
    """Open the model that an output was made from; UserError if `against` is another.

    Args:
        folder: of the output.
        report: the report of the pruned output.
        against: folder of the dense model.
        description: of the model's family, if the output carries one.
    """
    dense = Checkpoint.open(against)
    if description is not None:
        dense = replace(dense, config=attach_description(dense.config, description))
    if report is None:
        raise UserError(f"{folder} has no {REPORT}: it cannot be compared with the model it was made from")
    if report.part is not None:
        dense = extract_part(dense, report.part)
    if report.source.fingerprint != dense.fingerprint and not (
        dense.within is not None and _has_all_parts(dense.within.whole, report)
    ):
        raise UserError(f"{folder} was not made from {dense.path}: its report names {report.source.name}")
    return dense


def _check_tensors(checkpoint: Checkpoint) -> tuple[bool, str]:
    shapes = {name: info.stored_shape for name, info in checkpoint.stored.items()}
    composite = has_parts(checkpoint.config)
    names = composite_names(checkpoint.config) if composite else stored_container(checkpoint).names()
    check_shapes(shapes, names, str(checkpoint.path))
    return True, f"{len(shapes)} tensors have the shapes that config.json says"


def _check_finite(checkpoint: Checkpoint) -> tuple[bool, str]:
    checkpoint.check_finite()
    return True, "no NaN, no Inf"


def _check_load(checkpoint: Checkpoint) -> tuple[bool, str]:
    remote = remote_class(checkpoint.config, checkpoint.path)
    if has_parts(checkpoint.config):
        composite = load_composite(checkpoint.config)
        auto, architecture = composite.auto, composite.architecture
    else:
        family = match_family(checkpoint)
        auto, architecture = family.auto_class, family.architecture
    loaded = stock_load_report(checkpoint.whole, auto)
    if not loaded.clean:
        return False, loaded.fault
    if remote is None:
        return True, f"{architecture} by stock transformers: no key missing, unexpected or mismatched"
    former = "" if WEIGHTS_KEY in checkpoint.config else f"; {_MISREAD}"
    return True, f"{remote} (remote code) by ckpt_prune.load: no key missing, unexpected or mismatched{former}"


def _check_digests(folder: Path, report: Report | None) -> tuple[bool | None, str]:
    if report is None:
        record = find_conversion(folder)
        return (
            (None, f"no {REPORT}: not written by this tool") if record is None else check_digests(folder, record.files)
        )
    passed, detail = check_digests(folder, report.files)
    if not passed:
        return False, detail
    unknown = sorted({*(report.side_files or ())} - {*report.files, REPORT, _CARD})
    former = f"; a former version took no digest of {unknown[0]} and what else is no tensor" if unknown else ""
    author = ""
    for code, runtime in ((f"{REMOTE_MODULE}.py", "transformers"), (f"{MLX_MODULE}.py", "MLX-LM")):
        if not report.container.remote_code or not (folder / code).is_file():
            continue
        if is_own_code(folder / code):
            author += f", {code} is this package's"
        elif report.ckpt_prune == __version__:
            return False, f"{code} is not this package's, and {runtime} would run it with trust_remote_code"
        else:
            author += f", {code} by ckpt_prune {report.ckpt_prune}"
    return True, f"{detail}{author}{former}"


def _check_other_parts(part: Checkpoint, dense: Checkpoint, others: Sequence[str]) -> tuple[bool, str]:
    """Compare what is outside the pruned parts, this one and others, with the dense model, byte for byte."""
    assert part.within is not None
    assert dense.within is not None
    ours, theirs = part.within, dense.within
    names, expected_names = (
        side.intersection(*(_names_outside(extract_part(within.whole, each)) for each in others))
        for side, within in ((_names_outside(part), ours), (_names_outside(dense), theirs))
    )
    if names != expected_names:
        return False, "the two have other tensors outside the part"
    for name in track(sorted(names), "comparing what is outside the part", unit="tensor"):
        tensor, expected = (side.whole.read([name])[name] for side in (ours, theirs))
        if tensor.dtype != expected.dtype or not torch.equal(
            tensor.flatten().view(torch.uint8), expected.flatten().view(torch.uint8)
        ):
            return False, f"{name} is not the dense model's"
    parts = f"{ours.part} part" if not others else f"{' and '.join([ours.part, *others])} parts"
    return True, f"{len(names)} tensors outside the {parts} are the dense model's, bit for bit"


def _names_outside(part: Checkpoint) -> set[str]:
    """Return the whole's tensors outside a part; outside the blocks, if its class is the whole's."""
    assert part.within is not None
    family = family_for_config(part.config)
    if not family.is_stack:
        return {*part.within.rest}
    return {name for name in part.tensors if not name.startswith(family.blocks_prefix)}
