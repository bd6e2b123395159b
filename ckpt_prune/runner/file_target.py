"""`prune --target-bytes … --for llama.cpp`: the size is that of a GGUF file, for which types and columns are chosen."""

from dataclasses import replace
from typing import Any

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.scratch import hidden_folder
from ckpt_prune.checkpoint.staging import check_output
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import decimal_bytes
from ckpt_prune.common.progress import Notices
from ckpt_prune.gguf import require_gguf
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.cost import cost_of
from ckpt_prune.options.commands import PruneOptions
from ckpt_prune.recipe.sizes import parse_size
from ckpt_prune.runner.read_recipe import ChosenRecipe
from ckpt_prune.stages import FullRecipe

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
    require_gguf()
    from ckpt_prune.gguf.file_plan import FilePlanner
    from ckpt_prune.runner.column_budgets import recipe_of
    from ckpt_prune.runner.file_budgets import FileBudgets, as_in_file, check_reach, export_of
    from ckpt_prune.runner.pruning_budgets import will_prune_columns

    model = as_in_file(open_model(options.model, Opening.of(options)))
    planner = FilePlanner(model)
    limit = parse_size("bytes", str(options.target_bytes)).of(cost_of(model).bytes)
    check_reach(limit, planner, options)
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
