"""`demo`, on fewer windows than it really takes, and the text it reads."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest

from ckpt_prune.datasets import standard_library
from ckpt_prune.demo import run as demo
from tests.cli.running import ok, read_refusal
from tests.graphs import with_layers

ROWS = [
    demo.DemoRow("dense", 0.0, 2_345_678, 4_691_356, 10.126, "llama", 0.0),
    demo.DemoRow("rcpu-scale", 0.2, 1_987_654, 3_975_308, 123.456, "seed_oss", 12.34),
]


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """The first two blocks of the packaged model."""
    folder = tmp_path_factory.mktemp("demo") / "model"
    shutil.copytree(demo.model_folder(), folder)
    return with_layers(folder, 2, of=int(json.loads((folder / "config.json").read_text())["num_hidden_layers"]))


@pytest.fixture
def small(monkeypatch, tmp_path, shallow):
    """Seconds instead of minutes; the text is cut short because tokenising all of it takes most of them."""
    monkeypatch.setattr(demo, "model_folder", lambda: shallow)
    # Both sides are of one walk through the library.
    monkeypatch.setattr(standard_library, "list_modules", cache(standard_library.list_modules))
    read_all = standard_library.read_corpus
    monkeypatch.setattr(standard_library, "read_corpus", lambda **kwargs: read_all(**kwargs)[:40_000])
    monkeypatch.setattr(demo, "WINDOW", 32)
    monkeypatch.setattr(demo, "CALIBRATION_WINDOWS", 4)
    monkeypatch.setattr(demo, "EVALUATION_WINDOWS", 4)
    monkeypatch.setattr(demo, "RATIOS", (0.3,))
    monkeypatch.chdir(tmp_path)


def test_the_demo_compares_what_it_promises():
    assert demo.RECIPES == ("wanda-sp", "flap", "rcpu-scale", "best-uniform", "best")
    assert demo.RATIOS == (0.2, 0.3)


def test_table(small, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda out, device, recipes: ROWS)
    table, _, following = ok("demo").partition("\nnext, ")
    assert table == (
        "recipe      ratio  parameters    bytes  perplexity  stored as  pruning\n"
        "dense          0%   2,345,678  4.69 MB       10.13      llama    0.0 s\n"
        "rcpu-scale    20%   1,987,654  3.98 MB      123.46   seed_oss   12.3 s\n"
        "\n"
        "perplexity: window 32, 4 windows of standard-library modules that neither training nor calibration saw; "
        "calibrated on 4 windows\n"
    )
    assert [line.split()[:2] for line in following.splitlines()[1:]] == [
        ["ckpt-prune", "prune"],
        ["ckpt-prune", "evaluate"],
    ]
    assert "the pruned checkpoints are in kept\n" in ok("demo", "-o", "kept")


def test_the_whole_path_and_what_it_keeps(small):
    result = json.loads(ok("demo", "-o", "kept ü", "--json"))
    assert (result["window"], result["windows"]) == (32, 4)
    dense, *rows = result["rows"]
    assert (dense["model"], dense["ratio"], dense["container"]) == ("dense", 0, "llama")
    assert [(row["model"], row["ratio"]) for row in rows] == [(name, 0.3) for name in demo.RECIPES]
    for row in rows:
        assert row["parameters"] < dense["parameters"]
        assert row["perplexity"] > 1
        report = json.loads(Path(f"kept ü/{row['model']}-30/ckpt_prune.json").read_text())
        assert report["after"]["parameters"] == row["parameters"]
        remote = ", remote code" if report["container"]["remote_code"] else ""
        assert row["container"] == report["container"]["model_type"] + remote
        assert bool(remote) is (row["model"] == "best")
    assert {path.name for path in Path("kept ü").iterdir()} == {f"{name}-30" for name in demo.RECIPES}


def test_no_standard_library_sources(small, monkeypatch):
    def none(**_kwargs):
        return standard_library.list_modules(Path("nothing"))

    Path("nothing").mkdir()
    monkeypatch.setattr(standard_library, "read_corpus", none)
    assert read_refusal("demo", "-o", "out") == (
        "nothing holds no Python source: the demo reads the standard library's own text"
    )


def test_held_out_modules_are_a_fixed_twelfth():
    names = [f"package/module_{i}.py" for i in range(2400)]
    held_out = [name for name in names if standard_library.is_held_out(name)]
    assert 150 < len(held_out) < 250
    # By the path alone, on every machine: what the packaged model was not trained on must not change.
    assert held_out[:3] == ["package/module_14.py", "package/module_24.py", "package/module_26.py"]


def test_the_two_sides_share_no_module(tmp_path):
    for i in range(60):
        (tmp_path / f"m{i}.py").write_text(f"# module {i}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/test_m.py").write_text("# left out\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/other.py").write_text("# left out\n")
    seen, held_out = (
        set(standard_library.read_corpus(held_out=side, root=tmp_path).split()) - {"#", "module"}
        for side in (False, True)
    )
    assert seen
    assert held_out
    assert seen.isdisjoint(held_out)
    assert seen | held_out == {str(i) for i in range(60)}


def test_the_packaged_model_is_small_and_whole():
    folder = demo.model_folder()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10_000_000
    assert "FAILED" not in ok("verify", str(folder))
