"""What the Hub reads of a model card: the values between its first lines."""

from typing import Any

import yaml

from ckpt_prune.checkpoint.sentence_modules import MODULES
from ckpt_prune.common.safe_text import escape_controls
from ckpt_prune.job.report import Report, SourceCard

_PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
    "CrossEncoder": "text-ranking",
}
"""Auto class, or class of sentence-transformers → task, if that leaves no doubt and the source's card says nothing."""


PRUNED = "finetune"
"""How a pruned model is related to its base: the Hub has no word for that, and guesses a finetune."""


def metadata(report: Report) -> dict[str, Any]:
    """What an output's card tells the Hub: what it was made from and may be used for."""
    loader = sentence_class_of(report)
    values: dict[str, Any] = {"library_name": "transformers" if loader is None else "sentence-transformers"}
    if "/" in report.source.name:
        values |= {"base_model": report.source.name, "base_model_relation": PRUNED}
    values |= described_by_card(report.source.card, report.container.auto_class if loader is None else loader)
    return values | {"tags": ["ckpt-prune", "pruned"]}


def sentence_class_of(report: Report) -> str | None:
    """The class of sentence-transformers that loads an output, or None if that package does not."""
    plain = "SentenceTransformer" if MODULES in (report.side_files or ()) else None
    return report.container.sentence_class or plain


def described_by_card(card: SourceCard | None, auto_class: str) -> dict[str, Any]:
    """What the source's card says that holds of what is made from it, and the task where it says none.

    Args:
        card: of the source.
        auto_class: of transformers, or the class of sentence-transformers, which tells the task.
    """
    values = {} if card is None else card.model_dump(exclude_defaults=True)
    task = _PIPELINES.get(auto_class)
    return values if task is None or "pipeline_tag" in values else values | {"pipeline_tag": task}


def front_matter(values: dict[str, Any]) -> list[str]:
    """Values as the first lines of a card."""
    text = yaml.safe_dump(_plain(values), sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000)
    return ["---", *text.splitlines(), "---"]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return escape_controls(value) if isinstance(value, str) else value
