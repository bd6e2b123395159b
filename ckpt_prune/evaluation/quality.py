"""Put a loss into words. Here are all limits beyond which an output is called worse than its dense model.

They are of the tool, not of a paper. A perplexity or an accuracy is held to that of the dense model, on the same data.
"""

import math

from ckpt_prune.common.formatting import format_share, plural
from ckpt_prune.job.report import Loss

WORDS = ("worse than", "much worse than", "hardly of use beside")
MORE_PERPLEXITY = (1.05, 1.25, 5.0)
"""Times the dense model's, from which on each of `WORDS` is said; of an error of depths likewise."""
MORE_BITS = (1.02, 1.08, 1.5)
"""Times the dense model's bits per byte, likewise: 2 % more bits is about 5 % more perplexity for a fair model."""
LESS_AGREEMENT = (0.9, 0.75, 0.25)
"""Share of the tokens, images or texts with the same first choice, below which each is said."""
SAME_KL = 0.02
"""Nats, below which first choices are held to the last of these alone: of some dozen positions others tell noise."""
LESS_COSINE = (0.98, 0.95, 0.7)
"""Mean cosine of embeddings or features, below which each is said."""
LESS_ACCURACY = (0.02, 0.05, 0.25)
"""Falls of an accuracy from which on each verdict is given."""
ERRORS = 2
"""A figure of images that passes its limit by no more than so many standard errors is given no verdict."""

FEW = 8
"""Windows below which a verdict says that they decide little."""


def judge(loss: Loss, remedy: str = "") -> Loss:
    """Return a loss with its verdict: a sentence, with a remedy, if the output is bad; None if it is not."""
    by_choices, by_figure = _level_of_choices(loss), _level_of_figure(loss)
    reached = max(by_choices, by_figure)
    if not reached:
        return loss.model_copy(update={"verdict": None})
    figures = ", ".join([*figures_of(loss), *words_of_windows(loss.windows)])
    worse = f"the output is {WORDS[reached - 1]} {loss.against or 'the dense model'}"
    worse += " by its first choices" if by_choices > by_figure else ""
    return loss.model_copy(update={"verdict": f"{worse}: {figures}{f'; {remedy}' if remedy else ''}"})


def words_of_windows(windows: int | None) -> list[str]:
    """Return on how many windows figures stand, with a warning if these are few; nothing if that is not known."""
    if windows is None:
        return []
    return [f"by {plural(windows, 'window')}{', too few to decide' if windows < FEW else ''}"]


def _level_of_choices(loss: Loss) -> int:
    """Return how many of their limits the first choices pass."""
    # Models that predict the same but for rounding share a first choice unless two are alike.
    if loss.agreement is None:
        return 0
    errors = 0 if loss.samples is None else ERRORS / math.sqrt(loss.samples)
    level = sum(loss.agreement < limit - errors * math.sqrt(limit * (1 - limit)) for limit in LESS_AGREEMENT)
    is_near = loss.kl is not None and loss.kl < SAME_KL
    return 0 if is_near and level < len(LESS_AGREEMENT) else level


def _level_of_figure(loss: Loss) -> int:
    """Return how many of its limits a perplexity, an accuracy or a cosine passes."""
    if loss.after is None:
        # A perplexity that no number holds.
        return 0 if loss.before is None else len(WORDS)
    if loss.before is None:
        return sum(loss.after < limit for limit in LESS_COSINE)
    if loss.of.endswith("perplexity") or loss.of == "RMSE":
        return sum(loss.after >= limit * loss.before for limit in MORE_PERPLEXITY)
    if loss.of == "bits per byte":
        return sum(loss.after >= limit * loss.before for limit in MORE_BITS)
    fall = loss.before - loss.after
    if loss.samples is not None:
        # An answer that is right of one model alone is another first choice, so the shares that rise and fall add up to
        # no more than those: a bound on the variance of their difference.
        variance = max(0.0, 1 - (loss.agreement or 0) - fall**2) / loss.samples
        if fall <= ERRORS * math.sqrt(variance):
            return 0
    return sum(fall >= limit for limit in LESS_ACCURACY)


def figures_of(loss: Loss) -> list[str]:
    """Return the figures in words: perplexity 36.45 for 28.52, KL 0.2311 nats, the same first choice 71.2%."""
    is_share = loss.of.endswith("accuracy")
    style = ".2%" if is_share else ".4f" if loss.before is None else ".4g"
    before, after = (
        None if each is None else format_share(each, style, loss.samples if is_share else None)
        for each in (loss.before, loss.after)
    )
    figures = [f"{loss.of} {after or 'beyond any number'}{'' if before is None else f' for {before}'}"]
    figures = [] if loss.after is None and loss.before is None else figures
    figures += [] if loss.kl is None else [f"KL {loss.kl:z.4f} nats"]
    same = "" if loss.agreement is None else format_share(loss.agreement, ".1%", loss.samples)
    return figures + ([f"the same first choice {same}"] if same else [])


def lines_of(loss: Loss) -> list[str]:
    """Return the lines that a terminal shows of an output beside another model."""
    comparison = f"beside {loss.against or 'the dense model'}, on {loss.data}: {', '.join(figures_of(loss))}"
    return [comparison] if loss.verdict is None else [comparison, loss.verdict]
