"""Every command that writes names nothing of this machine, keeps to the umask and writes the same bytes again."""

import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_prune.common.filenames import REPORT
from ckpt_prune.measure.streams import hidden_stream as streams
from tests.faults.jobs import JOBS
from tests.faults.trial import Machine, Ran, files_of
from tests.forked import posix
from tests.pairs import choose_cases, one_of

pytestmark = posix

WRITES = [name for name, job in JOBS.items() if not job.graph and job.repo is None]
"""Graphs are traced for seconds; what is pushed is what the others wrote."""
USER, HOST = "somebody-here", "a-machine-here"


@pytest.fixture
def place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The machine's folder, on a machine with names that nothing else has."""
    for name in ("USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, USER)
    monkeypatch.setattr("socket.gethostname", lambda: HOST)
    monkeypatch.setattr("platform.node", lambda: HOST)
    before = os.umask(0o027)
    yield machine.folder
    os.umask(before)


@pytest.mark.parametrize("name", one_of(8, WRITES))
def test_files_say_nothing_of_this_machine_and_come_again_byte_for_byte(
    machine: Machine, place: Path, name: str
) -> None:
    job, reference = JOBS[name], machine.reference(name)
    here = machine.place(name)
    try:
        ran = machine.run(name, here, job.arguments)
        assert ran.code == 0, ran.err
        assert files_of(here) == reference.after
        for path in (candidate for candidate in here.rglob("*") if candidate.name != "notes-of-mine.txt"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o750 if path.is_dir() else 0o640), (path, oct(mode))
            if path.is_file():
                data = path.read_bytes()
                for secret in (str(place), str(here), str(Path.home()), USER, HOST):
                    assert secret.encode() not in data, (path.name, secret)
    finally:
        shutil.rmtree(here)


OFTEN = {("drift", "batches"), ("masks", "memory")}
"""Tested every time."""


@pytest.mark.parametrize(
    ("name", "how"),
    choose_cases(
        [
            ("depth", "threads"),  # one is enough: more threads need a fresh process
            *itertools.product(["sequential", "drift", "masks", "dense", "depth"], ["batches", "memory"]),
        ],
        lambda pair: pair in OFTEN,
    ),
)
def test_threads_batches_and_memory_choose_the_same_units(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    job, here, reference = JOBS[name], machine.place(name), machine.reference(name)
    more = ("--state-memory", "0") if how == "memory" else ()
    if how == "batches":
        monkeypatch.setattr(streams, "TOKENS_PER_BATCH", 16)
    try:
        # More threads than this process has are for a fresh one: a copy of it may wait for some that it has not.
        ran = (
            run_with_threads(here, job.arguments, 4)
            if how == "threads"
            else machine.run(name, here, job.arguments + more)
        )
        assert ran.code == 0, ran.err
        files = files_of(here)
        if how == "memory":
            assert files == reference.after
        else:
            near(json.loads(files[f"out/{REPORT}"]), json.loads(reference.after[f"out/{REPORT}"]))
    finally:
        shutil.rmtree(here)


def run_with_threads(place: Path, arguments: Sequence[str], threads: int) -> Ran:
    """A command in a fresh process."""
    line = [sys.executable, "-m", "ckpt_prune", *arguments]
    # While they wait, threads would take the other core from whoever needs it.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True)
    return Ran(done.returncode, done.stdout, done.stderr)


def near(ours: Any, theirs: Any, where: str = "") -> None:
    """The same but for digests of weights, and for the last digits of errors."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours.keys() - {"files", "tensors", "digests"}:
            near(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            near(one, other, f"{where}.{index}")
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), where
    else:
        assert ours == theirs, where


def test_shards_hold_the_same_tensors(machine: Machine) -> None:
    """However a source is cut into files, its pruned tensors are the same bytes."""
    from safetensors.torch import load_file

    job, here = JOBS["sharded"], machine.place("sharded")
    try:
        assert machine.run("sharded", here, job.arguments).code == 0
        one = tuple(argument.replace("sharded", "dense").replace("out", "one") for argument in job.arguments)
        assert machine.run("sharded", here, one).code == 0
        parts = list((here / "out").glob("*.safetensors"))
        assert len(parts) > 1
        ours = {name: tensor for path in parts for name, tensor in load_file(path).items()}
        theirs = load_file(here / "one" / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    finally:
        shutil.rmtree(here)
