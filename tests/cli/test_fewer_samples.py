"""Less text than the samples asked for: all of it is used, and a line says so."""

from pathlib import Path

import pytest

from tests.cli.running import ok, read_json, read_refusal, run

USED = "calib.txt has 98 windows of 16 tokens: all are used, not "


def calibrate(*more: str) -> tuple[str, int]:
    """The first line on stderr of a calibration, and the samples it was measured on."""
    done = run("calibrate", "dense", "--text", "calib.txt", "--window", "16", *more, "-o", "own", "--overwrite")
    assert done.exit_code == 0, done.output
    return done.stderr.splitlines()[0], read_json("own/statistics.json")["samples"]


def test_the_first_command_of_the_front_page_takes_a_short_text(place):
    assert calibrate() == (f"{USED}128", 98)


@pytest.mark.parametrize("many", ["99", "99999999999999999999"])
def test_more_than_there_are(place, many):
    assert calibrate("--samples", many) == (USED + many, 98)


def test_no_window_is_an_error_and_a_shorter_one_works(place):
    Path("short.txt").write_text("the cat")
    message = read_refusal("calibrate", "dense", "--text", "short.txt", "-o", "own")
    assert message.endswith("it has 8 tokens, a window takes 32; give more text")
    ok("calibrate", "dense", "--text", "short.txt", "--window", "8", "-o", "own")
