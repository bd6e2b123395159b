"""The section of the stage `scale`."""

from ckpt_prune.stages.scale.records import ScaledWeight  # type: ignore[import-not-found]

from ckpt_prune.show.section import Section
from ckpt_prune.stages.report import Report


def sections(report: Report) -> list[Section]:
    scaled = [ScaledWeight.read(values) for values in report.entries.get("scale", ())]
    return [Section("Scales", [f"{len(scaled)} weights were scaled by {scaled[0].factor:g}."])] if scaled else []
