"""Unfinished runs: what other commands say of them, what --resume finds, and what --overwrite may not delete."""

import json
import shutil
from pathlib import Path

import pytest

from ckpt_prune.checkpoint.journal import JOURNAL, Journal
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter, check_free_space
from ckpt_prune.common.errors import DiskError
from ckpt_prune.measure.statistics import measurement as measuring
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from tests.cli.running import TEXT, listing, ok, read_json, read_refusal, run, same_files
from tests.interrupting import interrupt_at

FLAP = ("prune", "dense", "--recipe", "flap", "--ratio", "0.5", *TEXT, "-o", "out")


def stop_before(*job: str, record: int) -> str:
    """Standard error of a run that ends just before this entry of its journal."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, Journal, "record", record)
        result = run(*job)
    assert result.exit_code == 130
    return result.stderr


# ---- what others say of it -----------------------------------------------------------------------------------------

LOOKING = [("verify",), ("verify", "--json"), ("report",), ("inspect",)]


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_an_unfinished_run_is_no_output(place, command):
    stop_before(*FLAP, record=4)
    assert read_refusal(command[0], "out.partial", *command[1:]) == (
        "out.partial is an unfinished run: the command that began it goes on with --resume, or starts afresh with "
        "--overwrite"
    )


# ---- resuming ------------------------------------------------------------------------------------------------------


def test_measuring_is_kept_and_gone_on_with(place):
    ok(*FLAP[:-1], "whole")
    keeps = "out.partial keeps what is done: the same command with --resume continues\nInterrupted.\n"
    before = set(listing())
    for record, line in ((2, "statistics of 1 of 2 blocks measured"), (4, "statistics measured")):
        assert stop_before(*FLAP, record=record) == keeps
        assert {Path(name).parts[0] for name in set(listing()) - before} == {"out.partial"}
        result = run(*FLAP, "--resume")
        assert (result.exit_code, result.stderr) == (0, f"resuming out.partial: {line}\n")
        assert same_files("out", "whole")
        assert set(listing()) - before == {"out", *(str(path) for path in Path("out").iterdir())}
        shutil.rmtree("out")


def test_a_disk_that_fills_up_keeps_what_is_measured(place):
    """A full disk keeps what is measured, both if the widths show a lack of room and if a block cannot be written."""
    ok(*FLAP[:-1], "whole")
    for line in ("statistics measured", "statistics measured, 1 of 2 blocks pruned"):
        with pytest.MonkeyPatch.context() as patch:
            if "pruned" in line:
                interrupt_at(patch, CheckpointWriter, "commit", 2, DiskError("cannot write a thing"))
            else:
                patch.setattr(CheckpointWriter, "_check_space", no_room)
            result = run(*FLAP)
        keeps, error = result.stderr.splitlines()
        assert (result.exit_code, keeps) == (
            2,
            "out.partial keeps what is done: the same command with --resume continues",
        )
        assert error.startswith("Error: ")
        assert run(*FLAP, "--resume").stderr == f"resuming out.partial: {line}\n"
        assert same_files("out", "whole")
        shutil.rmtree("out")


def no_room(_writer):
    check_free_space(Path(), 2**62)


def test_a_report_of_a_former_version_is_no_finished_job(place):
    ok(*FLAP)
    path = Path("out/ckpt_prune.json")
    report = read_json(path)
    assert {"tokenizer.json", "README.md", "ckpt_prune.json"} <= set(report["side_files"])
    former = {key: value for key, value in report.items() if key not in ("job", "side_files")}
    path.write_text(json.dumps(former))
    assert (
        read_refusal(*FLAP, "--resume")
        == f"{Path('out').absolute()} exists; --overwrite replaces it, or give another -o"
    )
    ok("verify", "out", "--against", "dense")
    ok("report", "out")
    # Its tokenizer is not listed, and is the same as the new one's: nothing is lost.
    ok(*FLAP, "--overwrite")
    assert read_json(path)["side_files"] == report["side_files"]


# ---- overwriting ---------------------------------------------------------------------------------------------------


def inside(path: str, out: str) -> str:
    return f"{path} lies inside the output {out}: choose another output name, or move it away"


def test_inputs_inside_the_output_are_refused(place):
    for name in ("stats", "calib.txt"):
        shutil.move(name, f"pruned/{name}")
    shutil.copy("pruned/calib.txt", "pruned/stats/calib.txt")
    text = ("--text", "pruned/calib.txt", "--window", "16", "--samples", "8")
    assert read_refusal(
        "prune", "dense", "--recipe", "rcpu", "--statistics", "pruned/stats", "-o", "pruned", "--overwrite"
    ) == inside("pruned/stats", "pruned")
    assert read_refusal("prune", "dense", "--recipe", "rcpu", *text, "-o", "pruned", "--overwrite") == (
        inside("pruned/calib.txt", "pruned")
    )
    shutil.copytree("pruned", "other")
    assert read_refusal("recover", "other", "--dense", "dense", *text, "-o", "pruned", "--overwrite") == (
        inside("pruned/calib.txt", "pruned")
    )
    shutil.move("pruned/stats", "stats")
    text = ("--text", "stats/calib.txt", "--window", "16", "--samples", "8")
    assert read_refusal("calibrate", "dense", *text, "-o", "stats", "--overwrite") == inside("stats/calib.txt", "stats")
    assert read_refusal("export", "dense", "--text", "stats/calib.txt", "-o", "stats", "--overwrite") == (
        inside("stats/calib.txt", "stats")
    )
    shutil.copytree("stats", "stats/other")
    assert read_refusal("statistics", "add", "stats", "stats/other", "-o", "stats", "--overwrite").startswith(
        "stats and"
    )
    ok("calibrate", "dense", *text, "--seed", "1", "-o", "more")
    shutil.move("more", "stats/more")
    assert read_refusal("statistics", "add", "stats", "stats/more", "-o", "stats", "--overwrite") == (
        inside("stats/more", "stats")
    )


def test_users_files_stay(place):
    for folder in ("pruned", "stats"):
        Path(folder, "notes.txt").write_text("mine")
        Path(folder, "mine").mkdir()
        Path(folder, "mine/thesis.tex").write_text("years")
    ok("prune", "dense", "--recipe", "magnitude", "-o", "pruned", "--overwrite")
    ok("calibrate", "dense", *TEXT, "--seed", "1", "-o", "stats", "--overwrite")
    for folder in ("pruned", "stats"):
        assert Path(folder, "notes.txt").read_text() == "mine"
        assert Path(folder, "mine/thesis.tex").read_text() == "years"
    ok("verify", "pruned", "--against", "dense")
    ok("statistics", "show", "stats")


def test_a_folder_that_appears_while_calibrating_is_kept(place, monkeypatch):
    write = measuring.write_block

    def appear(*args, **options):
        shutil.copytree("stats", "late", dirs_exist_ok=True)
        return write(*args, **options)

    monkeypatch.setattr(measuring, "write_block", appear)
    result = run("calibrate", "dense", *TEXT, "--seed", "1", "-o", "late")
    assert result.exit_code == 2
    assert result.stderr.endswith(
        f"Error: {Path('late').absolute()} exists; --overwrite replaces it, or give another -o\n"
    )
    assert same_files("late", "stats")


def test_two_calibrations_of_one_folder(place):
    """The second is refused while the first runs."""
    messages = []
    observe = HiddenStream.observe

    def second(*args, **options):
        if not messages:
            messages.append(None)
            messages.append(run("calibrate", "dense", *TEXT, "--seed", "1", "-o", "more").stderr)
        return observe(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HiddenStream, "observe", second)
        ok("calibrate", "dense", *TEXT, "-o", "more")
    busy = f"{Path('.more.partial').absolute()} is being written by another run; wait for it or stop it"
    assert messages[1] == f"Error: {busy}\n"
    assert same_files("more", "stats")


def test_what_a_killed_calibration_left_is_cleared(place, monkeypatch):
    before = set(listing())
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", Staging.release)
        interrupt_at(patch, HiddenStream, "observe", 2)
        assert run("calibrate", "dense", *TEXT, "-o", "more").exit_code == 130
    assert f".more.partial/{JOURNAL}" in listing()
    ok("calibrate", "dense", *TEXT, "-o", "more")
    assert {Path(name).parts[0] for name in set(listing()) - before} == {"more"}
