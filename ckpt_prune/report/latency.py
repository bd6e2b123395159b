"""What an output takes beside what a table of the machine had foreseen, in words."""

from ckpt_prune.job.latency import TRUSTED
from ckpt_prune.job.report import Latency

OFF = 0.05
"""Timings of one model differ by so much."""


def latency_line(found: Latency) -> str | None:
    """In a line; None where a file does not say what was foreseen."""
    if not found.dense or not found.foreseen:
        return None
    share = found.foreseen / found.dense
    told = f"{found.of}: foreseen {share:.1%} of the dense model's ({found.foreseen:.4g} of {found.dense:.4g} ms)"
    if found.off is not None and found.off > TRUSTED:
        told += f" by a table that was {found.off:.0%} off and is not to be relied on"
    if not found.measured or not found.measured_dense:
        return f"{told}; the output was not timed here: see `ckpt-prune benchmark`"
    took = found.measured / found.measured_dense
    more = "; more than was foreseen" if took > (1 + OFF) * share else ""
    return f"{told}, measured {took:.1%} ({found.measured:.4g} of {found.measured_dense:.4g} ms){more}"
