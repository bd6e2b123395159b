"""Which family a checkpoint is of, and whether this version can read it, by its config.json alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.json_files import parse_json_object, read_json_object
from ckpt_prune.checkpoint.model_folder import fetch_config
from ckpt_prune.checkpoint.quantised import refuse_quantised
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.composites import is_composite, load_composite
from ckpt_prune.model.descriptions import (
    OUTSIDE_KEY,
    families_with_experts,
    family_for_config,
    has_description,
    known_families,
    load_family,
    read_description,
    refuse_unsupported,
)
from ckpt_prune.model.family import REMOTE_PREFIX, Family

NO_MODEL_TYPE = (
    "config.json has no model_type, so the family of this checkpoint is unknown: give a folder that transformers has "
    "written, or add the key"
)

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def is_timm(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is timm's, or of transformers' wrapper of timm."""
    is_named = isinstance(config.get("architecture"), str) and not {"num_classes", "pretrained_cfg"}.isdisjoint(config)
    return is_named and config.get("model_type", "timm_wrapper") == "timm_wrapper"


def declared_family(config: dict[str, Any]) -> Family:
    """Return the family of a config.json, with the class that it names if the family has that."""
    check_model_type(config)
    family = family_for_config(config)
    declared = next(iter(config.get("architectures") or []), "").removeprefix(REMOTE_PREFIX)
    return family.of(declared if family.has_class(declared) else family.architecture)


def check_supported(model: str, family: str | Path | None = None, part: str | None = None) -> None:
    """Refuse a folder that cannot be read by its config.json alone, before anything large is imported.

    Other faults are found when the folder is read. A Hub id passes, as do a config that asks for code of its own, and a
    family without a description, whose class `discovery` looks at.

    Args:
        family: file of a description from outside the package.
        part: of a composite.
    """
    outside = None if family is None else parse_json_object(read_description(family).encode())
    config = read_local_config(model)
    if not config:
        return
    # First, so that nobody makes a plain copy of a model that is refused all the same.
    refuse_unsupported(str(config.get("model_type")))
    refuse_quantised(Path(model), config)
    if part is not None:
        load_composite(config).part(part)
        return
    if "auto_map" in config:
        return
    config = config if outside is None else attach_description(config, outside)
    check_model_type(config)
    if has_description(config):
        family_for_config(config)


def read_local_config(model: str) -> dict[str, Any]:
    """Return the config.json of a folder; nothing if there is none that can be read, as of a Hub id."""
    try:
        return read_json_object(Path(model) / "config.json")
    except (OSError, UserError):
        return {}


def read_model_config(model: str) -> dict[str, Any]:
    """Return the config.json of a folder or a Hub id; nothing if there is none that can be read.

    Whoever opens the model says what is wrong.
    """
    try:
        return read_local_config(str(fetch_config(model)))
    except UserError:
        return {}


def attach_description(config: dict[str, Any], outside: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with a description for its model_type added; as it is if it has one, or another type."""
    if config.get("model_type") != outside["model_type"] or OUTSIDE_KEY in config:
        return config
    return config | {OUTSIDE_KEY: outside}


def check_model_type(config: Mapping[str, Any]) -> None:
    """Refuse a config that no description can be of: without `model_type`, of timm, or a composite."""
    model_type = config.get("model_type")
    if is_timm(config):
        raise UserError(
            f"this is timm's {config['architecture']}: `ckpt-prune convert MODEL -o OUT` writes it as a vit or deit of "
            "transformers if one computes the same"
        )
    if not isinstance(model_type, str):
        raise UserError(NO_MODEL_TYPE)
    if is_composite(config) and not (model_type in known_families() or OUTSIDE_KEY in config):
        raise UserError(load_composite(config).advice)
    if OUTSIDE_KEY not in config:
        refuse_unsupported(model_type)
    experts = next((key for key in _EXPERT_KEYS if config.get(key)), None)
    if experts and model_type in known_families() and load_family(model_type).experts is None:
        raise UserError(
            f"config.json of type {model_type} has {experts}, and a {model_type} has no experts: take one of "
            f"{', '.join(families_with_experts())}"
        )
