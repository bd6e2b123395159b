"""Dimensions of the residual stream and units of spaces under one size, from the command line."""

from pathlib import Path

import pytest
import torch

from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.joint_axes import JOB, WIDTHS, divergence_on_the_second_fold
from tests.cli.running import ok, read_json, read_refusal, run
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.families import stock

RECIPE = f"{WIDTHS}hidden: {{kind: shared, drop: auto, multiple_of: 2}}\n"
FLAT = 4
BARE = ("--set", "spaces={}", "--set", "allocation=uniform", "--set", "container=auto", "--set", "target=dense")


@pytest.fixture
def here(place: Path) -> Path:
    """A llama whose stream leaves four of its sixteen dimensions empty, and a recipe for stream and spaces."""
    Path("mine.yaml").write_text(RECIPE)
    Path("widths.yaml").write_text(WIDTHS)
    torch.manual_seed(3)
    with quiet_transformers(), torch.no_grad():
        model = tiny_llama(max_position_embeddings=32, num_hidden_layers=2)
        model.model.embed_tokens.weight[:, -FLAT:] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[-FLAT:] = 0
            layer.mlp.down_proj.weight[-FLAT:] = 0
        model.save_pretrained("flat")
    tiny_tokenizer("<s> $A").save_pretrained("flat")
    return place


@pytest.mark.thorough
def test_dimensions_that_are_empty_go_first(here) -> None:
    """Empty dimensions go first, and the count that is taken has the least divergence of those that were tried."""
    lines = ok("prune", "flat", *JOB, "--target-params", "72%", "-o", "out").splitlines()
    report = read_json("out/ckpt_prune.json")
    hidden = report["hidden"]
    measured = {trial["kept"]: trial["measured"] for trial in hidden["tried"]}
    assert list(measured) == sorted(measured, reverse=True)
    assert max(measured) == 16
    assert measured[hidden["kept"]] == min(measured.values())
    assert hidden["kept"] <= 16 - FLAT
    assert hidden["energy"] == [pytest.approx(1, abs=1e-4)] or hidden["kept"] < 16 - FLAT
    assert report["after"]["parameters"] <= 0.72 * report["before"]["parameters"]
    start = lines.index("  dimensions  divergence") + 1
    assert lines[start : start + len(measured)] == [
        f"  {kept:<10}  {one:>10.4f}{'  taken' if kept == hidden['kept'] else ''}" for kept, one in measured.items()
    ]
    assert any(line.startswith(f"residual stream: {hidden['kept']} of 16 dimensions stay") for line in lines)
    assert stock(Path("out")).config.hidden_size == hidden["kept"]
    verified = run("verify", "out", "--against", "flat")
    assert verified.exit_code == 0
    assert verified.stdout.splitlines()[-1] == (
        "kept units: no weight is compared: the basis that all weights have absorbed cannot be found from the embedding"
    )
    assert "dimensions stay" in ok("report", "out", "-o", "page.html") + Path("page.html").read_text()


@pytest.mark.thorough
def test_what_is_measured_is_the_divergence_of_stock_transformers(here) -> None:
    """A number that meets the size by itself is the job of that number without spaces, on the first fold."""
    ok("prune", "flat", *JOB, "--set", "hidden.drop=8", *BARE, "-o", "sized")
    size = read_json("sized/ckpt_prune.json")["after"]["parameters"]
    ok("prune", "flat", *JOB, "--target-params", str(size), "-o", "out")
    tried = {trial["kept"]: trial["measured"] for trial in read_json("out/ckpt_prune.json")["hidden"]["tried"]}
    expected = divergence_on_the_second_fold("flat", hidden={"kind": "shared", "multiple_of": 2, "drop": 8})
    assert tried[8] == pytest.approx(expected, rel=1e-4)


def test_a_number_of_blocks_goes_first(here) -> None:
    """Numbers of dimensions are compared in the model without the block."""
    given = ("--set", "depth={choose: cosine, drop: 1}", "--target-params", "50%")
    ok("prune", "flat", *JOB, *given, "-o", "out")
    report = read_json("out/ckpt_prune.json")
    measured = {trial["kept"]: trial["measured"] for trial in report["hidden"]["tried"]}
    assert measured[report["hidden"]["kept"]] == min(measured.values())
    assert len(report["depth"]["kept"]) == 1
    assert report["after"]["parameters"] <= 0.5 * report["before"]["parameters"]
    config = stock(Path("out")).config
    assert (config.hidden_size, config.num_hidden_layers) == (report["hidden"]["kept"], 1)
    message = read_refusal("prune", "flat", *JOB, *given[:2], "--target-params", "1", "-o", "small")
    assert message.startswith("1 parameters: out of reach of recipe mine, whose blocks, stream and spaces leave ")
    # Refused without statistics, too: nobody calibrates for it in vain.
    message = read_refusal("plan", "flat", "--recipe", "mine.yaml", *given)
    assert message.startswith(
        "recipe mine drops whole blocks, narrows the residual stream and then prunes spaces of what"
    )
    assert "`ckpt-prune prune --recipe depth --set depth.drop=N`, then `ckpt-prune prune --recipe slice" in message


def test_a_given_number_beside_spaces(here) -> None:
    """A share of the size is of the model with all its dimensions; a ratio is of the units of what is left."""
    ok("prune", "flat", *JOB, "--set", "hidden.drop=4", "--target-params", "60%", "-o", "out")
    report = read_json("out/ckpt_prune.json")
    assert (report["hidden"]["kept"], report["hidden"]["tried"]) == (12, [])
    assert report["after"]["parameters"] <= 0.6 * report["before"]["parameters"]
    uniform = ("--set", "allocation=uniform", "--set", "hidden.drop=4", "--ratio", "0.5")
    ok("prune", "flat", *JOB, *uniform, "-o", "half")
    sites = read_json("half/ckpt_prune.json")["sites"]
    assert {(len(site["kept"]), site["units"]) for site in sites if site["space"] == "mlp"} == {(12, 24)}
    dry = ok("prune", "flat", *JOB, *uniform, "--dry-run", "-o", "dry")
    assert "residual stream: 12 of 16 dimensions stay (ratio 0.25); kept per block: heads 1/2" in dry
