"""Model card of a quantised checkpoint."""

from typing import Any

from ckpt_prune.common.filenames import QUANTISED_RECORD
from ckpt_prune.common.formatting import human_bytes, plural
from ckpt_prune.common.safe_text import as_code, as_markdown
from ckpt_prune.job.front_matter import described_by_card, front_matter
from ckpt_prune.stages.quantize.record import QuantizationRecord

QUANTISED_FROM = "quantized"
"""How the Hub calls what such a model is to its base."""


def card_metadata(record: QuantizationRecord) -> dict[str, Any]:
    """Return the card's metadata for the Hub."""
    values: dict[str, Any] = {"library_name": "transformers"}
    if "/" in record.source.name:
        values |= {"base_model": record.source.name, "base_model_relation": QUANTISED_FROM}
    values |= described_by_card(record.source.card, record.auto_class)
    return values | {"tags": ["ckpt-prune", "compressed-tensors"]}


def make_card(record: QuantizationRecord) -> str:
    """Make README.md of a quantised checkpoint from its record."""
    errors = [weight.error for weight in record.weights if weight.error is not None]
    mean = f" Rounding changed a weight by {sum(errors) / len(errors):.2%} of its energy on average." if errors else ""
    share = record.after / record.before
    rounded = "to nearest" if record.rounding == "nearest" else "by GPTQ"
    return "\n".join(
        [
            *front_matter(card_metadata(record)),
            "",
            f"# {as_markdown(f'{record.source.name}, {record.format}')}",
            "",
            f"{as_markdown(f'Made by ckpt_prune {record.ckpt_prune}')} from {as_code(record.source.name)}: "
            f"{plural(len(record.weights), 'linear weight')} of the blocks as {record.scheme.words}, rounded "
            f"{rounded}; embeddings, norms and heads stay as they were.{mean}",
            f"{human_bytes(record.after)} of {human_bytes(record.before)} ({share:.1%}), in the form of "
            f"compressed-tensors (pack-quantized). What it was made from is in `{QUANTISED_RECORD}`.",
            "",
            "```python",
            f"from transformers import {record.auto_class}  # needs the package compressed-tensors",
            "",
            f'model = {record.auto_class}.from_pretrained("PATH")',
            "```",
            "",
        ]
    )
