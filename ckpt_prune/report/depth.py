"""What is left of a model whose blocks are gone: a picture of one line, and what became of every gap."""

from collections.abc import Iterable

from ckpt_prune.job.records import DepthRecord, GapRecord

STAYS, GONE, MAPPED = "#", ".", "+"


def picture(depth: DepthRecord) -> str:
    """A sign for every block of the dense model: it stays, it is gone, or it has taken the map of a gap."""
    kept = set(depth.kept)
    mapped = {gap.first - 1 for gap in depth.gaps if gap.into is not None}
    return "".join(GONE if block not in kept else MAPPED if block in mapped else STAYS for block in range(depth.blocks))


def named(gap: GapRecord) -> str:
    """The blocks of a gap in words."""
    last = gap.first + gap.blocks - 1
    return f"block {gap.first}" if last == gap.first else f"blocks {gap.first} to {last}"


def named_all(depth: DepthRecord) -> str:
    """What is gone in words."""
    return ("" if depth.part == "block" else f"{depth.part} of ") + ", ".join(map(named, depth.gaps))


def depth_lines(depth: DepthRecord) -> Iterable[str]:
    """What is left, and a line for every gap."""
    legend = f"{GONE} is gone" + (f", {MAPPED} makes up for it" if MAPPED in picture(depth) else "")
    what = "blocks" if depth.part == "block" else f"{depth.part} of blocks"
    yield f"{what} {picture(depth)} {len(depth.kept)} of {depth.blocks} stay" + (f" ({legend})" if depth.gaps else "")
    if depth.part != "block" and depth.gaps:
        yield (
            f"the last projection of {depth.part} is zeros in {len(depth.gaps)} of them: a stock class computes it all "
            "the same, and nothing is saved"
        )
    for gap in depth.gaps:
        words = gap_words(gap)
        if words:
            yield f"{named(gap)}: {words}"


def gap_words(gap: GapRecord) -> str:
    """What is known of a gap."""
    parts: list[str] = []
    if gap.distance is not None:
        parts.append(f"cosine distance {gap.distance:.4f}")
    if gap.divergence is not None:
        parts.append(f"predicted divergence {gap.divergence:.4f}")
    if gap.error_uncompensated is not None and gap.error_compensated is not None:
        parts.append(f"error {gap.error_uncompensated:.4f} bare, {gap.error_compensated:.4f} compensated")
    if gap.error_held_out is not None:
        parts.append(f"{gap.error_held_out:.4f} held out")
    if gap.into is not None:
        strength = "" if gap.strength is None else f" (lambda {gap.strength:g})"
        parts.append(f"{gap.method}{strength} in {gap.into}")
    elif gap.error_uncompensated is not None:
        parts.append("no map lowers it")
    return "; ".join(parts)
