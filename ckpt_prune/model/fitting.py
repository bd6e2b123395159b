"""Which class of its family a checkpoint holds, by its tensors."""

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.sentence_modules import find_sentence_use
from ckpt_prune.checkpoint.shard import Stack
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.descriptions import described
from ckpt_prune.model.family import REMOTE_PREFIX, Family
from ckpt_prune.model.skeleton import Names, is_stored_buffer, parse_config, stock_names
from ckpt_prune.model.supported import family_of


def fitting_family(checkpoint: Checkpoint) -> Family:
    """The checkpoint's family with the class that has a place for every tensor, and with the prefix its tensors have.

    Some published checkpoints hold more than the class they name (bert-base-uncased names BertForMaskedLM and holds
    BertForPreTraining), others lack the prefix of their base model. What config.json names is taken where it fits,
    and where nothing does, so that errors speak of it. An embedder that stores no head is its base model, which is what
    sentence-transformers loads.

    Raises:
        UserError: config.json names a class that the family does not have, and the tensors are of none that it has.
    """
    declared = family_of(checkpoint.config)
    names = {name for name in checkpoint.tensors if not is_stored_buffer(name)}
    family = described(checkpoint.config)
    candidates = [declared, *(family.of(name) for name in family.architectures if name != declared.architecture)]
    used_for = find_sentence_use(checkpoint.path) if checkpoint.within is None else None
    base = family.class_of("AutoModel") if used_for == "sentence-similarity" else None
    candidates = [*([] if base is None else [family.of(base)]), *candidates]
    candidates = [each.model_copy(update={"used_for": used_for}) for each in candidates]
    named = str(next(iter(checkpoint.config.get("architectures") or []), "")).removeprefix(REMOTE_PREFIX)
    strange = bool(named) and not family.has_class(named)
    if len(candidates) == 1 and not strange:
        return _prefixed(candidates[0], names)
    for candidate in candidates:
        if _fits(candidate, checkpoint, names):
            return _prefixed(candidate, names)
    if strange:
        raise UserError(
            f"{checkpoint.path}: config.json names {named}, which is none of the classes of {family.model_type} that "
            f"can be taken: {', '.join(family.classes)}"
        )
    return _prefixed(next(each for each in candidates if each.architecture == declared.architecture), names)


def oriented(checkpoint: Checkpoint, family: Family) -> Checkpoint:
    """The checkpoint as the whole package sees it: every weight of a block's linear modules is (outputs, inputs).

    Here is the one border that a family whose files hold transposes of them (Conv1D) has, or stacks of experts. Experts
    may also stand as transformers has them in memory (`save_pretrained(…, save_original_format=False)`): all gates and
    ups in one tensor, and all last projections in another. What is written from it has the same names and shapes.
    Tensors that its class ignores (`Names.ignores`) are not there, and tied ones are there as the class loads them
    (`untangled`).
    """
    experts = family.experts
    checkpoint = loaded(checkpoint.ignore(_ignored(checkpoint, family)), family)
    if not family.transposed and experts is None:
        return checkpoint
    block = re.escape(family.block).replace(re.escape("{block}"), r"\d+")
    found = [(n, match[1], match[2]) for n in checkpoint.tensors if (match := re.fullmatch(f"({block})(.+)", n))]
    stacks: dict[str, Stack] = {}
    aliases: dict[str, str] = {}
    if experts is not None:
        rows = experts.stacks | experts.held
        for name, prefix, rest in found:
            if rest in rows:
                count = checkpoint.tensors[name].shape[0]
                parts = (f"{prefix}{m.format(expert=e)}.weight" for e in range(count) for m in rows[rest])
                stacks[name] = Stack(tuple(parts), len(rows[rest]))
        if any(rest in experts.held for *_, rest in found):
            aliases = _aliases(checkpoint, family, stacks.keys())
    turned = (name for name, _, rest in found if rest.removesuffix(".weight") in family.transposed)
    return checkpoint.transpose(turned).split(stacks).rename(aliases)


TIED = "tie_word_embeddings"
"""Config key that ties all that a class can tie."""


def untangled(checkpoint: Checkpoint, ties: Mapping[str, str]) -> Checkpoint:
    """The checkpoint with the tensors that transformers makes of tied ones (`PreTrainedModel.tie_weights`).

    Of two that are tied and stored, one is left out if they are equal. If any two differ, the class takes these as they
    are stored, and so does what is seen here: nothing is tied, and the config says so. If only that is stored which is
    to be tied to another, it stands under the other's name.

    Args:
        checkpoint: of a model whose config ties something.
        ties: tensor on disk → the one that it is tied to.
    """
    held = checkpoint.tensors
    stored: dict[str, str] = {}  # tensor that others are tied to → the one on disk that has its values
    for name, source in ties.items():
        if name in held or source in held:
            stored.setdefault(source, source if source in held else name)
    twice = {name: stored[source] for name, source in ties.items() if name in held and stored[source] != name}
    renamed = {source: name for source, name in stored.items() if source != name}
    if not twice and not renamed:
        return checkpoint
    if all(checkpoint.equal(name, other) for name, other in twice.items()):
        return checkpoint.with_ties([*twice, *renamed.values()], renamed)
    apart = {name: stored[source] for name, source in ties.items() if name not in held and source in stored}
    seen = checkpoint.with_ties([], renamed | apart)
    return replace(seen, config=seen.config | {TIED: False}, stated={TIED: checkpoint.config.get(TIED)})


def loaded(checkpoint: Checkpoint, family: Family) -> Checkpoint:
    """The checkpoint with tied tensors as its class loads them (`untangled`)."""
    return untangled(checkpoint, _ties(checkpoint, family))


def _ties(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    """Tensor on disk → the one that it is tied to."""
    if not checkpoint.config.get("auto_map"):
        known = _names(checkpoint, family)
        return {} if known is None else ties_on_disk(checkpoint, known, family.on_disk)
    tied = getattr(parse_config(checkpoint.config), TIED, False)
    if not tied or family.head is None or family.embedding is None:
        return {}
    return {f"{family.head}.weight": f"{family.on_disk(family.embedding)}.weight"}


def ties_on_disk(
    checkpoint: Checkpoint, known: Names, on_disk: Callable[[str], str] = lambda name: name
) -> dict[str, str]:
    """Tensor on disk → the one that it is tied to.

    Args:
        checkpoint: whose tensors may have other names than those that the class saves.
        known: of its class.
        on_disk: what a name that the class saves is in this checkpoint.
    """
    if not known.ties:
        return {}
    held = {parameter: name for name in checkpoint.tensors for parameter in known.parameters(name)}

    def called(parameter: str) -> str:
        return held[parameter] if parameter in held else on_disk(known.saved_as(parameter))

    return {called(name): called(source) for name, source in known.ties.items()}


def _names(checkpoint: Checkpoint, family: Family) -> Names | None:
    """Of the class of a stock checkpoint; None if it cannot be built, which whoever builds it next says why."""
    try:
        return stock_names(checkpoint.config, family.architecture)
    except UserError:
        return None


def _ignored(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Tensors that the class of a stock checkpoint does not load; buffers that it computes itself are others."""
    known = None if checkpoint.config.get("auto_map") else _names(checkpoint, family)
    if known is None:
        return []
    return [name for name in checkpoint.tensors if not is_stored_buffer(name) and known.ignores(name)]


def _aliases(checkpoint: Checkpoint, family: Family, others: Set[str]) -> dict[str, str]:
    """Published name → name on disk of tensors that stand under the names that transformers has in memory."""
    known = stock_names(checkpoint.config, family.architecture)
    memory = known.model.state_dict().keys() - known.shapes.keys() - others
    return {known.saved_as(name): name for name in sorted(memory & checkpoint.tensors.keys())}


def fitted(checkpoint: Checkpoint) -> tuple[Checkpoint, Family]:
    """A checkpoint as the package sees it, and its family with the spaces that its config says (`oriented`)."""
    family = fitting_family(checkpoint)
    own = family if family.experts is None else family.with_config(parse_config(checkpoint.config))
    return oriented(checkpoint, family), own


def _fits(family: Family, checkpoint: Checkpoint, names: set[str]) -> bool:
    known = _names(checkpoint, family)
    return known is not None and all(known.parameters(name) or known.ignores(name) for name in names)


def _prefixed(family: Family, names: set[str]) -> Family:
    """The family with the prefix that the tensors of its base model have on disk."""
    for prefixed in (family.prefixed, not family.prefixed):
        found = family.model_copy(update={"prefixed": prefixed})
        block = found.on_disk(family.block)
        if any(name.startswith(block.format(block=0)) for name in names):
            return found.model_copy(update={"block": block})
    return family
