"""What is left of a residual stream that has lost dimensions, in words."""

from collections.abc import Iterable

from ckpt_prune.job.records import HiddenRecord

_KINDS = {
    "per-block": "attention and mlp of every block read it in bases of their own",
    "shared": "one basis for all blocks",
}


def dimensions_line(hidden: HiddenRecord) -> str:
    """How many dimensions stay."""
    share = 1 - hidden.kept / hidden.dimensions
    return f"residual stream: {hidden.kept} of {hidden.dimensions} dimensions stay (ratio {share:.3g})"


def hidden_lines(hidden: HiddenRecord) -> Iterable[str]:
    """In which bases they are, and what share of the energy stays in them."""
    known = [share for share in hidden.energy if share is not None]
    if not known:
        return
    told = f"{known[0]:.2%} of the energy stays"
    if len(known) > 1:
        least = hidden.energy.index(min(known))
        told = f"{sum(known) / len(known):.2%} of the energy stays on average, {min(known):.2%} in basis {least}"
    signal = "what norms make of it" if hidden.signal == "normed" else "the stream itself"
    yield f"{_KINDS[hidden.kind]}, principal directions of {signal}: {told}"
    if hidden.tied is not None:
        yield "embedding and head stay one table" if hidden.tied else "the head has a table of its own"
