"""Checks before a job writes its first byte. Every stage checks its own part; these are the others."""

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.job import Job
from ckpt_prune.job.plan import Plan
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.samples.choose import asked_data
from ckpt_prune.measure.samples.pairs import read_pairs, reads_pairs
from ckpt_prune.model.composites import is_encoder_decoder
from ckpt_prune.model.containers.checking import check_source
from ckpt_prune.model.family import Modality
from ckpt_prune.model.model import Model
from ckpt_prune.model.supported import read_model_config
from ckpt_prune.options.commands import CalibrateOptions, PruneOptions
from ckpt_prune.options.data import has_data
from ckpt_prune.parallel.group import process_group
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.stages.folders import stages_of
from ckpt_prune.stages.report import find_report
from ckpt_prune.stages.spaces.checks import check_spaces


def check_fit(prepared: Prepared) -> None:
    """Refuse a job whose model, recipe, statistics and plan do not fit together, whatever there is to measure on."""
    # It is read again when all is done: a damaged one would be found after the output has got its name.
    find_report(prepared.model.checkpoint.path)
    check_source(prepared.model)
    check_again(prepared.model, prepared.recipe)
    check_spaces(prepared.model.family, prepared.recipe)
    prepared.recipe.blocks(prepared.model.blocks)
    if prepared.plan is not None:
        check_planned(prepared.model, prepared.plan)
    stages = stages_of(prepared.recipe)
    for stage in stages:
        if stage.keys.changes_model:
            stage.check(prepared)
    if prepared.statistics is not None:
        prepared.statistics.check_model(prepared.model)
    for stage in stages:
        if not stage.keys.changes_model:
            stage.check(prepared)


def check_pairs(options: CalibrateOptions | PruneOptions, recipe: Recipe | None = None) -> None:
    """Refuse data that an encoder-decoder does not read, before its stacks are opened: proving their spaces takes long.

    Args:
        recipe: to prune by; None where data is measured for any.
    """
    if not is_encoder_decoder(read_model_config(options.model)):
        return
    if options.talks is not None:
        read_pairs(options.talks)
    elif has_data(options):
        raise UserError(reads_pairs(options.model))
    elif recipe is not None and recipe.needs_moments:
        raise UserError(_lacking_data(recipe, "pairs"))


def _lacking_data(recipe: Recipe, modality: Modality) -> str:
    data, name = asked_data(modality), recipe.name
    if any(keys.trains for keys in recipe.stages):
        return f"recipe {name} needs samples to be measured and recovered on: give {data}"
    return f"recipe {name} needs statistics: give {data} to measure them, or --statistics STATS"


def check_data(prepared: Prepared) -> None:
    """Refuse a job with too little to measure on."""
    if prepared.lacks_moments:
        raise UserError(_lacking_data(prepared.recipe, prepared.model.family.modality))
    for stage in stages_of(prepared.recipe):
        stage.check_data(prepared)


def check_again(model: Model, recipe: Recipe) -> None:
    """Refuse a model whose stored form a stage of the recipe cannot work on, such as an output with its own code."""
    for stage in stages_of(recipe):
        stage.check_source(model)


def check_planned(model: Model, plan: Plan) -> None:
    """Refuse a plan of another model."""
    if plan.model != model.checkpoint.fingerprint:
        raise UserError(f"the plan was made for another model ({plan.model_path}), not {model.checkpoint.path}")


def check_together(job: Job) -> None:
    """Refuse what several processes cannot do together, and processes that are not at the same job."""
    group, recipe = process_group(), job.recipe
    for keys in recipe.stages if group.size > 1 else ():
        does = keys.alone(recipe)
        if does is not None:
            raise UserError(f"recipe {recipe.name} {does}, which one process does alone: start it without torchrun")
    on_hand = [data.samples for data in (job.live, job.training) if data is not None]
    for samples in on_hand:
        group.check_enough(len(samples))
    data = "text" if job.model.family.modality == "text" else "set of images"
    group.agree(
        {
            "model": job.model.checkpoint.fingerprint,
            **({} if job.dense is None else {"dense model": job.dense.checkpoint.fingerprint}),
            data: [samples.fingerprint for samples in on_hand],
            "recipe": recipe.digest,
            "job": job.digest,
        }
    )


def check_training(prepared: Prepared) -> None:
    """Refuse to run without the samples that stages train on. A dry run needs none."""
    for stage in stages_of(prepared.recipe):
        stage.check_training(prepared)
