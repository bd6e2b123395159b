"""`prune`: every way to say what to do, and where to put it."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ckpt_prune
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.cli.main import main
from ckpt_prune.cli.prune_command import hints
from tests.cli.running import (
    DENSE,
    TEXT,
    changed,
    interrupt_job,
    listing,
    ok,
    read_json,
    read_refusal,
    resume_job,
    run,
    same_files,
    set_config,
)
from tests.interrupting import interrupt_at
from tests.pairs import every

COSTS = """\
                    before    after  share
parameters           5.20K    3.28K  63.1%
bytes              20.8 KB  13.1 KB  63.1%
FLOPs / 32 tokens     418K     229K  54.9%
KV cache / token     128 B     64 B  50.0%
"""
COSTS += "kept per block: heads 1/2 (ratio 0.5), mlp 12/24 (ratio 0.5)\n"
FEWER_BITS = (
    "fewer bits lose less than pruning at every size that they reach: `ckpt-prune export dense --dtype int8 -o OUT` "
    "takes about 7.82 KB, this 15.4 KB, both with the tokenizer; pruning is for latency, for memory where a runtime "
    "takes float types alone, and for sizes below those of 4 bits\n"
)
HALF = ("--ratio", "0.5")
SEQUENTIAL = ("prune", "dense", "--recipe", "rcpu", *HALF, *TEXT)


def calibration(out: str) -> dict[str, object]:
    return read_json(f"{out}/ckpt_prune.json")["calibration"]


def mean_error(out: str, space: str) -> float:
    sites = read_json(f"{out}/ckpt_prune.json")["sites"]
    return math.fsum(site["error_compensated"] for site in sites if site["space"] == space) / 2


# ---- sources of moments ----------------------------------------------------------------------------------------


def test_statistics(place):
    output = ok("prune", "dense", "--recipe", "rcpu", *HALF, "--statistics", "stats", "-o", "out")
    first, body = output.split("\n", 1)
    assert first == DENSE
    assert body.startswith(COSTS)
    title, columns, heads, mlp, what, honest, verdict, end, instead = body.removeprefix(COSTS).splitlines()
    assert (title, columns.split()) == ("Units", ["space", "units", "kept", "error", "before", "after"])
    assert re.fullmatch(rf"  heads \(.*\) +1 of 2 +0\.\d{{4}}  {mean_error('out', 'heads'):.4f}", heads)
    assert re.fullmatch(rf"  mlp \(.*\) +12 of 24 +0\.\d{{4}}  {mean_error('out', 'mlp'):.4f}", mlp)
    assert what == (
        "  The error is the share of the energy of a module's output that pruning changes, before and after "
        "compensation: mean over blocks, calibration samples."
    )
    assert honest == "  It is not perplexity or accuracy."
    assert verdict == "  Compensation lowers the error on calibration samples at 4 of 4 sites."
    assert end == "written to out"
    assert f"{instead}\n" == FEWER_BITS
    assert calibration("out")["target"] == "dense"
    assert same_files("out", "pruned")


def test_text_and_a_sequential_recipe(place):
    before = listing()
    output = ok(*SEQUENTIAL, "-o", "out")
    assert output.startswith(COSTS)
    assert "written to out\n" in output
    assert output.endswith(FEWER_BITS)
    new_entries = {Path(name).parts[0] for name in set(listing()) - set(before)}
    assert new_entries == {"out"}
    assert "sequential" in str(calibration("out")["target"])
    assert calibration("out")["samples"] == 8
    assert "FAILED" not in ok("verify", "out", "--against", "dense")


def test_report_and_card_say_which_texts_the_windows_are_of(place):
    """Equal shares of each text; conversations need the model's chat template."""
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "the cat sat on the mat"}]}\n' * 9)
    how = (*changed(SEQUENTIAL, "--samples", "6", "--window", "8"), "--text", "chats.jsonl", "-o", "mixed")
    assert read_refusal(*how).startswith(
        "chats.jsonl, line 1: a conversation, and the tokenizer dense has no chat template"
    )
    Path("dense/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    ok(*how)
    windows = f"3 of {TEXT[1]}, 3 of chats.jsonl (9 by the chat template)"
    assert calibration("mixed")["windows"] == windows
    assert f"windows: {windows}" in Path("mixed/README.md").read_text()


def test_a_strength_searched_by_perplexity_is_told(place):
    args = ["--set", "spaces.mlp.compensation.lambda_grid=[0.001,1]", "--set"]
    args += ["spaces.heads.compensation.lambda_grid=[0.001,1]"]
    output = ok("prune", "dense", "--recipe", "ridge-perplexity", *args, *TEXT, "-o", "out")
    chosen = read_json("out/ckpt_prune.json")["lambda_search"]["chosen"]
    assert f"  Lambda {chosen:g} has the least calibration perplexity of those that were tried.\nwritten" in output


# ---- options ---------------------------------------------------------------------------------------------------


def test_set_changes_the_recipe(place):
    args = ["--set", "spaces.mlp.ratio=0.25", "--set", "spaces.heads.ratio=0", "--set", "name=mine"]
    ok("prune", "dense", "--recipe", "magnitude", *args, "-o", "out")
    report = read_json("out/ckpt_prune.json")
    assert report["recipe"]["name"] == "mine"
    assert [len(site["kept"]) for site in report["sites"]] == [2, 18, 2, 18]


def test_dry_run_writes_nothing(place):
    before = listing()
    output = ok(*SEQUENTIAL, "-o", "out", "--dry-run")
    instead = FEWER_BITS.replace(
        "--dtype int8 -o OUT", "--format gguf --dtype q8_0 -o OUT.gguf"
    )  # no tokenizer is read
    assert output == (
        f"{COSTS}{instead}it takes about 1 s, 1.24 GB of memory and 13.1 KB of disk, where nothing else runs on "
        "this machine\n"
        "everything checked, nothing written\n"
    )
    assert listing() == before


@pytest.mark.parametrize("where", [[], ["-o", "pruned"]], ids=["no output", "an output that exists"])
def test_a_dry_run_needs_no_place_for_an_output(place, where):
    before = listing()
    output = ok(*SEQUENTIAL, *where, "--dry-run")
    assert output.endswith("everything checked, nothing written\n")
    assert listing() == before
    if not where:  # the output of another run is a model, too, wherever it is
        Path("pruned").rename("OUT")
        assert "everything checked" in ok("prune", "OUT", "--recipe", "magnitude", "--dry-run")


@pytest.mark.parametrize(
    ("recipe", "warning"),
    [
        (
            "rcpu",
            "few calibration tokens: 16 for 19 inputs of a projection, so errors are those of a fit, not a prediction; "
            "use more samples (38 tokens or more)",
        ),
        (
            "grail",
            "few calibration tokens: 16, which fits memorise with lambda 0.001 of mlp (--set "
            "spaces.mlp.compensation.lambda=auto takes 1.8); use more samples (95 tokens or more) or a larger lambda",
        ),
    ],
)
def test_a_warning_of_few_tokens_stands_beside_the_errors_and_in_the_card(place, recipe, warning):
    few = ("--text", "calib.txt", "--samples", "2", "--window", "8")
    lines = ok("prune", "dense", "--recipe", recipe, *few, "-o", "out").splitlines()
    assert lines[lines.index(f"warning: {warning}") + 1] == "written to out"
    assert read_json("out/ckpt_prune.json")["warnings"] == [warning]
    assert (
        f"- {warning[0].upper()}{warning[1:]}." in Path("out/README.md").read_text().partition("## How to load it")[0]
    )
    assert sum(warning in line for line in lines) == 1
    assert "warning: " not in ok("prune", "dense", "--recipe", "rcpu", *TEXT, "-o", "enough")
    assert "warnings" not in read_json("enough/ckpt_prune.json")
    ruled = ok(
        "prune", "dense", "--recipe", recipe, "--set", "spaces.mlp.compensation={method: ridge}", *few, "-o", "ruled"
    )
    assert "warning: " not in ruled


@pytest.mark.parametrize("recipe", ["rcpu", "flap-global", "ridge-folds"])
def test_json_alone_is_on_standard_output(place, recipe):
    result = run("prune", "dense", "--recipe", recipe, *TEXT, "-o", "out", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert all(isinstance(message, str) for message in report.pop("messages"))
    assert report.pop("fewer_bits").startswith("fewer bits lose less than pruning")
    assert ("evaluation" in report) == (report["loss"] is not None)
    report.pop("evaluation")
    assert report == read_json("out/ckpt_prune.json")


# ---- places ----------------------------------------------------------------------------------------------------


def test_an_existing_output_stays_unless_told(place):
    args = ["prune", "dense", "--recipe", "magnitude", "-o", "pruned"]
    message = f"{Path('pruned').absolute()} exists; --overwrite replaces it, or give another -o"
    assert read_refusal(*args) == message
    assert read_refusal(*args, "--resume") == message
    ok(*args, "--overwrite")
    assert read_json("pruned/ckpt_prune.json")["recipe"]["name"] == "magnitude"
    assert not Path("pruned.partial").exists()


# ---- interruption ----------------------------------------------------------------------------------------------


KEEPS = "out.partial keeps what is done: the same command with --resume continues\n"


def test_ctrl_c_and_resume(place):
    job = [*SEQUENTIAL]
    ok(*job, "-o", "whole")
    for commit in (1, 2, 3):
        interrupt_job(job, commit)
        message = f"{Path('out.partial').absolute()} is left from an unfinished run; --resume continues it, "
        assert read_refusal(*job, "-o", "out") == message + "--overwrite starts afresh"
        assert read_refusal(*job, "--seed", "1", "-o", "out", "--resume") == (
            f"{Path('out.partial').absolute()} was begun by a different job (it had another --seed, "
            "choice of samples); --resume needs the same one, --overwrite starts afresh"
        )
        resume_job(job)


@pytest.mark.parametrize("error", [RuntimeError("bug"), torch.OutOfMemoryError("too large")])
def test_a_crash_keeps_the_blocks_that_are_done(place, error):
    """An error of the code is one line that says how to see its traceback, and so is memory that runs out."""
    job = ["prune", "dense", "--recipe", "rcpu", *HALF, *TEXT]
    ok(*job, "-o", "whole")
    before = {Path(name).parts[0] for name in listing()}
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, "commit", 2, error)
        result = CliRunner().invoke(main, [*job, "-o", "out"])
    assert result.stderr.startswith(KEEPS)
    if isinstance(error, torch.OutOfMemoryError):
        assert result.exit_code == 2
        assert result.stderr.splitlines()[1].startswith("Error: memory ran out (too large): ")
    else:
        assert result.exit_code == 1
        assert result.stderr.startswith(
            f"{KEEPS}Error: this is a fault of ckpt-prune, not of what you gave it (Runtime"
        )
    assert {Path(name).parts[0] for name in listing()} - before == {"out.partial"}
    ok(*job, "-o", "out", "--resume")
    assert same_files("out", "whole")


# ---- containers ------------------------------------------------------------------------------------------------


def test_remote_code_of_the_source_does_not_travel(place):
    set_config("dense", auto_map={"AutoModelForCausalLM": "theirs.Model"})
    job = ("prune", "dense", "--recipe", "magnitude", *HALF, "-o", "out")
    assert read_refusal(*job) == (
        "dense asks for remote code that is not this tool's (auto_map in config.json): it is not run; "
        "where you have read and trust it, say --trust-remote-code"
    )
    ok(*job, "--trust-remote-code")
    assert "auto_map" not in read_json("out/config.json")
    assert "FAILED" not in ok("verify", "out", "--against", "dense")


# ---- what a newcomer ran into ----------------------------------------------------------------------------------


def test_two_runs_on_one_output(place):
    """The second is refused while the first runs, with every option; the first completes."""
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


def test_statistics_of_a_plan_that_are_gone(place):
    ok("plan", "dense", "--recipe", "rcpu", *HALF, "--statistics", "stats", "-o", "plan.json")
    Path("stats").rename("moved")
    assert read_refusal("prune", "dense", "--plan", "plan.json", "-o", "out") == (
        "the plan's statistics are no longer at stats: say where with --statistics"
    )
    ok("prune", "dense", "--plan", "plan.json", "--statistics", "moved", "-o", "out")


# ---- recovery in a recipe --------------------------------------------------------------------------------------

MANY = ("--text", "calib.txt", "--samples", "64", "--window", "16")


@pytest.mark.parametrize(
    "recipe",
    every(5, ["laco-wanda-50", "laco-sparsegpt-2-4", "laco-sparsegpt-4-8", "laco-flap", "laco-llm-pruner-taylor1"]),
)
def test_the_shipped_recipes_with_recovery(place, recipe):
    """Recovery leaves masked weights zero, and makes no block's error larger than it was at its start."""
    every_block = ("--set", "layers=null") if "llm-pruner" in recipe else ()
    ok("prune", "dense", "--recipe", recipe, *every_block, *MANY, "--set", "recovery.epochs=3", "-o", "out")
    report = read_json("out/ckpt_prune.json")
    assert report["recipe"]["name"] == recipe
    assert report["recovery"]["settings"]["lr"] == 5e-5
    assert any(layer["recovered"] for layer in report["layers"])
    assert all(layer["mse_after"] <= layer["mse_start"] for layer in report["layers"])
    weights = load_file("out/model.safetensors")
    gone = sum(int((weight == 0).sum()) for name, weight in weights.items() if name.endswith("_proj.weight"))
    assert gone == (0 if report["mask"] is None else 1920)
    assert json.loads(ok("verify", "out", "--against", "dense", "--json"))["passed"]


# ---- what it cost, measured at the end -------------------------------------------------------------------------


def test_evaluate_ends_with_what_evaluate_prints(place):
    Path("held_out.txt").write_text(Path("calib.txt").read_text()[:600])
    job = ("prune", "dense", "--recipe", "magnitude", "--ratio", "0.5", "--window", "16", "--evaluate", "held_out.txt")
    output = ok(*job, "-o", "out")
    alone = ok("evaluate", "out", "--against", "dense", "--text", "held_out.txt", "--window", "16", "--samples", "16")
    assert f"written to out\n{alone}" in output
    report = json.loads(ok(*job, "--json", "--overwrite", "-o", "out"))
    evaluation, loss = report["evaluation"], json.loads(Path("out/ckpt_prune.json").read_text())["loss"]
    assert evaluation["kl"] > 0
    assert (loss["of"], loss["before"], loss["after"], loss["kl"]) == (
        *("perplexity", evaluation["against"]["perplexity"], evaluation["perplexity"], evaluation["kl"]),
    )
    assert report["loss"] == loss
    assert loss["data"].startswith("held_out.txt, window 16, tokens ")
    assert "| perplexity | " in Path("out/README.md").read_text()
    ok("verify", "out", "--against", "dense")


def test_an_evaluation_that_fails_leaves_the_output_and_says_so(place):
    Path("short.txt").write_text("the cat")
    job = ("prune", "dense", "--recipe", "magnitude", "--window", "16", "--evaluate", "short.txt")
    result = run(*job, "--json", "-o", "out")
    assert result.exit_code == 2
    printed = json.loads(result.stdout)
    assert "out is complete: `ckpt-prune evaluate out --against dense`" in printed["evaluation"]["error"]
    assert "onnx" not in printed
    ok("verify", "out")


def test_an_evaluation_that_is_interrupted_is_named_in_json(place, monkeypatch):
    def stop(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    Path("held_out.txt").write_text(Path("calib.txt").read_text()[:600])
    monkeypatch.setattr("ckpt_prune.runner.evaluate.evaluate_model", stop)
    job = ("prune", "dense", "--recipe", "magnitude", "--window", "16", "--evaluate", "held_out.txt")
    printed = json.loads(run(*job, "--json", "-o", "out").stdout)
    assert printed["evaluation"] == {"error": "interrupted"}
    assert "onnx" not in printed
    ok("verify", "out")


def test_a_terminal_is_told_what_to_do_next(place):
    pruned = ckpt_prune.prune("dense", recipe="magnitude", ratio=0.5, output="out", progress=False)
    assert hints(pruned, pruned.settled)[:2] == [
        "check it: ckpt-prune verify out --against dense",
        'run it: transformers: AutoModelForCausalLM.from_pretrained("out")',
    ]


# ---- ratios that nobody means --------------------------------------------------------------------------------------

NOTHING = (
    "a ratio of 0 takes nothing away, and the output is the dense model again: say a larger --ratio, such as 0.2, or "
    "how large the output may be, such as --target-params 80%"
)


@pytest.mark.parametrize("recipe", ["magnitude", "ridge", "wanda", "best-uniform"])
def test_a_ratio_of_0_says_that_nothing_goes(place, recipe):
    data = () if recipe == "magnitude" else TEXT
    assert NOTHING in run("prune", "dense", "--recipe", recipe, "--ratio", "0", *data, "--dry-run").stderr.splitlines()
    done = run("prune", "dense", "--recipe", recipe, "--ratio", "0.2", *data, "--dry-run")
    assert "takes nothing away" not in done.stderr
    assert "ruined" not in done.stderr


@pytest.mark.parametrize("more", [("--dry-run",), ("-o", "out")], ids=" ".join)
def test_a_ratio_that_ruins_a_model_says_so_before_the_work(place, more):
    stderr = run("prune", "dense", "--recipe", "magnitude", "--ratio", "0.95", *more).stderr
    [line] = [line for line in stderr.splitlines() if "ruined" in line]
    assert line.startswith(
        "50.0% of heads and 4.2% of mlp would stay: the model is ruined then, whatever makes up for it."
    )
    masked = run("prune", "dense", "--recipe", "wanda", "--ratio", "0.95", *TEXT, "--dry-run").stderr
    assert "5.0% of the weights would stay: the model is ruined then" in masked
    assert "A ratio of 0.5 is usual" in masked
    halved = run("prune", "dense", "--recipe", "sparsegpt", "--pattern", "2:4", *TEXT, "--dry-run").stderr
    assert "ruined" not in halved
    assert "takes nothing away" not in halved
