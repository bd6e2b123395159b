"""What the library and the command line take, as pydantic models: the same names, types, limits and defaults."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field


class SampleOptions(BaseModel):
    """Which windows of which text, or how many images, to run a model on."""

    text: tuple[Path, ...] = Field((), description="Text file to run the model on (.txt or .jsonl); may be repeated.")
    samples: int | None = Field(
        None,
        ge=1,
        description="Number of windows, or of images; all, where there are fewer. [default: 128 windows; at most 4000 "
        "images]",
    )
    window: int | None = Field(
        None, ge=2, description="Tokens per window. [default: the model's context length, at most 2048]"
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Of the random choice of samples.")
    choose: Literal["random", "first"] = Field(
        "random",
        description="random: windows from all over the text, or any images; first: from its start, as several papers' "
        "code does.",
    )
    bos: Literal["auto", "always", "never"] = Field(
        "auto", description="Begin-of-sequence token before the stream; auto: where the tokenizer itself adds one."
    )
    compute_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Type the model runs in while it is measured or recovered."
    )


class CalibrationOptions(SampleOptions):
    """What to calibrate on."""

    folds: int | None = Field(
        None,
        ge=1,
        description="Keep moments apart for this many runs of samples, for recipes that choose lambda by folds and for "
        "held-out errors. [default: 1, or 4 where the recipe needs folds]",
    )


class TrainingOptions(SampleOptions):
    """What to recover on."""

    samples: int | None = Field(
        None, ge=2, description="Number of windows, or of images. [default: 2048, or all there are]"
    )


class ImageOptions(BaseModel):
    """Which images to calibrate on."""

    images: Path | None = Field(
        None,
        description="Folder of images to run the model on, in place of --text: plain, with labels.csv, or with a "
        "sub-folder per class.",
    )
    labels: Path | None = Field(
        None, description="CSV with a column file and perhaps split (calib). [default: labels.csv in or beside DIR]"
    )
    max_corrupt: float = Field(0.05, ge=0, le=1, description="Share of the images that may fail to decode.")


class EvaluationOptions(BaseModel):
    """What to measure a model on."""

    text: tuple[Path, ...] = Field((), description="Text file to measure perplexity on; may be repeated.")
    window: int | None = Field(None, ge=2, description="Tokens per window; needed with --text.")
    images: Path | None = Field(
        None,
        description="Folder of images to measure an image classifier on: with labels.csv, with a sub-folder per class, "
        "or, with --against, plain.",
    )
    labels: Path | None = Field(
        None,
        description="CSV with columns file, label and perhaps split (eval). [default: labels.csv in or beside DIR]",
    )
    max_corrupt: float = Field(0.05, ge=0, le=1, description="Share of the images that may fail to decode.")
    limit: int | None = Field(
        None, ge=1, description="Use only this many windows, images (chosen at random, seed 0) or examples of a task."
    )
    bos: Literal["auto", "always", "never"] = Field(
        "auto", description="Begin-of-sequence token before the stream; auto: where the tokenizer itself adds one."
    )


class RecipeOptions(BaseModel):
    """Which model to prune, and by which recipe."""

    model: str = Field(description="Folder of the dense model, or a Hub id.")
    recipe: str | None = Field(None, description="Name of a shipped recipe, or a recipe file. Default: best-uniform.")
    statistics: Path | None = Field(None, description="Statistics folder.")
    ratio: float | None = Field(None, ge=0, lt=1, description="Share to drop, in place of the recipe's.")
    target_params: str | None = Field(None, description="Parameters to come down to, a number or a share.")
    target_bytes: str | None = Field(None, description="Bytes to come down to, a number or a share.")
    target_flops: str | None = Field(None, description="FLOPs to come down to, a number or a share.")
    overrides: tuple[str, ...] = Field((), description="Changes of the recipe's keys, KEY=VALUE.")
    container: str | None = Field(None, description="What the output is stored as.")
    overwrite: bool = Field(False, description="Replace an existing output.")
    trust: bool = Field(False, description="Accept a model that asks for code of its own.")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:0, cuda:1, ...")


class PlanOptions(RecipeOptions):
    """What to plan."""

    output: Path | None = Field(None, description="Plan file to write.")
    diagnostics: bool = Field(True, description="Also predict floors, rho2, spectra and held-out errors.")


class PruneOptions(RecipeOptions, CalibrationOptions, ImageOptions):
    """What to prune, how, and into what."""

    output: Path = Field(description="Folder to write.")
    plan: Path | None = Field(None, description="Plan file to apply instead of a recipe.")
    diagnostics: bool = Field(True, description="Also record floors, rho2, spectra and held-out errors.")
    state_memory: float = Field(8.0, ge=0, description="GiB of hidden states that are kept in memory.")
    after: str | None = Field(None, description="Numbers of blocks K, with commas between, or all.")
    resume: bool = Field(False, description="Continue an interrupted run of the same job.")
