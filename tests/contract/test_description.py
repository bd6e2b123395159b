"""A family's file agrees with the real class on the meta device."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ckpt_prune import modeling_pruned
from ckpt_prune.checkpoint.shard import stack_shapes as stacked_up
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.containers.checking import check_source
from ckpt_prune.model.description_checks import check_description
from ckpt_prune.model.model import Model, TensorSpec
from ckpt_prune.model.skeleton import Names, build_skeleton, parse_config
from ckpt_prune.model.spaces import first_expert_spaces, recipe_space
from tests.pairs import choose_cases

from .dense import Dense
from .models import BLOCKS, CASES, LONG, Case, first_cases
from .open_experts import unstack_experts


def shapes_of(case: Case, **changes: object) -> dict[str, tuple[int, ...]]:
    """On-disk name → shape in the stock class, under a config with these changes; weights as (outputs, inputs)."""
    names = case.config.attribute_map  # what the class knows by several names is written under one
    config = parse_config(case.config.to_dict() | {names.get(key, key): value for key, value in changes.items()})
    shapes = Names(build_skeleton(config, case.architecture)).shapes
    turned = {case.family.tensor(block, module) for block in range(BLOCKS) for module in case.family.transposed}
    return {name: shape[::-1] if name in turned else shape for name, shape in shapes.items()}


@pytest.mark.parametrize("case", choose_cases(CASES, first_cases().__contains__), ids=str)
def test_a_published_checkpoint_is_known_and_whole(dense: Dense, case: Case) -> None:
    """The class is found by its tensors, Auto classes load it, and no tensor lacks or is too many.

    A wrong description is refused by the key that is wrong.
    """
    check_description(case.described, case.published_config)
    model = dense.model(case)
    assert (model.family.architecture, model.family.variant) == (case.architecture, case.variant)
    assert model.family == case.family
    check_source(model)
    mapped = getattr(transformers, case.family.auto_class)._model_mapping[type(case.config)]
    kind = getattr(transformers, case.architecture)
    assert kind in (mapped if isinstance(mapped, tuple) else (mapped,))
    remote = getattr(modeling_pruned, f"Pruned{case.architecture}")
    assert issubclass(remote, kind)
    assert getattr(modeling_pruned, remote.__name__) is remote
    # Config keys and tensor names of a family's file are those of its model.
    assert model.blocks == BLOCKS
    assert all(model.dimension(name) > 0 for name in case.family.dimensions)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_transposed_modules_are_those_of_the_class(case: Case) -> None:
    block = case.block(build_skeleton(case.config, case.architecture), 0)
    conv = {path for path, module in block.named_modules() if isinstance(module, Conv1D)}
    assert {path for module in case.family.transposed for path in module_paths(case.family)[module]} == conv


def find_stacked_weight(case: Case, values: dict[str, nn.Parameter], block: int, module: str) -> Tensor:
    """The weight of a linear module of an expert in the stock class's stack of them."""
    assert case.family.experts is not None
    expert, role = case.family.expert_modules[module]
    stack = "down_proj" if role == "down" else "gate_up_proj"
    weight = values[f"{case.family.layers}.{block}.{case.family.experts.module}.{stack}"][expert]
    if role == "down" or case.family.experts.gate == case.family.experts.up:
        return weight
    return weight.chunk(2)[int(role == "up")]


@pytest.mark.parametrize("case", LONG, ids=str)
def test_every_linear_of_a_block_is_in_a_space(dense: Dense, case: Case) -> None:
    """And the tensor on disk is what the family's module holds, one parameter below the other."""
    stored = load_file(dense.folder(case) / "model.safetensors")
    values = dict(case.model().named_parameters())
    paths = module_paths(case.family)
    stored = unstack_experts(case.family, stored)
    for index in range(BLOCKS):
        prefix = case.family.block.format(block=index)
        added = tuple(f"{path.format(block=index)}." for path in case.family.lookups if "{block}" in path)
        weights = {name for name, t in stored.items() if name.startswith(prefix) and t.dim() == 2}
        weights = {name for name in weights if not name.startswith(added)}
        routers = [] if case.family.experts is None else [case.family.experts.router]
        routers += case.family.spaceless
        routers += [space.gate for space in case.family.columns.values() if space.gate is not None]
        linears = {case.family.tensor(index, module) for module in case.family.linears}
        assert linears == weights - {case.family.tensor(index, module) for module in routers}
        assert all(
            torch.equal(find_stacked_weight(case, values, index, module), stored[case.family.tensor(index, module)])
            for module in case.family.expert_modules
        )
        for module, inner_paths in paths.items():
            for kind in ("weight", "bias"):
                name = case.family.tensor(index, module, kind)
                if name in stored:
                    parts = [values[f"{case.family.layers}.{index}.{path}.{kind}"] for path in inner_paths]
                    assert torch.equal(torch.cat(parts), stored[name]), name


@pytest.mark.parametrize("case", choose_cases(first_cases(), first_cases()[::4].__contains__), ids=str)
def test_config_keys_change_the_shapes_of_their_space_and_nothing_else(dense: Dense, case: Case) -> None:
    """Shapes derived from a space's incidences are those of the stock class if a config key sets the space's width."""
    model = dense.model(case)
    for recipe_name, name in first_expert_spaces(case.family.spaces).items():
        space = case.family.spaces[name]
        if (space.fixed or space.whole) is not None or space.units in case.family.multiples:
            continue
        for kept in range(1, min(3, model.units(name, model.blocks - 1))):
            shapes = shapes_of(case, **model.config_values({name: kept}))
            alike = [recipe_name, *(other for other in case.family.spaces if space.units in case.family.together)]
            alike = [other for other in alike if other == recipe_name or case.family.spaces[other].units == space.units]
            widths = {other: kept for other in case.family.spaces if recipe_space(other) in map(recipe_space, alike)}
            expected = derive_shapes(model, [widths] * BLOCKS)
            expected = stacked_up(expected, model.checkpoint.stacks)
            assert {disk: shapes[disk] for disk in expected} == {disk: shape for disk, (_, shape) in expected.items()}


def derive_shapes(model: Model, widths: list[dict[str, int]]) -> dict[str, TensorSpec]:
    """Shapes as the model has them where blocks keep so many units."""
    return {name: shape for name, shape in model.shapes_at(widths).items() if name in model.tensors}  # type: ignore[arg-type]


@pytest.mark.parametrize("case", first_cases(), ids=str)
def test_multiples_are_those_of_the_class(case: Case) -> None:
    for dimension, multiple in case.family.multiples.items():
        space = next(space for space in case.family.columns.values() if space.units == dimension)
        for ratio in (1, 2, 3, 4):
            shape = shapes_of(case, **{multiple.key: ratio})[case.family.tensor(0, space.consumer)]
            assert shape[1] == multiple.width(case.family.dimension(case.config, "hidden"), ratio)


@pytest.mark.parametrize("case", first_cases(), ids=str)
def test_the_config_class_refuses_head_counts_where_the_file_says_so(case: Case) -> None:
    """Three heads on a hidden size of 16."""
    for space in case.family.columns.values():
        if space.consumer != case.family.attention.output or (space.fixed or space.whole) is not None:
            continue
        values = case.config.to_dict() | dict.fromkeys(space.config, 3)
        if case.family.heads_divide_hidden:
            with pytest.raises(UserError, match="multiple of the number of att"):
                parse_config(values)
        else:
            parse_config(values)
