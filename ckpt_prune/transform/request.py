"""What is asked for: a model, a recipe, and where moments come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.sites import Site
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.calibration.samples import Samples
from ckpt_prune.calibration.states import Allocate, in_memory
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.containers.choosing import whole_spaces
from ckpt_prune.containers.container import Container, container_of
from ckpt_prune.planning.latency import Latencies
from ckpt_prune.planning.plan import Plan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.records import Depth, Hidden, Origin
from ckpt_prune.rotations.sliced import SlicedCheckpoint


@dataclass(frozen=True)
class LiveSamples:
    """Calibration samples to measure on while pruning.

    Attributes:
        samples: windows of text, or images.
        folds: contiguous folds the moments are kept apart for.
        compute_dtype: in which blocks run.
        allocate: makes the tensor that holds hidden states.
        seed: of the choice of samples, for the record.
        source: the files or the folder that they are from, in words.
    """

    samples: Samples
    folds: int
    compute_dtype: torch.dtype
    allocate: Allocate = in_memory
    seed: int = 0
    source: str = ""


@dataclass(frozen=True)
class RecoverySamples:
    """What the blocks of a recipe with recovery are trained on.

    Attributes:
        samples: windows of text, or images.
        compute_dtype: in which blocks run.
        allocate: makes the tensors that hold hidden states.
        after: numbers of blocks k, for the perplexity of the model of which the first k blocks are recovered.
        seen: whether the model is pruned on these samples, too; None where that is not known.
    """

    samples: Samples
    compute_dtype: torch.dtype
    allocate: Allocate = in_memory
    after: frozenset[int] = frozenset()
    seen: bool | None = None


@dataclass(frozen=True)
class Ranked:
    """What the dense model's statistics say about a site.

    Attributes:
        score: that its units are ranked by.
        scores: of its units, (units,), or of q and k (heads, dimensions).
        errors: of dropping the k units of least score, k = 0 … n, (n + 1,) (`Solver.errors`); None where widths are not
            found by them.
    """

    score: str
    scores: Tensor
    errors: Tensor | None


@dataclass(frozen=True)
class Shortened:
    """Blocks that are gone before anything else is done.

    Attributes:
        whole: the request that asked for it, of the model with all its blocks.
        record: which are gone.
    """

    whole: "Request"
    record: Depth


@dataclass(frozen=True)
class Narrowed:
    """A residual stream that has lost dimensions before anything else is done.

    Attributes:
        whole: the request that asked for it.
        record: how many stay.
        view: the model in bases of so many dimensions, measured or not; None where it is within its size as it is, or
            where the request's model is so narrow itself.
        into: the view that the request's model is, in that case.
        note: why that model is of another class than the dense one; None where it is not.
    """

    whole: "Request"
    record: Hidden
    view: SlicedCheckpoint | None
    into: SlicedCheckpoint | None = None
    note: str | None = None

    @property
    def idle(self) -> bool:
        """Whether the recipe's size asks for nothing."""
        return self.view is None and not self.whole.recipe.spaces


@dataclass(frozen=True)
class Request:
    """One model, one recipe, one source of moments.

    Attributes:
        model: the dense model.
        recipe: what to do.
        statistics: the dense cache, or None.
        live: samples for a sequential recipe, or to measure the dense model on first; or None.
        device: where blocks run and closed forms are solved.
        plan: decisions made earlier, or None.
        diagnostics: also compute errors and spectra that no result depends on.
        training: samples for a recipe with recovery, or None.
        ranked: site → its units in the dense model by every score that may rank them, where they were ranked before.
        asked: the recipe as it was given, where its size was turned into ratios (`sizing.at_size`).
        larger: the next larger size that these ratios could give instead, in the kind of the size asked for.
        by_default: whether nobody named the recipe.
        origin: where the recipe, or that of the plan, was fetched from; None for one that was here.
        shortened: where blocks are gone: `model` is what stays of it, and `recipe` what is left to do.
        narrowed: where dimensions of the residual stream are gone: `recipe` is what is left to do, and `model` the
            dense one, or without these dimensions where spaces are left.
        latencies: of this machine, where the recipe's size is a latency.
        left_whole: spaces that the recipe leaves whole in this model, because no stock class has fewer of their units.
    """

    model: Model
    recipe: Recipe
    statistics: Statistics | None = None
    live: LiveSamples | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    plan: Plan | None = None
    diagnostics: bool = False
    training: RecoverySamples | None = None
    ranked: Mapping[Site, Sequence[Ranked]] | None = None
    asked: Recipe | None = None
    larger: int | None = None
    by_default: bool = False
    origin: Origin | None = None
    shortened: Shortened | None = None
    narrowed: Narrowed | None = None
    latencies: Latencies | None = None
    left_whole: tuple[SpaceName, ...] = ()

    @property
    def whole(self) -> "Request":
        """The request as it was given, of the model with all its blocks and dimensions."""
        earlier = self.shortened or self.narrowed
        return self if earlier is None else earlier.whole

    @cached_property
    def stored(self) -> Container | None:
        """What the model is stored as, where that carries code of its own."""
        return container_of(self.model) if self.model.own_code else None

    def __post_init__(self) -> None:
        """The recipe speaks of the spaces that this model has, and may prune."""
        recipe = self.recipe.at(self.model.family)
        if recipe.shares_stock and not self.model.own_code:
            insists = {name for name, own in recipe.spaces.items() if own.ratio is not None}
            left = recipe.without(whole_spaces(self.model).keys() - insists)
            if left is not recipe:
                object.__setattr__(self, "left_whole", tuple(recipe.spaces.keys() - left.spaces.keys()))
                recipe = left
        object.__setattr__(self, "recipe", recipe)

    @property
    def samples(self) -> Samples | None:
        """What the model is run on, to measure it or to train its blocks; None where it is not run."""
        own = self.live or self.training
        return None if own is None else own.samples

    @property
    def sequential(self) -> bool:
        """Whether moments are measured on the pruned prefix."""
        by_linears = self.recipe.mask is not None or self.recipe.low_rank is not None
        needed = not by_linears or self.recipe.linears_need_moments or self.recipe.rotates_in_turn
        return self.live is not None and self.recipe.target != "dense" and needed

    @property
    def lacks_moments(self) -> bool:
        """Whether the recipe needs moments, and there is nothing to have them from."""
        if self.recipe.depth is not None and self.plan is not None:
            return False  # its blocks are chosen; what maps need is asked for before the run (`checks.check_trained`)
        return self.recipe.needs_moments and self.statistics is None and self.live is None

    @property
    def measures_first(self) -> bool:
        """Whether the unpruned model is measured on the live samples before anything is pruned."""
        if self.live is None or self.statistics is not None or not self.recipe.needs_moments:
            return False
        if self.recipe.depth is not None or self.recipe.hidden is not None:
            return True
        if self.ranked is not None and self.sequential:
            return False
        rotation = self.recipe.rotation
        shared = rotation is not None and rotation.kind == "shared" and self.recipe.rotation_needs_moments
        return shared or self.recipe.measures_dense or not self.sequential

    @property
    def widths_known(self) -> bool:
        """Whether widths can be told before anything is measured."""
        if self.recipe.depth is not None or self.recipe.hidden is not None:
            return False
        known = self.statistics is not None or self.plan is not None or self.ranked is not None
        known = known or not self.recipe.needs_moments
        return known or (self.recipe.allocation == "uniform" and not self.recipe.shares_out)
