"""--overwrite replaces what this tool wrote; what its user put beside it stays, also where a kill comes in between."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_prune.checkpoint.folder_kinds import EXPORT_KIND, OUTPUT_KIND, WEIGHT_NAMES, FolderKind
from ckpt_prune.checkpoint.journal import JOURNAL
from ckpt_prune.checkpoint.staging import Staging, complete_swap, refuse_inside
from ckpt_prune.checkpoint.swap import swap
from tests.refusals import refusal

MINE = {"notes.txt": "mine", "mine/deep/thesis.tex": "years", "mine/config.json": "not the tool's"}
GRAPH = {"model.onnx": "graph", "config.json": "of the graph"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs" / "out"


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_folder(folder: Path, kind: FolderKind, files: dict[str, str], **record: Any) -> Path:
    """A folder with the record that this tool leaves in one."""
    record = {"files": dict.fromkeys(files, "")} | record
    return fill(folder, files | {kind.record: json.dumps(record)})


def old_output(out: Path, version: str = "old", **record: Any) -> Path:
    files = {"config.json": version, "model-00001-of-00002.safetensors": version, "tokenizer.json": version}
    texts = {"README.md": version, "modeling_pruned.py": version, "model.safetensors.index.json": version}
    return fill(write_folder(out, OUTPUT_KIND, files, **record), texts)


def replacing(out: Path, files: dict[str, str] | None = None, **options: Any) -> Staging:
    """A finished new output, entered and not yet in its place."""
    staging = Staging(out, job="job", overwrite=True, **options)
    staging.__enter__()
    fill(staging.path, {"config.json": "new", "model.safetensors": "new"} if files is None else files)
    return staging


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


NEW = {"config.json": "new", "model.safetensors": "new"}


def test_what_this_tool_wrote_goes_and_everything_else_stays(out):
    fill(old_output(out), MINE)
    (out / "empty").mkdir()
    (out / "latest").symlink_to("nowhere")
    assert replacing(out).publish() == ["empty", "latest", "mine", "notes.txt"]
    assert tree(out) == NEW | MINE
    assert (out / "empty").is_dir()
    assert (out / "latest").readlink() == Path("nowhere")
    assert list(out.parent.iterdir()) == [out]


def test_side_files_that_the_record_lists_go(out):
    fill(old_output(out, side_files=["LICENSE", "../../escape", "README.md"]), {"LICENSE": "old", "NOTICE": "mine"})
    fill(out.parent.parent, {"escape": "outside"})
    replacing(out).publish()
    assert tree(out) == NEW | {"NOTICE": "mine"}
    assert (out.parent.parent / "escape").read_text() == "outside"


def test_the_graph_that_the_recipe_wrote_goes_by_its_own_record(out):
    old_output(out, recipe={"export": {"format": "onnx"}})
    fill(
        write_folder(out / "onnx", EXPORT_KIND, GRAPH),
        {"README.md": "card", "validation.json": "{}", "bench.csv": "mine"},
    )
    fill(out / "onnx.partial", {JOURNAL: "{}", "model.onnx": "half"})
    assert replacing(out).publish() == ["onnx/bench.csv"]
    assert tree(out) == NEW | {"onnx/bench.csv": "mine"}


@pytest.mark.parametrize("recipe", [{"export": None}, {}, "damaged"])
def test_a_graph_that_its_user_exported_stays(out, recipe):
    write_folder(old_output(out, recipe=recipe) / "onnx", EXPORT_KIND, GRAPH)
    graph = tree(out / "onnx")
    assert replacing(out).publish() == ["onnx"]
    assert tree(out / "onnx") == graph


def test_a_folder_in_the_place_of_a_file_that_was_written_is_the_users(out):
    fill(old_output(out, side_files=["LICENSE"]), {"LICENSE/all.txt": "mine"})
    replacing(out).publish()
    assert tree(out) == NEW | {"LICENSE/all.txt": "mine"}


# ---- names that both want --------------------------------------------------------------------------------------------


def message_for(path: Path) -> str:
    return (
        f"{path} was not written with the output that is there, and the new one needs its name; move it away or choose "
        "another output name"
    )


@pytest.mark.parametrize("name", ["vocab.json", "model.safetensors", "onnx/mine.txt"])
def test_a_users_file_whose_name_is_needed_is_refused_before_anything_is_written(out, name):
    fill(old_output(out), {name: "mine"})
    before = tree(out.parent)
    wants = WEIGHT_NAMES | {"vocab.json": None, "onnx": None}
    folder = out / name if "/" not in name else out / "onnx"
    assert refusal(Staging, out, job="job", overwrite=True, wants=wants) == message_for(folder)
    assert tree(out.parent) == before


def test_a_file_that_is_the_same_is_not_lost(out, tmp_path):
    """Reports of former versions do not list what was copied."""
    fill(old_output(out), {"merges.txt": "the same"})
    fill(tmp_path / "source", {"merges.txt": "the same", "vocab.json": "other"})
    replacing(out, NEW | {"merges.txt": "the same"}, wants={"merges.txt": tmp_path / "source/merges.txt"}).publish()
    assert tree(out) == NEW | {"merges.txt": "the same"}


def test_a_name_that_turns_out_to_be_needed_keeps_both(out):
    """Found at the very end: the finished folder waits until the file is out of its way."""
    old_output(out)

    def run() -> None:
        with Staging(out, job="job", overwrite=True) as staging:
            fill(staging.path, NEW | {"extra.json": "new"})
            fill(out, {"extra.json": "mine"})
            staging.publish()

    assert refusal(run) == message_for(out / "extra.json")
    assert (tree(out)["config.json"], tree(out)["extra.json"]) == ("old", "mine")
    (out / "extra.json").unlink()
    with Staging(out, job="job", resume=True) as staging:
        assert staging.journal.complete
        staging.publish()
    assert tree(out) == NEW | {"extra.json": "new"}


@pytest.mark.parametrize("inside", ["stats", "deep/calib.txt"])
def test_an_output_that_holds_an_input(out, inside):
    assert refusal(refuse_inside, out, [None, out.parent / "beside.txt", out / inside]) == (
        f"{out / inside} lies inside the output {out}: choose another output name, or move it away"
    )
    refuse_inside(out, [out, None, out.parent / "out.txt"])


# ---- kills -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


STEPS = [(Path, "rename"), (Path, "mkdir"), (Path, "unlink"), (Path, "replace"), (shutil, "rmtree"), (os, "fsync")]


def killed_at(number: int, action: Any) -> bool:
    """Do something that dies just before its `number`-th step on the disk; whether there were so many."""
    calls = 0

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STEPS:
            original = getattr(owner, name)

            def step(*args: Any, original: Any = original, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == number:
                    raise Killed
                return original(*args, **options)

            patch.setattr(owner, name, step)
        try:
            action()
        except Killed:
            return True
    return False


def test_a_kill_at_any_moment_loses_nothing(out):
    """OUT is absent, the old folder or the new one; every file of its user is there once, and the next run ends it."""
    users = MINE | {"onnx/mine.txt": "mine"}
    number, states = 0, set()
    died = True
    while died:
        number += 1
        shutil.rmtree(out.parent)
        old_output(out, recipe={"export": {"format": "onnx"}}, side_files=["tokenizer.json"])
        write_folder(out / "onnx", EXPORT_KIND, GRAPH)
        old = tree(out)
        fill(out, users)
        staging = replacing(out)
        died = killed_at(number, staging.publish)
        staging.release()
        contents = tree(out) if out.exists() else {}
        states.add(contents.get("config.json", "absent"))
        contents.pop(JOURNAL, None)
        assert {name: text for name, text in contents.items() if name not in users} in ({}, old, NEW)
        everywhere = tree(out.parent).items()
        for name, text in users.items():
            assert [other for path, other in everywhere if path.endswith(("out/" + name, "replaced/" + name))] == [text]
        # The next run, whichever it is, puts things right.
        complete_swap(out)
        assert tree(out) in (old | users, NEW | users)
        if out.with_name("out.partial").exists():
            with Staging(out, job="job", overwrite=True) as again:
                fill(again.path, NEW)
                again.publish()
        assert tree(out) == NEW | users
        assert list(out.parent.iterdir()) == [out]
    assert states == {"old", "absent", "new"}
    assert number > 12


def test_files_that_appear_on_both_sides_of_a_killed_swap_are_both_kept(out):
    fill(old_output(out), {"notes.txt": "mine"})
    out.rename(out.with_name(".out.ckpt_prune-replaced"))
    fill(out, {"config.json": "new", "notes.txt": "written meanwhile"})
    aside = out.with_name(".out.ckpt_prune-replaced")
    assert refusal(complete_swap, out) == (
        f"{aside / 'notes.txt'} is to be kept, and {out / 'notes.txt'} is there already; move one of them away"
    )
    assert (aside / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    complete_swap(out)
    assert tree(out) == {"config.json": "new", "notes.txt": "mine"}


# ---- the first write of the journal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("torn", [None, "", '{"version"'])
def test_a_kill_at_the_first_journal_does_not_wedge_the_place(out, options, torn):
    out.with_name("out.partial").mkdir()
    if torn is not None:
        fill(out.with_name("out.partial"), {".ckpt_prune_journal.json.tmp": torn})
    with Staging(out, job="job", **options) as staging:
        assert not staging.resumed
        fill(staging.path, NEW)
        staging.publish()
    assert tree(out) == NEW


def test_a_full_disk_at_the_first_journal_leaves_nothing(out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no_space)
        message = refusal(Staging(out, job="job").__enter__)
    assert message == f"cannot write {out}.partial (No space left on device); free space or choose another place"
    assert list(out.parent.iterdir()) == []
    with Staging(out, job="job") as staging:
        assert staging.path.is_dir()


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_new_folder_that_cannot_be_moved_leaves_nothing_in_its_place(out: Path) -> None:
    with pytest.raises(FileNotFoundError):
        swap(out.with_name("nowhere"), out, OUTPUT_KIND)
    assert list(out.parent.iterdir()) == []


def test_what_an_earlier_kill_left_to_delete_goes_with_the_next_swap(out: Path) -> None:
    old_output(out)
    fresh = old_output(out.with_name("fresh"), "new")
    fill(out.with_name(".out.ckpt_prune-deleted"), {"config.json": "older"})
    assert swap(fresh, out, OUTPUT_KIND) == []
    assert (out / "config.json").read_text() == "new"
    assert list(out.parent.iterdir()) == [out]
