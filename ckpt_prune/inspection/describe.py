"""Describing a checkpoint from its config and the headers of its weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.evaluation.whole_model import purpose_of
from ckpt_prune.inspection.answer import (
    BlockDescription,
    Description,
    ModelDescription,
    Origin,
    RemoteDescription,
    SizeAtRatio,
    SpaceDescription,
    SparsityDescription,
    TensorZeros,
    UnknownDescription,
    Zeros,
)
from ckpt_prune.job.cost import cost_of
from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import begin
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.report_file import report_of
from ckpt_prune.model.containers.checking import check_source, check_stock
from ckpt_prune.model.containers.choosing import choose_container
from ckpt_prune.model.containers.remote import remote_class
from ckpt_prune.model.depth import check_shortened, shorten_model
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.model.nearest_family import compare_with_families
from ckpt_prune.model.spaces import first_expert_spaces, recipe_space
from ckpt_prune.model.supported import declared_family
from ckpt_prune.recipe.places import locate_recipe
from ckpt_prune.recipe.reading import load_recipe
from ckpt_prune.runner.messages import coarse_lines, ignored_words, tied_words
from ckpt_prune.sparsity.zeros import Sparsity, find_zeros, pattern_of_all, share_of_all, weights_by_module
from ckpt_prune.stages.output import plan_output
from ckpt_prune.stages.spaces.checks import check_spaces


def describe(
    checkpoint: Checkpoint, *, weights: bool, recipe: str | None, ratios: Sequence[float], sparsity: bool
) -> Description:
    """Describe a checkpoint.

    Args:
        checkpoint: what to describe.
        weights: whether it has any, beside its config.
        recipe: whose spaces ratios apply to; None for rcpu.
        ratios: shares of units to drop, each giving a size; without any, those of a recipe that is named.
        sparsity: count zeros; reads all weights.

    Raises:
        UserError: the model is of no known family, its tensors are not those of its config, or a ratio does not suit.
    """
    remote = remote_class(checkpoint.config, checkpoint.path)
    zeros = _zeros(checkpoint) if sparsity else None
    if remote is not None and not ratios:
        return _remote(checkpoint, remote, zeros)
    return _model(checkpoint, weights, recipe, ratios, zeros)


def describe_unknown(folder: Path, config: dict[str, Any]) -> UnknownDescription:
    """Describe a model of a family that there is no description of.

    Args:
        folder: where it is.
        config: its config.json.

    Raises:
        UserError: it is like no known family, or transformers has no class for it.
    """
    found = compare_with_families(config)
    return UnknownDescription(
        model=str(folder),
        model_type=found.model_type,
        architecture=found.architecture,
        like=found.family,
        lacking=list(found.lacking),
        extra=list(found.extra),
        keys=found.keys,
        code=list(found.code),
        undecided=list(found.undecided),
        draft=found.draft,
    )


def _model(
    checkpoint: Checkpoint,
    weights: bool,
    recipe: str | None,
    ratios: Sequence[float],
    zeros: SparsityDescription | None,
) -> ModelDescription:
    model = Model.of(checkpoint)
    family = model.family
    check_stock(model, "units are counted alike in every block, and its blocks may differ")
    check_source(model)
    made = report_of(checkpoint.path)
    wanted: list[float | None] = [*ratios] or ([] if recipe is None else [None])
    recipes = [_recipe(recipe or "rcpu", ratio) for ratio in wanted]
    pruned = [_size_at(model, own, ratio) for own, ratio in zip(recipes, wanted, strict=True)]
    return ModelDescription(
        model=str(checkpoint.path),
        family=family.model_type,
        architecture=family.architecture,
        purpose=family.purpose,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        files=len(checkpoint.files),
        blocks=model.blocks,
        block=_block(model),
        tied_head=model.tied,
        spaces={name: _space(model, first) for name, first in first_expert_spaces(family.spaces).items()},
        **cost_of(model).model_dump(),
        weights=weights,
        ignored=sorted([*model.checkpoint.ignored, *model.checkpoint.shadowed]),
        ignored_words=ignored_words(model) if model.checkpoint.ignored else None,
        tied_words=tied_words(model),
        made_from=Origin(source=made.source.name, recipe=made.recipe.name) if made else None,
        pruned=pruned,
        messages=[line for own in recipes for line in coarse_lines(model, own)],
        recipe=recipe or "rcpu" if pruned else None,
        sparsity=zeros,
    )


def _block(model: Model) -> BlockDescription:
    """What a whole block is, and whether it can go; the last one stands for all."""
    stay = None
    if model.checkpoint.within is not None:
        stay = f"the {model.checkpoint.within.part} part of a composite keeps all of its own"
    elif model.blocks < 2:
        stay = "there is no other"
    else:
        try:
            check_shortened(model, range(model.blocks))
        except UserError as error:
            stay = str(error)
    less = 0 if model.blocks < 2 else cost_of(shorten_model(model, range(model.blocks - 1))).parameters
    return BlockDescription(parameters=cost_of(model).parameters - less, stay=stay)


def _space(model: Model, name: Any) -> SpaceDescription:
    family, units = model.family, model.units(name)
    description = family.spaces[name]
    columns = family.columns.get(name)
    consumer = None if columns is None else columns.consumer
    existing = {module for module in family.linears if model.has(module, "bias")}
    alike = [other for other in family.spaces if recipe_space(other) == recipe_space(name)]
    together = [other for other, own in family.spaces.items() if own.units == description.units in family.together]
    fewer = max(1, units - (model.multiple(name) if description.ends == "experts" else 1))
    fits = {}
    for label, biases in (
        ("weights", existing),
        ("weights and bias", existing | ({consumer} if consumer else set())),
    ):
        if description.whole is not None:
            fits[label] = "none"
            continue
        try:
            # One unit fewer stands for any number: the first drop is what changes the container.
            widths = [dict.fromkeys({*alike, *together}, fewer)] * model.blocks
            fits[label] = choose_container(model, widths, biases).model_type
        except UserError:
            fits[label] = "remote code"
    tensors = model.checkpoint.tensors
    per_block = sum(tensors[model.tensor(model.spaced_blocks.start, module)].numel for module in description.modules)
    return SpaceDescription(
        unit=description.unit + (f" of each of {plural(len(alike), 'expert')}" if description.experts else ""),
        units=units,
        consumer=consumer,
        columns_per_unit=model.unit_columns(name),
        parameters=per_block * len(alike) * len(model.spaced_blocks),
        containers=fits,
    )


def _recipe(name: str, ratio: float | None) -> Recipe:
    file = locate_recipe(name)
    found = load_recipe(file)
    if found.has("mask"):
        raise UserError(f"recipe {name} zeroes weights and leaves every size as it is: --ratio is for one with spaces")
    if found.changes_model:
        what = "drops whole blocks" if found.has("depth") else "slices the residual stream"
        raise UserError(f"recipe {name} {what}: `ckpt-prune prune --recipe {name} --dry-run` tells the size")
    if found.size is not None and ratio is None:
        raise UserError(f"recipe {name} has a size, which `plan` finds the widths of: say --ratio")
    # Whatever holds the shape: sizes are asked for, not a refusal.
    return load_recipe(file, ("container=any",), ratio)


def _size_at(model: Model, recipe: Recipe, ratio: float | None) -> SizeAtRatio:
    check_spaces(model.family, recipe)
    prepared = plan_output(begin(Job(model, recipe)))
    widths, output = prepared.widths, prepared.output
    container = output.container
    return SizeAtRatio(
        ratio=ratio,
        units={name: widths[-1][space] for name, space in first_expert_spaces(widths[-1]).items()},
        container=container.model_type + (" + remote code" if container.remote_class else ""),
        **output.cost.model_dump(),
    )


def _remote(checkpoint: Checkpoint, remote: str, zeros: SparsityDescription | None) -> RemoteDescription:
    made = report_of(checkpoint.path)
    return RemoteDescription(
        model=str(checkpoint.path),
        family=declared_family(checkpoint.config).model_type,
        architecture=remote,
        purpose=purpose_of(checkpoint.config, checkpoint.path),
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        files=len(checkpoint.files),
        parameters=sum(info.numel for info in checkpoint.tensors.values()),
        bytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        flops=made.after.flops if made else None,
        tokens=made.after.tokens if made else None,
        cache=made.after.cache if made else None,
        source=made.source.name if made else None,
        recipe=made.recipe.name if made else None,
        note=made.container.note if made else None,
        sparsity=zeros,
    )


def _zeros(checkpoint: Checkpoint) -> SparsityDescription:
    checkpoint, family = match_checkpoint(checkpoint)
    found = {each.name: each for each in find_zeros(checkpoint)}
    modules = {
        module: [found[name] for name in names]
        for module, names in weights_by_module(checkpoint.tensors, family.block, family.linears).items()
    }
    return SparsityDescription(
        modules={module: _together(tensors) for module, tensors in modules.items()},
        blocks=_together([each for tensors in modules.values() for each in tensors]),
        tensors=[
            TensorZeros(
                name=each.name, shape=list(each.shape), zeros=each.zeros, share=each.share, pattern=each.pattern
            )
            for each in found.values()
        ],
    )


def _together(tensors: Sequence[Sparsity]) -> Zeros:
    return Zeros(
        tensors=len(tensors),
        weights=sum(each.numel for each in tensors),
        zeros=sum(each.zeros for each in tensors),
        min=min((each.share for each in tensors), default=0.0),
        mean=share_of_all(tensors),
        max=max((each.share for each in tensors), default=0.0),
        pattern=pattern_of_all(tensors),
    )
