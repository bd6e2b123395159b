"""Spaces: axes that several tensors of a block share, as data (model/README.md has every key).

A space lists its incidences: the linear modules that its units lie on, along which axis, with how many rows or columns
each and in what order. `cuts` derives shapes and cuts from them.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from torch import Tensor

KnownSpace = Literal[
    "qk",
    "rotary",
    "queries",
    "heads",
    "values",
    "cross_heads",
    "linear_heads",
    "mlp",
    "dense",
    "shared",
    "experts",
    "pooling",
]
"""Spaces that recipes name."""
SPACES: tuple[str, ...] = get_args(KnownSpace)


def expert_space(name: str, expert: int | None) -> str:
    """Name a space of one expert: `mlp` of expert 3 is `mlp.3`."""
    return name if expert is None else f"{name}.{expert}"


def recipe_space(name: str) -> str:
    """Return the name that recipes have for a space: without the number of its expert."""
    return name.partition(".")[0]


def expert_of(name: str) -> int | None:
    """Return the expert that a space belongs to; None if the space is of a whole block."""
    number = name.partition(".")[2]
    return int(number) if number else None


def first_expert_spaces(names: Iterable[str]) -> dict[str, str]:
    """Return recipe's name → the first of these spaces with it. All experts of a block are equally wide."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(recipe_space(name), name)
    return first


def _check_name(name: str) -> str:
    space, dot, number = name.partition(".")
    if space not in SPACES or number.isdecimal() != bool(dot):
        facts = {"name": name, "spaces": ", ".join(SPACES)}
        raise PydanticCustomError("space", "{name} is not a space; spaces are {spaces}", facts)
    return name


SpaceName = Annotated[str, AfterValidator(_check_name)]
"""A space of a block. If a block has experts, each has spaces of its own, `mlp.0`, `mlp.1`; recipes say `mlp`."""


class Site(NamedTuple):
    """One space of one block: where units are kept or dropped."""

    block: int
    space: SpaceName


KindOfSpace = Literal["columns", "logits", "rotary", "values", "experts", "pooling"]
"""Where the units of a space end: columns of a linear module; attention logits; logits of queries and keys that are
rotated by position (RoPE); columns under the values of KV heads, in a basis of their own; whole experts; or columns of
a linear module behind the last block, in an MLP that pools tokens or merges some into one."""
OUTSIDE = "/"
"""Before the path of a module that is not in a block but in the model."""
Pairing = Literal["halves", "neighbours"]
"""How rotary pairs lie in a head: a dimension and the one half a head further, or a dimension and the next."""
Rounding = Literal["floor", "ceil", "nearest"]
Counting = Rounding | Literal["steps"]
"""How a ratio becomes a number of units: rounded as recipes say it, or to the nearest multiple."""
"""How units times ratio becomes a whole number of units."""
Axis = Literal["rows", "columns", "table"]
"""Outputs of a linear module, its inputs, or the last axis of a table, whose `module` is the tensor itself."""
Kind = Literal["weight", "bias", "itself"]
"""A tensor of a module, or a tensor by its own path."""
Dimension = Callable[[str], int]
"""Looks up a dimension of a model by name."""

KIND_OF_SPACE: dict[str, KindOfSpace] = {
    "qk": "logits",
    "rotary": "rotary",
    "queries": "columns",
    "heads": "columns",
    "values": "values",
    "cross_heads": "columns",
    "linear_heads": "columns",
    "mlp": "columns",
    "dense": "columns",
    "shared": "columns",
    "experts": "experts",
    "pooling": "pooling",
}
"""The kind of each space is the same in every family, so that recipes are checked without a model."""
ALIKE: dict[SpaceName, SpaceName] = {
    "dense": "mlp",
    "pooling": "mlp",
    "cross_heads": "heads",
    "linear_heads": "heads",
}
"""Spaces that a recipe prunes as it does others, unless it says something of them."""
BESIDE: frozenset[str] = frozenset({"qk", "rotary", "queries", "values"})
"""Spaces with copies side by side (`Space.for_each`) that keep equally many units, in every family that has them."""
COUPLED: tuple[tuple[str, str], ...] = (
    ("qk", "heads"),
    ("rotary", "queries"),
    ("rotary", "heads"),
    ("queries", "heads"),
    ("values", "queries"),
    ("values", "heads"),
)
"""Spaces that cross on one tensor: a unit of one saves less once units of the other are gone. Units of the first stand
inside units of the second. Values change the basis of their tensors and are pruned last."""


def axis_dim(axis: Axis) -> int:
    """Return the dimension of a weight (outputs, inputs) that an axis is."""
    return int(axis != "rows")


def product(factors: list[str | int], dimension: Dimension) -> int:
    """Multiply numbers and dimensions by name."""
    return prod(factor if isinstance(factor, int) else dimension(factor) for factor in factors)


class StrictModel(BaseModel):
    """Data of a description's file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Incidence(StrictModel):
    """The places of a space's units on one axis of one linear module of a block.

    The axis is `after` lines of something else, then `copies` runs of units, then the rest. In a run, units follow each
    other with `lines_per_unit` neighbouring lines, `stride` lines from one unit to the next. Units may stand several
    times: every `repeated_units` of them are repeated `repeats` times before the next come. `axis` is that of a table,
    by default its last.
    """

    module: str
    lines_per_unit: list[str | int] = []
    copies: int = Field(1, ge=1)
    after: list[list[str | int]] = []
    stride: list[list[str | int]] = []
    repeats: list[str | int] = []
    repeated_units: list[str | int] = []
    axis: int | None = Field(None, ge=0)

    def lines(self, units: "Tensor", count: int, dimension: Dimension) -> "Tensor":
        """Return the rows or columns of some units, int64, one run after the other.

        Args:
            units: ascending.
            count: units in all.
        """
        import torch  # here, so that families are read without it

        width = product(self.lines_per_unit, dimension)
        start, stride = (sum(product(factors, dimension) for factors in sums) for sums in (self.after, self.stride))
        stride, repeats = stride or width, product(self.repeats, dimension)
        if (width, start, stride, repeats, self.copies) == (1, 0, 1, 1, 1):
            return units
        run = product(self.repeated_units, dimension) if self.repeated_units else count
        again = torch.arange(repeats, device=units.device) * run
        places = (units // run * run * repeats + units % run)[:, None] + again
        places = places.flatten().sort().values if repeats > 1 else units
        lines = (places[:, None] * stride + torch.arange(width, device=units.device)).flatten()
        return torch.cat([lines + start + copy * stride * repeats * count for copy in range(self.copies)])

    def table_dim(self, dimensions: int) -> int:
        """Return the axis of a table of so many."""
        return dimensions - 1 if self.axis is None else self.axis

    def per_unit(self, dimension: Dimension) -> int:
        """Return the rows or columns of one unit, all runs together."""
        return self.copies * product(self.repeats, dimension) * product(self.lines_per_unit, dimension)


class Space(StrictModel):
    """An axis that several tensors of a block share, counted in units that are kept or dropped whole."""

    unit: str
    units: str
    for_each: str | None = None
    rounding: Rounding
    rows: list[Incidence] = Field(min_length=1)
    tables: list[Incidence] = []
    config: dict[str, list[str | int]]
    fixed: str | None = None
    attributes: dict[str, list[str | int]] = {}
    whole: str | None = None
    experts: bool = False
    uniform: bool = False
    same_units: bool = False
    unless: str | None = None

    def of_expert(self, expert: int) -> "AnySpace":
        text = self.model_dump_json().replace("{expert}", str(expert))
        return type(self).model_validate_json(text)  # type: ignore[return-value]

    @property
    @abstractmethod
    def incidences(self) -> list[tuple[Axis, Incidence]]:
        """Everything that the space's units lie on, tables excepted."""

    @property
    @abstractmethod
    def measured(self) -> str:
        """The linear module under whose weight statistics file the space's moments."""

    @property
    @abstractmethod
    def solved_from(self) -> list[str]:
        """Linear modules whose tensors scores and compensation read."""

    @abstractmethod
    def list_rewritten(self, method: str) -> list[str]:
        """Return the linear modules whose values a compensation changes; the others only lose units."""

    @property
    def modules(self) -> list[str]:
        """Linear modules that have the space as an axis, once each."""
        return list(dict.fromkeys(incidence.module for _, incidence in self.incidences))

    @property
    def readers(self) -> list[str]:
        """Linear modules that make the space, the first from the input that is observed."""
        return [incidence.module for incidence in self.rows]

    def count(self, dimension: Dimension) -> int:
        """Return the units that a width counts: of q and k, those of one head."""
        return dimension(self.units)

    def copies(self, dimension: Dimension) -> int:
        """Return how often the counted units stand side by side."""
        return 1 if self.for_each is None else dimension(self.for_each)

    def site_units(self, dimension: Dimension) -> int:
        return self.count(dimension) * self.copies(dimension)

    def first(self, count: int, dimension: Dimension) -> "Tensor":
        """Return the first `count` units of every copy: all choices of as many give the same shapes."""
        import torch

        starts = torch.arange(self.copies(dimension)) * self.count(dimension)
        return (starts[:, None] + torch.arange(count)).flatten()


class ColumnEnd(Space):
    """A space that ends in the columns of one linear module, the consumer, which compensation rewrites."""

    columns: Incidence

    @property
    def consumer(self) -> str:
        return self.columns.module

    @property
    def incidences(self) -> list[tuple[Axis, Incidence]]:
        return [*(("rows", incidence) for incidence in self.rows), ("columns", self.columns)]

    @property
    def measured(self) -> str:
        return self.consumer

    @property
    def solved_from(self) -> list[str]:
        return [self.consumer]

    def list_rewritten(self, method: str) -> list[str]:
        return [self.consumer]


class PoolingSpace(ColumnEnd):
    """The columns of an MLP that pools tokens, or merges some, behind the last block: a site of that block.

    Its modules are `OUTSIDE` the blocks. What its consumer makes is not added to the residual stream.
    """

    kind: Literal["pooling"]


class ConsumerSpace(ColumnEnd):
    """A space whose consumer is in a block, and adds to the residual stream.

    A space that is `part_of` another shares its moments and metric, which are of the consumer's input and output.
    A space that is `wider_than` another has the same linear modules in other blocks, with more columns there.
    Linear modules that read something else than the first of `rows` are `elsewhere`: of cross-attention what the
    encoder has made, or that too, and of latent attention a latent vector.
    """

    part_of: SpaceName | None = None
    wider_than: SpaceName | None = None
    elsewhere: list[str] = []
    scale: str | None = None
    multiplier: str | None = None
    gate: str | None = None
    norm: str | None = None


class ColumnSpace(ConsumerSpace):
    """A space whose units are columns of the consumer as they are."""

    kind: Literal["columns"]


class ValueSpace(ConsumerSpace):
    """The axis inside a KV head that v and the columns under each of its query heads share, in a basis to be found."""

    kind: Literal["values"]

    def list_rewritten(self, method: str) -> list[str]:
        return [*self.readers, self.consumer]  # both change basis, whatever the method


class ReaderSpace(Space):
    """A space without a consumer: it lies on rows alone, of q and then k, or of the router."""

    @property
    def incidences(self) -> list[tuple[Axis, Incidence]]:
        return [("rows", incidence) for incidence in self.rows]

    @property
    def measured(self) -> str:
        return self.rows[0].module

    @property
    def solved_from(self) -> list[str]:
        return self.readers


class LogitSpace(ReaderSpace):
    """The axis inside a head that q and k share and that ends in the attention logits."""

    kind: Literal["logits"]

    def list_rewritten(self, method: str) -> list[str]:
        return [] if method == "none" else self.readers


class RotarySpace(ReaderSpace):
    """Rotary pairs, as many in every KV head: rows of k, and of all the query heads that share it.

    `pairs` says how they lie in a head, `angles` how their cosines and sines lie in what a block is passed.
    """

    kind: Literal["rotary"]
    pairs: Pairing
    angles: Pairing

    def list_rewritten(self, method: str) -> list[str]:
        return [] if method == "none" else [self.measured]  # the keys that stay are as they were


class ExpertSpace(ReaderSpace):
    """Whole experts of a block; `rows` are those of the router. The experts' other tensors go with them."""

    kind: Literal["experts"]

    def list_rewritten(self, method: str) -> list[str]:
        return []


AnySpace = Annotated[
    ColumnSpace | ValueSpace | LogitSpace | RotarySpace | ExpertSpace | PoolingSpace, Field(discriminator="kind")
]


def spaces_among(spaces: Mapping[SpaceName, AnySpace], modules: Set[str]) -> dict[SpaceName, AnySpace]:
    """Return the spaces of a block that has these linear modules: those that have all that they name."""
    return {name: space for name, space in spaces.items() if modules >= {*space.modules}}
