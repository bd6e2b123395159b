"""Opening a model that is to be measured or pruned."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import say_once
from ckpt_prune.model.composites import composite_names, extract_part, has_stacks, is_head_on_part
from ckpt_prune.model.containers.checking import check_stored
from ckpt_prune.model.containers.remote import remote_class
from ckpt_prune.model.descriptions import OUTSIDE_KEY, family_for_config, has_description, read_description
from ckpt_prune.model.matching import is_described, match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import parse_config
from ckpt_prune.model.supported import attach_description, check_model_type
from ckpt_prune.options.machine import OpeningOptions


@dataclass(frozen=True)
class Opening:
    """How a model is opened.

    Attributes:
        trust: accept a model that asks for code of its own; the code is not run.
        family: file of a description from outside the package.
        part: of a composite.
        packed: read weights of few bits that `quantize` wrote, in place of refusing them.
        goes_on: another part is pruned next, in the same call.
        whole: open a model with several stacks of blocks, or a head on a part of one that is made of several, as a
            whole, without a description: nothing is pruned.
        spaceless: open a class of which no space is proven, too: nothing is pruned.
        by_class: False where the description of a family will do in place of its class (`Checkpoint.by_class`).
    """

    trust: bool = False
    family: Path | None = None
    part: str | None = None
    packed: bool = False
    goes_on: bool = False
    whole: bool = False
    spaceless: bool = False
    by_class: bool = True

    @classmethod
    def of(cls, options: OpeningOptions, *, by_class: bool = True, goes_on: bool = False) -> "Opening":
        return cls(options.trust_remote_code, options.family, options.part, goes_on=goes_on, by_class=by_class)


def open_checkpoint(model: str, how: Opening | None = None) -> Checkpoint:
    """Open a folder or a Hub id to be measured or pruned.

    UserError if it is no checkpoint, asks for code and is not trusted, or if a given description does not hold.
    """
    how = how or Opening()
    checkpoint = Checkpoint.open(model, packed=how.packed)
    checkpoint = replace(checkpoint, config=apply_description(checkpoint.config, how.family))
    try:
        remote_class(checkpoint.config, checkpoint.path)
    except UserError as error:
        if not how.trust:
            raise UserError(f"{error}; where you have read and trust it, say --trust-remote-code") from error
        config = {key: value for key, value in checkpoint.config.items() if key != "auto_map"}
        checkpoint = replace(checkpoint, config=config)
    config = checkpoint.config
    if how.whole and (config.get("is_encoder_decoder") is True or has_stacks(config) or is_head_on_part(config)):
        return checkpoint
    if how.part is None:
        checkpoint = replace(checkpoint, config=describe_unknown(checkpoint.config, spaceless=how.spaceless))
        return checkpoint if how.by_class else replace(checkpoint, by_class=not is_described(checkpoint.config))
    if not has_stacks(checkpoint.config):
        check_stored(checkpoint, composite_names(checkpoint.config))
        return extract_part(checkpoint, how.part, spaceless=how.spaceless)
    part = extract_part(checkpoint, how.part, goes_on=how.goes_on, spaceless=how.spaceless)
    check_stored(part, composite_names(part.config))
    return part


def open_model(model: str, how: Opening | None = None) -> Model:
    """Open a model to be measured or pruned, as `open_checkpoint`."""
    return Model.of(open_checkpoint(model, how))


def open_fitted(model: str) -> Model:
    """Open a checkpoint whose weights are only rewritten, also under a config that pruning would refuse."""
    checkpoint, family = match_checkpoint(open_checkpoint(model))
    return Model(checkpoint, family, parse_config(checkpoint.config))


def describe_unknown(config: dict[str, Any], *, spaceless: bool = False) -> dict[str, Any]:
    """Return a config.json with the description of its class that `discovery` finds, if it has none.

    UserError if no space of it is proven, unless `spaceless`.
    """
    if has_description(config):
        return config
    check_model_type(config)
    from ckpt_prune.model.discovery.discover import discover

    discovery = discover(config, spaceless=spaceless)
    say_once(discovery.line(), of=f"spaces of {config['model_type']}")
    described = config | {OUTSIDE_KEY: discovery.description}
    # That keys state widths is proven on a small model, under the same config but for its sizes.
    why = "its description, which was found on a small model, does not hold for this config.json"
    _check(described, why, changes=False)
    return described


def apply_description(config: dict[str, Any], family: Path | None) -> dict[str, Any]:
    """Return a config.json with the description in a file, checked, if the config is of that family."""
    if family is None:
        return config
    described = attach_description(config, parse_json_object(read_description(family).encode()))
    if described is not config:
        _check(described, f"--family {family}")
    return described


def _check(described: dict[str, Any], what: str, *, changes: bool = True) -> None:
    from ckpt_prune.model.description_checks import check_description

    try:
        check_description(family_for_config(described), described, changes=changes)
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
