"""A job: what is wanted. It is made once, from what the user gave, and never changed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ckpt_prune._version import __version__
from ckpt_prune.job.digest import HARMLESS, fields_of, identify
from ckpt_prune.job.latency import Latencies
from ckpt_prune.job.plan import Plan
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.containers.container import Container, container_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.recipe.origin import Origin
from ckpt_prune.recipe.recipe import Recipe

_JOURNAL = 7
"""Version of the notes that a run leaves for the one that resumes it."""
_WORDS = {
    "live": "choice of samples",
    "training": "choice of samples for recovery",
    "dense": "dense model",
    "device": "kind of --device",
    "diagnostics": "--diagnostics",
    "latencies": "table of latencies",
    "opened": "setting of a stage",
}


@dataclass(frozen=True)
class LiveSamples:
    """Calibration samples to measure on while pruning.

    Attributes:
        samples: windows of text, or images.
        folds: contiguous folds that moments are kept apart for.
        compute_dtype: in which blocks run.
        allocate: makes the tensor that holds hidden states.
        seed: of the choice of samples, for the record.
        source: the files or the folder that they are from, in words.
    """

    samples: Samples
    folds: int
    compute_dtype: torch.dtype
    allocate: Allocate = field(default=allocate_in_memory, metadata=HARMLESS)
    seed: int = 0
    source: str = field(default="", metadata=HARMLESS)


@dataclass(frozen=True)
class RecoverySamples:
    """Samples that blocks are trained on, for a recipe with recovery.

    Attributes:
        samples: windows of text, or images.
        compute_dtype: in which blocks run.
        allocate: makes the tensors that hold hidden states.
        after: numbers of blocks k, for the perplexity of the model whose first k blocks are recovered.
        seen: whether the model is pruned on these samples, too; None if that is not known.
        classes: of images, (N,) int64, for training that needs them.
    """

    samples: Samples
    compute_dtype: torch.dtype
    allocate: Allocate = field(default=allocate_in_memory, metadata=HARMLESS)
    after: frozenset[int] = frozenset()
    seen: bool | None = field(default=None, metadata=HARMLESS)
    classes: Tensor | None = field(default=None, metadata=HARMLESS)


@dataclass(frozen=True)
class Job:
    """A model, what to do with it, and the data for that.

    Attributes:
        model: the model that the output is made from.
        recipe: what to do with it.
        statistics: of the dense model, if they were measured before.
        live: samples to measure on.
        device: where blocks run and closed forms are solved.
        plan: decisions that were made before.
        diagnostics: also compute errors and spectra that no result depends on; None for those that cost little.
        training: samples for a recipe with recovery.
        by_default: True if the user named no recipe.
        origin: where the recipe, or that of the plan, was fetched from; None if it was here.
        latencies: of this machine, if the recipe's size is a latency.
        dense: the model that `model` was made from, if that is pruned already.
        written: the recipe as it was asked for; None if it is `recipe`.
        proving: data that what is exported is compared with PyTorch on.
        trust: run code that the model brings, where its output is run.
        asked: values of the options that its output depends on (`digested_options`).
        earlier: numbers and fingerprints of the samples that `model` was made on, in turn, if that is pruned already.
        source: the model as it is stored, if stages opened another view of it as `model`.
        opened: what those stages have found.
    """

    model: Model
    recipe: Recipe
    statistics: Statistics | None = None
    live: LiveSamples | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    plan: Plan | None = None
    diagnostics: bool | None = False
    training: RecoverySamples | None = None
    by_default: bool = field(default=False, metadata=HARMLESS)
    origin: Origin | None = field(default=None, metadata=HARMLESS)
    latencies: Latencies | None = None
    dense: Model | None = None
    written: Recipe | None = field(default=None, metadata=HARMLESS)
    proving: ProofOptions = field(default_factory=ProofOptions, metadata=HARMLESS)
    trust: bool = field(default=False, metadata=HARMLESS)
    asked: Mapping[str, Any] = field(default_factory=dict)
    earlier: Sequence[tuple[int, str]] = field(default=(), metadata=HARMLESS)
    source: Model | None = field(default=None, metadata=HARMLESS)
    opened: Sequence[Any] = ()

    @property
    def samples(self) -> Samples | None:
        """The samples that the model is run on, to measure it or to train its blocks; None if it is not run."""
        data = self.live or self.training
        return None if data is None else data.samples

    @property
    def used(self) -> Samples | list[tuple[int, str]] | None:
        """The samples that the output is made on, or numbers and fingerprints of several; None if they are not known.

        Samples of one choice begin alike, so the larger of two holds the other, unless they were chosen beside it.
        """
        is_fresh = self.training is not None and self.training.seen is False
        on_hand = [each.samples for each in (self.live, self.training) if each is not None]
        if self.statistics is None and not (is_fresh and (self.live is not None or self.earlier)):
            return max(on_hand, key=len, default=[])
        used = [*self.earlier, *((len(samples), samples.fingerprint) for samples in on_hand)]
        if self.statistics is not None:
            index = self.statistics.index
            if len(index.data) > 1:
                return None
            used.insert(0, (index.samples, index.data[0]))
        return used if is_fresh else [max(used)]

    @property
    def stored_model(self) -> Model:
        """The model as it is stored."""
        return self.source or self.model

    @cached_property
    def stored(self) -> Container | None:
        """The container of the model, if it carries code of its own."""
        return container_of(self.model) if self.model.has_remote_code else None

    @property
    def digest(self) -> str:
        """SHA-256 of all that the output depends on: a resumed run must share it with the one that it continues."""
        return _digest_of([__version__, _JOURNAL, fields_of(self)])

    @property
    def part_digests(self) -> dict[str, str]:
        """The parts of `digest`, each under the words that a user has for it, with its own digest."""
        named = fields_of(self)
        parts = {"version": [__version__, _JOURNAL]}
        parts |= {f"--{name.replace('_', '-')}": value for name, value in named.pop("asked").items()}
        parts |= {_WORDS.get(name, name): value for name, value in named.items()}
        return {name: _digest_of(value) for name, value in parts.items()}


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=identify).encode()).hexdigest()
