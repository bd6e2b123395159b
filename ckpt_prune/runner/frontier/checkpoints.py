"""`frontier --for vllm`: in how many bits each weight of a checkpoint, for this size or loss?

1. The model is measured once, and what each way to store each weight loses is predicted from that. Where that is much,
   it is also measured what fewer tokens lose, and predicted what fewer columns of all MLPs do.
2. One budget says how each weight is stored, and what goes. int4 and int8 everywhere stand beside it, and fewer bits
   alone.
3. Each checkpoint is made as `quantize` or `prune` makes it, run in PyTorch and held against the model on other text.
   What is done stands in a journal, so that an interrupted run goes on.
4. The best one within the target is kept, with a picture and the command that makes it.
"""

import math
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
import yaml

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.checkpoint.staging import Staging, write_atomically
from ckpt_prune.common.progress import Notices
from ckpt_prune.evaluation.fewer_tokens import TextCosts, score_of
from ckpt_prune.evaluation.file_score import FileScore
from ckpt_prune.evaluation.perplexity import LanguageModel, compare
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.model.containers.opening import open_fitted
from ckpt_prune.model.cost import cost_of
from ckpt_prune.options.commands import FrontierOptions, QuantizeOptions
from ckpt_prune.options.data import words_of_windows
from ckpt_prune.options.option import words_of_options
from ckpt_prune.runner.frontier.asked import (
    Texts,
    as_named_in,
    foresee_work,
    open_staging,
    read_target,
    read_texts,
    say_if_whole_fits,
    words_of_rare_tokens,
)
from ckpt_prune.runner.frontier.candidates import Measured, MeasuredRounded, RoundedCandidate
from ckpt_prune.runner.frontier.pruning import prune_by
from ckpt_prune.runner.frontier.record import (
    MADE,
    RECIPE,
    USABLE,
    Frontier,
    best_within,
    choose_for_loss,
    words_of_target,
    write_pages,
)
from ckpt_prune.runner.pruning_budgets import will_prune_columns
from ckpt_prune.runner.publish import note_loss
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.runner.scheme_budgets import SchemeBudgets, check_reach, check_storable, needs_pruning, recipe_of
from ckpt_prune.runner.vocabularies import parts_of_tokens
from ckpt_prune.stages.quantize.choosing import SchemeChoice
from ckpt_prune.stages.quantize.scheme import Format

DATA = ("choose", "bos", "compute_dtype", "device")
"""Options of the samples, beside their number and length, that `quantize` has, too."""
COUNTED = "weights of linear layers in the blocks (embedding and head stay as they are)"
"""Weights that `quantize` rounds."""
ALIKE: tuple[Format, ...] = ("int4", "int8")
"""Types that all weights are stored in, to stand beside what a budget chooses."""
LAST = ("--evaluate-samples", "0", "-o", MADE)


def explore_checkpoints(options: FrontierOptions) -> Frontier:
    """Find the checkpoint that is as small as is asked for and loses least (`ckpt_prune.frontier`)."""
    say = Notices()
    model = open_fitted(options.model)
    check_storable(model)
    limit, loss = read_target(options, model)
    if limit is not None:
        check_reach(limit, model, options)
    say_if_whole_fits(options, limit, cost_of(model).bytes)
    texts = read_texts(options, model, say)
    fewer = "what fewer tokens and columns lose, if fewer bits lose much"
    steps, files = ["importance of inputs", "what fewer bits lose", fewer], 4
    foresee_work(texts.options, model, texts.samples, steps, files, limit)
    with open_staging(texts.options, texts.parts(model), say) as staging:
        narrower = will_prune_columns(model, limit, loss) or needs_pruning(limit, model)
        budgets = SchemeBudgets(model, texts.samples, texts.options, staging.scratch, staging.journal, narrower)
        maker = CheckpointMaker(texts, budgets, staging)
        results: list[MeasuredRounded] = []
        for name, choice in _candidates(budgets, results, limit, loss, say):
            results.append(maker.measure(name, choice, say))
        frontier = maker.record(results, limit, loss)
        if frontier.best is not None:
            kept = budgets.vocabularies.kept_rows(frontier.best.candidate.rows)
            frontier = replace(frontier, remarks=words_of_rare_tokens(texts.options, model, kept, texts.held_out))
        maker.publish(frontier)
    return frontier


def _candidates(
    budgets: SchemeBudgets, results: list[MeasuredRounded], limit: int | None, loss: float | None, say: Notices
) -> Iterator[tuple[str, SchemeChoice]]:
    """Yield what is to be measured next, by what was measured so far."""
    bits = budgets.fitted
    for kind in ALIKE:
        if (alike := bits.everywhere(kind)) is not None:
            yield f"{kind} everywhere, GPTQ", alike
        else:
            say(
                f"{kind} everywhere is left out: some weights have columns that no group divides; they are stored by "
                "rows, or in int8"
            )
    first = len(results)
    if limit is not None:
        with suppress(BudgetError):
            alone = bits.at_bytes(limit)
            if alone.rounds:
                yield "by budget, GPTQ", alone
        with suppress(BudgetError):
            pruned = budgets.at_bytes(limit)
            if pruned.shape is not None:
                yield "pruned, by budget, GPTQ", pruned
        return
    assert loss is not None
    found: SchemeChoice | None = None
    for name, found in choose_for_loss(loss, results, budgets.at_loss):
        yield name, found
    # What pruning loses is predicted too low where much goes, and fewer bits alone may be all that keeps to the loss.
    keeps = [each for each in results[first:] if each.score.kl <= loss]
    if found is not None and found.shape is not None and not keeps:
        with suppress(BudgetError):
            yield "fewer bits alone within the loss", bits.at_loss(loss)


@dataclass
class CheckpointMaker:
    """Makes checkpoints of one model in a staging folder, and measures them.

    Attributes:
        dense: perplexity of the model, once something is measured.
    """

    texts: Texts
    budgets: SchemeBudgets
    staging: Staging
    dense: float | None = field(default=None, init=False)

    def _place(self, name: str) -> Path:
        return self.staging.scratch / name.replace(" ", "-").replace(",", "")

    def measure(self, name: str, choice: SchemeChoice, say: Notices) -> MeasuredRounded:
        """Make a checkpoint and measure it, unless an earlier run has."""
        place, journal = self._place(name), self.staging.journal
        if name in journal.notes and place.is_dir():
            self.dense = journal.notes[name]["dense"]
            return Measured.read(RoundedCandidate, journal.notes[name]["found"])
        say(f"making and measuring: {name}")
        if not place.is_dir():
            self._make(choice, place, say)
        shape, kind = choice.shape, choice.usual.format
        by_budget = not self.budgets.fitted.is_default(choice)
        dtype = "int4" if len(choice.counts) > 1 else kind
        candidate = RoundedCandidate(name, dtype, choice.kl, "gptq", choice.counts, COUNTED, by_budget)
        if shape is not None:
            columns = () if shape.columns is None else (shape.columns,) * self.budgets.model.blocks
            recipe = self.budgets.recipe(choice)
            candidate = replace(candidate, columns=columns, rows=shape.rows, recipe=recipe)
        score = self._score(place, candidate)
        result = Measured(replace(candidate, commands=(self._command(candidate, score.bytes),)), score)
        journal.record(name, note={"found": result.note(), "dense": self.dense})
        say(result.line(self.dense or 0))
        return result

    def _make(self, choice: SchemeChoice, place: Path, say: Notices) -> None:
        budgets, options = self.budgets, self.texts.options
        if choice.shape is not None:
            prune_by(budgets.recipe(choice), options, budgets.samples, place)
            return
        source = ", ".join(map(str, options.text))
        live = LiveSamples(budgets.samples, 1, budgets.compute_dtype, seed=options.seed, source=source)
        job = Job(budgets.model, recipe_of(budgets.model, choice), live=live, device=budgets.device)
        run_job(job, place, resume=place.with_name(f"{place.name}.partial").exists(), announce=say)

    @cached_property
    def _reference(self) -> LanguageModel:
        return self._open(self.budgets.model.checkpoint.whole)

    def _open(self, folder: Path) -> LanguageModel:
        """Return a model in float32, to be run block by block if it can be."""
        streamed = StreamedModel.open(folder, self.budgets.device, torch.float32)
        return streamed or load_model(folder, device=str(self.budgets.device), dtype=torch.float32, unpack=True)

    @cached_property
    def _costs(self) -> TextCosts:
        return TextCosts(self.texts.held_out, self.texts.names, lambda: self._reference)

    def _score(self, place: Path, candidate: RoundedCandidate) -> FileScore:
        """Run a checkpoint, and compare it with the model."""
        model, held_out = self._open(place), self.texts.held_out
        kept = self.budgets.vocabularies.kept_rows(candidate.rows)
        if kept is None:
            both = compare(model, self._reference, held_out)
            self.dense, score = both.reference_score.perplexity, score_of(both, held_out, self.texts.names)
        else:
            self.dense = math.exp(self._costs.nll)
            score = self._costs.score(model, parts_of_tokens(self.budgets.model, kept))
        return replace(score, bytes=sum(file.stat().st_size for file in place.glob("*.safetensors")))

    def _command(self, candidate: RoundedCandidate, size: int) -> str:
        options, samples = as_named_in(self.texts.options.output, self.texts.options), self.budgets.samples
        data = words_of_windows(options.text, len(samples), samples.tokens, options.seed)
        if candidate.recipe is not None:
            data += words_of_options(options, DATA)
            return shlex.join(["ckpt-prune", "prune", str(options.model), "--recipe", RECIPE, *data, *LAST])
        words = ["ckpt-prune", "quantize", str(options.model), "--format", candidate.dtype]
        words += ["--target-bytes", options.target_bytes or str(size)] if candidate.by_budget else []
        data += words_of_options(options, [name for name in DATA if name in QuantizeOptions.model_fields])
        return shlex.join([*words, *data, *LAST])

    def record(self, results: list[MeasuredRounded], limit: int | None, loss: float | None) -> Frontier:
        """Return the record of what was measured."""
        best, options = best_within(results, limit, loss), self.texts.options
        found = Frontier(
            folder=options.output,
            place=str(as_named_in(options.output, options).model),
            model=model_name(self.budgets.model.checkpoint.path),
            dense=self.dense,
            dense_bytes=self.budgets.model.checkpoint.nbytes,
            found=results,
            best=best,
            asked=words_of_target(limit, loss),
            beyond_use="",
            reach=None,
            commands=() if best is None else best.candidate.commands,
            data_words=self.texts.words,
            windows=len(self.texts.held_out),
            runtime="PyTorch",
        )
        if found.passed:
            return found
        with suppress(BudgetError):
            return replace(found, reach=self.budgets.at_loss(math.log(USABLE)).bytes)
        return found

    def publish(self, frontier: Frontier) -> None:
        """Write the record and the best checkpoint, and put the folder in place."""
        folder, files = self.staging.path, list[str]()
        if frontier.best is not None:
            for path in sorted(self._place(frontier.best.candidate.name).iterdir()):
                path.rename(folder / path.name)
                files.append(path.name)
            recipe = cast(MeasuredRounded, frontier.best).candidate.recipe
            if recipe is not None:
                write_atomically(folder / RECIPE, yaml.safe_dump(recipe, sort_keys=False))
                files.append(RECIPE)
        write_pages(frontier, folder, files)
        if (loss := frontier.loss_of_best) is not None:
            note_loss(folder, loss)
        self.staging.publish()
