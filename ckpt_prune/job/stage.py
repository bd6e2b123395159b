"""A stage: what is done by one key of a recipe. Its keys say what was asked for; its methods do it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from ckpt_prune.job.afterwork import Afterwork
from ckpt_prune.job.form import Form
from ckpt_prune.job.job import Job
from ckpt_prune.job.opened import Opened
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.step import BlockPruner, Step
from ckpt_prune.model.containers.checking import check_stock
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from ckpt_prune.recipe.recipe import Recipe, StageKeys

Keys = TypeVar("Keys", bound=StageKeys)


class Stage(Generic[Keys]):
    """A stage of a job, by the keys that its recipe gives it.

    A recipe of five lines has the stages `spaces` and `recovery`:

        version: 1
        name: mine
        ratio: 0.2
        spaces: {mlp: {score: rcpu, compensation: {method: ridge}}}
        recovery: {epochs: 2}

    The runner calls the methods in this order, each for all stages before the next: `open`, `check`, `check_data`,
    `preview`, `check_training`, `after_publish`, `run`, `before_blocks`, `step`, `after_blocks`, `report`. A dry run
    ends before `run`.

    Attributes:
        of: class of `keys`, which the recipe has under its key.
    """

    of: ClassVar[type[StageKeys]]

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    # ---- before any data is read -------------------------------------------------------------------------------

    def open(self, model: Model, recipe: Recipe, options: SampleOptions, say: Callable[[str], None]) -> Opened | None:
        """Return what the job works on in place of the stored model, such as one with fewer tokens; None to leave it.

        Everything after that sees the model that is returned: samples are read for it, and all stages work on it.

        Args:
            recipe: of the job, with what the runtimes want.
            options: with the data of the job, which is not read yet.
            say: told what a person must know.
        """
        return None

    # ---- before any data is measured ---------------------------------------------------------------------------

    def check_source(self, model: Model) -> None:
        """Refuse a model whose stored form the stage cannot work on: by default every output with code of its own."""
        check_stock(model, "units are counted alike in every block, and its blocks may differ; masks alone go into it")

    def check(self, prepared: Prepared) -> None:
        """Refuse what cannot work, whatever data there is."""

    def check_data(self, prepared: Prepared) -> None:
        """Refuse a job that has too little data to measure on."""

    def check_training(self, prepared: Prepared) -> None:
        """Refuse a run that has no samples to train on."""

    def preview(self, prepared: Prepared) -> Prepared:
        """Decide what needs no data. What measuring will decide gets a placeholder, for dry runs."""
        return prepared

    # ---- lines for people ---------------------------------------------------------------------------------------

    def plan_lines(self, prepared: Prepared) -> Sequence[str]:
        """Return the lines of a dry run on what will be done."""
        return []

    def kept_words(self, prepared: Prepared) -> str | None:
        """Return what stays, as a part of one line that all stages share; None of a stage that leaves all shapes."""
        return None

    @property
    def measured_words(self) -> str | None:
        """The words behind "to be measured": what a run measures for the stage. None if it measures nothing."""
        return None

    def extreme_line(self, prepared: Prepared) -> str | None:
        """Say that nothing goes, or that so little stays that the model is ruined; None of all between."""
        return None

    def messages(self, prepared: Prepared) -> Sequence[str]:
        """Return what a person must know before or after the run, besides sizes."""
        return []

    def warnings(self, prepared: Prepared) -> Sequence[str]:
        """Return why the stage's figures are not to be relied on, for the report."""
        return []

    def widest_fit(self, prepared: Prepared) -> int:
        """Return the most inputs of a fit that so few tokens could make exact on these alone; 0 if there is none."""
        return 0

    def halve(self, prepared: Prepared) -> tuple[int, Callable[[Model], Model]] | None:
        """Return about half the dimensions of the stream, and what narrows a model to them; None if all stay.

        A table of latencies is linear in that width, too.
        """
        return None

    # ---- work --------------------------------------------------------------------------------------------------

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        """Work on the model as a whole: measure, and decide."""
        return self.preview(prepared)

    def before_blocks(self, prepared: Prepared, run: Run) -> Prepared:
        """Work that needs the output to be laid out, before the first block."""
        return prepared

    def pruner(self, prepared: Prepared) -> BlockPruner | None:
        """Return what prunes a block by moments; None if the stage does nothing of the kind."""
        return None

    def grams(self, prepared: Prepared) -> Mapping[str, bool] | None:
        """Return which live moments hold more than the least, by space or linear module; None if none is needed."""
        return None

    def step(self, prepared: Prepared, run: Run) -> Step | None:
        """Return what the stage does to each block; None if nothing."""
        return None

    def form(self) -> Form | None:
        """Return the form of the output, unless it is that of `prune`."""
        return None

    def rewrites_blocks(self, run: Run) -> bool:
        """Return True if an interrupted run has begun to write finished blocks anew."""
        return False

    def after_blocks(self, prepared: Prepared, run: Run) -> None:
        """Work on the blocks that are written."""

    def after_publish(self, job: Job) -> Afterwork | None:
        """Return what follows once the output is written, before it takes its place; None if nothing does.

        It is asked before anything is measured, and refuses what cannot follow.
        """
        return None

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        """Return what the report says of the stage: fields of `Report`.

        `records` are those of its step on all blocks, in order; empty if it has none.
        """
        return {}
