"""Dimensions of the residual stream and units of spaces under one size, from the command line."""

from pathlib import Path

import pytest
import torch

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.joint_axes import JOB, WIDTHS
from tests.cli.running import ok, read_json, read_refusal, resume_job, run
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.families import stock
from tests.interrupting import interrupt_at

RECIPE = f"{WIDTHS}hidden: {{kind: shared, drop: auto, multiple_of: 2}}\n"
FLAT = 4


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


@pytest.mark.thorough
def test_an_interrupted_choice_goes_on(here) -> None:
    job = ["prune", "dense", *JOB, "--target-params", "80%"]
    ok(*job, "-o", "whole")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, Journal, "record", 5)
        assert run(*job, "-o", "out").exit_code == 130
    resume_job(job)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            ["hidden.kind=per-block"],
            "hidden.kind: per-block needs code of its own, whose blocks nothing else can prune: with spaces say "
            "kind: shared, or prune twice, the spaces first",
        ),
        (
            ["hidden.drop=null"],
            "ratio and size mean spaces here: also say how many dimensions go, by hidden.drop (a number, or auto)",
        ),
        (
            ["allocation=uniform"],
            "hidden.drop: auto weighs dimensions by what they do to the model's output, as the widths must be: say "
            "allocation: least-error, without weigh_by",
        ),
        (
            ["spaces={}", "allocation=uniform", "container=auto", "target=dense"],
            "hidden.drop: auto is for recipes with spaces, which lose what the stream does not",
        ),
        (["hidden.drop=16"], "recipe mine drops 16 of 16 dimensions of the residual stream"),
    ],
)
def test_recipes_that_contradict_themselves(here, changes: list[str], why: str) -> None:
    given = [part for change in changes for part in ("--set", change)]
    message = read_refusal("prune", "flat", *JOB, *given, "-o", "out")
    assert message.endswith(why), message
