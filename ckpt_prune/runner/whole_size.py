"""The size of a model whose parts are pruned one by one, beside that of the dense model."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.checkpoint.checkpoint import PartOf
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.cost_record import Cost, WholeSize, WholeSizes
from ckpt_prune.model.skeleton import is_parameter

Change = tuple[Cost, Cost]
"""The cost of a part before and after it is pruned."""


def whole_sizes(last: Prepared, done: Sequence[Change], first: Sequence[Change] = ()) -> WholeSizes:
    """Return the sizes of a whole model before any part was pruned, and after all are.

    Args:
        last: the job of the part that is pruned last.
        done: parts that the model it opened has pruned already.
        first: parts that will be pruned before, and are not in that model: in a dry run.
    """
    within, own = last.model.checkpoint.within, (last.before, last.output.cost)
    assert within is not None
    opened = _opened(within, last.before)
    changes = [*done, *first, own]
    caches = next(((old.cache, new.cache) for old, new in changes if old.cache is not None), (None, None))
    before = {key: size + _saved(key, done) for key, size in opened.items()}
    after = {key: size - _saved(key, (*first, own)) for key, size in opened.items()}
    tokens = last.before.tokens if "flops" in opened else None
    return WholeSizes(
        before=WholeSize(**before, tokens=tokens, cache=caches[0]),
        after=WholeSize(**after, tokens=tokens, cache=caches[1]),
    )


def _saved(key: str, changes: Sequence[Change]) -> int:
    return sum(getattr(before, key) - getattr(after, key) for before, after in changes)


def _opened(within: PartOf, cost: Cost) -> dict[str, Any]:
    """Return the size of the whole that was opened. The cost of a stack of blocks is that of the whole."""
    if load_composite(within.whole.config).part(within.part).stack is not None:
        return {"parameters": cost.parameters, "bytes": cost.bytes, "flops": cost.flops}
    tensors = within.whole.tensors
    return {
        "parameters": sum(info.numel for name, info in tensors.items() if is_parameter(name)),
        "bytes": within.whole.nbytes,
    }
