"""Whole blocks, dimensions of the residual stream and units of what is left in one run, from the command line."""

from pathlib import Path

import pytest
import torch

from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.stages.joint_counts.counts import LIMIT
from tests.cli.joint_axes import JOB, WIDTHS, divergence_on_the_second_fold
from tests.cli.running import ok, read_json, read_refusal, run
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.families import stock

HIDDEN = "hidden: {kind: shared, drop: auto, multiple_of: 4}\n"
DEPTH = "depth: {choose: divergence, drop: auto, compensation: {method: linear}}\n"
BARE = ("--set", "spaces={}", "--set", "allocation=uniform", "--set", "container=auto", "--set", "target=dense")
FLAT, IDLE = 4, (1, 2)


@pytest.fixture
def here(place: Path) -> Path:
    """A llama of four blocks, the middle two of which do little, and whose stream leaves four dimensions empty."""
    Path("mine.yaml").write_text(WIDTHS + HIDDEN + DEPTH)
    torch.manual_seed(3)
    with quiet_transformers(), torch.no_grad():
        model = tiny_llama(max_position_embeddings=32, num_hidden_layers=4)
        model.model.embed_tokens.weight[:, -FLAT:] = 0
        for block, layer in enumerate(model.model.layers):
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight[-FLAT:] = 0
                if block in IDLE:
                    weight *= 0.02
        model.save_pretrained("flat")
    tiny_tokenizer("<s> $A").save_pretrained("flat")
    return place


@pytest.mark.thorough
def test_blocks_that_do_little_and_dimensions_that_are_empty_go(here) -> None:
    lines = ok("prune", "flat", *JOB, "--target-params", "40%", "-o", "out").splitlines()
    report = read_json("out/ckpt_prune.json")
    depth, hidden = report["depth"], report["hidden"]
    tried = {(trial["blocks"], trial["kept"]): trial["measured"] for trial in hidden["tried"]}
    best = 4 - len(depth["kept"]), hidden["kept"]
    assert tried[best] == min(tried.values())
    assert best == (2, 16 - FLAT)
    assert depth["kept"] == [0, 3]
    assert len(tried) <= LIMIT
    assert list(tried) == sorted(tried, key=lambda pair: (pair[0], -pair[1]))
    assert depth["tried"] == []
    assert report["after"]["parameters"] <= 0.4 * report["before"]["parameters"]
    start = lines.index("Amounts that were tried")
    headers, *rows = (line.removeprefix("  ") for line in lines[start + 1 : start + 2 + len(tried)])
    assert headers == "blocks gone  dimensions  divergence"
    assert rows == [
        f"{blocks:<11}  {kept:>10}  {measured:>10.4f}{'  taken' if (blocks, kept) == best else ''}"
        for (blocks, kept), measured in tried.items()
    ]
    card = Path("out/README.md").read_text()
    assert (
        f"\n| blocks gone | dimensions | divergence |  |\n|---|---:|---:|---:|\n| 0 | 16 | {tried[0, 16]:.4f} |  |\n"
        in card
    )
    assert (
        "gone: blocks 1 to 2; residual stream: 12 of 16 dimensions stay (ratio 0.25); kept per block: heads 2/2, mlp "
        "20/24 (40% of the parameters)"
    ) in lines
    config = stock(Path("out")).config
    assert (config.hidden_size, config.num_hidden_layers) == (12, 2)
    assert run("verify", "out", "--against", "flat").exit_code == 0
    page = ok("report", "out", "-o", "page.html") + Path("page.html").read_text()
    assert "blocks +..# 2 of 4 stay" in page
    assert "12 of 16 dimensions stay" in page
    assert f'<td class="left">0</td><td>16</td><td>{tried[0, 16]:.4f}</td>' in page


@pytest.mark.thorough
def test_what_is_measured_is_the_divergence_of_stock_transformers(here) -> None:
    """A pair that meets the size by itself is the job of both numbers without spaces, on the first fold."""
    both = ("--set", "depth.drop=2", "--set", "hidden.drop=8", *BARE)
    ok("prune", "flat", *JOB[2:], "--recipe", "mine.yaml", *both, "-o", "sized")
    size = read_json("sized/ckpt_prune.json")["after"]["parameters"]
    ok("prune", "flat", *JOB, "--target-params", str(size), "-o", "out")
    tried = {
        (trial["blocks"], trial["kept"]): trial["measured"]
        for trial in read_json("out/ckpt_prune.json")["hidden"]["tried"]
    }
    values = {
        "depth": {"choose": "divergence", "drop": 2, "compensation": {"method": "linear"}},
        "hidden": {"kind": "shared", "multiple_of": 4, "drop": 8},
    }
    expected = divergence_on_the_second_fold("flat", **values)
    assert tried[2, 8] == pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough
def test_where_nothing_goes_it_is_the_recipe_of_widths(here) -> None:
    Path("widths.yaml").write_text(WIDTHS)
    job = (*JOB[2:], "--target-params", "100%")
    ok("prune", "flat", "--recipe", "widths.yaml", *job, "-o", "plain")
    output = ok("prune", "flat", "--recipe", "mine.yaml", *job, "-o", "out")
    assert "no whole block goes; residual stream: 16 of 16 dimensions stay (ratio 0); nothing is dropped" in output
    assert Path("out/model.safetensors").read_bytes() == Path("plain/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["depth={part: mlp, drop: 1}"], "depth.part: mlp leaves zeros: beside spaces whole blocks go"),
        (
            [*BARE[1::2], "depth.drop=null", "hidden.drop=null"],
            "ratio and size mean the residual stream here: also say which blocks go, by depth.drop (a number) or "
            "depth.blocks",
        ),
        (
            [*BARE[1::2], "hidden.drop=4"],
            "depth.drop: auto is for recipes with spaces, which lose what the blocks do not",
        ),
    ],
)
def test_recipes_that_contradict_themselves(here, changes: list[str], why: str) -> None:
    given = [part for change in changes for part in ("--set", change)]
    message = read_refusal("prune", "flat", *JOB, *given, "-o", "out")
    assert message.endswith(why), message


def test_what_cannot_be(here) -> None:
    message = read_refusal("prune", "flat", *JOB, "--target-params", "1", "-o", "out")
    assert message.startswith("1 parameters: out of reach of recipe mine, whose blocks, stream and spaces leave "), (
        message
    )
    bare = ("prune", "flat", "--recipe", "mine.yaml", "--statistics", "stats", "--target-params", "40%", "-o", "out")
    assert read_refusal(*bare) == "recipe mine measures the stream itself: give --text in place of --statistics"
    steps = (
        "recipe mine drops whole blocks, narrows the residual stream and then prunes spaces of what is left, which no "
        "statistics are of yet: `ckpt-prune prune --text` (or --images) does all at once; for a plan, `ckpt-prune "
        "prune --recipe depth --set depth.drop=N`, then `ckpt-prune prune --recipe slicegpt-shared --set "
        "hidden.drop=N` first, then calibrate and plan what it has written, by a recipe of spaces alone such as "
        "best-uniform"
    )
    # Refused without statistics, too: nobody calibrates for it in vain.
    for given in ((), ("--text", "calib.txt")):
        assert read_refusal("plan", "flat", "--recipe", "mine.yaml", *given, "--target-params", "70%") == steps


def test_a_size_that_spaces_alone_cannot_reach(here) -> None:
    """A dry run tells the fewest dimensions that go for the size, and the fewest blocks if those do not suffice."""
    job = ("prune", "flat", *JOB, "--dry-run", "-o", "out")
    output = ok(*job, "--target-params", "20%")
    dimensions = "how many dimensions of the residual stream go is measured first"
    assert f"go is measured first; if it were none; {dimensions}; if it were 8, the fewest for this size" in output
    output = ok(*job, "--target-params", "5%")
    assert "how many whole blocks go is measured first; if it were 3, the fewest for this size" in output
