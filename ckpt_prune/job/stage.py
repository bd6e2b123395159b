"""A stage: one key of a recipe, and all that it does. Its fields are the keys below it; its methods are the stage."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckpt_prune.job.recipe import StageKeys

if TYPE_CHECKING:
    from ckpt_prune.job.form import Form
    from ckpt_prune.job.prepared import Prepared
    from ckpt_prune.job.run import Run
    from ckpt_prune.job.step import BlockPruner, Step
    from ckpt_prune.show.section import Section


class Stage(StageKeys):
    """A stage of a job.

    Modules that define stages import pydantic but not torch, so that reading a recipe is fast: what works on tensors is
    imported inside the methods. The runner calls them in this order, each for all stages before the next: `check` and
    `check_data`, `preview` or `run`, `before_blocks`, `step`, `after_blocks`.
    """

    def check(self, prepared: "Prepared") -> None:
        """Refuse what cannot work, whatever data there is."""

    def check_data(self, prepared: "Prepared") -> None:
        """Refuse a job that has too little data to measure on."""

    def check_training(self, prepared: "Prepared") -> None:
        """Refuse a run that has no samples to train on."""

    def preview(self, prepared: "Prepared") -> "Prepared":
        """Decide what needs no data. What measuring will decide gets a placeholder, for dry runs."""
        return prepared

    def run(self, prepared: "Prepared", run: "Run") -> "Prepared":
        """Work on the model as a whole: measure, and decide."""
        return self.preview(prepared)

    def before_blocks(self, prepared: "Prepared", run: "Run") -> "Prepared":
        """Work that needs the output to be laid out, before the first block."""
        return prepared

    def pruner(self, prepared: "Prepared") -> "BlockPruner | None":
        """Return what prunes a block by moments; None if the stage does nothing of the kind."""
        return None

    def grams(self, prepared: "Prepared") -> Mapping[str, bool] | None:
        """Return which live moments hold more than the least, by space or linear module; None if none is needed."""
        return None

    def step(self, prepared: "Prepared", run: "Run") -> "Step | None":
        """Return what the stage does to each block; None if nothing."""
        return None

    def form(self) -> "Form | None":
        """Return the form of the output, unless it is that of `prune`."""
        return None

    def rewrites_blocks(self, run: "Run") -> bool:
        """Return True if an interrupted run has begun to write finished blocks anew."""
        return False

    def after_blocks(self, prepared: "Prepared", run: "Run") -> None:
        """Work on the blocks that are written."""

    def report(self, prepared: "Prepared", records: Sequence[Any], run: "Run") -> dict[str, Any]:
        """Return what the report says of the stage: fields of `Report`.

        `records` are those of its step on all blocks, in order; empty if it has none.
        """
        return {}

    @classmethod
    def sections(cls, report: Any) -> "Sequence[Section]":
        """Return what a report (`stages.report.Report`) says of the stage, for people.

        That is `sections` of the module `show` in the stage's folder, if there is one.
        """
        show = f"{cls.__module__.rpartition('.')[0]}.show"
        sections: Sequence[Section] = import_module(show).sections(report) if find_spec(show) else ()
        return sections
