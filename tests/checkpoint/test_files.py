"""Files that come from others: a FIFO is not waited for, a change between two reads is an error."""

import os

import pytest
import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.files import read_input, stamp_of
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.common.errors import UserError
from tests.checkpoint.folders import save_single
from tests.refusals import refusal

TENSORS = {"a": torch.ones(3), "b": torch.zeros(2)}


def test_a_fifo_is_refused_before_anybody_waits_for_it(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    for read, remedy in ((read_header, "download it again"), (read_json_object, "download or restore the file")):
        with pytest.raises(UserError, match=r"not a regular file.*" + remedy):
            read(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_bytes(b"12345")
    assert read_input(path, 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, which is more than the 4 that such a file may have"):
        read_input(path, 4)


def wait_for_another_time(folder, before):
    """Until the clock of the file system, which may be coarse, says another time."""
    path = folder / "clock"
    path.touch()
    while stamp_of(path)[2] <= before:
        path.touch()


@pytest.mark.parametrize("how", ["in place", "in place, with its time", "replaced"])
def test_tensors_of_a_file_that_changes_are_not_read(tmp_path, how):
    folder = save_single(tmp_path / "m", TENSORS)
    path = folder / "model.safetensors"
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(checkpoint.read(["a"])["a"], TENSORS["a"])
    data = path.read_bytes()
    opened = stamp_of(path)
    if how == "replaced":
        path.rename(tmp_path / "old")  # so that its inode is not given to the new one
        path.write_bytes(data)
        os.utime(path, ns=(opened[1], opened[1]))
    else:
        path.write_bytes(data[:-8] + b"\1" * 8)
        kept = how.endswith("time")
        wait_for_another_time(tmp_path, opened[2])
        os.utime(path, ns=(opened[1] + 1 - kept,) * 2)
    for read in (lambda: checkpoint.read(["b"]), checkpoint.check_finite, lambda: checkpoint.fingerprint):
        assert refusal(read).startswith("model.safetensors changed since it was opened, tensor '")
    assert Checkpoint.open(folder).read(["a"])
