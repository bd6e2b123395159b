"""The dense model that one which was pruned before is recovered towards, and how the pruned one is built for that."""

from dataclasses import dataclass, replace

from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.prepared import Prepared


@dataclass(frozen=True)
class DenseTarget:
    """The dense model in the basis of the job's own."""

    view: ModelView


def target_of(prepared: Prepared) -> ModelView | None:
    """Return the dense model in the basis of the job's own, if that was pruned before."""
    target = prepared.facts(DenseTarget)
    return None if target is None else target.view


def pruned_view(prepared: Prepared) -> ModelView:
    """Return the model that blocks are recovered in: built as the output is if it was pruned before."""
    view = prepared.view
    return view if target_of(prepared) is None else replace(view, container=prepared.output.container)
