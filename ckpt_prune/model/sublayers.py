"""Sublayers of a block: attention and mlp one after the other, or both side by side as one."""

from dataclasses import dataclass

from ckpt_prune.model.model import Model


@dataclass(frozen=True)
class Sublayer:
    """The modules that read the residual stream at one place, and those that add to it there.

    Attributes:
        norms: of the block, that the stream passes before it is read.
        reads: linear modules that these feed.
        writes: linear modules whose output is added to the stream.
    """

    norms: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def list_sublayers(model: Model) -> tuple[Sublayer, ...]:
    """Return the sublayers of every block, in order: two, or one if attention and mlp read the same stream.

    The family must describe its residual stream.
    """
    residual, attention = model.family.residual, model.family.attention
    assert residual is not None
    is_parallel = residual.parallel
    if isinstance(is_parallel, str):
        is_parallel = bool(getattr(model.config, is_parallel))
    if is_parallel or len(residual.reads) == 1:
        reads = tuple(module for modules in residual.reads.values() for module in modules)
        return (Sublayer(tuple(residual.reads), reads, tuple(residual.writes)),)
    first = next(norm for norm, modules in residual.reads.items() if attention.query in modules)
    others = tuple(norm for norm in residual.reads if norm != first)
    mlp = tuple(module for norm in others for module in residual.reads[norm])
    mlp_writes = tuple(module for module in residual.writes if module != attention.output)
    return (
        Sublayer((first,), tuple(residual.reads[first]), (attention.output,)),
        Sublayer(others, mlp, mlp_writes),
    )
