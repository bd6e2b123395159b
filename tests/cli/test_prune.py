"""`prune`: every way to say what to do, and where to put it."""

import json
import math
from pathlib import Path

import pytest

from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.checkpoint.writing import CheckpointWriter
from tests.cli.running import TEXT, listing, misused, ok, read_json, refused, run, same_files, set_config

COSTS = """\
                     before     after  share
parameters            5.20K     3.28K  63.1%
bytes              20.3 KiB  12.8 KiB  63.1%
FLOPs / 32 tokens      418K      229K  54.9%
"""
COSTS += "kept per block: heads 1/2 (ratio 0.5), mlp 12/24 (ratio 0.5)\n"
HALF = ("--ratio", "0.5")
SEQUENTIAL = ("prune", "dense", "--recipe", "rcpu", *HALF, *TEXT)


def calibration(out: str) -> dict[str, object]:
    return read_json(f"{out}/ckpt_prune.json")["calibration"]


def mean_error(out: str, space: str) -> float:
    sites = read_json(f"{out}/ckpt_prune.json")["sites"]
    return math.fsum(site["error_compensated"] for site in sites if site["space"] == space) / 2


# ---- sources of moments ----------------------------------------------------------------------------------------


def test_statistics(place):
    said = ok("prune", "dense", "--recipe", "rcpu", *HALF, "--statistics", "stats", "-o", "out")
    first, rest = said.split("\n", 1)
    assert first == "recipe rcpu is sequential; with --statistics its dense-cache variant is used"
    assert rest.startswith(COSTS + "heads: mean error of the outputs on the calibration samples 0.")
    heads, mlp, end = rest.removeprefix(COSTS).splitlines()
    assert heads.endswith(f" bare, {mean_error('out', 'heads'):.4f} compensated")
    assert mlp.startswith("mlp: mean error of the outputs on the calibration samples 0.")
    assert mlp.endswith(f" bare, {mean_error('out', 'mlp'):.4f} compensated")
    assert end == "written to out"
    assert calibration("out")["target"] == "dense"
    assert same_files("out", "pruned")


def test_text_and_a_sequential_recipe(place):
    before = listing()
    said = ok(*SEQUENTIAL, "-o", "out")
    assert said.startswith(COSTS)
    assert said.endswith("written to out\n")
    made = {Path(name).parts[0] for name in set(listing()) - set(before)}
    assert made == {"out"}
    assert "sequential" in str(calibration("out")["target"])
    assert calibration("out")["samples"] == 8
    assert ok("verify", "out", "--against", "dense").count(" ok\n") == 5


def test_text_and_a_dense_recipe_is_calibrating_first(place):
    before = listing()
    ok("prune", "dense", "--recipe", "flap", *HALF, *TEXT, "-o", "live")
    assert {Path(name).parts[0] for name in set(listing()) - set(before)} == {"live"}
    ok("prune", "dense", "--recipe", "flap", *HALF, "--statistics", "stats", "-o", "cached")
    live, cached = (Path(out) / "model.safetensors" for out in ("live", "cached"))
    assert live.read_bytes() == cached.read_bytes()


def test_magnitude_needs_nothing(place):
    assert ok("prune", "dense", "--recipe", "magnitude", *HALF, "-o", "out") == COSTS + "written to out\n"
    assert calibration("out") == {"target": "none"}


def test_shards_stay_shards(place):
    ok("prune", "sharded", "--recipe", "rcpu", *HALF, "--statistics", "stats", "-o", "out")
    assert {path.name for path in Path("sharded").iterdir()} < {path.name for path in Path("out").iterdir()}
    assert len(list(Path("out").glob("*.safetensors"))) == 3


def test_a_strength_searched_by_perplexity_is_told(place):
    args = ["--set", "spaces.mlp.compensation.lambda_grid=[0.001,1]", "--set"]
    args += ["spaces.heads.compensation.lambda_grid=[0.001,1]"]
    said = ok("prune", "dense", "--recipe", "ridge-perplexity", *args, *TEXT, "-o", "out")
    chosen = read_json("out/ckpt_prune.json")["lambda_search"]["chosen"]
    assert said.splitlines()[-2] == f"lambda {chosen:g}, of least calibration perplexity"


def test_paths_with_spaces_and_other_letters(place):
    Path("dense").rename("ein Modell ü")
    Path("calib.txt").rename("ein Text ü.txt")
    args = ["--text", "ein Text ü.txt", "--samples", "4", "--window", "8"]
    assert ok("prune", "ein Modell ü", "--recipe", "rcpu", *args, "-o", "模型 out").endswith("written to 模型 out\n")
    assert ok("verify", "模型 out", "--against", "ein Modell ü").count(" ok\n") == 5


# ---- options ---------------------------------------------------------------------------------------------------


def test_set_changes_the_recipe(place):
    args = ["--set", "spaces.mlp.ratio=0.25", "--set", "spaces.heads.ratio=0", "--set", "name=mine"]
    ok("prune", "dense", "--recipe", "magnitude", *args, "-o", "out")
    report = read_json("out/ckpt_prune.json")
    assert report["recipe"]["name"] == "mine"
    assert [len(site["kept"]) for site in report["sites"]] == [2, 18, 2, 18]


def test_ratio_replaces_every_ratio(place):
    ok("prune", "dense", "--recipe", "magnitude", "--set", "spaces.mlp.ratio=0.25", *HALF, "-o", "out")
    assert [len(site["kept"]) for site in read_json("out/ckpt_prune.json")["sites"]] == [1, 12, 1, 12]


def test_a_container_by_force_is_said(place):
    args = ["--recipe", "magnitude", *HALF, "--set", "container=seed_oss"]
    ok("prune", "dense", *args, "-o", "out")
    assert read_json("out/config.json")["model_type"] == "seed_oss"
    assert ok("verify", "out", "--against", "dense").count(" ok\n") == 5


def test_dry_run_writes_nothing(place):
    before = listing()
    said = ok(*SEQUENTIAL, "-o", "out", "--dry-run")
    assert said == COSTS + "everything checked, nothing written\n"
    assert listing() == before


def test_dry_run_json(place):
    before = listing()
    said = json.loads(ok(*SEQUENTIAL, "-o", "out", "--dry-run", "--json"))
    assert said["widths"] == [{"heads": 1, "mlp": 12}] * 2
    assert said["container"] == {"model_type": "llama", "remote_code": False}
    assert (said["before"]["parameters"], said["after"]["parameters"]) == (5200, 3280)
    assert listing() == before


def test_dry_run_of_a_ranking_needs_statistics(place):
    args = ["prune", "dense", "--recipe", "flap-global", "-o", "out", "--dry-run"]
    assert refused(*args, *TEXT) == (
        "allocation across-layers-and-spaces has no widths before the model is measured: "
        "for a dry run, calibrate and give --statistics"
    )
    said = ok(*args, "--statistics", "stats")
    assert "with remote code (blocks differ in width)" in said or "kept per block" in said


@pytest.mark.parametrize("recipe", ["rcpu", "flap", "flap-global", "magnitude", "ridge-folds", "vbp"])
def test_json_alone_is_on_standard_output(place, recipe):
    result = run("prune", "dense", "--recipe", recipe, *TEXT, "-o", "out", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == read_json("out/ckpt_prune.json")


def test_what_prune_needs(place):
    message = "prune needs exactly one of --recipe and --plan"
    assert refused("prune", "dense", "-o", "out") == message
    assert refused("prune", "dense", "--recipe", "rcpu", "--plan", "p.json", "-o", "out") == message
    assert refused("prune", "dense", "--recipe", "rcpu", "-o", "out") == (
        "recipe rcpu needs statistics: give --statistics, or --text to measure them"
    )
    assert refused(*SEQUENTIAL, "--statistics", "stats", "-o", "out") == "give --statistics or --text, not both"
    assert misused("prune", "dense", "--recipe", "rcpu") == "Missing option '-o' / '--output'."
    assert misused("prune", "--recipe", "rcpu", "-o", "out") == "Missing argument 'MODEL'."
    assert misused("prune", "out", "dense", "--recipe", "rcpu", "-o", "out") == "Got unexpected extra argument (dense)"
    assert refused(*SEQUENTIAL, "-o", "out", "--resume", "--overwrite") == (
        "--resume and --overwrite exclude each other; give one"
    )


# ---- places ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["dense", "dense/out", ".", "..", "/", "dense/../dense"])
@pytest.mark.parametrize("option", ["--dry-run", "--overwrite", "--resume"])
def test_the_model_is_no_place_for_the_output(place, out, option):
    assert refused("prune", "dense", "--recipe", "magnitude", "-o", out, option) == (
        f"output {Path(out)} overlaps the source dense: choose a place outside it"
    )


@pytest.mark.parametrize("option", [[], ["--dry-run"], ["--overwrite"]])
@pytest.mark.parametrize("out", ["stats", "calib.txt"])
def test_what_is_never_replaced(place, out, option):
    assert refused("prune", "dense", "--recipe", "magnitude", "-o", out, *option) == (
        f"{Path(out).absolute()} exists and is not a checkpoint folder, so it is never replaced; choose another name"
    )


def test_an_existing_output_stays_unless_told(place):
    args = ["prune", "dense", "--recipe", "magnitude", "-o", "pruned"]
    message = f"{Path('pruned').absolute()} exists; --overwrite replaces it"
    assert refused(*args) == message
    assert refused(*args, "--dry-run") == message
    assert refused(*args, "--resume") == message
    ok(*args, "--overwrite")
    assert read_json("pruned/ckpt_prune.json")["recipe"]["name"] == "magnitude"
    assert not Path("pruned.partial").exists()


@pytest.mark.parametrize("parent", ["no", "calib.txt"])
def test_missing_parent(place, parent):
    assert refused("prune", "dense", "--recipe", "magnitude", "-o", f"{parent}/out") == (
        f"the folder {Path(parent).absolute()} does not exist; create it first"
    )


def test_a_partial_folder_of_someone_else(place):
    Path("out.partial").mkdir()
    Path("out.partial/notes.txt").write_text("mine")
    message = (
        f"{Path('out.partial').absolute()} exists and was not left by ckpt-prune; "
        "move it away or choose another output name"
    )
    for option in ([], ["--resume"], ["--overwrite"]):
        assert refused("prune", "dense", "--recipe", "magnitude", "-o", "out", *option) == message


# ---- interruption ----------------------------------------------------------------------------------------------


def interrupt_at(patch: pytest.MonkeyPatch, owner: type, method: str, call: int) -> None:
    """Ctrl-C just before this call of a method."""
    original, calls = getattr(owner, method), 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    patch.setattr(owner, method, counted)


@pytest.mark.parametrize("recipe", ["rcpu", "flap", "ridge-folds"])
@pytest.mark.parametrize("commit", [1, 2, 3])
def test_ctrl_c_and_resume(place, recipe, commit):
    job = ["prune", "dense", "--recipe", recipe, *HALF, *TEXT]
    ok(*job, "-o", "whole")
    before = {Path(name).parts[0] for name in listing()}
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, "commit", commit)
        result = run(*job, "-o", "out")
    assert (result.exit_code, result.stderr) == (
        130,
        "out.partial keeps the blocks that are done: the same command with --resume continues\nInterrupted.\n",
    )
    assert {Path(name).parts[0] for name in listing()} - before == {"out.partial"}
    left = f"{Path('out.partial').absolute()} is left from an unfinished run; --resume continues it, "
    assert refused(*job, "-o", "out") == left + "--overwrite starts afresh"
    assert refused(*job, "--seed", "1", "-o", "out", "--resume") == (
        f"{Path('out.partial').absolute()} was begun by a different job; "
        "--resume needs the same one, --overwrite starts afresh"
    )
    ok(*job, "-o", "out", "--resume")
    assert same_files("out", "whole")
    assert not Path("out.partial").exists()


def test_ctrl_c_while_measuring_leaves_nothing(place):
    before = listing()
    announced = {"calibrate": "out will take 10.0 KiB\n", "prune": ""}
    for job in (["calibrate", "dense"], ["prune", "dense", "--recipe", "flap"]):
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, HiddenStream, "observe", 2)
            result = run(*job, *TEXT, "-o", "out")
        assert (result.exit_code, result.stderr) == (130, f"{announced[job[0]]}Interrupted.\n")
        assert listing() == before


def test_overwrite_starts_an_interrupted_run_afresh(place):
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, "commit", 2)
        assert run(*SEQUENTIAL, "-o", "out").exit_code == 130
    ok(*SEQUENTIAL, "-o", "out", "--overwrite")
    assert not Path("out.partial").exists()


def test_resume_without_anything_to_resume_just_starts(place):
    ok(*SEQUENTIAL, "-o", "out", "--resume")
    ok(*SEQUENTIAL, "-o", "whole")
    assert same_files("out", "whole")


# ---- containers ------------------------------------------------------------------------------------------------


def test_a_forced_container(place):
    ok("prune", "dense", "--recipe", "magnitude", *HALF, "--container", "seed_oss", "-o", "out")
    assert read_json("out/config.json")["model_type"] == "seed_oss"
    assert ok("verify", "out", "--against", "dense").count(" ok\n") == 5
    assert refused("prune", "dense", "--recipe", "magnitude", "--container", "gpt2", "-o", "other") == (
        "container 'gpt2' cannot hold a llama: llama, mistral, seed_oss, remote, any or padded can"
    )


def test_remote_code_of_the_source_does_not_travel(place):
    set_config("dense", auto_map={"AutoModelForCausalLM": "theirs.Model"})
    job = ("prune", "dense", "--recipe", "magnitude", *HALF, "-o", "out")
    assert refused(*job) == (
        "dense asks for remote code that is not this tool's (auto_map in config.json): it is not run; "
        "where you have read and trust it, say --trust-remote-code"
    )
    ok(*job, "--trust-remote-code")
    assert "auto_map" not in read_json("out/config.json")
    assert ok("verify", "out", "--against", "dense").count(" ok\n") == 5


# ---- what a newcomer ran into ----------------------------------------------------------------------------------


def test_two_runs_on_one_output(place):
    """The second is refused while the first lives, with every option; the first is whole."""
    ok(*SEQUENTIAL, "-o", "whole")
    refusals = []

    def second(*_args: object, **_kwargs: object) -> None:
        for option in ("--overwrite", "--resume"):
            result = run(*SEQUENTIAL, "-o", "out", option)
            refusals.append((result.exit_code, result.stderr))

    with pytest.MonkeyPatch.context() as patch:
        commit = CheckpointWriter.commit

        def commit_and_start_another(self: CheckpointWriter, *args: object, **kwargs: object) -> None:
            commit(self, *args, **kwargs)
            if not refusals:
                second()

        patch.setattr(CheckpointWriter, "commit", commit_and_start_another)
        ok(*SEQUENTIAL, "-o", "out")
    message = f"Error: {Path('out.partial').absolute()} is being written by another run; wait for it or stop it\n"
    assert refusals == [(2, message)] * 2
    assert same_files("out", "whole")


def test_an_output_without_a_stock_class_is_not_pruned_again(place):
    args = ["--recipe", "flap-global", "--statistics", "stats", "--set", "spaces.heads.ratio=0.5"]
    ok("prune", "dense", *args, "-o", "uneven")
    message = (
        "uneven was pruned into a shape that no stock class has (remote code): it cannot be pruned or measured again; "
        "start from the dense model"
    )
    assert refused("prune", "uneven", "--recipe", "magnitude", "-o", "out") == message
    assert refused("inspect", "uneven", "--ratio", "0.5") == message
    assert "made from   dense by recipe flap-global" in ok("inspect", "uneven").splitlines()
    assert refused("calibrate", "uneven", *TEXT, "-o", "s") == message


def test_too_few_tokens_are_said(place):
    few = ("--text", "calib.txt", "--samples", "1", "--window", "16")
    assert ok("prune", "dense", "--recipe", "ridge", *HALF, *few, "-o", "out").startswith(
        "16 calibration tokens for 12 inputs of a projection: the errors below are a fit, not a prediction; "
        "use more samples\n"
    )


def test_statistics_of_a_plan_that_are_gone(place):
    ok("plan", "dense", "--recipe", "rcpu", *HALF, "--statistics", "stats", "-o", "plan.json")
    gone = Path("stats").absolute()
    Path("stats").rename("moved")
    assert refused("prune", "dense", "--plan", "plan.json", "-o", "out") == (
        f"the plan's statistics are no longer at {gone}: say where with --statistics"
    )
    ok("prune", "dense", "--plan", "plan.json", "--statistics", "moved", "-o", "out")
