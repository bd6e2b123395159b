"""Records of the units of spaces."""

from pydantic import Field

from ckpt_prune.common.records import Figure, FixedRecord
from ckpt_prune.job.records import SiteRecord


class StrengthSearch(FixedRecord):
    """The λ that was chosen, and text of every λ that was tried → its calibration perplexity; None: not finite."""

    chosen: float
    perplexity: dict[str, Figure] = Field(default_factory=dict)


class SpacesFields(FixedRecord):
    """Pruned sites, and the search for a strength by perplexity."""

    lambda_search: StrengthSearch | None = None
    sites: list[SiteRecord]
