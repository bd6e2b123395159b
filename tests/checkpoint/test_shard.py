"""The file format, against the safetensors library: same bytes out, same files refused."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt_prune.checkpoint import shard
from ckpt_prune.checkpoint.shard import DTYPES, build_header, read_flat_chunks, read_header, read_tensor, write_tensor
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.safe_text import has_no_controls
from tests.refusals import refusal

from .folders import as_bytes, example_tensors, layout_of, raw, same


def write_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    data, header = build_header(
        path.name, layout_of({"": tensors})[""], {"format": "pt"} if metadata is None else metadata
    )
    with path.open("wb", buffering=0) as handle:
        handle.write(data)
        handle.truncate(header.file_bytes)
        for name, tensor in tensors.items():
            write_tensor(handle, header.tensors[name], tensor)


def test_every_dtype_gives_the_bytes_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {f"{code} é": torch.ones(3, 2).to(dtype) for code, dtype in DTYPES.items()} | example_tensors()
    write_file(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_header_is_padded_to_eight_bytes_and_tensors_are_aligned() -> None:
    for length in range(1, 9):
        tensors = {"x" * length: (torch.bfloat16, (3,)), "y": (torch.float64, (1,)), "z": (torch.uint8, (1,))}
        data, header = build_header("f", tensors, {})
        assert len(data) % 8 == 0
        assert int.from_bytes(data[:8], "little") == len(data) - 8
        assert all(info.offset % info.dtype.itemsize == 0 for info in header.tensors.values())


def test_chunks_are_bounded_and_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_CHUNK_BYTES", 16)
    tensors = example_tensors() | {"flat": torch.arange(33.0), "wide": torch.randn(2, 50)}
    write_file(tmp_path / "f", tensors)
    loaded = load_file(tmp_path / "f")
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    with (tmp_path / "f").open("rb", buffering=0) as handle:
        for name, info in read_header(tmp_path / "f").tensors.items():
            chunks = list(read_flat_chunks(handle, info))
            assert all(chunk.nbytes <= 16 for chunk in chunks)
            assert b"".join(map(as_bytes, chunks)) == as_bytes(tensors[name])


def test_strided_and_trainable_tensors_are_written_by_value(tmp_path: Path) -> None:
    base = torch.randn(6, 8, requires_grad=True)
    tensors = {"t": base.t(), "rows": base[::2], "expanded": torch.ones(1, 3).expand(4, 3)}
    write_file(tmp_path / "f", tensors)
    loaded = load_file(tmp_path / "f")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float16)])
def test_writing_another_shape_or_dtype_is_refused(tmp_path: Path, tensor: Tensor) -> None:
    _, header = build_header("f", {"w": (torch.float32, (3, 2))}, {})
    with (
        (tmp_path / "f").open("wb", buffering=0) as handle,
        pytest.raises(ValueError, match=r"tensor 'w' is torch.float"),
    ):
        write_tensor(handle, header.tensors["w"], tensor)
    assert (tmp_path / "f").read_bytes() == b""


def test_dtypes_safetensors_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 'w': safetensors cannot hold torch.complex128"):
        build_header("f", {"w": (torch.complex128, (1,))}, {})


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    write_file(tmp_path / "f", {"w": torch.ones(9)})
    info = read_header(tmp_path / "f").tensors["w"]
    with (tmp_path / "f").open("r+b", buffering=0) as handle:
        handle.truncate(info.offset + 5)
        with pytest.raises(UserError, match=r"^f ended inside tensor 'w' while being read; download it again$"):
            read_tensor(handle, info)


ONE = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
GOOD = raw("{%s}" % ONE, bytes(4))  # noqa: UP031 - braces
ATTACKS = {
    "empty file": (b"", "is 0 bytes long, too short for its header"),
    "half a length": (b"\1\0\0", "is 3 bytes long, too short for its header"),
    "header longer than the file": (raw(b"{}")[:9], "is 9 bytes long, too short for its header"),
    "header of an exabyte": (bytes([0] * 7 + [16]) + b"{}", "is 10 bytes long, too short for its header"),
    "last byte missing": (GOOD[:-1], f"is {len(GOOD) - 1} bytes long but its header says {len(GOOD)}: it is truncated"),
    "a byte too many": (GOOD + b"\0", f"is {len(GOOD) + 1} bytes long but its header says {len(GOOD)}: it is too long"),
    "not JSON": (raw("{'a'"), "is not a valid safetensors file (Expecting property name"),
    "not UTF-8": (raw(b'{"\xff":1}'), "is not a valid safetensors file (its header is not UTF-8)"),
    "a list": (raw("[]"), "is not a valid safetensors file (a list instead of an object)"),
    "nested": (raw("[" * 100_000), "is not a valid safetensors file (nested too deeply)"),
    "nested less": (raw('{"a":' + "[" * 200 + "]" * 200 + "}"), "is not a valid safetensors file (nested too deeply)"),
    "half a character": (raw(r'{"__metadata__":{"a":"\ud800"}}'), "(text that is not Unicode: '\\ud800')"),
    "a number of many digits": (raw('{"a":' + "9" * 5000 + "}"), "(Exceeds the limit (4300 digits)"),
    "a header of 17 MB": (raw(b" " * 17 * 2**20), "(a header of 17825792 bytes, where 16777216 are read at most)"),
    "metadata of numbers": (raw('{"__metadata__":{"a":1}}'), "(__metadata__ is not a map of strings)"),
    "duplicate tensor": (raw("{%s,%s}" % (ONE, ONE), bytes(4)), "(key 'a' is given twice)"),  # noqa: UP031
    "overlap": (raw("{%s,%s}" % (ONE, ONE.replace("a", "b", 1)), bytes(4)), "(tensor 'b' overlaps"),  # noqa: UP031
    "hole": (raw('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)), "(tensor 'a' overlaps"),
    "no offsets": (raw('{"a":{"dtype":"F32","shape":[1]}}'), "(tensor 'a' lacks dtype, shape or data_offsets)"),
    "unknown dtype": (
        raw('{"a":{"dtype":"F3","shape":[0],"data_offsets":[0,0]}}'),
        "(tensor 'a' has dtype 'F3', known",
    ),
    "negative size": (raw('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', bytes(4)), "has no valid shape)"),
    "true as size": (raw('{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', bytes(4)), "has no valid shape)"),
    "overflowing shape": (
        raw('{"a":{"dtype":"F32","shape":[0,%d,%d],"data_offsets":[0,0]}}' % (2**62, 2**62)),  # noqa: UP031
        "(tensor 'a' has no valid shape)",
    ),
    "offsets of another shape": (
        raw('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', bytes(4)),
        "(tensor 'a' has data_offsets that do not fit its shape)",
    ),
}


@pytest.mark.parametrize(("data", "message"), ATTACKS.values(), ids=ATTACKS)
def test_damaged_files_are_refused_with_the_file_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    text = refusal(read_header, path)
    assert text.startswith(f"{path} ")
    assert message in text
    assert text.endswith("; download it again")


@pytest.mark.parametrize("text", ['{"__metadata__":null,%s}', '{%s,"__metadata__":{}}', "{%s}"])
def test_metadata_may_be_null_as_for_the_library(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw(text % ONE.replace("}", ',"more":1}'), bytes(4)))
    assert safe_open(path, "pt").keys() == ["a"]
    header = read_header(path)
    assert (list(header.tensors), header.metadata) == (["a"], {})


# Here we refuse more: the library takes a tensor given twice at one place, and a shape that no tensor can have.
STRICTER = {"duplicate tensor", "overflowing shape", "a header of 17 MB"}


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - STRICTER))
def test_the_library_refuses_them_too(tmp_path: Path, name: str) -> None:
    (tmp_path / "f").write_bytes(ATTACKS[name][0])
    with pytest.raises((SafetensorError, OSError, OverflowError)):
        safe_open(tmp_path / "f", "pt").keys()


def test_a_file_that_the_disk_does_not_give_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(shard, "open_input", fails)
    with pytest.raises(UserError) as raised:
        read_header(tmp_path / "a.safetensors")
    assert str(raised.value) == f"{tmp_path}/a.safetensors: Input/output error; give another path or mend this one"


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_header(tmp_path / "f")


names = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__" and has_no_controls(name)
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.dictionaries(names, st.tuples(st.sampled_from(list(DTYPES.values())), shapes), max_size=5),
    seed=st.integers(0, 9),
)
def test_random_layouts_round_trip(
    tmp_path: Path, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]], seed: int
) -> None:
    torch.manual_seed(seed)
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in layout.items()}
    write_file(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with (tmp_path / "theirs").open("rb", buffering=0) as handle:
        header = read_header(tmp_path / "theirs")
        assert header.tensors.keys() == tensors.keys()
        assert all(same(read_tensor(handle, info), tensors[name]) for name, info in header.tensors.items())
