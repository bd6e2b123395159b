"""How results are shown: as JSON, and as tables and sentences for people."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from ckpt_prune.job.report import Loss
from ckpt_prune.show.section import Table

Columns = tuple[tuple[str, str, str], ...]
"""Headings, the attribute that stands under each, and how that is formatted."""


class Figures:
    """Figures of one model, or of two on the same data.

    Attributes:
        columns: of a table.
        hidden: attributes that JSON has not.
        remark: a sentence for readers, a format string of the attributes and of `against`, the reference.
    """

    columns: ClassVar[Columns]
    remark: ClassVar[str] = ""
    hidden: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def headings(cls) -> list[str]:
        return [heading for heading, _, _ in cls.columns]

    def data(self) -> dict[str, Any]:
        """Return the figures as JSON has them."""
        return {name: value for name, value in vars(self).items() if name not in self.hidden}

    def cells(self) -> list[str]:
        """Format a figure for each of the columns; a dash if it is not known."""
        values = [(getattr(self, name), style) for _, name, style in self.columns]
        return ["–" if value is None else format(value, style) for value, style in values]

    def amount(self) -> str:
        """Say how much was measured on: window 256, tokens 30,600."""
        return ", ".join(
            f"{heading} {cell}"
            for (heading, name, _), cell in zip(self.columns, self.cells(), strict=True)
            if isinstance(getattr(self, name), int)
        )

    def remarks(self, against: Path | None) -> list[str]:
        return [self.remark.format(against=against, **vars(self))] if self.remark else []


class Result(ABC):
    """A measurement that can be printed."""

    @abstractmethod
    def data(self) -> dict[str, Any]:
        """Return what `--json` prints."""

    def loss(self) -> Loss | None:
        """Return what the report of an output says of it, with a verdict; None if it has no place there."""
        return None

    @abstractmethod
    def paragraphs(self) -> list[Table | str]:
        """Return tables and sentences for people, in order."""
