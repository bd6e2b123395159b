"""The digest of a job: it covers every field but those that are marked as harmless."""

from dataclasses import fields, is_dataclass
from typing import Any

import torch

HARMLESS = {"harmless": True}
"""Metadata of a field that a resumed run may have another value of."""


def identify(value: Any) -> Any:
    """Return JSON that stands for what JSON has not: its content's digest, or of a dataclass every field that matters.

    It is a `default` of `json.dumps`.
    """
    for name in ("fingerprint", "digest"):
        if isinstance(digest := getattr(value, name, None), str):
            return digest
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return fields_of(value)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that matter."""
    if not is_dataclass(value):
        raise TypeError(f"nothing says what {type(value).__name__} is in a digest")
    return {each.name: getattr(value, each.name) for each in fields(value) if not each.metadata.get("harmless")}
