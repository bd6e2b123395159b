"""`push`: an output goes to the Hub whole, by one commit, or not at all."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckpt_prune
from ckpt_prune.runner.verify import verify_output
from tests.cli.running import edit_weights, ok, poison, read_refusal, run
from tests.hub_server import READER, TOKEN, Hub, Repo

# The Hub's client of this version, as it uploads.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")

DENSE_CARD = (
    "---\nlicense: other\nlicense_name: mine\nlanguage: [en, no]\ndatasets: org/data\nbase_model: org/first\n---\n"
    "# Dense\n"
)


def values_of(card: bytes) -> dict[str, object]:
    """Read the values of a card from its YAML as the Hub does, without this package."""
    loaded = yaml.safe_load(card.decode().split("---\n")[1])
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture
def licensed(place: Path) -> Path:
    """`out`, made from a model with a card and a licence."""
    Path("dense/README.md").write_text(DENSE_CARD)
    Path("dense/LICENSE").write_text("mine\n")
    ok("prune", "dense", "--recipe", "magnitude", "--ratio", "0.5", "-o", "out")
    return Path("out")


def test_a_new_repository_is_private_and_gets_everything_by_one_commit(licensed: Path, hub: Hub):
    (licensed / "notes.txt").write_text("my own")
    lines = ok("push", "out", "team/small").splitlines()
    repo = hub.repos["team/small"]
    assert repo.private
    assert repo.messages == ["initial commit", f"Made by ckpt_prune {ckpt_prune.__version__}"]
    written = {path.name for path in licensed.iterdir()} - {"notes.txt"}
    assert {"model.safetensors", "config.json", "README.md", "ckpt_prune.json", "LICENSE", "tokenizer.json"} <= written
    assert set(repo.files) == written | {".gitattributes"}
    for name in written - {"README.md"}:
        assert repo.files[name] == (licensed / name).read_bytes()
    assert lines[0].split() == ["file", "bytes"]
    assert lines[-2] == "not pushed, as this tool did not write it: notes.txt"
    assert lines[-1].endswith(f" to {hub.url}/team/small (private), commit {repo.head}")
    assert not any(TOKEN.encode() in content for content in repo.files.values())


def test_the_card_tells_the_hub_what_it_reads(licensed: Path, hub: Hub):
    Path("found.json").write_text(
        ok("evaluate", "out", "--against", "dense", "--text", "calib.txt", "--window", "16", "--samples", "4", "--json")
    )
    own_card = (licensed / "README.md").read_text()
    assert values_of(own_card.encode()) == {
        "library_name": "transformers",
        "license": "other",
        "license_name": "mine",
        "language": ["en", "no"],
        "datasets": ["org/data"],
        "pipeline_tag": "text-generation",
        "tags": ["ckpt-prune", "pruned"],
    }
    (licensed / "README.md").write_text(own_card + "\nMy own words.\n")
    ok("push", "out", "ada/small", "--base-model", "org/dense", "--license", "mit", "--evaluation", "words=found.json")
    card = hub.repos["ada/small"].files["README.md"]
    metadata = values_of(card)
    assert (metadata["base_model"], metadata["base_model_relation"], metadata["license"]) == (
        "org/dense",
        "finetune",
        "mit",
    )
    assert metadata["language"] == ["en", "no"]
    measured = json.loads(Path("found.json").read_text())
    (index,) = metadata["model-index"]
    assert index["name"] == "small"
    (result,) = index["results"]
    assert (result["task"], result["dataset"]) == ({"type": "text-generation"}, {"name": "words", "type": "words"})
    assert {m["type"]: m["value"] for m in result["metrics"]} == {
        "perplexity": measured["perplexity"],
        "kl_divergence": measured["kl"],
    }
    text = card.decode()
    dense = measured["against"]["perplexity"]
    assert f"| words | perplexity, windows of 16 tokens | {measured['perplexity']:.4g} | {dense:.4g} |" in text
    assert "My own words." in text
    assert 'from_pretrained("ada/small")' in text
    assert (licensed / "README.md").read_text() == own_card + "\nMy own words.\n"


def test_a_model_of_the_hub_is_named_as_the_base(place: Path, hub: Hub):
    files = {path.name: path.read_bytes() for path in Path("dense").iterdir()}
    hub.repos["org/dense"] = Repo(private=False)
    hub.repos["org/dense"].commit(files, "model")
    ok("prune", "org/dense", "--recipe", "magnitude", "--ratio", "0.5", "-o", "out")
    metadata = values_of(Path("out/README.md").read_bytes())
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("org/dense", "finetune")


def test_the_graph_goes_along(finished: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(finished)
    pushed = json.loads(ok("push", "out", "small", "--json"))
    assert pushed["repo"] == "ada/small"
    assert {"onnx/model.onnx", "onnx/validation.json", "onnx/ckpt_prune_onnx.json"} <= set(pushed["files"])
    assert hub.repos["ada/small"].files["onnx/model.onnx"] == Path("out/onnx/model.onnx").read_bytes()
    assert pushed["bytes"] == sum(pushed["files"].values())


def test_a_dry_run_lists_and_uploads_nothing(licensed: Path, hub: Hub):
    lines = ok("push", "out", "team/small", "--dry-run").splitlines()
    sizes = dict(line.split() for line in lines[1:-1])
    assert int(sizes["model.safetensors"]) == (licensed / "model.safetensors").stat().st_size
    assert lines[-1].endswith(", for team/small (private): everything checked, nothing uploaded")
    assert hub.uploads() == []
    assert hub.repos == {}


def test_overwriting_replaces_what_was_pushed_and_nothing_else(licensed: Path, hub: Hub):
    ok("push", "out", "team/small")
    repo = hub.repos["team/small"]
    repo.commit(repo.files | {"mine.md": b"my own"}, "mine")
    before = len(repo.commits)
    assert read_refusal("push", "out", "team/small") == (
        "team/small is on the Hub and not empty: choose another name or say --overwrite"
    )
    shutil.rmtree("out")
    Path("dense/LICENSE").unlink()
    ok("prune", "dense", "--recipe", "magnitude", "--ratio", "0.25", "-o", "out")
    assert "removed there: LICENSE" in ok("push", "out", "team/small", "--overwrite")
    assert len(repo.commits) == before + 1
    assert repo.files["mine.md"] == b"my own"
    assert "LICENSE" not in repo.files
    assert repo.files["model.safetensors"] == Path("out/model.safetensors").read_bytes()


def refuse_push(hub: Hub, *words: str) -> str:
    """Return the line of a refused push; nothing was uploaded or changed on the Hub."""
    before = {name: list(repo.commits) for name, repo in hub.repos.items()}
    hub.asked.clear()
    line = read_refusal("push", *words)
    assert hub.uploads() == []
    assert {name: repo.commits for name, repo in hub.repos.items()} == before
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none", "team/x"), "none does not exist; give a folder that this tool wrote"),
        (
            ("dense", "team/x"),
            "dense has no ckpt_prune.json; give a folder that `prune`, `recover` or `quantize` wrote",
        ),
        (("out", "a/b/c"), "'a/b/c' is no name of a Hub repository; give one such as org/name"),
        (("out", "team/-"), "'team/-' is no name of a Hub repository; give one such as org/name"),
        (("out", "other/x"), "the token is ada's, who is no member of other: choose a name such as ada/NAME"),
        (
            ("out", "team/theirs", "--overwrite"),
            "team/theirs holds what this tool did not push (it has no ckpt_prune.json), so it is never replaced; "
            "choose another name",
        ),
        (("out", "team/seen"), "team/seen is there and public: say --public, or choose another name"),
        (
            ("out", "team/theirs", "--public"),
            "team/theirs is there and private: leave --public out, or choose another name",
        ),
        (("out", "team/picky"), "team/picky has a .gitignore, which may keep files out of a push: remove it there"),
        (
            ("out", "team/x", "--evaluation", "found.json"),
            "--evaluation found.json: expected NAME=FILE, the data's name and what `evaluate --json` printed",
        ),
        (
            ("out", "team/x", "--evaluation", "a=b"),
            "b cannot be read (No such file or directory); `ckpt-prune evaluate --json` prints one",
        ),
        (("out", "team/x", "--evaluation", "a=other.json"), "other.json has figures of some/dense, not of out"),
        (
            ("out", "team/x", "--evaluation", "a=out/config.json"),
            "out/config.json has no figures; `ckpt-prune evaluate --json` prints them",
        ),
    ],
)
def test_bad_input_is_one_line_and_uploads_nothing(licensed: Path, hub: Hub, words: tuple[str, ...], message: str):
    hub.repos["team/theirs"] = Repo()
    hub.repos["team/theirs"].commit({"model.safetensors": b"theirs"}, "theirs")
    hub.repos["team/seen"] = Repo(private=False)
    hub.repos["team/picky"] = Repo()
    hub.repos["team/picky"].commit({".gitignore": b"*.json"}, "picky")
    Path("other.json").write_text('{"model": "some/dense", "perplexity": 3}')
    assert refuse_push(hub, *words) == message


def test_a_token_is_needed_and_never_shown(licensed: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", READER)
    assert refuse_push(hub, "out", "team/x") == (
        "the token of ada may only read: make one that may write at the Hub's settings"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    message = refuse_push(hub, "out", "team/x")
    assert message.startswith("the Hub cannot be asked about team/x (")
    assert "hf_wrong" not in message
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "no/such/file")
    assert refuse_push(hub, "out", "team/x") == ("there is no token of the Hub: run `hf auth login`, or set HF_TOKEN")


def test_offline_nothing_is_asked(licensed: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refuse_push(hub, "out", "team/x") == "team/x cannot be pushed to: HF_HUB_OFFLINE is set"
    assert hub.asked == []


def test_what_is_not_whole_is_not_pushed(licensed: Path, hub: Hub):
    edit_weights("out", poison("model.embed_tokens.weight"))
    message = refuse_push(hub, "out", "team/x")
    assert message.startswith("out is not whole (finite: ")
    assert message.endswith("), so nothing was pushed")
    assert hub.repos == {}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_changes_while_it_is_verified_is_not_pushed(
    licensed: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str
):
    """A file that changes during verification is not pushed: it once went to the Hub, with exit code 0."""

    def verify_then_truncate(*given: Any, **more: Any) -> Any:
        checks = verify_output(*given, **more)
        (licensed / name).write_bytes((licensed / name).read_bytes()[:-9])
        return checks

    monkeypatch.setattr("ckpt_prune.runner.push.verify_output", verify_then_truncate)
    result = run("push", "out", "team/x")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: out/{name} changed while it was verified: push again"
    assert hub.repos == {}


def test_a_link_is_not_followed(licensed: Path, hub: Hub):
    secret = Path("secret")
    secret.write_text("mine")
    (licensed / "LICENSE").unlink()
    (licensed / "LICENSE").symlink_to(secret.resolve())
    assert refuse_push(hub, "out", "team/x") == (
        "out/LICENSE is a link, and what it leads to would be shared; put the file there"
    )


@pytest.mark.parametrize("broken", ["blob", "commit"])
def test_an_upload_that_fails_leaves_an_empty_repository(licensed: Path, hub: Hub, broken: str):
    hub.breaks.add(broken)
    message = read_refusal("push", "out", "team/small")
    assert message.startswith("team/small cannot be pushed to (")
    assert message.endswith("); it was made, and is empty: push again")
    assert TOKEN not in message
    repo = hub.repos["team/small"]
    assert repo.private
    assert set(repo.files) == {".gitattributes"}
    hub.breaks.clear()
    ok("push", "out", "team/small")  # an empty repository needs no consent
    assert "model.safetensors" in repo.files


# ---- recipes


def test_a_recipe_is_pushed_and_used(place: Path, hub: Hub):
    ok("recipe", "copy", "magnitude", "mine.yaml")
    output = ok("recipe", "push", "mine.yaml", "team/recipes")
    repo = hub.repos["team/recipes"]
    assert (
        output == f"pushed mine.yaml to {hub.url}/team/recipes (private): --recipe team/recipes/mine.yaml@{repo.head}\n"
    )
    assert repo.private
    assert repo.files["mine.yaml"] == Path("mine.yaml").read_bytes()
    assert values_of(repo.files["README.md"]) == {"tags": ["ckpt-prune", "ckpt-prune-recipe"]}
    ok("prune", "dense", "--recipe", f"team/recipes/mine.yaml@{repo.head}", "-o", "out")
    # Another one beside it; the card stays.
    repo.commit(repo.files | {"README.md": b"my own"}, "words")
    ok("recipe", "copy", "rcpu", "other.yaml")
    report = json.loads(ok("recipe", "push", "other.yaml", "team/recipes", "--json"))
    assert report == {"reference": f"team/recipes/other.yaml@{repo.head}", "url": f"{hub.url}/team/recipes"}
    assert set(repo.files) == {".gitattributes", "README.md", "mine.yaml", "other.yaml"}
    assert repo.files["README.md"] == b"my own"


def test_a_recipe_replaces_another_only_where_that_is_asked_for(place: Path, hub: Hub):
    ok("recipe", "copy", "magnitude", "mine.yaml")
    ok("recipe", "push", "mine.yaml", "team/recipes")
    hub.asked.clear()
    assert read_refusal("recipe", "push", "mine.yaml", "team/recipes") == (
        "team/recipes has a mine.yaml: choose another name or say --overwrite"
    )
    Path("mine.yaml").write_text("name: mine\nrun: 3\n")
    assert "mine.yaml, line 2: unknown key run" in read_refusal(
        "recipe", "push", "mine.yaml", "team/recipes", "--overwrite"
    )
    assert hub.uploads() == []
    shutil.copy(Path(ckpt_prune.__file__).parents[1] / "recipes/papers/rcpu.yaml", "mine.yaml")
    ok("recipe", "push", "mine.yaml", "team/recipes", "--overwrite")
    assert hub.repos["team/recipes"].files["mine.yaml"] == Path("mine.yaml").read_bytes()


# ---- prune --push

PUSHED = ("prune", "dense", "--recipe", "magnitude", "--ratio", "0.5", "-o", "out", "--push", "team/small")


def test_prune_pushes_what_it_wrote(place: Path, hub: Hub):
    lines = ok(*PUSHED).splitlines()
    repo = hub.repos["team/small"]
    pushed = lines[lines.index("written to out") + 1]
    assert pushed.startswith("pushed ")
    assert pushed.endswith(f" to {hub.url}/team/small (private), commit {repo.head}")
    assert repo.files["model.safetensors"] == Path("out/model.safetensors").read_bytes()


def test_the_place_is_looked_at_before_anything_is_computed(place: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.repos["team/small"] = Repo()
    hub.repos["team/small"].commit({"x": b""}, "x")
    assert read_refusal(*PUSHED) == (
        "team/small is on the Hub and not empty: choose another name, or prune and then `ckpt-prune push out "
        "team/small --overwrite`"
    )
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "no/such/file")
    assert read_refusal(*PUSHED) == "there is no token of the Hub: run `hf auth login`, or set HF_TOKEN"
    assert read_refusal(*PUSHED, "--dry-run") == "there is no token of the Hub: run `hf auth login`, or set HF_TOKEN"


def test_a_push_that_fails_leaves_the_output(place: Path, hub: Hub):
    hub.breaks.add("commit")
    done = run(*PUSHED)
    assert done.exit_code == 2
    assert done.stdout.splitlines()[-1] == "written to out"
    assert done.stderr.endswith(
        "it was made, and is empty: push again; out is complete: `ckpt-prune push out team/small`\n"
    )
    assert "ok" in ok("verify", "out")
