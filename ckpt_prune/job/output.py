"""The plan of an output: its container, files and cost. All of it is known before the first tensor is made."""

from dataclasses import dataclass, field

from ckpt_prune.job.layout import Layout
from ckpt_prune.job.records import Cost
from ckpt_prune.model.containers.container import Container, Ranks


@dataclass(frozen=True)
class Output:
    """An output that does not exist yet.

    Attributes:
        container: what it is stored as.
        layout: its files, tensors, dtypes and shapes.
        cost: its size.
        aside: files beside the checkpoint, such as rotations, with their tensors.
        ranks: of linear modules that become two; empty if none does.
    """

    container: Container
    layout: Layout
    cost: Cost
    aside: Layout = field(default_factory=dict)
    ranks: Ranks = ()
