"""The words of a plan are explained where it prints them, and errors are not taken for a perplexity."""

import pytest

from tests.cli.running import TEXT, ok

HONEST = (
    "errors are of each site's output, no perplexity or accuracy: 0.18 (heads) and 0.09 (mlp) came with 1.5 times the "
    "perplexity on a small llama"
)
KEPT = "kept: units that stay, of those there are (heads: KV groups, mlp: columns)"
WORDS = ["kept", "error", "floor", "rho2"]


def legend(said: str) -> list[str]:
    """The lines between the table of sites and what is kept per block."""
    *_, below = said.split("\n\nkept: ")
    return ("kept: " + below.partition("\n\n")[0]).splitlines()


def words(said: str) -> list[str]:
    return [line.partition(":")[0] for line in legend(said)]


def test_without_figures_only_units_are_explained(place):
    assert legend(ok("plan", "dense", "--recipe", "magnitude")) == [KEPT]


def test_every_column_with_figures_is_explained_and_no_other(place):
    said = ok("plan", "dense", "--recipe", "rcpu", "--statistics", "stats")
    assert words(said) == [*WORDS, HONEST.partition(":")[0]]
    assert legend(said)[-1] == HONEST
    assert legend(said)[0] == KEPT


@pytest.mark.parametrize(("recipe", "more"), [("ridge", ["held out"]), ("ridge-folds", ["held out"])])
def test_held_out_errors_with_folds(place, recipe, more):
    ok("calibrate", "dense", *TEXT, "--folds", "4", "-o", "folded")
    said = ok("plan", "dense", "--recipe", recipe, "--statistics", "folded", "--ratio", "0.5")
    assert words(said)[:-1] == [*WORDS, *more]


def test_margin_where_methods_were_chosen(place):
    ok("calibrate", "dense", *TEXT, "--folds", "4", "-o", "folded")
    auto = [f"--set=spaces.{space}.compensation={{method: auto}}" for space in ("heads", "mlp")]
    said = ok("plan", "dense", "--recipe", "ridge", "--statistics", "folded", "--ratio", "0.5", *auto)
    assert words(said)[:-1] == [*WORDS, "held out", "margin"]


def test_errors_that_prune_prints_are_no_perplexity(place):
    said = ok("prune", "dense", "--recipe", "rcpu", "--ratio", "0.5", "--statistics", "stats", "-o", "out").splitlines()
    (line,) = (line for line in said if "not perplexity or accuracy: 0.18 (heads) and 0.09 (mlp) came with" in line)
    assert said[said.index(line) - 1].startswith("  mlp (columns of the MLP) ")
    assert "not perplexity" not in ok("prune", "dense", "--recipe", "magnitude", "-o", "bare")


def test_what_drift_is_is_said_with_the_word(place):
    ok("calibrate", "dense", *TEXT, "--folds", "4", "-o", "weighed")
    said = ok("prune", "dense", "--recipe", "best-uniform", "--statistics", "weighed", "-o", "out", "--dry-run")
    assert said.splitlines()[0] == (
        "recipe best-uniform is drift-correcting (drift: how far pruning has moved the residual stream); with "
        "--statistics its dense-cache variant is used"
    )
