"""What the library and the command line take, as pydantic models: the same names, types, limits and defaults."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ckpt_prune.checkpoint.files import check_place
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.common.ratios import Ratio, check_ratio
from ckpt_prune.common.text_encoding import TEXT_FILE
from ckpt_prune.datasets.texts import NamedText, Split, parse_text_name

PartName = Literal["text", "vision", "encoder", "decoder"]
"""Parts of a composite model that commands can name."""


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str | os.PathLike) else value


def path_of(value: Any) -> Any:
    """The folder of a result that has one, an output (`path`) or statistics (`folder`); other values as they are."""
    found = getattr(value, "path", getattr(value, "folder", value))
    return os.fspath(found) if isinstance(found, os.PathLike) else found


def _changes(value: Any) -> Any:
    """Changes of a recipe as the command line takes them."""
    if isinstance(value, Mapping):
        return tuple(f"{key}={json.dumps(each)}" for key, each in value.items())
    return _several(value)


def _with_commas(value: Any) -> Any:
    """Several values as the command line takes them."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple | set | frozenset | range) else value


def _if_any(value: Any) -> Any:
    """The same; None where an option that may be repeated is not given."""
    return None if value == () else _with_commas(value)


def _in_a_folder(out: Path) -> Path:
    """The same path; UserError where there is no folder that it could be in."""
    check_place(out)
    return out


Texts = Annotated[tuple[Path, ...], BeforeValidator(_several)]
"""Text files, or one of them."""
Folder = Annotated[str, BeforeValidator(path_of)]
"""A folder or a Hub id, or a result that has a folder."""
Place = Annotated[Path, AfterValidator(_in_a_folder)]
"""Where a new folder goes: one that cannot is told before the libraries are loaded, which takes seconds."""


class Options(BaseModel):
    """What a command takes."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


O = TypeVar("O", bound=BaseModel)  # noqa: E741


def checked(kind: type[O], given: Mapping[str, Any]) -> O:
    """Options from values.

    Args:
        kind: which options.
        given: name → value; names of other kinds of options are left alone.

    Raises:
        UserError: a value that means nothing, named as the command line names it.
    """

    def left(name: str) -> bool:
        """Whether a value is left to what it is by the others."""
        return given[name] is None and kind.model_fields[name].default_factory is not None

    try:
        return kind(**{name: given[name] for name in kind.model_fields if name in given and not left(name)})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # of several options together, which are named
            raise UserError(said) from error
        option = str(first["loc"][0]).replace("_", "-")
        raise UserError(f"--{option} {first['input']}: {said}") from error


class TextOptions(Options):
    """What reads text, which may be named as papers call it."""

    if TYPE_CHECKING:  # every command says its own
        text: tuple[Path, ...]
        window: int | None

    usual_split: ClassVar[Split] = "test"

    @model_validator(mode="after")
    def _by_name(self) -> Self:
        found = [parse_text_name(each, self.usual_split) or each for each in self.text]
        named = [each for each in found if isinstance(each, NamedText)]
        asked = {each for each in (self.window, *(own.window for own in named)) if each is not None}
        if len(asked) > 1:
            raise ValueError(f"windows of {' and '.join(map(str, sorted(asked)))} tokens are asked for")
        self.text = tuple(each.path if isinstance(each, NamedText) else each for each in found)
        self.window = next(iter(asked), None)
        return self


class SampleOptions(TextOptions):
    """Which windows of which text, or how many images, to run a model on."""

    usual_split: ClassVar[Split] = "train"

    text: Texts = Field(
        (),
        description=f"Text to run the model on: a {TEXT_FILE}, or one by name, as papers join it: wikitext2, c4, ptb; "
        "may be repeated.",
    )
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
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type the model runs in while it is measured or recovered; auto: bfloat16 where the model is "
        "stored in it and the device multiplies faster in it, else float32, as always to "
        "compare, and to recover but by scales.",
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
        None, ge=2, description="Number of windows, or of images. [default: 2048, of scales 32, or all there are]"
    )


class ImageOptions(Options):
    """Which images, or which audio, to calibrate on."""

    images: Path | None = Field(
        None,
        description="Folder of images to run the model on, in place of --text: plain, with labels.csv, or with a "
        "sub-folder per class.",
    )
    labels: Path | None = Field(
        None, description="CSV with a column file and perhaps split (calib). [default: labels.csv in or beside DIR]"
    )
    max_corrupt: float = Field(0.05, ge=0, le=1, description="Share of the images that may fail to decode.")
    audio: Path | None = Field(
        None,
        description="Folder of audio to run an encoder of speech on, in place of --text: .wav files of its sampling "
        "rate, or features of one sound each (.npy, .safetensors).",
    )


class EvaluationOptions(TextOptions):
    """What to measure a model on."""

    text: Texts = Field(
        (),
        description="Text file to measure perplexity on, or one by name, as papers join it: wikitext2, c4, ptb, also "
        "wikitext2:validation or, with their windows, wikitext2@128, wikitext2@2048; may be repeated.",
    )
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
    samples: int | None = Field(
        None,
        ge=1,
        description="The first so many windows of the text, so many images at random (seed 0), or a task's first "
        "items. [default: all]",
    )
    bos: Literal["auto", "always", "never"] = Field(
        "auto", description="Begin-of-sequence token before the stream; auto: where the tokenizer itself adds one."
    )


class ProofOptions(TextOptions):
    """What to compare a graph with PyTorch on."""

    text: Texts = Field(
        default=(),
        description=f"Text to compare on: a {TEXT_FILE}; may be repeated. [default: Python sources of the running "
        "Python's standard library]",
    )
    images: Path | None = Field(
        default=None,
        description="Folder of images to compare on: plain, with labels.csv, or with a sub-folder per class. "
        "[default: noise, and no accuracy]",
    )
    labels: Path | None = Field(
        default=None,
        description="CSV with columns file, label and perhaps split (eval). [default: labels.csv in or beside DIR]",
    )
    samples: int | None = Field(default=None, ge=1, description="Number of windows, or of images. [default: 16, 64]")
    window: int | None = Field(
        default=None, ge=2, description="Tokens per window. [default: the model's context length, at most 512]"
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Of the random choice of images, and of noise.")
    max_corrupt: float = Field(default=0.05, ge=0, le=1, description="Share of the images that may fail to decode.")


class TrustOptions(Options):
    """Whose code may be run."""

    trust_remote_code: bool = Field(False, description="Accept a model that asks for code of its own.")


class OpeningOptions(TrustOptions):
    """How a model is opened that is measured or pruned."""

    family: Path | None = Field(
        None,
        description="Description of the model's family, a JSON file as in ckpt_prune/model/families, where "
        "this version has none; `ckpt-prune inspect MODEL` drafts it. Outputs carry it along.",
    )
    part: PartName | None = Field(
        None,
        description="Which part of a model that is made of several (qwen2_5_vl, gemma3, llava, ...): only that is "
        "measured and pruned, in place; every other tensor stays as it is, byte for byte.",
    )


class PlaceOptions(TrustOptions):
    """Whose code may be run, and where to work."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:0, cuda:1, ...")


class SpreadOptions(Options):
    """How a whole model is spread over devices."""

    device_map: Literal["auto"] | None = Field(
        None,
        description="auto: accelerate puts the parts of a whole model where there is room, on GPUs, in memory, and "
        "leaves the rest on disk (needs the devices extra). [default: one device]",
    )
    max_memory: Annotated[tuple[str, ...], BeforeValidator(_several)] = Field(
        (),
        description="Most that a device takes of it, cpu=24GiB or 0=70GiB for the first GPU; may be repeated. "
        "[default: what is free]",
    )


class SourceOptions(PlaceOptions, OpeningOptions):
    """Which model to read, and where to work."""

    model: Folder = Field(description="Folder of a model, or a Hub id.")


class RecipeOptions(SourceOptions):
    """Which model to prune, and by which recipe."""

    recipe: Annotated[str | None, BeforeValidator(path_of)] = Field(
        None, description="Name of a shipped recipe, or a recipe file; best-uniform where none is named."
    )
    statistics: Annotated[Path | None, BeforeValidator(path_of)] = Field(None, description="Statistics folder.")
    ratio: Annotated[float | None, BeforeValidator(check_ratio)] = Field(
        None, description="Share to drop, in place of the recipe's."
    )
    target_params: str | None = Field(None, description="Parameters to come down to, a number or a share.")
    target_bytes: str | None = Field(None, description="Bytes to come down to, a number or a share.")
    target_flops: str | None = Field(None, description="FLOPs to come down to, a number or a share.")
    target_latency: str | None = Field(
        None, description="Time to come down to on this machine, such as 12ms, or a share."
    )
    overrides: Annotated[tuple[str, ...], BeforeValidator(_changes)] = Field(
        (), description="Changes of the recipe's keys, KEY=VALUE."
    )
    container: str | None = Field(None, description="What the output is stored as.")
    overwrite: bool = Field(False, description="Replace an existing output.")

    @property
    def sizes(self) -> dict[str, str | None]:
        """Kind of size → what is asked for."""
        return {
            "params": self.target_params,
            "bytes": self.target_bytes,
            "flops": self.target_flops,
            "latency": self.target_latency,
        }


class PlanOptions(RecipeOptions):
    """What to plan."""

    output: Path | None = Field(None, description="Plan file to write.")
    test: Path | None = Field(None, description="Statistics on other samples, to hold the plan against.")
    diagnostics: bool = Field(True, description="Also predict floors, rho2, spectra and held-out errors.")


class HeldStatesOptions(Options):
    """What is kept of hidden states, and measured on them."""

    state_memory: float = Field(8.0, ge=0, le=2**20, description="GiB of hidden states that are kept in memory.")
    perplexity_after: Annotated[str | None, BeforeValidator(_with_commas)] = Field(
        None, description="Numbers of blocks K, with commas between, or all."
    )


class PruneOptions(RecipeOptions, CalibrationOptions, ImageOptions, HeldStatesOptions):
    """What to prune, how, and into what."""

    output: Place = Field(description="Folder to write.")
    plan: Annotated[Any, BeforeValidator(lambda value: getattr(value, "plan", value))] = Field(
        None, description="A plan, or its file, to apply instead of a recipe."
    )
    diagnostics: bool = Field(True, description="Also record floors, rho2, spectra and held-out errors.")
    resume: bool = Field(False, description="Continue an interrupted run of the same job.")
    dry_run: bool = Field(False, description="Check everything; write nothing.")
    push: str | None = Field(None, description="Repository on the Hub to push the output to.")
    public: bool = Field(False, description="Let all read what is pushed.")


class RecoverOptions(TrainingOptions, ImageOptions, HeldStatesOptions, PlaceOptions, OpeningOptions):
    """What to recover, against what, and into what."""

    pruned: Folder = Field(description="Folder of the pruned model, or a Hub id.")
    dense: Annotated[str | None, BeforeValidator(path_of)] = Field(
        None, description="The dense model that it was made from."
    )
    output: Place = Field(description="Folder to write.")
    resume: bool = Field(False, description="Continue an interrupted run of the same job.")
    overwrite: bool = Field(False, description="Replace an existing output.")


class CompareOptions(SampleOptions, ImageOptions, PlaceOptions, OpeningOptions):
    """Which two models to compare, and on what."""

    reference: Folder = Field(description="Folder of a model, or a Hub id.")
    model: Folder = Field(description="Folder of the model that is held against it, or a Hub id.")
    lens: bool = Field(False, description="Also compare what each model's own head makes of every block's states.")
    plot: Path | None = Field(None, description="HTML file to write.")
    state_memory: float = Field(8.0, ge=0, le=2**20, description="GiB of hidden states that are kept in memory.")
    overwrite: bool = Field(False, description="Replace an existing page.")


class ActivityOptions(Options):
    """What counts as active."""

    active_above: float = Field(
        1e-6,
        ge=0,
        description="Absolute value above which an input of a projection counts as active: for the score "
        "active-probability, and the share of active inputs in reports.",
    )


class CalibrateOptions(SourceOptions, CalibrationOptions, ImageOptions, ActivityOptions):
    """What to measure statistics of."""

    output: Place = Field(description="Statistics folder to write.")
    shard: str | None = Field(None, description="Which of how many shards of the samples to measure, I/N.")
    collect: Annotated[str | None, BeforeValidator(_with_commas)] = Field(None, description="Which statistics.")
    dry_run: bool = Field(False, description="Check everything; measure and write nothing.")
    overwrite: bool = Field(False, description="Replace an existing output.")


class QuantizeOptions(Options):
    """What to quantise, how, and into what."""

    model: Folder = Field(description="Folder of a model, or a Hub id.")
    output: Place = Field(description="Folder to write.")
    format: Literal["int8", "int4"] = Field(description="What weights are stored as.")
    group_size: Annotated[
        str | None, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)
    ] = Field(None, description="Columns that share a scale, or channel.")
    statistics: Annotated[Path | None, BeforeValidator(path_of)] = Field(None, description="To round by: GPTQ.")
    resume: bool = Field(False, description="Continue an interrupted run of the same job.")
    overwrite: bool = Field(False, description="Replace an existing output.")


class PushOptions(Options):
    """What to share, and where."""

    folder: Folder = Field(description="An output of this tool.")
    repo: str = Field(description="A repository on the Hub.")
    public: bool = Field(False, description="Let all read it.")
    overwrite: bool = Field(False, description="Replace what this tool pushed there before.")
    base_model: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$", description="Hub id of the dense model.")
    license: str | None = Field(None, pattern=r"^[\w.-]+$", description="Licence of the output.")
    evaluation: Annotated[tuple[str, ...], BeforeValidator(_several)] = Field((), description="Figures, NAME=FILE.")
    dry_run: bool = Field(False, description="Check everything; upload nothing.")


class EvaluateOptions(SourceOptions, EvaluationOptions):
    """What to measure, and beside what."""

    against: Annotated[str | None, BeforeValidator(path_of)] = Field(None, description="A reference, the dense model.")
    tasks: Annotated[str | None, BeforeValidator(_if_any)] = Field(
        None, description="Files of multiple-choice items (.jsonl), or names of lm-eval tasks."
    )
    probe: Literal["knn", "linear"] | None = Field(None, description="Probe of the features of images.")
    patch_head: Path | None = Field(None, description="Linear head on the patches of images.")
    label_maps: Path | None = Field(None, description="Folder of label maps for it.")
    generate: Annotated[tuple[str, ...], BeforeValidator(_several)] = Field((), description="Prompts to continue.")
    generate_tokens: int = Field(64, ge=1, description="Tokens to generate after each prompt, at most.")
    include_path: Path | None = Field(None, description="Folder with lm-eval task files of one's own.")
    dry_run: bool = Field(False, description="Say where the parts of the models would go; load nothing.")


class InspectOptions(OpeningOptions):
    """What to describe."""

    model: Folder = Field(description="Folder of a model, or a Hub id.")
    ratios: Annotated[str | None, BeforeValidator(_with_commas)] = Field(None, description="Shares of units to drop.")
    recipe: Annotated[str | None, BeforeValidator(path_of)] = Field(
        None, description="Whose spaces ratios apply to, rcpu by default; without ratios its own are told of."
    )
    sparsity: bool = Field(False, description="Count the zeros of the linear weights.")


class DenseOptions(Options):
    """What else than its own model a graph is held against."""

    dense: Folder | None = Field(None, description="A dense model to compare the task's metric with as well.")
    max_loss_dense: Ratio | None = Field(
        None,
        gt=0,
        description="What the task's metric may lose against --dense. Default: it is only measured.",
    )


class ExportOptions(TrustOptions, DenseOptions):
    """What to export, and into what."""

    model: Folder = Field(description="Folder of a model, or a Hub id.")
    output: Place = Field(description="Folder to write.")
    proof: bool = Field(True, description="Compare the graph in onnxruntime with PyTorch.")
    provider: Literal["cpu", "cuda"] | None = Field(None, description="What onnxruntime runs on.")
    overwrite: bool = Field(False, description="Replace an existing output.")


class ValidateOptions(ProofOptions, DenseOptions):
    """What to compare on, and how strictly."""

    max_loss: Ratio | None = Field(
        None,
        gt=0,
        lt=1,
        description="What rounding may have cost the task's metric: 0.01 or 1%. [default: 2% for int8, 10% for int4 "
        "and q4f16]",
    )

    tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest difference that passes, in units of the largest output; means are held to a tenth of it. "
        "[default: 1e-4 for fp32, 2e-2 for fp16]",
    )


class BenchmarkOptions(PlaceOptions):
    """What to time, and how."""

    a: Folder = Field(description="The reference, usually dense.")
    b: Folder = Field(description="What is compared with it.")
    onnx: bool = Field(False, description="Time both in onnxruntime as well.")
    batches: Annotated[str, BeforeValidator(_with_commas)] = Field("1", description="Texts or images at once.")
    tokens: int | None = Field(None, ge=1, description="Tokens of each text.")
    generate: int | None = Field(None, ge=0, description="Tokens to generate after the text.")
    rounds: int = Field(30, ge=1, description="Times that each is timed.")
    warmup: int = Field(3, ge=0, description="Rounds before them, not counted.")
    threads: int | None = Field(None, ge=1, description="Of each model.")
    provider: Literal["cpu", "cuda"] | None = Field(None, description="Of onnxruntime.")
    optimize: Literal["none", "cpu", "cuda"] | None = Field(None, description="Fuse graphs made here for this.")
    dtype: GraphType | None = Field(None, description="Of graphs made here, and fp16 of PyTorch too.")
    two_four: bool = Field(False, description="Also by torch's kernels for 2:4.")


def has_data(calibration: SampleOptions, images: ImageOptions) -> bool:
    """Whether there is something to calibrate on.

    Raises:
        UserError: several of text, images and audio.
    """
    given = {
        "--text": bool(calibration.text),
        "--images": images.images is not None,
        "--audio": images.audio is not None,
    }
    several = [name for name, there in given.items() if there]
    if len(several) > 1:
        raise UserError(f"give {' or '.join(several)}, not both")
    if images.images is None and images.labels is not None:
        raise UserError("--labels goes with --images")
    return bool(several)
