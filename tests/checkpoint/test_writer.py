"""The files that the writer makes, and its refusals before the first byte."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.disk_space import reserve_space
from ckpt_prune.checkpoint.journal import JOURNAL
from ckpt_prune.checkpoint.shard import Stack
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from tests import refusals

from .folders import CONFIG, example_tensors, layout_of, same, writing

Files = dict[str, dict[str, Tensor]]


def one_file() -> Files:
    return {"model.safetensors": example_tensors()}


def two_files() -> Files:
    items = list(example_tensors().items())
    return {"model-00001-of-00002.safetensors": dict(items[:3]), "model-00002-of-00002.safetensors": dict(items[3:])}


def write_all(out: Path, files: Files, *, before_finish: Callable[[], None] | None = None, **options: bool) -> None:
    with writing(out, layout_of(files), job="job", sharded=len(files) > 1, **options) as writer:
        for file, tensors in files.items():
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            writer.commit(file)
        writer.write_json("config.json", CONFIG)
        if before_finish is not None:
            before_finish()
        writer.finish()


def old_output(out: Path, files: Files) -> None:
    """An output with its record, so that it may be replaced."""
    write_all(out, files)
    names = [path.name for path in out.iterdir()]
    (out / "ckpt_prune.json").write_text(json.dumps({"files": dict.fromkeys(names, "")}))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(out: Path, files: Files | None = None, **options: bool) -> str:
    before = sorted(str(path) for path in out.parent.rglob("*"))
    line = refusals.refusal(write_all, out, files or one_file(), **options)
    assert sorted(str(path) for path in out.parent.rglob("*")) == before, "a refusal changed the disk"
    return line


def leave_unfinished(
    out: Path,
    files: Files,
    job: str = "job",
    commit: bool = True,
    overwrite: bool = False,
    error: BaseException | None = None,
) -> None:
    """A run stopped after its first file, by Ctrl-C if not by an error."""
    file, tensors = next(iter(files.items()))
    layout = layout_of(files)
    error = error or KeyboardInterrupt()
    with (
        suppress(type(error)),
        writing(out, layout, job=job, sharded=len(files) > 1, overwrite=overwrite) as writer,
    ):
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        if commit:
            writer.commit(file)
        writer.write_text("stray.txt", "from the first run")
        raise error


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs" / "out"


class TestOutput:
    def test_single_file_is_what_safetensors_writes(self, out: Path, tmp_path: Path) -> None:
        write_all(out, one_file())
        save_file(example_tensors(), tmp_path / "theirs", metadata={"format": "pt"})
        assert (out / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
        assert sorted(contents(out)) == ["config.json", "model.safetensors"]
        assert list(out.parent.iterdir()) == [out]

    def test_shards_and_index(self, out: Path) -> None:
        files = two_files()
        write_all(out, files)
        loaded = {name: tensor for file in files for name, tensor in load_file(out / file).items()}
        assert all(same(loaded[name], tensor) for name, tensor in example_tensors().items())
        assert json.loads((out / "model.safetensors.index.json").read_text()) == {
            "metadata": {
                "total_parameters": sum(tensor.numel() for tensor in loaded.values()),
                "total_size": sum(tensor.nbytes for tensor in loaded.values()),
            },
            "weight_map": {name: file for file, tensors in files.items() for name in tensors},
        }
        checkpoint = Checkpoint.open(out)
        assert checkpoint.sharded
        assert checkpoint.files == tuple(files)

    def test_one_shard_with_an_index(self, out: Path) -> None:
        files = one_file()
        file = "model-00001-of-00001.safetensors"
        with writing(out, layout_of({file: files["model.safetensors"]}), job="j", sharded=True) as writer:
            for name, tensor in files["model.safetensors"].items():
                writer.write(name, tensor)
            writer.write_json("config.json", CONFIG)
            writer.finish()
        assert Checkpoint.open(out).files == (file,)

    @pytest.mark.parametrize("files", [one_file(), two_files()], ids=["one file", "shards"])
    def test_files_aside_are_no_part_of_the_checkpoint(self, out: Path, files: Files) -> None:
        side_files = {"rotations.st": {"residual": torch.eye(3), "blocks.0.heads": torch.zeros(2, 1, 1)}}
        sharded = len(files) > 1
        options = {"job": "job", "sharded": sharded, "aside": side_files.keys()}
        with writing(out, layout_of(files | side_files), **options) as writer:
            for tensors in (files | side_files).values():
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
            writer.commit("all")
            assert writer.read(["residual"])["residual"].equal(torch.eye(3))
            writer.write_json("config.json", CONFIG)
            writer.finish()
        stored = load_file(out / "rotations.st")
        assert all(same(stored[name], tensor) for name, tensor in side_files["rotations.st"].items())
        write_all(out.with_name("without"), files)
        with_, without = contents(out), contents(out.with_name("without"))
        del with_["rotations.st"]
        assert with_ == without
        checkpoint = Checkpoint.open(out)
        assert checkpoint.sharded == sharded
        assert checkpoint.tensors.keys() == example_tensors().keys()

    def test_files_aside_must_be_written_too_and_count_as_no_shard(self, out: Path) -> None:
        files = one_file() | {"rotations.st": {"residual": torch.eye(3)}}
        with writing(out, layout_of(files), sharded=False, aside={"rotations.st"}) as writer:
            for name, tensor in files["model.safetensors"].items():
                writer.write(name, tensor)
            with pytest.raises(ValueError, match="1 planned tensors were not written, the first is 'residual'"):
                writer.finish()

    def test_order_of_writing_does_not_matter(self, out: Path) -> None:
        write_all(out, two_files())
        other = out.with_name("other")
        with writing(other, layout_of(two_files()), job="j", sharded=True) as writer:
            for name, tensor in reversed(example_tensors().items()):
                writer.write(name, tensor)
            writer.write_json("config.json", CONFIG)
            writer.finish()
        assert contents(other) == contents(out)

    def test_metadata_and_side_files(self, out: Path, tmp_path: Path) -> None:
        (tmp_path / "blob").write_bytes('{"😀": 1}'.encode())
        (tmp_path / "tokenizer.json").symlink_to("blob")
        layout = layout_of({"model.safetensors": {"w": torch.ones(2)}})
        with writing(out, layout, job="j", sharded=False, metadata={"made_by": "tést"}) as writer:
            writer.write("w", torch.ones(2))
            writer.copy(tmp_path / "tokenizer.json")
            writer.write_json("config.json", {"b": "é", "a": [1]})
            writer.write_text("README.md", "# Cárd\n")
            writer.finish()
        assert Checkpoint.open(out).metadata == {"model.safetensors": {"format": "pt", "made_by": "tést"}}
        assert not (out / "tokenizer.json").is_symlink()
        assert (out / "tokenizer.json").read_bytes() == '{"😀": 1}'.encode()
        assert (out / "config.json").read_text(encoding="utf-8") == '{\n  "b": "é",\n  "a": [\n    1\n  ]\n}\n'
        assert (out / "README.md").read_text(encoding="utf-8") == "# Cárd\n"

    def test_what_is_rewritten_is_new_and_all_else_is_as_it_was(self, out: Path) -> None:
        files, other = two_files(), out.with_name("other")
        write_all(other, files)
        staging = Staging(out, job="job")
        with staging:
            writer = CheckpointWriter(staging, layout_of(files), sharded=True)
            for tensors in files.values():
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
            writer.commit("all")
            first = next(name for tensors in files.values() for name, tensor in tensors.items() if tensor.numel() > 1)
            with pytest.raises(ValueError, match="is not written yet"):
                writer.rewrite("none", ["nothing"], lambda _read: {})
            writer.rewrite("twice", [first], lambda read: {first: 2 * read[first]})
            assert writer.done == {"all", "twice"}
            assert list(staging.scratch.iterdir()) == []
            with pytest.raises(ValueError, match="entry 'twice' is already done"):
                writer.rewrite("twice", [first], lambda read: read)
            writer.finish()
        ours, theirs = (
            {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
            for folder in (out, other)
        )
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [first]
        assert torch.equal(ours[first], 2 * theirs[first])

    def test_reading_back_what_is_staged(self, out: Path) -> None:
        tensors = example_tensors()
        with writing(out, layout_of(two_files()), job="j", sharded=True) as writer:
            for name, tensor in tensors.items():
                with pytest.raises(ValueError, match=f"tensor '{name}' is not written yet"):
                    writer.read([name])
                writer.write(name, tensor)
            values = writer.read(reversed(tensors))
            assert all(same(values[name], tensor) for name, tensor in tensors.items())


class TestMisuse:
    """Mistakes of the caller are ValueErrors, and leave nothing behind unless a unit was done."""

    @pytest.mark.parametrize(
        ("match", "calls"),
        [
            ("tensor 'ghost' is not in the layout", [("write", "ghost", torch.ones(1))]),
            (
                r"^tensor 'model.embed.weight' is torch.float32 \(5, 7\), planned as torch.float32 \(7, 5\)$",
                [("write", "model.embed.weight", torch.ones(5, 7))],
            ),
            (
                r"is torch.float64 \(7, 5\), planned as torch.float32 \(7, 5\)$",
                [("write", "model.embed.weight", torch.ones(7, 5, dtype=torch.float64))],
            ),
            (
                "tensor 'model.embed.weight' is already written",
                [("write", "model.embed.weight", torch.ones(7, 5))] * 2,
            ),
            ("entry 'block 0' is already done", [("commit", "block 0")] * 2),
            (
                "5 planned tensors were not written, the first is 'model.layers.0.down.weight'",
                [("write", "model.embed.weight", torch.ones(7, 5)), ("finish",)],
            ),
        ],
    )
    def test_calls(self, out: Path, match: str, calls: list[tuple[Any, ...]]) -> None:
        def call_all() -> None:
            with writing(out, layout_of(one_file()), job="j", sharded=False) as writer:
                for name, *arguments in calls:
                    getattr(writer, name)(*arguments)

        with pytest.raises(ValueError, match=match):
            call_all()
        assert [path.name for path in out.parent.iterdir()] == (["out.partial"] if "entry" in match else [])

    @pytest.mark.parametrize("name", ["../x.json", "a/../x", ".hidden", "model.safetensors", ""])
    def test_side_file_elsewhere(self, out: Path, name: str) -> None:
        with (
            pytest.raises(ValueError, match="cannot be a side file"),
            writing(out, layout_of(one_file()), job="j", sharded=False) as writer,
        ):
            writer.write_json(name, {})

    @pytest.mark.parametrize(
        ("files", "sharded", "match"),
        [
            (("a.safetensors", "b.safetensors"), False, "2 files need an index"),
            (("a.safetensors", "b.safetensors"), True, "tensor 'w' is in two files"),
            (("../a.safetensors",), False, r"'../a.safetensors' is not a plain safetensors file name"),
        ],
    )
    def test_layouts(self, out: Path, files: Sequence[str], sharded: bool, match: str) -> None:
        layout = layout_of({file: {"w": torch.ones(1)} for file in files})
        with pytest.raises(ValueError, match=match), writing(out, layout, sharded=sharded):
            pass
        assert list(out.parent.iterdir()) == []

    def test_a_stack_over_two_files(self, out: Path) -> None:
        layout = layout_of({f"{part}.safetensors": {f"w.{part}": torch.ones(1)} for part in "01"})
        with pytest.raises(ValueError, match="parts of 'w' are in two files"), Staging(out, job="j") as staging:
            CheckpointWriter(staging, layout, sharded=True, stacks={"w": Stack(("w.0", "w.1"))})
        assert list(out.parent.iterdir()) == []

    def test_outside_the_with_block(self, out: Path) -> None:
        with Staging(out, job="j") as staging:
            writer = CheckpointWriter(staging, layout_of(one_file()), sharded=False)
        with pytest.raises(ValueError, match="used outside the `with` block of its staging"):
            writer.write("model.embed.weight", torch.ones(7, 5))
        assert list(out.parent.iterdir()) == []


class TestRules:
    def test_a_file_or_a_link_is_never_replaced(self, out: Path, tmp_path: Path) -> None:
        message = f"{out} exists and is not an output of this tool (%s), so it is never replaced; choose another name"
        out.write_text("a file")
        assert refusal(out, overwrite=True) == message % "it is no folder"
        out.unlink()
        old_output(tmp_path / "elsewhere", one_file())
        out.symlink_to(tmp_path / "elsewhere")
        assert refusal(out, overwrite=True) == message % "it is a link"
        out.unlink()
        out.symlink_to("dangling")
        assert refusal(out, overwrite=True) == message % "it is a link"

    def test_no_room(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 * 2**20))
        assert refusal(out) == (
            f"{out.parent} has 67.1 MB free and the output needs 67.1 MB; free space or choose another place"
        )
        size = 10 * 2**30
        big = {"model.safetensors": {"w": torch.empty(size // 4, device="meta")}}
        with (
            pytest.raises(UserError, match=r"has 67\.1 MB free and the output needs 10\.8 GB; free space"),
            writing(out, layout_of(big), job="j", sharded=False),
        ):
            pass
        assert list(out.parent.iterdir()) == []

    def test_no_room_when_resuming_keeps_the_work(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        leave_unfinished(out, two_files())
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
            assert "0 B free and the output needs 67.1 MB" in refusal(out, two_files(), resume=True)
        assert out.with_name("out.partial").is_dir()

    def test_a_parent_that_cannot_be_written(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
        assert refusal(out) == (f"cannot write {out}.partial (Permission denied); free space or choose another place")


class TestOverwrite:
    @pytest.mark.parametrize("error", [UserError("bad"), RuntimeError("bug"), KeyboardInterrupt(), SystemExit(1)])
    def test_a_failed_run_leaves_the_old_one(self, out: Path, error: BaseException) -> None:
        old_output(out, one_file())
        before = contents(out)

        def fail() -> None:
            raise error

        with pytest.raises(type(error)):
            write_all(out, two_files(), before_finish=fail, overwrite=True)
        assert contents(out) == before
        assert out.with_name("out.partial").exists() == (not isinstance(error, UserError))

    def test_a_failing_swap_puts_the_old_one_back_and_keeps_the_new(
        self, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old_output(out, one_file())
        before = contents(out)
        rename = Path.rename

        def fail_for_staging(path: Path, target: Path) -> Path:
            if path.name.endswith(".partial"):
                raise OSError(5, "Input/output error")
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail_for_staging)
            with pytest.raises(UserError, match="Input/output error"):
                write_all(out, two_files(), overwrite=True)
        assert contents(out) == before
        with Staging(out, job="job", resume=True) as staging:
            assert staging.journal.complete
            staging.publish()
        assert sorted(contents(out)) == ["config.json", *two_files(), "model.safetensors.index.json"]
        assert list(out.parent.iterdir()) == [out]

    def test_an_output_that_appears_meanwhile_is_kept(self, out: Path) -> None:
        def appear() -> None:
            out.mkdir()
            (out / "theirs").write_text("x")

        with pytest.raises(
            UserError,
            match=r"out exists and is not an output of this tool",
        ):
            write_all(out, one_file(), before_finish=appear)
        assert contents(out) == {"theirs": b"x"}


class TestEnding:
    def test_leaving_without_finish_leaves_nothing(self, out: Path) -> None:
        with writing(out, layout_of(one_file()), job="j", sharded=False):
            assert out.with_name("out.partial").is_dir()
        assert list(out.parent.iterdir()) == []

    def test_an_error_after_finish_keeps_the_output(self, out: Path) -> None:
        with (
            suppress(RuntimeError),
            writing(out, layout_of(one_file()), job="j", sharded=False) as writer,
        ):
            for name, tensor in example_tensors().items():
                writer.write(name, tensor)
            writer.finish()
            raise RuntimeError
        assert sorted(contents(out)) == ["model.safetensors"]

    def test_nothing_looks_finished_before_finish(self, out: Path) -> None:
        leave_unfinished(out, one_file())
        assert not out.exists()
        assert JOURNAL in contents(out.with_name("out.partial"))


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_reserves_nothing_still_makes_the_file_as_long(tmp_path, monkeypatch, code) -> None:
    def refuse_to_reserve(*_args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse_to_reserve, raising=False)
    with (tmp_path / "file").open("wb") as file:
        reserve_space(file.fileno(), 12)
    assert (tmp_path / "file").stat().st_size == 12


def test_a_full_disk_is_told_when_a_file_is_claimed(tmp_path, monkeypatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="No space left"):
        reserve_space(file.fileno(), 12)


@pytest.mark.parametrize("sharded", [False, True])
def test_transposed_matrices(tmp_path, sharded):
    """Files hold the transposes of what is written and read, and the fingerprint is of what they hold."""
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(5, 3).T, "c": torch.randn(4), "d": torch.randn(2, 3).half()}
    file = "model-00001-of-00001.safetensors" if sharded else "model.safetensors"
    transposed = frozenset({"b", "d"})
    with writing(tmp_path / "out", layout_of({file: tensors}), sharded=sharded, transposed=transposed) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.commit("all")
        assert same(writer.read(["b"])["b"], tensors["b"])
        writer.write_json("config.json", CONFIG)
        writer.finish()
    for name, stored in load_file(tmp_path / "out" / file).items():
        assert same(stored, tensors[name].T if name in transposed else tensors[name])
    plain = Checkpoint.open(tmp_path / "out")
    checkpoint = plain.transpose([*transposed, "nowhere"])
    for name, tensor in checkpoint.read(tensors).items():
        assert same(tensor, tensors[name])
        assert tensor.is_contiguous()
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert checkpoint.tensors[name].stored_shape == plain.tensors[name].shape
    assert (checkpoint.transposed, plain.transposed) == (transposed, frozenset())
    assert checkpoint.transpose(transposed).tensors == checkpoint.tensors
    assert checkpoint.fingerprint == plain.fingerprint
