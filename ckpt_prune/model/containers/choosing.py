"""Chooses the container of an output: the `model_type` and config under which transformers can load it.

Stock first: the source's own type if its config can state the new shape, else a stock type that computes the same
function, else, if widths differ per block or on request, the source's type with self-contained remote code
(model/containers/README.md).
"""

import copy
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import transformers

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.blocks import block_facts, module_paths
from ckpt_prune.model.containers.container import Container, Ranks, Widths
from ckpt_prune.model.containers.remote import BLOCKS_KEY, MLX_KEY, RANKS_KEY, REMOTE_MODULE
from ckpt_prune.model.descriptions import load_family
from ckpt_prune.model.family import REMOTE_PREFIX, Family
from ckpt_prune.model.model import Model
from ckpt_prune.model.nested_keys import find_key, with_keys
from ckpt_prune.model.skeleton import AHEAD_KEYS, RefusedConfigError, parse_config, quiet_transformers, stored_key
from ckpt_prune.model.spaces import OUTSIDE, SpaceName, first_expert_spaces, recipe_space

REMOTE, PADDED, ANY = "remote", "padded", "any"
OWN_CODE = "Say --container any to store it with code of its own beside the weights"
_BASE_KEYS = frozenset({"dtype", "torch_dtype"})


class NothingFitsError(UserError):
    """No stock class can hold an output.

    Attributes:
        reasons: why each candidate cannot.
        advice: what to say instead.
    """

    def __init__(self, reasons: list[str], advice: str) -> None:
        super().__init__(f"no stock class fits: {'; '.join(dict.fromkeys(reasons))}. {advice}")
        self.reasons, self.advice = reasons, advice


@dataclass(frozen=True)
class _Output:
    """The output that a container must hold.

    Attributes:
        widths: of every block.
        biases: linear modules of a block that need a bias.
        ranks: of every block.
    """

    model: Model
    widths: Widths
    biases: Set[str] = frozenset()
    ranks: Ranks = ()

    @property
    def first(self) -> dict[SpaceName, int]:
        """The units of every space in the first block that has it, and last of what pools tokens, pruned or whole."""
        first = {space: kept for widths in reversed(self.widths) for space, kept in widths.items()}
        last, pooling = self.model.blocks - 1, self.model.family.pooling
        others = {space: kept for space, kept in first.items() if space not in pooling}
        return others | {space: first.get(space, self.model.units(space, last)) for space in pooling}

    @property
    def pruned(self) -> list[SpaceName]:
        """Spaces that lose units in some block."""
        return [space for space in self.first if is_pruned(self.model, space, self.widths)]


def choose_container(
    model: Model,
    widths: Widths,
    biases: Set[str],
    *,
    requested: str = "auto",
    per_layer: bool = False,
    ranks: Ranks = (),
    own_code: bool = True,
) -> Container:
    """Return the container of an output.

    Args:
        widths: units kept per block and space.
        biases: linear modules of a block that need a bias: those that the source has, and those of a compensation.
        requested: auto (stock, or remote if widths differ), any (stock, or remote if no stock one fits), padded,
            remote, or a model_type to force.
        per_layer: whether the recipe accepts widths that differ per block, and with them remote code.
        ranks: of linear modules that two thin ones stand in for: only remote code has these.
        own_code: False if the output must do without remote code: `any` is then as `auto`.

    UserError if nothing fits; the message says why each candidate does not, and what to do.
    """
    family = model.family
    own_code &= model.checkpoint.within is None  # a part has none
    output = _Output(model, widths, biases, ranks)
    for block, block_widths in enumerate(widths):
        _check_block(model, block, block_widths, biases, per_layer=per_layer)
    _check_uniform(model, widths)
    first = output.first
    uneven = any(kept != first[space] for each in widths for space, kept in each.items())
    # The config says how wide what pools tokens is, and of blocks that differ from it by themselves.
    uneven |= any(first[space] != first.get(model.counted_as(space), first[space]) for space in family.pooling)
    if uneven and not per_layer:
        raise UserError(
            "blocks would differ in width, which no stock model can load: say widths: per_layer in the recipe "
            "to accept remote code"
        )
    if requested == ANY and not own_code:
        requested = "auto"
    if requested == ANY and not uneven:
        try:
            return choose_container(model, widths, biases, per_layer=per_layer, own_code=False)
        except NothingFitsError as error:
            own = choose_container(model, widths, biases, requested=REMOTE, per_layer=per_layer)
            return replace(own, instead=error.advice)
    if uneven and requested not in ("auto", ANY, REMOTE):
        raise UserError(f"container {requested} cannot hold blocks of different widths: only remote can")
    padded: frozenset[SpaceName] = frozenset()
    if requested == PADDED:
        padded = _padded_spaces(output)
        filled = [
            {space: model.units(space, block) if space in padded else kept for space, kept in each.items()}
            for block, each in enumerate(widths)
        ]
        output = replace(output, widths=filled)
    remote = uneven or requested == REMOTE
    candidates, reasons = _candidates(family, requested)
    refused: list[SpaceName] = []
    # A stock type with all the slots is preferred even as the base of remote code; one without them comes last.
    for slotless_ok in (False, True) if remote else (False,):
        for candidate in candidates:
            reason = _obstacle(candidate, output, remote=remote, slotless_ok=slotless_ok)
            if reason is None:
                if remote:
                    reasons = [_why_remote(candidates, output, uneven=uneven)]
                container = _build(candidate, output, remote=remote, reasons=reasons)
                reason = _refusal(container, model)
                if reason is None:
                    return _with_padding(container, padded)
                rules = unprunable_spaces(model)
                refused = [space for space in rules if space in output.pruned]
                reason = rules[refused[0]] if refused and candidate is family else reason
            if not slotless_ok:
                reasons.append(reason)
    raise NothingFitsError(reasons, _advice(output, refused, remote=remote, own_code=own_code))


def is_pruned(model: Model, space: SpaceName, widths: Widths) -> bool:
    """Return whether some block keeps fewer units of a space than it has."""
    return any(own[space] < model.units(space, block) for block, own in enumerate(widths) if space in own)


def spaces_without_stock_class(model: Model, widths: Widths, candidate: Family | None = None) -> dict[SpaceName, str]:
    """Return spaces whose new width the stock class of a family, by default the model's, cannot have, and why."""
    reasons: dict[SpaceName, str] = {}
    family = candidate or model.family
    for block, units in enumerate(widths):
        for name in model.spaces(block):
            space = family.spaces.get(name)
            if space is None or units.get(name, model.units(name, block)) == model.units(name, block):
                continue
            if space.fixed is not None:
                reasons[name] = space.fixed.format(model_type=family.model_type)
            elif space.units in family.multiples and stock_multiple(model, space.units, units[name]) is None:
                multiple, hidden = family.multiples[space.units], model.dimension("hidden")
                dense = family.read_key(model.config, multiple.key)
                stock_widths = ", ".join(str(multiple.width(hidden, ratio)) for ratio in range(1, dense))
                reasons[name] = f"{family.model_type} knows only {name} widths of {stock_widths}, not {units[name]}"
    return reasons


def stock_multiple(model: Model, dimension: str, width: int) -> float | None:
    """Return the multiple of the hidden size by which the config can state a width, or None."""
    hidden, multiple = model.dimension("hidden"), model.family.multiples[dimension]
    if multiple.fraction:
        return multiple.ratio(hidden, width)
    ratios = range(1, 4 * width // hidden + 2)
    return next((ratio for ratio in ratios if multiple.width(hidden, ratio) == width), None)


_UNPRUNABLE: "WeakKeyDictionary[Model, dict[SpaceName, str]]" = WeakKeyDictionary()


def unprunable_spaces(model: Model) -> dict[SpaceName, str]:
    """Return spaces of which no unit can go in any stock class, and why: by rules that no description has.

    The config classes are asked, once for a model.
    """
    if model not in _UNPRUNABLE:
        reasons = _UNPRUNABLE[model] = dict[SpaceName, str]()
        spaces = model.family.spaces
        for names in _by_width_key(model, [name for name in spaces if spaces[name].whole is None]):
            units = min(model.unit_counts(names[0]), default=0)
            if units > 1 and not spaces_without_stock_class(model, _everywhere(model, names, units - 1)):
                rules = (_rule(model, _everywhere(model, names, count)) for count in range(units - 1, 0, -1))
                first = next(rules)
                if first is not None and None not in rules:
                    rope: Any = getattr(model.config, "rope_parameters", None) or {}
                    kind = f" with {rope['rope_type']}" if rope.get("rope_type", "default") != "default" else ""
                    keeps = f"this {model.family.model_type}{kind} keeps all its {recipe_space(names[0])}: {first}"
                    reasons |= dict.fromkeys(names, keeps)
    return _UNPRUNABLE[model]


def _everywhere(model: Model, names: Iterable[SpaceName], count: int) -> Widths:
    """Return widths of so many units of some spaces in every block that has them."""
    return [{name: count for name in names if name in model.spaces(block)} for block in range(model.blocks)]


def remote_note(model_type: str, why: str) -> str:
    """Return what to tell the user of an output with remote code."""
    return f"stored as {model_type} with remote code ({why}): load with ckpt_prune.load or trust_remote_code"


# ---- checks of widths --------------------------------------------------------------------------------------------


def _check_block(
    model: Model, block: int, widths: Mapping[SpaceName, int], biases: Set[str], *, per_layer: bool
) -> None:
    """Refuse widths of a block that no class at all can have."""
    _check_shared_keys(model, block, widths, apart=model.family.pooling.keys() if per_layer else frozenset())
    family = model.family
    for name, first in first_expert_spaces(widths).items():
        if len({count for space, count in widths.items() if recipe_space(space) == name}) > 1:
            raise UserError(
                f"experts of a block would differ in {name}, where every class has them of one width: say "
                "allocation: uniform or least-error"
            )
        if family.spaces[first].experts and set(family.spaces[first].modules) & set(biases):
            raise UserError(
                f"experts of a {family.model_type} have no biases: choose a compensation of {name} without one"
            )
    kept = next((widths[space] for space in family.expert_spaces if space in widths), None)
    if kept is None or family.experts is None:
        return
    experts, chosen = family.experts, int(getattr(model.config, family.experts.chosen))
    if kept < chosen:
        raise UserError(
            f"{kept} of {model.dimension(experts.count)} experts would stay, and the router sends every "
            f"token to {chosen} ({experts.chosen} in config.json): keep as many"
        )
    groups, sent = experts.grouping(model.config)
    least = max(2, -(-chosen // sent)) * groups  # routers rate a group by its two best experts
    if groups > 1 and (kept % groups or kept < least):
        key = next(iter(experts.groups))
        raise UserError(
            f"{kept} experts would stay, which the router takes in {groups} groups ({key} in config.json) and sends "
            f"every token to {chosen} experts of {sent} of them: keep a multiple of {groups}, {least} at the least"
        )


def _check_uniform(model: Model, widths: Widths) -> None:
    """Refuse blocks of different widths in a space of which no class has other than one width."""
    for name in (name for name, space in model.family.spaces.items() if space.uniform):
        counts = {block: widths[block].get(name, model.units(name, block)) for block in model.blocks_with(name)}
        if len({*counts.values()}) > 1:
            raise UserError(
                f"blocks of a {model.family.model_type} have equally many {name}, and {min(counts.values())} to "
                f"{max(counts.values())} would stay: say --set widths=uniform, or leave {name} whole"
            )


def _check_shared_keys(model: Model, block: int, units: Mapping[SpaceName, int], *, apart: Set[SpaceName]) -> None:
    """Refuse spaces of different widths that one config key states together (experts and shared ones).

    Those `apart` may have another: blocks state theirs by themselves.
    """
    family = model.family
    by_key: dict[str, dict[SpaceName, int]] = {}
    for name, first in first_expert_spaces(model.spaces(block)).items():
        space = family.spaces[first]
        for key in space.config if space.units in family.together and first not in apart else ():
            by_key.setdefault(key, {})[name] = units.get(first, model.units(first, block))
    for key, counts in by_key.items():
        if len(set(counts.values())) > 1:
            kept = " and ".join(f"{count} of {name}" for name, count in counts.items())
            raise UserError(
                f"one key of config.json ({key}) says how wide {' and '.join(counts)} of a {family.model_type} are, "
                f"and {kept} would stay: say allocation: least-error, or the same ratio and rounding for both"
            )


# ---- candidates --------------------------------------------------------------------------------------------------


def _candidates(family: Family, requested: str) -> tuple[list[Family], list[str]]:
    """Families to try, and why others are none."""
    names = [family.model_type, *family.stand_ins]
    if requested not in ("auto", ANY, REMOTE, PADDED):
        if requested not in names:
            containers = ", ".join([*names, REMOTE, ANY])
            raise UserError(f"container {requested!r} cannot hold a {family.model_type}: {containers} or {PADDED} can")
        names = [requested]
    candidates, reasons = [], []
    for name in names:
        if name == family.model_type:
            candidates.append(family)
            continue
        stand_in = load_family(name)
        counterpart = stand_in.class_of(family.auto_class)
        if counterpart is None:
            reasons.append(f"{name} has no class for {family.purpose}")
        else:
            candidates.append(stand_in.of(counterpart))
    return candidates, reasons


def _obstacle(candidate: Family, output: _Output, *, remote: bool, slotless_ok: bool) -> str | None:
    """Return why a family cannot hold the output, or None."""
    model, source = output.model, output.model.family
    if not remote:
        reasons = spaces_without_stock_class(model, output.widths, candidate)
        if reasons:
            return "; ".join(reasons.values())
    hidden = model.dimension("hidden")
    heads_key = next(iter(source.dimensions["query_heads"]), None)
    heads = {values[heads_key] for values in map(model.config_values, output.widths) if heads_key in values}
    odd = sorted(count for count in heads if hidden % count)
    refuses = candidate.heads_divide_hidden and not (remote and candidate.config_if_blocks_differ)
    if refuses and odd:
        return f"{candidate.model_type} refuses {odd[0]} heads, which do not divide its hidden size of {hidden}"
    if refuses and len(heads) > 1:
        return f"{candidate.model_type} refuses head counts that differ per block"
    slotless = _slotless(candidate, output)
    if slotless and not slotless_ok:
        named = ", ".join(module.removeprefix(OUTSIDE) for module in slotless)
        return f"{candidate.model_type} has no slot for a bias on {named}"
    if candidate is not source and model.uses_sliding_window:
        return f"{candidate.model_type} is not offered for a model with sliding-window attention"
    return None


def _slotless(candidate: Family, output: _Output) -> list[str]:
    return sorted(module for module in output.biases if module not in candidate.bias_slots)


def _why_remote(candidates: list[Family], output: _Output, *, uneven: bool) -> str:
    if uneven:
        return "blocks differ in width"
    obstacles = [_obstacle(each, output, remote=False, slotless_ok=False) for each in candidates]
    return "on request" if None in obstacles else str(obstacles[0])


def _rule(model: Model, widths: Widths) -> str | None:
    """Return why every stock class refuses blocks of so many units, in the words of the first; None if one does not."""
    output, reasons = _Output(model, widths), []
    for candidate in [model.family, *map(load_family, model.family.stand_ins)]:
        reason = _obstacle(candidate, output, remote=False, slotless_ok=True)
        if reason is None:
            reason = _refusal(_build(candidate, output, remote=False, reasons=[]), model)
        if reason is None:
            return None
        reasons.append(reason)
    return reasons[0]


def _refusal(container: Container, model: Model) -> str | None:
    """Return why transformers refuses a container's config, in its own words; None if it does not."""
    try:
        with quiet_transformers():
            parse_config(container.config)
    except RefusedConfigError as error:
        keys = {key for space in model.family.spaces.values() for key in space.config}
        values = {key: find_key(container.config, key) for key in keys}
        changed = {key: value for key, value in values.items() if value != find_key(model.checkpoint.config, key)}
        shape = " and ".join(f"{key} {changed[key]}" for key in sorted(changed)) or "a narrower stream"
        name = type(model.config).__name__ if container.model_type == model.family.model_type else container.model_type
        return f"{name} of transformers refuses {shape} ({error.rule.rstrip('.')})"
    return None


def _by_width_key(model: Model, spaces: Iterable[SpaceName]) -> list[list[SpaceName]]:
    """Group spaces by the config keys of their widths, which those of experts and of `together` share."""
    described, groups = model.family.spaces, dict[str, list[SpaceName]]()
    for name in spaces:
        units = described[name].units
        groups.setdefault(units if units in model.family.together else recipe_space(name), []).append(name)
    return list(groups.values())


def _padded_spaces(output: _Output) -> frozenset[SpaceName]:
    """Spaces that no stock class has narrower."""
    model = output.model
    padded = frozenset(spaces_without_stock_class(model, output.widths))
    for names in _by_width_key(model, [name for name in output.first if name not in padded]):
        if _rule(model, [{n: own[n] for n in names if n in own} for own in output.widths]) is not None:
            padded |= set(names)
    return padded


def _advice(output: _Output, refused: list[SpaceName], *, remote: bool, own_code: bool) -> str:
    if remote:
        return "Choose another ratio, or a recipe that takes as much from every block"
    family = output.model.family
    lacking = [*spaces_without_stock_class(output.model, output.widths), *refused]
    if not lacking:
        bare = "take a compensation without a bias, as recipe ridge has"
        ways = bare if _slotless(family, output) else "take another --ratio"
        return f"{OWN_CODE}, or {ways}" if own_code else ways.capitalize()
    padded, others = "for a stock class that is filled up with zeros, which saves nothing there", list[str]()
    for name in lacking:
        multiple = family.multiples.get(family.spaces[name].units)
        if multiple is not None and not multiple.gated:
            hidden = output.model.dimension("hidden")
            rounds = f"--set spaces.{name}.multiple_of={hidden} rounds the {name} up to a stock width"
            # A part's widths are rounded by themselves: those that are not were given as numbers.
            stands_alone = output.model.checkpoint.within is None
            others.append(rounds if stands_alone else f"Multiples of {hidden} are stock widths of the {name}")
    for name in dict.fromkeys(map(recipe_space, refused)):
        others.append(f"--set spaces.{name}.ratio=0 leaves all {name} in place, and the source is fine as it is")
    whole = list(dict.fromkeys(map(recipe_space, lacking)))
    alone = [] if refused else _stock_without(output, whole)
    if alone:
        left = " ".join(f"--set spaces.{name}.ratio=0" for name in whole)
        others.append(f"{left} prunes {' and '.join(alone)} alone, which the stock class has room for")
    if own_code:
        return "; ".join([f"{OWN_CODE}, or --container padded {padded}", *others])
    return "; ".join([*others, f"{'' if others else 'Say '}--container padded {'is ' if others else ''}{padded}"])


def _stock_without(output: _Output, whole: list[SpaceName]) -> list[SpaceName]:
    """Return the spaces that can still be pruned if some stay whole, in a stock class; empty if there are none."""
    model = output.model
    widths = [
        {space: model.units(space, block) if recipe_space(space) in whole else kept for space, kept in each.items()}
        for block, each in enumerate(output.widths)
    ]
    others = list(dict.fromkeys(recipe_space(space) for space in output.pruned if recipe_space(space) not in whole))
    try:
        choose_container(model, widths, output.biases)
    except UserError:
        return []
    return others


# ---- configs -----------------------------------------------------------------------------------------------------


def _build(candidate: Family, output: _Output, *, remote: bool, reasons: list[str]) -> Container:
    model, first, family = output.model, output.first, output.model.family
    is_same = candidate.model_type == family.model_type
    values = copy.deepcopy(model.checkpoint.config) if is_same else _relabel(candidate, model)
    # Remote code of the source, if any, is not used and does not travel.
    values.pop("auto_map", None)
    values.pop(MLX_KEY, None)
    # Remote code reads the width of a multiple under a key that the stock class does not know.
    multiples = {
        name: max(model.unit_counts(name)) for name, each in family.spaces.items() if each.units in family.multiples
    }
    stated_otherwise = (space.fixed or space.units in family.multiples for space in family.spaces.values())
    has_own_keys = remote or not any(stated_otherwise)
    units = (multiples if remote else {}) | first
    changes = model.config_values(units) if has_own_keys else _stock_values(output)
    values = with_keys(values, {stored_key(key, values, model.config): value for key, value in changes.items()})
    if model.checkpoint.ignored:
        values |= {key: 0 for key in AHEAD_KEYS if values.get(key)}
    on_heads = [family.spaces[name] for name in first if family.attention.output in family.spaces[name].modules]
    if any(space.fixed is None for space in on_heads) or (remote and family.logits):
        values = with_keys(values, {candidate.head_key: model.dimension("head_dim")})
    switches, opened = _open_slots(candidate, output.biases)
    values = with_keys(values, switches)
    if not remote:
        note = None if is_same else f"stored as {candidate.model_type}: {'; '.join(reasons) or 'on request'}"
        return Container(candidate.model_type, values, None, opened, note, candidate.architecture)
    remote_class = f"{REMOTE_PREFIX}{candidate.architecture}"
    values["architectures"] = [remote_class]
    values["auto_map"] = {candidate.auto_class: f"{REMOTE_MODULE}.{remote_class}"}
    base = candidate.class_of("AutoModel")
    if base is not None:
        # vLLM, sentence-transformers and feature extraction load the base model.
        values["auto_map"]["AutoModel"] = f"{REMOTE_MODULE}.{REMOTE_PREFIX}{base}"
    values[BLOCKS_KEY] = block_facts(candidate, model.dimension)
    slotless = _slotless(candidate, output)
    if slotless:
        paths = module_paths(candidate)
        values["ckpt_prune_biases"] = [path for module in slotless for path in paths[module]]
    values |= _per_block_values(candidate, output, values)
    note = remote_note(candidate.model_type, reasons[0])
    return Container(candidate.model_type, values, remote_class, opened, note, candidate.architecture)


def _per_block_values(candidate: Family, output: _Output, values: dict[str, Any]) -> dict[str, Any]:
    """Config keys of remote code for widths and ranks that differ per block."""
    model, widths, ranks = output.model, output.widths, output.ranks
    added: dict[str, Any] = {}
    first = model.config_values(output.first)
    container = Container(candidate.model_type, values)
    if candidate.config_if_blocks_differ and (candidate.heads_divide_hidden or _refusal(container, model) is not None):
        # The class checks the number that all blocks have: it stays the dense one, and blocks override it.
        heads_key = candidate.dimensions["query_heads"][0]
        counted = [space.config for space in model.family.spaces.values() if heads_key in space.config]
        added = {key: getattr(model.config, key) for keys in counted for key in keys if key in first}
        first |= added
    overrides = {}
    for index, units in enumerate(widths):
        of_block = {space: kept for space, kept in units.items() if space not in model.family.pooling}
        changed: dict[str, Any] = {k: v for k, v in model.config_values(of_block).items() if v != first[k]}
        if ranks and ranks[index] != ranks[0]:
            changed[RANKS_KEY] = _ranks(candidate, ranks[index])
        if changed:
            overrides[str(index)] = changed
    if ranks:
        added[RANKS_KEY] = _ranks(candidate, ranks[0])
    if not overrides:
        return added
    # What a class itself says of single blocks stays, such as Gemma 4's heads.
    stated = values.get("per_layer_config") or model.config.to_dict().get("per_layer_config") or {}
    for index, own in stated.items():
        kept = {key: value for key, value in own.items() if key not in (*first, RANKS_KEY)}
        if kept or str(index) in overrides:
            overrides[str(index)] = kept | overrides.get(str(index), {})
    return added | candidate.config_if_blocks_differ | {"per_layer_config": overrides}


def _relabel(candidate: Family, model: Model) -> dict[str, Any]:
    """Return the source's config under another stock type: every shared key with its value, none left to a default."""
    config_keys = set(transformers.AutoConfig.for_model(candidate.model_type).to_dict()) | _BASE_KEYS
    values = {key: value for key, value in model.config.to_dict().items() if key in config_keys}
    values |= {"model_type": candidate.model_type, "architectures": [candidate.architecture]}
    values["head_dim"] = model.dimension("head_dim")
    values["num_key_value_heads"] = model.dimension("kv_heads")
    values |= {slot: False for slot in set(candidate.bias_slots.values()) if isinstance(slot, str)}
    if candidate.sliding_window:
        values[candidate.sliding_window] = None
    return values | candidate.config_as_stand_in


def _stock_values(output: _Output) -> dict[str, Any]:
    """Config keys and values of a stock class: none for spaces that stay whole, and multiples for its multiples."""
    model, pruned = output.model, {space: output.first[space] for space in output.pruned}
    values: dict[str, Any] = {**model.config_values(pruned)}
    for name in pruned:
        space = model.family.spaces[name]
        if space.units in model.family.multiples:
            (width_key,) = space.config
            ratio = stock_multiple(model, space.units, values.pop(width_key))
            assert ratio is not None
            values |= model.family.multiples[space.units].values(model.config, model.family.stage, ratio)
    return values


def _open_slots(candidate: Family, biases: Set[str]) -> tuple[dict[str, bool], frozenset[str]]:
    """Config keys to turn on for these biases, and every module that then has one."""
    keys = {slot for module, slot in candidate.bias_slots.items() if module in biases and isinstance(slot, str)}
    opened = {module for module, slot in candidate.bias_slots.items() if slot is True or slot in keys}
    return dict.fromkeys(keys, True), frozenset(opened | set(biases))


def _ranks(family: Family, ranks: Mapping[str, int]) -> dict[str, int]:
    """Ranks by the paths of the linear modules in a block."""
    paths = module_paths(family)
    return {path: rank for module, rank in ranks.items() for path in paths[module]}


def _with_padding(container: Container, padded: frozenset[SpaceName]) -> Container:
    if not padded:
        return container
    spaces = " and ".join(sorted(padded))
    note = f"{spaces} padded with zeros to the dense width for a stock class: nothing is saved there"
    return replace(container, padded=padded, note=f"{container.note}; {note}" if container.note else note)
