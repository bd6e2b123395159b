"""How many blocks lose their attention, and how much of their MLP, for FLOPs to save; and what cannot."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.model.containers.no_attention import absent_modules, without_attention
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.cuts import list_cuts
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.stages.bare.keys import Bare
from ckpt_prune.stages.bare.records import BareBlock, BareRecord


def mlp_of(model: Model) -> SpaceName:
    """Return the space of a block's MLP."""
    return next(iter(model.family.part_spaces("mlp")))


def share_out(saved: int, attention: int, column: int, columns: int) -> list[int]:
    """Return how many columns of its MLP each block keeps that loses its attention, for FLOPs to save (DC-ViT).

    They are n = ⌈saved / (attention + MLP)⌉ blocks, whose MLPs lose what their attentions do not save; one more if
    nothing of the MLPs would stay. Together they save at least what is asked for, and less than a column more, if not
    their attentions alone save more than that.

    Args:
        saved: FLOPs to save.
        attention: FLOPs of a block's attention.
        column: FLOPs of one column of its MLP.
        columns: of the dense MLP.
    """
    blocks = -(-saved // (attention + column * columns))
    while True:
        gone = max(0, -(-(saved - blocks * attention) // column))
        each, more = divmod(gone, blocks)
        if each + bool(more) < columns:
            return [columns - each - (place < more) for place in range(blocks)]
        blocks += 1


def plan_savings(prepared: Prepared) -> tuple[int, list[int]]:
    """Return the FLOPs to save, and the columns that each block keeps that loses its attention.

    UserError if the model has too few blocks, or nothing is to be saved.
    """
    model, recipe, bare = prepared.model, prepared.recipe, prepared.stage(Bare)
    flops, space = cost_of(model).flops, mlp_of(model)
    saved = round(flops * recipe.ratio) if recipe.size is None else flops - recipe.size.of(flops)
    if saved < 1:
        raise UserError(f"recipe {recipe.name} saves nothing: say --target-flops 80%, or --ratio 0.2")
    columns = model.units(space, 0)
    narrower = model.shapes_at([{space: columns - 1}, *({} for _ in range(1, model.blocks))])
    attention = flops - cost_of(without_attention(model, [0])).flops
    kept = share_out(saved, attention, flops - cost_of(model, narrower).flops, columns)
    if len(kept) > model.blocks:
        raise UserError(
            f"recipe {recipe.name} would take the attention of {len(kept)} blocks to save {saved / flops:.0%} of the "
            f"FLOPs, and the model has {plural(model.blocks, 'block')}: save less"
        )
    if bare.blocks is not None and len(bare.blocks) != len(kept):
        raise UserError(
            f"recipe {recipe.name} names {plural(len(bare.blocks), 'block')}, and to save {saved / flops:.0%} of the "
            f"FLOPs {len(kept)} lose their attention: name as many"
        )
    return saved, kept


def check_bare(prepared: Prepared) -> None:
    """Refuse a model that has no such blocks, or no classes to compare."""
    model, name = prepared.model, prepared.recipe.name
    family = model.family
    absent_modules(model, ())
    if family.modality != "image" or family.head is None or family.purpose != "image-classification":
        raise UserError(
            f"recipe {name} trains image classifiers, and {model.checkpoint.path} is none: "
            "--set depth.part=attention --container remote takes attentions out of any model"
        )
    if len(family.part_spaces("mlp")) != 1 or len(model.spaced_blocks) != model.blocks:
        raise UserError(f"recipe {name} wants one MLP in every block")
    blocks = prepared.stage(Bare).blocks or []
    if beyond := [block for block in blocks if block >= model.blocks]:
        raise UserError(f"recipe {name} names block {beyond[0]}: the model has blocks 0 to {model.blocks - 1}")
    plan_savings(prepared)


def bare_model(model: Model, kept: Mapping[int, Sequence[int]]) -> Model:
    """Return the model in which some blocks have no attention and a part of their MLP, under its own container.

    Shapes are those of the output; tensors that are cut are the dense ones until they are replaced.

    Args:
        kept: block → columns of its MLP that stay.
    """
    space = mlp_of(model)
    widths = [
        {space: len(kept[block]) if block in kept else model.units(space, block)} for block in range(model.blocks)
    ]
    bare, shapes = without_attention(model, sorted(kept), widths), model.shapes_at(widths)
    tensors = {
        name: replace(info, shape=shapes[name][1], nbytes=prod(shapes[name][1]) * info.dtype.itemsize)
        for name, info in bare.checkpoint.tensors.items()
    }
    return replace(bare, checkpoint=replace(bare.checkpoint, tensors=tensors))


def best_columns(model: Model, tensors: Mapping[str, Tensor], block: int, count: int) -> list[int]:
    """Return the columns of a block's MLP that stay: those whose incoming and outgoing weights are largest.

    The score of column j is the product of the norms of what makes it and of what reads it.
    """
    space = model.family.columns[mlp_of(model)]
    norms = tensors[model.tensor(block, space.consumer)].double().norm(dim=0)
    for module in space.readers:
        norms *= tensors[model.tensor(block, module)].double().norm(dim=1)
    return sorted(norms.topk(count).indices.tolist())


def lay_out(prepared: Prepared) -> Prepared:
    """Return the state with the first blocks replaced, which stand for those that are found."""
    bare, (saved, kept) = prepared.stage(Bare), plan_savings(prepared)
    order = bare.blocks or range(len(kept))
    replaced = [BareBlock(block=block, columns=list(range(count))) for block, count in zip(order, kept, strict=True)]
    return replace(at_bare(prepared, record_of(prepared, saved, replaced)), foreseen=bare.blocks is None)


def record_of(prepared: Prepared, saved: int, replaced: list[BareBlock]) -> BareRecord:
    """Return the record of blocks that are replaced."""
    model = prepared.model
    after = cost_of(bare_model(model, {each.block: each.columns for each in replaced})).flops
    return BareRecord(
        blocks=model.blocks,
        columns=model.units(mlp_of(model), 0),
        flops=(saved, cost_of(model).flops - after),
        replaced=replaced,
    )


def at_bare(prepared: Prepared, record: BareRecord) -> Prepared:
    """Return the state of a model with these blocks replaced, whose tensors are the dense ones."""
    return replace(
        prepared,
        start=prepared.whole,
        model=bare_model(prepared.model, {each.block: each.columns for each in record.replaced}),
        recipe=prepared.recipe.without_stages(Bare.key).model_copy(update={"size": None}),
        statistics=None,
        plan=None,
    ).knowing(record)


def cut_block(model: Model, tensors: Mapping[str, Tensor], block: int, columns: Sequence[int]) -> dict[str, Tensor]:
    """Return a block's tensors with so many columns of its MLP; those of its attention are left in."""
    cut = dict(tensors)
    for module, kind, dim, lines in list_cuts(model.remaining_lines({mlp_of(model): torch.tensor(columns)})):
        name = model.tensor(block, module, kind)
        if name in cut:
            cut[name] = cut[name].index_select(dim, lines)
    return cut
