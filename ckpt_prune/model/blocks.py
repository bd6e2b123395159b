"""Paths of a family's blocks and linear modules in a transformers model, by transformers' own names."""

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import transformers

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.descriptions import load_family, parse_family
from ckpt_prune.model.family import Family
from ckpt_prune.model.nested_keys import set_key
from ckpt_prune.model.skeleton import Names, build_skeleton, parse_config
from ckpt_prune.model.spaces import ConsumerSpace, Dimension, product

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ckpt_prune.modeling_pruned import Blocks

_ANY_SIZE = 8


def module_paths(family: Family) -> MappingProxyType[str, tuple[str, ...]]:
    """Return linear module of a block, as on disk → its paths in a block of the model.

    A module that transformers holds as several, equal parts of its rows, has several paths. Modules of experts have
    none in stock classes and are left out.
    """
    return _module_paths(family.model_type, family.variant, family.architecture, family.outside)


_FEW = (1, 4, None)
"""Blocks of a stock model in which every kind is looked for; None for as many as its class has by itself."""


@cache
def _module_paths(
    model_type: str, variant: str | None, architecture: str, outside: str | None
) -> MappingProxyType[str, tuple[str, ...]]:
    family = load_family(model_type, variant) if outside is None else parse_family(outside, variant)
    family = family.of(architecture)
    modules = [module for module in family.linears if "{expert}" not in module]
    wanted = {*modules, *(space.measured for space in family.expert_spaces.values())}
    for few in _FEW:
        config = _stock_config(family, few)
        names = Names(build_skeleton(config, architecture))  # names do not depend on sizes
        block_of = {
            module: block
            for block in reversed(range(family.dimension(config, "layers")))
            for module in wanted
            if names.parameters(family.tensor(block, module))
        }
        if wanted <= block_of.keys():
            break
    paths: dict[str, tuple[str, ...]] = {}
    for module in modules:
        block = block_of.get(module, 0)  # no block of the class's own config has it
        tensor, prefix = family.tensor(block, module), f"{family.layers}.{block}."
        parameters = names.parameters(tensor) or (names.rename(tensor),)
        paths[module] = tuple(path.removeprefix(prefix).removesuffix(".weight") for path in parameters)
    return MappingProxyType(paths)


def _stock_config(family: Family, blocks: int | None) -> "PreTrainedConfig":
    """Return a config with its class's own sizes and so many blocks."""
    variant = family.variant
    if family.found is not None and family.found.config is not None:
        return parse_config(family.found.config)
    config = transformers.AutoConfig.for_model(family.model_type, **({variant: True} if variant else {}))
    if blocks is not None:
        set_key(config, family.dimensions["layers"][0], blocks)
    for dimension, keys in family.dimensions.items():
        if keys and family.read_key(config, keys[0]) is None:  # some classes do not fill in their own defaults
            try:
                set_key(config, keys[0], family.dimension(config, dimension))
            except UserError:  # published configs state it
                set_key(config, keys[0], _ANY_SIZE)
    return config


def block_facts(family: Family, dimension: Dimension) -> "Blocks":
    """Return what `modeling_pruned` needs to know of a family to rebuild its blocks.

    A family with a space that ends in logits has attention of any shape; other classes must take the shapes that their
    config says, except for spaces that are fixed.

    Args:
        dimension: of the dense model.
    """
    from ckpt_prune.modeling_pruned import AttentionPaths, Blocks, RotaryFacts, ValuePaths, WidthPaths

    paths = module_paths(family)
    attention = family.attention
    modules = (attention.query, attention.key, attention.value, attention.output)
    # A module without a space is not rebuilt, and keeps its name.
    query, key, value, output = (paths.get(module, (module,))[0] for module in modules)
    where = AttentionPaths(query=query, key=key, value=value, output=output)
    counts = [key for space in family.consumers.values() if space.consumer == attention.output for key in space.config]
    if family.logits and counts != family.dimensions["query_heads"]:
        (where["heads"],) = counts
    widths: dict[str, WidthPaths] = {}
    for space in family.consumers.values():
        is_rebuilt = family.logits and space.consumer != attention.output
        is_narrowed = space.fixed is not None and not family.logits
        if not (is_rebuilt or is_narrowed or space.units in family.multiples):
            continue
        inner = dict.fromkeys(path for module in space.readers for path in paths[module])
        width = WidthPaths(inner=list(inner), outer=paths[space.consumer][0])
        counts = family.dimensions[space.units]
        if is_narrowed and counts:
            width["units"] = counts[0]
            width["lines"] = _lines(space, paths, dimension)
            width["attributes"] = {path: product(each, dimension) for path, each in space.attributes.items()}
        widths[next(iter(space.config))] = width
    blocks = Blocks(layers=family.layers, attention=where if family.logits else None, widths=widths)
    for rotary in family.rotary_spaces.values():
        are_near, have_near_tables = (pairing == "neighbours" for pairing in (rotary.pairs, rotary.angles))
        facts = RotaryFacts(pairs=rotary.count(dimension), neighbours=are_near, tables=have_near_tables)
        blocks["rotary"] = where, facts
    if any(space.kind == "values" for space in family.spaces.values()) and not family.logits:
        blocks["values"] = ValuePaths(value=where["value"], output=where["output"])
    if outside := [key for space in family.pooling.values() for key in space.config]:
        blocks["outside"] = outside
    return blocks


def _lines(space: ConsumerSpace, paths: MappingProxyType[str, tuple[str, ...]], dimension: Dimension) -> dict[str, int]:
    """Linears that a space lies on → rows, or of its consumer columns, of one unit."""
    lines: dict[str, int] = {}
    for _, incidence in space.incidences:
        (path,) = paths[incidence.module]
        lines[path] = lines.get(path, 0) + incidence.per_unit(dimension)
    return lines
