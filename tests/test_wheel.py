"""The sdist makes a wheel that runs where no checkout is seen."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(*words: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel, which is built from the unpacked sdist; what it needs, the environment has."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "hatchling", "build", "-t", "sdist", "-d", folder / "sdist", cwd=ROOT)
    (sdist,) = (folder / "sdist").iterdir()
    python("-m", "tarfile", "-e", sdist, folder, cwd=ROOT)
    python("-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


DEMO = """
from importlib.metadata import entry_points

import ckpt_prune.demo.run as demo

(script,) = entry_points(group="console_scripts", name="ckpt-prune")  # what the shell's command would call
main = script.load()

print(demo.__file__)
read_corpus = demo.standard_library.read_corpus
demo.standard_library.read_corpus = lambda **part: read_corpus(**part)[:40_000]
demo.CALIBRATION_WINDOWS = demo.EVALUATION_WINDOWS = 4
demo.RATIOS = (0.2,)
main(["--version"], standalone_mode=False)
main(["recipe", "list"], standalone_mode=False)
main(["demo", "--recipe", "magnitude"])
"""
"""Two commands in one process, on less text: most of the time would go to imports and to windows."""


def test_the_wheel_runs_the_demo(site, tmp_path):
    output = python("-c", DEMO, cwd=tmp_path, PYTHONPATH=str(site), HF_HUB_OFFLINE="1")
    where, _, printed = output.partition("\n")
    assert Path(where).is_relative_to(site)
    assert printed.startswith("ckpt-prune ")
    _, _, table = printed.partition("best-uniform is the default.")
    first = [line.split()[0] for line in table.splitlines() if line.strip()]
    assert first[first.index("recipe") :][:3] == ["recipe", "dense", "magnitude"]
