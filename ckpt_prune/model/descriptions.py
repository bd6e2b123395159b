"""Descriptions of families: one JSON file each (`families/*.json`), or one that comes from outside the package."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ckpt_prune.checkpoint.json_files import parse_json_object, read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.family import Family
from ckpt_prune.model.spaces import ENDS, make_rotary_space

OUTSIDE_KEY = "ckpt_prune_family"
"""Config key of a description from outside the package, as its file has it: outputs carry it to whoever opens them."""


def _folder() -> Any:
    return resources.files("ckpt_prune.model") / "families"


@cache
def known_families() -> tuple[str, ...]:
    """`model_type` of every family with a description, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json")))


@cache
def _unsupported() -> dict[str, str]:
    """`model_type` of families that spaces do not hold for → why."""
    file = resources.files("ckpt_prune.model") / "unsupported.json"
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


def refuse_unsupported(model_type: str) -> None:
    """Refuse a family that spaces do not hold for.

    Raises:
        UserError: with the reason.
    """
    why = _unsupported().get(model_type)
    if why is not None:
        raise UserError(f"{model_type} is not supported: {why}")


FUNCTION_KEYS = (
    "transposed",
    "spaces",
    "absent",
    "experts",
    "leading",
    "rope",
    "bias_slots",
    "sliding_window",
    "norm_offset",
    "residual",
    "unrotatable",
    "refused",
    "stand_ins",
    "variants",
)
"""Keys that say what function a model computes. A wrong name or size is noticed when a model is read; one of these that
is wrong changes what is computed without a word, so a file that extends another states or inherits each by name."""
UNINHERITED_KEYS = ("rotary", "unpaired", "settings")
"""Keys of the same kind that a file lacks unless it states or inherits them."""


def _description(model_type: str) -> dict[str, Any]:
    return _inherited(model_type, json.loads((_folder() / f"{model_type}.json").read_text(encoding="utf-8")))


def description_keys(model_type: str) -> frozenset[str]:
    """Keys that the description of a known family has, its own or taken over."""
    return frozenset(_description(model_type))


def _inherited(model_type: str, own: dict[str, Any]) -> dict[str, Any]:
    """A description with what it takes over from the one that it extends."""
    parent, inherits = own.pop("extends", None), own.pop("inherits", [])
    if parent is None and not inherits:
        return own
    whole = {} if parent is None else _description(parent)
    whole = {key: value for key, value in whole.items() if key not in UNINHERITED_KEYS or key in inherits}
    _check_inheritance(model_type, parent, whole, own, inherits)
    return whole | own


def _family(values: dict[str, Any], variant: str | None, **more: Any) -> Family:
    """A family from the keys of its description, with the variant that a config chooses."""
    variants = values.pop("variants", {})
    if variant is not None:
        changes = variants[variant]
        values |= changes | {"spaces": values["spaces"] | changes.get("spaces", {})}
    family = Family.model_validate(
        {"architecture": next(iter(values["architectures"])), "variant": variant, **values, **more}
    )
    if family.rotary is None:
        return family
    own = make_rotary_space(family.attention.query, family.attention.key, family.rotary.pairs, family.rotary.tables)
    return family.model_copy(update={"spaces": {"rotary": own, **family.spaces}})


@cache
def parse_family(outside: str, variant: str | None = None) -> Family:
    """The family of a description from outside the package, the first class named.

    Args:
        outside: JSON of the description.
        variant: as of `load_family`.

    Raises:
        UserError: it is not whole, or says what no description says; the key is named.
    """
    own = parse_json_object(outside.encode())
    name = own.get("model_type")
    if not isinstance(name, str) or not name:
        raise UserError("the description of a family has no model_type")
    parent = own.get("extends")
    if parent is not None and parent not in known_families():
        raise UserError(f"{name}.json extends {parent!r}, which is none of {', '.join(known_families())}")
    inherits = own.get("inherits", [])
    if not (isinstance(inherits, list) and all(isinstance(key, str) for key in inherits)):
        raise UserError(f'{name}.json has "inherits": {json.dumps(inherits)}, where a list of keys stands')
    values = _inherited(name, own)
    if not (isinstance(values.get("architectures"), dict) and values["architectures"]):
        raise UserError(f"{name}.json: architectures: an object of classes of transformers, one at least")
    if isinstance(values.get("spaces"), dict):
        # Whoever has sorted the keys of a config has sorted these.
        order = [*ENDS, *values["spaces"]]
        values["spaces"] = dict(sorted(values["spaces"].items(), key=lambda item: order.index(item[0])))
    try:
        return _family(values, variant, outside=outside)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{name}.json: {place}: {first['msg'][0].lower()}{first['msg'][1:]}") from error


def read_description(path: str | Path) -> str:
    """JSON of a description in a file, once it is known to be one.

    Raises:
        UserError: the file cannot be read, is no description, or describes a family of this package.
    """
    own = read_json_object(Path(path))
    try:
        family = parse_family(json.dumps(own))
    except UserError as error:
        raise UserError(f"--family {path}: {error}") from error
    if family.model_type in known_families():
        raise UserError(
            f"--family {path} describes {family.model_type}, a family that this version knows: leave --family out, or "
            "give its model_type another name where the model is another"
        )
    return family.outside or ""


def _check_inheritance(
    model_type: str, parent: str | None, whole: Mapping[str, Any], own: Mapping[str, Any], inherits: list[str]
) -> None:
    """Refuse a file that takes over a fact of the function computed without saying so.

    Raises:
        UserError: it does, or it names something that it does not take over.
    """
    open_ = [key for key in FUNCTION_KEYS if key in whole and key not in own and key not in inherits]
    if open_:
        raise UserError(
            f"{model_type}.json extends {parent} and does not say whether {', '.join(open_)} "
            f"{'is' if len(open_) == 1 else 'are'} the same: compare the two modeling files of transformers, then "
            f'write "inherits": {json.dumps([*inherits, *open_])}, or state those that differ'
        )
    known = (*FUNCTION_KEYS, *UNINHERITED_KEYS)
    wrong = [key for key in inherits if key in own or key not in known or key not in whole]
    if wrong:
        raise UserError(
            f'{model_type}.json has {wrong[0]} in "inherits", where only keys stand that its parent states and it '
            f"does not, of {', '.join(known)}"
        )


@cache
def load_family(model_type: str, variant: str | None = None) -> Family:
    """The description of a family as it stands in its file, the first class named.

    Args:
        model_type: of config.json.
        variant: a config key that is true and changes the description (`variants` in the file), or None.

    Raises:
        UserError: there is none; the message lists the known ones and says where a description goes.
    """
    refuse_unsupported(model_type)
    if model_type not in known_families():
        known = ", ".join(known_families())
        raise UserError(
            f"model_type {model_type!r} is not a family this version knows: `ckpt-prune inspect` says which one it is "
            f"like, --family takes a description of it; known are {known}"
        )
    return _family(_description(model_type), variant)


@cache
def variants_of(model_type: str) -> tuple[str, ...]:
    """Config keys that change a family's description where they are true."""
    return tuple(_description(model_type).get("variants", {})) if model_type in known_families() else ()


def family_for_config(config: dict[str, Any]) -> Family:
    """The description of a config's family as it stands in its file, with the variant that the config chooses."""
    model_type, outside = config["model_type"], config.get(OUTSIDE_KEY)
    if outside is None:
        return load_family(model_type, next((key for key in variants_of(model_type) if config.get(key)), None))
    text = json.dumps(outside)
    plain = parse_family(text)
    if plain.model_type != model_type:
        raise UserError(
            f"config.json of type {model_type} carries a description of {plain.model_type} ({OUTSIDE_KEY}): "
            "download it again"
        )
    variants = _inherited(model_type, parse_json_object(text.encode())).get("variants", {})
    return parse_family(text, next((key for key in variants if config.get(key)), None))


def has_description(config: Mapping[str, Any]) -> bool:
    """Whether there is a description of a config's family, in this package or in the config."""
    return config.get("model_type") in known_families() or config.get(OUTSIDE_KEY) is not None
