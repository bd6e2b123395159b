"""The options of each command."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from ckpt_prune.checkpoint.model_folder import find_graph
from ckpt_prune.common.graph_types import GgufType, GraphType, OtherTypes, TensorType
from ckpt_prune.common.ratios import Ratio
from ckpt_prune.common.zero_patterns import RotationName, parse_pattern
from ckpt_prune.datasets.texts import NamedText, parse_text_name
from ckpt_prune.options.data import (
    CalibrationOptions,
    EvaluationOptions,
    ProofOptions,
    QualityOptions,
    SampleOptions,
    TrainingOptions,
)
from ckpt_prune.options.graphs import GGUF_ALONE, GraphSettings, OtherTypesGiven
from ckpt_prune.options.machine import (
    DeviceOptions,
    OpeningOptions,
    ProviderOptions,
    SourceOptions,
    SpreadOptions,
    StateMemoryOptions,
    TrustOptions,
)
from ckpt_prune.options.option import (
    CARD,
    DATA,
    GRAPH,
    HUB,
    MACHINE,
    MEASURE,
    MODEL,
    OUTPUT,
    RECIPE,
    ROUNDING,
    SIZE,
    SWEEP,
    TIMING,
    Accepts,
    AnyFolder,
    AnyModel,
    AnyPath,
    AnyRatio,
    Changes,
    File,
    Folder,
    Input,
    Inputs,
    Listed,
    Model,
    Options,
    OtherModel,
    OtherPlace,
    Place,
    StatisticsFolder,
    Strings,
    Texts,
    check_model,
    flags_of,
    option,
    path_of,
    same_option,
    with_commas,
)
from ckpt_prune.options.training import LLM_PRUNER, LoraSettings, RecoverySettings, SnowsSettings


class HasPlan(Protocol):
    """The value that `plan` returned."""

    @property
    def plan(self) -> Any:
        """The plan."""


def _check_graph_or_model(model: str | None) -> str | None:
    if model is not None and find_graph(model) is None:
        return check_model(model)
    return model


GraphOrModel = Annotated[Accepts[AnyModel, str], BeforeValidator(path_of), AfterValidator(_check_graph_or_model)]


class OverwriteOptions(Options):
    """Whether an output may be replaced."""

    overwrite: bool = option(default=False, digest="none")
    """Replace an existing output."""


class OutputOptions(OverwriteOptions):
    """A folder to write."""

    output: Place = option(flags=("-o", "--output"), metavar="OUT", digest="none")
    """Folder to write."""


class ResumeOptions(OutputOptions):
    """A folder to write, in a run that may be continued."""

    resume: bool = option(default=False, digest="none")
    """Continue an interrupted run of the same job."""


class RecipeKeyOptions(SourceOptions):
    """Which model to prune, and how its recipe is changed."""

    group = RECIPE
    statistics: StatisticsFolder = option(default=None, metavar="STATS", group=DATA, digest="content")
    """Folder of statistics that `ckpt-prune calibrate` wrote."""
    overrides: Changes = option(default=(), flags=("--set",), metavar="KEY=VALUE", several=True)
    """Change a key of the recipe: spaces.mlp.ratio=0.4. May be repeated."""
    runs_on: Listed = option(default=None, flags=("--for",), metavar="RUNTIME[,RUNTIME...]")
    """Runtimes that the output is for: transformers, onnxruntime, genai, llama.cpp, vllm, mlx, transformers.js,
    openvino, sglang, exllamav3 or tensorrt-llm. What does not run there is refused before any data is read.
    llama.cpp:q4_0 (q8_0, q4_k_m, and so on), vllm:tp2 (tp4, tp8), mlx:4bit (8bit), onnxruntime:int4 (q4f16) also make
    widths multiples of what that wants."""
    container: str | None = option(default=None, metavar="NAME")
    """What the output is stored as: a stock model_type; remote for remote code; any for remote code if no stock class
    fits; padded for a stock class, filled up with zeros if it has no narrower shape; auto for a stock class that
    fits. [default: the recipe's, mostly auto]"""


class SizeOptions(Options):
    """How much goes."""

    group = SIZE
    ratio: AnyRatio = option(default=None, metavar="R")
    """Share of units to drop in every space, or of weights that a mask zeroes, instead of the recipe's: 0.2 or 20%."""
    target_params: str | None = option(default=None, metavar="SIZE")
    """Parameters to come down to: 5.0B, or 70% of the dense model's. It replaces every ratio of the recipe; the
    recipe's allocation decides the widths."""
    target_bytes: str | None = option(default=None, metavar="SIZE")
    """Bytes of tensors on disk to come down to: 9.5GB or 70%. With `prune --for llama.cpp` and no --recipe, bytes of
    the GGUF file: types of its matrices, and columns of MLPs, are chosen by what they lose."""
    target_flops: str | None = option(default=None, metavar="SIZE")
    """FLOPs of one forward pass to come down to: 2.3T or 70%. They are those that `ckpt-prune inspect` prints: of one
    image, or of as many tokens as the model reads at once, at most 2048, whatever --window says."""
    target_latency: str | None = option(default=None, metavar="TIME")
    """Time to come down to: 12ms or 70%, of reading 128 tokens. 70%@512: of reading 512 tokens. 70%@token: of one token
    after them. It is predicted by a table of the model's blocks, measured once on this machine."""

    @property
    def sizes(self) -> dict[str, str | None]:
        kinds = ("params", "bytes", "flops", "latency")
        return {kind: getattr(self, f"target_{kind}") for kind in kinds}


class RecipeOptions(SizeOptions, RecipeKeyOptions):
    """Which model to prune, by which recipe, to which size."""

    group = RECIPE
    recipe: AnyFolder = option(default=None, metavar="R", digest="content")
    """Name of a shipped recipe (`ckpt-prune recipe list`), a recipe file, a folder with one,
    or ORG/REPO/NAME.yaml[@REVISION] on the Hub. [default: best-uniform]"""


class DiagnosticsOptions(Options):
    """Options of `plan` for more measurements."""

    group = MEASURE
    diagnostics: bool = option(default=True)
    """Also record floors, rho2, spectra and, with folds, held-out errors of every site. This takes one or two more
    factorizations per site."""


class PruneDiagnosticsOptions(Options):
    """Options for more measurements, which cost time."""

    group = MEASURE
    diagnostics: bool | None = option(default=None)
    """Also record floors, rho2, spectra and, with folds, held-out errors of every site, and the errors of a Wanda mask.
    This takes one or two more factorizations per site. [default: only what costs little]"""


class PlanOptions(OverwriteOptions, DiagnosticsOptions, RecipeOptions):
    """Options of `plan`."""

    output: File = option(default=None, flags=("-o", "--output"), metavar="FILE")
    """Plan file to write."""


class SweepDataOptions(Options):
    """Data that the points of a sweep are calibrated and measured on."""

    group = SWEEP
    evaluate: Texts = option(default=(), metavar="FILE|DIR")
    """Also prune at each value, into a temporary folder, and measure perplexity and KL on this text, or accuracy and KL
    on this folder of images. Recipes that no plan can describe (masks, rotations, a narrower stream) are only measured.
    A text may be one of several: the curve is over all of them."""
    evaluate_samples: int | None = option(default=None)
    """Use at most this many windows of each text of --evaluate, or images."""
    text: Texts = option(default=(), metavar="FILE")
    """With --evaluate: text to calibrate every value on, instead of --statistics. Values of samples and of seed can
    then be swept, too. May be repeated."""
    images: Inputs = option(default=(), metavar="DIR")
    """With --evaluate: folder of images to calibrate every value on. May be repeated."""
    samples: int | None = option(default=None)
    """Windows of --text, or images of --images."""
    window: int | None = option(default=None)
    """Tokens per window, of --text and of --evaluate."""


class SweepOptions(SweepDataOptions, RecipeKeyOptions):
    """Which values of which key to plan at."""

    values: Accepts[str | Sequence[float], Any] = option(kw_only=False)
    """Ratios: numbers, or FROM:TO:STEP with both ends included. Or values of another key: KEY=A,B,C or
    KEY=FROM:TO:STEP, of any key that `overrides` may have, of samples or of seed. KEY,KEY=A,B,C varies keys
    together."""
    recipe: AnyFolder = same_option(RecipeOptions, "recipe")


class PlanCommandOptions(SweepDataOptions, DiagnosticsOptions, SizeOptions, RecipeKeyOptions, OverwriteOptions):
    """Options of the command `plan`, which also compares plans and sweeps."""

    group = OUTPUT
    recipes: Strings = option(default=(), flags=("--recipe",), metavar="R", group=RECIPE)
    """Name of a shipped recipe (`ckpt-prune recipe list`), a recipe file, a folder with one,
    or ORG/REPO/NAME.yaml[@REVISION] on the Hub. If given more than once, all are compared in one
    table. [default: best-uniform]"""
    output: File = same_option(PlanOptions, "output")
    sweep: str | None = option(default=None, metavar="VALUES", group=SWEEP)
    """Plan at several ratios, such as 0.1:0.7:0.1, or at several values of a key of the recipe, such as
    spaces.mlp.compensation.lambda=1e-4,1e-2,1, and print the curve of size and predicted error. KEY,KEY=A,B,C gives
    several keys the same value at each point."""


class RecoveryMeasureOptions(Options):
    """Options for measurements of recovery."""

    group = MEASURE
    perplexity_after: Listed = option(default=None, metavar="K,K,...|all")
    """Also measure the perplexity on held-out windows with only the first K blocks recovered (causal language models).
    It is always measured with none and with all. Each K keeps the hidden states of the held-out samples once more."""


class PublicOptions(Options):
    """Who may read what is pushed."""

    group = HUB
    public: bool = option(default=False, digest="none")
    """Let everyone read what is pushed. [default: private]"""


class RecipeOrPlanOptions(RecipeOptions):
    """Which model to prune, by a recipe or by a plan."""

    group = RECIPE
    plan: Annotated[
        Accepts[AnyPath | HasPlan | None, Any], BeforeValidator(lambda plan: getattr(plan, "plan", plan))
    ] = option(default=None, metavar="FILE", digest="content")
    """Apply a plan that `ckpt-prune plan` wrote, instead of a recipe."""


def _check_pattern(text: str | None) -> str | None:
    if text is not None:
        parse_pattern(text)
    return text


class VocabularyOptions(Options):
    """How many tokens stay."""

    group = SIZE
    vocabulary: str | None = option(default=None, metavar="TOKENS[,TOKENS...]")
    """Tokens that stay; the others go from embedding, head and tokenizer, without a recipe nothing else does. auto: the
    fewest that cost at most 0.2% of bits per byte on --text. Or a number or a share (24000, 50%), scripts (latin,
    cyrillic), first:N of the merges or scores, text (all that --text uses), a file with one token a line."""


class MaskOptions(Options):
    """How a recipe with a mask zeroes weights."""

    group = RECIPE
    pattern: Annotated[str | None, AfterValidator(_check_pattern)] = option(default=None, metavar="N:M")
    """For a recipe with a mask (sparsegpt, wanda, magnitude-50): of every M consecutive weights of a row, N stay (2:4).
    unstructured: a share of the weights goes, anywhere."""
    rotate: RotationName | None = option(default=None, metavar="NAME")
    """For a recipe with a mask: first learn rotations that gather the importance of the weights. denoise:
    DenoiseRotator as published; cayley: the same in a tenth of the steps; shared: one rotation for all blocks, which
    the weights absorb; groups: for the groups of an N:M pattern."""

    @property
    def mask_changes(self) -> dict[str, tuple[str, str | None]]:
        """Option → the key of the recipe that it sets, and the value."""
        return {"--pattern": ("mask.pattern", self.pattern), "--rotate": ("rotation", self.rotate)}


class PruneOptions(
    PublicOptions,
    ResumeOptions,
    StateMemoryOptions,
    RecoveryMeasureOptions,
    PruneDiagnosticsOptions,
    QualityOptions,
    CalibrationOptions,
    MaskOptions,
    VocabularyOptions,
    RecipeOrPlanOptions,
):
    """Options of `prune`."""

    group = OUTPUT
    output: OtherPlace = option(
        default_factory=lambda _given: Path("OUT"), flags=("-o", "--output"), metavar="OUT", digest="none"
    )
    """Folder to write. A dry run needs none."""
    dry_run: bool = option(default=False, digest="none")
    """Check everything and print sizes; measure and write nothing. Data to measure on may be left out."""
    vision_recipe: AnyFolder = option(default=None, metavar="R", group=RECIPE)
    """With --part all: recipe for the vision tower. [default: that of --recipe]"""
    vision_ratio: Accepts[float | str | None, Ratio | None] = option(default=None, ge=0, lt=1, metavar="R", group=SIZE)
    """With --part all: ratio for the vision tower. [default: --ratio]"""
    push: str | None = option(default=None, metavar="REPO", group=HUB, digest="none")
    """Push OUT to this new repository on the Hub (ORG/NAME) when it is complete, as `ckpt-prune push` does. Token and
    name are checked before any work."""

    @property
    def has_output(self) -> bool:
        """Whether a folder to write was given, which a dry run needs not be."""
        return "output" in self.model_fields_set

    @property
    def may_replace(self) -> bool:
        """Whether an output of this tool may be in the place; a dry run writes nothing there."""
        return self.overwrite or (self.dry_run and not self.resume)

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        if not self.has_output and not self.dry_run:
            raise ValueError(
                "give -o OUT, the folder to write; without one, --dry-run checks everything and prints sizes"
            )
        return self


class RecoverOptions(
    ResumeOptions,
    LoraSettings,
    SnowsSettings,
    RecoverySettings,
    RecoveryMeasureOptions,
    QualityOptions,
    StateMemoryOptions,
    TrainingOptions,
    DeviceOptions,
    OpeningOptions,
):
    """Options of `recover`."""

    pruned: Model = option(kw_only=False, digest="content")
    """Folder of the pruned model, or a Hub id."""
    dense: OtherModel = option(default=None, metavar="MODEL", group=MODEL, digest="content")
    """The dense model that PRUNED was made from. --method lora needs none."""
    data: Input = option(default=None, metavar="FILE", group=DATA, digest="content")
    """Rows of instruction, input and output (.jsonl, .json) for --method lora in place of --text: adapters learn the
    answers alone, in Alpaca's prompt, as LLM-Pruner's tuning does, whose settings are then the defaults: 2 epochs of
    batches of 64, 1e-4 after 100 steps and down in a line, dropout 0.05, rows of at most 256 tokens (--window)."""

    @model_validator(mode="after")
    def _fill_in_published(self) -> Self:
        for name in LLM_PRUNER.keys() - self.model_fields_set if self.data is not None else ():
            setattr(self, name, LLM_PRUNER[name])
        return self


class CompareOptions(OverwriteOptions, StateMemoryOptions, SampleOptions, DeviceOptions, OpeningOptions):
    """Which two models to compare, and on what."""

    group = OUTPUT
    reference: Model = option(kw_only=False, metavar="A")
    """The reference, usually the dense model: a folder or a Hub id."""
    model: Model = option(kw_only=False, metavar="B")
    """The model that is compared with it: a folder or a Hub id."""
    plot: File = option(default=None, metavar="FILE")
    """Also write an HTML page with every figure drawn."""


class CalibrateOptions(OutputOptions, CalibrationOptions, SourceOptions):
    """Options of `calibrate`."""

    group = MEASURE
    output: Place = option(flags=("-o", "--output"), metavar="STATS", group=OUTPUT)
    """Folder of statistics to write."""
    collect: Listed = option(default=None, metavar="KIND[,KIND...]")
    """Kinds of statistics. moments: vectors only, enough for scores and bias compensation. gram: also the Gram matrix
    of every consumer's input, for rotation, ridge and the other closed forms. logits: moments of queries and keys, to
    prune q and k. centred: these also with keys less their mean over each sample, for recipes with centre_keys. rotary:
    moments of rotary pairs, for recipes that prune them. linears: vectors, and with gram Gram matrices, of the inputs
    of all other linear layers, for masks. fisher: how errors of every layer change the model's output, by its gradients
    on 8 windows or 32 images, for recipes with allocation least-error (best-uniform, best). effects: the same, measured
    by pruning each layer alone, about 3 x blocks^2 more block runs, for small models. queries, values: with fisher and
    effects, the same of query heads inside KV groups and of value directions. taylor: importances of units by gradients
    of the loss on all windows, about 5 more runs of each block, for the llm-pruner recipes. [default: all that the
    model's family can use, except centred, rotary, queries, values and taylor; effects only up to 12 blocks]"""
    shard: str | None = option(default=None, metavar="I/N", group=DATA)
    """Measure only the I-th of N equal shares of the samples, so that several machines can share the work. `ckpt-prune
    statistics add` adds the shards."""
    dry_run: bool = option(default=False, group=OUTPUT)
    """Check everything, and print what would be measured, its time and memory; measure and write nothing."""


class ConvertOptions(ResumeOptions):
    """Options of `convert`."""

    model: Folder = option(kw_only=False)
    """Folder of a model or of a LoRA adapter, a Hub id, or a GGUF file."""
    proof: bool = option(default=True, flags=("--validate",), group=MEASURE)
    """Compare OUT in PyTorch with a GGUF file in llama.cpp, if that is installed, before OUT takes its place."""
    text: Texts = same_option(ProofOptions, "text")
    samples: int | None = option(default=None, ge=1, group=DATA)
    """Number of windows to compare on. [default: 2]"""
    window: int | None = same_option(ProofOptions, "window")


class QuantizeOptions(ResumeOptions, StateMemoryOptions, QualityOptions, SampleOptions, DeviceOptions):
    """Options of `quantize`."""

    model: Model = option(kw_only=False, digest="content")
    """Folder of a model, or a Hub id."""
    format: Literal["int8", "int4", "gguf"] = option(group=ROUNDING)
    """Type that weights are stored in. gguf: OUT is a file for llama.cpp, whose name ends in .gguf."""
    type: GgufType | None = option(default=None, group=ROUNDING)
    """With gguf: type of the file, such as q4_k_m. Each matrix is rounded by importance and by error feedback, and what
    loses less on held-out samples is taken."""
    embedding_type: TensorType | None = same_option(GraphSettings, "embedding_type")
    output_type: TensorType | None = same_option(GraphSettings, "output_type")
    types: OtherTypesGiven = same_option(GraphSettings, "types")
    group_size: Annotated[
        Accepts[str | int | None, str | None],
        BeforeValidator(lambda size: size if size is None else str(size)),
    ] = option(default=None, metavar="N|channel", group=ROUNDING)
    """Columns that share a scale: 32, 64 or 128, or channel for whole rows. [default: channel for int8; for int4 the
    largest that divides every weight]"""
    target_bytes: str | None = option(default=None, metavar="SIZE", group=ROUNDING)
    """With int4: bytes of the files of weights to come down to, 100MB, or 40% of the tensors of MODEL. Each weight gets
    4 bits in groups of any size, 8 bits, or stays as it is, so that the least is lost within the size; weights that
    vLLM joins are stored alike."""
    statistics: StatisticsFolder = option(default=None, metavar="STATS", group=ROUNDING, digest="content")
    """Statistics of MODEL (`ckpt-prune calibrate MODEL --collect moments,gram,linears`), to round by GPTQ without
    running the model. Every block is then rounded as if those before it were not."""

    @property
    def other_types(self) -> OtherTypes:
        return OtherTypes(self.embedding_type, self.output_type, self.types)

    @model_validator(mode="after")
    def _check_gguf(self) -> "QuantizeOptions":
        fields = QuantizeOptions.model_fields
        other = ("group_size", "statistics", "resume") if self.format == "gguf" else ("type", *GGUF_ALONE)
        if self.target_bytes is not None:
            self._check_size()
        if changed := next((name for name in other if getattr(self, name)), None):
            raise ValueError(f"{flags_of(changed, fields[changed])[-1]} does not go with --format {self.format}")
        if self.format == "gguf" and self.type is None:
            raise ValueError("--format gguf needs --type, such as q4_k_m")
        if self.format == "gguf" and not self.text:
            raise ValueError("--format gguf rounds by what reaches each matrix: give --text (export needs none)")
        return self

    def _check_size(self) -> None:
        """Refuse a size for anything but checkpoints whose weights are chosen by text."""
        if self.format == "gguf":
            raise ValueError("--target-bytes: a GGUF file of a size is made by `ckpt-prune frontier MODEL`")
        if self.format != "int4":
            raise ValueError("--target-bytes chooses which weights have 4 bits and which have more: say --format int4")
        if self.group_size is not None or self.statistics is not None:
            other = "--group-size" if self.group_size is not None else "--statistics"
            raise ValueError(f"--target-bytes measures the model and chooses groups itself: leave out {other}")
        if not self.text:
            raise ValueError("--target-bytes chooses by what each weight loses on a text: give --text FILE")


class FrontierOptions(ResumeOptions, SampleOptions, DeviceOptions, TrustOptions):
    """Options of `frontier`."""

    model: Model = option(kw_only=False, group=MODEL, digest="content")
    """Folder of a model that generates text or, for llama.cpp, makes embeddings, for onnxruntime of any that `export`
    takes, or a Hub id."""
    output: Place = option(flags=("-o", "--output"), metavar="OUT", group=OUTPUT, digest="none")
    """Folder to write: the file (model.gguf, or a graph with what it is loaded by), the commands that make it
    (make.sh), the picture (frontier.html and frontier.svg), and all figures (frontier.json)."""
    runs_on: Literal["llama.cpp", "onnxruntime", "vllm"] = option(default="llama.cpp", flags=("--for",), group=SIZE)
    """The runtime that the file is for, and is measured in. Checkpoints for vllm are measured in PyTorch; those with
    weights of 8 bits need a GPU there."""
    target_bytes: str | None = option(default=None, metavar="SIZE", group=SIZE)
    """Bytes of the file to come down to: 75MB, or 30% of the tensors of MODEL."""
    target_latency: str | None = option(default=None, metavar="TIME", group=SIZE)
    """Time to come down to on this machine, as `prune --target-latency` takes it: 12ms, 12ms@512, 9ms@token, or 60% of
    that of the graph in float32, or of the file in float16. Not for vllm."""
    max_loss: Accepts[float | str | None, Ratio | None] = option(default=None, gt=0, lt=1, group=SIZE)
    """How much worse the file may be, 0.02 or 2%: about the share by which its perplexity may grow, measured as
    e^KL - 1; of a model of features, what its cosine may lose, which is half of the energy that its vectors may. The
    smallest file is looked for. [default: 5%, without --target-bytes; larger files are measured, too]"""
    all_tokens: bool = option(default=False, group=SIZE)
    """Keep all tokens of the vocabulary. Without this some go where that loses less than fewer bits or columns; texts
    of other kinds than --text and --held-out, such as other languages, then lose more than is measured."""
    held_out: Texts = option(default=(), metavar="FILE", group=MEASURE, digest="content")
    """Text to measure on, which must not be --text: what was fitted to a text looks too good on it. A named text, such
    as wikitext2, is its test split here. May be repeated. With --data other rows of the same form. Models of images
    are measured on images that they were not rounded by."""
    held_out_samples: int | None = option(default=None, ge=1, group=MEASURE)
    """Windows of --held-out, or rows, or images. [default: 16 windows, 64 rows, 256 images]"""
    data: Input = option(default=None, metavar="FILE", digest="content")
    """Rows (.jsonl, .json) to measure an encoder-decoder on, with --for onnxruntime: of source and target, or for
    Whisper of audio, a path, and text."""
    samples: int | None = option(default=None, ge=1)
    """Windows of --text. [default: 32]"""
    window: int | None = option(default=None, ge=2)
    """Tokens per window, of --text and of --held-out. [default: the model's context length, at most 512]"""
    # No option here: it is for models of text and of images.
    audio: ClassVar[None] = None  # type: ignore[misc]

    @property
    def talks(self) -> Path | None:
        """The file of --data."""
        return self.data

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        targets = ("target_bytes", "max_loss", "target_latency")
        given = [f"--{name.replace('_', '-')}" for name in targets if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are two targets: give one of them")
        if self.target_latency is not None and self.runs_on == "vllm":
            raise ValueError(
                "--target-latency: checkpoints for vllm are made for a size, as they are measured in PyTorch"
            )
        if self.images:
            if self.runs_on != "onnxruntime":
                raise ValueError(f"--images: files for {self.runs_on} are of models of text; say --for onnxruntime")
            if self.text or self.held_out:
                raise ValueError("--images are measured on, too: --text and --held-out do not go with them")
            return self
        if self.data is not None:
            if self.runs_on != "onnxruntime":
                raise ValueError(f"--data: files for {self.runs_on} are measured on text; say --for onnxruntime")
            if self.target_latency is not None:
                raise ValueError("--target-latency is for models of one graph: ask for --target-bytes or --max-loss")
            if self.text or len(self.held_out) != 1 or self.held_out[0] == self.data:
                raise ValueError("--data goes with one --held-out FILE of other rows, and without --text")
            return self
        if not self.text:
            raise ValueError("frontier measures the model: give --text FILE, or --images DIR with --for onnxruntime")
        if not self.held_out:
            raise ValueError("frontier measures files on text that they were not made by: give --held-out FILE")
        named = [parse_text_name(text, "test") or text for text in self.held_out]
        self.held_out = tuple(each.path if isinstance(each, NamedText) else each for each in named)
        if set(self.held_out) & set(self.text):
            raise ValueError("--held-out is measured on, and --text is fitted to: give different ones")
        return self


class PushOptions(PublicOptions):
    """Options of `push`."""

    folder: Folder = option(kw_only=False, metavar="OUT")
    """Folder of an output of this tool."""
    repo: str = option(kw_only=False)
    """Repository on the Hub, ORG/NAME. It is made if there is none."""
    overwrite: bool = option(default=False)
    """Replace what this tool pushed to REPO before. Files that it did not push stay."""
    base_model: str | None = option(default=None, pattern=r"^[\w.-]+/[\w.-]+$", metavar="ID", group=CARD)
    """Hub id of the dense model, for the card, if OUT does not say it."""
    license: str | None = option(default=None, pattern=r"^[\w.-]+$", metavar="ID", group=CARD)
    """Licence for the card, instead of that of the dense model's card."""
    evaluation: Strings = option(default=(), metavar="NAME=FILE", group=CARD)
    """Figures for the card and its model-index: the name of the data, and a file with what `evaluate OUT --json`
    printed. May be repeated."""
    dry_run: bool = option(default=False)
    """Check everything, verify OUT, and list files and bytes; upload nothing. It asks the Hub whether REPO can be
    written, so it needs a token."""


class EvaluateOptions(SpreadOptions, EvaluationOptions, DeviceOptions, TrustOptions):
    """Options of `evaluate`."""

    group = MEASURE
    model: GraphOrModel = option(kw_only=False)
    """Folder of a model, a Hub id, or an ONNX graph next to its config and tokenizer or image processor."""
    against: Annotated[
        Accepts[AnyModel | None, str | None], BeforeValidator(path_of), AfterValidator(_check_graph_or_model)
    ] = option(default=None, metavar="MODEL2", group=MODEL)
    """A reference, usually the dense model: both are measured, and the KL divergence between them."""
    tasks: Annotated[
        Accepts[AnyPath | Sequence[AnyPath] | None, str | None],
        BeforeValidator(lambda tasks: None if tasks == () else with_commas(tasks)),
    ] = option(default=None, metavar="T[,T...]", several=True)
    """Files of multiple-choice items (.jsonl), or names of lm-eval tasks (needs the extra eval). For a model with a
    sequence-classification head: files of labelled texts, or tasks of GLUE: glue:sst2, FOLDER/glue:mrpc. May be
    repeated. suite:rcpu, suite:laco or suite:denoise: all of a paper's tasks and the mean of what its tables have, from
    TASK*.jsonl in FOLDER (FOLDER/suite:rcpu) or $CKPT_PRUNE_DATA/tasks, else by lm-eval."""
    include_path: Input = option(default=None, metavar="DIR", needs="tasks")
    """For --tasks: folder with lm-eval task files of your own."""
    depth: Input = option(default=None, metavar="DIR", needs="images")
    """Measure RMSE and δ1 of a depth model on --images: folder with a PNG for each image, of its name and size, whose
    numbers are depths; 0 where none is known."""
    depth_scale: float = option(default=1000.0, gt=0)
    """Numbers of --depth for one of the model's unit: 1000 if maps have millimetres and the model tells metres."""
    segmentation: Input = option(default=None, metavar="DIR", needs="images")
    """Measure mIoU of a semantic segmentation model on --images: folder with a PNG for each image, of its name and
    size, whose numbers are classes; 255 where there is none, or 0 if the image processor reduces labels."""
    generate: Strings = option(default=(), metavar="PROMPT")
    """Show what the model writes after PROMPT, greedily. May be repeated."""
    generate_tokens: int = option(default=64, ge=1)
    """Tokens to generate after each prompt, at most."""
    dry_run: bool = option(default=False, group=MACHINE)
    """Print what measuring causal language models on --text takes, or with --device-map where the parts of any model
    would go; measure nothing."""

    @model_validator(mode="after")
    def _check_maps(self) -> "EvaluateOptions":
        flags = [f"--{name}" for name in ("depth", "segmentation") if getattr(self, name) is not None]
        if len(flags) > 1 or (flags and (self.labels or self.text or self.tasks or self.generate)):
            raise ValueError(f"{' and '.join(flags)}: maps are measured alone, with --images")
        if self.depth is None and self.depth_scale != 1000:
            raise ValueError("--depth-scale is of --depth DIR")
        return self

    @property
    def task_names(self) -> list[str]:
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]


class InspectOptions(OpeningOptions):
    """Options of `inspect`."""

    group = RECIPE
    model: Model = option(kw_only=False)
    """Folder of a model, which may hold only a config.json, or a Hub id."""
    ratios: Listed = option(default=None, flags=("--ratio",), metavar="R[,R...]", group=SIZE)
    """Also print the size after dropping these shares of the units of the recipe's spaces."""
    recipe: AnyFolder = option(default=None, metavar="R")
    """Recipe whose spaces and rounding --ratio applies to: rcpu drops heads and MLP columns, corp dimensions of q and k
    and MLP columns. Without --ratio, the size by the recipe's own ratios is printed. [default: rcpu]"""
    sparsity: bool = option(default=False, group=MEASURE)
    """Also count the zeros of the linear weights, and which of 1:4, 2:4 and 4:8 they hold. Reads all weights."""


class DenseOptions(Options):
    """A second model that a graph or a file is compared with."""

    group = MEASURE
    dense: AnyFolder = option(default=None, metavar="MODEL")
    """A dense model: also measure what is lost against it. [default of `export`, and for GGUF: the one that MODEL was
    pruned from, if it lies beside it, in the current folder or in the Hub's cache]"""
    max_loss_dense: Accepts[float | str | None, Ratio | None] = option(default=None, gt=0)
    """What the task's metric may lose against --dense: 0.01 or 1%. [default: it is only measured]"""


class ExportOptions(
    OutputOptions, GraphSettings, DenseOptions, ProofOptions, ProviderOptions, SpreadOptions, TrustOptions
):
    """Options of `export`."""

    model: Model = option(kw_only=False)
    """Folder of a model, or a Hub id."""
    output: Place = option(flags=("-o", "--output"), metavar="OUT", group=OUTPUT)
    """Folder to write; with --format gguf a file whose name ends in .gguf."""
    proof: bool = option(default=True, flags=("--validate",), group=MEASURE)
    """Compare the graph in onnxruntime, or the file in llama.cpp, with PyTorch before it takes its place."""
    statistics: StatisticsFolder = option(default=None, metavar="STATS", group=ROUNDING)
    """With --format gguf: weigh errors of rounding by how much each input matters, as `ckpt-prune calibrate MODEL`
    measured it on this model."""
    imatrix: Input = option(default=None, metavar="FILE", group=ROUNDING)
    """The same, by an importance matrix that llama.cpp's tool or `ckpt-prune statistics export` wrote."""

    @model_validator(mode="after")
    def _check_name(self) -> "ExportOptions":
        if self.format == "onnx" and self.output.suffix == ".gguf":
            raise ValueError(f"-o {self.output} ends in .gguf: add --format gguf")
        if self.statistics is not None and self.imatrix is not None:
            raise ValueError("--statistics and --imatrix say the same thing twice: give one of them")
        if self.format == "gguf" and self.rounding == "gptq":
            raise ValueError("export runs no blocks: `ckpt-prune quantize MODEL --format gguf` rounds by GPTQ")
        if self.format == "onnx" and (self.statistics or self.imatrix):
            raise ValueError(f"--{'statistics' if self.statistics else 'imatrix'} goes with --format gguf")
        return self

    @model_validator(mode="after")
    def _check_onnx_alone(self) -> "ExportOptions":
        names = ("max_loss_dense", "provider")
        changed = [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
        if self.format == "gguf" and changed:
            raise ValueError(f"--{changed[0].replace('_', '-')} does not go with --format gguf")
        return self


RuntimeName = Literal["onnxruntime", "llama.cpp", "genai", "openvino", "transformers.js", "transformers", "vllm", "mlx"]


class ValidateOptions(DenseOptions, ProofOptions, ProviderOptions, SpreadOptions, TrustOptions):
    """Options of `validate`."""

    group = MEASURE
    folder: Folder = option(kw_only=False, metavar="DIR")
    """Folder that `ckpt-prune export` wrote, or a graph in it, which stands for all of them; a GGUF file; or with
    --runtime mlx, vllm or transformers a checkpoint."""
    runtime: RuntimeName | None = option(default=None)
    """What runs DIR. transformers, vllm and mlx run a checkpoint; genai, openvino and transformers.js a folder that
    `export` wrote, or the checkpoint that it lies in. All but onnxruntime are compared on text alone: KL divergence,
    top-1, perplexity, and tokens a second. [default: llama.cpp for a GGUF file, else onnxruntime]"""
    against: OtherModel = option(default=None, metavar="MODEL", group=MODEL)
    """The checkpoint that DIR was exported from; needed for GGUF. [default: the one that DIR lies in, or next to]"""
    max_loss: Accepts[float | str | None, Ratio | None] = option(default=None, gt=0, lt=1)
    """What rounding may have cost of the task's metric: 0.01 or 1%. [default: 2% for int8, 10% for int4 and q4f16]"""
    tolerance: float | None = option(default=None, gt=0)
    """Largest difference that passes, as a share of the largest output; means may differ by a tenth of it. [default:
    1e-4 for fp32, 2e-2 for fp16]"""


class VerifyOptions(SpreadOptions):
    """Options of `verify`."""

    group = MODEL
    folder: Folder = option(kw_only=False, metavar="OUT")
    """Folder of an output of this tool, or of an exported graph."""
    against: OtherModel = option(default=None, metavar="MODEL")
    """The dense model: also check that kept rows, or weights that a mask left, are its own, bit for bit. For an
    exported folder: the model that it was exported from."""
    statistics: StatisticsFolder = option(default=None, metavar="STATS")
    """What OUT was made from: with --against also compute some blocks again, chosen at random, and compare them."""
    family: File = same_option(OpeningOptions, "family")


class BenchmarkOptions(SpreadOptions, DeviceOptions, TrustOptions):
    """Options of `benchmark`."""

    group = TIMING
    a: Model = option(kw_only=False)
    """The reference, usually the dense model: a folder, a Hub id or an exported graph."""
    b: Model = option(kw_only=False)
    """The model that is compared with it."""
    onnx: bool = option(default=False)
    """Time both in onnxruntime as well."""
    batches: Annotated[Accepts[str | Sequence[int], str], BeforeValidator(with_commas)] = option(
        default="1", flags=("--batch",), metavar="N[,N...]"
    )
    """Texts or images at once."""
    tokens: int | None = option(default=None, ge=1)
    """Tokens of each text. [default: 128, or what the shorter context has room for]"""
    generate: int | None = option(default=None, ge=0)
    """Tokens to generate after the text, with the cache; 0 for none. [default: 16 if both models can, less in a short
    context]"""
    rounds: int = option(default=30, ge=1)
    """Times that each model is timed."""
    warmup: int = option(default=3, ge=0)
    """Rounds before them, which do not count."""
    threads: int | None = option(default=None, ge=1)
    """Threads of each model. [default: as many as PyTorch takes]"""
    provider: Literal["cpu", "cuda"] | None = option(default=None, group=MACHINE)
    """Device that onnxruntime runs on. [default: cuda if --device is, else cpu]"""
    optimize: Literal["none", "cpu", "cuda"] | None = option(default=None, group=GRAPH)
    """Fuse graphs made here for this provider. [default: none; a graph in the checkpoint's folder onnx as it is]"""
    dtype: GraphType | None = option(default=None, group=GRAPH)
    """Type of graphs made here or taken from the checkpoint's folder onnx; PyTorch computes in fp32, or in fp16 if that
    is given. int8, int4 and q4f16 round both models alike, to time them. [default: fp32; a graph in the checkpoint's
    folder onnx as it is]"""
    two_four: bool = option(default=False)
    """Also time checkpoints whose weights hold 2:4 with torch's semi-structured kernels. This needs an NVIDIA GPU of
    compute capability 8.0 or later and --dtype fp16; elsewhere a line says why it was left out."""
    blocks: bool = option(default=False)
    """Also time the blocks of each checkpoint one by one, in PyTorch; and models that turn the residual stream between
    blocks once more without these matrices, to see what they cost."""


class ReportOptions(OverwriteOptions):
    """Which report to write as a page."""

    source: Accepts[AnyPath, Path] = option(kw_only=False, metavar="OUT")
    """Folder that `ckpt-prune prune` or `recover` wrote, or a plan file."""
    output: File = option(default=None, flags=("-o", "--output"), metavar="FILE")
    """HTML file to write. [default: OUT.report.html]"""


class DemoOptions(DeviceOptions):
    """Options of `demo`."""

    output: File = option(default=None, flags=("-o", "--output"), metavar="DIR", group=OUTPUT)
    """Keep the pruned checkpoints in this new folder."""
    recipe: Strings = option(default=(), metavar="NAME")
    """Prune by this shipped recipe instead. May be repeated."""


class RecipeListOptions(Options):
    """Which recipes to list."""

    papers: bool = option(default=False)
    """List the recipes of papers, and those that compare one choice."""
    all: bool = option(default=False)
    """List every shipped recipe."""


class RecipeNameOptions(Options):
    """Which recipe."""

    name: str = option(kw_only=False)
    """Name of a shipped recipe (`ckpt-prune recipe list`), a recipe file, a folder with one,
    or ORG/REPO/NAME.yaml[@REVISION] on the Hub."""


class RecipeValidateOptions(Options):
    """Which recipes to check."""

    names: Strings = option(kw_only=False, metavar="NAME...")
    """Names of shipped recipes, recipe files and other places of one, as `recipe show` takes them."""


class RecipeCopyOptions(RecipeNameOptions):
    """Which recipe to copy, and where."""

    destination: File = option(default=None, kw_only=False)
    """File or folder to write. [default: NAME.yaml here]"""


class RecipePushOptions(PublicOptions):
    """Which recipe to share, and where."""

    file: str = option(kw_only=False)
    """A recipe file."""
    repo: str = option(kw_only=False)
    """Repository on the Hub, ORG/NAME. It is made if there is none."""
    overwrite: bool = option(default=False)
    """Replace a recipe of this name in REPO."""


class StatisticsShowOptions(Options):
    """Which statistics to show."""

    folder: Accepts[AnyPath, Path] = option(kw_only=False)
    """Folder of statistics."""


class StatisticsExportOptions(TrustOptions):
    """Which statistics to write for llama.cpp."""

    folder: Accepts[AnyPath, Path] = option(kw_only=False)
    """Folder of statistics."""
    model: Model = option()
    """Folder of the model that they were measured on, or its Hub id."""
    imatrix: Accepts[AnyPath, Path] = option(metavar="FILE", group=OUTPUT)
    """File to write, as llama.cpp's own tool writes an importance matrix."""
    overwrite: bool = option(default=False, group=OUTPUT)
    """Replace FILE."""


class StatisticsAddOptions(OutputOptions):
    """Which statistics to add."""

    folders: Texts = option(kw_only=False, metavar="A B...")
    """Two or more folders of statistics."""
