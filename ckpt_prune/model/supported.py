"""Which family a checkpoint is of, and whether this version can read it, by its config.json alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.json_files import parse_json_object, read_json_object
from ckpt_prune.checkpoint.quantised import refuse_quantised
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.composites import known_composites, load_composite
from ckpt_prune.model.descriptions import (
    OUTSIDE_KEY,
    family_for_config,
    has_description,
    known_families,
    load_family,
    read_description,
    refuse_unsupported,
)
from ckpt_prune.model.family import REMOTE_PREFIX, Family

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def is_timm(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is timm's, or of transformers' wrapper of it."""
    named = isinstance(config.get("architecture"), str) and not {"num_classes", "pretrained_cfg"}.isdisjoint(config)
    return named and config.get("model_type", "timm_wrapper") == "timm_wrapper"


def declared_family(config: dict[str, Any]) -> Family:
    """The family of a checkpoint's config.json.

    Raises:
        UserError: no `model_type`, a mixture of experts, or an unknown family.
    """
    check_model_type(config)
    family = family_for_config(config)
    declared = next(iter(config.get("architectures") or []), "")
    declared = declared.removeprefix(REMOTE_PREFIX)
    return family.of(declared if family.has_class(declared) else family.architecture)


def check_supported(
    model: str, family: str | Path | None = None, part: str | None = None, *, unknown: bool = False
) -> None:
    """Refuse a folder of no known family by its config.json alone, before anything large is imported.

    What else may be wrong is found where the folder is read. A Hub id passes, as does a config that asks for code of
    its own.

    Args:
        model: the folder.
        family: file of a description from outside the package.
        part: of a composite that is asked for.
        unknown: let a family pass that there is no description of.

    Raises:
        UserError: as `family_of`, `described_by` and `Composite.part`.
    """
    outside = None if family is None else parse_json_object(read_description(family).encode())
    try:
        config = read_json_object(Path(model) / "config.json")
    except (OSError, UserError):
        return
    # First, so that nobody makes a plain copy of what is refused all the same.
    refuse_unsupported(str(config.get("model_type")))
    refuse_quantised(Path(model), config)
    if part is not None:
        load_composite(str(config.get("model_type"))).part(part)
        return
    if "auto_map" in config:
        return
    config = config if outside is None else attach_description(config, outside)
    check_model_type(config)
    if has_description(config) or not unknown:
        family_for_config(config)


def attach_description(config: dict[str, Any], outside: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that carries a description, where it is of that model_type and has none of its own."""
    if config.get("model_type") != outside["model_type"] or OUTSIDE_KEY in config:
        return config
    return config | {OUTSIDE_KEY: outside}


def check_model_type(config: Mapping[str, Any]) -> None:
    """Refuse a config of a model that no description can be of.

    Raises:
        UserError: it has no `model_type`, is of a composite, or of a mixture of experts.
    """
    model_type = config.get("model_type")
    if is_timm(config):
        raise UserError(
            f"this is timm's {config['architecture']}: `ckpt-prune convert MODEL -o OUT` writes it as a vit or deit of "
            "transformers where one computes the same"
        )
    if not isinstance(model_type, str):
        raise UserError("config.json has no model_type, so the family of this checkpoint is unknown")
    if model_type in known_composites() and not (model_type in known_families() or OUTSIDE_KEY in config):
        raise UserError(load_composite(model_type).advice)
    refuse_unsupported(model_type)
    experts = next((key for key in _EXPERT_KEYS if config.get(key)), None)
    if experts and (model_type not in known_families() or load_family(model_type).experts is None):
        known = ", ".join(known_families())
        raise UserError(
            f"this checkpoint is a mixture of experts ({experts} in config.json), which is not supported; "
            f"known families: {known}; a description goes in ckpt_prune/model/families/"
        )
