"""Storage of weights in few bits: how many, and how many columns share a scale."""

from dataclasses import dataclass
from typing import Any, Literal

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install

Format = Literal["int8", "int4"]
Rounding = Literal["nearest", "gptq"]
BITS: dict[str, int] = {"int8": 8, "int4": 4}
GROUPS = (128, 64, 32)
"""Columns that may share a scale: those that kernels for such weights take, largest first."""
CHANNEL = "channel"
LIBRARY = f"compressed-tensors is not installed: {install('quantize')}"


@dataclass(frozen=True)
class PackingScheme:
    """Whole numbers of some bits, symmetric about zero, with a scale for each row or each run of columns in it.

    Attributes:
        group_size: columns that share a scale; None for whole rows.
    """

    format: Format
    group_size: int | None

    @property
    def bits(self) -> int:
        return BITS[self.format]

    @property
    def words(self) -> str:
        shared = "row" if self.group_size is None else f"group of {self.group_size} columns"
        return f"{self.format}, one scale per {shared}"

    def scales(self, columns: int) -> int:
        return 1 if self.group_size is None else columns // self.group_size

    def words_per_row(self, columns: int) -> int:
        return -(-columns * self.bits // 32)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of compressed-tensors for it."""
        shared: dict[str, Any] = {"strategy": "channel"}
        if self.group_size is not None:
            shared = {"strategy": "group", "group_size": self.group_size}
        return {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False} | shared


def choose_scheme(
    kind: Format, asked: str | None, columns: dict[str, int], option: str = "--group-size "
) -> PackingScheme:
    """Choose the scheme of a model.

    Refuses a size that no kernel takes, or that does not divide a weight's columns.

    Args:
        asked: a size of groups, `channel` for whole rows, or None: rows for int8, the largest size that divides every
            weight for int4.
        columns: weight → its number of columns.
        option: what a size is said by, for messages: of the command, or of a recipe.
    """
    if asked == CHANNEL or (asked is None and kind == "int8"):
        return PackingScheme(kind, None)
    fitting = [size for size in GROUPS if all(width % size == 0 for width in columns.values())]
    others = f"{', '.join(map(str, fitting))} or {CHANNEL}" if fitting else CHANNEL
    if asked is None:
        if not fitting:
            narrow = next(name for name, width in columns.items() if width % GROUPS[-1])
            raise UserError(
                f"{narrow} has {columns[narrow]} columns, which no group of {', '.join(map(str, GROUPS))} divides: say "
                f"{option}{CHANNEL}, or prune in multiples (--set spaces.mlp.multiple_of={GROUPS[-1]})"
            )
        return PackingScheme(kind, fitting[0])
    size = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0
    if size not in GROUPS:
        raise UserError(
            f"{option}{asked}: kernels take groups of {', '.join(map(str, GROUPS))}, or whole rows ({CHANNEL})"
        )
    if size not in fitting:
        odd = next(name for name, width in columns.items() if width % size)
        raise UserError(
            f"{option}{size} does not divide the {columns[odd]} columns of {odd}: all are divided by {others}"
        )
    return PackingScheme(kind, size)
