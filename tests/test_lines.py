"""`tools/lines`: counts by room, and a folder that is over its number ends in exit code 1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "lines"
FILES = {"ckpt_prune/__init__.py": 1, "ckpt_prune/onnx/a.py": 5, "ckpt_prune/onnx/deep/b.py": 1000}
TESTS = {"tests/onnx_graphs/test_a.py": 7, "tests/conftest.py": 2, "tests/gguf_files/notes.md": 50}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, lines in (FILES | TESTS).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n" * lines)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "lines.toml").write_text("# why\nckpt_prune = 1_006\ntests = 9\n")
    return tmp_path


def run(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(checkout), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_lines_are_counted_by_room(checkout: Path):
    done = run(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["room", "ckpt_prune", "tests"],
        [".", "1", "2"],
        ["onnx", "1,005", "7"],
        ["all", "1,006", "9"],
        ["at", "most", "1,006", "9"],
    ]
    assert json.loads(run(checkout, "--json").stdout) == {
        "ckpt_prune": {"lines": 1006, "at_most": 1006, "rooms": {".": 1, "onnx": 1005}},
        "tests": {"lines": 9, "at_most": 9, "rooms": {".": 2, "onnx": 7}},
    }


def test_a_line_too_many_fails_and_names_the_folder_and_the_file_of_the_numbers(checkout: Path):
    (checkout / "tests" / "conftest.py").write_text("\n" * 3)
    for options in ((), ("--json",)):
        done = run(checkout, *options)
        assert done.returncode == 1
        assert done.stderr.startswith("tests/ has 10 lines of Python, and tools/lines.toml allows 9: ")
