"""Compare reports of recovery, and files of two runs, but for the time they took."""

import json
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.job.job import Job
from ckpt_prune.runner.run_job import run_job


def recover(job: Job, out: Path, **options: Any) -> dict[str, Any]:
    report: dict[str, Any] = run_job(job, out, **options).report.data()
    return report


def comparable(path: Path) -> bytes:
    """A file's bytes; of a report all but its stages and its job.

    Time and memory differ from run to run, and two jobs may come to the same.
    """
    data = path.read_bytes()
    if path.name != REPORT:
        return data
    try:
        report = json.loads(data)
    except ValueError:
        return data
    if not isinstance(report, dict) or pretty_json(report).encode() != data:
        return data
    return pretty_json(without_stages(report)).encode()


def without_stages(report: dict[str, Any]) -> dict[str, Any]:
    """A report but for the time and memory that its run took, and for what was asked of it."""
    kept = {key: value for key, value in report.items() if key not in ("stages", "job")}
    if isinstance(adapters := kept.get("adapters"), dict):
        kept["adapters"] = {key: value for key, value in adapters.items() if key != "seconds"}
    return kept
