"""One thing that was checked, and how it went."""

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_prune.common.errors import UserError, refuse_unreadable

Finding = tuple[bool | None, str]
"""True if a check passed, None if it could not be made; and a sentence on what was found."""


@dataclass(frozen=True)
class Check:
    """One thing that was checked. `passed` is None if there was nothing to check it against."""

    name: str
    passed: bool | None
    detail: str


def run_check(name: str, check: Callable[[], Finding]) -> Check:
    """Run a check; a UserError in it is its failure."""
    try:
        passed, detail = check()
    except UserError as error:
        refuse_unreadable(error)
        passed, detail = False, str(error)
    return Check(name, passed, detail)
