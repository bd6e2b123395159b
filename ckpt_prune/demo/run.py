"""The demo: calibrate the packaged model, prune it by several recipes at two ratios, verify and measure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from ckpt_prune.checkpoint.files import check_place
from ckpt_prune.common.errors import UserError
from ckpt_prune.datasets import standard_library
from ckpt_prune.evaluation.perplexity import perplexity
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.samples.text import cut_windows, load_tokenizer, mix_windows, tokenise_text
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.verification.verify import verify

RECIPES = ("wanda-sp", "flap", "rcpu-scale", "best-uniform", "best")
RATIOS = (0.2, 0.3)
WINDOW, CALIBRATION_WINDOWS, EVALUATION_WINDOWS = 256, 64, 64


@dataclass(frozen=True)
class DemoRow:
    """One line of the demo's table. The seconds are those of pruning, with its statistics."""

    model: str
    ratio: float
    parameters: int
    bytes: int
    perplexity: float
    container: str
    seconds: float


def model_folder() -> Path:
    return Path(str(resources.files("ckpt_prune.demo") / "model"))


def run(out: Path, device: torch.device, recipes: Sequence[str] = RECIPES) -> list[DemoRow]:
    """Prune the packaged model into subfolders of `out`, an empty or new folder, and measure every result."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is not a folder: choose another one for the demo")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose another folder for the demo")
    check_place(out)
    try:
        calibration_text, held_out_text = (
            standard_library.read_corpus(held_out=False),
            standard_library.read_corpus(held_out=True),
        )
    except FileNotFoundError as error:
        raise UserError(str(error)) from error
    out.mkdir(exist_ok=True)
    folder = model_folder()
    model = Model.open(folder)
    tokenizer = load_tokenizer(folder)
    calibration = mix_windows(
        [tokenise_text(tokenizer, calibration_text)], samples=CALIBRATION_WINDOWS, window=WINDOW, seed=0
    )[0]
    # Held-out modules differ much in difficulty: windows from all over them, not the first few modules.
    held_out = mix_windows(
        [tokenise_text(tokenizer, held_out_text)], samples=EVALUATION_WINDOWS, window=WINDOW, seed=0
    )[0]

    def measure_perplexity(path: Path) -> float:
        loaded = load_model(path, device=device)
        return perplexity(loaded, cut_windows(held_out.flatten(), window=WINDOW)).perplexity

    dense = cost_of(model)
    rows = [DemoRow("dense", 0.0, dense.parameters, dense.bytes, measure_perplexity(folder), "llama", 0.0)]
    for ratio in RATIOS:
        for name in recipes:
            start = time.monotonic()
            recipe = load_recipe(name, ratio=ratio)
            folds = min(4, CALIBRATION_WINDOWS) if recipe.needs_folds else 1
            live = LiveSamples(TokenWindows(calibration), folds=folds, compute_dtype=torch.float32)
            target = out / f"{name}-{round(ratio * 100)}"
            report = run_job(Job(model, recipe, live=live, device=device), target).report
            seconds = time.monotonic() - start
            failed = [check for check in verify(target, folder) if check.passed is False]
            if failed:
                raise UserError(f"{target} does not verify: {failed[0].name}: {failed[0].detail}")
            after, container = report.after, report.container.model_type
            if report.container.remote_code:
                container += ", remote code"
            rows.append(
                DemoRow(name, ratio, after.parameters, after.bytes, measure_perplexity(target), container, seconds)
            )
    return rows
