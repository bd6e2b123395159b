"""Keys of descriptions as earlier versions named them: outputs carry their description, and people keep files."""

from typing import Any

from ckpt_prune.common.errors import UserError

_NOW = {
    "applied": "multiplied_per_token",
    "shares": "times_in_config",
    "bare": "no_suffix",
    "uneven": "config_if_blocks_differ",
    "relabel": "config_as_stand_in",
    "usual": "cost_image_size",
    "unpaired": "no_rotary",
    "beside": "parallel",
    "turned": "transposed",
    "per": "for_each",
    "within": "part_of",
    "each": "lines_per_unit",
    "times": "repeats",
    "run": "repeated_units",
}
_GONE = ("ends", "raters", "ungrouped", "experts_per_group_score", "groups_ignored_if")
"""A space's name says its kind, and how a router rates groups of experts decides nothing."""
_NAMES_OF_OTHERS: tuple[str, ...] = ("architectures", "attributes", "bias_slots", "config", "derived", "dimensions")
_NAMES_OF_OTHERS += ("multiples", "multiplied_per_token", "reads", "times_in_config")
"""Keys that hold names of modules, classes, config keys or dimensions."""


def with_new_names(stated: Any) -> Any:
    """Return a description, or a part of one, under the names of this version; UserError if it has both of a key."""
    if isinstance(stated, list):
        return [with_new_names(each) for each in stated]
    if not isinstance(stated, dict):
        return stated
    for old in stated.keys() & _NOW.keys():
        if _NOW[old] in stated:
            raise UserError(f"the description of a family has {old} and {_NOW[old]}, its name now: leave {old} out")
    values = {_NOW.get(key, key): own for key, own in stated.items() if key not in _GONE}
    if values.get("latent") is True:  # of attention, whose keys were named after what is cached in their place
        values["latent"] = values["key"]
    values = {key: own if key in _NAMES_OF_OTHERS else with_new_names(own) for key, own in values.items()}
    if isinstance(values.get("inherits"), list):
        values["inherits"] = ["no_rotary" if key == "unpaired" else key for key in values["inherits"]]
    if isinstance(values.get("rotary"), dict) and "tables" in values["rotary"]:
        values["rotary"] = {"angles": values["rotary"].pop("tables"), **values["rotary"]}
    return values
