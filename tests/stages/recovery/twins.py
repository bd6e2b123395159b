"""A tiny dense model and a masked copy of it: whole ones, and streams of hidden states of the same tensors."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.family import Family
from ckpt_prune.model.model import Model
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.stages.recovery.block_training import trainable_tensors
from ckpt_prune.stages.recovery.laco import Recoverer
from ckpt_prune.stages.recovery.training import SampleSplit
from tests import encoders, families
from tests.encoders import Pixels
from tests.oracles import laco
from tests.oracles.masked_model import Model as Whole
from tests.stages.whole import stock, whole

Weights = dict[str, Tensor]
SAMPLES, WINDOW = 9, 8
BLOCKS = 3
assert families.BLOCKS == encoders.BLOCKS == BLOCKS


def settings(**changes: object) -> RecoverySettings:
    """Make settings that hold out two of nine samples; the other seven do not divide into batches of three."""
    values = {"epochs": 3, "batch": 3, "held_out": 0.2, "patience": 99, "lr": 0.01} | changes
    return RecoverySettings.model_validate(values)


@dataclass(frozen=True)
class Twins:
    """A variant of `families` or `encoders`.

    Args:
        variant: its name.
        folder: where the dense one is.
        samples: how many.
    """

    variant: str
    folder: Path
    samples: int = SAMPLES

    @classmethod
    def make(cls, folder: Path, variant: str) -> "Twins":
        """With the dense checkpoint written to `folder`."""
        return cls(variant, (families if variant in families.VARIANTS else encoders).make(folder, variant))

    @cached_property
    def data(self) -> Samples:
        if self.variant in encoders.VARIANTS:
            samples = encoders.samples(self.variant, self.samples)
            # Images in the type of the models that the oracle runs.
            return Pixels(samples.values.double(), samples.tokens) if isinstance(samples, Pixels) else samples
        return TokenWindows(families.windows(self.samples, WINDOW))

    @cached_property
    def model(self) -> Model:
        return Model.open(self.folder)

    @property
    def checkpoint(self) -> Checkpoint:
        return self.model.checkpoint

    @property
    def family(self) -> Family:
        return self.model.family

    @cached_property
    def _stock(self) -> PreTrainedModel:
        return stock(self.folder, self.variant).double()

    def dense(self) -> Whole:
        """Whole, float64."""
        return whole(copy.deepcopy(self._stock), self.variant)

    def pruned(self) -> Whole:
        """A whole copy with half of every weight zero, at random, float64."""
        model, generator = self.dense(), torch.Generator().manual_seed(1)
        for block in range(BLOCKS):
            weights = laco.copy_weights(model, block)
            for name, tensor in weights.items():
                if name.endswith(".weight"):
                    tensor[torch.rand(tensor.shape, generator=generator) < 0.5] = 0
            laco.put(model, block, weights)
        return model

    def disk(self, model: Whole | None = None, dtype: torch.dtype = torch.float64) -> Weights:
        """All tensors by on-disk name, of blocks' linears what a model has."""
        tensors = self.checkpoint.read(list(self.checkpoint.tensors))
        for block in range(BLOCKS):
            tensors |= {} if model is None else laco.copy_weights(model, block)
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def block(self, index: int, tensors: Mapping[str, Tensor]) -> Weights:
        """Those of a block."""
        return {name: tensors[name] for name in self.model.block_names(index)}

    def names(self, index: int, chosen: RecoverySettings) -> list[str]:
        return trainable_tensors(self.family, index, self.block(index, self.disk()), chosen.only, norms=chosen.norms)

    def stream(
        self,
        tensors: Mapping[str, Tensor],
        *,
        sizes: Iterable[int] = (),
        dtype: torch.dtype = torch.float64,
        allocate: Allocate = allocate_in_memory,
    ) -> HiddenStream:
        """At the first block of a model of these tensors."""
        factory = BlockFactory(self.model, device=torch.device("cpu"), dtype=dtype)

        def read(names: list[str]) -> Weights:
            return {name: tensors[name] for name in names}

        return HiddenStream(factory, list(tensors), read, self.data, sizes=sizes, allocate=allocate)

    def recoverer(
        self,
        dense: Mapping[str, Tensor],
        pruned: Mapping[str, Tensor],
        chosen: RecoverySettings,
        *,
        seed: int = 0,
        after: Iterable[int] = (),
        dtype: torch.dtype = torch.float64,
        allocate: Allocate = allocate_in_memory,
    ) -> Recoverer:
        """At the first block."""
        split = SampleSplit.of(self.samples, chosen.held_out)
        theirs = self.stream(dense, dtype=dtype, allocate=allocate)
        ours = self.stream(pruned, dtype=dtype, sizes=split.sizes(chosen), allocate=allocate)
        read = partial(self.block, tensors=dense)
        return Recoverer(theirs, read, ours, split, chosen, seed, frozenset(after), allocate)


def written_once(factory: pytest.TempPathFactory) -> Callable[[str], Twins]:
    """Twins of a variant by its name, whose checkpoint is written when it is first asked for."""
    return cache(lambda variant: Twins.make(factory.mktemp("dense"), variant))
