"""Composites: models made of others, one JSON description each (`composites/*.json`), of which a part can be pruned.

A part is opened as a checkpoint of its own (`extract_part`), and written back into the whole (`merge_part_config`).
The two stacks of an encoder-decoder are parts as well, each within the class of the whole: `encoder_decoders.json`
lists these by type. Descriptions are read without torch and transformers.
"""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import say_once
from ckpt_prune.model.descriptions import (
    FUNCTION_KEYS,
    OUTSIDE_KEY,
    count_stages,
    description_keys,
    known_families,
    load_family,
    parse_family,
    text_key,
    variants_of,
)
from ckpt_prune.model.spaces import SpaceName, StrictModel
from ckpt_prune.options.machine import PartName

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ckpt_prune.checkpoint.checkpoint import Checkpoint
    from ckpt_prune.model.family import Family
    from ckpt_prune.model.skeleton import Names


_OF_STACKS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
SEEING = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")
"""Auto classes of models that read images with text: these hand their tower what an image processor makes."""
_STACK = "it is calibrated on pairs of a source and its target, which both stacks read as in training"


class Part(StrictModel):
    """A model inside another.

    Attributes:
        config: key of its config in that of the whole; None if the whole's config is the part's too.
        family: the family whose stock class computes the same; by default that of its own `model_type`.
        described: the description of its family, if no `model_type` is that of the part alone.
        auto: Auto class of the stock class that it is read as.
        modules: module of the whole → module of the stock class; "" for all of it.
        drops: config key → keys inside it that the stock class must not see; none for the key itself.
        keeps: spaces that stay whole, each with the reason.
        note: what a user must know of its calibration.
        alone: why it cannot be calibrated on text alone; None if it can.
        stack: of several stacks of blocks, of an encoder-decoder or of a model of images in stages, which of them it
            is; its class is that of the whole then.
    """

    config: str | None = None
    family: str | None = None
    described: dict[str, Any] | None = None
    auto: str
    modules: dict[str, str]
    drops: dict[str, list[str]] = Field(default_factory=dict)
    keeps: dict[SpaceName, str] = Field(default_factory=dict)
    note: str
    alone: str | None = None
    stack: PartName | None = None

    def outer_name(self, inner: str) -> str:
        """Return the name in the whole of a module inside the part's stock class."""
        if self.stack is not None:
            return inner
        for outer, own in self.modules.items():
            if not own or inner == own or inner.startswith(f"{own}."):
                path = inner.removeprefix(own).removeprefix(".")
                return f"{outer}.{path}" if path else outer
        raise ValueError(f"{inner} is of no module of the part")


class Composite(StrictModel):
    """A model made of others: its stock class, the Auto class that loads it, and its parts.

    `classes` are heads on one of its parts, with their Auto classes and that part. `refused` has the parts that cannot
    be pruned, each with the reason.
    """

    model_type: str
    architecture: str
    auto: str
    classes: dict[str, tuple[str, PartName]] = Field(default_factory=dict)
    parts: dict[PartName, Part] = Field(default_factory=dict)
    refused: dict[PartName, str] = Field(default_factory=dict)

    def part(self, name: str) -> Part:
        """Return a part by name; UserError if there is none, or if it cannot be pruned."""
        parts: Mapping[Any, Part] = self.parts
        refused: Mapping[Any, str] = self.refused
        if name in parts:
            return parts[name]
        if name in refused:
            raise UserError(f"--part {name} of {self.model_type} cannot be pruned: {refused[name]}")
        raise UserError(f"{self.model_type} has no part {name}, but {' or '.join([*parts, *refused])}")

    @property
    def advice(self) -> str:
        """The error for someone who names no part."""
        if "decoder" in self.parts:
            return f"{self.model_type} has two stacks of blocks: --part encoder or --part decoder names one"
        if "stage1" in self.parts:
            stages = f"blocks in {len(self.parts)} stages of their own widths"
            takers = "prune, calibrate, plan and inspect take one (--part stage1)"
            return f"{self.model_type} has {stages}: {takers}, and verify, evaluate, benchmark and export take them all"
        if self.parts:
            return f"{self.model_type} is made of several models: --part {' or --part '.join(self.parts)} prunes one"
        why = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return f"{self.model_type} is made of several models, and none of them can be pruned ({why})"


def _folder() -> Any:
    return resources.files("ckpt_prune.model") / "composites"


@cache
def known_composites() -> tuple[str, ...]:
    """Return the `model_type` of every composite with a description, sorted."""
    files = {f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json")}
    return tuple(sorted(files | encoder_decoders().keys()))


@cache
def encoder_decoders() -> dict[str, str]:
    """Return the stock class of every type of encoder-decoder whose stacks can be pruned."""
    file = resources.files("ckpt_prune.model") / "encoder_decoders.json"
    listed: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return listed


def is_composite(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model made of several."""
    model_type = config.get("model_type")
    if model_type in encoder_decoders():
        return is_encoder_decoder(config)
    is_described = model_type in known_families() or OUTSIDE_KEY in config
    is_made_of_several = text_key(config) is not None or count_stages(config) > 0
    return model_type in known_composites() or (not is_described and is_made_of_several)


def has_parts(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a composite, or of a model of text with the config of a tower in it (GIT)."""
    has_tower = isinstance(config.get("vision_config"), Mapping) and OUTSIDE_KEY not in config
    return is_composite(config) or (has_tower and config.get("model_type") not in known_families())


def has_stacks(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a model with several stacks of blocks, of which each has the whole config."""
    return is_encoder_decoder(config) or (is_composite(config) and count_stages(config) > 0)


def takes_all(config: Mapping[str, Any]) -> bool:
    """Return whether all parts of a model are pruned and printed unless one is named: stacks, also those of Whisper."""
    return has_stacks(config) or "decoder" in all_parts(config)


def is_head_on_part(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a composite's class that has one of its parts, and a head on that."""
    if not is_composite(config):
        return False
    composite = load_composite(config)
    return composite.architecture in composite.classes


def load_composite(config: Mapping[str, Any]) -> Composite:
    """Return the description of the composite that a config.json is of, shipped or found; UserError if there is none.

    A shipped description is chosen by `model_type`. A config that names a head on one of its parts has that part alone.
    """
    model_type = config.get("model_type")
    if model_type in known_composites():
        composite, named = shipped_composite(str(model_type)), next(iter(config.get("architectures") or []), "")
        if named not in composite.classes:
            return composite
        auto, part = composite.classes[named]
        alone = {"architecture": named, "auto": auto, "parts": {part: composite.part(part)}, "refused": {}}
        return composite.model_copy(update=alone)
    return _found_composite(json.dumps(config))


@cache
def _found_composite(config: str) -> Composite:
    from ckpt_prune.model.discovery.parts import find_composite

    return Composite.model_validate(find_composite(json.loads(config)))


@cache
def shipped_composite(model_type: str) -> Composite:
    """Return the description of one of `known_composites`."""
    if model_type in encoder_decoders():
        auto = "AutoModelForSeq2SeqLM"
        stacks: tuple[PartName, ...] = ("encoder", "decoder")
        parts: dict[PartName, Part] = {name: Part(auto=auto, modules={}, note=_STACK, stack=name) for name in stacks}
        return Composite(model_type=model_type, architecture=encoder_decoders()[model_type], auto=auto, parts=parts)
    stated = json.loads((_folder() / f"{model_type}.json").read_text(encoding="utf-8"))
    return Composite.model_validate({"model_type": model_type, **stated})


def all_parts(config: Mapping[str, Any]) -> tuple[PartName, ...]:
    """Return the parts that `--part all` names, in the order in which they are pruned."""
    model_type = str(config.get("model_type"))
    if count_stages(config):
        return tuple(load_composite(config).parts)
    is_shipped = model_type in known_composites() and is_composite(config)
    has_decoder = is_shipped and "decoder" in shipped_composite(model_type).parts
    return ("encoder", "decoder") if has_decoder else ("vision", "text")


def text_part(config: Mapping[str, Any]) -> PartName | None:
    """Return the part of a composite that may generate text; None if the model is no composite, or has no such part.

    UserError if it does not run by itself.
    """
    if not is_composite(config) or "text" not in all_parts(config):
        return None
    part = load_composite(config).parts.get("text")
    if part is not None and part.alone is not None:
        raise UserError(f"the text part of {config['model_type']} does not run by itself: {part.alone}")
    return "text"


def asked_parts(config: Mapping[str, Any], part: str | None) -> tuple[str | None, ...]:
    """Return the parts that `--part` names, with all for its default of a model with several stacks of blocks."""
    if part == "all" or (part is None and takes_all(config)):
        return all_parts(config)
    return (part,)


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of an encoder-decoder as a whole: BartForCausalLM has one stack alone."""
    architecture, named = encoder_decoders().get(str(config.get("model_type"))), config.get("architectures")
    return (
        architecture is not None and (named[0] if isinstance(named, list) and named else architecture) == architecture
    )


def composite_names(config: Mapping[str, Any]) -> "Names":
    """Return what the stock class of a composite saves and loads."""
    from ckpt_prune.model.skeleton import stock_names

    return stock_names(dict(config), load_composite(config).architecture)


def head_of_whole(part: "Checkpoint") -> str | None:
    """Return the name on disk of the head by which a whole predicts tokens of what its text part makes.

    None if the checkpoint is no such part. A head that is the embedding is not stored.
    """
    if part.within is None or part.within.part != "text":
        return None
    names = composite_names(part.within.whole.config)
    model: Any = names.model
    head = model.get_output_embeddings()
    path = None if head is None else next(path for path, each in model.named_modules() if each is head)
    return None if path is None else names.saved_as(f"{path}.weight")


def extract_part(whole: "Checkpoint", name: str, *, goes_on: bool = False, spaceless: bool = False) -> "Checkpoint":
    """Return a part of a composite as the checkpoint of a stock class, under that class's names and config.

    The config carries a description of the part: that of its family without the containers and the spaces that the
    whole's own class has no room for. `goes_on` is as in `PartOf`, `spaceless` as in `discover`.
    """
    from ckpt_prune.checkpoint.checkpoint import PartOf
    from ckpt_prune.model.skeleton import convert_as_whole, parse_config, stock_names
    from ckpt_prune.model.ties import apply_ties, ties_on_disk

    composite = load_composite(whole.config)
    part = composite.part(name)
    names = composite_names(whole.config)
    whole = apply_ties(whole, ties_on_disk(whole, names))
    if part.auto == "AutoModelForCausalLM":  # blocks that predict further tokens have the widths of the part's
        whole = whole.ignore([stored for stored in whole.tensors if names.ignores(stored)])
    config = _part_config(part, parse_config(whole.config))
    if part.stack is None:
        _refuse_split_experts(whole, name, part, names)
        convert_as_whole(str(whole.config["model_type"]), str(config["model_type"]))
    if part.described is None and config["model_type"] not in known_families():
        from ckpt_prune.model.discovery.discover import Stack, discover
        from ckpt_prune.model.discovery.parts import find_class

        if part.stack is None:
            alone = next((outer for outer, inner in part.modules.items() if not inner), None)
            module = None if alone is None else names.model.get_submodule(alone)
            own = find_class(config["model_type"], [part.auto])[1] if module is None else type(module).__name__
            config["architectures"] = [own]

        stack = None if part.stack is None else Stack(composite.architecture, composite.auto, part.stack)
        found = discover(config, stack, spaceless=spaceless)
        say_once(found.line(name), of=f"spaces of {config['model_type']}, {name}")
        described = (
            _keep_fixed(found.description) if stack is None else _agree(found.description, config, composite, name)
        )
        part = part.model_copy(update={"described": described})
    config["architectures"] = [_stock_class(config, part)]
    stock = stock_names(config, config["architectures"][0])
    config[OUTSIDE_KEY] = _description(config, part)
    stored_as: dict[str, str] = {}
    held: dict[str, list[str]] = {}  # parameter of the part → tensors of the whole that it is made of
    known, inside = stock.model.state_dict(), names.model.state_dict()
    if part.described is not None and part.auto == "AutoModel" and "" in part.modules.values():
        lacking = next((inner for inner in known if part.outer_name(inner) not in inside), None)
        if lacking is not None:
            alone = f"by itself {config['architectures'][0]} has {lacking}, too, and computes something else"
            raise UserError(f"--part {name} of {composite.model_type} cannot be pruned: {alone}")
    for stored in whole.tensors:
        for parameter in names.parameters(stored):
            inner = _inner_name(part, parameter)
            if inner is not None and inner in known:
                held.setdefault(inner, []).append(stored)
    for inner, parts in held.items():
        disks = [disk for disk in stock.shapes if inner in stock.parameters(disk)]
        if len(parts) == 1:  # what the part's own class would store in parts (experts) is named as it is in memory
            disks = [inner] if len(disks) > 1 and stock.is_part(disks[0]) else [stock.saved_as(inner)]
        if len(disks) != len(parts):
            apart = f"{inner} is {len(parts)} tensors in it and {len(disks)} in {config['architectures'][0]}"
            raise UserError(f"--part {name} of {composite.model_type} cannot be read by itself: {apart}")
        stored_as |= zip(sorted(disks), sorted(parts), strict=True)
    tensors = {inner: replace(whole.tensors[stored], name=inner) for inner, stored in stored_as.items()}
    other_prefixes: tuple[str, ...] = ()
    if part.stack is not None:
        family = parse_family(json.dumps(config[OUTSIDE_KEY]))
        widths = _shared_widths(family, tensors, parse_config(config))
        other_prefixes = _other_prefixes(family, part.stack, tensors) if widths else ()
        config |= widths
    within = PartOf(whole, name, part.config or "", stored_as, other_prefixes, goes_on)
    return replace(whole, config=config, tensors=tensors, within=within)


def _refuse_split_experts(whole: "Checkpoint", name: str, part: Part, names: "Names") -> None:
    """Refuse a part whose experts stand in one list with others, in files that do not say which are whose."""
    from ckpt_prune.model.skeleton import EXPERT

    for stored in whole.tensors:
        held = names.parameters(stored) if EXPERT.search(stored) else ()
        if len(held) > 1 and _inner_name(part, held[0]) is not None:
            first, second = (each.rpartition(".")[0] for each in held[:2])
            others = [f"--part {other}" for other in load_composite(whole.config).parts if other != name]
            raise UserError(
                f"--part {name} of {whole.config['model_type']} cannot be pruned: its files number the experts of "
                f"{first} and {second} in one list ({stored}), which cannot be taken apart"
                + (f"; {' or '.join(others)} can be pruned" if others else "")
            )


def _keep_fixed(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a part, with heads whole that only own code has fewer of: parts have none."""
    spaces = dict(description["spaces"])
    if (why := spaces.get("heads", {}).get("fixed")) is not None:
        spaces["heads"] = {**spaces["heads"], "whole": why.format(model_type=description["model_type"])}
    return description | {"spaces": spaces}


def _agree(description: dict[str, Any], config: Mapping[str, Any], composite: Composite, stack: str) -> dict[str, Any]:
    """Return the description of a stack, with spaces whole whose width is also that of some of others that stay so."""
    family = parse_family(json.dumps(description))
    shared = {name: space for name, space in family.consumers.items() if family.shares_width(space)}
    if family.stage is not None or not shared:
        return description
    counted = [
        {key for space in other.consumers.values() for key in space.config}
        for other in _stacks_beside(config, composite, stack)
    ]
    spaces = dict(description["spaces"])
    for name, space in shared.items():
        if not all(keys >= space.config.keys() for keys in counted):
            why = f"{next(iter(space.config))} counts those of both stacks, and those of the other stay whole"
            spaces[name] = {**spaces[name], "whole": why}
    return description | {"spaces": spaces}


def stacks_beside(checkpoint: "Checkpoint") -> "list[Family]":
    """Return families of the other stacks of an encoder-decoder that has a width in common with them; none else."""
    within = checkpoint.within
    if within is None or not within.other_prefixes or not is_encoder_decoder(within.whole.config):
        return []
    config = {key: value for key, value in checkpoint.config.items() if key != OUTSIDE_KEY}
    return _stacks_beside(config, load_composite(within.whole.config), within.part)


def _stacks_beside(config: Mapping[str, Any], composite: Composite, stack: str) -> "list[Family]":
    """Return the families of all stacks of a model but one."""
    from ckpt_prune.model.discovery.discover import Stack, discover

    stacks = (Stack(composite.architecture, composite.auto, name) for name in composite.parts if name != stack)
    return [parse_family(json.dumps(discover(config, stack).description)) for stack in stacks]


def whole_of_stack(checkpoint: "Checkpoint") -> "Checkpoint":
    """Return the encoder-decoder that a checkpoint is a stack of, or the checkpoint if it is none."""
    within = checkpoint.within
    if within is None or load_composite(within.whole.config).auto not in _OF_STACKS:
        return checkpoint
    return within.whole


def _shared_widths(family: "Family", tensors: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return config keys of widths that stacks share, as wide as this one is: the others may be pruned already."""
    values: dict[str, Any] = {}
    for space in family.consumers.values():
        if family.shares_width(space):
            width = tensors[family.tensor(0, space.consumer)].shape[1]
            multiple = family.multiples.get(space.units)
            units = width // space.columns.per_unit(lambda name: family.dimension(config, name))
            values |= dict.fromkeys(space.config, units)
            if multiple is not None:
                values = {multiple.key: multiple.ratio(family.dimension(config, "hidden"), width)}
    return values


def _other_prefixes(family: "Family", stack: str, tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """Return first parts of the names of other stacks' blocks."""
    prefix = family.blocks_prefix
    if family.stage is None:
        return (prefix.replace(stack, "decoder" if stack == "encoder" else "encoder"),)
    before, _, after = prefix.rpartition(f".{family.stage}.")
    pattern = re.compile(rf"{re.escape(before)}\.\d+\.{re.escape(after)}")
    prefixes = {match[0] for name in tensors if (match := pattern.match(name)) is not None}
    return tuple(sorted(prefixes - {prefix}))


def merge_part_config(part: "Checkpoint", config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole's config.json with what `config` changes in that of a part.

    Args:
        part: as `extract_part` returns it.
        config: of the part, as it is to be.
    """
    from ckpt_prune.model.ties import TIE_KEY

    within = part.within
    assert within is not None
    merged = copy.deepcopy(within.whole.config)
    inner = merged.get(within.key)
    place = inner if isinstance(inner, dict) else merged  # old files have the text model's keys beside the others
    is_stack = load_composite(within.whole.config).part(within.part).stack is not None
    heads = ("num_attention_heads", "num_key_value_heads")
    derived = {key: value for key, value in part.stated.items() if key != TIE_KEY}  # widths, and what switches them
    before = {**part.config, **derived}
    for key, value in list(place.items()):  # names of a width that its class takes away (LFM2's block_ff_dim)
        if key not in part.config and type(value) is int and value in derived.values():
            del place[key]
    if is_stack or not within.key:  # its config is the whole's, and may count fewer blocks already
        named = {key: merged[key] for key in ("architectures",) if key in merged}
        _merge_stack(place, {**config, **named}, before)
        return merged
    for key, value in config.items():
        is_same = key in before and before[key] == value
        # A derived width of heads stays derived if no head goes.
        is_derived = key == "head_dim" and all(part.config.get(each) == config.get(each) for each in heads)
        if not is_same and not is_derived:
            place[key] = value
    return merged


def _merge_stack(place: dict[str, Any], config: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Put into a whole's config.json, in place, what is another value in that of a stack than it was before.

    The whole's may have fewer blocks already.
    """
    for key, value in config.items():
        if isinstance(place.get(key), dict) and isinstance(value, dict):
            _merge_stack(place[key], value, before.get(key, {}))
        elif key in place or key not in before or before[key] != value:
            place[key] = value


def _part_config(part: Part, config: "PreTrainedConfig") -> dict[str, Any]:
    nested = config if part.config is None else getattr(config, part.config)
    if nested is None:
        raise UserError(f"this {config.model_type} has no {part.config}: its blocks are its own, and no part of it is")
    values: dict[str, Any] = nested.to_dict()
    model_type = part.family or values["model_type"]
    values["model_type"] = model_type
    if part.auto == "AutoModelForCausalLM":
        values["tie_word_embeddings"] = bool(getattr(config, "tie_word_embeddings", False))
    for key, dropped in part.drops.items():
        if not dropped:
            values.pop(key, None)
        elif isinstance(values.get(key), dict):
            values[key] = {inner: value for inner, value in values[key].items() if inner not in dropped}
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "transformers_version")}


def _stock_class(config: Mapping[str, Any], part: Part) -> str:
    if part.described is not None:
        return str(next(iter(part.described["architectures"])))
    import transformers

    family = load_family(config["model_type"])
    for name, architecture in family.architectures.items():
        if architecture.auto == part.auto and hasattr(transformers, name):
            return name
    raise UserError(f"the description of {family.model_type} has no class for {part.auto}")


def _description(config: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Return the description of the part's family without what the whole has no room for."""
    if part.described is not None:
        return part.described
    model_type = config["model_type"]
    variant = next((key for key in variants_of(model_type) if config.get(key)), None)
    family = load_family(model_type, variant)
    kept = {name: {"whole": why} for name, why in {**_own_code_alone(family), **part.keeps}.items()}
    stated = {"model_type": model_type, "spaces": kept, "stand_ins": []}
    taken = [key for key in (*FUNCTION_KEYS, "rotary") if key in description_keys(model_type)]
    return {"extends": model_type, "inherits": taken, **stated}


def _own_code_alone(family: "Family") -> dict[SpaceName, str]:
    """Return spaces of a described family whose width own code alone can state, which parts have none of, and why."""
    fixed = {name: space.fixed for name, space in family.consumers.items() if space.fixed is not None}
    reasons = {name: why.format(model_type=family.model_type) for name, why in fixed.items()}
    return reasons | dict.fromkeys(family.logits, "no stock class has queries and keys narrower than values")


def _inner_name(part: Part, parameter: str) -> str | None:
    """Return the name in the part's stock class of a parameter of the whole; None if the part does not have it."""
    if part.stack is not None:
        return parameter
    for outer, inner in part.modules.items():
        if parameter.startswith(f"{outer}."):
            path = parameter.removeprefix(f"{outer}.")
            return f"{inner}.{path}" if inner else path
    return None
