"""The output at some widths: container, files and cost, known before any tensor is made."""

from collections.abc import Iterable
from dataclasses import replace

from ckpt_prune.checkpoint.checkpoint import PartOf
from ckpt_prune.checkpoint.quantised import QUANTISATION_KEY, may_keep_form
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.job.decisions import Decisions
from ckpt_prune.job.kept_bytes import KeptBytes
from ckpt_prune.job.layout import Layout, Output, count_bytes, layout_of, plan_layout
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.model.containers.choosing import REMOTE, choose_container, is_pruned, remote_note
from ckpt_prune.model.containers.container import Container, Ranks, Widths
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import parse_config
from ckpt_prune.stages.hidden.narrow_stock import narrow_container
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint
from ckpt_prune.stages.low_rank.factorer import ranks_of
from ckpt_prune.stages.low_rank.keys import LowRank
from ckpt_prune.stages.quantize.keys import Quantize
from ckpt_prune.stages.quantize.output import pack_output
from ckpt_prune.stages.rotation.learner import RotationSizes
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint
from ckpt_prune.stages.shared.narrowed import Narrowed


def plan_output(prepared: Prepared) -> Prepared:
    """Decide what is still open of the output: units that the recipe's ratio decides, container, files, cost."""
    decided = Decisions(prepared.recipe) if prepared.decided is None else prepared.decided
    planned = output_at(prepared, decided.widths(prepared.model)) if prepared.planned is None else prepared.planned
    quantize = prepared.recipe.get(Quantize)
    if quantize is not None and not planned.packed:
        planned = pack_output(quantize, prepared.model, planned)
    return replace(prepared, decided=decided, planned=planned)


def kept_weights(prepared: Prepared) -> frozenset[str]:
    """Return the weights of few bits whose bytes the output keeps, by name: all of them, or none."""
    checkpoint, recipe = prepared.model.checkpoint, prepared.recipe
    # First what asks for no look at every tensor: the search for a size comes here at every step.
    if (
        not may_keep_form(checkpoint.quantisation)
        or checkpoint.within is not None
        or checkpoint.adapter is not None
        or not all(stage.leaves_experts(recipe) for stage in recipe.stages)
    ):
        return frozenset()
    weights = frozenset(name for name, info in checkpoint.tensors.items() if info.scaled is not None)
    in_blocks = all(name.startswith(f"{prepared.model.family.layers}.") for name in weights)
    return weights if in_blocks and weights.isdisjoint(checkpoint.aliases) else frozenset()


def with_kept_bytes(prepared: Prepared, cost: Cost, shapes: Iterable[str]) -> Cost:
    """Return the cost of some of the model's tensors, with the bytes of those that the output stores as its source."""
    tensors, kept = prepared.model.checkpoint.tensors, kept_weights(prepared)
    if not kept:
        return cost
    stored = [tensors[name] for name in shapes if name in kept]
    saved = sum(info.numel * info.dtype.itemsize - info.stored_bytes for info in stored)
    return cost.model_copy(update={"bytes": cost.bytes - saved})


def _keep_bytes(prepared: Prepared, output: Output) -> Output:
    """Return an output with the bytes of its source's weights of few bits, where none of them changes."""
    checkpoint, container = prepared.model.checkpoint, output.container
    specs = {name: spec for tensors in output.layout.values() for name, spec in tensors.items()}
    weights = kept_weights(prepared) & specs.keys()
    if (
        not weights
        or any(specs[name][1] != checkpoint.tensors[name].shape for name in weights)
        or container.config.get("model_type") != checkpoint.config.get("model_type")
        or container.remote_class is not None
    ):
        return output
    kept = KeptBytes(checkpoint, weights)
    layout = kept.lay_out(output.layout)
    config = container.config | {QUANTISATION_KEY: checkpoint.quantisation}
    cost = output.cost.model_copy(update={"bytes": count_bytes(layout)})
    return replace(output, container=replace(container, config=config), layout=layout, cost=cost, kept=kept)


def output_at(prepared: Prepared, widths: Widths) -> Output:
    """Return the output of a job at some widths."""
    if isinstance(prepared.basis, SlicedCheckpoint):
        return sliced_output(prepared.model, prepared.basis, widths)
    model, low_rank = prepared.model, prepared.recipe.get(LowRank)
    rotated = prepared.basis if isinstance(prepared.basis, RotatedCheckpoint) else None
    if prepared.stored is not None:
        # Only masks go into it (`runner.checks`), and they leave every shape as it is.
        why = "as it was" if prepared.job.stored is not None else "blocks have no attention"
        note = remote_note(prepared.stored.model_type, why)
        return Output(replace(prepared.stored, note=note), layout_of(model), cost_of(model))
    ranks = () if low_rank is None else ranks_of(prepared, low_rank)
    container = _container(prepared, widths, rotated, ranks)
    narrowed = prepared.facts(Narrowed)
    if narrowed is not None and container.note is None:
        container = replace(container, note=narrowed.note)
    layout = plan_layout(model, widths, container, rotated.added if rotated is not None else None, ranks)
    aside: Layout = {}
    if rotated is not None:
        aside = {ROTATIONS: RotationSizes.of(rotated.kind, model).layout}
    # The cost is that of the output's config: rotations may have untied the head.
    return _keep_bytes(prepared, Output(container, layout, _cost(model, container, layout), aside, ranks))


def sliced_output(model: Model, view: SlicedCheckpoint, widths: Widths) -> Output:
    """Return the output whose residual stream has lost dimensions.

    Args:
        widths: units of its blocks, all of them.
    """
    if view.shared:
        container, layout = narrow_container(view)
        _check_part(model, container, rotated=True)
        return Output(container, layout, _cost(model, container, layout))
    container = choose_container(model, widths, view.biases, requested=REMOTE)
    note = remote_note(container.model_type, "the residual stream changes its basis between blocks")
    container = replace(container, config=view.config_values(container.config), note=note)
    _check_part(model, container, rotated=True)
    layout = plan_layout(model, widths, container, view.added)
    return Output(container, layout, _cost(model, container, layout))


def _cost(model: Model, container: Container, layout: Layout) -> Cost:
    shapes = {name: shape for tensors in layout.values() for name, shape in tensors.items()}
    return cost_of(model.with_config(parse_config(container.config)), shapes)


def _check_part(model: Model, container: Container, rotated: bool) -> None:
    within = model.checkpoint.within
    if within is None:
        return
    if rotated:
        raise UserError(
            f"--part {within.part}: what reads and writes its stream from outside does not follow rotations"
        )
    if container.remote_class is not None:
        raise _needs_code(within)


def _needs_code(part: PartOf) -> UserError:
    return UserError(
        f"--part {part.part}: blocks that need remote code have no place in another model: say --set widths=uniform "
        "without --container, or take another recipe, such as ridge"
    )


def _container(prepared: Prepared, widths: Widths, rotated: RotatedCheckpoint | None, ranks: Ranks) -> Container:
    model, recipe = prepared.model, prepared.recipe
    within, finds = model.checkpoint.within, prepared.plan is None and recipe.allocation != "uniform"
    if within is not None and finds and recipe.widths == "per_layer" and model.blocks > 1:
        raise _needs_code(within)  # before widths are measured that no class would have
    biases = {*model.biased}
    for space, settings in recipe.spaces.items():
        if is_pruned(model, space, widths) and settings.compensation.opens_bias:
            biases |= set(model.family.spaces[space].list_rewritten(settings.compensation.method))
    turns = rotated is not None and bool(rotated.turns)
    chosen = choose_container(
        model,
        widths,
        biases | (rotated.added_biases if rotated is not None else frozenset()),
        requested=REMOTE if turns or ranks else recipe.container,
        per_layer=recipe.widths == "per_layer",
        ranks=ranks,
        own_code=recipe.get(Quantize) is None,
    )
    _check_part(model, chosen, rotated is not None)
    if ranks:
        return replace(chosen, note=remote_note(chosen.model_type, "two thin linears stand in for one"))
    if rotated is None:
        return chosen
    note = chosen.note
    if turns:
        note = remote_note(chosen.model_type, "the residual stream turns between blocks")
    elif rotated.kind == "shared" and rotated.tied:
        note = "; ".join(filter(None, [note, "the head is no longer tied to the embedding: it reads another basis"]))
    return replace(chosen, config=rotated.config_values(chosen.config), note=note)
