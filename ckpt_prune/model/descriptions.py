"""Reads descriptions of families: one JSON file each (`families/*.json`), or one from outside the package."""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ckpt_prune.checkpoint.json_files import parse_json_object, read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.similar_names import did_you_mean
from ckpt_prune.model.family import Family
from ckpt_prune.model.old_names import with_new_names
from ckpt_prune.model.short_forms import complete_description, merge_descriptions
from ckpt_prune.model.spaces import KIND_OF_SPACE, StrictModel

OUTSIDE_KEY = "ckpt_prune_family"
"""Config key of a description from outside the package, as in its file: outputs carry it to whoever opens them."""
_DEPTHS = ("depths", "depth")
"""Config keys that list how many blocks each stage of a model of images has."""
_FIRST_PART = r".+?(?=For[A-Z]|Model$)"
"""The beginning that the names of all classes of a family share, such as Roberta in RobertaForMaskedLM."""
FUNCTION_KEYS = (
    "transposed",
    "spaces",
    "absent",
    "experts",
    "rope",
    "bias_slots",
    "sliding_window",
    "norm_offset",
    "residual",
    "unrotatable",
    "refused",
    "variants",
)
"""Keys that say what function a model computes. A wrong name or size is noticed when a model is read; a wrong value of
these silently changes what is computed, so a file that extends another states each of them or inherits it by name."""
UNINHERITED_KEYS = ("rotary", "no_rotary", "settings", "stand_ins", "heads_divide_hidden")
"""Keys of the same kind that a file lacks unless it states them or inherits them by name."""


def _folder() -> Any:
    return resources.files("ckpt_prune.model") / "families"


@cache
def known_families() -> tuple[str, ...]:
    """Return the `model_type` of every family with a description, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json")))


def families_with_experts() -> list[str]:
    """Return the known families that are mixtures of experts."""
    return [name for name in known_families() if load_family(name).experts is not None]


@cache
def _read_unsupported() -> dict[str, str]:
    reasons: dict[str, str] = json.loads((_folder().parent / "unsupported.json").read_text(encoding="utf-8"))
    return reasons


def refuse_unsupported(model_type: str) -> None:
    """Refuse a family that spaces cannot describe, with the reason."""
    why = _read_unsupported().get(model_type)
    if why is not None:
        raise UserError(f"{model_type} is not supported: {why}")


def _description(model_type: str) -> dict[str, Any]:
    """Return the description of a known family; its file, named after it, says no config key of its own by default."""
    stated = json.loads((_folder() / f"{model_type}.json").read_text(encoding="utf-8"))
    return {"settings": [], **_inherit(model_type, {"model_type": model_type, **stated})}


def description_keys(model_type: str) -> frozenset[str]:
    """Return the keys that the description of a known family has, inherited ones included."""
    return frozenset(_description(model_type))


def _inherit(model_type: str, stated: dict[str, Any]) -> dict[str, Any]:
    """Return a description with the keys of the one that it extends."""
    parent, inherits = stated.pop("extends", None), stated.pop("inherits", [])
    if parent is None and not inherits:
        return stated
    inherited = {} if parent is None else _description(parent)
    inherited = {key: value for key, value in inherited.items() if key not in UNINHERITED_KEYS or key in inherits}
    _check_inheritance(model_type, parent, inherited, stated, inherits)
    if "spaces" in stated and "spaces" not in inherits:
        inherited.pop("spaces", None)
    before, now = (f"{values.get('base')}." for values in (inherited, inherited | stated))
    inherited, classes = _rename(inherited, before, now), stated.get("architectures")
    if parent is not None and isinstance(classes, str):
        of_parent = inherited["architectures"].items()
        stated["architectures"] = {re.sub(_FIRST_PART, classes, name, count=1): own for name, own in of_parent}
    return merge_descriptions(inherited, stated, "dimensions", "spaces")


def _rename(value: Any, before: str, now: str) -> Any:
    """Return what a file inherits, with the paths of the parent's base model as those of its own."""
    if isinstance(value, dict):
        return {key: _rename(own, before, now) for key, own in value.items()}
    if isinstance(value, list):
        return [_rename(own, before, now) for own in value]
    return now + value.removeprefix(before) if isinstance(value, str) and value.startswith(before) else value


def _check_inheritance(
    model_type: str, parent: str | None, taken: Mapping[str, Any], stated: Mapping[str, Any], inherits: list[str]
) -> None:
    """Refuse a file that takes over a fact of the function without saying so, or inherits a key wrongly."""
    unsaid = [key for key in FUNCTION_KEYS if key in taken and key not in stated and key not in inherits]
    if unsaid:
        raise UserError(
            f"{model_type}.json extends {parent} and does not say whether {', '.join(unsaid)} "
            f"{'is' if len(unsaid) == 1 else 'are'} the same: compare the two modeling files of transformers, then "
            f'write "inherits": {json.dumps([*inherits, *unsaid])}, or state those that differ'
        )
    inheritable = (*FUNCTION_KEYS, *UNINHERITED_KEYS)
    wrong = [
        key for key in inherits if (key in stated and key != "spaces") or key not in inheritable or key not in taken
    ]
    if wrong:
        raise UserError(
            f'{model_type}.json has {wrong[0]} in "inherits", which takes only keys that its parent states and it '
            f"does not, of {', '.join(inheritable)}"
        )


def _family(values: dict[str, Any], variant: str | None, **more: Any) -> Family:
    variants = values.pop("variants", {})
    if variant is not None:
        values = merge_descriptions(values, variants[variant], "dimensions", "attention", "spaces")
    values = complete_description(values)
    architecture = next(iter(values["architectures"]))
    return Family.model_validate({"architecture": architecture, "variant": variant, **values, **more})


@cache
def parse_family(outside: str, variant: str | None = None) -> Family:
    """Return the family of a description from outside the package, with the first class named.

    Args:
        outside: JSON of the description.
        variant: as of `load_family`.
    """
    stated = with_new_names(parse_json_object(outside.encode()))
    name = stated.get("model_type")
    if not isinstance(name, str) or not name:
        raise UserError("the description of a family has no model_type")
    parent = stated.get("extends")
    if parent is not None and parent not in known_families():
        raise UserError(f"{name}.json extends {parent!r}, which is not one of {', '.join(known_families())}")
    inherits = stated.get("inherits", [])
    if not (isinstance(inherits, list) and all(isinstance(key, str) for key in inherits)):
        raise UserError(f'{name}.json has "inherits": {json.dumps(inherits)}: write a list of keys')
    values = _inherit(name, stated)
    if not (isinstance(values.get("architectures"), dict) and values["architectures"]):
        raise UserError(f"{name}.json: architectures: write an object with one class of transformers at least")
    if isinstance(values.get("spaces"), dict):
        # Whoever sorted the keys of a config has sorted these.
        order = [*KIND_OF_SPACE, *values["spaces"]]
        values["spaces"] = dict(sorted(values["spaces"].items(), key=lambda item: order.index(item[0])))
    try:
        return _family(values, variant, outside=outside)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, message = ".".join(map(str, first["loc"])), f"{first['msg'][0].lower()}{first['msg'][1:]}"
        if first["type"] == "extra_forbidden":
            message = f"unknown key; {did_you_mean(str(first['loc'][-1]), _known_keys())}".rstrip("; ")
        raise UserError(f"{name}.json: {place}: {message}") from error


@cache
def _known_keys() -> list[str]:
    """Return all keys of descriptions, at any depth."""
    models: list[type[StrictModel]] = [StrictModel]
    for model in models:
        models += model.__subclasses__()
    return sorted({key for model in models if model.__module__.startswith(__package__) for key in model.model_fields})


def read_description(path: str | Path) -> str:
    """Return the JSON of a description in a file, once it is valid and of no family of this package."""
    stated = read_json_object(Path(path))
    if stated.get("model_type") in known_families():
        raise UserError(
            f"--family {path} describes {stated['model_type']}, a family that this version knows: leave --family out, "
            "or give its model_type another name if the model is another"
        )
    try:
        return parse_family(json.dumps(stated)).outside or ""
    except UserError as error:
        raise UserError(f"--family {path}: {error}") from error


@cache
def load_family(model_type: str, variant: str | None = None) -> Family:
    """Return the description of a family as in its file, with the first class named.

    Args:
        variant: a config key that is true and changes the description (`variants` in the file), or None.
    """
    refuse_unsupported(model_type)
    if model_type not in known_families():
        raise UserError(
            f"model_type {model_type!r} is not one of the {len(known_families())} families that this version knows, "
            "and carries no description"
        )
    return _family(_description(model_type), variant)


@cache
def variants_of(model_type: str) -> tuple[str, ...]:
    """Return the config keys that change a family's description if they are true."""
    return tuple(_description(model_type).get("variants", {})) if model_type in known_families() else ()


def family_for_config(config: dict[str, Any]) -> Family:
    """Return the description of a config's family, with the variant that the config chooses and the first class."""
    model_type, outside = config["model_type"], config.get(OUTSIDE_KEY)
    if outside is None:
        return load_family(model_type, next((key for key in variants_of(model_type) if config.get(key)), None))
    text = json.dumps(outside)
    described_type = parse_family(text).model_type
    if described_type != model_type:
        raise UserError(
            f"config.json of type {model_type} carries a description of {described_type} ({OUTSIDE_KEY}): "
            "download it again"
        )
    variants = _inherit(model_type, with_new_names(parse_json_object(text.encode()))).get("variants", {})
    return parse_family(text, next((key for key in variants if config.get(key)), None))


def has_description(config: Mapping[str, Any]) -> bool:
    """Return whether this package or the config has a description of the config's family."""
    return config.get("model_type") in known_families() or config.get(OUTSIDE_KEY) is not None


def text_key(config: Mapping[str, Any]) -> str | None:
    """Return the key of the config of the model of text inside another; None if a config.json has none."""
    has_stacks = all(isinstance(config.get(key), Mapping) for key in ("encoder", "decoder"))  # TrOCR
    return "text_config" if isinstance(config.get("text_config"), Mapping) else "decoder" if has_stacks else None


def count_stages(config: Mapping[str, Any]) -> int:
    """Return how many stages of blocks the config.json of a model of images lists; 0 of any other."""
    depths: list[int] = next((config[key] for key in _DEPTHS if isinstance(config.get(key), list)), [])
    is_described = config.get("model_type") in known_families() or "stage" not in config.get(OUTSIDE_KEY, {"stage": 0})
    return 0 if is_described else len(depths)
