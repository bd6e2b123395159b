"""Whole runs on a GPU: what they write is what the CPU writes.

Without a GPU they run on a pretended one, which stops at a tensor on the wrong device (`tests/simulated_cuda.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ckpt_prune.job.job import Job, LiveSamples, RecoverySamples
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.model.model import Model
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.recovery.keys import recover_recipe
from tests import encoders
from tests.families import windows
from tests.simulated_cuda import pretended_cuda

pytestmark = pytest.mark.cuda
DEVICES = ("cpu", "gpu")
REAL = torch.cuda.is_available()
"""Whether there is a GPU."""
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4} if REAL else {"rtol": 0, "atol": 0}
"""A pretended one computes as the CPU does."""


@contextmanager
def device_of(name: str) -> Iterator[torch.device]:
    """The CPU, or a GPU: a pretended one where there is none."""
    if name == "cpu":
        yield torch.device("cpu")
    elif REAL:
        yield torch.device("cuda")
    else:
        with pretended_cuda() as device:
            yield device


def prune(
    folder: Path,
    out: Path,
    full_recipe: FullRecipe,
    samples: Samples,
    device: torch.device,
    statistics: Statistics | None = None,
) -> Path:
    """Prune by statistics, or live without any."""
    live = LiveSamples(samples, folds=2 if full_recipe.needs_folds else 1, compute_dtype=torch.float32)
    training = RecoverySamples(samples, torch.float32) if full_recipe.recovery else None
    request = Job(
        Model.open(folder),
        full_recipe,
        statistics=statistics,
        live=None if statistics else live,
        training=training,
        device=device,
        diagnostics=True,
    )
    run_job(request, out)
    return out


def tensors(folder: Path) -> dict[str, Tensor]:
    return {
        f"{file.name} {name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same(a: Path, b: Path) -> None:
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys() != set()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.skipif(REAL, reason="there is a GPU, so nothing is pretended")
@pytest.mark.parametrize(
    "wrong",
    [
        lambda here, there: here @ there,
        lambda here, there: here + there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: here[there[0].long()],
        lambda here, there: there.numpy(),
        lambda here, there: here.mul_(there.sum()),
        lambda here, there: torch.randn(3, device=there.device, generator=torch.Generator()),
        lambda here, there: torch.linalg.solve(here, there),
    ],
)
def test_a_pretended_gpu_refuses_what_a_gpu_refuses(wrong):
    with pretended_cuda():
        here = torch.eye(3)
        there = here.to("cuda")
        with pytest.raises((RuntimeError, TypeError), match="cuda:0"):
            wrong(here, there)
        assert (there[torch.tensor([0, 2])] * torch.tensor(2.0)).cpu().tolist() == [[2, 0, 0], [0, 0, 2]]


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [("ridge", ()), ("denoise-rotator-sparsegpt-50", ("rotation.steps=2",))],
)
def test_a_language_model_is_pruned_on_a_gpu_as_on_a_cpu(sources, tmp_path, recipe, overrides):
    full_recipe = load_recipe(recipe, overrides, ratio=None if "wanda" in recipe or "rotator" in recipe else 0.25)
    data, folder = TokenWindows(windows(6, 12)), sources.folder("llama-gqa-tied")
    for name in DEVICES:
        with device_of(name) as device:
            prune(folder, tmp_path / name, full_recipe, data, device)
    assert_same(tmp_path / "cpu", tmp_path / "gpu")


def test_a_vision_model_is_measured_and_pruned_on_a_gpu_as_on_a_cpu(tmp_path):
    folder, data = encoders.make(tmp_path / "dense", "vit"), encoders.samples("vit", 8)
    for name in DEVICES:
        with device_of(name) as device:
            statistics = measure_statistics(
                Model.open(folder),
                data,
                tmp_path / f"statistics-{name}",
                seed=0,
                folds=2,
                collect=("moments", "gram", "logits"),
                device=device,
                compute_dtype=torch.float32,
            )
            prune(folder, tmp_path / name, load_recipe("corp", ratio=0.5), data, device, statistics)
    assert_same(tmp_path / "statistics-cpu", tmp_path / "statistics-gpu")
    assert_same(tmp_path / "cpu", tmp_path / "gpu")


def test_a_pruned_model_is_recovered_on_a_gpu_as_on_a_cpu(sources, tmp_path):
    data, dense = TokenWindows(windows(6, 12)), sources.folder("llama")
    pruned = prune(dense, tmp_path / "pruned", load_recipe("magnitude", ratio=0.25), data, torch.device("cpu"))
    for name in DEVICES:
        with device_of(name) as device:
            recipe, training = recover_recipe(RecoverySettings(epochs=2)), RecoverySamples(data, torch.float32)
            run_job(
                Job(Model.open(pruned), recipe, device=device, dense=Model.open(dense), training=training),
                tmp_path / name,
            )
    assert_same(tmp_path / "cpu", tmp_path / "gpu")
