"""Containers: the `model_type` and config an output is stored under, so that transformers can load it.

See model/containers/README.md.

Stock first: the source's own type where its config can say the new shape, else a stock type that computes the same
function, else, where widths differ per block or on request, the source's type with self-contained remote code.
"""

import copy
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoConfig

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.blocks import block_facts, module_paths
from ckpt_prune.model.containers.container import Container, Ranks, Widths
from ckpt_prune.model.containers.remote import BLOCKS_KEY, RANKS_KEY, REMOTE_MODULE
from ckpt_prune.model.descriptions import load_family
from ckpt_prune.model.family import REMOTE_PREFIX, Family
from ckpt_prune.model.family_keys import Experts
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import RefusedConfigError, parse_config, quiet_transformers, stored_key
from ckpt_prune.model.spaces import SpaceName, first_expert_spaces, recipe_space

REMOTE, PADDED, ANY = "remote", "padded", "any"


def stock_multiple(model: Model, dimension: str, width: int) -> int | None:
    """The integer multiple of the hidden size that the config can say this width by, or None where there is none."""
    hidden, multiple = model.dimension("hidden"), model.family.multiples[dimension]
    for ratio in range(1, 4 * width // hidden + 2):
        if multiple.width(hidden, ratio) == width:
            return ratio
    return None


def spaces_without_stock_class(model: Model, widths: Widths, candidate: Family | None = None) -> dict[SpaceName, str]:
    """Spaces whose new width the stock class of a family, by default the model's own, cannot have, and why."""
    found: dict[SpaceName, str] = {}
    family = candidate or model.family
    for units in widths:
        for name in model.family.spaces:
            space = family.spaces.get(name)
            if space is None or units.get(name, model.units(name)) == model.units(name):
                continue
            if space.fixed is not None:
                found[name] = space.fixed.format(model_type=family.model_type)
            elif space.units in family.multiples and stock_multiple(model, space.units, units[name]) is None:
                multiple, hidden = family.multiples[space.units], model.dimension("hidden")
                dense = getattr(model.config, multiple.key)
                known = ", ".join(str(multiple.width(hidden, ratio)) for ratio in range(1, dense))
                found[name] = f"{family.model_type} knows only {name} widths of {known}, not {units[name]}"
    return found


def unprunable_spaces(model: Model) -> dict[SpaceName, str]:
    """Spaces of which no unit can go in any stock class, and why: by rules that no description has.

    The config classes are asked, once for a model.
    """
    if model not in _WHOLE:
        _WHOLE[model] = {}
        described = model.family.spaces
        for names in _apart(model, [name for name in described if described[name].whole is None]):
            units = model.units(names[0])
            if units > 1 and not spaces_without_stock_class(model, [dict.fromkeys(names, units - 1)]):
                refusals = (_rule(model, dict.fromkeys(names, count)) for count in range(units - 1, 0, -1))
                reason = next(refusals)
                if reason is not None and None not in refusals:
                    rope: Any = getattr(model.config, "rope_parameters", None) or {}
                    kind = f" with {rope['rope_type']}" if rope.get("rope_type", "default") != "default" else ""
                    keeps = f"this {model.family.model_type}{kind} keeps all its {recipe_space(names[0])}: {reason}"
                    _WHOLE[model] |= dict.fromkeys(names, keeps)
    return _WHOLE[model]


_WHOLE: "WeakKeyDictionary[Model, dict[SpaceName, str]]" = WeakKeyDictionary()


def _apart(model: Model, spaces: Iterable[SpaceName]) -> list[list[SpaceName]]:
    """Spaces by the config keys that say their widths, which those of experts and of `Family.together` share."""
    described, groups = model.family.spaces, dict[str, list[SpaceName]]()
    for name in spaces:
        units = described[name].units
        groups.setdefault(units if units in model.family.together else recipe_space(name), []).append(name)
    return list(groups.values())


def _rule(model: Model, units: Mapping[SpaceName, int]) -> str | None:
    """Why every stock class refuses blocks of so many units, in the words of the first; None where one does not."""
    reasons = []
    for candidate in [model.family, *map(load_family, model.family.stand_ins)]:
        reason = _obstacle(candidate, model, [units], frozenset(), remote_code=False, slotless_ok=True)
        if reason is None:
            reason = _refusal(_build(candidate, model, [units], frozenset(), remote=False, reasons=[]), model)
        reasons.append(reason)
    return None if None in reasons else reasons[0]


def _refusal(container: Container, model: Model) -> str | None:
    """Why transformers refuses a container's config, in its own words; None where it does not."""
    try:
        with quiet_transformers():
            parse_config(container.config)
    except RefusedConfigError as error:
        keys = {key for space in model.family.spaces.values() for key in space.config}
        changed = {key: container.config[key] for key in keys & container.config.keys()}
        changed = {key: value for key, value in changed.items() if value != model.checkpoint.config.get(key)}
        shape = " and ".join(f"{key} {changed[key]}" for key in sorted(changed)) or "a narrower stream"
        name = type(model.config).__name__ if container.model_type == model.family.model_type else container.model_type
        return f"{name} of transformers refuses {shape} ({error.rule.rstrip('.')})"
    return None


def _stock_values(model: Model, units: Mapping[SpaceName, int]) -> dict[str, int]:
    """Config keys and values of a stock class: none for what stays whole, and multiples where it has them."""
    pruned = {space: count for space, count in units.items() if count < model.units(space)}
    values = model.config_values(pruned)
    for name in pruned:
        space = model.family.spaces[name]
        if space.units in model.family.multiples:
            (width_key,) = space.config
            ratio = stock_multiple(model, space.units, values.pop(width_key))
            assert ratio is not None
            values[model.family.multiples[space.units].key] = ratio
    return values


def _obstacle(
    candidate: Family,
    model: Model,
    widths: Widths,
    biases: Set[str],
    *,
    remote_code: bool,
    slotless_ok: bool,
) -> str | None:
    """Why a family cannot hold the output, or None."""
    source = model.family
    if not remote_code:
        reasons = spaces_without_stock_class(model, widths, candidate)
        if reasons:
            return "; ".join(reasons.values())
    hidden = model.dimension("hidden")
    heads = {model.config_values(w).get(source.dimensions["query_heads"][0]) for w in widths} - {None}
    uneven = sorted(h for h in heads if h is not None and hidden % h)
    refuses = candidate.heads_divide_hidden and not (remote_code and candidate.uneven)
    if refuses and uneven:
        return f"{candidate.model_type} refuses {uneven[0]} heads on a hidden size of {hidden}"
    if refuses and len(heads) > 1:
        return f"{candidate.model_type} refuses head counts that differ per block"
    slotless = sorted(module for module in biases if module not in candidate.bias_slots)
    if slotless and not slotless_ok:
        return f"{candidate.model_type} has no slot for a bias on {', '.join(slotless)}"
    if candidate is not source and model.uses_sliding_window:
        return f"{candidate.model_type} is not offered for a model with sliding-window attention"
    return None


def _why_remote(candidates: list[Family], model: Model, widths: Widths, biases: Set[str], *, uneven: bool) -> str:
    """Why an output carries code of its own."""
    if uneven:
        return "blocks differ in width"
    obstacles = [_obstacle(each, model, widths, biases, remote_code=False, slotless_ok=False) for each in candidates]
    stock_fits = None in obstacles
    return "on request" if stock_fits else str(obstacles[0])


def _open_slots(candidate: Family, biases: Set[str]) -> tuple[dict[str, bool], frozenset[str]]:
    """Config keys to turn on for these biases, and every module that then has one."""
    keys = {slot for module, slot in candidate.bias_slots.items() if module in biases and isinstance(slot, str)}
    opened = {module for module, slot in candidate.bias_slots.items() if slot is True or slot in keys}
    return dict.fromkeys(keys, True), frozenset(opened | set(biases))


_BASE_KEYS = frozenset({"dtype", "torch_dtype"})


def _relabelled(candidate: Family, model: Model) -> dict[str, Any]:
    """The source's config under another stock type: every shared key with its value, none left to a default."""
    full = model.config.to_dict()
    target = AutoConfig.for_model(candidate.model_type)
    known = set(target.to_dict())
    values = {key: value for key, value in full.items() if key in known | _BASE_KEYS}
    values |= {"model_type": candidate.model_type, "architectures": [candidate.architecture]}
    values["head_dim"] = model.dimension("head_dim")
    values["num_key_value_heads"] = model.dimension("kv_heads")
    for slot in set(candidate.bias_slots.values()):
        if isinstance(slot, str):
            values[slot] = False
    if candidate.sliding_window:
        values[candidate.sliding_window] = None
    return values | candidate.relabel


def choose_container(
    model: Model,
    widths: Widths,
    biases: Set[str],
    *,
    requested: str = "auto",
    per_layer: bool = False,
    ranks: Ranks = (),
) -> Container:
    """Find the container for an output.

    Args:
        model: the source.
        widths: units kept per block and space.
        biases: linear modules of a block that need a bias: those the source has, and those compensation adds.
        requested: auto (stock, or remote where widths differ), any (stock, or remote where no stock one fits), padded,
            remote, or a model_type to force.
        per_layer: whether the recipe accepts widths that differ per block, and with them remote code.
        ranks: of linear modules that two thin ones stand in for: only remote code has these.

    Raises:
        UserError: nothing fits; the message says why each candidate does not, and what to do.
    """
    family = model.family
    given, widths = widths, widths[model.spaced_blocks.start :]
    for own in widths:
        _check_alike(model, own)
        for name, first in first_expert_spaces(own).items():
            if len({count for space, count in own.items() if recipe_space(space) == name}) > 1:
                raise UserError(
                    f"experts of a block would differ in {name}, where every class has them of one width: say "
                    "allocation: uniform or least-error"
                )
            if family.spaces[first].experts and set(family.spaces[first].modules) & set(biases):
                raise UserError(
                    f"experts of a {family.model_type} have no biases: choose a compensation of {name} without one"
                )
        stay = next((own[space] for space in family.expert_spaces if space in own), None)
        chosen = 0 if family.experts is None else int(getattr(model.config, family.experts.chosen))
        if stay is not None and family.experts is not None and stay < chosen:
            raise UserError(
                f"{stay} of {model.dimension(family.experts.count)} experts would stay, and the router sends every "
                f"token to {chosen} ({family.experts.chosen} in config.json): keep as many"
            )
        if stay is not None and family.experts is not None:
            _check_groups(model, family.experts, stay, chosen)
    uneven = any(dict(w) != dict(widths[0]) for w in widths)
    if uneven and not per_layer:
        raise UserError(
            "blocks would differ in width, which no stock model can load: say widths: per_layer in the recipe "
            "to accept remote code"
        )
    if requested == ANY and not uneven:
        try:
            return choose_container(model, given, biases, per_layer=per_layer)
        except NothingFitsError:
            return choose_container(model, given, biases, requested=REMOTE, per_layer=per_layer)
    if uneven and requested not in ("auto", ANY, REMOTE):
        raise UserError(f"container {requested} cannot hold blocks of different widths: only remote can")
    padded: frozenset[SpaceName] = frozenset()
    if requested == PADDED:
        padded = frozenset(spaces_without_stock_class(model, widths))
        for names in _apart(model, [name for name in widths[0] if name not in padded]):
            if _rule(model, {name: widths[0][name] for name in names}) is not None:
                padded |= set(names)
        widths = [{s: model.units(s) if s in padded else n for s, n in w.items()} for w in widths]
    remote = uneven or requested == REMOTE
    names = [family.model_type, *family.stand_ins]
    if requested not in ("auto", ANY, REMOTE, PADDED):
        if requested not in names:
            known = ", ".join([*names, REMOTE, ANY])
            raise UserError(f"container {requested!r} cannot hold a {family.model_type}: {known} or {PADDED} can")
        names = [requested]
    reasons: list[str] = []
    candidates = []
    for name in names:
        counterpart = None if name == family.model_type else load_family(name).class_of(family.auto_class)
        if name == family.model_type:
            candidates.append(family)
        elif counterpart is not None:
            candidates.append(load_family(name).of(counterpart))
        else:
            reasons.append(f"{name} has no class for {family.purpose}")
    whole: list[SpaceName] = []
    # A stock type with all the slots is preferred even as the base of remote code; one without them comes last.
    for lacking_slots in (False, True) if remote else (False,):
        for candidate in candidates:
            reason = _obstacle(candidate, model, widths, biases, remote_code=remote, slotless_ok=lacking_slots)
            if reason is None:
                if remote:
                    reasons = [_why_remote(candidates, model, widths, biases, uneven=uneven)]
                made = _build(candidate, model, widths, biases, remote=remote, reasons=reasons, ranks=ranks)
                reason = _refusal(made, model)
                if reason is None:
                    return _with_padding(made, padded)
                whole = [s for s in unprunable_spaces(model) if widths[0].get(s, model.units(s)) < model.units(s)]
                reason = unprunable_spaces(model)[whole[0]] if whole and candidate is family else reason
            if not lacking_slots:
                reasons.append(reason)
    advice = "Choose a compensation without a bias, another ratio, or container: remote for remote code"
    if remote:
        advice = "Choose another ratio, or a recipe that takes as much from every block"
    lacking = [*spaces_without_stock_class(model, widths), *whole]
    if lacking and not remote:
        advice = (
            "Say container: remote to accept self-contained remote code, or container: padded to fill up with zeros, "
            "which saves nothing there"
        )
        for name in lacking:
            multiple = family.multiples.get(family.spaces[name].units)
            if multiple is not None and not multiple.gated:
                hidden = model.dimension("hidden")
                advice += f"; --set spaces.{name}.multiple_of={hidden} rounds the {name} up to a stock width"
        for name in dict.fromkeys(map(recipe_space, whole)):
            advice += f"; --set spaces.{name}.ratio=0 leaves all {name} in place, and the source is fine as it is"
    raise NothingFitsError(reasons, advice)


def _check_groups(model: Model, experts: Experts, stay: int, chosen: int) -> None:
    """Refuse a number of experts that the router's groups cannot have.

    Raises:
        UserError: with the numbers that they can.
    """
    count, sent = experts.grouping(model.config)
    least = max(experts.raters, -(-chosen // sent)) * count
    if count > 1 and (stay % count or stay < least):
        key = next(iter(experts.groups))
        raise UserError(
            f"{stay} experts would stay, which the router takes in {count} groups ({key} in config.json) and sends "
            f"every token to {chosen} experts of {sent} of them: keep a multiple of {count}, {least} at the least"
        )


def _check_alike(model: Model, units: Mapping[SpaceName, int]) -> None:
    """Refuse spaces of different widths that one config key says together (experts and shared ones).

    Raises:
        UserError: naming them.
    """
    family = model.family
    by_key: dict[str, dict[SpaceName, int]] = {}
    for name, first in first_expert_spaces(family.spaces).items():
        space = family.spaces[first]
        for key in space.config if space.units in family.together else ():
            by_key.setdefault(key, {})[name] = units.get(first, model.units(first))
    for key, own in by_key.items():
        if len(set(own.values())) > 1:
            told = " and ".join(f"{count} of {name}" for name, count in own.items())
            raise UserError(
                f"one key of config.json ({key}) says how wide {' and '.join(own)} of a {family.model_type} are, and "
                f"{told} would stay: prune both, by the same ratio and rounding (allocation: uniform)"
            )


class NothingFitsError(UserError):
    """No stock class can hold an output.

    Args:
        reasons: why each candidate cannot.
        advice: what to do.
    """

    def __init__(self, reasons: list[str], advice: str) -> None:
        super().__init__(f"no stock container fits: {'; '.join(dict.fromkeys(reasons))}. {advice}")
        self.reasons = reasons


def remote_note(model_type: str, why: str) -> str:
    """What to tell the user of an output with remote code."""
    return f"stored as {model_type} with remote code ({why}): load with ckpt_prune.load or trust_remote_code"


def _with_padding(container: Container, padded: frozenset[SpaceName]) -> Container:
    if not padded:
        return container
    spaces = " and ".join(sorted(padded))
    note = f"{spaces} padded with zeros to the dense width for a stock class: nothing is saved there"
    return replace(container, padded=padded, note=f"{container.note}; {note}" if container.note else note)


def _ranks(family: Family, ranks: Mapping[str, int]) -> dict[str, int]:
    """Ranks by the paths of the linear modules in a block."""
    paths = module_paths(family)
    return {path: rank for module, rank in ranks.items() for path in paths[module]}


def _build(
    candidate: Family,
    model: Model,
    widths: Widths,
    biases: Set[str],
    *,
    remote: bool,
    reasons: list[str],
    ranks: Ranks = (),
) -> Container:
    family = model.family
    same = candidate.model_type == family.model_type
    values = copy.deepcopy(model.checkpoint.config) if same else _relabelled(candidate, model)
    # Remote code of the source, if any, is not used and does not travel.
    values.pop("auto_map", None)
    own_keys = remote or not any(space.fixed for space in family.spaces.values())
    # Remote code reads the width of a multiple under a key that the stock class knows nothing of, and may be there.
    multiples = {name: model.units(name) for name, each in family.spaces.items() if each.units in family.multiples}
    said = (multiples if remote else {}) | dict(widths[0])
    changes = model.config_values(said) if own_keys else _stock_values(model, widths[0])
    values |= {stored_key(key, values, model.config): value for key, value in changes.items()}
    if family.ahead is not None and model.checkpoint.ignored:
        ahead = stored_key(family.ahead, values, model.config)
        if ahead in values:
            values[ahead] = 0
    whole = [family.spaces[name] for name in widths[0] if family.attention.output in family.spaces[name].modules]
    decoupled = any(space.fixed is None for space in whole)
    if decoupled or (remote and family.logits):
        values["head_dim"] = model.dimension("head_dim")
    switches, opened = _open_slots(candidate, biases)
    values |= switches
    note = None if same else f"stored as {candidate.model_type}: {'; '.join(reasons) or 'on request'}"
    if not remote:
        return Container(candidate.model_type, values, None, opened, note, candidate.architecture)
    remote_class = f"{REMOTE_PREFIX}{candidate.architecture}"
    values["architectures"] = [remote_class]
    values["auto_map"] = {candidate.auto_class: f"{REMOTE_MODULE}.{remote_class}"}
    base = candidate.class_of("AutoModel")
    if family.used_for == "sentence-similarity" and base is not None:
        # sentence-transformers loads the base model, also of a class with a head.
        values["auto_map"]["AutoModel"] = f"{REMOTE_MODULE}.{REMOTE_PREFIX}{base}"
    values[BLOCKS_KEY] = block_facts(candidate, model.dimension)
    slotless = sorted(module for module in biases if module not in candidate.bias_slots)
    if slotless:
        paths = module_paths(candidate)
        values["ckpt_prune_biases"] = [path for module in slotless for path in paths[module]]
    overrides = {}
    first = model.config_values(widths[0])
    made = Container(candidate.model_type, values)
    if candidate.uneven and (candidate.heads_divide_hidden or _refusal(made, model) is not None):
        # The class checks the number that all blocks have: it stays the dense one, and every other is a block's own.
        numbers = [candidate.dimensions[name][0] for name in ("query_heads", "kv_heads")]
        dense = {key: getattr(model.config, key) for key in numbers if key in first}
        first |= dense
        values |= dense
    for index, units in enumerate(widths, model.spaced_blocks.start):
        own: dict[str, Any] = {k: v for k, v in model.config_values(units).items() if v != first[k]}
        if ranks and ranks[index] != ranks[0]:
            own[RANKS_KEY] = _ranks(candidate, ranks[index])
        if own:
            overrides[str(index)] = own
    if ranks:
        values[RANKS_KEY] = _ranks(candidate, ranks[0])
    if overrides:
        values |= candidate.uneven | {"per_layer_config": overrides}
    note = remote_note(candidate.model_type, reasons[0])
    return Container(candidate.model_type, values, remote_class, opened, note, candidate.architecture)
