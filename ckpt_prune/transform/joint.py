"""How many whole blocks go where units of spaces go besides: by what a few numbers do to the model's own output.

Predicted divergences of blocks and of units are on different footings: of a gap they are of second order in an error as
large as the stream's own, without the map that makes up for it; of units they are held-out errors of single sites.
Their sum compares nothing. So the model is made with a few numbers of blocks gone and the rest of the size met by the
widths of the least predicted error, refitted on the statistics of the unpruned model, and run on samples that no refit
has seen (compensation/README.md, section 12).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.sites import Site
from ckpt_prune.calibration.fisher import LIMITS
from ckpt_prune.calibration.moments import total
from ckpt_prune.calibration.readout import Readout, divergences
from ckpt_prune.calibration.samples import Part, Samples
from ckpt_prune.calibration.sources import CachedMoments, KnownMoments
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.calibration.streams import HiddenStream, fold_slices, stream_of
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.errors import UserError
from ckpt_prune.planning.budget import total_error
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.records import Depth, TriedDepth
from ckpt_prune.progress import track
from ckpt_prune.transform.budgets import crossings_of, curves_of, decide, dense_ranking
from ckpt_prune.transform.decisions import Decision, Decisions
from ckpt_prune.transform.engine import Pruner
from ckpt_prune.transform.request import LiveSamples, Ranked, Request
from ckpt_prune.transform.shortening import at_depth, at_own_size, depth_of, wanted_depth
from ckpt_prune.transform.site_variants import check_finite, trial_spaces

FIRST, MORE = 5, 2
"""Numbers of blocks that are tried: so many from none to as many as meet the size by themselves, and then so many
between the best one and those beside it."""
_TRIED = "depth tried"
"""Before a number of blocks, of units of the journal."""

Shorten = Callable[[Request, Depth], tuple[Depth, Model]]
"""A request and which blocks go → the record of what makes up for them, and the model that is left."""
Choose = Callable[[Request], Depth]
"""A request with a number of blocks to drop → which ones."""


def tried_counts(most: int) -> list[int]:
    """Numbers of blocks that are tried first, ascending: none, `most`, and evenly between them."""
    return sorted({round(most * step / (FIRST - 1)) for step in range(FIRST)})


def counts_beside(best: int, tried: Sequence[int]) -> list[int]:
    """Numbers that are tried then: halfway between the best one and those tried beside it."""
    below, above = [count for count in tried if count < best], [count for count in tried if count > best]
    ends = [*([max(below)] if below else []), *([min(above)] if above else [])]
    return sorted({(best + end) // 2 for end in ends} - set(tried))[:MORE]


@dataclass
class Weighing:
    """Numbers of blocks held against each other.

    Attributes:
        request: of a recipe with `depth.drop: auto`, with samples to run.
        statistics: of the unpruned model, with all that widths of the least error are found from.
        choose: which blocks go.
        shorten: what makes up for them.
        journal: of the run, in which what was measured of each is entered.
    """

    request: Request
    statistics: Statistics
    choose: Choose
    shorten: Shorten
    journal: Journal | None = None

    def __post_init__(self) -> None:
        self.request = at_own_size(self.request)
        self.ranking = ranking_of(self.request, self.statistics)
        self._tried: dict[int, TriedDepth | None] = {}
        self._why: UserError | None = None

    def record(self) -> Depth:
        """The blocks that go, of the number that changes the output least; of equal ones the fewest.

        Raises:
            UserError: no number of blocks leaves a model of the size.
        """
        first = tried_counts(wanted_depth(self.request).count)
        self._try(first)
        best = self._best()
        if best is not None:
            self._try(counts_beside(best, first))
            best = self._best()
        if best is None:
            assert self._why is not None
            raise self._why
        found = [tried for _, tried in sorted(self._tried.items()) if tried is not None]
        return self._chosen(best).model_copy(update={"tried": found})

    def _best(self) -> int | None:
        found = {count: tried.measured for count, tried in self._tried.items() if tried is not None}
        return min(found, key=lambda count: (found[count], count), default=None)

    def _chosen(self, count: int) -> Depth:
        recipe, depth = self.request.recipe, depth_of(self.request)
        settled = depth.model_copy(update={"drop": count} if count else {"drop": None, "blocks": []})
        asked = replace(self.request, recipe=recipe.model_copy(update={"depth": settled}), statistics=self.statistics)
        return self.choose(asked)

    def _try(self, counts: Sequence[int]) -> None:
        known = {} if self.journal is None else self.journal.notes
        for count in counts:
            unit = f"{_TRIED} {count}"
            if unit in known:
                self._tried[count] = None if known[unit] is None else TriedDepth.model_validate(known[unit])
                continue
            try:
                self._tried[count] = self._measured(count)
            except UserError as error:
                # Too few blocks for the size, or such as the class cannot do without: others may do.
                self._tried[count], self._why = None, error
            tried = self._tried[count]
            if self.journal is not None:
                with disk_failures(self.journal.folder):
                    self.journal.record(unit, note=None if tried is None else tried.model_dump(mode="json"))

    def _measured(self, count: int) -> TriedDepth:
        """The divergence of a model without so many blocks, whose others meet the size."""
        chosen = self._chosen(count)
        few = replace(self.request, live=self._some)
        record, model = self.shorten(few, chosen)
        bare = replace(at_depth(self.request, record, model), live=None, statistics=self.statistics)
        short = replace(bare, ranked=ranked_at(self.ranking, record))
        decisions = decide(short)
        predicted = [gap.divergence for gap in record.gaps] + [_predicted(short, decisions)]
        value = self._divergence(short, record, decisions)
        known = None if None in predicted else sum(each for each in predicted if each is not None)
        return TriedDepth(blocks=count, predicted=known, measured=value)

    # ---- running it ----------------------------------------------------------------------------------------------

    @property
    def _live(self) -> LiveSamples:
        assert self.request.live is not None
        return self.request.live

    @property
    def _some(self) -> LiveSamples:
        """The samples that maps are fitted to here: the first ones, which are not those that models are run on."""
        live, most = self._live, LIMITS[self.request.model.family.modality]
        last = fold_slices(len(live.samples), live.folds)[-1]
        count = min(last.start if last.start > 1 else last.stop, most)
        return replace(live, samples=Part(live.samples, 0, count), folds=min(live.folds, count))

    @property
    def _unseen(self) -> Samples:
        """The samples that models are run on: those at the start of the last fold."""
        live, most = self._live, LIMITS[self.request.model.family.modality]
        last = fold_slices(len(live.samples), live.folds)[-1]
        return Part(live.samples, last.start, min(last.stop, last.start + most))

    def _stream(self, model: Model) -> HiddenStream:
        live = self._live
        return stream_of(
            model, self._unseen, device=self.request.device, compute_dtype=live.compute_dtype, allocate=live.allocate
        )

    def _dense(self) -> tuple[Readout, Tensor]:
        """What the dense model makes of the samples, run once."""
        if not hasattr(self, "_reference"):
            model = self.request.model
            stream = self._stream(model)
            for block in range(model.blocks):
                stream.advance(block, model.read_block(block))
            self._reference = stream.readout(), stream.states
        return self._reference

    def _divergence(self, short: Request, record: Depth, decisions: Decisions) -> float:
        model = short.model
        stream = self._stream(model)
        for block in track(range(model.blocks), f"without {record.blocks - model.blocks} blocks", total=model.blocks):
            stream.advance(block, self._pruned(short, record.kept[block], block, decisions))
        readout, states = self._dense()
        (value,) = divergences(readout, states, self._unseen, [(readout, stream.states)])
        check_finite(value, f"the output without {record.blocks - model.blocks} blocks", self._live.compute_dtype)
        return value

    @torch.no_grad()
    def _pruned(self, short: Request, old: int, block: int, decisions: Decisions) -> Mapping[str, Tensor]:
        """A block with its sites pruned and refitted on all folds but the last, or the only one."""
        model, whole, tensors = short.model, self.request.model, short.model.read_block(block)
        own = {space: decisions.of(model, Site(block, space)) for space in short.recipe.spaces}
        pruned = [space for space, decision in own.items() if decision.keep < model.units(space)]
        if not pruned:
            return tensors
        read: Any = CachedMoments(self.statistics, whole).moments(old, {}, pruned)
        moments: Any = {space: (total(folds[:-1] or folds).to(short.device),) for space, folds in read.items()}
        recipe = Recipe.model_validate(
            {"version": 1, "name": "tried", "spaces": trial_spaces(model, block, pruned, tensors)}
        )
        sites = {Site(block, space): Decision(own[space].keep, scores=own[space].scores) for space in pruned}
        pruner = Pruner(model, Decisions(recipe, sites), frozenset(), short.device)
        return pruner.block(block, tensors, KnownMoments(moments))[0]


def ranking_of(request: Request, statistics: Statistics) -> Mapping[Site, Sequence[Ranked]]:
    """Every site's units in the dense model, and what fewer of them lose, for a recipe with blocks and spaces."""
    return dense_ranking(replace(request, recipe=request.recipe.after_depth, statistics=statistics))


def ranked_at(ranking: Mapping[Site, Sequence[Ranked]], record: Depth) -> dict[Site, Sequence[Ranked]]:
    """The same of the blocks that stay, by their new numbers."""
    places = {old: new for new, old in enumerate(record.kept)}
    return {site._replace(block=places[site.block]): own for site, own in ranking.items() if site.block in places}


def _predicted(request: Request, decisions: Decisions) -> float:
    """What the sites are predicted to lose."""
    assert request.ranked is not None
    assert request.recipe.size is not None
    kind = request.recipe.size.kind
    curves = curves_of(request, request.ranked, kind)
    return total_error(
        curves, {site: decisions.of(request.model, site).keep for site in curves}, crossings_of(request, curves, kind)
    )
