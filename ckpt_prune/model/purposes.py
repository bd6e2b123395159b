"""Purposes of models, by the class that config.json names, or by the modules of a sentence-transformers folder."""

from functools import cache
from pathlib import Path
from typing import Literal

from ckpt_prune.checkpoint.sentence_modules import ModulesUse
from ckpt_prune.common.errors import UserError

Purpose = Literal[
    "text-generation",
    "fill-mask",
    "text2text-generation",
    "automatic-speech-recognition",
    "text-classification",
    "token-classification",
    "question-answering",
    "image-classification",
    "image-text-to-text",
    "feature-extraction",
    "sentence-similarity",
    "text-ranking",
]
"""The Hub's words. Rerankers and reward models with a head for texts are for text-classification, those that read the
logits of a causal language model for text-ranking."""

PURPOSES: dict[str, Purpose] = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForPreTraining": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModel": "feature-extraction",
    "AutoModelForTextEncoding": "feature-extraction",
}
"""Auto class → purpose of its models."""

WITHOUT_HEAD: frozenset[Purpose] = frozenset({"feature-extraction", "sentence-similarity"})
"""Purposes that read the last hidden states of the base model."""

_READ_AS_PAIRS: dict[Purpose, str] = {
    "text2text-generation": "pairs of a source and its target",
    "automatic-speech-recognition": "audio with its text",
}


def refuse_text_of(folder: Path, purpose: Purpose | None) -> None:
    """Refuse to measure a model on a text, if it is measured on rows of what it reads and what it says."""
    if purpose in _READ_AS_PAIRS:
        raise UserError(f"{folder} is for {purpose}: measure it on {_READ_AS_PAIRS[purpose]}, with --data")


def purpose_of_class(auto: str, *, binary: bool = False, used_for: ModulesUse | None = None) -> Purpose | None:
    """Return what a model of an Auto class is for; None if this package has no use for such models.

    Args:
        binary: whether its logits tell two classes of every token apart, as those of ELECTRA's discriminator do.
        used_for: what the modules of its sentence-transformers folder use it for, if they say.
    """
    if used_for is not None:
        return used_for
    return "token-classification" if binary else PURPOSES.get(auto)


def loading_class(auto: str, used_for: ModulesUse | None) -> str:
    """Return the Auto class that loads a folder whose class is of `auto`: an embedder's has no head."""
    is_bare = used_for != "sentence-similarity" or PURPOSES.get(auto) == "feature-extraction"
    return auto if is_bare else "AutoModel"


@cache
def stock_classes(model_type: str, base: str) -> dict[str, str]:
    """Return the base model and the classifiers of texts and tokens in transformers' own mappings → their Auto class.

    A class whose base model is not called `base` is left out: the paths of a description do not hold for it.
    """
    import transformers
    from transformers.models.auto import modeling_auto as mappings

    named = {
        "AutoModel": mappings.MODEL_MAPPING_NAMES,
        "AutoModelForSequenceClassification": mappings.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "AutoModelForTokenClassification": mappings.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    classes = {names[model_type]: auto for auto, names in named.items() if isinstance(names.get(model_type), str)}
    return {name: auto for name, auto in classes.items() if getattr(transformers, name).base_model_prefix == base}
