"""Hidden states are kept in memory up to a limit, and in mapped files beyond it."""

import gc
import os
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.measure.streams import state_memory as module
from ckpt_prune.measure.streams.state_memory import StateMemory
from tests.refusals import refusal

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def mappings() -> str:
    """Return this process's memory mappings as Linux lists them."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        return maps.read()


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is that of a file made by `StateMemory`."""
    for line in mappings().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return ".ckpt-prune-states-" in line
    raise AssertionError("the tensor is nowhere")


linux = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads /proc")  # noqa: PTH110


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [0, 2**20])
def test_values_come_back_wherever_they_are(tmp_path, dtype, limit):
    shape = (5, 7, 16)
    given, tensor = values(shape, dtype), StateMemory(limit, tmp_path)(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (given.shape, dtype, "cpu")
    assert not tensor.requires_grad
    for rows in (slice(0, 2), slice(2, 5)):
        tensor[rows] = given[rows]
    assert torch.equal(tensor, given)
    chosen = torch.tensor([4, 1])
    assert torch.equal(tensor[chosen], given[chosen])
    tensor[chosen] = 2 * given[chosen]
    assert torch.equal(tensor[3], given[3])
    assert torch.equal(tensor[1], 2 * given[1])


@linux
def test_the_limit_is_of_all_that_is_in_memory(tmp_path):
    """The limit counts bytes: what fits into the remaining ones is in memory, also after something larger did not."""
    memory = StateMemory(1000, tmp_path)
    requests = [
        ((10, 10), torch.float32),
        ((10, 10), torch.float64),
        ((10, 10), torch.float32),
        ((100,), torch.bfloat16),
    ]
    requests += [((1,), torch.bfloat16), ((1,), torch.bfloat16)]
    tensors = [memory(*request) for request in requests]
    # 400; 800 more would be too much; 800; 1000; nothing is left.
    assert [is_mapped(tensor) for tensor in tensors] == [False, True, False, False, True, True]


@linux
def test_what_is_freed_can_be_had_again(tmp_path):
    """A view of a tensor keeps its memory; what is on disk took none."""
    memory = StateMemory(400, tmp_path)
    first = memory((100,), torch.float32)
    mapped = memory((100,), torch.float32)
    row = first.view(10, 10)[3].detach()
    del first, mapped
    gc.collect()
    assert is_mapped(memory((100,), torch.float32))
    del row
    second = memory((100,), torch.float32)
    assert not is_mapped(second)
    assert is_mapped(memory((1,), torch.float32))


@linux
def test_no_file_is_left_while_states_are_mapped_or_after(tmp_path):
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    tensors = [StateMemory(0, tmp_path)((64, 64), torch.float32) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    for number, tensor in enumerate(tensors):
        tensor[:] = number
    assert all(is_mapped(tensor) for tensor in tensors)
    assert not list(tmp_path.iterdir())
    # Each has a file of its own.
    assert [float(tensor.mean()) for tensor in tensors] == [0, 1, 2]
    gone = [weakref.ref(tensor) for tensor in tensors]
    del tensors, tensor
    gc.collect()
    assert all(reference() is None for reference in gone)
    assert str(tmp_path) not in mappings()
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    free = 64 * 64 * 4 - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert StateMemory(4096, tmp_path / "absent")((32, 32), torch.float32).shape == (32, 32)
    assert refusal(StateMemory(0, tmp_path), (64, 64), torch.float32) == (
        f"{tmp_path} has {human_bytes(free)} free and hidden states beyond --state-memory need 67.1 MB; free space or "
        "choose another place, or take fewer samples, shorter windows or --compute-dtype bfloat16"
    )
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_meanwhile_is_told_and_nothing_is_left(tmp_path, monkeypatch):
    def full(descriptor: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(module, "reserve_space", full)
    with pytest.raises(UserError, match="No space left") as error:
        StateMemory(0, tmp_path)((64, 64), torch.float32)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_space_is_claimed_in_full_before_the_tensor_is_handed_out(tmp_path, monkeypatch):
    """A sparse file would let a full disk kill the process when a page is written."""
    claimed, claim = [], module.reserve_space

    def watch(descriptor: int, size: int) -> None:
        claim(descriptor, size)
        claimed.append((size, os.fstat(descriptor).st_size))

    monkeypatch.setattr(module, "reserve_space", watch)
    StateMemory(0, tmp_path)((3, 50, 7), torch.bfloat16)
    assert claimed == [(2100, 2100)]


def test_what_can_be_done_without_takes_at_most_half_of_the_room_that_is_left(tmp_path):
    memory, one, other = StateMemory(1000, tmp_path), torch.empty(100), torch.empty(100)
    assert memory.has_room(one)  # 400 of 1000 bytes
    assert not memory.has_room(other)
    del one
    gc.collect()
    assert memory.has_room(other)
