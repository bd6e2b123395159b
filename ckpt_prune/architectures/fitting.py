"""Which class of its family a checkpoint holds, by its tensors."""

import re

from ckpt_prune.architectures.descriptions import described
from ckpt_prune.architectures.family import Family
from ckpt_prune.architectures.skeleton import is_stored_buffer, parse_config, stock_names
from ckpt_prune.architectures.supported import family_of
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.errors import UserError


def fitting_family(checkpoint: Checkpoint) -> Family:
    """The checkpoint's family with the class that has a place for every tensor, and with the prefix its tensors have.

    Some published checkpoints hold more than the class they name (bert-base-uncased names BertForMaskedLM and holds
    BertForPreTraining), others lack the prefix of their base model. What config.json names is taken where it fits,
    and where nothing does, so that errors speak of it.
    """
    declared = family_of(checkpoint.config)
    names = {name for name in checkpoint.tensors if not is_stored_buffer(name)}
    if len(declared.architectures) == 1:
        return _prefixed(declared, names)
    family = described(checkpoint.config)
    others = [family.of(name) for name in family.architectures if name != declared.architecture]
    for candidate in [declared, *others]:
        if _fits(candidate, checkpoint, names):
            return _prefixed(candidate, names)
    return _prefixed(declared, names)


def oriented(checkpoint: Checkpoint, family: Family) -> Checkpoint:
    """The checkpoint as the whole package sees it: every weight of a block's linear modules is (outputs, inputs).

    Here is the one border that a family whose files hold transposes of them (Conv1D) has, or stacks of experts.
    """
    stacks = {} if family.experts is None else family.experts.stacks
    if not family.transposed and not stacks:
        return checkpoint
    weight = re.compile(re.escape(family.block).replace(re.escape("{block}"), r"\d+") + r"(.+)\.weight")
    found = [(name, match[1]) for name in checkpoint.tensors if (match := weight.fullmatch(name))]
    parts = {
        name: tuple(
            f"{name.removesuffix(f'{module}.weight')}{stacks[module].format(expert=expert)}.weight"
            for expert in range(checkpoint.tensors[name].shape[0])
        )
        for name, module in found
        if module in stacks
    }
    return checkpoint.turned(name for name, module in found if module in family.transposed).split(parts)


def fitted(checkpoint: Checkpoint) -> tuple[Checkpoint, Family]:
    """A checkpoint as the package sees it, and its family with the spaces that its config says (`oriented`)."""
    family = fitting_family(checkpoint)
    own = family if family.experts is None else family.with_config(parse_config(checkpoint.config))
    return oriented(checkpoint, family), own


def _fits(family: Family, checkpoint: Checkpoint, names: set[str]) -> bool:
    try:
        known = stock_names(checkpoint.config, family.architecture)
    except UserError:  # whoever builds it next says why
        return False
    return all(known.parameters(name) for name in names)


def _prefixed(family: Family, names: set[str]) -> Family:
    """The family with the prefix that the tensors of its base model have on disk."""
    for prefixed in (family.prefixed, not family.prefixed):
        found = family.model_copy(update={"prefixed": prefixed})
        block = found.on_disk(family.block)
        if any(name.startswith(block.format(block=0)) for name in names):
            return found.model_copy(update={"block": block})
    return family
