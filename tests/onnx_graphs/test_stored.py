"""Outputs that wait on disk are the same when they are read, and take no memory until then."""

import gc
from pathlib import Path

import pytest
import torch

from ckpt_prune.checkpoint.staging import DiskError
from ckpt_prune.onnx import stored
from ckpt_prune.onnx.comparison import compare_outputs, flatten_output, flatten_positions
from ckpt_prune.onnx.stored import StoredTensor, read_stored, store_large


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(1, 512, 300), (3, 7), (4, 5, 2, 3)])
def test_rows_and_the_whole_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = StoredTensor.of(values)
    assert kept.shape == values.shape
    assert torch.equal(kept.read(), values)
    assert torch.equal(kept[1:3], values[1:3])
    flat = kept.flatten()
    assert torch.equal(flat[2:9], values.flatten(0, 1).flatten(1)[2:9] if len(shape) > 2 else flat.read()[2:9])
    assert torch.equal(kept.read(), values)  # whatever was read between


def test_what_is_not_contiguous_is_stored_in_its_order() -> None:
    values = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    assert torch.equal(StoredTensor.of(values).read(), values)


def test_large_outputs_go_to_disk_and_small_ones_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LARGE", 64)
    outputs = {"small": torch.ones(4, 4), "large": torch.ones(4, 5)}
    kept = store_large(outputs)
    assert isinstance(kept["large"], StoredTensor)
    assert isinstance(kept["small"], torch.Tensor)
    assert kept["small"].data_ptr() != outputs["small"].data_ptr()
    for name, value in outputs.items():
        assert torch.equal(read_stored(kept[name]), value)


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_the_file_has_no_name_and_goes_with_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()
    before = count_open_files()
    kept = StoredTensor.of(torch.ones(5))
    flat = StoredTensor.of(torch.ones(1, 2, 3)).flatten()
    assert list(tmp_path.iterdir()) == []
    assert count_open_files() == before + 2
    assert flat.read().sum() == 6
    del kept, flat
    assert count_open_files() == before


def test_a_disk_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(DiskError, match=r"cannot write .*gone \(No such file or directory\)"):
        StoredTensor.of(torch.ones(5))


@pytest.mark.parametrize("padded", [False, True])
def test_stored_outputs_compare_as_those_in_memory(padded: bool) -> None:
    random = torch.Generator().manual_seed(1)
    ours, theirs = (torch.randn(3, 50, 7000, generator=random) for _ in range(2))
    keep = torch.ones(3, 50, dtype=torch.bool)
    if padded:
        keep[1, :20] = False
    b = flatten_positions(theirs, keep)
    in_memory = compare_outputs(flatten_positions(ours, keep), b, classes=True)
    on_disk = flatten_output(StoredTensor.of(ours), keep)
    assert isinstance(on_disk, torch.Tensor) is padded
    assert compare_outputs(on_disk, b, classes=True) == in_memory
