"""Composites: models made of others, one JSON description each (`composites/*.json`), of which a part can be pruned."""

from functools import cache
from importlib import resources
from typing import Any

from pydantic import Field

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.spaces import Description, SpaceName
from ckpt_prune.options import PartName


class Part(Description):
    """A model inside another.

    Attributes:
        config: key of its config in that of the whole; None where that of the whole says it.
        family: the family whose stock class computes the same; that of its own `model_type` by default.
        described: the description of its family where no `model_type` is that of the part alone.
        auto: Auto class of the stock class that it is read as.
        modules: module of the whole → module of the stock class; "" for all of it.
        drops: config keys of the part that the stock class must not see.
        keeps: spaces that stay whole, each with the reason.
        note: what is to be known of how it is calibrated.
    """

    config: str | None = None
    family: str | None = None
    described: dict[str, Any] | None = None
    auto: str
    modules: dict[str, str]
    drops: dict[str, list[str]] = Field(default_factory=dict)
    keeps: dict[SpaceName, str] = Field(default_factory=dict)
    note: str


class Composite(Description):
    """A model made of others.

    Attributes:
        model_type: `model_type` in config.json.
        architecture: stock transformers class of the whole.
        auto: Auto class that loads it.
        parts: that can be pruned.
        refused: those that cannot, each with the reason.
    """

    model_type: str
    architecture: str
    auto: str
    parts: dict[PartName, Part] = Field(default_factory=dict)
    refused: dict[PartName, str] = Field(default_factory=dict)

    def part(self, name: str) -> Part:
        """One of its parts.

        Raises:
            UserError: it has none of this name, or it cannot be pruned; with the reason.
        """
        for known, part in self.parts.items():
            if known == name:
                return part
        for known, why in self.refused.items():
            if known == name:
                raise UserError(f"--part {name} of {self.model_type} cannot be pruned: {why}")
        names = " or ".join([*self.parts, *self.refused])
        raise UserError(f"{self.model_type} has no part {name}, but {names}")

    @property
    def advice(self) -> str:
        """What to say to someone who names no part."""
        if self.parts:
            return f"{self.model_type} is made of several models: --part {' or --part '.join(self.parts)} prunes one"
        why = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return f"{self.model_type} is made of several models, and none of them can be pruned ({why})"


@cache
def known_composites() -> tuple[str, ...]:
    """`model_type` of every composite with a description, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json")))


@cache
def load_composite(model_type: str) -> Composite:
    """The description of a composite.

    Raises:
        UserError: there is none.
    """
    if model_type not in known_composites():
        known = ", ".join(known_composites())
        raise UserError(f"--part is for models that are made of several ({known}), which a {model_type} is not")
    return Composite.model_validate_json((_folder() / f"{model_type}.json").read_text(encoding="utf-8"))


def _folder() -> Any:
    return resources.files("ckpt_prune.model") / "composites"
