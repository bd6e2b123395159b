"""What a model is for. Everything that measures, prunes, exports or describes a model asks here.

The class that config.json names says it, whatever other classes its family has. A sentence-transformers folder that
reads the last hidden states is for embeddings, whatever class config.json names.
"""

from functools import cache
from typing import Literal

from ckpt_prune.checkpoint.sentence_modules import ModulesUse

Purpose = Literal[
    "text-generation",
    "fill-mask",
    "text-classification",
    "token-classification",
    "question-answering",
    "image-classification",
    "image-text-to-text",
    "feature-extraction",
    "sentence-similarity",
    "text-ranking",
]
"""In the words of the Hub. Rerankers and reward models with a head for texts are for text-classification, those that
read the logits of a causal language model for text-ranking."""

PURPOSES: dict[str, Purpose] = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForPreTraining": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModel": "feature-extraction",
}
"""Auto class → what its models are for."""

WITHOUT_HEAD: frozenset[Purpose] = frozenset({"feature-extraction", "sentence-similarity"})
"""Purposes that read the last hidden states of the base model."""


def purpose_of_class(auto: str, *, binary: bool = False, used_for: ModulesUse | None = None) -> Purpose | None:
    """What a model of an Auto class is for.

    Args:
        auto: the Auto class.
        binary: whether its logits tell two classes of every token apart, as those of ELECTRA's discriminator do.
        used_for: what the modules of its sentence-transformers folder use it for, if they say it (`modules.use_of`).

    Returns:
        The purpose, or None for an Auto class that this package does nothing with.
    """
    if used_for is not None:
        return used_for
    return "token-classification" if binary else PURPOSES.get(auto)


@cache
def stock_classes(model_type: str, base: str) -> dict[str, str]:
    """Classes that transformers' own mappings have for a model type → their Auto class.

    These are the base model, and the classes that tell texts or tokens apart. A class whose base model has another name
    is left out: the paths of a description do not hold for it.

    Args:
        model_type: of config.json.
        base: name of the base model in the classes with a head.
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
