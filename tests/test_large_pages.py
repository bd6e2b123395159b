"""Tensors lie in large pages of memory, unless a user says otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import ckpt_prune
import torch
tensor = torch.ones(2**22)
with open("/proc/self/smaps") as maps:
    print(any(" hg" in line for line in maps if line.startswith("VmFlags")))
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this system has no large pages"
)
@pytest.mark.parametrize(("setting", "asked"), [({}, "True"), ({"THP_MEM_ALLOC_ENABLE": "0"}, "False")])
def test_the_kernel_is_asked_for_large_pages(setting: dict[str, str], asked: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment | setting, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == asked
