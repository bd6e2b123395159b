"""Tied tensors of a checkpoint, read as transformers loads them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.model.skeleton import Names

TIE_KEY = "tie_word_embeddings"
"""Config key that ties everything that a class can tie."""


def apply_ties(checkpoint: Checkpoint, ties: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with the tensors that `PreTrainedModel.tie_weights` makes of tied ones.

    If tied tensors are stored twice and equal, one of them is left out. If any two differ, the class loads both as they
    are stored: nothing is tied, and the returned config says so. If only the tied tensor is stored, it appears under
    the name of the tensor it is tied to.

    Args:
        ties: on-disk name of a tensor → on-disk name of the tensor that it is tied to.
    """
    tensors = checkpoint.tensors
    stored: dict[str, str] = {}  # tensor that others are tied to → the stored tensor that has its values
    for name, source in ties.items():
        if name in tensors or source in tensors:
            stored.setdefault(source, source if source in tensors else name)
    twice = {name: stored[source] for name, source in ties.items() if name in tensors and stored[source] != name}
    renamed = {source: name for source, name in stored.items() if source != name}
    if not twice and not renamed:
        return checkpoint
    if all(checkpoint.equal(name, other) for name, other in twice.items()):
        return checkpoint.with_ties([*twice, *renamed.values()], renamed)
    absent = {name: stored[source] for name, source in ties.items() if name not in tensors and source in stored}
    untied = checkpoint.with_ties([], renamed | absent)
    stated = {TIE_KEY: checkpoint.config.get(TIE_KEY), **checkpoint.stated}
    return replace(untied, config=untied.config | {TIE_KEY: False}, stated=stated)


def ties_on_disk(
    checkpoint: Checkpoint, names: Names, on_disk: Callable[[str], str] = lambda name: name
) -> dict[str, str]:
    """Return on-disk name of a tensor → on-disk name of the tensor that it is tied to.

    Args:
        names: of the checkpoint's class.
        on_disk: turns a name that the class saves into the name in this checkpoint.
    """
    if not names.ties:
        return {}
    stored = {parameter: name for name in checkpoint.tensors for parameter in names.parameters(name)}

    def disk_name(parameter: str) -> str:
        return stored[parameter] if parameter in stored else on_disk(names.saved_as(parameter))

    return {disk_name(name): disk_name(source) for name, source in names.ties.items()}
