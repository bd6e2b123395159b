"""Progress bars on terminals of every width, and silence elsewhere."""

import io

import pytest

from ckpt_prune.progress import track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", ["0", "60"])
def test_a_terminal_sees_what_is_done(monkeypatch, columns):
    """A terminal that reports no width gets the usual 80 columns, not an empty line."""
    monkeypatch.setenv("COLUMNS", columns)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(track(range(3), "pruning", total=3)) == [0, 1, 2]
    assert "pruning: 100%" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()


def test_what_is_no_terminal_sees_nothing(monkeypatch):
    silent = io.StringIO()
    monkeypatch.setattr("sys.stderr", silent)
    assert list(track(range(3), "pruning", total=3)) == [0, 1, 2]
    assert silent.getvalue() == ""
