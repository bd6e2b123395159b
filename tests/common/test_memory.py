"""Memory of a process, measured in one of its own."""

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_prune.common import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")

PROGRAM = """
from ckpt_prune.common import memory
before = memory.resident_bytes(), memory.peak_bytes()
held = bytearray(b"x") * (64 << 20)
held = None
print(*before, memory.peak_bytes(), memory.resident_bytes())
"""
SLACK = 4 << 20


def test_the_peak_stays_and_what_is_resident_goes():
    stdout = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    resident, peak, peak_after, resident_after = map(int, stdout.split())
    assert 1 << 20 < resident <= peak < 60 << 20
    assert abs(peak_after - peak - (64 << 20)) <= SLACK
    assert abs(resident_after - resident) <= SLACK


PIECES = """
from ckpt_prune.common import memory
pieces = [bytearray(b"x") * (64 << 10) for _ in range(1024)]
pieces, last = None, pieces[-1]  # what lies behind what was freed keeps the heap from shrinking by itself
held = memory.resident_bytes()
memory.return_freed_memory()
print(held, memory.resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep nothing, or do not say")
def test_what_was_freed_in_pieces_is_given_back():
    stdout = subprocess.run([sys.executable, "-c", PIECES], capture_output=True, text=True, check=True).stdout
    held, after = map(int, stdout.split())
    assert held - after > 56 << 20


def test_without_the_kernels_file_only_the_peak_is_known(monkeypatch):
    monkeypatch.setattr(memory, "_STATUS", Path("/nowhere"))
    assert memory.peak_bytes() == memory.resident_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_container_limits_what_is_available(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    unlimited = memory.available_bytes()
    assert unlimited is not None
    assert unlimited > 64 << 20
    (tmp_path / "memory.current").write_text("1048576\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(memory.available_bytes() - unlimited) < unlimited // 4
    (tmp_path / "memory.max").write_text("3145728\n")
    assert memory.available_bytes() == 2 << 20
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path / "nowhere")
    assert memory.available_bytes() == 2 << 20
    (tmp_path / "memory.max").unlink()
    assert memory.available_bytes() is None
