"""Checks a family's description against transformers' own class on the meta device."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
import transformers

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.cuts import list_cuts, remaining_lines
from ckpt_prune.model.descriptions import known_families
from ckpt_prune.model.family import KINDS, QUOTIENTS, Family
from ckpt_prune.model.nested_keys import read_key, with_keys
from ckpt_prune.model.skeleton import (
    Names,
    RefusedConfigError,
    build_skeleton,
    parse_config,
    quiet_transformers,
    stock_class,
    stock_names,
    stored_key,
)
from ckpt_prune.model.spaces import (
    AnySpace,
    Axis,
    SpaceName,
    axis_dim,
    first_expert_spaces,
    product,
    recipe_space,
    spaces_among,
)
from ckpt_prune.model.width_switches import stating_config

Shapes = Mapping[str, tuple[int, ...]]


@quiet_transformers()
def check_description(family: Family, config: Mapping[str, Any], *, changes: bool = True) -> None:
    """Check all of a description that shapes can show: names, dimensions, spaces, config keys and slots of biases.

    Shapes do not show what a model computes (rotary embeddings, the place of norms). The UserError begins with the key
    of the description that is wrong.

    Args:
        config: config.json of a model of that family.
        changes: also build the class under changed configs, with fewer units and other biases: about ten times, of
            which each takes a second if there are hundreds of experts.
    """
    declared = next(iter(config.get("architectures") or []), "")
    family = family.of(declared if family.has_class(declared) else family.architecture)
    if not hasattr(transformers, family.auto_class):
        raise UserError(f"architectures: transformers has no {family.auto_class}")
    if unknown := sorted(set(family.stand_ins) - set(known_families())):
        raise UserError(f"stand_ins: {unknown[0]} is not one of {', '.join(known_families())}")
    config = stating_config(config, family)
    parsed = parse_config(config)
    try:
        stock_class(family.architecture, parsed)
    except (AttributeError, ImportError) as error:
        raise UserError(f"architectures: this transformers has no class {family.architecture}") from error
    family.check_config(parsed)
    for name, keys in family.dimensions.items():
        has_number = any(isinstance(family.read_key(parsed, key), int | list) for key in keys)
        if keys and not has_number and name not in family.derived and name != "head_dim":
            raise UserError(f"dimensions.{name}: config.json has no number under {' or '.join(keys)}")
    _check_dimension_names(family)
    family = family.with_config(parsed)
    residual = family.residual
    if residual and any(each.holds(parsed, lambda name: family.dimension(parsed, name)) for each in residual.refused):
        family = family.model_copy(update={"residual": None})
    names = stock_names(dict(config), family.architecture)
    blocks = family.dimension(parsed, "layers")
    _check_modules(family, dict(names.model.named_modules()), names, blocks)
    shapes = _by_block(family, names.shapes, blocks)
    family = _check_linears(family, shapes)
    for part in _of_one_shape(family, shapes):
        sizes = _sizes(part, _shapes_inside(part, names.shapes, parsed, family))
        if changes:
            _check_bias_slots(part, config, parsed, family)
        _check_attention(part, parsed, sizes)
        _check_residual(part, parsed, sizes)
        for name in first_expert_spaces(part.spaces).values():
            space = part.spaces[name]
            _check_units(part, name, parsed, sizes)
            if (space.fixed or space.whole) is None and space.units not in family.multiples:
                _check_stated(part, name, parsed)
                if changes:
                    _check_widths(part, name, config, parsed, sizes, family)


def _of_one_shape(family: Family, blocks: Sequence[Shapes]) -> list[Family]:
    """This family without the first and without the second of two spaces that end in one linear module; or itself.

    They are of different blocks: MLPs of two widths, or two ways to mix tokens.
    """
    pairs = [(name, space.wider_than) for name, space in family.columns.items() if space.wider_than is not None]
    for (name, space), (other, beside) in combinations(family.consumers.items(), 2):
        ends_alike = space.consumer == beside.consumer
        if ends_alike and not any({name, other} <= _spaces_inside(family, shapes).keys() for shapes in blocks):
            pairs.append((name, other))
    without = [set(names) for names in zip(*pairs, strict=True)] or [set[SpaceName]()]
    spaces = [{name: each for name, each in family.spaces.items() if name not in gone} for gone in without]
    return [family.model_copy(update={"spaces": own}) for own in spaces]


def _spaces_inside(family: Family, shapes: Shapes) -> dict[SpaceName, AnySpace]:
    """Return the spaces of a block, by the names of its tensors inside it."""
    return spaces_among(family.spaces, {name.removesuffix(".weight") for name in shapes})


def _by_block(family: Family, shapes: Shapes, blocks: int) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of every block's tensors by their names inside it, each expert's weights apart.

    What pools the tokens is a site of the last block.
    """
    of_blocks: list[dict[str, tuple[int, ...]]] = [{} for _ in range(blocks)]
    before, after = map(re.escape, family.block.split("{block}"))
    for name, own in shapes.items():
        place = re.match(rf"{before}(\d+){after}", name)
        if place is not None and int(place[1]) < blocks:
            of_blocks[int(place[1])][name[place.end() :]] = own
    for inside in of_blocks:
        for stack, (part,) in ({} if family.experts is None else family.experts.stacks).items():
            count, *shape = inside.pop(stack, (0,))
            turned = family.experts is not None and family.experts.transposed and part.endswith(".weight")
            inside |= {part.format(expert=e): tuple(reversed(shape) if turned else shape) for e in range(count)}
    for module in (module for space in family.pooling.values() for module in space.modules):
        tensors = ((f"{module}.{kind}", shapes.get(family.tensor(0, module, kind))) for kind in KINDS)
        of_blocks[-1] |= {name: shape for name, shape in tensors if shape is not None}
    return of_blocks


def _shapes_inside(family: Family, shapes: Shapes, parsed: Any, whole: Family) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a block by their names inside it, of the first block that has each, with all its spaces.

    UserError if another block has a linear module of another shape.

    Args:
        whole: the family with its MLPs of all widths.
    """
    columns = family.columns

    def fits(name: SpaceName, inside: Shapes) -> bool:
        space = columns.get(name)
        shape = None if space is None else inside.get(f"{space.consumer}.weight")
        if space is None or shape is None:
            return True
        return whole.fits(parsed, name, shape[0 if space.consumer in family.transposed else 1])

    first: dict[str, tuple[int, tuple[int, ...]]] = {}
    named = {f"{module}.weight" for module in family.linears}
    for block, inside in enumerate(_by_block(family, shapes, family.dimension(parsed, "layers"))):
        of_block = _spaces_inside(family, inside).items()
        complete = [each for name, each in of_block if fits(name, inside) and not family.lacks(parsed, block, each)]
        without = named - {f"{module}.weight" for space in complete for module in space.modules}
        for name, shape in inside.items():
            if name in without:
                continue
            where, first_shape = first.setdefault(name, (block, shape))
            if name in named and shape != first_shape:
                raise UserError(
                    f"spaces: {name} of {family.architecture} has shape {list(first_shape)} in block {where} and "
                    f"{list(shape)} in block {block}, and a space has as many units in every block that has it"
                )
    return {name: shape for name, (_, shape) in first.items()}


def _check_dimension_names(family: Family) -> None:
    dimensions = {*family.dimensions, *family.derived, *family.multiples, "pairs"}
    dimensions |= {name for name, parts in QUOTIENTS.items() if dimensions >= {*parts}}
    for name, space in family.spaces.items():
        factors: list[Any] = [
            space.units,
            space.for_each,
            *(factor for each in space.config.values() for factor in each),
        ]
        for _, incidence in space.incidences:
            factors += [*incidence.lines_per_unit, *incidence.repeats, *incidence.repeated_units]
            factors += [factor for products in (*incidence.after, *incidence.stride) for factor in products]
        for factor in factors:
            if isinstance(factor, str) and factor not in dimensions:
                raise UserError(f"spaces.{name}: {factor!r} is none of the dimensions {', '.join(sorted(dimensions))}")


def _check_modules(family: Family, modules: Mapping[str, Any], names: Names, blocks: int) -> None:
    if family.layers not in modules or len(modules[family.layers]) != blocks:
        raise UserError(f"layers: {family.architecture} has no list {family.layers} of {blocks} blocks")
    for key, path in (("embedding", family.embedding), *(("pooled", path) for path in family.pooled)):
        if path is not None and path not in modules and not names.parameters(f"{path}.weight"):
            raise UserError(f"{key}: {family.architecture} has no module {path}")
    if family.head is not None and not names.parameters(f"{family.head}.weight"):
        raise UserError(f"architectures.{family.architecture}.head: it has no {family.head}.weight")
    residual = family.residual
    if residual is None:
        return
    block = {path for number in range(blocks) for path, _ in modules[f"{family.layers}.{number}"].named_modules()}
    for norm in residual.reads:
        if norm not in block:
            raise UserError(f"residual.reads: blocks of {family.architecture} have no module {norm}")
    begins = [(key, path) for key in ("starts", "projections") for path in getattr(residual, key)]
    for key, path in (("final", residual.final), *begins):
        if path not in modules and path.removeprefix(f"{family.base}.") not in modules:
            raise UserError(f"residual.{key}: {family.architecture} has no module {path}")
    named = {*residual.writes, *(module for fed in residual.reads.values() for module in fed)}
    if odd := sorted(named ^ set(family.linears)):
        raise UserError(f"residual: reads and writes together are not the modules of the spaces: {', '.join(odd)}")


def _check_linears(family: Family, blocks: Sequence[Shapes]) -> Family:
    """Check that every block has all linears of a space or none, and no other; return the family's spaces in them."""
    tables = tuple(f"{path.partition('{block}.')[2]}." for path in family.lookups if "{block}" in path)
    # What chooses among experts, and what weighs them, belongs to no space.
    others = {*family.spaceless, *(space.gate for space in family.columns.values() if space.gate is not None)}
    others |= set() if family.experts is None else {family.experts.router}
    present: set[SpaceName] = set()
    everywhere: set[str] = set()
    for block, shapes in enumerate(blocks):
        weights = {name for name, shape in shapes.items() if len(shape) >= 2 and not name.startswith(tables)}
        if not weights:
            prefix = family.block.format(block=block)
            raise UserError(f"block: {family.architecture} has no tensor that begins with {prefix}")
        linears = {name.removesuffix(".weight") for name in weights}
        everywhere |= linears
        spaces = spaces_among(family.spaces, linears)
        present |= spaces.keys()
        named = others | {module for space in spaces.values() for module in space.modules}
        if extra := sorted(each for each in linears - named if re.sub(r"\.\d+\.", ".{expert}.", each) not in others):
            begun = [space for space in family.spaces.values() if linears.intersection(space.modules)]
            module = next((each for space in begun for each in space.modules if each not in linears), None)
            name = family.tensor(block, extra[0] if module is None else module)
            if module is None:
                raise UserError(f"spaces: no space names {name}, which {family.architecture} has")
            raise UserError(
                f"spaces: {family.architecture} has no {name} ({module}); its blocks have {', '.join(sorted(linears))}"
            )
    if wrong := sorted(set(family.attention.modules) - everywhere):
        raise UserError(f"attention: {family.architecture} has no {family.tensor(0, wrong[0])}")
    return family.model_copy(update={"spaces": {name: each for name, each in family.spaces.items() if name in present}})


def _check_bias_slots(family: Family, config: dict[str, Any], parsed: Any, whole: Family) -> None:
    """Check that biases are exactly where their slots are open: with no key true, and with each alone."""
    keys = sorted({slot for slot in family.bias_slots.values() if isinstance(slot, str)})
    if unknown := [key for key in keys if read_key(parsed, key) is None]:
        raise UserError(f"bias_slots: {type(parsed).__name__} has no key {unknown[0]}")
    of_experts = family.expert_modules
    for opened in [set[str](), *({key} for key in keys)]:
        settings = {key: key in opened for key in keys}
        changed = parse_config(with_keys(config, settings))
        stock = Names(build_skeleton(changed, family.architecture)).shapes
        shapes = _shapes_inside(family, stock, changed, whole)
        for module in family.linears:
            if module in of_experts:
                continue  # all have biases or none (`Experts.biased`), and none gets one
            slot = family.bias_slots.get(module, False)
            is_open = slot is True or slot in opened
            if (f"{module}.bias" in shapes) != is_open:
                states = ", ".join(f"{key} {str(value).lower()}" for key, value in settings.items())
                raise UserError(
                    f"bias_slots: {module} of {family.architecture} {'has none' if is_open else 'has a bias'}"
                    + (f" with {states}" if states else "")
                )


def _sizes(family: Family, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Linear module or table of a block → shape of its weight, (outputs, inputs)."""
    sizes = {}
    routers = [space.measured for space in family.expert_spaces.values()]
    for module in [*family.linears, *routers, *(m for space in family.pooling.values() for m in space.modules)]:
        shape = shapes[f"{module}.weight"]
        sizes[module] = shape[::-1] if module in family.transposed else shape
    tables = [table.module for space in family.spaces.values() for table in space.tables]
    return sizes | {table: shapes[table] for table in tables}


def _check_attention(family: Family, parsed: Any, sizes: Shapes) -> None:
    """Check the sizes of query, key, value and output, and the rows of spaces that end in logits."""
    attention = family.attention
    if attention.latent or not sizes.keys() >= set(attention.modules):
        return
    heads, groups, width = (family.dimension(parsed, name) for name in ("query_heads", "kv_heads", "head_dim"))
    roles: dict[str, list[str]] = {}
    for role in ("query", "key", "value"):
        roles.setdefault(getattr(attention, role), []).append(role)
    for module, of_module in roles.items():
        count = sum(heads if role == "query" else groups for role in of_module)
        if sizes[module][0] % (count * width):  # gates may stand beside queries
            raise UserError(
                f"attention.{' and '.join(of_module)}: {module} has {sizes[module][0]} outputs in "
                f"{family.architecture}, and {count} heads of {width} have {count * width}"
            )
    if sizes[attention.output][1] != heads * width:
        raise UserError(
            f"attention.output: {attention.output} has {sizes[attention.output][1]} inputs in {family.architecture}, "
            f"and {heads} heads of {width} have {heads * width}"
        )
    for name, space in {**family.logits, **family.rotary_spaces}.items():
        if space.readers != [attention.query, attention.key]:
            modules = f"{attention.query}, then of {attention.key}"
            raise UserError(f"spaces.{name}.rows: rows are of {modules}, not of {', '.join(space.readers)}")


def _check_residual(family: Family, parsed: Any, sizes: Shapes) -> None:
    """Check that modules which read or write the residual stream are as wide as it, and read it behind one norm."""
    residual = family.residual
    if residual is None:
        return
    hidden = family.dimension(parsed, "hidden")
    reads = [module for modules in residual.reads.values() for module in modules]
    for key, modules, dim in (("reads", reads, 1), ("writes", residual.writes, 0)):
        for module in modules:
            if sizes[module][dim] != hidden:
                raise UserError(
                    f"residual.{key}: {module} has {sizes[module][dim]} {'inputs' if dim else 'outputs'} in "
                    f"{family.architecture}, and the residual stream has {hidden} dimensions"
                )
    consumers = {space.consumer for space in family.consumers.values()}
    if odd := sorted(consumers ^ set(residual.writes)):
        raise UserError(f"residual.writes: not the consumers of the spaces: {', '.join(odd)}")


def _check_units(family: Family, name: SpaceName, parsed: Any, sizes: Shapes) -> None:
    """Check that the units of a space lie inside the modules that it names, and fill them.

    Rows of a fused projection need not be filled: some of them are of another space.
    """
    space, dimension = family.spaces[name], partial(family.dimension, parsed)
    count = space.site_units(dimension)
    attention = family.attention
    fused = set(attention.modules) if len(attention.modules) < 4 else set()
    lines: dict[tuple[str, Axis], list[int]] = {}
    for axis, incidence in space.incidences:
        units = incidence.lines(torch.arange(count), count, dimension)
        lines.setdefault((incidence.module, axis), []).extend(units.tolist())
    for (module, axis), numbers in lines.items():
        size = sizes[module][axis_dim(axis)]
        may_leave = axis == "rows" and (module in fused or name == "linear_heads")  # states that all heads share
        if max(numbers) >= size or len(numbers) != len(set(numbers)) or (len(numbers) != size and not may_leave):
            raise UserError(
                f"spaces.{name}.{axis}: {count} units lie on {len(numbers)} {axis} of {module} (numbers up to "
                f"{max(numbers)}), and {family.architecture} has {size} there: compare units, for_each, "
                "lines_per_unit, copies, after, stride, repeats and repeated_units with its code"
            )


def _check_stated(family: Family, name: SpaceName, parsed: Any) -> None:
    """Check that the config states the units of a space under its keys."""
    space, dimension = family.spaces[name], partial(family.dimension, parsed)
    units = space.count(dimension)
    for key in space.config if units > 1 else ():
        if family.read_key(parsed, key) is None and space.units in family.derived:
            continue  # as in GPT-BigCode: the class derives the width unless it is stated
        if not isinstance(family.read_key(parsed, key), int | list):
            raise UserError(f"spaces.{name}.config: config.json has no number under {key}")
        dense, factors = units * product(space.config[key], dimension), [space.units, *space.config[key]]
        if family.read_key(parsed, key) != family.as_listed(parsed, key, dense):
            stated, said = family.read_key(parsed, key), " times ".join(map(str, factors))
            raise UserError(f"spaces.{name}.config: {key} is {stated} in config.json, and {said} is {dense}")


def _check_widths(
    family: Family, name: SpaceName, config: dict[str, Any], parsed: Any, sizes: Shapes, whole: Family
) -> None:
    """Check that one unit fewer by the space's config keys gives the shapes that its incidences give."""
    space, dimension = family.spaces[name], partial(family.dimension, parsed)
    units = space.count(dimension)
    if units < 2:
        return
    kept = units - 1
    others = {other.units: other.count(dimension) for other in family.spaces.values() if other.units != space.units}
    values = {}
    for key, factors in space.config.items():
        value = kept * product(factors, lambda each: others[each] if each in others else dimension(each))
        values[key] = family.as_listed(parsed, key, value)
    states_head = hasattr(parsed, "head_dim") or bool(family.dimensions["head_dim"])
    if not isinstance(getattr(type(parsed), "head_dim", None), property) and states_head:
        values[family.head_key] = dimension("head_dim")
    changes = {stored_key(key, config, parsed): value for key, value in values.items()}
    try:
        changed = parse_config(with_keys(config, changes))
        stock = Names(build_skeleton(changed, family.architecture)).shapes
    except RefusedConfigError:
        return  # by a rule of the class beyond shapes (`choosing.unprunable_spaces`)
    shapes = _shapes_inside(family, stock, changed, whole)
    # One config key says the widths of all experts, and perhaps of other spaces.
    is_together = space.units in family.together
    alike = [
        other
        for other, described in family.spaces.items()
        if recipe_space(other) == recipe_space(name) or (is_together and described.units == space.units)
    ]
    lines = remaining_lines(family, dimension, {each: space.first(kept, dimension) for each in alike}, sizes)
    tables = {table.module for described in family.spaces.values() for table in described.tables}
    expected = {module: shape for module, shape in sizes.items() if module not in tables}
    for module, kind, dim, left in list_cuts(lines):
        if kind == "weight":
            shape = expected[module]
            expected[module] = (*shape[:dim], len(left), *shape[dim + 1 :])
    for module, shape in expected.items():
        shape_now = shapes.get(f"{module}.weight")
        if shape_now is None:
            continue  # an expert that is gone
        actual = shape_now[::-1] if module in family.transposed else shape_now
        if actual != shape:
            raise UserError(
                f"spaces.{name}: with {kept} of {units} units {module} has shape {list(actual)} in "
                f"{family.architecture}, by the description {list(shape)}"
            )
