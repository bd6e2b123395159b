"""`frontier --for onnxruntime --target-latency`: fewer bits, or fewer columns, for graphs of a time?

Graphs in float32, int8 and int4 are timed in onnxruntime. Those that take too long are pruned by what lacks: a share
of the time, for which `prune --target-latency` finds widths by the measured times of columns and heads. The graph of
what is pruned is timed again, and the share corrected once.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Protocol, Self, TypeVar

from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.onnx.quantization.deciding import Decider, Decision
from ckpt_prune.recipe.sizes import Size
from ckpt_prune.runner.frontier.candidates import MeasuredRounded
from ckpt_prune.runner.frontier.record import R, Result

FEWEST = 0.3
"""Share of a graph's time below which it is not pruned: nothing usable is left."""
CORRECTED = 1
"""Times that a model is pruned again, if its graph takes too long or leaves more than `ROOM` of the time."""
ROOM = 0.9
AIM = 0.97
"""Share of the time that is aimed at the second time: one that took a little too long would else do so again."""

Decide = Callable[[], Decision | None]
"""Decides about a graph's weights; None leaves all in float32."""


class Maker(Protocol):
    """Decides about the graphs of a model, and makes that of the model pruned to a share of its time."""

    @property
    def int4(self) -> Decider: ...

    @property
    def int8(self) -> Decider: ...

    @property
    def may_prune(self) -> bool: ...

    def prune(self, share: Fraction) -> Self: ...


M = TypeVar("M", bound=Maker)


def within_time(maker: M, found: list[MeasuredRounded], size: Size) -> Iterator[tuple[M, str, GraphType, Decide]]:
    """Yield what is to be measured next: whose graph, its name, its type and how its weights are stored."""
    yield maker, "float32", "fp32", lambda: None
    yield maker, "int8 everywhere", "int8", maker.int8.as_first
    yield maker, "int4 everywhere, GPTQ", "int4", lambda: maker.int4.by_gptq().as_first()
    whole = {each.candidate.dtype: each for each in found}
    limit = limit_of(size, found)
    for dtype in ("fp32", "int8", "int4") if maker.may_prune else ():
        own = whole[dtype]
        share, last = limit / took(own), own
        for _ in range(1 + CORRECTED):
            if not FEWEST <= share < 1:
                break
            pruned = maker.prune(Fraction(share))
            name = f"pruned to {100 * share:.1f} % of the time, {own.candidate.name}"
            yield pruned, name, dtype, _decide(pruned, dtype)
            last = found[-1]
            if ROOM * limit <= took(last) <= limit:
                break
            share *= AIM * limit / took(last)


def _decide(maker: Maker, dtype: GraphType) -> Decide:
    if dtype == "fp32":
        return lambda: None
    return maker.int8.as_first if dtype == "int8" else lambda: maker.int4.by_gptq().as_first()


def limit_of(size: Size, found: list[MeasuredRounded]) -> int:
    """Return the nanoseconds of a size; a share is of the dense graph in float32."""
    return size.of(round(took(found[0])))


def best_in_time(found: Sequence[R], limit: float) -> R | None:
    """Return the one within a time that loses least; None if there is none."""
    return min((each for each in found if took(each) <= limit), key=lambda each: each.score.kl, default=None)


def took(measured: Result) -> float:
    """Return the nanoseconds that were measured."""
    assert measured.score.ms is not None
    return measured.score.ms * 1e6
