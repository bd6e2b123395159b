"""The digest of a job has every field of it, but those that are marked."""

import json
from dataclasses import dataclass, field

import pytest
import torch

from ckpt_prune.job.digest import HARMLESS, identify


@dataclass(frozen=True)
class Toy:
    """A job of a toy."""

    device: torch.device
    dtype: torch.dtype
    blocks: frozenset[int] = frozenset({3, 1})
    place: str = field(default="here", metadata=HARMLESS)


@dataclass(frozen=True)
class Read:
    """What is known by its content."""

    fingerprint: str
    path: str


def told(value: object) -> str:
    return json.dumps(value, default=identify)


def test_every_field_counts_unless_it_is_harmless():
    toy = Toy(torch.device("cuda", 1), torch.bfloat16)
    assert json.loads(told(toy)) == {"device": "cuda", "dtype": "torch.bfloat16", "blocks": [1, 3]}


def test_what_is_read_counts_by_its_content():
    assert told({"text": Read("abc", "a.txt")}) == told({"text": Read("abc", "b.txt")}) == '{"text": "abc"}'


def test_what_nothing_identifies_is_no_part_of_a_digest():
    with pytest.raises(TypeError, match="what object is"):
        told(object())
