"""`ckpt_prune.plan`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.function import takes
from ckpt_prune.api.latency import with_latencies
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.statistics.files import check_statistics
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options.commands import PlanOptions
from ckpt_prune.recipe.places import check_recipe
from ckpt_prune.recipe.sizes import asked_size, small_share_line

if TYPE_CHECKING:
    from ckpt_prune.job.plan import Plan
    from ckpt_prune.job.prepared import Prepared
    from ckpt_prune.model.cost_record import Cost


@dataclass(frozen=True)
class Planned:
    """A plan, which `prune(plan=…)` takes, and its job."""

    plan: "Plan"
    settled: "Prepared" = field(repr=False)
    path: Path | None

    @property
    def messages(self) -> list[str]:
        """Say which sizes units are too coarse for, what multiples cost, and what else would lose less."""
        from ckpt_prune.runner.messages import wider_choice
        from ckpt_prune.stages.spaces.messages import multiples_line, size_lines

        others = wider_choice(self.settled), multiples_line(self.settled)
        return [line for line in (*size_lines(self.settled), *others) if line]

    @property
    def takes(self) -> str:
        """Say what a prune by the plan will take on this machine."""
        from ckpt_prune.runner.estimate import estimate_plan

        return f"pruning by it takes {estimate_plan(self.settled.job, self.plan).line}"

    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.plan.to_json())
        return data


@dataclass(frozen=True)
class ComparedPlan:
    """A plan in a row, to be compared with others of the same model and statistics.

    Attributes:
        errors: space → mean over blocks of the error after compensation, relative to each output's energy; None
            without second moments.
        held_out: the same on folds that the fit has not seen; None if nothing is fitted, or there is one fold.
        divergence: predicted KL of the model's own output, in nats (without a head, a share of the energy of its last
            hidden states); None if the statistics have no Fisher metric.
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
        """Return what `--json` prints; the size of the dense model stands there once for all."""
        names = ("container", "errors", "held_out", "divergence", "messages")
        figures = {name: getattr(self, name) for name in names}
        return {"recipe": self.recipe, "after": self.after.model_dump(), **figures}


def compared_plan(planned: Planned) -> ComparedPlan:
    from ckpt_prune.model.spaces import first_expert_spaces
    from ckpt_prune.stages.spaces.show import mean_errors, mean_held_out

    plan = planned.plan
    spaces = {
        space: [site for site in plan.sites if site.space == space] for space in first_expert_spaces(plan.recipe.spaces)
    }
    errors = {space: None if (pair := mean_errors(sites)) is None else pair[1] for space, sites in spaces.items()}
    return ComparedPlan(
        plan.recipe.name,
        plan.before,
        plan.after,
        "remote code" if plan.container == "remote" else plan.container,
        errors,
        {space: mean_held_out(sites) for space, sites in spaces.items()},
        plan.divergence,
        planned.messages,
    )


@takes(PlanOptions)
def plan(options: PlanOptions) -> Planned:
    """Decide which units of MODEL stay under a recipe, and predict size and error. Only the plan is written.

    Errors are those of each output projection on the calibration tokens, relative to its output's energy; for q and k,
    those of the attention logits. floor is the least error that any weights and bias on the kept inputs can reach. rho2
    is the share of the dropped output's variance that the kept inputs predict. held out, with statistics of several
    folds, is the error on each fold when fitted on the others. If compensation is chosen on held-out folds (method
    auto), margin says how much worse the next best method is there, relative.
    """
    # Refuse what can be refused before torch is imported.
    asked_size(options.sizes, options.ratio)
    if options.recipe is not None:
        check_recipe(options.recipe)
    check_supported(options.model, options.family, options.part)
    if options.statistics is not None:
        check_statistics(options.statistics)

    # Refuse what can be refused before transformers is imported.
    from ckpt_prune.runner.read_recipe import recipe_of

    file, wanted = recipe_of(options)

    from ckpt_prune.checkpoint.staging import write_atomically
    from ckpt_prune.runner.plan import make_plan, prepare_plan
    from ckpt_prune.runner.read_job import check_plan_place, read_plan_job
    from ckpt_prune.runner.runtimes import check_stored

    say = Notices()
    job = with_latencies(read_plan_job(options, file, wanted), say, trust=options.trust_remote_code)
    settled = prepare_plan(job)
    check_stored(settled)
    job.model.checkpoint.check_finite()
    if (warning := small_share_line(options.sizes)) is not None:
        say(warning)
    new_plan = make_plan(settled)
    if options.output is not None:
        check_plan_place(options.output, overwrite=options.overwrite)  # planning takes time
        write_atomically(options.output, new_plan.to_json())
    return Planned(new_plan, settled, options.output)
