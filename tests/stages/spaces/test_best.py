"""Recipe best, sizes instead of ratios, effects and the size/error curve, from the command line."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch

import ckpt_prune
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import DiskError
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.statistics.end_states import EndStates
from ckpt_prune.stages.shared import measure_dense
from tests import encoders, families
from tests.cli.running import DENSE, TEXT, enter_copy, listing, ok, read_json, read_refusal, run, same_files
from tests.images import write_images, write_vit
from tests.interrupting import interrupt_at
from tests.oracles import whole_best
from tests.pairs import choose_cases

IMAGES = ("--images", "images", "--samples", "8")
GRID = "lambda_grid=[0.01,1]"
QUICK = [f"--set=spaces.{space}.compensation.{GRID}" for space in ("heads", "mlp")]
"""Two strengths to choose from: what is chosen is tested elsewhere."""


@pytest.fixture(scope="module")
def weighed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("best")
    with quiet_transformers():
        encoders.make(folder / "opt", "opt")
        write_vit(folder / "vit")  # two heads of eight dimensions
    write_images(folder / "images", [f"{i}.png" for i in range(8)])
    shutil.copytree(made / "dense", folder / "llama")
    shutil.copytree(made / "stats", folder / "stats")
    shutil.copy(made / "calib.txt", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ok("calibrate", "llama", *TEXT, "--folds", "4", "-o", "weighed")
    return folder


@pytest.fixture
def here(weighed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `llama`, `opt`, `vit`, `images`, `calib.txt`, `stats` and `weighed` of its own."""
    return enter_copy(weighed, tmp_path, monkeypatch)


BEST = ("--recipe", "best", "--statistics", "weighed", *QUICK)


# ---- effects -----------------------------------------------------------------------------------------------------


def test_best_needs_the_metric_and_folds(here):
    lacks = (
        f"{Path('folded')} holds no Fisher metric, by which allocation least-error weighs errors: calibrate with "
        "--folds 4, or say --set weigh_by=energy"
    )
    ok("calibrate", "llama", *TEXT, "--folds", "4", "--collect", "gram", "-o", "folded")
    folded = ("--recipe", "best", "--statistics", "folded")
    assert read_refusal("plan", "llama", *folded) == lacks
    assert read_refusal("prune", "llama", *folded, "-o", "out") == lacks
    assert read_refusal("prune", "llama", *folded, "--target-params", "70%", "-o", "out", "--dry-run") == lacks
    ok("plan", "llama", *folded, "--set", "weigh_by=energy", "-o", "plan.json")
    assert read_refusal("plan", "llama", "--recipe", "best", "--statistics", "stats") == (
        "method auto needs at least two folds: calibrate with --folds 4"
    )


# ---- best, from end to end -----------------------------------------------------------------------------------------

MODELS = {"llama": TEXT, "opt": (*TEXT[:-1], "12"), "vit": IMAGES}


@pytest.mark.parametrize("room", [True, False])
def test_without_room_for_states_the_dense_blocks_run_again(here, monkeypatch, room):
    """The output is the same."""
    job = ("prune", "llama", "--recipe", "best", "--ratio", "0.4", *QUICK, *TEXT)
    ok(*job, "-o", "with")
    written, check = [], measure_dense.check_free_space

    def refuse_states(folder: Path, needed: int, what: str) -> None:
        if not room and what.startswith("states"):
            raise DiskError("full")
        check(folder, needed, what)

    write = EndStates.write
    monkeypatch.setattr(
        EndStates, "write", lambda ends, block, states: (written.append(block), write(ends, block, states))
    )
    monkeypatch.setattr(measure_dense, "check_free_space", refuse_states)
    ok(*job, "-o", "out")
    assert written == ([0, 1] if room else [])
    assert same_files("out", "with")


@pytest.mark.parametrize("model", choose_cases(MODELS, lambda model: model != "opt"))
def test_best_on_data(here, model):
    """A llama is interrupted in the second block and continued: it is the same as in one go."""
    job = ("prune", model, "--recipe", "best", "--ratio", "0.4", *QUICK, *MODELS[model])
    before = {path.name for path in Path().iterdir()}
    ok(*job, "-o", "out")
    if model == "llama":
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, CheckpointWriter, "commit", 2)
            assert run(*job, "-o", "again").exit_code == 130
        ok(*job, "-o", "again", "--resume")
        assert same_files("out", "again")
    assert {path.name for path in Path().iterdir()} - before <= {"out", "again"}
    assert json.loads(ok("verify", "out", "--against", model, "--json"))["passed"]
    report = read_json("out/ckpt_prune.json")
    assert report["recipe"]["target"] == report["calibration"]["target"] == "drift"
    assert report["calibration"]["folds"] == 4
    assert 0 < report["spread"] < 1
    numbers, taken = whole_best.sizes(Path("out"))
    assert (report["after"]["parameters"], report["after"]["bytes"]) == (numbers, taken)
    dropped = [site for site in report["sites"] if len(site["kept"]) < site["units"]]
    assert all(site["share"] is not None and site["error_held_out"] is not None for site in dropped)
    assert all(site["share"] is None for site in report["sites"] if site not in dropped)
    loaded = ckpt_prune.load("out")
    inputs = {"input_ids": families.windows(2, 8)} if model != "vit" else {"pixel_values": torch.randn(2, 3, 8, 8)}
    with torch.inference_mode():
        assert torch.isfinite(loaded(**inputs).logits).all()


def same(a: Path, b: Path) -> bool:
    return a.read_bytes() == b.read_bytes()


def test_measured_first_or_while_pruning_the_same_effects_count(here):
    """With `target: dense` there is no other difference between the two."""
    dense = ("prune", "llama", "--recipe", "best", "--ratio", "0.4", *QUICK, "--set", "target=dense")
    ok(*dense, *TEXT, "-o", "live")
    ok(*dense, "--statistics", "weighed", "-o", "cached")
    assert same(Path("live/model.safetensors"), Path("cached/model.safetensors"))
    assert same(Path("live/config.json"), Path("cached/config.json"))


def test_a_plan_of_best(here):
    lines = ok("plan", "llama", *BEST, "--target-params", "70%", "-o", "plan.json").splitlines()
    assert lines[6].split("  ")[-1].strip() == "margin"
    plan = read_json("plan.json")
    rows = [line.split() for line in lines[7:11]]
    for row, site in zip(rows, plan["sites"], strict=True):
        assert row[-1] == ("-" if site["margin"] is None else f"{site['margin']:.1%}")
    assert any(row[-1].endswith("%") for row in rows)
    ok("prune", "llama", "--plan", "plan.json", "-o", "planned")
    ok("prune", "llama", *BEST, "--target-params", "70%", "--evaluate-samples", "0", "-o", "direct")
    ours, theirs = families.contents(Path("planned")), families.contents(Path("direct"))
    # The card says how to measure the output: by the text at hand, which a plan has none of. Nor has it the spread.
    assert {name for name in ours | theirs if ours.get(name) != theirs.get(name)} == {"ckpt_prune.json", "README.md"}
    assert read_json("planned/ckpt_prune.json")["sites"] == read_json("direct/ckpt_prune.json")["sites"]


# ---- sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job",
    [
        ("plan", "llama", "--recipe", "magnitude"),
        ("prune", "llama", "--recipe", "magnitude", "-o", "out", "--dry-run"),
        ("prune", "llama", "--recipe", "magnitude", "-o", "out"),
    ],
    ids=lambda job: f"{job[0]} {len(job)}",
)
def test_who_asks_for_a_small_share_is_told_what_it_keeps(here, job):
    line = "--target-params 45% keeps 45% of the parameters; to make it 45% smaller say 55%\n"
    assert run(*job, "--target-params", "45%").stderr.startswith(line)
    told = run(*job, *(["--overwrite"] if "-o" in job else []), "--target-params", "55%").stderr
    assert "--target-params" not in told


# ---- the curve -----------------------------------------------------------------------------------------------------

SWEEP = ("plan", "llama", "--recipe", "magnitude", "--sweep")


def test_the_curve_of_weights_alone(here):
    assert ok(*SWEEP, "0:0.75:0.25") == (
        "ratio  parameters   share    bytes  FLOPs  heads  mlp  heads error  mlp error\n"
        "0           5.20K  100.0%  20.8 KB   418K      2   24       0.0000     0.0000\n"
        "0.25        4.62K   88.9%  18.5 KB   381K      2   18       0.0000          -\n"
        "0.5         3.28K   63.1%  13.1 KB   229K      1   12            -          -\n"
        "0.75        2.70K   52.0%  10.8 KB   193K      1    6            -          -\n"
        "errors: means over blocks, relative to each output's energy, after compensation; no perplexity\n"
    )


def test_the_curve_of_best(here):
    """Blocks differ in width, and errors are those of its plans."""
    before = listing()
    sweep = json.loads(ok("plan", "llama", *BEST, "--sweep", "0.1:0.4:0.3", "--json"))
    rows = ok("plan", "llama", *BEST, "--sweep", "0.1:0.4:0.3").splitlines()
    assert listing() == before
    assert [point["ratio"] for point in sweep["points"]] == [0.1, 0.4]
    for point, row in zip(sweep["points"], rows[1:3], strict=True):
        plan = json.loads(ok("plan", "llama", *BEST, "--ratio", str(point["ratio"]), "--json"))
        assert {key: point[key] for key in plan["after"]} == plan["after"]
        cells = row.split()
        assert cells[-1] == f"{point['divergence']:.4f}"
        for column, space in ((-5, "heads"), (-4, "mlp")):
            sites = [site for site in plan["sites"] if site["space"] == space]
            counts = [len(site["kept"]) for site in sites]
            low, high = min(counts), max(counts)
            assert point["widths"][space] == [low, high]
            assert cells[column] == (str(low) if low == high else f"{low}-{high}")
            errors = [site["error_held_out"] or 0.0 for site in sites]
            assert point["errors"][space] == pytest.approx(fmean(errors))
            assert cells[column + 2] == f"{point['errors'][space]:.4f}"
        assert cells[-1] == f"{point['divergence']:.4f}"
    assert any(low < high for low, high in sweep["points"][1]["widths"].values())
    # Of two blocks 0.1 is none; one of the two is what the depth recipe would choose.
    (block,) = sweep["depth"]
    alone = ("--recipe", "shortgpt", "--set", "depth={choose: divergence, drop: 1}", "--statistics", "weighed")
    plan = json.loads(ok("plan", "llama", *alone, "--json"))
    assert (block["ratio"], block["gone"]) == (0.4, 1)
    assert {key: block[key] for key in plan["after"]} == plan["after"]
    assert block["divergence"] == pytest.approx(plan["depth"]["gaps"][0]["divergence"])
    assert rows[-2].split()[:2] == ["0.4", "1"]
    assert rows[-2].split()[-1] == f"{block['divergence']:.4f}"


RIDGE = ("plan", "llama", "--recipe", "ridge", "--statistics", "stats", "--set", "ratio=0.5")
STRENGTH = "spaces.mlp.compensation.lambda"


def test_a_curve_that_is_measured(here):
    """On text, the figures equal pruning and evaluating by hand, and no files are left behind."""
    before = listing()
    by_hand = ("--window", "16", "--samples", "4")
    measured = ("--evaluate", "calib.txt", "--window", "16", "--evaluate-samples", "4")
    lines = ok(*RIDGE, "--sweep", f"{STRENGTH}=0.001,10", *measured).splitlines()
    sweep = json.loads(ok(*RIDGE, "--sweep", f"{STRENGTH}=0.001,10", *measured, "--json"))
    assert listing() == before
    dense = json.loads(ok("evaluate", RIDGE[1], "--text", "calib.txt", *by_hand, "--json"))
    assert sweep["measured"] == f"perplexity (dense: {dense['perplexity']:.3f}) and KL on 4 windows of 16 tokens"
    assert sweep["messages"] == [DENSE]
    assert lines[-2:] == [sweep["measured"], *sweep["messages"]]
    assert lines[0].split()[-2:] == ["KL", "perplexity"]
    ok("prune", *RIDGE[1:], "--set", f"{STRENGTH}=10", "-o", "out")
    alone = json.loads(ok("evaluate", "out", "--against", RIDGE[1], "--text", "calib.txt", *by_hand, "--json"))
    assert sweep["points"][1]["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-9)
    assert sweep["points"][1]["kl"] == pytest.approx(alone["kl"], rel=1e-9)
    assert lines[2].split()[-2:] == [f"{alone['kl']:.4f}", f"{alone['perplexity']:.3f}"]


@pytest.mark.parametrize(
    ("target", "runs"), [("drift", 2 * 8 + 1.2 * 2), ("sequential", 8 + 2.2 * 2), ("dense", 3.2 * 8)]
)
def test_an_estimate_counts_the_samples_that_widths_are_decided_on(here, monkeypatch, target, runs):
    """The dense model is measured on 2 of the 8 windows, pruned blocks on all 8. Recipe `best` states `time: 3.2`."""
    monkeypatch.setattr(measure_dense, "LEAST_WINDOWS", 2)
    monkeypatch.setattr(measure_dense, "TOKENS_PER_INPUT", 0.1)
    monkeypatch.setattr("ckpt_prune.runner.estimate.time_run", lambda *_: 1.0)
    monkeypatch.setattr("ckpt_prune.runner.estimate.time_solve", lambda *_: 0.0)
    options = ("--recipe", "best", "--set", f"target={target}", *TEXT, "--dry-run", "--json", "-o", "out")
    options += ("--evaluate-samples", "0")
    estimate = json.loads(ok("prune", "llama", *options))["estimate"]
    assert estimate["seconds"] == pytest.approx(runs)
