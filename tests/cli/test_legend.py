"""The words of a plan are explained where it prints them, and errors are not taken for a perplexity."""

from tests.cli.running import ok

HONEST = "errors are of each site's output, no perplexity or accuracy"
KEPT = "kept: units that stay, of those there are (heads: KV groups, mlp: columns)"
WORDS = ["kept", "error", "floor", "rho2"]


def legend(output: str) -> list[str]:
    """The lines between the table of sites and what is kept per block."""
    *_, below = output.split("\n\nkept: ")
    return ("kept: " + below.partition("\n\n")[0]).splitlines()


def words(output: str) -> list[str]:
    return [line.partition(":")[0] for line in legend(output)]


def test_without_figures_only_units_are_explained(place):
    assert legend(ok("plan", "dense", "--recipe", "magnitude")) == [KEPT]


def test_every_column_with_figures_is_explained_and_no_other(place):
    output = ok("plan", "dense", "--recipe", "rcpu", "--statistics", "stats")
    assert words(output) == [*WORDS, HONEST]
    assert legend(output)[-1] == HONEST
    assert legend(output)[0] == KEPT
