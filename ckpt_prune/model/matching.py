"""Finds the class of its family that a checkpoint holds, and reads its tensors as that class names them."""

import re
from collections.abc import Mapping, Set
from typing import Any

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.sentence_modules import find_sentence_use
from ckpt_prune.checkpoint.shard import Stack
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.descriptions import OUTSIDE_KEY, family_for_config, has_description
from ckpt_prune.model.family import REMOTE_PREFIX, Family
from ckpt_prune.model.skeleton import Names, is_stored_buffer, parse_config, stock_names
from ckpt_prune.model.supported import declared_family
from ckpt_prune.model.ties import TIE_KEY, apply_ties, ties_on_disk
from ckpt_prune.model.width_switches import with_stated_widths


def match_family(checkpoint: Checkpoint) -> Family:
    """Return the checkpoint's family with the class that has a place for every tensor, and with the tensors' prefix.

    Some published checkpoints hold more than the class that config.json names (bert-base-uncased names BertForMaskedLM
    and holds BertForPreTraining), others lack the prefix of their base model. The named class is taken if it fits, and
    also if nothing fits, so that later errors speak of it. An embedder that stores no head is its base model, which is
    what sentence-transformers loads.
    """
    declared = declared_family(checkpoint.config)
    names = {name for name in checkpoint.tensors if not is_stored_buffer(name)}
    family = family_for_config(checkpoint.config)
    candidates = [declared, *(family.of(name) for name in family.architectures if name != declared.architecture)]
    used_for = find_sentence_use(checkpoint.path) if checkpoint.within is None else None
    base = family.class_of("AutoModel") if used_for == "sentence-similarity" else None
    candidates = [*([] if base is None else [family.of(base)]), *candidates]
    candidates = [candidate.model_copy(update={"used_for": used_for}) for candidate in candidates]
    named = str(next(iter(checkpoint.config.get("architectures") or []), "")).removeprefix(REMOTE_PREFIX)
    is_unknown_class = bool(named) and not family.has_class(named)
    if len(candidates) == 1 and not is_unknown_class:
        return _with_prefix(candidates[0], names)
    for candidate in candidates:
        if _fits(candidate, checkpoint, names):
            return _with_prefix(candidate, names)
    if is_unknown_class:
        raise UserError(
            f"{checkpoint.path}: config.json names {named}, which is not a known class of {family.model_type}; known "
            f"are {', '.join(family.classes)}"
        )
    return _with_prefix(next(each for each in candidates if each.architecture == declared.architecture), names)


def is_described(config: Mapping[str, Any]) -> bool:
    """Return whether a description tells by itself what the tensors of a checkpoint are.

    It does in families of one class, without experts, and where files hold no more than that class loads.
    """
    if not has_description(config) or OUTSIDE_KEY in config or config.get("auto_map"):
        return False
    family = family_for_config(dict(config))
    named = {name.removeprefix(REMOTE_PREFIX) for name in config.get("architectures") or []}
    return (
        family.has_causal
        and named <= family.architectures.keys()
        and len(family.architectures) == 1
        and family.experts is None
    )


def tied_by_description(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    """Return `ties.ties_on_disk` by the description: a head that the config ties to the embedding."""
    is_tied = getattr(parse_config(checkpoint.config), TIE_KEY, False)
    if not is_tied or family.head is None or family.embedding is None:
        return {}
    return {f"{family.head}.weight": family.embedding_weight}


def orient_checkpoint(checkpoint: Checkpoint, family: Family) -> Checkpoint:
    """Return the checkpoint as the package sees it: every weight of a block's linear modules is (outputs, inputs).

    Weights of Conv1D modules are transposed, and stacks of experts are split, and turned where their class turns them
    as it loads them, here and nowhere else. Experts may also be stored as transformers has them in memory
    (`save_pretrained(…, save_original_format=False)`): all gates and ups in one tensor, all last projections in
    another. Outputs are written with the names and shapes of the input. Tensors that the class ignores
    (`Names.ignores`) are left out, and tied tensors are read as the class loads them. The config states widths.
    """
    experts, checkpoint = family.experts, with_stated_widths(checkpoint, family)
    checkpoint = checkpoint.ignore(_list_ignored(checkpoint, family))
    checkpoint = apply_ties(checkpoint, _ties(checkpoint, family))
    if not family.transposed and experts is None:
        return checkpoint
    block = re.escape(family.block).replace(re.escape("{block}"), r"\d+")
    matches = [(n, match[1], match[2]) for n in checkpoint.tensors if (match := re.fullmatch(f"({block})(.+)", n))]
    stacks: dict[str, Stack] = {}
    aliases: dict[str, str] = {}
    if experts is not None:
        held = experts.held
        rows = experts.stacks | held
        for name, prefix, rest in matches:
            if rest in rows:
                count = checkpoint.tensors[name].shape[0]
                parts = (f"{prefix}{part.format(expert=e)}" for e in range(count) for part in rows[rest])
                stacks[name] = Stack(tuple(parts), len(rows[rest]))
        if any(rest in held for *_, rest in matches):
            aliases = _aliases(checkpoint, family, stacks.keys())
    turned = (name for name, _, rest in matches if rest.removesuffix(".weight") in family.transposed)
    names = _stock_names(checkpoint, family) if stacks else None
    turned_stacks = [
        stack
        for name, stack in stacks.items()
        if (experts is not None and experts.transposed)
        or (stack.each == 1 and names is not None and names.is_turned(name, checkpoint.tensors[name].shape))
    ]
    checkpoint = checkpoint.transpose(turned).split(stacks).rename(aliases)
    return checkpoint.transpose(part for stack in turned_stacks for part in stack.parts if part.endswith(".weight"))


def match_checkpoint(checkpoint: Checkpoint) -> tuple[Checkpoint, Family]:
    """Return a checkpoint as the package sees it (`orient_checkpoint`), and its family with the config's spaces."""
    family = match_family(checkpoint)
    with_spaces = family if family.experts is None else family.with_config(parse_config(checkpoint.config))
    return orient_checkpoint(checkpoint, family), with_spaces


def _ties(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    """Return tied tensors as its family's class loads them."""
    if checkpoint.config.get("auto_map") or not checkpoint.by_class:
        return tied_by_description(checkpoint, family)
    names = _stock_names(checkpoint, family)
    return {} if names is None else ties_on_disk(checkpoint, names, family.on_disk)


def _stock_names(checkpoint: Checkpoint, family: Family) -> Names | None:
    """Names of the stock class; None if it cannot be built (whoever builds it next reports why)."""
    try:
        return stock_names(checkpoint.config, family.architecture)
    except UserError:
        return None


def _list_ignored(checkpoint: Checkpoint, family: Family) -> list[str]:
    is_asked = checkpoint.by_class and not checkpoint.config.get("auto_map")
    names = _stock_names(checkpoint, family) if is_asked else None
    if names is None:
        return []
    return [name for name in checkpoint.tensors if not is_stored_buffer(name) and names.ignores(name)]


def _aliases(checkpoint: Checkpoint, family: Family, others: Set[str]) -> dict[str, str]:
    """Published name → name on disk, for tensors stored under the names that transformers has in memory."""
    names = stock_names(checkpoint.config, family.architecture)
    in_memory = names.model.state_dict().keys() - names.shapes.keys() - others
    return {names.saved_as(name): name for name in sorted(in_memory & checkpoint.tensors.keys())}


def _fits(family: Family, checkpoint: Checkpoint, tensors: set[str]) -> bool:
    names = _stock_names(checkpoint, family)
    return names is not None and all(names.parameters(tensor) or names.ignores(tensor) for tensor in tensors)


def _with_prefix(family: Family, names: set[str]) -> Family:
    """Return the family with the prefix that the tensors of its base model have on disk."""
    for prefixed in (family.prefixed, not family.prefixed):
        candidate = family.model_copy(update={"prefixed": prefixed})
        block = candidate.on_disk(family.block)
        if any(name.startswith(block.format(block=0)) for name in names):
            return candidate.model_copy(update={"block": block})
    return family
