"""Units too coarse for the requested size are reported, with the sizes that are possible."""

from tests.cli.running import ok

INSIDE = "heads: a recipe with spaces.queries can drop 1 of 2 grouped query heads in each instead of whole ones"
NONE = ["heads: a ratio of 0.3 drops none of 2 in each block; a ratio of 0.5 drops 1", INSIDE]
FEWER = "heads: a ratio of 0.7 drops 1 of 2 in each block; no more can go"
MAGNITUDE = ("dense", "--recipe", "magnitude")
DRY = ("prune", *MAGNITUDE, "-o", "out", "--dry-run")


def heads(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("heads: ")]


def test_a_ratio_that_drops_no_group_says_so(place):
    assert heads(ok("plan", *MAGNITUDE, "--ratio", "0.3")) == NONE
    assert heads(ok(*DRY, "--ratio", "0.3")) == NONE
    assert heads(ok("prune", *MAGNITUDE, "--ratio", "0.3", "-o", "out")) == NONE
    by_effect = ("--ratio", "0.3", "--text", "calib.txt", "--samples", "8", "--window", "16", "--dry-run")
    assert heads(ok("prune", "dense", *by_effect, "-o", "other")) == []  # its ratio says a size alone
    assert heads(ok("inspect", "dense", "--ratio", "0.3,0.5,0.7")) == [*NONE, FEWER]
