"""Spaces: axes that several tensors of a block share, as data (model/README.md).

A space lists its incidences: on which linear modules its units lie, along which axis, how many rows or columns each
has and in what order. `cuts` derives shapes, cutting and padding from that.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

if TYPE_CHECKING:
    from torch import Tensor

KnownSpace = Literal["qk", "rotary", "queries", "heads", "values", "mlp", "shared", "experts"]
"""Spaces that recipes speak of."""
SPACES: tuple[str, ...] = get_args(KnownSpace)


def expert_space(name: str, expert: int | None) -> str:
    """The name of a space of one expert."""
    return name if expert is None else f"{name}.{expert}"


def recipe_space(name: str) -> str:
    """What recipes call a space: without the number of its expert."""
    return name.partition(".")[0]


def expert_of(name: str) -> int | None:
    """The expert whose space this is; None where the space is of a whole block."""
    number = name.partition(".")[2]
    return int(number) if number else None


def first_expert_spaces(names: Iterable[str]) -> dict[str, str]:
    """What recipes call spaces → the first of them that is called so: one expert's are as wide as the next one's."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(recipe_space(name), name)
    return found


class _Known:
    """Validates names of spaces, those of single experts (`mlp.3`) among them."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: Any, known: core_schema.ValidatorFunctionWrapHandler) -> Any:
            name, dot, number = value.partition(".") if isinstance(value, str) else (value, "", "")
            known(name if number.isdecimal() == bool(dot) else value)
            return value

        return core_schema.no_info_wrap_validator_function(check, core_schema.literal_schema([*SPACES]))


SpaceName = Annotated[str, _Known()]
"""A space of a block. Where a block has experts, each has spaces of its own, `mlp.0`, `mlp.1`; recipes say `mlp`."""


class Site(NamedTuple):
    """One space of one block: where units are kept or dropped."""

    block: int
    space: SpaceName


Ends = Literal["columns", "logits", "rotary", "values", "experts"]
"""What a space ends in: the columns of a linear module as they are, the attention logits, those of queries and keys
that are turned by position (RoPE), the columns under the values of KV heads, in a basis of their own, or whole
experts."""
Pairing = Literal["halves", "neighbours"]
"""How rotary pairs lie in a head: a dimension and the one half a head further, or a dimension and the next."""
Rounding = Literal["floor", "ceil", "nearest"]
"""From units times a ratio to a whole number of units."""
Axis = Literal["rows", "columns", "table"]
"""Of a linear module: its outputs, or its inputs; or the last of a table, whose `module` is the tensor itself."""
Kind = Literal["weight", "bias", "itself"]
"""Of a tensor of a module, or a tensor by its own path."""
Dimension = Callable[[str], int]
"""The value of a dimension of a model, by name."""

ENDS: dict[str, Ends] = {
    "qk": "logits",
    "rotary": "rotary",
    "queries": "columns",
    "heads": "columns",
    "values": "values",
    "mlp": "columns",
    "shared": "columns",
    "experts": "experts",
}
"""What each space ends in, in every family that has it: recipes are checked without a model."""
BESIDE: frozenset[str] = frozenset({"qk", "rotary", "queries", "values"})
"""Spaces whose units stand side by side (`Space.per`), as many kept in each, in every family that has them."""
COUPLED: tuple[tuple[str, str], ...] = (
    ("qk", "heads"),
    ("rotary", "queries"),
    ("rotary", "heads"),
    ("queries", "heads"),
    ("values", "queries"),
    ("values", "heads"),
)
"""Spaces that cross on one tensor: a unit of one saves less where units of the other are gone. Those of the first stand
inside units of the second. Values turn what they lie on, and go when the others have gone."""


def axis_dim(axis: Axis) -> int:
    """Which dimension of a weight (outputs, inputs) the axis is."""
    return int(axis != "rows")


class StrictModel(BaseModel):
    """Data of a family's file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Incidence(StrictModel):
    """Where the units of a space lie on one axis of one linear module of a block.

    The axis is `after` lines of something else, then `copies` runs of units, then whatever follows. In a run, units
    follow each other with `each` neighbouring lines, and with lines of something else between them where `stride` is
    more. Units may stand several times: each run of `run` units is repeated `times` times before the next one comes.

    Attributes:
        module: path of the linear module in a block, as it stands on disk.
        each: dimensions whose product is the lines of one unit in one run. Values and queries that alternate in one
            projection are one unit of several head sizes.
        copies: runs one after the other (a SwiGLU's gate and up in one tensor).
        after: products of dimensions whose sum is the lines before the first run (keys behind queries in a fused
            projection).
        stride: products of dimensions whose sum is the lines from one unit of a run to the next; `each` by default.
        times: dimensions whose product is how often units stand there (the values of a KV head: once under every query
            head of its group).
        run: dimensions whose product is the units that are repeated together; all by default.
    """

    module: str
    each: list[str | int] = []
    copies: int = Field(1, ge=1)
    after: list[list[str | int]] = []
    stride: list[list[str | int]] = []
    times: list[str | int] = []
    run: list[str | int] = []

    def lines(self, units: "Tensor", count: int, dimension: Dimension) -> "Tensor":
        """Rows or columns of some units, int64, one run after the other.

        Args:
            units: which, ascending.
            count: units in all.
            dimension: of the model.
        """
        import torch  # here: what a family is, is known without it

        each = product(self.each, dimension)
        start, stride = (sum(product(each, dimension) for each in sums) for sums in (self.after, self.stride))
        stride, times = stride or each, product(self.times, dimension)
        if (each, start, stride, times, self.copies) == (1, 0, 1, 1, 1):
            return units
        run = product(self.run, dimension) if self.run else count
        again = torch.arange(times, device=units.device) * run
        places = (units // run * run * times + units % run)[:, None] + again
        places = places.flatten().sort().values if times > 1 else units
        lines = (places[:, None] * stride + torch.arange(each, device=units.device)).flatten()
        return torch.cat([lines + start + copy * stride * times * count for copy in range(self.copies)])

    def per_unit(self, dimension: Dimension) -> int:
        """Rows or columns of one unit, all runs together."""
        return self.copies * product(self.times, dimension) * product(self.each, dimension)


class Space(StrictModel):
    """An axis that several tensors of a block share, counted in units that are kept or dropped whole.

    Attributes:
        unit: what one unit is called in tables.
        units: the dimension that counts the units of the dense model.
        per: a dimension that counts how many times these units stand side by side, as many kept in each (a head of q
            and k), or None. The units of a site are all of them.
        rounding: how the published methods round units times ratio to a number of dropped units (scoring/README.md,
            section 3).
        rows: linear modules that make the space.
        tables: tensors of a block that are looked up or added, one column or number for each unit (a bias of every head
            by position, one of every expert); `module` is the path of the tensor.
        config: config key → dimensions whose product, times the units kept, is its new value.
        fixed: why the family's stock class has it at its dense width only, with `{model_type}` for its name; or None.
            Remote code then builds the stock block at its dense width, in which all that is scaled, rotated or
            looked up by head is right, and narrows what the space lies on.
        attributes: number of a module of a block (path) → dimensions whose product, times the units, it counts: it is
            narrowed too.
        whole: why no class, remote code included, computes the same function with fewer units of it; or None. It is
            measured and masked, never pruned.
        experts: whether every expert of a block has one of its own. Its modules have `{expert}` in their paths, and
            all experts of a block keep as many units.
    """

    unit: str
    units: str
    per: str | None = None
    rounding: Rounding
    rows: list[Incidence]
    tables: list[Incidence] = []
    config: dict[str, list[str]]
    fixed: str | None = None
    attributes: dict[str, list[str | int]] = {}
    whole: str | None = None
    experts: bool = False

    def of_expert(self, expert: int) -> "AnySpace":
        """The space of one expert."""
        text = self.model_dump_json().replace("{expert}", str(expert))
        return type(self).model_validate_json(text)  # type: ignore[return-value]

    @property
    @abstractmethod
    def incidences(self) -> list[tuple[Axis, Incidence]]:
        """Everything the space's units lie on."""

    @property
    @abstractmethod
    def measured(self) -> str:
        """The linear module under whose weight statistics file the space's moments."""

    @property
    @abstractmethod
    def solved_from(self) -> list[str]:
        """Linear modules whose tensors scores and compensation look at."""

    @abstractmethod
    def rewritten(self, method: str) -> list[str]:
        """Linear modules whose values a compensation changes; the others only lose units."""

    @property
    def modules(self) -> list[str]:
        """Linear modules that have the space as an axis, once each."""
        return list(dict.fromkeys(incidence.module for _, incidence in self.incidences))

    @property
    def readers(self) -> list[str]:
        """Linear modules that make the space, all from the same input."""
        return [incidence.module for incidence in self.rows]

    def count(self, dimension: Dimension) -> int:
        """Units that are counted: of q and k, those of one head."""
        return dimension(self.units)

    def copies(self, dimension: Dimension) -> int:
        """How many times these stand side by side."""
        return 1 if self.per is None else dimension(self.per)

    def site_units(self, dimension: Dimension) -> int:
        """Units of a site."""
        return self.count(dimension) * self.copies(dimension)

    def first(self, count: int, dimension: Dimension) -> "Tensor":
        """The first `count` units of every copy: any others give the same shapes."""
        import torch

        starts = torch.arange(self.copies(dimension)) * self.count(dimension)
        return (starts[:, None] + torch.arange(count)).flatten()


class ConsumerSpace(Space):
    """A space that ends in the columns of one linear module, the consumer, which compensation rewrites.

    Attributes:
        columns: where it lies on the consumer.
        within: the space on the same consumer inside whose units these stand (query heads and values in a KV group), or
            None. Moments and the metric are of the consumer's input and output, and so the same for both.
        scale: the tensor of a block that multiplies the consumer's output, element by element, before it is added to
            the residual stream (layer scale), or None.
        multiplier: the config key of a number that multiplies it before, or None.
        gate: the linear module of a block that gives every token a factor of the consumer's output (shared experts), or
            None. Moments are not weighed by it.
        norm: the RMSNorm of a block that the consumer's output passes before it is added (post-norm of a sandwich), or
            None.
    """

    columns: Incidence
    within: SpaceName | None = None
    scale: str | None = None
    multiplier: str | None = None
    gate: str | None = None
    norm: str | None = None

    @property
    def consumer(self) -> str:
        """The linear module whose columns are the axis."""
        return self.columns.module

    @property
    def incidences(self) -> list[tuple[Axis, Incidence]]:
        """Its makers' rows and its consumer's columns."""
        return [*(("rows", incidence) for incidence in self.rows), ("columns", self.columns)]

    @property
    def measured(self) -> str:
        """The consumer: moments are of its input."""
        return self.consumer

    @property
    def solved_from(self) -> list[str]:
        """The consumer."""
        return [self.consumer]

    def rewritten(self, method: str) -> list[str]:
        """The consumer, whatever the method: none drops its columns."""
        return [self.consumer]


class ColumnSpace(ConsumerSpace):
    """A space whose units are columns of the consumer as they are."""

    ends: Literal["columns"]


class ValueSpace(ConsumerSpace):
    """The axis inside a KV head that v and the columns under each of its query heads share, in a basis to be found."""

    ends: Literal["values"]

    def rewritten(self, method: str) -> list[str]:
        """The consumer and v, whatever the method: both turn."""
        return [*self.readers, self.consumer]


class ReaderSpace(Space):
    """An axis that q and k share and that ends in what they make together; `rows` are q, then k."""

    @property
    def incidences(self) -> list[tuple[Axis, Incidence]]:
        """Rows of q and k."""
        return [("rows", incidence) for incidence in self.rows]

    @property
    def measured(self) -> str:
        """The query projection."""
        return self.rows[0].module

    @property
    def solved_from(self) -> list[str]:
        """Both projections."""
        return self.readers


class LogitSpace(ReaderSpace):
    """The axis inside a head that q and k share and that ends in the attention logits."""

    ends: Literal["logits"]

    def rewritten(self, method: str) -> list[str]:
        """Both projections, unless the method only drops rows."""
        return [] if method == "none" else self.readers


class RotarySpace(ReaderSpace):
    """Rotary pairs, as many in every KV head: rows of k, and of all the query heads that share it.

    Attributes:
        pairs: how they lie in a head.
        angles: how their cosines and sines lie in what a block is passed.
    """

    ends: Literal["rotary"]
    pairs: Pairing
    angles: Pairing

    def rewritten(self, method: str) -> list[str]:
        """The query projection: the keys that stay are as they were."""
        return [] if method == "none" else [self.measured]


def make_rotary_space(query: str, key: str, pairs: Pairing, angles: Pairing) -> RotarySpace:
    """The rotary pairs of a family whose queries and keys are whole modules of their own.

    Args:
        query: linear module.
        key: linear module.
        pairs: how pairs lie in a head.
        angles: how cosines and sines lie.
    """
    halves, each = (2, 1) if pairs == "halves" else (1, 2)
    return RotarySpace(
        ends="rotary",
        unit="rotary pair",
        units="pairs",
        per="kv_heads",
        rounding="floor",
        rows=[
            Incidence(module=query, each=[each], copies=1, times=[halves, "group"], run=["pairs"]),
            Incidence(module=key, each=[each], copies=1, times=[halves], run=["pairs"]),
        ],
        config={"num_rotary_pairs": []},
        fixed="no stock class has queries and keys without some of their rotary pairs",
        pairs=pairs,
        angles=angles,
    )


class ExpertSpace(Space):
    """Whole experts of a block; `rows` are those of the router. What else is an expert's goes with it."""

    ends: Literal["experts"]

    @property
    def incidences(self) -> list[tuple[Axis, Incidence]]:
        """Rows of the router."""
        return [("rows", incidence) for incidence in self.rows]

    @property
    def measured(self) -> str:
        """The router."""
        return self.rows[0].module

    @property
    def solved_from(self) -> list[str]:
        """The router: scores look at moments alone."""
        return [self.measured]

    def rewritten(self, method: str) -> list[str]:
        """None: rows of the router are dropped."""
        return []


AnySpace = Annotated[ColumnSpace | ValueSpace | LogitSpace | RotarySpace | ExpertSpace, Field(discriminator="ends")]


def product(dimensions: list[str | int], dimension: Dimension) -> int:
    """The product of numbers and of dimensions by name."""
    return prod(each if isinstance(each, int) else dimension(each) for each in dimensions)
