"""`prune` with a mask whose zeros are shared out over blocks."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.running import ok, run

from .test_commands import LINEARS, PRUNE, TEXT


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `dense`, `stats` and `calib.txt` of its own."""
    for name in ("dense", "stats"):
        shutil.copytree(made / name, tmp_path / name)
    shutil.copy(made / "calib.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report() -> dict:
    return json.loads(Path("out/ckpt_prune.json").read_text())


def zeros() -> dict[str, float]:
    tensors = load_file("out/model.safetensors")
    return {name: float((tensors[name] == 0).double().mean()) for name in LINEARS}


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_every_block_has_its_own_share(here, method):
    output = ok(*PRUNE, f"{method}-50", *TEXT, "--set", "mask.allocation=owl")
    mask = report()["mask"]
    ratios = mask["shares"]["ratios"]
    assert mask["allocation"] == "owl"
    assert sum(ratios) / 2 == pytest.approx(0.5, abs=1e-5)
    assert ratios[0] != ratios[1]
    assert all(figure >= 0 for figure in mask["shares"]["figures"])
    line = f"  Zeros are shared out over blocks by owl: {min(ratios):.1%} to {max(ratios):.1%} zeros."
    assert line in output.splitlines()
    for name, share in zeros().items():
        # Rows of 16 are rounded down.
        assert ratios[int(name.split(".")[2])] - 1 / 16 < share <= ratios[int(name.split(".")[2])] + 1e-6
    assert "sparsity        ok" in ok("verify", "out", "--against", "dense")


@pytest.mark.parametrize("allocation", ["owl", "alpha", "divergence"])
def test_groups_of_an_own_n(here, allocation):
    spread = () if allocation == "divergence" else ("--set", "mask.spread=0.5")
    output = ok(*PRUNE, "wanda-2-4", *TEXT, "--set", f"mask.allocation={allocation}", *spread)
    kept = report()["mask"]["shares"]["kept"]
    assert sum(kept) == 4
    assert f"by {allocation}: {min(kept)} to {max(kept)} of 4 weights kept" in output
    for name, share in zeros().items():
        assert share == 1 - kept[int(name.split(".")[2])] / 4
    verification = ok("verify", "out", "--against", "dense")
    assert "2:4 with its block's N holds in every group" in verification


def test_shares_that_do_not_hold_are_found(here):
    ok(*PRUNE, "wanda-2-4", *TEXT, "--set", "mask.allocation=owl", "--set", "mask.spread=0.5")
    path = Path("out/ckpt_prune.json")
    values = report()
    values["mask"]["shares"]["kept"] = [1, 1]
    path.write_text(json.dumps(values))
    result = run("verify", "out", "--against", "dense")
    assert result.exit_code == 1
    assert "does not hold 1:4" in result.output
    values["mask"]["shares"]["kept"] = [1]
    path.write_text(json.dumps(values))
    assert "is damaged: prune again" in run("verify", "out", "--against", "dense").output


@pytest.mark.parametrize(
    ("recipe", "options", "why"),
    [
        (
            "wanda-divergence",
            ("--statistics", "stats"),
            "recipe wanda-divergence shares a mask's zeros out by their effect on the model: give --text in place of "
            "--statistics",
        ),
        (
            "wanda-divergence",
            (),
            "recipe wanda-divergence needs statistics: give --text FILE to measure them, or --statistics STATS",
        ),
        (
            "wanda-owl",
            (*TEXT, "--ratio", "0.97", "--set", "mask.spread=0.2"),
            "say a smaller mask.spread, or another ratio",
        ),
        ("wanda-50", (*TEXT, "--set", "mask.threshold=5"), "threshold belongs to allocation owl, not uniform"),
        (
            "wanda-50",
            (*TEXT, "--set", "mask.spread=0.1"),
            "spread belongs to an allocation that differs between blocks, not to uniform",
        ),
        (
            "sparsegpt-divergence-4-8",
            (*TEXT, "--set", "mask.spread=0.1"),
            "spread bounds the shares of an unstructured mask: with divergence and N:M leave it out",
        ),
    ],
)
def test_what_does_not_go(here, recipe, options, why):
    result = run(*PRUNE, recipe, *options)
    assert result.exit_code == 2
    *_, message = result.stderr.splitlines()  # behind what is said of so large a ratio
    assert message.endswith(why)
    assert not Path("out").exists()
