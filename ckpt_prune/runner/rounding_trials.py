"""Measurements for a budget of bits: how much each input of a model's matrices matters.

The samples are measured in folds. What types lose is predicted on the first fold. Error feedback is fitted to the
others, so that nothing is predicted on what it was fitted to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ckpt_prune.budget.rounding_losses import name_of_head
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.common.spread import spread_evenly
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import select_input_moments
from ckpt_prune.measure.samples.samples import SampleRange, Samples
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.measure.statistics.fisher import LIMITS
from ckpt_prune.measure.statistics.folder import Statistics, write_tensors
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import FrontierOptions, PruneOptions, QuantizeOptions
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.runner.column_budgets import FOLDS

TRIED = 4
"""Blocks, spread over the model, whose matrices error feedback is tried on, and as many experts of each."""
_STATISTICS = "statistics"
"""Entry of the journal."""
_HEAD = "head.safetensors"
"""File with moments of what the head reads."""


@dataclass(frozen=True)
class RoundingTrials:
    """Measurements of a model whose matrices are to be rounded.

    Attributes:
        samples: of text, that the model is measured on.
        options: that chose them, with the device and the dtype that blocks run in.
        folder: for statistics.
        journal: of what is done.
    """

    model: Model
    samples: Samples
    options: FrontierOptions | PruneOptions | QuantizeOptions
    folder: Path
    journal: Journal

    @cached_property
    def device(self) -> torch.device:
        """The device that runs blocks."""
        return resolve_device(self.options.device)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that they run in."""
        return resolve_compute_dtype(self.options.compute_dtype, self.device, self.model.dtype)

    @property
    def how(self) -> dict[str, Any]:
        return {"device": self.device, "compute_dtype": self.compute_dtype}

    @property
    def folds(self) -> int:
        return min(FOLDS, len(self.samples))

    @property
    def few(self) -> Samples:
        """The samples that losses are predicted on, of the first fold: error feedback does not see them."""
        return SampleRange(self.samples, 0, min(len(self.samples) // self.folds, LIMITS["text"]))

    @property
    def _tried(self) -> list[int]:
        """Blocks that error feedback is tried on."""
        if self.folds < 2:
            return []
        return spread_evenly(min(TRIED, self.model.blocks), self.model.blocks)

    @property
    def _tried_inputs(self) -> set[str]:
        """Spaces and linear modules of a block whose inputs have a Gram."""
        family = self.model.family
        numbers = {module: number for module, (number, _) in family.expert_modules.items()}
        count = len(set(numbers.values()))
        tried = {None, *spread_evenly(min(TRIED, count), count)}
        modules = {module for module in family.inputs if numbers.get(module) in tried and self._is_fed(module)}
        return modules | {name for name, space in family.consumers.items() if space.consumer in modules}

    def _is_fed(self, module: str) -> bool:
        """Return whether error feedback will round a linear module."""
        return True

    @property
    def collected(self) -> tuple[Collect, ...]:
        """What the statistics hold."""
        return "moments", "linears"

    @property
    def has_grams(self) -> bool:
        """Whether the statistics have Grams of all blocks, not only of those that error feedback is tried on."""
        return "gram" in Statistics(self.statistics).index.collect

    @cached_property
    def statistics(self) -> Path:
        """Statistics that tell how much each input of a matrix matters."""
        place = self.folder / "statistics"
        if not place.is_dir():
            measure_statistics(
                self.model,
                self.samples,
                place,
                seed=self.options.seed,
                folds=self.folds,
                collect=self.collected,
                grams=dict.fromkeys(self._tried, self._tried_inputs),
                see_stream=self._see_stream if self._tried and self.model.family.gives_logits else None,
                **self.how,
            )
            self.journal.record(_STATISTICS)  # from here on Ctrl-C keeps what is done
        return place

    def _see_stream(self, block: int, stream: HiddenStream) -> None:
        """Keep the Gram of what the head reads, behind the last block."""
        if block == self.model.blocks - 1:
            fitted = sum_folds(stream.observe_head(gram=True)[1:])
            assert isinstance(fitted, Moments)
            assert fitted.gram is not None
            write_tensors(self.folder, _HEAD, {"count": torch.tensor(fitted.count), "gram": fitted.gram})

    def moments(self, block: int) -> dict[str, Moments]:
        """Return the moments of what a block's linear weights read, by their on-disk names.

        They are of all folds but the first if there are several. Weights that error feedback is tried on have a Gram.
        """
        model, by_weight = self.model, dict[str, Moments]()
        tried = self._tried_inputs if block in self._tried else ()
        readers = {model.moments_name(block, first): modules for first, modules in model.inputs(block).items()}
        for name, folds in Statistics(self.statistics).read_moments(block, readers).items():
            moments = sum_folds(select_input_moments(folds)[1 if self.folds > 1 else 0 :])
            if readers[name][0] not in tried:  # a Gram is there for columns alone
                moments = replace(moments, gram=None)
            by_weight |= {model.tensor(block, module): moments for module in readers[name]}
        return by_weight

    def grams(self) -> Mapping[str, Moments]:
        """Return moments of the inputs of all that error feedback is tried on; of none if there is one fold."""
        if not self._tried:
            return {}
        of_all = [pair for block in self._tried for pair in self.moments(block).items()]
        by_weight = {name: moments for name, moments in of_all if moments.gram is not None}
        if not self.model.family.gives_logits:  # no head reads the embedding
            return by_weight
        head = load_file(self.folder / _HEAD)
        gram = head["gram"]
        squares = gram.diagonal().double()
        moments = Moments(int(head["count"]), squares, squares, squares, squares, gram)
        return by_weight | {name_of_head(self.model): moments}
