"""Unfinished runs: what other commands say of them, what --resume finds, and what --overwrite may not delete."""

import json
import os
import shutil
from pathlib import Path

import pytest

from ckpt_prune.checkpoint.disk_space import check_free_space
from ckpt_prune.checkpoint.journal import JOURNAL, Journal
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import DiskError
from ckpt_prune.job.store import BlockStore
from ckpt_prune.measure.statistics import measurement as measuring
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from tests.cli.running import TEXT, interrupt_job, listing, ok, read_json, read_refusal, run, same_files
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
    for record, line in ((2, "statistics (1)"), (4, "statistics")):
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
    for line in ("statistics", "statistics, 1 of 2 blocks pruned"):
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


# ---- what was written is what was computed -------------------------------------------------------------------------


def flip(path: Path, at: int = -1) -> None:
    """Change one byte of a file, and neither its length nor its time."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # clocks of file systems are coarse
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("recipe", ["magnitude", "flap"])
@pytest.mark.parametrize(
    ("file", "owner", "method"),
    [
        ("model.safetensors", CheckpointWriter, "write"),
        ("model.safetensors", BlockStore, "write_rest"),
        ("model.safetensors", CheckpointWriter, "write_index"),
        ("config.json", CheckpointWriter, "write_index"),
    ],
)
def test_a_source_that_changes_while_it_is_pruned_makes_no_output(place, monkeypatch, file, owner, method, recipe):
    """A tensor that was rewritten in place, with its time kept, made a mixture of two models."""
    original, path = getattr(owner, method), Path("dense", file)
    before = path.read_bytes()

    def change_first(*args, **more):
        if path.read_bytes() == before:
            flip(path, -3)
        return original(*args, **more)

    monkeypatch.setattr(owner, method, change_first)
    result = run(
        "prune", "dense", "--recipe", recipe, "--ratio", "0.5", *(TEXT if recipe == "flap" else ()), "-o", "out"
    )
    assert result.exit_code == 2
    assert f"{file} changed since it was opened" in result.stderr
    assert not Path("out").exists()


def test_a_block_that_was_changed_between_two_runs_is_pruned_again(place):
    ok(*FLAP[:-1], "whole")
    interrupt_job([*FLAP[:-2]], 2)
    before = read_json(Path("out.partial") / JOURNAL)["entries"]
    assert list(before)[-1] == "block 0"
    [weights] = Path("out.partial").glob("*.safetensors")
    info = read_header(weights).tensors["model.layers.0.mlp.up_proj.weight"]
    flip(weights, info.offset)
    result = run(*FLAP, "--resume")
    assert (result.exit_code, result.stderr.splitlines()[1:]) == (
        0,
        ["out.partial was changed since it was written, first in 'block 0': that and all after it are done again"],
    )
    assert same_files("out", "whole")


def test_statistics_of_an_interrupted_run_that_were_changed_are_measured_again(place):
    ok(*FLAP[:-1], "whole")
    interrupt_job([*FLAP[:-2]], 2)
    flip(Path("out.partial/measured/block-00001.safetensors"))
    result = run(*FLAP, "--resume")
    assert (result.exit_code, result.stderr.splitlines()) == (
        0,
        [
            "out.partial was changed since it was written, first in 'statistics 1': that and all after it are done "
            "again",
            "resuming out.partial: statistics (1)",
        ],
    )
    assert same_files("out", "whole")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_whole_output_that_was_changed_before_it_took_its_place_is_mended(place, file):
    ok(*FLAP[:-1], "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_prune.checkpoint.staging.swap", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*FLAP).exit_code == 130
    flip(Path("out.partial", file), -3)
    result = run(*FLAP, "--resume")
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == "out.partial was changed: the changed parts are done again"
    assert same_files("out", "whole")


def test_a_copy_of_the_source_is_gone_on_with_and_another_model_is_not(place, monkeypatch):
    """Its fingerprint, which looks at a sample of the bytes, does not tell this one from it."""
    monkeypatch.setattr("ckpt_prune.checkpoint.digests._sample", lambda nbytes: [(0, min(nbytes, 16))])
    ok(*FLAP[:-1], "whole")
    interrupt_job([*FLAP[:-2]], 2)
    shutil.copytree("dense", "copy")
    flip(Path("dense/model.safetensors"))
    assert read_refusal(*FLAP, "--resume") == (
        "dense has other weights than when out.partial was begun; put those back, or start afresh with --overwrite"
    )
    shutil.rmtree("dense")
    Path("copy").rename("dense")
    os.utime("dense/model.safetensors", (1, 1))
    ok(*FLAP, "--resume")
    assert same_files("out", "whole")
