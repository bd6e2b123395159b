"""`frontier --for onnxruntime`: in how many bits each weight of a graph, for this size or loss?

1. The model is traced once, and what each weight loses in few bits is measured on the running graph.
2. One budget says in which form each weight is stored. int4 and int8 everywhere stand beside it.
3. Where bits alone lose much, or do not reach the size, the same budget says how many columns each MLP keeps, and if
   the graph generates text how many tokens stay. The model is pruned, and measured before its weights are rounded as
   in 2.
4. Each graph is run in onnxruntime and held against the model on other data. What is done stands in a journal, so that
   an interrupted run goes on; the graph is traced again.
5. The best one within the target is kept, with a picture and the commands that make it.
"""

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import torch
import yaml
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ckpt_prune.benchmarking.latency_table import choose_timed_workload
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.folder_kinds import FRONTIER
from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.checkpoint.staging import Staging, check_output
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD
from ckpt_prune.common.formatting import decimal_bytes, plural
from ckpt_prune.common.graph_types import GraphType, name_graph
from ckpt_prune.common.progress import Notices
from ckpt_prune.evaluation.fewer_tokens import TextCosts, TokenParts
from ckpt_prune.evaluation.sentences import cut_texts
from ckpt_prune.evaluation.whole_model import config_of
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.measure.samples.pairs import reads_pairs
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.samples.text import fingerprint_windows, load_tokenizer
from ckpt_prune.model.containers.opening import Opening, open_checkpoint, open_model
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.onnx.export import complete_folder, count_graph_bytes, measure_for, save_entries
from ckpt_prune.onnx.metrics import is_of_sentences
from ckpt_prune.onnx.quantization.choosing import Prices
from ckpt_prune.onnx.quantization.deciding import BLOCK_SIZES, Decider, Decision, allow_harm, make_scheme
from ckpt_prune.onnx.records import GraphEntry, Manifest
from ckpt_prune.onnx.samples import IMAGES, PAIRS, ProofSamples, choose_proof_samples
from ckpt_prune.onnx.session import DATA
from ckpt_prune.onnx.tasks import GraphTask, check_padding, choose_task, remove_head
from ckpt_prune.onnx.tracing import trace_model
from ckpt_prune.options.commands import FrontierOptions
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.options.graphs import GraphSettings
from ckpt_prune.options.option import check_options, words_of_options
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.recipe.shipped import ONE_WIDTH_RECIPE
from ckpt_prune.recipe.sizes import Size, parse_size
from ckpt_prune.runner.column_budgets import ColumnBudgets, column_widths
from ckpt_prune.runner.frontier.asked import (
    as_named_in,
    foresee_work,
    open_staging,
    read_time,
    say_if_whole_fits,
    words_of_rare_tokens,
)
from ckpt_prune.runner.frontier.candidates import LOST_ENERGY, Measured, MeasuredRounded, RoundedCandidate
from ckpt_prune.runner.frontier.graph_latency import Decide, best_in_time, limit_of, within_time
from ckpt_prune.runner.frontier.graph_pruning import GraphPruning, Pruning
from ckpt_prune.runner.frontier.graph_scores import GraphScores, load_in_float, open_streamed
from ckpt_prune.runner.frontier.pruning import prune_into, same_options
from ckpt_prune.runner.frontier.record import (
    MADE,
    PRUNED,
    RECIPE,
    USUAL_LOSS,
    Frontier,
    best_within,
    choose_for_loss,
    words_of_energy,
    words_of_target,
    write_pages,
)
from ckpt_prune.runner.vocabularies import least_share, parts_of_tokens, tables_in_question
from ckpt_prune.show.model_card import CARD
from ckpt_prune.stages.spaces.effects.column_losses import SPACE

HELD_OUT, HELD_OUT_IMAGES = 16, 4 * IMAGES
"""Windows, or images, that graphs are measured on by default."""
PRUNING, WINDOW = 32, 512
"""Windows of text that a model is pruned by, and their tokens, by default."""
COUNTED = "weight matrices of products and embeddings"
"""Weights of a graph that are stored in few bits."""
NATS = {"text": "nats a token", "image": "nats an image", "pairs": "nats a token"}
SIZE = "BYTES"
"""Stands for the bytes of a graph in its command until they are known."""
TRIES = ("columns", "columns, second try")
"""Entries of the journal: the choices of what to prune. For a loss there may be a second one, since predictions are low
where many columns go."""
PRICES = "what weights lose"
"""Entry of the journal."""
SHARES = (0.15, 0.3, 0.5)
"""Shares of the units of both stacks that may go of an encoder-decoder."""
PRUNE_FROM = 0.02
"""Loss of fewer bits alone from which on fewer columns are in question, too."""


def explore_graphs(options: FrontierOptions) -> Frontier:
    """Find the graph that is as small as is asked for and loses least (`ckpt_prune.frontier`)."""
    say = Notices()
    source = open_checkpoint(options.model, Opening(options.trust_remote_code, whole=True))
    task = choose_task(source.config, folder=source.path)
    if task.modality == "pairs" and options.data is None:
        audio = task.name == "automatic-speech-recognition"
        raise UserError(f"{reads_pairs(source.name, audio=audio)} --held-out OTHER")
    check_padding(source.config, task)
    limit, loss = _read_target(options, source, task)
    own: GraphType = "fp32" if source.dtype == torch.float32 else "fp16"
    weights = sum(info.numel for info in source.tensors.values())
    say_if_whole_fits(options, limit, weights * (4 if own == "fp32" else 2), "--dtype", own, "-o", "OUT")
    size, workload = _read_time(options, source)
    read = (*options.images, options.labels, *options.text, *options.held_out)
    check_output(
        source.path, options.output, resume=options.resume, overwrite=options.overwrite, inputs=read, kind=FRONTIER
    )
    samples = _choose_samples(options, source, task)
    _foresee_work(options, source, samples, limit)
    parts = {"model": source.fingerprint}
    if samples.windows is not None:
        parts["choice of samples"] = fingerprint_windows(samples.windows)
    if samples.pairs is not None:
        parts["choice of samples"] = samples.pairs.fingerprint
    with open_staging(options, parts, say) as staging:
        maker = GraphMaker(options, source, task, samples, staging, workload)
        if limit is not None and samples.pairs is None and not maker.unpriced.reaches(limit):
            if maker.pruning is None:
                maker.unpriced.check_bytes(limit)
            else:
                maker.pruning.check_reach(limit)
        results: list[MeasuredRounded] = []
        owners: dict[str, GraphMaker] = {}
        timed = None if size is None else within_time(maker, results, size)
        for owner, name, dtype, decide in timed or _candidates(maker, results, limit, loss, say):
            results.append(owner.measure(name, dtype, decide, say))
            owners[name] = owner
        if size is not None:
            most = limit_of(size, results)
            frontier = maker.record(results, best_in_time(results, most), f"within {most / 1e6:.4g} ms")
        else:
            asked = words_of_target(limit, loss, _words_of_unit(task, loss))
            frontier = maker.record(results, best_within(results, limit, loss), asked)
        owner = maker if frontier.best is None else owners[frontier.best.candidate.name]
        if owner.kept is not None and samples.windows is not None:
            remarks = words_of_rare_tokens(options, Model.of(source), owner.kept, samples.windows)
            frontier = replace(frontier, remarks=remarks)
        if frontier.best is not None and samples.pairs is not None:
            frontier = replace(frontier, remarks=[f"Its graphs: {owner.words_of_parts(frontier.best.candidate.name)}."])
        owner.publish(frontier)
    return frontier


def _read_target(options: FrontierOptions, source: Checkpoint, task: GraphTask) -> tuple[int | None, float | None]:
    """Return the bytes of the graph, or what its outputs may lose."""
    if options.target_bytes is None:
        allowed = allow_harm(USUAL_LOSS if options.max_loss is None else float(options.max_loss), task)
        return None, allowed
    limit = parse_size("bytes", options.target_bytes).of(source.nbytes)
    weights, model, tables = sum(info.numel for info in source.tensors.values()), _model_of(source), 0
    if task.modality == "pairs":
        weights -= int(weights * SHARES[-1])
    if model is not None and task.name == "text-generation":
        tables = sum(source.tensors[name].numel for name in tables_in_question(model, options))
        weights -= int(tables * (1 - least_share(model, options)))
    if model is not None and (widths := column_widths(model)):
        weights -= model.blocks * model.unit_weights(SPACE) * (widths[-1] - widths[0])
    least = weights // 2
    if limit < least:
        raise UserError(
            f"--target-bytes: {decimal_bytes(limit)} are out of reach: 4 bits for each weight of {source.name}, with "
            f"the fewest columns{' and tokens' if tables else ''} that are tried, take {decimal_bytes(least)}; ask for "
            "more"
        )
    return limit, None


def _words_of_unit(task: GraphTask, loss: float | None) -> str:
    if task.name != "feature-extraction":
        return NATS[task.modality]
    return words_of_energy(loss)


def _foresee_work(options: FrontierOptions, source: Checkpoint, samples: ProofSamples, limit: int | None) -> None:
    """Say what the work takes, if the model is one whose blocks can be timed."""
    model, given = _model_of(source), samples.for_rounding
    if model is not None and given is not None:
        timed = options.target_latency is not None
        less = "columns and tokens" if model.family.causal else "columns"
        columns = [f"what fewer {less} lose, if bits alone lose much"]
        steps = ["trace of MODEL", *(["graphs of fewer columns"] if timed else ["what fewer bits lose", *columns])]
        of = TokenWindows(given) if isinstance(given, Tensor) else given
        foresee_work(options, model, of, steps, 6 if timed else 4, limit)


def _model_of(source: Checkpoint) -> Model | None:
    """Return the model whose columns may go; None if what it is made of is not known."""
    try:
        return Model.of(source)
    except UserError:
        return None


def _read_time(options: FrontierOptions, source: Checkpoint) -> tuple[Size | None, Workload | None]:
    """Return the time that is asked for, and the work that it is of."""
    size, timed = read_time(options)
    if timed is None:
        return None, None
    return size, choose_timed_workload(source.path, timed, trust=options.trust_remote_code)


def _choose_samples(options: FrontierOptions, source: Checkpoint, task: GraphTask) -> ProofSamples:
    """Return held-out data, and other data to measure rounding on."""
    trust = options.trust_remote_code
    if task.modality == "image":
        images = _proof_options(options) | {"samples": options.held_out_samples or HELD_OUT_IMAGES}
        return choose_proof_samples(source.path, task, check_options(ProofOptions, images), trust=trust, rounded=True)
    given = check_options(ProofOptions, _proof_options(options))
    rounding = choose_proof_samples(source.path, task, given, trust=trust, rounded=True).for_rounding
    most = options.held_out_samples
    held_out_rows = {"data": options.held_out[0], "samples": most or PAIRS} if task.modality == "pairs" else None
    other = given.model_copy(update=held_out_rows or {"text": options.held_out, "samples": most or HELD_OUT})
    held_out = choose_proof_samples(source.path, task, other, trust=trust)
    return replace(held_out, for_rounding=rounding)


def _proof_options(options: FrontierOptions) -> dict[str, Any]:
    """Return the options of `export` that take the same data."""
    if options.images:
        return {"images": options.images, "labels": options.labels, "seed": options.seed}
    named = {"text": options.text} if options.data is None else {"data": options.data}
    return named | {"samples": options.samples, "window": options.window}


def _candidates(
    maker: "GraphMaker", results: list[MeasuredRounded], limit: int | None, loss: float | None, say: Notices
) -> Iterator[tuple["GraphMaker", str, GraphType, Decide]]:
    """Yield what is to be measured next, by what was measured so far, as `within_time`."""
    yield maker, "int4 everywhere", "int4", maker.int4.as_first
    yield maker, "int8 everywhere", "int8", maker.int8.as_first
    if limit is not None:
        if maker.unpriced.reaches(limit):
            yield maker, "by budget", "int4", lambda: maker.budget.within_bytes(limit)
            yield maker, "by budget, GPTQ", "int4", lambda: maker.fitted.within_bytes(limit)
        if maker.task.modality == "pairs":
            yield from _with_narrower_stacks(maker, results, limit, math.inf, say)
            return
        pruned = maker.with_less(limit, math.inf, best_within(results, limit, None), say)
        if pruned is not None:
            yield pruned, f"{pruned.chosen} by budget, GPTQ", "int4", lambda: pruned.fitted.within_bytes(limit)
        return
    assert loss is not None
    yield from _within_loss(maker, results, loss)
    if maker.task.modality == "pairs":
        yield from _with_narrower_stacks(maker, results, None, loss, say)
        return
    narrow = maker.with_less(None, loss, best_within(results, None, loss), say)
    if narrow is not None:
        yield from _within_loss(narrow, results, loss, f"{narrow.chosen}, ")


def _within_loss(
    maker: "GraphMaker", results: list[MeasuredRounded], loss: float, prefix: str = ""
) -> Iterator[tuple["GraphMaker", str, GraphType, Decide]]:
    def stored(decision: Decision) -> Any:
        return decision.choice.labels

    def decide(allowed: float) -> Decision:
        if allowed <= maker.by_tokens:
            raise BudgetError(allowed, maker.by_tokens)
        return maker.fitted.within_loss(allowed - maker.by_tokens)

    for name, decision in choose_for_loss(loss, results, decide, stored):
        yield maker, f"{prefix}{name}", "int4", lambda decision=decision: decision  # type: ignore[misc]


def _with_narrower_stacks(
    maker: "GraphMaker", results: list[MeasuredRounded], limit: int | None, loss: float, say: Notices
) -> Iterator[tuple["GraphMaker", str, GraphType, Decide]]:
    """Yield graphs of an encoder-decoder whose stacks have lost a share of their units, as long as that is better.

    Nothing is predicted of shares: each is pruned, and measured before anything is rounded.
    """
    for share in SHARES:
        best = best_within(results, limit, None if limit is not None else loss)
        at_stake = loss if limit is None else math.inf if best is None else best.score.kl
        if at_stake < PRUNE_FROM:
            return
        pruned = maker.prune_stacks(share)
        words, lost = f"without {share:.0%} of the units of both stacks", pruned.unpriced.in_float()
        if lost >= at_stake:
            than = "too much" if limit is None else f"no less than bits alone ({at_stake:.4f})"
            say(f"{words}: a loss of {lost:.4f} before anything is rounded, {than}")
            return
        say(f"{words}: a loss of {lost:.4f} before anything is rounded")
        if limit is None:
            yield from _within_loss(pruned, results, loss, f"{words}, ")
        elif pruned.unpriced.reaches(limit):
            yield pruned, f"{words}, by budget, GPTQ", "int4", lambda pruned=pruned: pruned.fitted.within_bytes(limit)  # type: ignore[misc]
        after = best_within(results, limit, None if limit is not None else loss)
        if best is not None and after is best:
            return
    if limit is None:
        say(f"{words}: no more is tried; `ckpt-prune prune --ratio` takes more, and `evaluate` says what that loses")
    elif best_within(results, limit, None) is None:
        pruned.unpriced.check_bytes(limit)


def _words_of_pruned(lost: float) -> str:
    return f"pruned, a loss of {lost:.4f} before anything is rounded"


class GraphMaker:
    """Makes graphs of one model in a staging folder, and measures them.

    Args:
        workload: that graphs are timed on; None: they are not.
        dense: maker of the graphs of the dense model, if this one is pruned.
        pruned_by: the command that made it then.

    Attributes:
        kept: tokens that stay, rows of the dense model's embedding; None: all.
        by_tokens: what the text costs more by what was pruned, if tokens were: weights are then rounded beside the
            pruned model, since the dense one predicts other tokens.
    """

    def __init__(
        self,
        options: FrontierOptions,
        source: Checkpoint,
        task: GraphTask,
        samples: ProofSamples,
        staging: Staging,
        workload: Workload | None = None,
        *,
        dense: "GraphMaker | None" = None,
        pruned_by: Sequence[str] = (),
    ) -> None:
        self.options, self.source, self.task, self.samples, self.staging = options, source, task, samples, staging
        self.workload, self.pruned_by, self._dense = workload, pruned_by, dense
        how = options.trust_remote_code, task, samples, workload
        self.scores: GraphScores = GraphScores(source.whole, *how) if dense is None else dense.scores
        self.columns = () if dense is None else self._count(SPACE)
        self.heads = dense is not None and task.modality == "pairs" and self._count("heads") != dense._count("heads")
        self.kept: tuple[int, ...] | None = None
        self.by_tokens = 0.0

    def _count(self, space: SpaceName) -> tuple[int, ...]:
        """Return the units of a space in each block, of both stacks of an encoder-decoder, the encoder first."""
        if self.task.modality != "pairs":
            return tuple(Model.of(self.source).unit_counts(space))
        trust, folder = self.options.trust_remote_code, str(self.source.path)
        stacks = (open_model(folder, Opening(trust, part=task.stack)) for task in self.task.graphs)
        return tuple(count for model in stacks for count in model.unit_counts(space))

    def prune_stacks(self, share: float) -> Self:
        """Return the maker of the same encoder-decoder without a share of the units of both stacks."""
        return self._prune(f"{100 * share:.0f}", {"recipe": ONE_WIDTH_RECIPE, "ratio": share})

    @property
    def may_prune(self) -> bool:
        """Whether the model can be pruned: not if its blocks are in stages."""
        return _model_of(self.source) is not None

    def prune(self, share: Fraction) -> Self:
        """Return the maker of the same model, pruned to a share of its time, unless an earlier run has pruned it."""
        percent = f"{float(100 * share):.2f}%"
        of = (self.options.target_latency or "").partition("@")[2]
        return self._prune(percent.removesuffix("%"), {"target_latency": f"{percent}@{of}" if of else percent})

    def _prune(self, name: str, how: dict[str, Any], place: str | None = None) -> Self:
        """Prune the model by options of `prune`; `place` stands for a recipe in its command."""
        out, options = self.staging.scratch / f"pruned-{name}" / "pruned", self.options
        given = same_options(options) | self._samples_to_prune | how | {"evaluate_samples": 0}
        named = as_named_in(options.output, prune_into(out, given, progress=options.progress))
        named = named if place is None else named.model_copy(update={"recipe": place})
        words = ["ckpt-prune", "prune", *words_of_options(named, given), "-o", PRUNED]
        pruned = open_checkpoint(str(out), Opening(True, whole=True))
        of_all = self.task, self.samples, self.staging, self.workload
        return type(self)(options, pruned, *of_all, dense=self, pruned_by=words)

    @cached_property
    def _samples_to_prune(self) -> dict[str, Any]:
        options = self.options
        if options.text:
            window = options.window or min(WINDOW, Model.of(self.source).tokens)
            return {"samples": options.samples or PRUNING, "window": window}
        return {"samples": options.samples} if options.samples else {}

    # ---- columns and tokens ----------------------------------------------------------------------------------------

    @cached_property
    def pruning(self) -> GraphPruning | None:
        """Chooses what to prune of the model; None if its parts are not known."""
        model = _model_of(self.source)
        if model is None:
            return None
        options = self.options.model_copy(update=self._samples_to_prune)
        device = resolve_device(options.device)
        dtype = resolve_compute_dtype(options.compute_dtype, device, model.dtype)
        samples = choose_samples(model, options, trust=options.trust_remote_code, say=Notices())
        folder, journal = self.staging.scratch, self.staging.journal
        columns = ColumnBudgets(model, samples, options.seed, folder, journal, device, dtype)
        generates = self.task.name == "text-generation"
        return GraphPruning(columns, options, self.unpriced, self.staging, generates)

    @property
    def chosen(self) -> str:
        """The kinds of choices that the budget has made, in words."""
        pruned = [*(["tokens"] if self.kept else []), *(["columns"] if self.columns else [])]
        return f"{', '.join(pruned)} and bits"

    def with_less(self, limit: int | None, loss: float, best: MeasuredRounded | None, say: Notices) -> Self | None:
        """Return the maker of the model with fewer columns or tokens, if that is predicted to beat bits alone.

        Better is what loses less within a size, or is smaller within a loss. It is pruned and measured before anything
        is rounded: predictions are of second order, and low where many columns go.
        """
        at_stake, pruning = loss if limit is None else math.inf if best is None else best.score.kl, self.pruning
        if pruning is None or at_stake < PRUNE_FROM or not (pruning.mlps or pruning.tables):
            return None
        held_out = self.samples.images
        if held_out is not None and {*held_out.paths} & {*cast(ImageSamples, pruning.columns.samples).paths}:
            say(
                "columns of MLPs are not in question: a pruned model would be measured on images that it was fitted "
                "to; give a labels.csv whose column split says calib or eval"
            )
            return None
        if limit is None:
            return self._prune_within_loss(pruning, loss, best, say)
        return self._prune_within_size(pruning, limit, best, say)

    def _prune_within_size(
        self, pruning: GraphPruning, limit: int, best: MeasuredRounded | None, say: Notices
    ) -> Self | None:
        chosen = self._choose_less(pruning, TRIES[0], limit, math.inf, best, say)
        if chosen is None:
            return None
        pruned, lost = self._prune_less(chosen, pruning.model, TRIES[0])
        foreseen, alone = chosen.predicted - chosen.by_pruning + lost, math.inf
        if best is not None:
            alone = best.score.kl if best.candidate.kl is None else best.candidate.kl
        if foreseen < alone:
            say(_words_of_pruned(lost))
            return pruned
        alone_words = f"no less than bits alone ({alone:.4f})"
        say(f"{_words_of_pruned(lost)}; with bits {foreseen:.4f} is predicted, {alone_words}")
        return None

    def _prune_within_loss(
        self, pruning: GraphPruning, loss: float, best: MeasuredRounded | None, say: Notices
    ) -> Self | None:
        allowed = loss
        for name in TRIES:
            chosen = self._choose_less(pruning, name, None, allowed, best, say)
            if chosen is None:
                return None
            pruned, lost = self._prune_less(chosen, pruning.model, name)
            if lost < loss:
                say(_words_of_pruned(lost))
                return pruned
            say(f"{_words_of_pruned(lost)}: too much")
            allowed *= max(0.0, chosen.by_pruning) / lost  # predictions are low by as much
        return None

    def _choose_less(
        self,
        pruning: GraphPruning,
        name: str,
        limit: int | None,
        allowed: float,
        best: MeasuredRounded | None,
        say: Notices,
    ) -> Pruning | None:
        """Return what goes of the model, or say why nothing does."""
        try:
            chosen = pruning.choose(self.fitted, limit, allowed, name)
        except BudgetError:  # a size may need fewer tokens than this tokenizer, or a text that is short, lets go
            if limit is not None:
                say("the columns and tokens that may go do not make the graph small enough: ask for a larger one")
            return None
        whole = not chosen.columns and chosen.kept is None
        if whole or (limit is None and best is not None and chosen.cost >= best.score.bytes):
            worse = "save less" if limit is None else "lose more"
            what = "columns of MLPs and tokens" if pruning.tables else "columns of MLPs"
            say(f"fewer {what} are predicted to {worse} than fewer bits")
            return None
        return chosen

    def _prune_less(self, chosen: Pruning, model: Model, name: str) -> tuple[Self, float]:
        """Return the maker of the model that is pruned by a choice, and what pruning has lost, measured."""
        recipe = self.staging.scratch / RECIPE
        recipe.write_text(yaml.safe_dump(chosen.recipe, sort_keys=False))
        pruned = self._prune(name.replace(", ", "-").replace(" ", "-"), {"recipe": str(recipe)}, RECIPE)
        pruned.columns = chosen.columns
        if chosen.kept is None:
            return pruned, pruned.unpriced.in_float()
        pruned.kept = chosen.kept
        pruned.samples = _choose_samples(self.options, pruned.source, self.task)
        pruned.by_tokens = self._lose_tokens(pruned)
        return pruned, pruned.by_tokens

    @cached_property
    def _costs(self) -> TextCosts:
        """The negative log-likelihood, by this model, of the text that weights are rounded by."""
        windows = self.samples.for_rounding
        assert isinstance(windows, Tensor)
        return TextCosts(windows, (), lambda: self.scores.language_model)

    def _lose_tokens(self, pruned: Self) -> float:
        """Return how much more that text costs a model with fewer tokens, in nats a token of this one."""
        assert pruned._parts is not None
        return self._costs.score(open_streamed(pruned.source.whole) or pruned._load(), pruned._parts).kl

    @cached_property
    def _parts(self) -> TokenParts | None:
        """How this model writes a token of the dense one; None if it has all."""
        if self.kept is None or self._dense is None:
            return None
        return parts_of_tokens(Model.of(self._dense.source), self.kept)

    def _load(self, *, unpack: bool = False) -> Any:
        trust = self.options.trust_remote_code or bool(self.columns)
        return load_in_float(self.source.whole, trust=trust, unpack=unpack)

    # ---- the graph -------------------------------------------------------------------------------------------------

    @cached_property
    def _traced(self) -> Any:
        self.scores.let_go()
        model = self._load(unpack=True)
        how: dict[str, Any] = {"opset": None, "fusions": None, "log": self.staging.scratch / "export-error.log"}
        graphs = {task.stack: trace_model(remove_head(model, task), task, **how) for task in self.task.graphs}
        samples = self.samples
        # What rounding is measured on is other data than graphs are; of images it is the same.
        if names := ", ".join(path.name for path in (*self.options.text, self.options.data) if path is not None):
            samples = replace(samples, description={"what": names})
        return graphs, measure_for(model, graphs, self.task, samples, self.source.whole)

    def _decider(self, dtype: Any, **changes: Any) -> Decider:
        graphs, measuring = self._traced
        scheme = make_scheme(dtype, GraphSettings(dtype=dtype), self.task, ranges=self.samples.images is not None)
        decider = Decider(graphs, replace(scheme, **changes), measuring, self.staging.scratch)
        decider.reference = None if self._dense is None or self.kept is not None else self._dense.unpriced
        return decider

    @cached_property
    def int4(self) -> Decider:
        return self._decider("int4")

    @cached_property
    def int8(self) -> Decider:
        return self._decider("int8")

    @cached_property
    def unpriced(self) -> Decider:
        """Decides about all forms."""
        return self._decider("int4", blocks=BLOCK_SIZES)

    @cached_property
    def budget(self) -> Decider:
        """The same, when what weights lose is known: it is measured, unless an earlier run has."""
        decider, journal = self.unpriced, self.staging.journal
        entry = f"{PRICES}, pruned" if self.pruned_by else PRICES
        if entry in journal.notes:
            decider.prices = Prices(decider.forms, **journal.notes[entry])
        else:
            found = decider.prices
            journal.record(entry, note={"alone": found.alone, "at_once": found.at_once})
        return decider

    @cached_property
    def fitted(self) -> Decider:
        return self.budget.by_gptq()

    # ---- candidates ------------------------------------------------------------------------------------------------

    def _place(self, name: str) -> Path:
        """Return the folder of a candidate's graphs, which have the names that `export` gives them."""
        return self.staging.scratch / name.replace(" ", "-").replace(",", "")

    def measure(self, name: str, dtype: GraphType, decide: Decide, say: Notices) -> MeasuredRounded:
        """Make a graph, or both of an encoder-decoder, and measure it, unless an earlier run has."""
        place, journal = self._place(name), self.staging.journal
        files = [name_graph(dtype, task.stack) for task in self.task.graphs]
        if name in journal.notes and all((place / file).is_file() for file in files):
            result = Measured.read(RoundedCandidate, journal.notes[name]["found"])
            self.scores.dense = journal.notes[name]["dense"]
            return result
        say(f"making and measuring: {name}")
        decision = decide()
        graphs, measuring = self._traced
        place.mkdir(exist_ok=True)
        entries = save_entries(graphs, place, dtype, decision, measuring, scratch=self.staging.scratch)
        if decision is None:
            candidate = RoundedCandidate(name, dtype, None, "nearest")
        else:
            record, by_budget = decision.record, bool(decision.scheme.blocks)
            lost = None if record.loss is None else record.loss + self.by_tokens
            candidate = RoundedCandidate(name, dtype, lost, record.rounding, record.kinds, COUNTED, by_budget)
        rows = None if self.kept is None else len(self.kept)
        candidate = replace(
            candidate, columns=self.columns, heads=self.heads, rows=rows, commands=self._commands(candidate)
        )
        result = Measured(candidate, self.scores.score(place, files, self.source.path, self._parts))
        made = [entry.model_dump() for entry in entries]
        journal.record(name, note={"found": result.note(), "dense": self.scores.dense, "entries": made})
        size, parts = decimal_bytes(result.score.bytes), self.words_of_parts(name)
        figures = self.record([result], result, "").words_of(result.score)
        say(f"{name}: {size}{f' ({parts})' if parts else ''}, {figures}")
        return result

    def words_of_parts(self, name: str) -> str:
        """Return the sizes of both graphs of a candidate of an encoder-decoder, in words; nothing of others."""
        entries, place = self.staging.journal.notes[name]["entries"], self._place(name)
        sizes = ((each["stack"], decimal_bytes(count_graph_bytes(place, each["file"]))) for each in entries)
        return ", ".join(f"{stack} {size}" for stack, size in sizes) if len(entries) > 1 else ""

    # ---- the result ------------------------------------------------------------------------------------------------

    def record(self, found: list[MeasuredRounded], best: MeasuredRounded | None, asked: str) -> Frontier:
        """Return the record of what was found."""
        embeds, samples = self.task.name == "feature-extraction", self.samples
        if samples.images is not None:
            data = f"{plural(len(samples.images), 'image')} of {(samples.description or {})['what']}"
        elif samples.pairs is not None:
            data = f"targets of {plural(len(samples.pairs), 'pair')} of {self.options.held_out[0].name}"
        else:
            assert samples.windows is not None
            names = ", ".join(path.name for path in self.options.held_out)
            data = "{} windows of {} tokens of {}".format(*samples.windows.shape, names)
            if is_of_sentences(self.task.name, self.source.path):
                texts = cut_texts(samples.windows, load_tokenizer(self.source.path))
                data = f"the embeddings of {plural(len(texts), 'text')} cut from {data}"
        return Frontier(
            folder=self.options.output,
            place=str(as_named_in(self.options.output, self.options).model),
            model=model_name(self.source.path),
            dense=self.scores.dense,
            dense_bytes=self.source.nbytes,
            found=found,
            best=best,
            asked=asked,
            beyond_use="",
            reach=None,
            commands=[]
            if best is None
            else [each.replace(SIZE, str(best.score.bytes)) for each in best.candidate.commands],
            data_words=data,
            windows=None if samples.windows is None else len(samples.windows),
            runtime="onnxruntime",
            loss=LOST_ENERGY if embeds else "KL",
            agreement="cosine" if embeds else "top-1",
            items="tokens" if samples.images is None else "images",
        )

    def _commands(self, candidate: RoundedCandidate) -> tuple[str, ...]:
        """Return the command lines that make a graph in the folder of the search; `SIZE` stands for its bytes."""
        model = as_named_in(self.options.output, self.options).model
        words = ["ckpt-prune", "export", PRUNED if self.pruned_by else str(model)]
        may_have_code = self.pruned_by and self.task.modality != "pairs"
        own_code = self.options.trust_remote_code or (may_have_code and Model.of(self.source).has_remote_code)
        words += ["--trust-remote-code"] if own_code else []
        words += ["--dtype", candidate.dtype]
        if candidate.by_budget:
            words += ["--target-bytes", self.options.target_bytes or SIZE]
        if candidate.dtype == "int4":
            words += ["--rounding", candidate.rounding]
        given = _proof_options(self.options)
        if self.options.images:
            given["samples"] = self.options.held_out_samples or HELD_OUT_IMAGES
        words += words_of_options(as_named_in(self.options.output, check_options(ProofOptions, given)), given)
        words += ["--dense", str(model)] if self.pruned_by and self.kept is None else []
        words += [*(["--max-loss", "99%"] if candidate.dtype != "fp32" else []), "-o", MADE]
        return tuple(shlex.join(each) for each in (self.pruned_by, words) if each)

    def publish(self, frontier: Frontier) -> None:
        """Write the record, and all that `export` writes of the best graph, and put the folder in place."""
        folder, files, describe = self.staging.path, list[str](), None
        if frontier.best is not None:
            manifest, describe = self._write_best(cast(MeasuredRounded, frontier.best), folder)
            files += [*manifest.files, GRAPH_RECORD, CARD]
            recipe = self.staging.scratch / RECIPE
            if any(RECIPE in command for command in frontier.commands):
                recipe.rename(folder / RECIPE)
                files.append(RECIPE)
        write_pages(frontier, folder, list(dict.fromkeys(files)))
        if describe is not None:
            (folder / CARD).write_text(describe(manifest, name=frontier.model, proved=False), encoding="utf-8")
        self.staging.publish()

    def _write_best(self, best: MeasuredRounded, folder: Path) -> tuple[Manifest, Callable[..., str]]:
        """Write the best graph with what it is loaded by, and its record; return that, and what makes the card."""
        notes = self.staging.journal.notes[best.candidate.name]["entries"]
        entries, place = [GraphEntry.model_validate(note) for note in notes], self._place(best.candidate.name)
        for file in (f"{entry.file}{ending}" for entry in entries for ending in ("", DATA)):
            if (place / file).is_file():  # small graphs hold their weights
                (place / file).rename(folder / file)
        config = config_of(self.source.whole, trust=self.options.trust_remote_code or bool(self.pruned_by))
        generation = self._read_generation(config)
        return complete_folder(folder, self.source, self.task, entries, config.get_text_config(), generation)

    def _read_generation(self, config: Any) -> GenerationConfig | None:
        """Return how the model generates, as transformers loads it; None of one that does not."""
        if self.task.name != "text-generation" and self.task.modality != "pairs":
            return None
        if (self.source.whole / GENERATION_CONFIG_NAME).is_file():
            return GenerationConfig.from_pretrained(self.source.whole, local_files_only=True)
        return GenerationConfig.from_model_config(config)
