"""What the Hub reads of a model card: the values between its first lines."""

from typing import Any

import yaml

from ckpt_prune.checkpoint.modules import MODULES
from ckpt_prune.report.model import Report

_PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
}
"""Auto class → task, where the class leaves no doubt of it and the source's card says nothing."""


def metadata(report: Report) -> dict[str, Any]:
    """What an output's card tells the Hub: what it was made from and may be used for."""
    embeds = MODULES in (report.side_files or ())
    values: dict[str, Any] = {"library_name": "sentence-transformers" if embeds else "transformers"}
    if "/" in report.source.name:
        values |= based_on(report.source.name)
    card = report.source.card
    if card is not None:
        values |= card.model_dump(exclude_defaults=True)
    task = _PIPELINES.get(report.container.auto_class)
    if task is not None and "pipeline_tag" not in values and not embeds:
        values["pipeline_tag"] = task
    return values | {"tags": ["ckpt-prune", "pruned"]}


def based_on(model: str) -> dict[str, str]:
    """That a model was made from one of the Hub: the Hub has no word for pruning, and a finetune is what it guesses."""
    return {"base_model": model, "base_model_relation": "finetune"}


def front_matter(values: dict[str, Any]) -> list[str]:
    """Values as the first lines of a card."""
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000)
    return ["---", *text.splitlines(), "---"]
