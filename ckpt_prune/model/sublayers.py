"""Sub-layers of a block: attention and mlp one after the other, or both beside each other as one."""

from dataclasses import dataclass

from ckpt_prune.model.model import Model


@dataclass(frozen=True)
class Sublayer:
    """What reads the residual stream at one place, and what of it is added behind that place.

    Attributes:
        norms: of the block, that the stream passes before it is read.
        reads: linear modules that these feed.
        writes: linear modules whose output is added to the stream.
    """

    norms: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def list_sublayers(model: Model) -> tuple[Sublayer, ...]:
    """The sub-layers of every block, in order: two, or one where attention and mlp read the same stream.

    Args:
        model: whose residual stream is described.
    """
    residual, attention = model.family.residual, model.family.attention
    assert residual is not None
    beside = residual.beside
    if isinstance(beside, str):
        beside = bool(getattr(model.config, beside))
    if beside or len(residual.reads) == 1:
        fed = tuple(module for modules in residual.reads.values() for module in modules)
        return (Sublayer(tuple(residual.reads), fed, tuple(residual.writes)),)
    first = next(norm for norm, fed in residual.reads.items() if attention.query in fed)
    others = tuple(norm for norm in residual.reads if norm != first)
    mlp = tuple(module for norm in others for module in residual.reads[norm])
    behind = tuple(module for module in residual.writes if module != attention.output)
    return (
        Sublayer((first,), tuple(residual.reads[first]), (attention.output,)),
        Sublayer(others, mlp, behind),
    )
