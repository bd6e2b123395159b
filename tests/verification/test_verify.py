"""Checks that fail, and checks that cannot be made."""

import errno
import os
from pathlib import Path

import pytest

from ckpt_prune.common.check import Check, run_check
from ckpt_prune.common.errors import UserError
from ckpt_prune.verification import verify as verifying


def _refuse(number: int, path: str) -> tuple[bool, str]:
    """A check of a file that the system does not give; as in a library, the error is of another class."""
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
        run_check("load", lambda: _refuse(number, "out/config.json"))
    assert str(raised.value) == f"out/config.json: {os.strerror(number)}; give another path or mend this one"


def test_a_file_that_is_gone_or_wrong_fails_it() -> None:
    expected = Check("load", False, "config.json: not a config")
    assert run_check("load", lambda: _refuse(errno.ENOENT, "out/config.json")) == expected

    def wrong() -> tuple[bool, str]:
        raise UserError("config.json: not a config")

    assert run_check("load", wrong) == expected


@pytest.mark.parametrize(
    ("files", "passed", "detail"),
    [
        (
            {"tokenizer.model": b"\0"},
            None,
            "without a tokenizer.json that takes the package",
        ),
        ({"tokenizer_config.json": b'{"auto_map": {}}'}, None, "the tokenizer needs code of its own, which is not run"),
        ({"generation_config.json": b"{}"}, True, "generation_config.json loads"),
        ({"generation_config.json": b"5"}, False, "generation_config.json is not a readable JSON object"),
        ({"tokenizer_config.json": b"{}"}, False, "the tokenizer does not load"),
    ],
)
def test_side_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], passed: bool | None, detail: str
) -> None:
    monkeypatch.setattr(verifying, "find_spec", lambda name: None)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (check,) = verifying.run_side_file_check(tmp_path)
    assert check.passed is passed
    assert detail in check.detail
