"""Whether what a description says of a model is so: held against transformers' own class on the meta device."""

from collections.abc import Mapping
from typing import Any

import transformers

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.cuts import list_cuts, remaining_lines
from ckpt_prune.model.descriptions import known_families
from ckpt_prune.model.family import Family
from ckpt_prune.model.skeleton import Names, build_skeleton, parse_config, quiet_transformers, stored_key
from ckpt_prune.model.spaces import SpaceName, recipe_space

Shapes = Mapping[str, tuple[int, ...]]


@quiet_transformers()
def check_description(family: Family, config: Mapping[str, Any]) -> None:
    """Check all of a description that shapes can show: names, dimensions, spaces, config keys and slots of biases.

    What a model computes (rotary embeddings, where norms stand) shapes do not show.

    Args:
        family: the description.
        config: config.json of a model of that family.

    Raises:
        UserError: something is not so; what, and where.
    """
    declared = next(iter(config.get("architectures") or []), "")
    family = family.of(declared if family.has_class(declared) else family.architecture)
    if not hasattr(transformers, family.architecture):
        raise UserError(f"architectures: this transformers has no class {family.architecture}")
    if not hasattr(transformers, family.auto_class):
        raise UserError(f"architectures: transformers has no {family.auto_class}")
    if unknown := sorted(set(family.stand_ins) - set(known_families())):
        raise UserError(f"stand_ins: {unknown[0]} is none of {', '.join(known_families())}")
    parsed = parse_config(dict(config))
    family.check_config(parsed)
    for name, keys in family.dimensions.items():
        if keys and not any(isinstance(getattr(parsed, key, None), int) for key in keys) and name not in family.derived:
            if name == "head_dim":
                continue
            raise UserError(f"dimensions.{name}: config.json has no number under {' or '.join(keys)}")
    skeleton = build_skeleton(parsed, family.architecture)
    names = Names(skeleton)
    modules = dict(skeleton.named_modules())
    _modules_exist(family, modules, names, family.dimension(parsed, "layers"))
    _linears_are_all(family, names.shapes)
    _slots_open(family, dict(config), parsed)
    narrow = family.with_config(parsed)
    for name, space in narrow.spaces.items():
        if (space.fixed or space.whole) is None and space.units not in family.multiples:
            _widths_follow(narrow, name, dict(config), parsed, names.shapes)


def _modules_exist(family: Family, modules: Mapping[str, Any], names: Names, blocks: int) -> None:
    if family.layers not in modules or len(modules[family.layers]) != blocks:
        raise UserError(f"layers: {family.architecture} has no list {family.layers} of {blocks} blocks")
    for key, path in (("embedding", family.embedding), *(("pooled", path) for path in family.pooled)):
        if path is not None and path not in modules:
            raise UserError(f"{key}: {family.architecture} has no module {path}")
    if family.entry and not any(path in modules for path in family.entry):
        raise UserError(f"entry: {family.architecture} has none of {', '.join(family.entry)}")
    if family.head is not None and not names.parameters(f"{family.head}.weight"):
        raise UserError(f"architectures.{family.architecture}.head: it has no {family.head}.weight")
    residual = family.residual
    if residual is None:
        return
    block = {path.removeprefix(f"{family.layers}.0.") for path in modules if path.startswith(f"{family.layers}.0.")}
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


def _linears_are_all(family: Family, shapes: Shapes) -> None:
    """Every linear that a space names is there, and there is no other."""
    prefix = family.block.format(block=0)
    weights = {name for name, shape in shapes.items() if name.startswith(prefix) and len(shape) >= 2}
    if not weights:
        raise UserError(f"block: {family.architecture} has no tensor that begins with {prefix}")
    named = {family.tensor(0, module): module for module in family.linears}
    for name, module in named.items():
        if name not in weights:
            has = ", ".join(sorted(each.removeprefix(prefix).removesuffix(".weight") for each in weights))
            raise UserError(f"spaces: {family.architecture} has no {name} ({module}); its blocks have {has}")
    # What chooses among experts, and what weighs them, is no space's.
    besides = [] if family.experts is None else [family.experts.router]
    besides += family.spaceless
    besides += [space.gate for space in family.columns.values() if space.gate is not None]
    if extra := sorted(weights - named.keys() - {family.tensor(0, module) for module in besides}):
        raise UserError(f"spaces: no space names {extra[0]}, which {family.architecture} has")
    attention = {family.tensor(0, module) for module in family.attention.modules}
    if wrong := sorted(attention - weights):
        raise UserError(f"attention: {family.architecture} has no {wrong[0]}")


def _slots_open(family: Family, config: dict[str, Any], parsed: Any) -> None:
    """Biases are where their slots are open, and nowhere else: with no key true, with each alone, and as it is."""
    keys = {slot for slot in family.bias_slots.values() if isinstance(slot, str)}
    if unknown := sorted(key for key in keys if not hasattr(parsed, key)):
        raise UserError(f"bias_slots: {type(parsed).__name__} has no key {unknown[0]}")
    for opened in [set[str](), *({key} for key in sorted(keys))]:
        found = Names(
            build_skeleton(parse_config(config | {key: key in opened for key in keys}), family.architecture)
        ).shapes
        for module in family.linears:
            slot = family.bias_slots.get(module, False)
            expected = slot is True or slot in opened
            if (family.tensor(0, module, "bias") in found) != expected:
                under = (
                    f" with {', '.join(f'{key} {str(key in opened).lower()}' for key in sorted(keys))}" if keys else ""
                )
                has = "has a bias" if not expected else "has none"
                raise UserError(f"bias_slots: {module} of {family.architecture} {has}{under}")


def _widths_follow(family: Family, name: SpaceName, config: dict[str, Any], parsed: Any, dense: Shapes) -> None:
    """One unit fewer by the space's config keys gives the shapes that its incidences give."""

    def dimension(each: str) -> int:
        return family.dimension(parsed, each)

    space = family.spaces[name]
    units = space.count(dimension)
    if units < 2:
        return
    kept = max(1, units - 1)
    for key in space.config:
        if not isinstance(getattr(parsed, key, None), int):
            raise UserError(f"spaces.{name}.config: config.json has no number under {key}")
    others = {other.units: other.count(dimension) for other in family.spaces.values() if other.units != space.units}
    values = {}
    for key, factors in space.config.items():
        values[key] = kept
        for factor in factors:
            values[key] *= others.get(factor, dimension(factor))
    if not isinstance(getattr(type(parsed), "head_dim", None), property) and hasattr(parsed, "head_dim"):
        values["head_dim"] = dimension("head_dim")
    said = {stored_key(key, config, parsed): value for key, value in values.items()}
    try:
        found = Names(build_skeleton(parse_config(config | said), family.architecture)).shapes
    except UserError as error:
        if family.heads_divide_hidden:
            return
        raise UserError(f"spaces.{name}.config: {values} is refused: {error}") from error
    turned = {family.tensor(0, module) for module in family.transposed}
    sizes = {}
    for module in [*family.linears, *(own.measured for own in family.expert_spaces.values())]:
        shape = dense[family.tensor(0, module)]
        sizes[module] = shape[::-1] if family.tensor(0, module) in turned else shape
    sizes |= {table.module: dense[family.tensor(0, table.module, "itself")] for table in space.tables}
    # One config key says the widths of all experts, and perhaps of other spaces.
    together = space.units in family.together
    alike = [
        each
        for each, own in family.spaces.items()
        if recipe_space(each) == recipe_space(name) or (together and own.units == space.units)
    ]
    lines = remaining_lines(family, dimension, {each: space.first(kept, dimension) for each in alike}, sizes)
    wanted = {family.tensor(0, module): shape for module, shape in sizes.items() if family.tensor(0, module) in found}
    for module, kind, dim, left in list_cuts(lines):
        tensor = family.tensor(0, module)
        if kind == "weight":
            shape = wanted[tensor]
            wanted[tensor] = (*shape[:dim], len(left), *shape[dim + 1 :])
    for tensor, shape in wanted.items():
        actual = found[tensor][::-1] if tensor in turned else found[tensor]
        if actual != shape:
            raise UserError(
                f"spaces.{name}: with {kept} of {units} units {tensor} has shape {list(actual)} in "
                f"{family.architecture}, by the description {list(shape)}"
            )
