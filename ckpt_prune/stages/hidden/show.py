"""Sections of the stage `hidden`."""

from ckpt_prune.show.section import Section, Table
from ckpt_prune.stages.hidden.records import HiddenRecord
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.show_tried import show_tried

_KINDS = {
    "per-block": "Attention and mlp of every block read it in bases of their own",
    "shared": "All blocks share one basis",
}


def sections(report: Report) -> list[Section]:
    """Say how many dimensions of the residual stream stay, in which bases, and which numbers of them were tried."""
    hidden = report.hidden
    if hidden is None:
        return []
    return [_show_stream(hidden), *show_tried("dimensions", {each.kept: each for each in hidden.tried}, hidden.kept)]


def _show_stream(hidden: HiddenRecord) -> Section:
    sentences, explanations, details = [f"{dimensions_line(hidden)}."], [], []
    shares = [share for share in hidden.energy if share is not None]
    if shares:
        energy = f"{shares[0]:.2%} of the energy stays"
        if len(shares) > 1:
            least = hidden.energy.index(min(shares))
            energy = (
                f"{sum(shares) / len(shares):.2%} of the energy stays on average, {min(shares):.2%} in basis {least}"
            )
        signal = "what norms make of it" if hidden.signal == "normed" else "the stream itself"
        sentences.append(f"{_KINDS[hidden.kind]}, principal directions of {signal}: {energy}.")
        if hidden.tied is not None:
            sentences.append(f"{'Embedding and head stay one table' if hidden.tied else 'The head has its own table'}.")
    if hidden.kind == "per-block":
        explanations = ["Matrices on the skip connections take the stream from one basis to the next."]
    if len(hidden.energy) > 1:
        rows = [(str(basis), "" if share is None else f"{share:.4%}") for basis, share in enumerate(hidden.energy)]
        details = [Table(("basis", "energy kept"), rows, title="Every basis")]
    return Section("Residual stream", sentences, explanations, details=details)


def dimensions_line(hidden: HiddenRecord) -> str:
    share = 1 - hidden.kept / hidden.dimensions
    return f"{hidden.kept} of {hidden.dimensions} dimensions stay (ratio {share:.3g})"


def size_axes(report: Report) -> dict[str, int]:
    """Return how many dimensions stay, for a table of sizes."""
    return {} if report.hidden is None else {"dimensions": report.hidden.kept}
