"""What counts as a check that fails, and what as one that could not be made."""

import errno
import os

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.verification.verify import Check, run_check


def _refused(number: int, path: str) -> tuple[bool, str]:
    """A check whose file the system does not give, told as a library would: by an error of its own."""
    try:
        try:
            raise OSError(number, os.strerror(number), path)
        except OSError:
            raise ValueError("not a config")  # noqa: B904 - what libraries do
    except ValueError as error:
        raise UserError("config.json: not a config") from error


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_file_that_the_system_does_not_give_fails_no_check(number: int) -> None:
    """An export ended with exit code 1, which says that the graph is wrong."""
    with pytest.raises(UserError) as raised:
        run_check("load", lambda: _refused(number, "out/config.json"))
    assert str(raised.value) == f"out/config.json: {os.strerror(number)}; give another path or mend this one"


def test_a_file_that_is_gone_or_wrong_fails_it() -> None:
    found = Check("load", False, "config.json: not a config")
    assert run_check("load", lambda: _refused(errno.ENOENT, "out/config.json")) == found

    def wrong() -> tuple[bool, str]:
        raise UserError("config.json: not a config")

    assert run_check("load", wrong) == found
