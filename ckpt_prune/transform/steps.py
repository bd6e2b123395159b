"""Steps: what a recipe does to each block, one after the other. The walk over blocks (`walk`) knows no more of them."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from pydantic import BaseModel
from torch import Tensor

from ckpt_prune.architectures.factors import multiplied
from ckpt_prune.calibration.sources import MomentSource
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.phases import phase
from ckpt_prune.planning.plan import SitePlan
from ckpt_prune.planning.records import FactoredLinear, MaskedLinear
from ckpt_prune.progress import Meter
from ckpt_prune.recovery.record import RecoveredLayer
from ckpt_prune.recovery.recoverer import Recoverer
from ckpt_prune.transform.engine import Pruner
from ckpt_prune.transform.factoring import Factorer
from ckpt_prune.transform.masking import Masker

Tensors = Mapping[str, Tensor]


class Step(Protocol):
    """Acts on one block after the other, each in turn.

    A resumed run calls `act` only for blocks that are not written yet, and `advance` for all of them. So hidden states
    move in `advance`, by the tensors that were written, and resuming gives the bytes of an uninterrupted run.

    Attributes:
        name: under which its records are noted.
        record: what it notes of a block is some of these.
    """

    name: str

    @property
    def record(self) -> type[BaseModel]:
        """The type of its records."""
        ...

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, Sequence[BaseModel]]:
        """Change a block, and nothing that outlives the call.

        Args:
            block: its index.
            tensors: as the steps before have left them.

        Returns:
            Its new tensors, and records of what was done.
        """
        ...

    def advance(self, block: int, tensors: Tensors) -> None:
        """Go on to the next block; `tensors` are those that were written, behind the last step."""
        ...


@runtime_checkable
class StepWithInput(Step, Protocol):
    """A step that carries along what the model makes without it, and therefore needs its own input again.

    Where a block was written by an interrupted run, the steps before this one act again to make it.
    """

    def advance_input(self, block: int, tensors: Tensors) -> None:
        """Go on with the block as `act` was given it; `advance` follows."""
        ...


class PruneStep:
    """Prunes, masks or factors a block.

    Args:
        engine: what to do.
        source: of moments, at the first block.
    """

    name = "pruned"

    def __init__(self, engine: Pruner | Masker | Factorer, source: MomentSource) -> None:
        self._engine, self._source = engine, source

    @property
    def record(self) -> type[SitePlan | MaskedLinear | FactoredLinear]:
        """What is noted of a site, or of a linear module."""
        return self._engine.record

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, Sequence[BaseModel]]:
        """Prune one block."""
        return self._engine.block(block, tensors, self._source)

    def advance(self, block: int, tensors: Tensors) -> None:
        """Let the source go on."""
        with phase("calibration"):
            self._source.advance(block, multiplied(tensors))


class RecoverStep:
    """Trains what stays of a block.

    Args:
        recoverer: at the first block.
        epochs: shows how far training is.
    """

    name, record = "recovered", RecoveredLayer

    def __init__(self, recoverer: Recoverer, epochs: Meter) -> None:
        self._recoverer, self._epochs = recoverer, epochs

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, Sequence[BaseModel]]:
        """Recover one block."""
        new, layer = self._recoverer.block(block, tensors, self._epochs)
        return new, [layer]

    def advance_input(self, block: int, tensors: Tensors) -> None:
        """Let the models with fewer blocks recovered go through the block as it was pruned."""
        self._recoverer.follow(block, tensors)

    def advance(self, block: int, tensors: Tensors) -> None:
        """Let the recovered and the dense model go on."""
        self._recoverer.advance(block, tensors)
        self._epochs.to(self._recoverer.epochs_until(block))


class FollowStep:
    """Carries hidden states through the pruned model without changing anything.

    Args:
        stream: at the first block.
    """

    name, record = "followed", BaseModel

    def __init__(self, stream: HiddenStream) -> None:
        self._stream = stream

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, Sequence[BaseModel]]:
        """Nothing to do."""
        return tensors, []

    def advance(self, block: int, tensors: Tensors) -> None:
        """Let the stream go through the block."""
        self._stream.advance(block, tensors)
