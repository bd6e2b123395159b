"""Lines that commands print about prepared jobs and plans."""

from collections.abc import Iterable, Sequence

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import SiteRecord
from ckpt_prune.model.containers.choosing import ANY
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import first_expert_spaces
from ckpt_prune.stages.spaces.show import NO_PERPLEXITY, relative_floor


def container_line(prepared: Prepared) -> str:
    """Say what the output of a dry run will be stored as."""
    container, uneven = prepared.output.container, prepared.recipe.widths == "per_layer"
    if prepared.container_known:
        if container.remote_class is not None:
            return "to be stored with code of its own"
        other = ", or with code of its own where blocks differ in width" if uneven else ""
        return f"to be stored as {container.model_type}{other}"
    family = prepared.job.model.family
    stock = f"{family.model_type}{' or one that computes the same' if family.stand_ins else ''}"
    reasons = ["there is none"] if prepared.recipe.container == ANY else []
    reasons += ["blocks differ in width"] if uneven else []
    if prepared.job.model.checkpoint.within is not None:
        reasons = []  # a part has no code of its own
    own_code = f", or with code of its own where {' or '.join(reasons)}" if reasons else ""
    return f"to be stored as a stock class ({stock}){own_code}; its shape is known after calibration"


def plan_legend(model: Model, sites: Sequence[SiteRecord]) -> Iterable[str]:
    """Explain the columns of a plan that hold a number."""
    spaces_by_name = first_expert_spaces(model.family.spaces)
    named = {
        site.space: model.family.spaces[spaces_by_name[site.space]].unit
        for site in sites
        if site.space in spaces_by_name
    }
    units = ", ".join(f"{space}: {unit}s" for space, unit in named.items())
    yield f"kept: units that stay, of those there are ({units})"
    if any(site.error_uncompensated is not None for site in sites):
        logits = " (of q and k: of the attention logits)" if any(site.consumer is None for site in sites) else ""
        yield (
            f"error: the share of the energy of a site's output{logits} that is lost on the calibration samples, "
            "before and after compensation"
        )
    if any(relative_floor(site) is not None for site in sites):
        yield "floor: the least error that any weights and bias on the kept units can reach"
    if any(site.rho2 is not None for site in sites):
        yield "rho2: share of the dropped units' variance that the kept units predict; 1 is all of it"
    if any(site.error_held_out is not None for site in sites):
        yield "held out: the error after, on samples left out of the fit"
    if any(site.margin is not None for site in sites):
        yield "margin: how much larger, at least, the held-out error of the next best method is"
    if any(site.error_uncompensated is not None for site in sites):
        yield NO_PERPLEXITY
