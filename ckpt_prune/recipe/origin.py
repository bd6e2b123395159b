"""The origin of a recipe that was fetched."""

from ckpt_prune.common.records import FixedRecord


class Origin(FixedRecord):
    """The place that a recipe was fetched from.

    Attributes:
        reference: as it is given to --recipe, without a revision.
        revision: commit of the Hub repository.
        sha256: of the file's bytes.
    """

    reference: str
    revision: str
    sha256: str

    @property
    def pinned(self) -> str:
        """The value of --recipe that gives the same bytes again."""
        return f"{self.reference}@{self.revision}"
