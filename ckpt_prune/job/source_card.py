"""What the model card of a source says that holds of what is made from it: licence, languages, data, task."""

from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.common.safe_text import escape_controls
from ckpt_prune.common.yaml12 import read_yaml
from ckpt_prune.job.report import SourceCard

_MOST_BYTES = 2**20
_MOST_ENTRIES = 200
_LONGEST = 300
CARD = "README.md"


def source_card(folder: Path) -> SourceCard | None:
    """What the card of a folder says; None where there is no card, or it says nothing of all that.

    It is somebody else's text: what cannot be read is left out, and is no error.
    """
    try:
        values, _ = split_card(read_input(folder / CARD, _MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError):
        return None
    found = SourceCard(
        license=_line(values.get("license")),
        license_name=_line(values.get("license_name")),
        license_link=_line(values.get("license_link")),
        language=_lines(values.get("language")),
        datasets=_lines(values.get("datasets")),
        pipeline_tag=_line(values.get("pipeline_tag")),
    )
    return found if found.model_dump(exclude_defaults=True) else None


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """The values at the top of a card, and the text below them.

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
