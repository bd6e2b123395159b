"""What is said of a model that was recovered as a whole, by LoRA or by scales."""

from ckpt_prune.common.formatting import plural
from ckpt_prune.job.report import Adapters, Report


def measured_on(adapters: Adapters) -> str:
    """The samples that losses are told of."""
    if adapters.measured is None:
        return "held-out samples"
    if adapters.settings.get("held_out"):
        return plural(adapters.measured, "held-out sample")
    return f"{plural(adapters.measured, 'sample')} of those it was trained on"


def trained_on(adapters: Adapters) -> str:
    """How many samples it was trained on, those that were held out left out."""
    held_out = adapters.measured or 0 if adapters.settings.get("held_out") else 0
    return plural((adapters.samples or 0) - held_out, "sample")


def loss_name(adapters: Adapters) -> str:
    """What was made less."""
    return "divergence from the dense model" if adapters.method == "scales" else "loss"


def is_recovered(report: Report) -> bool:
    """Whether weights were trained after pruning."""
    adapters = report.adapters
    while adapters is not None and not adapters.modules:
        adapters = adapters.earlier
    return report.recovery is not None or adapters is not None


def told_of(report: Report) -> list[str]:
    """What was trained and what it gave, in a sentence or two for each time, the last one first."""
    found, before = list[str](), ""
    adapters = report.adapters
    while adapters is not None:
        found.append(before + _told(adapters))
        adapters, before = adapters.earlier, "Before that: "
    return found


def _told(adapters: Adapters) -> str:
    scales, on = adapters.method == "scales", measured_on(adapters)
    if not adapters.modules:
        tried = "Fitting scales" if scales else "LoRA"
        return f"{tried} was tried, and no epoch was better on {on}: the weights are as they were."
    gained = ""
    if adapters.loss_before is not None and adapters.loss_after is not None:
        name = loss_name(adapters).capitalize()
        gained = f" {name} on {on}, before -> after: {adapters.loss_before:.4g} -> {adapters.loss_after:.4g}"
        gained += "." if adapters.settings.get("held_out") else "; other samples may gain less."
    how = "scales of the inputs and outputs of" if scales else f"LoRA of rank {adapters.rank} on"
    epochs = adapters.epochs or 0
    passes = f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"
    unknown = " (whether it had seen them before is not known)" if scales else ""
    known = {None: unknown, True: " that it had seen before", False: " that it had not seen before"}[adapters.seen]
    return (
        f"Recovered by {how} {plural(adapters.modules, 'linear module')}, merged; "
        f"{trained_on(adapters)}{known}, {passes}; zeros stay zero.{gained}"
    )
