"""`ckpt_prune.plan`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.latency import with_latencies
from ckpt_prune.api.types import AnyModel, AnyPath
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.job.sizes import asked_size
from ckpt_prune.measure.statistics.files import check_statistics
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options import PartName, PlanOptions, checked

if TYPE_CHECKING:
    from ckpt_prune.job.plan import Plan
    from ckpt_prune.job.prepared import Prepared
    from ckpt_prune.job.records import Cost
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.runner.shifts import Shifting


@dataclass(frozen=True)
class Planned:
    """A plan, with what it was made from.

    Attributes:
        plan: which units of which sites stay, with scores and predicted errors; `prune(plan=…)` takes it.
        settled: the job that it plans.
        path: the file it was written to, or None.
        shifting: what its sites lose on the statistics of `test`; None without any.
    """

    plan: "Plan"
    settled: "Prepared" = field(repr=False)
    path: Path | None
    shifting: "Shifting | None" = field(default=None, repr=False)

    @property
    def messages(self) -> list[str]:
        """What a user should know of the sizes: where units are too coarse for them, and what else would lose less."""
        from ckpt_prune.runner.messages import size_lines, wider_choice

        return [line for line in (*size_lines(self.settled), wider_choice(self.settled)) if line]

    @property
    def takes(self) -> str:
        """What a prune by the plan will take on this machine, in words."""
        from ckpt_prune.runner.estimate import estimate_plan

        return f"pruning by it takes {estimate_plan(self.settled.job, self.plan).line}"

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found: dict[str, Any] = json.loads(self.plan.to_json())
        return found


@dataclass(frozen=True)
class ComparedPlan:
    """A plan in a row, to be held beside others of the same model and statistics.

    Attributes:
        recipe: its name.
        before: size of the dense model.
        after: size of the output.
        container: what the output is stored as: a stock model type, or remote code.
        errors: space → mean over blocks of the error after compensation, relative to each output's energy; None
            without second moments.
        held_out: the same on folds that the fit has not seen; None where nothing is fitted, or the statistics have one
            fold.
        divergence: what it is predicted to do to the model's own output, in nats (or, without a head, as a share of the
            energy of its last hidden states); None where the statistics have no Fisher metric.
        messages: what a user should know of the sizes.
    """

    recipe: str
    before: "Cost"
    after: "Cost"
    container: str
    errors: dict[str, float | None]
    held_out: dict[str, float | None]
    divergence: float | None
    messages: list[str]

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "recipe": self.recipe,
            "after": self.after.model_dump(),
            "container": self.container,
            "errors": self.errors,
            "held_out": self.held_out,
            "divergence": self.divergence,
            "messages": self.messages,
        }


def compared_plan(planned: Planned) -> ComparedPlan:
    """The row of a plan."""
    from ckpt_prune.model.spaces import first_expert_spaces
    from ckpt_prune.report.figures import held_out_errors, space_errors

    made = planned.plan
    errors = {each.space: each.compensated for each in space_errors(made.sites)}
    held_out = held_out_errors(made.sites)
    return ComparedPlan(
        made.recipe.name,
        made.before,
        made.after,
        "remote code" if made.container == "remote" else made.container,
        {space: errors.get(space) for space in first_expert_spaces(made.recipe.spaces)},
        {space: held_out.get(space) for space in first_expert_spaces(made.recipe.spaces)},
        made.divergence,
        planned.messages,
    )


def plan(
    model: AnyModel,
    *,
    recipe: AnyPath | None = None,
    statistics: "AnyPath | Statistics | None" = None,
    test: "AnyPath | Statistics | None" = None,
    ratio: float | str | None = None,
    target_params: str | None = None,
    target_bytes: str | None = None,
    target_flops: str | None = None,
    target_latency: str | None = None,
    overrides: Mapping[str, object] | Sequence[str] = (),
    container: str | None = None,
    output: AnyPath | None = None,
    overwrite: bool = False,
    family: AnyPath | None = None,
    part: PartName | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Planned:
    """Decide which units of a model stay under a recipe, and predict size and error, as `ckpt-prune plan` does.

    Args:
        model: a folder, a Hub id, or what a function of this package has written.
        recipe: a shipped recipe's name or a file; None for the default.
        statistics: what `calibrate` gave, or its folder.
        test: the same on other samples: the result then says what every site loses there.
        ratio: share of units to drop in every space, such as 0.2 or "20%", in place of the recipe's.
        target_params: parameters to come down to, a number such as "5.0B" or a share such as "70%".
        target_bytes: bytes of tensors, likewise, such as "9.5GiB".
        target_flops: FLOPs of one forward pass, likewise.
        target_latency: time on this machine as a table of its blocks foresees it, likewise, such as "12ms" or "70%@512"
            for reading 512 tokens, "70%@token" for a single one.
        overrides: changes of the recipe's keys, dotted: {"spaces.mlp.ratio": 0.4}.
        container: what the output is to be stored as.
        output: the plan file to write, if any.
        overwrite: replace an existing plan.
        family: file of a description of the model's family, where this version has none.
        part: which part of a model that is made of several: text, vision or encoder.
        trust_remote_code: accept a model that asks for code of its own.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars on stderr.

    Raises:
        UserError: options that do not go together, what cannot be read, or what no plan can say.
    """
    options = checked(PlanOptions, locals())
    # Before torch is imported, what can be told without it.
    asked_size(options.sizes, options.ratio)
    check_supported(options.model, options.family, options.part)
    for folder in (options.statistics, options.test):
        if folder is not None:
            check_statistics(folder)

    # Before transformers is, what can be told without it.
    from ckpt_prune.runner.read_recipe import recipe_of

    with show_progress(progress):
        file, wanted = recipe_of(options)

    from ckpt_prune.checkpoint.staging import write_atomically
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.runner.plan import make_plan, prepare_plan
    from ckpt_prune.runner.read_job import check_plan_place, read_plan_job
    from ckpt_prune.runner.shifts import Shifting

    with show_progress(progress):
        job = with_latencies(read_plan_job(options, file, wanted), Notices(), trust=options.trust_remote_code)
        settled = prepare_plan(job)
        job.model.checkpoint.check_finite()
        shifting = None if options.test is None else Shifting(settled, Statistics(options.test))
        made = make_plan(settled, shifting)
        if options.output is not None:
            check_plan_place(options.output, overwrite=options.overwrite)  # planning takes time
            write_atomically(options.output, made.to_json())
        return Planned(made, settled, options.output, shifting)
