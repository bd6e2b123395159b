"""Model cards: what the source's card says that holds of what is made from it, and what an output's tells the Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.sentence_modules import MODULES
from ckpt_prune.common.filenames import FRONTIER_COMMANDS, FRONTIER_PAGE, FRONTIER_PRUNED, FRONTIER_RECORD
from ckpt_prune.common.safe_text import as_markdown, escape_controls
from ckpt_prune.common.yaml12 import read_yaml
from ckpt_prune.job.report import CommonReport, SourceCard

CARD = "README.md"
PRUNED = "finetune"
"""How a pruned model is related to its base: the Hub has no word for that, and guesses a finetune."""
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
_MOST_BYTES = 2**20
_MOST_ENTRIES = 200
_LONGEST = 300


# ---- of the source -----------------------------------------------------------------------------------------------


def source_card(folder: Path) -> SourceCard | None:
    """Read licence, languages, data and task from the card of a folder; None if it says nothing of all that.

    It is somebody else's text: what cannot be read is left out, and is no error.
    """
    try:
        values, _ = split_card(read_input(folder / CARD, _MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError):
        return None
    card = SourceCard(
        license=_line(values.get("license")),
        license_name=_line(values.get("license_name")),
        license_link=_line(values.get("license_link")),
        language=_lines(values.get("language")),
        datasets=_lines(values.get("datasets")),
        pipeline_tag=_line(values.get("pipeline_tag")),
    )
    return card if card.model_dump(exclude_defaults=True) else None


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """Return the values at the top of a card, and the text below them.

    Raises:
        ValueError: there are lines for them, and they are no YAML mapping.
    """
    if not text.startswith("---\n"):
        return {}, text
    head, mark, body = text.removeprefix("---\n").partition("\n---")
    if not mark:
        return {}, text
    _, values = read_yaml(head)
    if values is not None and not isinstance(values, dict):
        raise ValueError("no mapping")
    return values or {}, body.partition("\n")[2]


def _line(value: Any) -> str | None:
    if value is False:
        return "no"  # Norwegian, in YAML
    if not isinstance(value, str) or not value.strip() or len(value) > _LONGEST:
        return None
    return escape_controls(" ".join(value.split()))


def _lines(value: Any) -> list[str]:
    several = value if isinstance(value, list) else [value]
    return [line for line in map(_line, several[:_MOST_ENTRIES]) if line is not None]


# ---- of the output -----------------------------------------------------------------------------------------------


def metadata(report: CommonReport) -> dict[str, Any]:
    """Return what an output's card tells the Hub: what it was made from and may be used for."""
    loader = sentence_class_of(report)
    library = "transformers" if loader is None else "sentence-transformers"
    name = report.source.name
    base = {"base_model": name, "base_model_relation": PRUNED} if "/" in name else {}
    described = described_by_card(report.source.card, loader or report.container.auto_class)
    return {"library_name": library, **base, **described, "tags": ["ckpt-prune", "pruned"]}


def sentence_class_of(report: CommonReport) -> str | None:
    """Return the class of sentence-transformers that loads an output, or None if that package does not."""
    plain = "SentenceTransformer" if MODULES in (report.side_files or ()) else None
    return report.container.sentence_class or plain


def described_by_card(card: SourceCard | None, auto_class: str) -> dict[str, Any]:
    """Return what the source's card says, and the task if it says none.

    Args:
        card: of the source.
        auto_class: of transformers, or the class of sentence-transformers, which tells the task.
    """
    values = {} if card is None else card.model_dump(exclude_defaults=True)
    task = _PIPELINES.get(auto_class)
    return values if task is None or "pipeline_tag" in values else values | {"pipeline_tag": task}


def lines_of_search(folder: Path) -> list[str]:
    """Return what a card says of the `frontier` whose record is in its folder; nothing if there is none."""
    if not (folder / FRONTIER_RECORD).is_file():
        return []
    record = read_json_object(folder / FRONTIER_RECORD)
    names = ("model", "sentence", "measured_in", "measured_on")
    model, sentence, runtime, data = (as_markdown(str(record.get(name))) for name in names)
    is_pruned = record.get("source") == FRONTIER_PRUNED
    first = f"; `{FRONTIER_PRUNED}` is a smaller model, which it makes of {model} first" if is_pruned else ""
    return [
        f"`ckpt-prune frontier` found for {model}: {sentence}.",
        f"It was measured in {runtime} on {data}. `{FRONTIER_COMMANDS}` makes it again{first}. `{FRONTIER_PAGE}` shows "
        "what else was measured.",
    ]


def front_matter(values: Mapping[str, Any]) -> str:
    """Return values as the first lines of a card, which end with a newline."""
    plain = _plain(dict(values))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000)
    return f"---\n{text}---\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return escape_controls(value) if isinstance(value, str) else value
