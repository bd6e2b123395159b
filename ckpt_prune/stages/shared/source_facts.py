"""Facts for reports: the source, and how the output is stored."""

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.sentence_modules import find_sentence_class
from ckpt_prune.job.report import Source, StoredAs
from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.containers.container import Container
from ckpt_prune.model.model import Model
from ckpt_prune.show.model_card import source_card


def source_of(checkpoint: Checkpoint) -> Source:
    """Name a model in a report."""
    return Source(name=checkpoint.name, fingerprint=checkpoint.fingerprint, card=source_card(checkpoint.path))


def stored_as(container: Container, model: Model) -> StoredAs:
    """Describe how an output is stored that was made from a model."""
    loader = find_sentence_class(model.checkpoint.path, container.config)
    return StoredAs(
        model_type=container.model_type,
        remote_code=container.remote_class is not None,
        auto_class=model.family.loading_class,
        padded=sorted(container.padded),
        note=container.note,
        sentence_class=None if loader == "SentenceTransformer" else loader,
    )


def stored_whole(checkpoint: Checkpoint, stored: StoredAs) -> StoredAs:
    """Describe how an output is stored whose source may be a part of a composite."""
    if checkpoint.within is None:
        return stored
    composite = load_composite(checkpoint.within.whole.config)
    return stored.model_copy(update={"model_type": composite.model_type, "auto_class": composite.auto})
