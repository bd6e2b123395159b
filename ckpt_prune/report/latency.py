"""What an output takes beside what a table of the machine had foreseen, in words."""

from ckpt_prune.report.model import Latency


def latency_line(found: Latency) -> str | None:
    """In a line; None where a file does not say what was foreseen."""
    if not found.dense or not found.foreseen:
        return None
    share = found.foreseen / found.dense
    told = f"{found.of}: foreseen {found.foreseen:.4g} ms ({share:.1%} of the dense model's)"
    if not found.measured or not found.measured_dense:
        return f"{told}; the output was not timed here: see `ckpt-prune benchmark`"
    took = found.measured / found.measured_dense
    return (
        f"{told}, measured {found.measured:.4g} ms ({took:.1%} of {found.measured_dense:.4g} ms): the share foreseen "
        f"is {share / took - 1:+.1%} off"
    )
