"""Describes a checkpoint from its config and the headers of its weights."""

import json
from collections.abc import Sequence
from pathlib import Path

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.model_folder import holds_graphs, resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes, plural
from ckpt_prune.inspection.answer import (
    BlockDescription,
    Description,
    MadeFrom,
    ModelDescription,
    PartsDescription,
    RemoteDescription,
    SizeAtRatio,
    SpaceDescription,
    SparsityDescription,
    TensorZeros,
    Zeros,
)
from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import begin
from ckpt_prune.model.composites import asked_parts, extract_part
from ckpt_prune.model.config_only import checkpoint_of_config, config_of_folder, is_config_only
from ckpt_prune.model.containers.checking import check_source, check_stock
from ckpt_prune.model.containers.choosing import choose_container
from ckpt_prune.model.containers.opening import Opening, apply_description, describe_unknown, open_checkpoint
from ckpt_prune.model.containers.remote import remote_class
from ckpt_prune.model.context import image_size
from ckpt_prune.model.cost import cost_of, count_by_part
from ckpt_prune.model.depth import check_shortened
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import is_parameter
from ckpt_prune.model.spaces import SpaceName, first_expert_spaces, recipe_space
from ckpt_prune.model.supported import declared_family, read_local_config
from ckpt_prune.options.commands import InspectOptions
from ckpt_prune.recipe.places import locate_recipe
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.runner.messages import ignored_words, tied_words
from ckpt_prune.runner.refusals import asked_ratios
from ckpt_prune.sparsity.zeros import Sparsity, find_zeros, pattern_of_all, share_of_all, weights_by_module
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.report import find_report
from ckpt_prune.stages.shared.output import plan_output
from ckpt_prune.stages.spaces.checks import check_spaces
from ckpt_prune.stages.spaces.messages import coarse_lines


def describe(
    checkpoint: Checkpoint, *, weights: bool, recipe: str | None, ratios: Sequence[float], sparsity: bool
) -> Description:
    """Describe a checkpoint of a known family.

    Args:
        weights: whether it has any, beside its config.
        recipe: whose spaces ratios apply to; None for rcpu.
        ratios: shares of units to drop, each giving a size; without any, those of a recipe that is named.
        sparsity: count zeros, which reads all weights.
    """
    remote = remote_class(checkpoint.config, checkpoint.path)
    zeros = _zeros(checkpoint) if sparsity else None
    if remote is not None and not ratios:
        return _remote(checkpoint, remote, zeros)
    return _model(checkpoint, weights, recipe, ratios, zeros)


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
    report = find_report(checkpoint.path)
    asked: list[float | None] = [*ratios] or ([] if recipe is None else [None])
    recipes = [_recipe(recipe or "rcpu", ratio) for ratio in asked]
    pruned = [_size_at(model, each, ratio) for each, ratio in zip(recipes, asked, strict=True)]
    return ModelDescription(
        model=str(checkpoint.path),
        family=family.model_type,
        architecture=family.architecture,
        purpose=family.purpose,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        files=len(checkpoint.files),
        blocks=model.blocks,
        block=_block(model),
        kinds=_kinds(model),
        tied_head=model.tied,
        spaces={name: _space(model, first) for name, first in first_expert_spaces(family.spaces).items()},
        **cost_of(model).model_dump(),
        image=None if family.stage is None else image_size(family, model.config),
        parts=count_by_part(model),
        weights=weights,
        stored=_words_of_form(checkpoint),
        ignored=sorted([*model.checkpoint.ignored, *model.checkpoint.shadowed]),
        ignored_words=ignored_words(model) if model.checkpoint.ignored else None,
        tied_words=tied_words(model),
        made_from=MadeFrom(source=report.source.name, recipe=report.recipe.name) if report else None,
        pruned=pruned,
        found=family.found,
        description=json.loads(family.outside) if family.outside else None,
        messages=[line for each in recipes for line in coarse_lines(model, each)],
        recipe=recipe or "rcpu" if pruned else None,
        sparsity=zeros,
    )


def _words_of_form(checkpoint: Checkpoint) -> str | None:
    """Return how weights of few bits are stored, and all bytes; None if all are plain."""
    method = (checkpoint.quantisation or {}).get("quant_method")
    return None if method is None else f"{method}, {human_bytes(checkpoint.nbytes)}"


def _block(model: Model) -> BlockDescription:
    """Return the last block, which stands for all, and whether a block can go."""
    stay = None
    within = model.checkpoint.within
    if model.family.stage is not None:
        stay = "blocks of stages are not dropped"
    elif within is not None and not model.family.can_be_shorter_inside:
        stay = f"the {within.part} part of a composite keeps all of its own"
    elif model.blocks < 2:
        stay = "there is no other"
    else:
        try:
            check_shortened(model, range(model.blocks))
        except UserError as error:
            stay = str(error)
    tensors = model.checkpoint.tensors
    sizes = [
        sum(tensors[name].numel for name in filter(is_parameter, model.block_names(block)))
        for block in range(model.blocks)
    ]
    return BlockDescription(parameters=sizes[-1], fewest=min(sizes), most=max(sizes), stay=stay)


def _kinds(model: Model) -> dict[str, list[int]]:
    types, kinds = _types(model), dict[str, list[int]]()
    for block, widths in enumerate(model.dense_widths):
        spaces = ", ".join(first_expert_spaces(widths)) or "none that can be pruned"
        kinds.setdefault(f"{types[block]} ({spaces})" if types else spaces, []).append(block)
    return kinds if len(kinds) > 1 else {}


def _types(model: Model) -> list[str]:
    """Return the type of every block as the config names it; empty if it does not."""
    stated = getattr(model.config, "layer_types", None)
    return list(stated) if isinstance(stated, list | tuple) and len(stated) == model.blocks else []


def _space(model: Model, name: SpaceName) -> SpaceDescription:
    family, blocks = model.family, model.blocks_with(name)
    units = max(model.unit_counts(name))
    space = family.spaces[name]
    columns = {**family.columns, **family.pooling}.get(name)
    consumer = None if columns is None else columns.consumer
    alike = [other for other in family.spaces if recipe_space(other) == recipe_space(name)]
    together = [other for other, each in family.spaces.items() if each.units == space.units in family.together]
    # One unit fewer stands for any number: the first drop is what changes the container.
    fewer = max(1, units - (model.multiple(name) if space.kind == "experts" else model.stock_step(name)))
    widths = [{space: fewer for space in widths_of if space in {*alike, *together}} for widths_of in model.dense_widths]
    biases = model.biased

    def container(biases: frozenset[str]) -> str:
        if space.whole is not None:
            return "none"
        try:
            return choose_container(model, widths, biases).model_type
        except UserError:
            return "remote code" if model.checkpoint.within is None else "none"  # a part has no code of its own

    tensors = model.checkpoint.tensors
    modules = {*space.modules}
    if space.kind == "experts":  # and what a whole expert has
        modules |= {module for each in family.spaces.values() if each.experts for module in each.modules}
    per_block = sum(tensors[model.tensor(blocks[0], module)].numel for module in modules)
    return SpaceDescription(
        unit=space.unit
        + (f" of each of {plural(len(alike), 'expert')}" if space.experts else "")
        + (", the same in all blocks" if space.same_units else ""),
        units=units,
        step=model.stock_step(name),
        consumer=consumer,
        columns_per_unit=model.unit_columns(name),
        parameters=per_block * len(alike) * len(blocks),
        containers={
            "weights": container(biases),
            "weights and bias": container(biases | ({consumer} if consumer else set())),
        },
        whole=space.whole,
    )


def _recipe(name: str, ratio: float | None) -> Recipe:
    file = locate_recipe(name)
    shown_recipe = load_recipe(file)
    for keys in shown_recipe.stages:
        if keys.changes_model:
            raise UserError(f"recipe {name} {keys.does}: `ckpt-prune prune --recipe {name} --dry-run` shows the size")
    if not shown_recipe.spaces:
        raise UserError(f"recipe {name} drops no units of spaces: --ratio is for one with spaces")
    if shown_recipe.size is not None and ratio is None:
        raise UserError(f"recipe {name} has a size, and `plan` finds its widths: say --ratio")
    # In any container: the answer is a size, not a refusal.
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
    from ckpt_prune.evaluation.whole_model import purpose_of

    report = find_report(checkpoint.path)
    return RemoteDescription(
        model=str(checkpoint.path),
        family=declared_family(checkpoint.config).model_type,
        architecture=remote,
        purpose=purpose_of(checkpoint.config, checkpoint.path),
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        files=len(checkpoint.files),
        parameters=sum(info.numel for info in checkpoint.tensors.values()),
        bytes=checkpoint.nbytes,
        flops=report.after.flops if report else None,
        tokens=report.after.tokens if report else None,
        cache=report.after.cache if report else None,
        source=report.source.name if report else None,
        recipe=report.recipe.name if report else None,
        note=report.container.note if report else None,
        sparsity=zeros,
    )


def _zeros(checkpoint: Checkpoint) -> SparsityDescription:
    checkpoint, family = match_checkpoint(checkpoint)
    tensors = {each.name: each for each in find_zeros(checkpoint)}
    modules = {
        module: [tensors[name] for name in names]
        for module, names in weights_by_module(checkpoint.tensors, family.block, family.linears).items()
    }
    keys = TensorZeros.model_fields.keys()
    return SparsityDescription(
        modules={module: _total(zeros) for module, zeros in modules.items()},
        blocks=_total([each for zeros in modules.values() for each in zeros]),
        tensors=[TensorZeros.model_validate({key: getattr(each, key) for key in keys}) for each in tensors.values()],
    )


def _total(tensors: Sequence[Sparsity]) -> Zeros:
    return Zeros(
        tensors=len(tensors),
        weights=sum(each.numel for each in tensors),
        zeros=sum(each.zeros for each in tensors),
        min=min((each.share for each in tensors), default=0.0),
        mean=share_of_all(tensors),
        max=max((each.share for each in tensors), default=0.0),
        pattern=pattern_of_all(tensors),
    )


def inspect_model(options: InspectOptions) -> Description | PartsDescription:
    """Open a model, its config alone, or a folder of its graphs, and describe it (`ckpt_prune.inspect`).

    Both stacks of blocks of an encoder-decoder are described, unless one is named; with `--part all` both
    parts of any model.
    """
    folder = Path(options.model) if Path(options.model).is_dir() else resolve_model(options.model)
    if holds_graphs(folder):
        from ckpt_prune.inspection.graphs import describe_graphs  # onnxruntime is not read for a checkpoint

        return describe_graphs(folder)
    parts = asked_parts(read_local_config(str(folder)), options.part)
    if len(parts) == 1:
        return _inspect(options)
    found = {str(part): _inspect(options.model_copy(update={"part": part})) for part in parts}
    return PartsDescription(model=str(folder), parts=found)


def _inspect(options: InspectOptions) -> Description:
    folder = Path(options.model)
    config_only = folder.is_dir() and is_config_only(folder)
    if config_only and options.sparsity:
        raise UserError(f"{folder} has a config.json and no weights: --sparsity counts zeros in weights; leave it out")
    if config_only:
        config = apply_description(config_of_folder(folder), options.family)
        if options.part is None:
            config = describe_unknown(config)
        checkpoint = checkpoint_of_config(folder, config)
        if options.part is not None:
            checkpoint = extract_part(checkpoint, options.part)
    else:
        opening = Opening(trust=True, family=options.family, part=options.part, by_class=False)
        checkpoint = open_checkpoint(options.model, opening)
    ratios = asked_ratios(options.ratios)
    return describe(
        checkpoint, weights=not config_only, recipe=options.recipe, ratios=ratios, sparsity=options.sparsity
    )
