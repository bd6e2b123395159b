"""Find the dense model that a pruned one was made from."""

from collections.abc import Iterator
from pathlib import Path

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.model_folder import find_recorded_source
from ckpt_prune.common.dense_source import DenseSource
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.purpose import has_other_tokenizer
from ckpt_prune.model.descriptions import OUTSIDE_KEY
from ckpt_prune.stages.quantize.records import find_record
from ckpt_prune.stages.report import Report, find_report
from ckpt_prune.verification.verify import open_dense


def find_dense_source(folder: Path) -> DenseSource | None:
    """Find the dense model of a checkpoint that was pruned, and perhaps rounded; None if it was not pruned.

    It is looked for where `frontier` read it, beside the folder, in the current one and in the Hub's cache, and known
    by its fingerprint.
    """
    report = _read_report(folder)
    if report is None:
        return None
    name = report.source.name
    dense = (place for place in _places(folder, name) if _is_dense(folder, report, place))
    place = next(dense, None)
    if place is not None and has_other_tokenizer(folder, place):
        return DenseSource(name, None, other_tokens=True)
    if report.loss is None:
        return DenseSource(name, place)
    return DenseSource(name, place, report.loss.verdict, report.loss.data)


def is_source(folder: Path, model: Path) -> bool:
    """Return whether an output was made from a model: pruned, rounded, or both. A damaged output was made from none."""
    try:
        record = find_record(folder)
        if record is not None and record.source.fingerprint == Checkpoint.open(model).fingerprint:
            return True
        report = _read_report(folder)
    except UserError:
        return False
    return report is not None and _is_dense(folder, report, model)


def _read_report(folder: Path) -> Report | None:
    """Read the report of a pruned model, which a rounded one has in its record."""
    record = find_record(folder)
    rounded = None if record is None or record.report is None else Report.read(record.report)
    return find_report(folder) or rounded


def _is_dense(folder: Path, report: Report, place: Path) -> bool:
    try:
        open_dense(folder, report, place, read_json_object(folder / CONFIG).get(OUTSIDE_KEY))
    except UserError:  # another model, or one that changed
        return False
    return True


def _places(folder: Path, name: str) -> Iterator[Path]:
    if (read := find_recorded_source(folder)) is not None:
        yield read
    for above in dict.fromkeys((folder.resolve().parent, Path.cwd())):
        if (above / Path(name).name / CONFIG).is_file():
            yield above / Path(name).name
    if "/" in name:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, CONFIG)
        if isinstance(cached, str):
            yield Path(cached).parent
