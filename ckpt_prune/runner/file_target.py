"""`prune --target-bytes … --for llama.cpp`: the size is that of a GGUF file, for which types and columns are chosen."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.scratch import hidden_folder
from ckpt_prune.checkpoint.staging import check_output
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import decimal_bytes
from ckpt_prune.common.progress import Notices
from ckpt_prune.gguf import require_gguf
from ckpt_prune.job.job import Job
from ckpt_prune.job.report import FileSize, Loss
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.cost import cost_of
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.recipe.sizes import parse_size
from ckpt_prune.runner.publish import note_loss, replace_record
from ckpt_prune.runner.quality import count_samples
from ckpt_prune.runner.read_recipe import ChosenRecipe
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.vocabulary.keys import Vocabulary
from ckpt_prune.stages.vocabulary.records import unpack_rows

if TYPE_CHECKING:
    from ckpt_prune.evaluation.results import Result

RUNTIME = "llama.cpp"
_CARD = 1024
"""Bytes of a file for its name and for what the output's card says, which are not known before it is written."""


def is_for_file(options: PruneOptions) -> bool:
    """Return whether options name a size of a GGUF file, and nothing that says how to reach it."""
    others = (options.recipe, options.plan, options.vocabulary, options.statistics, options.ratio)
    return options.runs_on == RUNTIME and options.target_bytes is not None and not options.overrides and not any(others)


def choose_for_file(options: PruneOptions, chosen: ChosenRecipe, say: Notices) -> tuple[PruneOptions, ChosenRecipe]:
    """Measure a model and return the recipe that makes a file of the size, and options without the size.

    Raises:
        UserError: there is nothing to measure on, or the size is out of reach.
    """
    if options.dry_run or not options.text:
        remedy = (
            "leave out --dry-run, which measures nothing" if options.dry_run else "give --text FILE to measure it on"
        )
        raise UserError(f"--target-bytes for {RUNTIME}: types and columns are chosen by what they lose: {remedy}")
    require_gguf(options.model)
    from ckpt_prune.gguf.file_plan import FilePlanner
    from ckpt_prune.runner.column_budgets import recipe_of
    from ckpt_prune.runner.file_budgets import FileBudgets, as_in_file, check_reach, export_of
    from ckpt_prune.runner.pruning_budgets import will_prune_columns

    model = as_in_file(open_model(options.model, Opening.of(options)))
    planner = FilePlanner(model)
    limit = parse_size("bytes", str(options.target_bytes)).of(cost_of(model).bytes)
    check_reach(limit, planner, options, _CARD)
    check_output(
        model.checkpoint.path, options.output, resume=options.resume, overwrite=options.overwrite, inputs=options.text
    )
    samples = choose_samples(model, options, trust=options.trust_remote_code, say=say)
    with hidden_folder(options.output.absolute().parent, options.output.name) as folder:
        narrower = will_prune_columns(model, limit, None)
        budgets = FileBudgets(model, samples, options, folder, Journal(folder, "file"), narrower, planner=planner)
        try:
            choice = budgets.at_bytes(limit - _CARD)
        except BudgetError as error:
            raise UserError(f"--target-bytes: no types make a file of {decimal_bytes(limit)}: ask for more") from error
        columns, score = [*choice.columns.values()], budgets.columns.score if choice.columns else "obs"
        kept = budgets.vocabularies.kept_rows(choice.rows)
    recipe: dict[str, Any] = recipe_of(columns, kept, score, export_of(choice.chosen, choice.others))
    loss = "divergence (KL)" if model.family.gives_logits else "loss of the hidden states' energy"
    say(f"chosen for {decimal_bytes(choice.bytes)}: {choice.words()}; predicted {loss} {choice.kl:.3f}")
    written = FullRecipe.model_validate(recipe)
    return (
        options.model_copy(update={"target_bytes": None, "runs_on": None}),
        replace(chosen, recipe=written, written=written),
    )


def measure_file(file: Path, job: Job, options: PruneOptions) -> "Result":
    """Measure the file of an output in llama.cpp beside the dense model, and note its loss in record and card.

    That is on the texts of --evaluate; else on windows of --text that nothing was measured on.

    Raises:
        UserError: llama.cpp is not installed, or no text is left.
    """
    from ckpt_prune.evaluation.held_out import choose_held_out
    from ckpt_prune.evaluation.quality import judge, lines_of
    from ckpt_prune.evaluation.results import PlainResult
    from ckpt_prune.gguf.embedding_score import TextEmbeddings, read_embeddings
    from ckpt_prune.gguf.layout import lay_out
    from ckpt_prune.gguf.score import TextPredictions, read_reference
    from ckpt_prune.runner.file_budgets import as_in_file
    from ckpt_prune.runner.vocabularies import parts_of_tokens

    dense, tokens = as_in_file(job.source or job.model), job.recipe.get(Vocabulary)
    kept = None if tokens is None else tokens.kept
    data = options.model_copy(update={"text": options.evaluate}) if options.evaluate else options
    used = () if options.evaluate else job.used if kept is None else None  # other tokens make other windows
    held_out = choose_held_out(dense, data, used, count_samples(options, job), trust=job.trust)
    assert isinstance(held_out.samples, TokenWindows)
    folder, windows = dense.checkpoint.whole, held_out.samples.windows
    reference: TextPredictions | TextEmbeddings
    if dense.family.gives_logits:
        reference, of = read_reference(folder, windows, trust=job.trust), "perplexity"
    else:
        reference, of = read_embeddings(folder, windows, lay_out(dense), trust=job.trust), "cosine of the embeddings"
    score = reference.score(file, None if kept is None else parts_of_tokens(dense, unpack_rows(kept)))
    figures: dict[str, Any] = {"after": score.top1, "windows": len(windows)}
    if score.perplexity is not None:
        figures |= {"before": reference.perplexity, "after": score.perplexity, "kl": score.kl, "agreement": score.top1}
    words = f"{held_out.words}, of {file.name} ({decimal_bytes(score.bytes)}) in {RUNTIME}"
    loss = judge(Loss(of=of, **figures, data=words, against=dense.checkpoint.name, file=file.name))
    note_loss(file.parent, loss)
    return PlainResult(loss.model_dump(), lines_of(loss))


def note_file(file: Path, job: Job, report: Report) -> Report:
    """Note the bytes of the file of an output, beside those of MODEL's file in its own type, in record and card."""
    from ckpt_prune.gguf.file_plan import FilePlanner
    from ckpt_prune.gguf.types import default_type
    from ckpt_prune.runner.file_budgets import as_in_file

    dense = as_in_file(job.source or job.model)
    before = FilePlanner(dense).plan(default_type(dense.checkpoint)).bytes
    size = FileSize(name=file.name, before=before, after=file.stat().st_size)
    noted = report.model_copy(update={"file": size})
    if report.file != size:
        replace_record(file.parent, noted)
    return noted
