"""What the parts of a run ask of a machine, from shapes alone: FLOPs, bytes and operations. Pure arithmetic.

FLOPs are exact for the products that make up nearly all of a large model's time. What element-wise operations move is
counted from a llama's block; it matters for small models only.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.calibration.moments import rows_at_once
from ckpt_prune.calibration.products import gram_flops
from ckpt_prune.calibration.streams import TOKENS_PER_BATCH
from ckpt_prune.compensation.spectrum import EXACT_WIDTH, ITERATIONS, SKETCH
from ckpt_prune.machine import Rates

FLOATS_OF_HIDDEN, FLOATS_OF_MLP = 40, 30
"""Numbers of 4 bytes that norms, rotary positions, activations and additions move for each number of a token's hidden
state, and for each column of its mlp."""
CALLS_OF_BLOCK = 60
"""Operations of one run of a block."""
BACK = 2.35
"""A run of a block with its gradient at the input, in runs without."""
REDUCTIONS = 0.15
"""What the vectors of moments take for a number, in squares added up out of a cache."""
BYTES_OF_LOGIT = 300
"""Moved for each logit by a softmax, a draw of labels and the gradient."""
VALUES_ALONE = 1 / 3
"""Of what eigenvalues and vectors take together."""
BYTES_OF_PAIR = 100
"""Moved for each product of two dimensions of a head, in each sample."""
STEPS = 40
"""Of a search for what makes up for dimensions of queries and keys."""
POLAR = 25
"""FLOPs of a polar factor, in widths cubed."""


@dataclass(frozen=True)
class Work:
    """What something asks of a machine, by what limits it: the counterparts of `machine.Rates`."""

    gemm: float = 0
    grams: float = 0
    single: float = 0
    wide: float = 0
    factor: float = 0
    eigen: float = 0
    moved: float = 0
    reduced: float = 0
    calls: float = 0
    disk: float = 0
    hashed: float = 0

    def __add__(self, other: "Work") -> "Work":
        """Both, one after the other."""
        return Work(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, times: float) -> "Work":
        """The same so many times."""
        return Work(**{f.name: getattr(self, f.name) * times for f in fields(self)})

    def seconds(self, rates: Rates) -> float:
        """How long it takes: nothing overlaps."""
        return sum(float(getattr(self, f.name)) / float(getattr(rates, f.name)) for f in fields(self))


@dataclass(frozen=True)
class Site:
    """The consumer of a space.

    Attributes:
        outputs: d_out.
        inputs: d.
        kept: inputs that stay, k.
        units: of the space.
    """

    outputs: int
    inputs: int
    kept: int
    units: int


@dataclass(frozen=True)
class Heads:
    """What a space inside queries and keys lies on.

    Attributes:
        heads: of queries.
        groups: heads of keys whose units go together with those of their queries; 0 where every head is by itself.
        width: of a head, or of what is turned of it.
        units: of a head.
        kept: units that stay.
    """

    heads: int
    groups: int
    width: int
    units: int
    kept: int


@dataclass(frozen=True)
class Shape:
    """A model, as far as time and memory go.

    Attributes:
        blocks: how many.
        weights: of the matrices of a block.
        hidden: width of the residual stream.
        mlp: columns.
        attention: width of all query heads.
        outputs: of the head; the hidden size where there is none.
        outside: weights outside the blocks.
        stored: bytes of a weight in the checkpoint.
        sites: consumers of the spaces that end in columns, and of those in turned ones.
        consumers: spaces that stand in no other: one for every consumer.
        inner: where spaces inside queries and keys lie.
        readers: widths of the inputs of other linear modules that moments are taken of.
    """

    blocks: int
    weights: int
    hidden: int
    mlp: int
    attention: int
    outputs: int
    outside: int
    stored: int
    sites: dict[SpaceName, Site]
    consumers: tuple[SpaceName, ...]
    inner: dict[SpaceName, Heads]
    readers: tuple[int, ...]

    @classmethod
    def of(cls, model: Model, kept: dict[SpaceName, int] | None = None) -> Self:
        """A model's own.

        Args:
            model: any.
            kept: units of each space that stay, the same in all blocks; all by default.
        """
        shapes, family = model.tensors, model.family
        first = model.spaced.start
        own = [shapes[name][1] for name in model.block_names(first) if name in shapes]
        outside = [shapes[name][1] for name in model.outside() if name in shapes and len(shapes[name][1]) == 2]
        sites: dict[SpaceName, Site] = {}
        for space, description in family.columns.items():
            if space not in family.consumers and space not in (kept or {}):
                continue  # what stands inside another space is there on request only
            outputs, inputs = shapes[model.tensor(first, description.consumer)][1]
            stays = (kept or {}).get(space, model.units(space)) * model.copies(space) * model.unit_columns(space)
            sites[space] = Site(outputs, inputs, stays, model.units(space))
        inner = {space: _heads(model, space, (kept or {}).get(space)) for space in (*family.logits, *family.turned)}
        attention = shapes[model.tensor(0, family.attention.output)][1][1]
        return cls(
            blocks=model.blocks,
            weights=sum(shape[0] * shape[1] for shape in own if len(shape) == 2),
            hidden=model.dimension("hidden"),
            mlp=max(site.inputs for site in sites.values()),
            attention=attention,
            outputs=getattr(model.config, "vocab_size", None) or model.dimension("hidden"),
            outside=sum(shape[0] * shape[1] for shape in outside),
            stored=model.dtype.itemsize,
            sites=sites,
            consumers=tuple(family.consumers),
            inner=inner,
            readers=tuple(model.linear_widths.values()),
        )

    # ---- with samples through blocks -------------------------------------------------------------------------

    def run(self, samples: int, tokens: int) -> Work:
        """Samples through one block."""
        count = samples * tokens
        per_token = 2 * self.weights + 4 * tokens * self.attention
        moved = 4 * (FLOATS_OF_HIDDEN * self.hidden + FLOATS_OF_MLP * self.mlp)
        batches = -(-samples // max(1, TOKENS_PER_BATCH // tokens))
        return Work(gemm=count * per_token, moved=count * moved, calls=CALLS_OF_BLOCK * batches)

    def read(self) -> Work:
        """A block from the checkpoint, widened to what it runs in."""
        return Work(moved=self.weights * (self.stored + 8), calls=CALLS_OF_BLOCK)

    def moments(self, count: int, *, gram: bool, linears: bool = False) -> Work:
        """Moments of `count` tokens at the sites of a block, and perhaps at its other inputs."""
        found = Work()
        for width in (*(self.sites[space].inputs for space in self.consumers), *(self.readers if linears else ())):
            found += moments(count, width, gram=gram)
        return found

    def logits(self, count: int) -> Work:
        """The head over `count` tokens."""
        return Work(gemm=2 * count * self.hidden * self.outputs, moved=8 * count * self.outputs)

    # ---- memory ----------------------------------------------------------------------------------------------

    def states(self, samples: int, tokens: int) -> int:
        """Bytes of one set of hidden states."""
        return 4 * samples * tokens * self.hidden

    @property
    def block_bytes(self) -> int:
        """A block as stored and as it runs."""
        return self.weights * (4 + self.stored)

    def activations(self, tokens: int) -> int:
        """Bytes of a batch inside a block."""
        return 4 * max(TOKENS_PER_BATCH, tokens) * (6 * self.hidden + 4 * self.mlp)

    @property
    def widest(self) -> int:
        """Inputs of the widest site."""
        return max(site.inputs for site in self.sites.values())


def _heads(model: Model, space: SpaceName, kept: int | None) -> Heads:
    units = model.units(space)
    stays = units if kept is None else kept
    if space in model.family.logits:
        return Heads(model.copies(space), 0, units, units, stays)
    return Heads(model.dimension("query_heads"), model.copies(space), 2 * units, units, stays)


def moments(count: int, width: int, *, gram: bool) -> Work:
    """Moments of `count` tokens of one input."""
    return Work(
        reduced=REDUCTIONS * count * width,
        grams=gram_flops(count, width) if gram else 0,
        calls=20 + 7 * count / rows_at_once(width, torch.float64),
    )


def ranked(site: Site) -> Work:
    """Units of a site in the order of optimal brain surgeon: an inverse, then updates of H and A."""
    d = site.inputs
    return Work(wide=2 * d**3 + site.outputs * d**2, factor=3 * d**3, moved=24 * d**2, calls=30 * site.units)


def factored(site: Site, *, metric: bool = False) -> Work:
    """Costs of every width in one order (`scoring.costs`), perhaps under a metric."""
    d, o = site.inputs, site.outputs
    weighed = 2 * o**2 * d if metric else 0
    return Work(factor=d**3 / 3, wide=2 * o * d**2 + weighed, moved=40 * d**2, calls=40)


def inner_moments(heads: Heads, samples: int, tokens: int) -> Work:
    """Products of queries and of keys over each sample, and those of both."""
    each = heads.heads * heads.width**2
    return Work(single=4 * samples * tokens * each, moved=BYTES_OF_PAIR * samples * each, calls=30)


def inner_ranked(heads: Heads) -> Work:
    """Units in queries and keys in their order, and what every number of them loses."""
    if heads.groups:
        sharing = heads.heads // heads.groups
        site = Site(sharing, heads.width * sharing, 2 * heads.kept * sharing, heads.units)
        return (ranked(site) + factored(site)) * heads.groups
    return Work(eigen=9 * heads.heads * heads.width**3, calls=40 * heads.heads)


def inner_solved(heads: Heads, fits: int) -> Work:
    """So many fits of what stays of queries and keys to the logits."""
    if heads.groups:
        own = 9 * (2 * heads.kept) ** 3
        return Work(eigen=heads.heads * own * fits, calls=20 * fits)
    return Work(wide=STEPS * 4 * heads.heads * heads.width**4 * fits, calls=STEPS * 10 * heads.heads * fits)


def blended(site: Site) -> Work:
    """Sums over tokens that a fit needs, from the moments of one fold."""
    d = site.inputs
    return Work(wide=2 * site.outputs * d**2, moved=30 * d**2, calls=30)


def refitted(site: Site) -> Work:
    """One ridge, and the errors before and after."""
    k, o = site.kept, site.outputs
    return Work(factor=k**3 / 3, wide=10 * o * k**2, moved=16 * k**2, calls=30)


def described(site: Site, *, errors: bool) -> Work:
    """The spectrum of the inputs, and perhaps CORP's errors."""
    d, k, o = site.inputs, site.kept, site.outputs
    few = SKETCH + SKETCH // 4
    found = Work(eigen=VALUES_ALONE * 9 * d**3) if d <= EXACT_WIDTH else Work(wide=2 * (ITERATIONS + 2) * few * d**2)
    found += Work(moved=40 * d**2, calls=100)
    return found + Work(factor=k**3 / 3, wide=2 * o * ((d - k) * d + k**2), moved=24 * k**2) if errors else found


def held_out(site: Site, strengths: int, shares: int) -> Work:
    """Held-out errors of ridges of every strength and share on one fold (`compensation.held_out`)."""
    k, o = site.kept, site.outputs
    turned = 2 * (2 * k**3 + 3 * o * k**2)
    return Work(eigen=9 * k**3, wide=turned + 2 * 3 * o * k**2, moved=strengths * shares * 8 * o * k, calls=200)


def turned(site: Site) -> Work:
    """One compensation rotation and its error."""
    k, o = site.kept, site.outputs
    return Work(wide=POLAR * o**3 + 2 * o**2 * k + 2 * o * k**2, calls=100)


def tried(site: Site, counts: int) -> Work:
    """What an order loses at some widths, once it is factored."""
    d, o = site.inputs, site.outputs
    return Work(wide=counts * o * d**2, moved=counts * 24 * o * d, calls=10 * counts)


def back(shape: Shape, samples: int, tokens: int) -> Work:
    """A pass forward and back through one block."""
    return shape.read() * 2 + shape.run(samples, tokens) * (1 + BACK)


def back_of_logits(shape: Shape, count: int) -> Work:
    """The head forward and back, with a softmax, for so many tokens."""
    return Work(gemm=6 * count * shape.hidden * shape.outputs, moved=BYTES_OF_LOGIT * count * shape.outputs)


@dataclass(frozen=True)
class Stage:
    """A part of a job.

    Attributes:
        name: as in the report, where it has it.
        work: what it asks of the machine.
        memory: bytes that it holds at most, beside what the process had before.
    """

    name: str
    work: Work
    memory: int
