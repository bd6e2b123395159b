"""Progress bars on terminals of every width, and a line a minute elsewhere."""

import io
from itertools import count

import pytest

from ckpt_prune.common.progress import Clock, Meter, meter, show_progress, track


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


def ticking(seconds: float) -> Clock:
    """A clock on which so much passes from one look to the next."""
    return count(1000.0, seconds).__next__


def test_what_is_no_terminal_sees_nothing_of_short_work(capsys):
    assert list(track(range(3), "pruning", total=3)) == [0, 1, 2]
    assert list(track(range(59), "pruning", clock=ticking(1))) == list(range(59))
    with meter(3, "learning") as bar:
        bar.step(1, 0.5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("items", [range(30), iter(range(30))])
def test_what_is_no_terminal_gets_a_line_a_minute(capsys, items):
    for _ in track(items, "calibrating", total=30, clock=ticking(25)):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "calibrating: 10%, block 3 of 30, 75 s so far, about 11 min left",
        "calibrating: 20%, block 6 of 30, 2 min so far, about 10 min left",
    ]
    assert lines[-2] == "calibrating: 90%, block 27 of 30, 11 min so far, about 75 s left"
    assert lines[-1] == "calibrating: 100%, block 30 of 30, 12 min so far"
    assert len(lines) == 10


def test_several_short_loops_print_a_line_a_minute_together(capsys, monkeypatch):
    monkeypatch.setattr("ckpt_prune.common.progress.now", ticking(25))
    with show_progress(True):
        for _ in range(4):
            list(track("a", "reading"))  # two looks at the clock
    assert capsys.readouterr().err.splitlines() == ["reading: 100%, block 1 of 1, 25 s so far"] * 2


def test_long_work_is_told_in_hours(capsys):
    list(track(iter("ab"), "counting", unit="tensor", clock=ticking(3660)))
    list(track("abc", "counting", unit="tensor", clock=ticking(3660)))
    assert capsys.readouterr().err.splitlines() == [
        "counting: tensor 1, 61 min so far",
        "counting: tensor 2, 2 h so far",
        "counting: 33%, tensor 1 of 3, 61 min so far, about 2 h left",
        "counting: 67%, tensor 2 of 3, 2 h so far, about 61 min left",
        "counting: 100%, tensor 3 of 3, 3 h so far",
    ]


def test_a_meter_says_what_it_is_told(capsys):
    with meter(10, "recovering", unit="epoch", clock=ticking(60)) as bar:
        bar.say("block 4")
        bar.to(2)
        bar.step(3, 0.25)
    assert capsys.readouterr().err.splitlines() == [
        "recovering: 20%, epoch 2 of 10, 60 s so far, about 4 min left, block 4",
        "recovering: 30%, epoch 3 of 10, 2 min so far, about 5 min left, 0.25",
    ]


def test_a_log_that_cannot_be_written_stops_nothing(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    assert list(track("ab", "counting", clock=ticking(60))) == ["a", "b"]


def test_a_meter_without_a_bar_says_nothing(capsys):
    bar = Meter(None)
    bar.say("block 4")
    bar.to(2)
    bar.step(3, 0.25)
    assert capsys.readouterr() == ("", "")
