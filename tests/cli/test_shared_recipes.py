"""Recipes of others: from the Hub, from a folder; data of a bounded size, on record by its digest."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.cli.running import ok, read_refusal
from tests.hub_server import Hub, Repo

MINE = "version: 1\nname: mine\nratio: 0.5\nspaces:\n  mlp: {score: magnitude, compensation: {method: none}}  # by me\n"


@pytest.fixture
def recipes(hub: Hub) -> Repo:
    repo = hub.repos["org/recipes"] = Repo(private=False)
    repo.commit(repo.files | {"mine.yaml": MINE.encode(), "deep/er/mine.yaml": MINE.encode()}, "mine")
    return repo


def test_a_recipe_of_the_hub_prunes_as_a_file_does_and_is_on_record(place: Path, recipes: Repo):
    Path("mine.yaml").write_text(MINE)
    ok("prune", "dense", "--recipe", "mine.yaml", "-o", "a")
    ok("prune", "dense", "--recipe", "org/recipes/deep/er/mine.yaml@main", "-o", "b")
    a, b = (json.loads(Path(out, "ckpt_prune.json").read_text()) for out in "ab")
    assert "origin" not in a
    assert b["origin"] == {
        "reference": "org/recipes/deep/er/mine.yaml",
        "revision": recipes.head,
        "sha256": hashlib.sha256(MINE.encode()).hexdigest(),
    }
    assert (a["recipe_digest"], a["files"]) == (b["recipe_digest"], b["files"])
    assert f"| file of the recipe | org/recipes/deep/er/mine.yaml@{recipes.head} |" in Path("b/README.md").read_text()


def test_what_was_fetched_is_there_without_the_hub(place: Path, hub: Hub, recipes: Repo, monkeypatch):
    ok("recipe", "show", "org/recipes/mine.yaml")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert ok("recipe", "show", "org/recipes/mine.yaml").startswith(MINE)
    assert ok("recipe", "show", f"org/recipes/mine.yaml@{recipes.head}").startswith(MINE)
    assert read_refusal("prune", "dense", "--recipe", "org/recipes/deep/er/mine.yaml", "-o", "out") == (
        "org/recipes/deep/er/mine.yaml is not in the Hub cache, and HF_HUB_OFFLINE is set; run `hf download "
        "org/recipes deep/er/mine.yaml` while connected, or give a file"
    )
    assert hub.asked == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("org/recipes/none.yaml", "org/recipes has no file none.yaml on the Hub; check the name"),
        (
            "org/recipes/mine.yaml@v9",
            "org/recipes has no revision 'v9' on the Hub; give a branch, tag or commit that exists",
        ),
        (
            "org/none/mine.yaml",
            "org/none is no Hub repository you can read; check the name, or run `hf auth login` if it is private",
        ),
        (
            "org/recipes/huge.yaml",
            "org/recipes/huge.yaml has 400000 bytes on the Hub, and 262144 are the most of such a file",
        ),
        ("org/recipes/strange.yaml", "strange.yaml, line 4: unknown key run: did you mean 'runs_on'? allowed here: "),
        ("org/recipes/code.yaml", "code.yaml is not YAML: could not determine a constructor for the tag"),
        ("org/recipes/binary.yaml", "binary.yaml cannot be read as text: a recipe is a YAML file"),
        ("../recipes/mine.yaml", "../recipes/mine.yaml: no such recipe file"),
        ("dense/recipes/mine.yaml", "dense/recipes/mine.yaml: no such recipe file"),  # a folder of this name is here
        ("file:///etc/passwd", "file:///etc/passwd: recipes are not fetched from the web: download the file and give"),
        ("https://host/mine.yaml?token=secret", "https://host/mine.yaml: recipes are not fetched from the web"),
    ],
)
def test_what_is_no_recipe_is_one_line(place: Path, hub: Hub, recipes: Repo, reference: str, message: str):
    strange = MINE.replace("ratio: 0.5", "ratio: 0.5\nrun: rm").replace("name: mine", "name: mine")
    files = {
        "huge.yaml": b"#" * 400_000,
        "strange.yaml": strange.encode(),
        "code.yaml": b"name: !!python/object/apply:os.system [touch hacked]\n",
        "binary.yaml": b"\xff\xfe\x00",
    }
    recipes.commit(recipes.files | files, "more")
    assert message in read_refusal("prune", "dense", "--recipe", reference, "-o", "out")
    assert not any("huge" in path for method, path in hub.asked if method == "GET")


def test_a_folder_stands_for_its_only_recipe():
    Path("mine").mkdir()
    assert read_refusal("recipe", "show", "mine") == "mine is a folder without a recipe; give a .yaml file"
    Path("mine/first.yaml").write_text(MINE)
    assert ok("recipe", "show", "mine").startswith(MINE)
    Path("mine/second.yaml").write_text("x: 1\n")
    assert read_refusal("recipe", "show", "mine") == "mine has 2 recipes; give one of them: mine/first, mine/second"
    assert ok("recipe", "show", "mine/second") == "x: 1\n"
