"""The model card tells a shipped recipe at another ratio or size from one that was changed."""

from pathlib import Path

import pytest

from ckpt_prune.job.report import Report
from ckpt_prune.recipe.reading import load_recipe
from ckpt_prune.report.card import model_card
from tests.reporting.examples import report, site

SHIPPED = "That is the shipped recipe of this name"
CHANGED = f"{SHIPPED}; it was changed here, and `ckpt_prune.json` has it as it was used."


def told(used, asked=None, name="magnitude") -> str:
    """What the card says of the recipe after its summary."""
    made = report([site(0)]) | {
        "recipe": used.model_dump(mode="json", by_alias=True),
        "recipe_digest": used.digest,
        "asked": asked,
    }
    (line,) = (line for line in model_card(Report.read(made)).splitlines() if line.startswith("Made by "))
    return line.partition(load_recipe(name).summary)[2].strip()


def magnitude(*changes: str, **amount):
    return load_recipe("magnitude", changes, **amount)


def test_as_it_is_shipped():
    assert told(magnitude()) == ""


def test_another_ratio():
    assert told(magnitude(ratio=0.35)) == f"{SHIPPED}, at a ratio of 0.35."
    own = magnitude("spaces.heads.ratio=0.25", "spaces.mlp.ratio=0.4")
    assert told(own) == f"{SHIPPED}, at ratios of 0.25 (heads), 0.4 (mlp)."
    assert told(load_recipe("wanda-50", ratio=0.6), name="wanda-50") == f"{SHIPPED}, at a ratio of 0.6."


def test_a_size():
    asked = {"size": {"params": "70%"}, "digest": "0"}
    assert told(magnitude(ratio=0.35), asked) == f"{SHIPPED}, for 70% of the parameters."
    best = load_recipe("best", size={"bytes": "9.5GiB"})
    assert told(best, name="best") == f"{SHIPPED}, for 9.5GiB bytes."


def test_a_strength_that_was_searched_for_is_no_change():
    used = load_recipe("ridge-perplexity").with_strength(10.0)
    search = {"chosen": 10.0, "perplexity": {"10": 3.0}}
    made = report([site(0)]) | {"recipe": used.model_dump(mode="json", by_alias=True), "recipe_digest": used.digest}
    assert SHIPPED not in model_card(Report.read(made | {"lambda_search": search}))
    assert CHANGED in model_card(Report.read(made))


@pytest.mark.parametrize("change", ["spaces.mlp.score=wanda-sp", "spaces.mlp.multiple_of=8", "container=any"])
def test_more_than_the_amount(change):
    assert told(magnitude(change)) == CHANGED
    assert told(magnitude(change, ratio=0.35)) == CHANGED


def test_another_recipe_of_its_own_name(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nname: mine\nsummary: Mine.\nspaces: {mlp: {score: magnitude}}\n")
    made = report([site(0)]) | {"recipe": load_recipe(str(path)).model_dump(mode="json"), "recipe_digest": "0"}
    assert SHIPPED not in model_card(Report.read(made))
