"""The model card as it is shared: the output's own, with what the Hub reads of it."""

from typing import Any

from ckpt_prune.hub.measured import Measured, figures_table, model_index
from ckpt_prune.report.metadata import front_matter
from ckpt_prune.report.source_card import split_card

PATH = '"PATH"'
"""What a card that lies beside the model says where a shared one says the repository."""


def shared_card(
    text: str,
    known: dict[str, Any],
    repo: str,
    relation: str,
    *,
    base_model: str | None = None,
    license_id: str | None = None,
    figures: list[Measured],
) -> str:
    """A card for the Hub.

    Args:
        text: README.md of the output, which its user may have changed: what it says stays.
        known: what the output itself can tell the Hub, where the card does not.
        repo: where it goes, which the card's snippets load it from.
        relation: to the base model, as the Hub calls it.
        base_model: Hub id of the dense model, where the card is to say another one, or says none.
        license_id: of the output, likewise.
        figures: that were measured.

    Raises:
        ValueError: the card's first lines are no YAML mapping.
    """
    own, body = split_card(text)
    values: dict[str, Any] = known | own
    if base_model is not None:
        values |= {"base_model": base_model, "base_model_relation": relation}
    if license_id is not None:
        values["license"] = license_id
    if figures:
        values["model-index"] = model_index(repo.rpartition("/")[2], values.get("pipeline_tag"), figures)
        body = "\n".join([body.rstrip("\n"), "", *figures_table(figures), ""])
    # Tags stand last in the cards of this tool.
    values = {key: value for key, value in values.items() if key != "tags"} | {"tags": values["tags"]}
    return "\n".join(front_matter(values)) + "\n" + body.replace(PATH, f'"{repo}"')
