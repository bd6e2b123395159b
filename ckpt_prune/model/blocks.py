"""Where in a model the blocks of a family are, and where in a block its linear modules, by transformers' own names."""

from functools import cache
from inspect import signature
from types import MappingProxyType

from torch import Tensor, nn
from transformers import AutoConfig

from ckpt_prune.model.descriptions import load_family, parse_family
from ckpt_prune.model.family import Family
from ckpt_prune.model.skeleton import Names, build_skeleton
from ckpt_prune.model.spaces import ConsumerSpace, Dimension, product
from ckpt_prune.modeling_pruned import AttentionPaths, Blocks, RotaryFacts, ValuePaths, WidthPaths


def module_paths(family: Family) -> MappingProxyType[str, tuple[str, ...]]:
    """Linear module of a block, as it stands on disk → its paths in a block of the model.

    A module that transformers holds as several, equal parts of its rows, has several.
    """
    paths = _module_paths(family.model_type, family.variant, family.architecture, family.outside)
    # Those of experts have no module of their own in stock classes.
    return MappingProxyType({module: held for module, held in paths.items() if "{expert}" not in module})


@cache
def _module_paths(
    model_type: str, variant: str | None, architecture: str, outside: str | None
) -> MappingProxyType[str, tuple[str, ...]]:
    # Names do not depend on sizes: one block of the config's defaults has them all.
    whole = load_family(model_type, variant) if outside is None else parse_family(outside, variant)
    family = whole.of(architecture)
    config = AutoConfig.for_model(model_type, **({variant: True} if variant else {}))
    setattr(config, family.dimensions["layers"][0], 1)
    if family.leading is not None:
        setattr(config, family.leading, 0)
    for dimension, keys in family.dimensions.items():
        if keys and getattr(config, keys[0], 0) is None:  # some classes do not fill in their own defaults
            setattr(config, keys[0], family.dimension(config, dimension))
    names, prefix = Names(build_skeleton(config, architecture)), f"{family.layers}.0."
    held = {module: names.parameters(family.tensor(0, module)) for module in family.linears}
    return MappingProxyType(
        {
            module: tuple(path.removeprefix(prefix).removesuffix(".weight") for path in paths)
            for module, paths in held.items()
        }
    )


def block_facts(family: Family, dimension: Dimension) -> Blocks:
    """What `modeling_pruned` has to know of a family to rebuild its blocks.

    A family with a space that ends in logits has attention of any shape; the classes of others have to take the shapes
    that their config says, but for spaces that are fixed.

    Args:
        family: whose blocks.
        dimension: of the dense model.
    """
    paths = module_paths(family)
    own = family.attention
    # Those that no space lies on are not rebuilt, and have their own names.
    query, key, value, output = (paths.get(each, (each,))[0] for each in (own.query, own.key, own.value, own.output))
    where = AttentionPaths(query=query, key=key, value=value, output=output)
    counted = [key for space in family.consumers.values() if space.consumer == own.output for key in space.config]
    if family.logits and counted != family.dimensions["query_heads"]:
        (where["heads"],) = counted
    widths: dict[str, WidthPaths] = {}
    for space in family.consumers.values():
        rebuilt = family.logits and space.consumer != family.attention.output
        narrowed = space.fixed is not None and not family.logits
        if not (rebuilt or narrowed or space.units in family.multiples):
            continue
        inner = dict.fromkeys(path for module in space.readers for path in paths[module])
        width = WidthPaths(inner=list(inner), outer=paths[space.consumer][0])
        counted = family.dimensions[space.units]
        if narrowed and counted:
            width["units"] = counted[0]
            width["lines"] = _lines(space, paths, dimension)
            width["attributes"] = {path: product(each, dimension) for path, each in space.attributes.items()}
        widths[next(iter(space.config))] = width
    found = Blocks(layers=family.layers, attention=where if family.logits else None, widths=widths)
    for turned in family.rotary_spaces.values():
        near, tables = (lie == "neighbours" for lie in (turned.pairs, turned.angles))
        found["rotary"] = where, RotaryFacts(pairs=turned.count(dimension), neighbours=near, tables=tables)
    if any(space.ends == "values" for space in family.spaces.values()) and not family.logits:
        found["values"] = ValuePaths(value=where["value"], output=where["output"])
    return found


def returns_tuple(family: Family, layer_class: type[nn.Module]) -> bool:
    """Whether a block returns its hidden states as the first of several things.

    A family may do so in one version of transformers and not in the next: a class that says it returns a tensor does.
    """
    forwards = [vars(each)["forward"] for each in layer_class.__mro__ if "forward" in vars(each)]
    said = [signature(forward).return_annotation for forward in forwards]
    return family.tuples and Tensor not in said and "torch.Tensor" not in said


def _lines(space: ConsumerSpace, paths: MappingProxyType[str, tuple[str, ...]], dimension: Dimension) -> dict[str, int]:
    """Linears that a space lies on → rows, or of its consumer columns, of one unit."""
    found: dict[str, int] = {}
    for _, incidence in space.incidences:
        (path,) = paths[incidence.module]
        found[path] = found.get(path, 0) + incidence.per_unit(dimension)
    return found
