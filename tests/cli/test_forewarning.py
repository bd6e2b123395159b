"""What a long run says before it begins, and a short one does not."""

import pytest

from tests.cli.conftest import PRUNE
from tests.cli.running import TEXT, run

MACHINE = "where nothing else runs on this machine"


@pytest.fixture
def long(place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job counts as long."""
    monkeypatch.setattr("ckpt_prune.runner.estimate.estimate.WORTH_SAYING", 0.0)


@pytest.mark.usefixtures("long")
def test_calibrating():
    result = run("calibrate", "dense", *TEXT, "--collect", "moments", "-o", "s")
    first, size = result.stderr.splitlines()
    assert first == f"this takes about 1 s, 1.16 GiB of memory and 2.50 KiB of disk, {MACHINE}"
    assert size.startswith("s will take 2.50 KiB")
    assert result.exit_code == 0


@pytest.mark.usefixtures("long")
def test_pruning():
    result = run(*PRUNE, "-o", "out")
    assert result.stderr == f"this takes about 1 s, 1.16 GiB of memory and 12.8 KiB of disk, {MACHINE}\n"
    assert result.exit_code == 0
    assert run(*PRUNE, "-o", "masked", "--recipe", "magnitude-50").stderr == ""


@pytest.mark.usefixtures("long")
def test_widths_that_are_found_by_measuring_are_those_of_one_ratio():
    quick = [f"--set=spaces.{space}.compensation.lambda_grid=[0.01,1]" for space in ("heads", "mlp")]
    result = run("prune", "dense", "--ratio", "0.5", *quick, *TEXT, "-o", "out")
    assert result.stderr.splitlines()[0] == f"this takes about 1 s, 1.17 GiB of memory and 38.6 KiB of disk, {MACHINE}"
    assert result.exit_code == 0


def test_a_short_job_says_nothing(place):
    assert run(*PRUNE, "-o", "out").stderr == ""
