"""Processes that this package starts run nothing of the folder one stands in, and no command unpickles."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_prune.common.child_process import import_path, python_command, safe_environment
from ckpt_prune.runtimes import isolation
from tests.cli.running import run
from tests.forked import fork_module, posix
from tests.stored import Sources

PLANTED = ("numpy", "json", "ckpt_prune", "torch", "multiprocessing", "transformers", "xllamacpp", "runpy", "pickle")
DEMO = Path(isolation.__file__).parents[1] / "demo" / "model"


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("unpickled").absolute(),)


@pytest.fixture
def planted(empty_folder: Path) -> Path:
    """A working folder with a module of many names, and a pickle, each of which leaves a trace."""
    for name in PLANTED:
        Path(f"{name}.py").write_text(
            f"open({str(empty_folder / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        )
    return empty_folder


@pytest.fixture
def dense(sources: Sources, planted: Path) -> Path:
    return Path(shutil.copytree(sources.folder("llama"), planted / "dense"))


def assert_nothing_ran(folder: Path) -> None:
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
    assert not (folder / "unpickled").exists()


def start(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=folder, env=safe_environment(), capture_output=True, text=True, check=False)


def test_a_process_that_is_started_imports_nothing_from_the_working_folder(planted: Path) -> None:
    """Nor does a process that it starts itself; the same command without these cares runs what is there."""
    done = start(python_command("json.tool", "--help"), planted)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout
    grandchild = [sys.executable, "-c", "import json"]
    assert start(grandchild, planted).returncode == 0
    assert_nothing_ran(planted)
    assert subprocess.run([sys.executable, "-m", "json.tool"], cwd=planted, check=False).returncode == 9
    assert (planted / "ran").read_text() == "json"


def test_the_working_folder_is_left_out_unless_the_package_is_in_it(planted: Path, monkeypatch) -> None:
    root = str(Path(isolation.__file__).parents[2])
    monkeypatch.setattr(sys, "path", ["", str(planted), "relative", root])
    assert import_path() == [root]
    monkeypatch.chdir(root)
    assert import_path() == [str(planted), root]


def test_the_module_run_by_python_drops_the_working_folder(planted: Path) -> None:
    """`python -m ckpt_prune` stands in it; a folder with a ckpt_prune of its own cannot be helped."""
    (planted / "ckpt_prune.py").unlink()
    for name in ("runpy", "multiprocessing", "pickle"):
        (planted / f"{name}.py").unlink()  # Python's own -m imports runpy
    command = [sys.executable, "-m", "ckpt_prune", "recipe", "list"]
    done = subprocess.run(command, cwd=planted, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_nothing_ran(planted)


TEXT = "the river ran past the old stone mill and the tree " * 40


def test_no_command_runs_code_of_the_folder_one_stands_in(dense: Path, planted: Path) -> None:
    """In a new Python, as a user starts it."""
    pytest.importorskip("xllamacpp")
    (planted / "text.txt").write_text(TEXT)
    shutil.copytree(DEMO, planted / "demo")
    words = ("--text", "text.txt", "--samples", "1")
    commands = [
        ("validate", "dense", "--runtime", "transformers", *words, "--window", "16"),
        ("benchmark", "dense", "dense", "--rounds", "1", "--warmup", "0", "--tokens", "8", "--generate", "1"),
        ("export", "demo", "--format", "gguf", "-o", "out.gguf", *words),
        ("export", "dense", "-o", "onnx", *words),
    ]
    code = f"from ckpt_prune.cli.main import main\nfor words in {commands}: main(words, standalone_mode=False)"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=planted, capture_output=True, text=True, check=False)
    assert_nothing_ran(planted)
    assert done.returncode == 0, done.stderr + done.stdout
    assert (planted / "out.gguf").exists()
    assert (planted / "onnx").is_dir()


COMMANDS = (
    ("prune", "MODEL", "--recipe", "magnitude", "-o", "out"),
    ("inspect", "MODEL"),
    ("calibrate", "MODEL", "--text", "text.txt", "-o", "stats"),
    ("plan", "MODEL", "--recipe", "magnitude"),
    ("recover", "MODEL", "--text", "text.txt", "-o", "out"),
    ("quantize", "MODEL", "--text", "text.txt", "-o", "out"),
    ("convert", "MODEL", "-o", "out"),
    ("evaluate", "MODEL", "--text", "text.txt"),
    ("compare", "MODEL", "dense", "--text", "text.txt"),
    ("verify", "MODEL"),
    ("export", "MODEL", "-o", "out", "--text", "text.txt"),
    ("export", "MODEL", "-o", "out.gguf", "--format", "gguf", "--text", "text.txt"),
    ("benchmark", "MODEL"),
    ("validate", "MODEL", "--runtime", "transformers", "--text", "text.txt"),
    ("validate", "MODEL", "--runtime", "transformers", "--against", "dense", "--text", "text.txt"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words))
@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_no_command_unpickles(dense: Path, planted: Path, words, kind: str) -> None:
    """Neither pytorch_model.bin where there is no safetensors file, nor an adapter's .bin."""
    (planted / "text.txt").write_text(TEXT)
    model = planted / "model"
    model.mkdir()
    harmful = pickle.dumps({"weight": Harmful()})
    if kind == "weights":
        shutil.copytree(dense, model, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
        (model / "pytorch_model.bin").write_bytes(harmful)
    else:
        adapter = {"peft_type": "LORA", "base_model_name_or_path": str(dense), "r": 2, "target_modules": ["q_proj"]}
        (model / "adapter_config.json").write_text(json.dumps(adapter))
        (model / "adapter_model.bin").write_bytes(harmful)
    result = run(*(str(model) if word == "MODEL" else word for word in words))
    assert result.exit_code != 0, result.output
    assert_nothing_ran(planted)
    assert not any(Path(name).exists() for name in ("out", "out.gguf", "stats"))


@posix
def test_transformers_refuses_the_pickle_of_an_adapter_beside_weights(
    dense: Path, planted: Path, tmp_path: Path, monkeypatch
) -> None:
    pytest.importorskip("peft")
    fork_module(monkeypatch, isolation, tmp_path)
    (planted / "text.txt").write_text(TEXT)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(dense), "r": 2, "target_modules": ["q_proj"]}
    torch.save({"weight": torch.zeros(2)}, dense / "adapter_model.bin")
    (dense / "adapter_config.json").write_text(json.dumps(adapter))
    result = run("validate", str(dense), "--runtime", "transformers", "--text", "text.txt", "--window", "16")
    assert result.exit_code == 2
    assert "adapter" in result.output


def test_node_looks_in_absolute_folders(monkeypatch) -> None:
    monkeypatch.setenv("NODE_PATH", os.pathsep.join(["packages", "/other"]))
    assert safe_environment()["NODE_PATH"].split(os.pathsep) == [str(Path("packages").absolute()), "/other"]
