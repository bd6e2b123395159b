"""The section of a report on weights of few bits."""

from collections.abc import Sequence

from ckpt_prune.show.section import Section
from ckpt_prune.stages.report import Report


def sections(report: Report) -> Sequence[Section]:
    return [] if report.quantize is None else [Section("Stored weights", [report.quantize.describe()])]
