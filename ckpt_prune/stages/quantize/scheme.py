"""Storage of weights in few bits: how many, and how many columns share a scale."""

import re
from collections.abc import Mapping
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
DENSE = "dense"
"""Says that a weight stays as it is."""
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

    @property
    def name(self) -> str:
        """Its name in recipes and records, such as int4:64 or int8:channel."""
        return f"{self.format}:{self.group_size or CHANNEL}"

    @classmethod
    def parse(cls, name: str) -> "PackingScheme | None":
        """Read a name; None for a weight that stays as it is. ValueError for what is none."""
        if name == DENSE:
            return None
        kind, _, shared = name.partition(":")
        if kind not in BITS or shared not in (CHANNEL, *map(str, GROUPS)):
            sizes = "|".join((*map(str, reversed(GROUPS)), CHANNEL))
            raise ValueError(f"{name} is no way to store a weight: say int4:{sizes}, int8:{sizes} or {DENSE}")
        return cls("int8" if kind == "int8" else "int4", None if shared == CHANNEL else int(shared))

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


Schemes = dict[str, PackingScheme]
"""On-disk name of a weight that is rounded → how it is stored, in the order of the files."""


def choose_schemes(
    kind: Format, asked: str | None, types: Mapping[str, str], columns: dict[str, int], option: str = "--group-size "
) -> tuple[PackingScheme, Schemes]:
    """Choose the scheme of most of a model's weights, and that of each which is rounded.

    Args:
        kind, asked, option: as `choose_scheme` has them, for weights whose name no expression is found in.
        types: expression → name of a scheme; the first that is found in a weight's name counts.
        columns: weight → its number of columns.
    """
    patterns = [(re.compile(pattern), PackingScheme.parse(name)) for pattern, name in types.items()]
    fitting = {name: [scheme for pattern, scheme in patterns if pattern.search(name)] for name in columns}
    chosen = {name: schemes_of_name[0] for name, schemes_of_name in fitting.items() if schemes_of_name}
    for name, scheme in chosen.items():
        if scheme is not None and columns[name] % (scheme.group_size or 1):
            raise UserError(f"quantize.types: {scheme.name} does not divide the {columns[name]} columns of {name}")
    others = {name: width for name, width in columns.items() if name not in chosen}
    usual = choose_scheme(kind, asked, others, option)
    schemes = {name: chosen.get(name, usual) for name in columns}
    return usual, {name: scheme for name, scheme in schemes.items() if scheme is not None}


def choose_scheme(
    kind: Format, asked: str | None, columns: dict[str, int], option: str = "--group-size "
) -> PackingScheme:
    """Choose the scheme of weights.

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
