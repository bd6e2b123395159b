"""From options to a job: what is given is read, and what cannot go together is refused before any work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.checkpoint.files import check_place
from ckpt_prune.checkpoint.folder_kinds import OUTPUT_KIND, FolderKind
from ckpt_prune.checkpoint.staging import check_output, partial_of, refuse_overlap
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices, say_once
from ckpt_prune.job.job import Job, LiveSamples, RecoverySamples
from ckpt_prune.job.layout import find_shared_key
from ckpt_prune.job.plan import Plan, read_plan
from ckpt_prune.measure.samples.choose import check_kind, choose_fresh_samples, choose_samples
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.composites import whole_of_stack
from ckpt_prune.model.containers.checking import check_source
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.family import Family
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import PlanOptions, PruneOptions, RecipeOptions
from ckpt_prune.options.data import ProofOptions, SampleOptions, has_data
from ckpt_prune.options.option import digested_options
from ckpt_prune.options.training import Method
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.parallel.group import process_group
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.shipped import ONE_WIDTH_RECIPE, RecipeFile
from ckpt_prune.runner.checks import check_again, check_planned
from ckpt_prune.runner.plannable import check_plannable
from ckpt_prune.runner.publish import wanted_names
from ckpt_prune.runner.read_recipe import ChosenRecipe, recipe_of
from ckpt_prune.runner.runtimes import fit_to_runtimes
from ckpt_prune.stages.recovery.keys import Recovery
from ckpt_prune.stages.spaces.checks import check_spaces, find_shared_width


def suit_default(
    options: RecipeOptions,
    family: Family,
    recipe: Recipe,
    mask_changes: Mapping[str, tuple[str, str | None]] | None = None,
    tokens: str | None = None,
) -> Recipe:
    """Return a recipe, or another one in place of a default that a model cannot take.

    Args:
        options: that name a recipe, or none.
        family: of the model.
        recipe: that they ask for.
        mask_changes, tokens: as in `recipe_of`.
    """
    conflict = find_shared_width(family, recipe)
    if options.recipe is not None or conflict is None:
        return recipe
    _, other = recipe_of(options.model_copy(update={"recipe": ONE_WIDTH_RECIPE}), mask_changes, tokens)
    say_once(f"{conflict}: recipe {ONE_WIDTH_RECIPE} takes its place")
    return other


def read_plan_job(options: PlanOptions, file: RecipeFile, recipe: Recipe) -> Job:
    """Read the job to make a plan of.

    Args:
        recipe: with the changes that options make to it.
    """
    if options.output is not None:
        check_plan_place(options.output, overwrite=options.overwrite)
    device = resolve_device(options.device)
    check_plannable(recipe)
    if recipe.perplexity_grid:
        raise UserError(
            f"recipe {recipe.name} chooses lambda by perplexity, on text and while pruning: "
            "use `ckpt-prune prune --text`, or lambda_by: folds"
        )
    if recipe.needs_moments and options.statistics is None:
        raise UserError(
            f"recipe {recipe.name} needs statistics: run `{recipe.calibration}` and give --statistics STATS"
        )
    model = open_model(options.model, Opening.of(options, goes_on=True))  # other stacks would keep as many
    if options.output is not None and (key := find_shared_key(model)) is not None:
        raise UserError(
            f"{key} of {model.family.model_type} states the width of all stacks of blocks, and a plan is of one: it is "
            "printed without -o, and `ckpt-prune prune` without --part takes all stacks to one width"
        )
    recipe = suit_default(options, model.family, recipe)
    if options.output is not None:
        refuse_overlap(model.checkpoint.path, options.output)
    recipe = fit_to_runtimes(recipe, model, Notices())
    check_spaces(model.family, recipe)
    statistics = None if options.statistics is None else Statistics(options.statistics)
    by_default = options.recipe is None
    return Job(
        model,
        recipe,
        statistics,
        device=device,
        diagnostics=options.diagnostics,
        by_default=by_default,
        origin=file.origin,
        trust=options.trust_remote_code,
    )


def check_plan_place(out: Path, *, overwrite: bool) -> None:
    """Refuse a place for a plan before any work; a plan is replaced where that is asked for, and nothing else is."""
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists: choose another name or say --overwrite")
    if out.exists():
        try:
            read_plan(out)
        except UserError as error:
            raise UserError(f"{out} exists and is not a plan: it is not overwritten") from error
    check_place(out)


def read_job(options: PruneOptions, chosen: ChosenRecipe, model: Model, say: Callable[[str], None]) -> Job:
    """Read the data of a job, and check the place of its output.

    Args:
        chosen: the recipe or plan that they name.
        say: told in a line what of the data could not be read.
    """
    recipe, plan = chosen.recipe, chosen.plan
    files = [Path(each) for each in (options.recipe, options.plan) if isinstance(each, str | Path)]
    if options.has_output:
        inputs = [options.statistics, *filter(Path.is_file, files)]
        check_job_output(options, model, recipe, inputs, overwrite=options.may_replace)
    statistics = _statistics(options.statistics, model, plan)
    # Before the data: reading it takes time, and a broken config would be blamed on the tokenizer.
    check_source(model)
    check_again(model, recipe)
    check_spaces(model.family, recipe)
    live = training = None
    if has_data(options):
        check_kind(model, options)
    data, cached = has_data(options), None if statistics is None else Statistics(statistics)
    runs_model = any(keys.runs_model for keys in recipe.stages)
    if data and recipe.needs_moments and ((statistics is None and plan is None) or runs_model):
        live = read_live(options, model, chosen.device, say)
        live = replace(live, folds=options.folds or min(recipe.folds, len(live.samples)))
        if live.folds > len(live.samples):
            raise UserError(f"{live.folds} folds of {len(live.samples)} samples: every fold needs at least one")
    recovery = recipe.get(Recovery)
    if data and recovery is not None:
        training = _training(options, chosen, model, recovery, live, cached, say)
    job = Job(
        model,
        recipe,
        cached,
        live,
        chosen.device,
        plan,
        options.diagnostics,
        training,
        by_default=options.recipe is None and plan is None,
        origin=chosen.origin,
        written=chosen.written,
        proving=ProofOptions(
            text=options.text,
            data=options.data if whole_of_stack(model.checkpoint) is not model.checkpoint else None,
            window=options.window,
            images=options.images,
            labels=options.labels,
            max_corrupt=options.max_corrupt,
        ),
        trust=options.trust_remote_code,
        asked=digested_options(options),
    )
    made_from = plan.statistics.digest if plan is not None and plan.statistics is not None else None
    if made_from and job.statistics is not None and job.statistics.index.digest != made_from:
        raise UserError(f"the plan was made from other statistics than {job.statistics.folder}: plan again")
    return job


def _statistics(given: Path | None, model: Model, plan: Plan | None) -> Path | None:
    """Return the folder of statistics: the one given, or the one that a plan was made from."""
    if plan is not None:
        check_planned(model, plan)
    if plan is None or plan.statistics is None or plan.depth is not None:
        return given  # what blocks were chosen by is not asked again
    statistics = given or Path(plan.statistics.path)
    if not statistics.is_dir():
        raise UserError(f"the plan's statistics are no longer at {statistics}: say where with --statistics")
    return statistics


def check_job_output(
    options: Any,
    model: Model,
    recipe: Recipe,
    inputs: Sequence[Path | None] = (),
    *,
    overwrite: bool,
    kind: FolderKind = OUTPUT_KIND,
) -> None:
    """Refuse a place for the output of a job that overlaps what is read, or holds what would be lost.

    Args:
        options: with `ResumeOptions` and `SampleOptions` among them.
        inputs: files and folders that are read, besides the samples.
    """
    samples = [options.audio, options.labels, options.talks, *options.images, *options.text]
    process_group().on_first(
        lambda: check_output(
            model.checkpoint.path,
            options.output,
            resume=options.resume,
            overwrite=overwrite,
            inputs=[*inputs, *samples],
            wants=wanted_names(model.checkpoint, recipe),
            kind=kind,
        )
    )


def state_memory(options: Any) -> StateMemory:
    return StateMemory(int(options.state_memory * 10**9), partial_of(options.output))


def read_live(options: Any, model: Model, device: torch.device, say: Callable[[str], None]) -> LiveSamples:
    """Choose the samples of options, in one fold, to be measured on."""
    samples = choose_samples(model, options, trust=getattr(options, "trust_remote_code", False), say=say)
    source = ", ".join(map(str, options.text or options.images)) or str(options.audio or options.talks)
    dtype = resolve_compute_dtype(options.compute_dtype, device, model.dtype)
    return LiveSamples(samples, 1, dtype, state_memory(options), options.seed, source)


def _training(
    options: PruneOptions,
    chosen: ChosenRecipe,
    model: Model,
    recovery: Recovery,
    live: LiveSamples | None,
    statistics: Statistics | None,
    say: Callable[[str], None],
) -> RecoverySamples:
    """Return the samples to train on: as many as the recipe says, else the calibration's; others for scales.

    Args:
        live: the calibration's samples, where they are read here.
        statistics: where the model was measured before.
        say: told in a line what of the data could not be read, or is not there.
    """
    after = asked_after(options.perplexity_after, model)
    samples, seen = live.samples if live is not None else None, None
    sample_options = options if recovery.samples is None else options.model_copy(update={"samples": recovery.samples})
    if recovery.method == "scales":
        index = None if statistics is None else statistics.index
        measured: list[tuple[int, str]] | None = [] if chosen.plan is None else None
        if index is not None:
            measured = [(index.samples, index.data[0])] if len(index.data) == 1 else None
        used = samples if samples is not None else measured
        if samples is None and index is not None:
            # As many as it is pruned on, and as long.
            sizes = {"samples": sample_options.samples or index.samples}
            if index.modality in ("text", "image-text"):
                sizes["window"] = sample_options.window or index.window
            sample_options = sample_options.model_copy(update=sizes)
        fresh = choose_fresh_samples(model, sample_options, used, trust=options.trust_remote_code, say=say)
        samples, seen = fresh.samples, fresh.seen
    elif samples is None or recovery.samples is not None:
        samples = choose_samples(model, sample_options, trust=options.trust_remote_code, say=say)
    dtype = training_dtype(options, chosen.device, recovery.method, model.dtype)
    return RecoverySamples(samples, dtype, state_memory(options), after, seen)


def training_dtype(
    options: SampleOptions, device: torch.device, method: Method = "laco", stored: torch.dtype = torch.float32
) -> torch.dtype:
    """Return the type that blocks in training run in.

    Args:
        method: that trains. Scales are float32 whatever blocks run in, as what is measured is.
    """
    if options.compute_dtype == "float16":
        raise UserError("--compute-dtype float16: gradients underflow in it; recovery runs in float32 or bfloat16")
    return resolve_compute_dtype(options.compute_dtype, device, stored if method == "scales" else torch.float32)


def asked_after(after: str | None, model: Model) -> frozenset[int]:
    """Numbers of blocks that `--perplexity-after` names: with commas between, or all."""
    if after is None:
        return frozenset()
    blocks = model.blocks
    if not model.family.causal:
        raise UserError(f"--perplexity-after is for causal language models, which a {model.family.model_type} is not")
    if after.strip() == "all":
        return frozenset(range(blocks + 1))
    parts = [part.strip() for part in after.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 9 and int(part) <= blocks for part in parts):
        raise UserError(
            f"--perplexity-after {after}: expected numbers of blocks from 0 to {blocks} with commas between, or all"
        )
    return frozenset(map(int, parts))
