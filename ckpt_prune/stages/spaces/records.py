"""Records of the units of spaces."""

from pydantic import Field

from ckpt_prune.common.records import Figure, FixedRecord
from ckpt_prune.job.records import SiteRecord


class StrengthSearch(FixedRecord):
    """The λ that was chosen, and text of every λ that was tried → its calibration perplexity; None: not finite."""

    chosen: float
    perplexity: dict[str, Figure] = Field(default_factory=dict)


class SameUnits(FixedRecord):
    """Space of which every block keeps the same units → scores of these, over all blocks."""

    scores: dict[str, list[float]]


class SpacesFields(FixedRecord):
    """Pruned sites, the search for a strength by perplexity, and what other draws of labels would change.

    Attributes:
        spread: relative standard error, over draws of labels, of the loss that is predicted of a site.
    """

    spread: Figure | None = None
    lambda_search: StrengthSearch | None = None
    sites: list[SiteRecord]
