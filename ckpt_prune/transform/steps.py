"""Steps: what a recipe does to each block, one after the other. The walk over blocks (`walk`) knows no more of them."""

from collections.abc import Mapping
from typing import Any, Protocol

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

    Attributes:
        name: under which its records are noted.
    """

    name: str

    def act(self, block: int, dense: Tensors, tensors: Tensors) -> tuple[Tensors, Any]:
        """Change a block.

        Args:
            block: its index.
            dense: its tensors in the dense model, by on-disk name.
            tensors: as the steps before have left them.

        Returns:
            Its new tensors, and a record that JSON can hold.
        """
        ...

    def skip(
        self, block: int, dense: Tensors, tensors: Tensors, written: Tensors, note: Any, *, again: bool
    ) -> Tensors:
        """Pass a block that an interrupted run has finished.

        Args:
            block: its index.
            dense: its tensors in the dense model; nothing where no step `replays`.
            tensors: as the steps before have left them; nothing where no step from here on replays.
            written: as they were written.
            note: what `act` noted of it.
            again: whether a later step replays, and needs what this one returned.

        Returns:
            What `act` returned, where it is needed again.
        """
        ...

    @property
    def replays(self) -> bool:
        """Whether `skip` looks at the block as the steps before had left it."""
        ...

    def advance(self, block: int, tensors: Tensors) -> None:
        """The block is done, by all steps, and has these tensors."""
        ...


class PruneStep:
    """Prunes, masks or factors a block.

    Args:
        engine: what to do.
        source: of moments, at the first block.

    Attributes:
        records: of every block so far.
    """

    name = "pruned"
    replays = False

    def __init__(self, engine: Pruner | Masker | Factorer, source: MomentSource) -> None:
        self._engine, self._source = engine, source
        self.records: list[SitePlan | MaskedLinear | FactoredLinear] = []

    def act(self, block: int, dense: Tensors, tensors: Tensors) -> tuple[Tensors, Any]:
        """Prune one block."""
        new, records = self._engine.block(block, tensors, self._source)
        self.records += records
        return new, [record.model_dump(mode="json") for record in records]

    def skip(
        self, block: int, dense: Tensors, tensors: Tensors, written: Tensors, note: Any, *, again: bool
    ) -> Tensors:
        """Take the records of the interrupted run. What the block was before it was recovered is not on disk."""
        self.records += [self._engine.record.model_validate(each) for each in note]
        return self._engine.block(block, tensors, self._source)[0] if again else tensors

    def advance(self, block: int, tensors: Tensors) -> None:
        """Let the source go on."""
        with phase("calibration"):
            self._source.advance(block, multiplied(tensors))


class RecoverStep:
    """Trains what stays of a block.

    Args:
        recoverer: at the first block.
        epochs: shows how far training is.

    Attributes:
        layers: what became of every block so far.
    """

    name = "recovered"
    replays = True

    def __init__(self, recoverer: Recoverer, epochs: Meter) -> None:
        self._recoverer, self._epochs = recoverer, epochs
        self.layers: list[RecoveredLayer] = []

    def act(self, block: int, dense: Tensors, tensors: Tensors) -> tuple[Tensors, Any]:
        """Recover one block."""
        new, layer = self._recoverer.block(block, dense, tensors, self._epochs)
        self.layers.append(layer)
        return new, layer.model_dump()

    def skip(
        self, block: int, dense: Tensors, tensors: Tensors, written: Tensors, note: Any, *, again: bool
    ) -> Tensors:
        """Let the streams of hidden states go past the block."""
        self._recoverer.skip(block, dense, tensors, written)
        self._epochs.to(self._recoverer.epochs_until(block))
        self.layers.append(RecoveredLayer.model_validate(note))
        return written

    def advance(self, block: int, tensors: Tensors) -> None:
        """Recovering a block has moved its streams on."""


class FollowStep:
    """Carries hidden states through the pruned model without changing anything.

    Args:
        stream: at the first block.
    """

    name = "followed"
    replays = False

    def __init__(self, stream: HiddenStream) -> None:
        self._stream = stream

    def act(self, block: int, dense: Tensors, tensors: Tensors) -> tuple[Tensors, Any]:
        """Nothing to do."""
        return tensors, None

    def skip(
        self, block: int, dense: Tensors, tensors: Tensors, written: Tensors, note: Any, *, again: bool
    ) -> Tensors:
        """Nothing to do."""
        return tensors

    def advance(self, block: int, tensors: Tensors) -> None:
        """Let the stream go through the block."""
        self._stream.advance(block, tensors)
