"""`frontier`: smaller, for this runtime, at this size: by what? Candidates are predicted, made and measured.

1. The model is measured once: how much each input matters, and what each type of each matrix adds to the divergence.
2. Where types alone would lose much, it is also predicted what fewer columns of every MLP add. One budget over types
   and columns names the candidate; the best of llama.cpp's own mixtures stands beside it.
3. They are made one at a time, run in llama.cpp and held against the dense model. What is done stands in a journal, so
   that an interrupted run goes on.
4. The best one within the target is kept, with a picture and the commands that make it.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gguf import GGMLQuantizationType as Kind

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import decimal_bytes
from ckpt_prune.common.graph_types import GgufType
from ckpt_prune.common.progress import Notices
from ckpt_prune.gguf.choosing import TypeChoice
from ckpt_prune.gguf.embedding_score import TextEmbeddings, read_embeddings
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.llama_cpp import require_runtime
from ckpt_prune.gguf.rounding import check_rounding
from ckpt_prune.gguf.score import TextPredictions, read_reference
from ckpt_prune.gguf.timing import time_dense
from ckpt_prune.gguf.types import default_type
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import FrontierOptions
from ckpt_prune.recipe.sizes import Size
from ckpt_prune.runner.file_budgets import FileBudgets, as_in_file, check_reach
from ckpt_prune.runner.frontier.asked import (
    foresee_work,
    open_staging,
    read_target,
    read_texts,
    read_time,
    say_if_whole_fits,
    words_of_rare_tokens,
)
from ckpt_prune.runner.frontier.candidates import LOST_ENERGY, FileCandidate, MeasuredFile
from ckpt_prune.runner.frontier.file_maker import Maker, candidate_of, make_frontier, write_frontier
from ckpt_prune.runner.frontier.graph_latency import AIM, ROOM, best_in_time, took
from ckpt_prune.runner.frontier.record import (
    SMALLEST,
    USABLE,
    Frontier,
    best_within,
    choose_for_loss,
    pareto,
    words_of_energy,
    words_of_target,
)
from ckpt_prune.runner.pruning_budgets import CUT_FROM, prune_from, will_prune_columns

IN_QUESTION = 1.5
"""A mixture of llama.cpp is made if it is predicted to lose at most so many times what the budget does."""
LADDER: tuple[GgufType, ...] = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "q2_k")
"""llama.cpp's own mixtures that are measured if no size is asked for."""
_DENSE = "time in float16"
"""Entry of the journal."""


@dataclass(frozen=True)
class _Search:
    """The target of a search.

    Attributes:
        maker: of the candidates.
        limit: bytes of the file; None: any.
        loss: nats a token; None: any.
        time: nanoseconds of the work that the maker times; None: any.
    """

    maker: Maker
    limit: int | None
    loss: float | None
    time: float | None = None

    @cached_property
    def choice(self) -> TypeChoice | None:
        """Types, and columns if types alone lose much, that are predicted to be best; None if nothing is."""
        budgets, timed = self.maker.budgets, self.maker.timed
        try:
            if self.time is not None and timed is not None:
                return None if self.time < self.least_time else budgets.at_time(self.time, timed)
            return budgets.at_loss(self.loss or 0) if self.limit is None else budgets.at_bytes(self.limit)
        except BudgetError:
            return None

    @cached_property
    def least_time(self) -> float:
        """The nanoseconds that the fastest types take, with the fewest columns and tokens; 0 if nothing is timed."""
        return 0.0 if self.maker.timed is None else self.maker.budgets.least_time(self.maker.timed)

    @property
    def generates(self) -> bool:
        """Whether the loss is one of predictions, and not of embeddings."""
        return self.maker.budgets.model.family.gives_logits

    @property
    def is_beyond_use(self) -> bool:
        """Whether the best file of the size or time is predicted to be beyond use; predictions are low there."""
        is_fixed = self.limit is not None or self.time is not None
        return is_fixed and self.choice is not None and self.choice.kl > math.log(USABLE)


def explore_frontier(options: FrontierOptions) -> Frontier:
    """Find what makes a model as small as is asked for and loses least (`ckpt_prune.frontier`)."""
    say = Notices()

    # 1. Read everything, and refuse what cannot work.
    require_runtime()
    check_rounding([Kind.IQ4_NL], weighted=True)
    model = as_in_file(open_model(options.model, Opening(options.trust_remote_code)))
    if options.target_latency is not None and not model.family.gives_logits:
        raise UserError(
            f"--target-latency: {model.checkpoint.name} makes embeddings, and times in llama.cpp are of models that "
            "generate text: ask for a size or a loss, or for a graph (--for onnxruntime)"
        )
    planner = FilePlanner(model)
    planner.plan("q8_0")  # refuses what llama.cpp does not compute, or tokenizers that it has not
    limit, loss = read_target(options, model)
    time, timed = read_time(options)
    if limit is not None:
        check_reach(limit, planner, options)
    own = default_type(model.checkpoint)
    words = "--format", "gguf", "--dtype", own, "-o", "OUT.gguf"
    say_if_whole_fits(options, limit, planner.plan(own).bytes, *words)
    texts = read_texts(options, model, say)
    options, samples = texts.options, texts.samples

    _foresee_work(options, model, samples, limit, loss)
    with open_staging(options, texts.parts(model), say) as staging:
        # 2. Measure the model once, and tell from that what each type of each matrix loses.
        folder = model.checkpoint.whole
        reference: TextPredictions | TextEmbeddings
        how: dict[str, Any] = {"texts": texts.names, "trust": options.trust_remote_code}
        if model.family.gives_logits:
            reference = read_reference(folder, texts.held_out, **how)
        else:
            reference = read_embeddings(folder, texts.held_out, lay_out(model), **how)
        narrower = will_prune_columns(model, limit, loss)
        budgets = FileBudgets(model, samples, options, staging.scratch, staging.journal, narrower, planner=planner)
        maker = Maker(options, budgets, reference, staging, timed)
        search = _Search(maker, limit, loss, None if time is None else _limit_of(time, maker))
        say(_foresee(search))

        # 3. Make the candidates one at a time, and measure them.
        found: list[MeasuredFile] = []
        for candidate in _candidates(search, found):
            found.append(maker.measure(candidate, _best(search, found), say))
            say(found[-1].line(reference.perplexity))

        # 4. Keep the best, and say how it is made.
        best = _best(search, found)
        frontier = make_frontier(options, maker, found, best, _asked(search), _found_by(search), _reach(search))
        if best is not None:
            kept = budgets.vocabularies.kept_rows(best.candidate.rows)
            rare = words_of_rare_tokens(options, model, kept, texts.held_out)
            frontier = replace(frontier, remarks=[*_words_of_mixtures(search, found), *rare])
        write_frontier(frontier, staging.path, maker, best)
        staging.publish()
    return frontier


def _limit_of(time: Size, maker: Maker) -> float:
    """Return the nanoseconds that are asked for; a share is of the file in float16, which is timed then."""
    journal, timed = maker.staging.journal, maker.timed
    if time.value is None and _DENSE not in journal.notes:
        assert timed is not None
        journal.record(_DENSE, note=time_dense(maker.budgets.planner, timed, maker.staging.scratch))
    return time.of(round(journal.notes.get(_DENSE, 0)))


def _foresee_work(
    options: FrontierOptions, model: Model, samples: Samples, limit: int | None, loss: float | None
) -> None:
    is_fixed = limit is not None or options.target_latency is not None
    files = 1 if is_fixed else 2 if options.max_loss is not None else 2 * len(LADDER) + len(SMALLEST)
    generates = model.family.gives_logits
    is_much = is_fixed or (loss or 0) > (CUT_FROM if generates else prune_from(model))
    fewer = (
        [f"what fewer {'tokens and ' if generates else ''}columns lose, if types alone lose much"] if is_much else []
    )
    times = ["how long types take"] if options.target_latency is not None else []
    made = "predictions" if generates else "embeddings"
    steps = [f"{made} of MODEL", *times, "importance of inputs", "what types lose", *fewer]
    foresee_work(options, model, samples, steps, files, limit)


def _foresee(search: _Search) -> str:
    """Say what the target is predicted to mean, before anything is made."""
    choice = search.choice
    if choice is None:
        return "nothing within the target is predicted"
    time = "" if choice.time is None else f"{choice.time / 1e6:.3g} ms, "
    if choice.columns or choice.rows is not None:
        fewer = [f"at least {min(choice.columns.values())} columns of each MLP"] if choice.columns else []
        fewer += [] if choice.rows is None else [f"{choice.rows:,} tokens"]
        kept = f"{time}{decimal_bytes(choice.bytes)}, with {' and '.join(fewer)} left"
        # Before, it is a guess of second order, which is off by more than rounding loses.
        return f"chosen {_asked(search)}: {kept}; what the file loses is predicted once it is pruned"
    lost = f"a divergence (KL) of {choice.kl:.3f}, about {math.exp(choice.kl):.2f} times the perplexity"
    lost = lost if search.generates else f"{choice.kl:.3f} of the energy of hidden states lost"
    return f"predicted {_asked(search)}: {time}{decimal_bytes(choice.bytes)}, {lost}"


def _candidates(search: _Search, found: list[MeasuredFile]) -> Iterator[FileCandidate]:
    """Yield what is to be measured next, by what was measured so far."""
    if search.time is not None:
        yield from _in_time(search, search.time, found)
    else:
        yield from _sized(search, found) if search.limit is not None else _within_loss(search, found)


def _sized(search: _Search, found: list[MeasuredFile]) -> Iterator[FileCandidate]:
    """Yield what keeps to a size."""
    assert search.limit is not None
    maker, choice = search.maker, search.choice
    if search.is_beyond_use:
        return
    yield from maker.mixture_within(search.limit, math.inf if choice is None else IN_QUESTION * choice.kl)
    if choice is None:
        return
    yield candidate_of("by budget", choice, feedback=True)
    # Of short texts, pruning may lose another share of what it loses of hidden states than rounding does.
    if choice.columns and not search.generates:
        with suppress(BudgetError):
            yield candidate_of("types alone by budget", maker.budgets.fitted.at_bytes(search.limit), feedback=True)


def _in_time(search: _Search, limit: float, found: list[MeasuredFile]) -> Iterator[FileCandidate]:
    """Yield what keeps to a time, by the times of types; corrected once by what the file itself takes."""
    maker, choice, timed = search.maker, search.choice, search.maker.timed
    assert timed is not None
    if choice is None or search.is_beyond_use:
        return
    yield from maker.mixture_within(limit, IN_QUESTION * choice.kl, maker.budgets.times(timed))
    asked = limit
    for name in ("by budget", "by budget, second try"):
        with suppress(BudgetError):
            yield candidate_of(name, maker.budgets.at_time(asked, timed), feedback=True)
        if ROOM * limit <= took(found[-1]) <= limit:
            return
        asked *= AIM * limit / took(found[-1])


def _within_loss(search: _Search, found: list[MeasuredFile]) -> Iterator[FileCandidate]:
    """Yield the smallest of llama.cpp's own mixtures within the loss, and the smallest file by budget.

    If neither a size nor a loss is asked for, other mixtures and types by budget as large as each stand beside them:
    each choice once, and no mixture that another as small is predicted to beat.
    """
    maker, budget = search.maker, search.maker.budget
    assert search.loss is not None
    if maker.options.max_loss is not None:
        yield from maker.smallest_mixture(search.loss)
    rungs = [maker.mixture(name) for name in LADDER if maker.options.max_loss is None]
    unbeaten = pareto(rungs, lambda each: (each.bytes, each.kl or 0))
    for mixture in filter(unbeaten.__contains__, rungs):
        yield mixture
        with suppress(BudgetError):
            alike = candidate_of(f"bits by budget, as large as {mixture.name}", budget.at_bytes(mixture.bytes))
            if alike.kinds not in [each.candidate.kinds for each in found]:
                yield alike
    choice: TypeChoice | None = None
    for words, choice in choose_for_loss(search.loss, found, maker.budgets.at_loss):
        yield candidate_of(words, choice, feedback=True)
    # What pruning loses is predicted too low where much goes, and types alone may be all that keeps to the loss.
    is_pruned = choice is not None and (choice.columns or choice.rows is not None)
    if is_pruned and found[-1].score.kl > search.loss:
        yield candidate_of("types alone within the loss", maker.budgets.fitted.at_loss(search.loss), feedback=True)


def _best(search: _Search, found: list[MeasuredFile]) -> MeasuredFile | None:
    if search.time is not None:
        return best_in_time(found, search.time)
    return best_within(found, search.limit, search.loss)


def _asked(search: _Search) -> str:
    if search.time is not None and search.maker.timed is not None:
        dense = search.maker.staging.journal.notes.get(_DENSE)
        share = "" if dense is None else f" ({search.time / dense:.0%} of {dense / 1e6:.4g} in float16)"
        return f"within {search.time / 1e6:.4g} ms{share} for {search.maker.timed.words}"
    unit = "nats a token" if search.generates else words_of_energy(search.loss)
    return words_of_target(search.limit, search.loss, unit)


def _found_by(search: _Search) -> str:
    """Say what a file that is beyond use was predicted to lose, or nothing."""
    if search.choice is None and search.time is not None:
        fewest = "with the fewest columns that are tried"
        return f": the fastest types are predicted to take {search.least_time / 1e6:.4g} ms {fewest}"
    if search.choice is None or not search.is_beyond_use:
        return ""
    kl = search.choice.kl
    if not search.generates:
        return f": a lost energy of {kl:.2f} is predicted, and {math.log(USABLE):.2f} is the bound"
    return f": KL {kl:.2f} is predicted, {math.exp(kl):.1f} times the perplexity, and {USABLE:g} times is the bound"


def _words_of_mixtures(search: _Search, found: list[MeasuredFile]) -> list[str]:
    """Say why no mixture of llama.cpp's own was made for a size, if none was."""
    mixtures, limit = search.maker.mixtures, search.limit
    if limit is None or {each.name for each in mixtures} & {each.candidate.name for each in found}:
        return []
    fitting = [each for each in mixtures if each.bytes <= limit]
    if not fitting:
        least = min(mixtures, key=lambda each: each.bytes)
        names = f"the smallest, {least.name}, has {decimal_bytes(least.bytes)}"
        return [f"None of llama.cpp's own mixtures is so small without --embedding-type and its like: {names}."]
    best, loss = min(fitting, key=lambda each: each.kl or 0), "KL" if search.generates else LOST_ENERGY
    return [f"The best mixture of llama.cpp's own is {best.name}, not made: {loss} {best.kl or 0:.3f} is predicted."]


def _reach(search: _Search) -> int | None:
    """Return the bytes of the smallest file that is predicted to be usable, of fewer columns if these are known."""
    if search.time is not None:
        return None
    budgets = search.maker.budgets
    budget = budgets.joint[0] if search.choice is not None and search.choice.columns else budgets.fitted
    try:
        return budget.at_loss(math.log(USABLE)).bytes
    except BudgetError:
        return None
