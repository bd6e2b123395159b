"""The options of each command."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, model_validator

from ckpt_prune.checkpoint.model_folder import find_graph
from ckpt_prune.common.graph_types import GgufType, GraphType
from ckpt_prune.common.ratios import Ratio
from ckpt_prune.options.data import (
    CalibrationOptions,
    EvaluationOptions,
    ImageOptions,
    ProofOptions,
    SampleOptions,
    TrainingOptions,
)
from ckpt_prune.options.graphs import GraphSettings
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
    Listed,
    Model,
    Options,
    OtherModel,
    Place,
    StatisticsFolder,
    Strings,
    Texts,
    check_model,
    option,
    path_of,
    same_option,
    with_commas,
)
from ckpt_prune.options.training import LoraSettings, RecoverySettings


class HasPlan(Protocol):
    """What `plan` returned."""

    @property
    def plan(self) -> Any:
        """The plan."""


RECIPE_NAME = (
    "Name of a shipped recipe (`ckpt-prune recipe list`), a recipe file, a folder with one, "
    "ORG/REPO/NAME.yaml[@REVISION] on the Hub, or an https address"
)


def _check_graph_or_model(model: str | None) -> str | None:
    if model is not None and find_graph(model) is None:
        return check_model(model)
    return model


GraphOrModel = Annotated[Accepts[AnyModel, str], BeforeValidator(path_of), AfterValidator(_check_graph_or_model)]


class OverwriteOptions(Options):
    """Whether an output may be replaced."""

    harmless = True
    overwrite: bool = option("Replace an existing output.", default=False)


class OutputOptions(OverwriteOptions):
    """A folder to write."""

    harmless = True
    output: Place = option("Folder to write.", flags=("-o", "--output"), metavar="OUT")


class ResumeOptions(OutputOptions):
    """A folder to write, in a run that may be continued."""

    harmless = True
    resume: bool = option("Continue an interrupted run of the same job.", default=False)


class RecipeKeyOptions(SourceOptions):
    """Which model to prune, and how its recipe is changed."""

    group = RECIPE
    statistics: StatisticsFolder = option(
        "Folder of statistics that `ckpt-prune calibrate` wrote.", default=None, metavar="STATS", group=DATA
    )
    overrides: Changes = option(
        "Change a key of the recipe: spaces.mlp.ratio=0.4. May be repeated.",
        default=(),
        flags=("--set",),
        metavar="KEY=VALUE",
        several=True,
    )
    container: str | None = option(
        "What the output is stored as: a stock model_type; remote for remote code; any for remote code if no stock "
        "class fits; padded for a stock class, filled up with zeros if it has no narrower shape.",
        default=None,
        metavar="NAME",
    )


class SizeOptions(Options):
    """How much goes."""

    group = SIZE
    ratio: AnyRatio = option(
        "Share of units to drop in every space, or of weights that a mask zeroes, instead of the recipe's: 0.2 or 20%.",
        default=None,
        metavar="R",
    )
    target_params: str | None = option(
        "Parameters to come down to: 5.0B, or 70% of the dense model's. It replaces every ratio of the recipe; the "
        "recipe's allocation decides the widths.",
        default=None,
        metavar="SIZE",
    )
    target_bytes: str | None = option(
        "Bytes of tensors on disk to come down to: 9.5GiB or 70%.", default=None, metavar="SIZE"
    )
    target_flops: str | None = option(
        "FLOPs of one forward pass (see `ckpt-prune inspect`) to come down to: 2.3T or 70%.",
        default=None,
        metavar="SIZE",
    )
    target_latency: str | None = option(
        "Time to come down to: 12ms or 70%, of reading 128 tokens. 70%@512: of reading 512 tokens. 70%@token: of one "
        "token after them. It is predicted by a table of the model's blocks, measured once on this machine.",
        default=None,
        metavar="TIME",
    )

    @property
    def sizes(self) -> dict[str, str | None]:
        """Return the target for each kind of size."""
        kinds = ("params", "bytes", "flops", "latency")
        return {kind: getattr(self, f"target_{kind}") for kind in kinds}


class RecipeOptions(SizeOptions, RecipeKeyOptions):
    """Which model to prune, by which recipe, to which size."""

    group = RECIPE
    recipe: AnyFolder = option(f"{RECIPE_NAME}. [default: best-uniform]", default=None, metavar="R")


class DiagnosticsOptions(Options):
    """What is measured besides."""

    group = MEASURE
    diagnostics: bool = option(
        "Also record floors, rho2, spectra and, with folds, held-out errors of every site. This takes one or two more "
        "factorizations per site.",
        default=True,
    )


class PlanOptions(OverwriteOptions, DiagnosticsOptions, RecipeOptions):
    """What to plan."""

    output: File = option("Plan file to write.", default=None, flags=("-o", "--output"), metavar="FILE")
    test: StatisticsFolder = option(
        "Statistics of MODEL on other samples: also print what every site of the plan loses there.",
        default=None,
        metavar="STATS",
        group=DATA,
    )


class SweepDataOptions(Options):
    """What the points of a sweep are calibrated and measured on."""

    group = SWEEP
    evaluate: Texts = option(
        "Also prune at each value, into a temporary folder, and measure perplexity and KL on this text, or accuracy "
        "and KL on this folder of images. Recipes that no plan can describe (masks, rotations, a narrower stream) are "
        "only measured. May be repeated.",
        default=(),
        metavar="FILE|DIR",
    )
    evaluate_samples: int | None = option("Use at most this many windows, or images, of --evaluate.", default=None)
    text: Texts = option(
        "With --evaluate: text to calibrate every value on, instead of --statistics. Values of samples and of seed can "
        "then be swept, too. May be repeated.",
        default=(),
        metavar="FILE",
    )
    images: File = option("With --evaluate: folder of images to calibrate every value on.", default=None, metavar="DIR")
    samples: int | None = option("Windows of --text, or images of --images.", default=None)
    window: int | None = option("Tokens per window, of --text and of --evaluate.", default=None)


class SweepOptions(SweepDataOptions, RecipeKeyOptions):
    """Which values of which key to plan at."""

    values: Accepts[str | Sequence[float], Any] = option(
        "Ratios: numbers, or FROM:TO:STEP with both ends included. Or values of another key: KEY=A,B,C or "
        "KEY=FROM:TO:STEP, of any key that `overrides` may have, of samples or of seed.",
        kw_only=False,
    )
    recipe: AnyFolder = option(f"{RECIPE_NAME}. [default: best-uniform]", default=None, metavar="R")


class PlanCommandOptions(SweepDataOptions, DiagnosticsOptions, SizeOptions, RecipeKeyOptions, OverwriteOptions):
    """What the command `plan` takes: plans, plans side by side, and sweeps."""

    group = OUTPUT
    recipes: Strings = option(
        f"{RECIPE_NAME}. If given more than once, all are compared in one table. [default: best-uniform]",
        default=(),
        flags=("--recipe",),
        metavar="R",
        group=RECIPE,
    )
    output: File = same_option(PlanOptions, "output")
    test: StatisticsFolder = same_option(PlanOptions, "test")
    sweep: str | None = option(
        "Plan at several ratios, such as 0.1:0.7:0.1, or at several values of a key of the recipe, such as "
        "spaces.mlp.compensation.lambda=1e-4,1e-2,1, and print the curve of size and predicted error.",
        default=None,
        metavar="VALUES",
        group=SWEEP,
    )


class RecoveryMeasureOptions(Options):
    """What is measured of recovery."""

    group = MEASURE
    perplexity_after: Listed = option(
        "Also measure the perplexity on held-out windows with only the first K blocks recovered (causal language "
        "models). It is always measured with none and with all. Each K keeps the hidden states of the held-out samples "
        "once more.",
        default=None,
        metavar="K,K,...|all",
    )


class PublicOptions(Options):
    """Who may read what is pushed."""

    group = HUB
    harmless = True
    public: bool = option("Let everyone read what is pushed. [default: private]", default=False)


class RecipeOrPlanOptions(RecipeOptions):
    """Which model to prune, by a recipe or by a plan."""

    group = RECIPE
    plan: Annotated[
        Accepts[AnyPath | HasPlan | None, Any], BeforeValidator(lambda plan: getattr(plan, "plan", plan))
    ] = option("Apply a plan that `ckpt-prune plan` wrote, instead of a recipe.", default=None, metavar="FILE")


class PruneOptions(
    PublicOptions,
    ResumeOptions,
    StateMemoryOptions,
    RecoveryMeasureOptions,
    DiagnosticsOptions,
    ImageOptions,
    CalibrationOptions,
    RecipeOrPlanOptions,
):
    """What to prune, how, and into what."""

    group = OUTPUT
    harmless = True
    dry_run: bool = option(
        "Check everything and print sizes; measure and write nothing. Data to measure on may be left out.",
        default=False,
    )
    push: str | None = option(
        "Push OUT to this new repository on the Hub (ORG/NAME) when it is complete, as `ckpt-prune push` does. Token "
        "and name are checked before any work.",
        default=None,
        metavar="REPO",
        group=HUB,
    )


class RecoverOptions(
    ResumeOptions,
    LoraSettings,
    RecoverySettings,
    RecoveryMeasureOptions,
    StateMemoryOptions,
    ImageOptions,
    TrainingOptions,
    DeviceOptions,
    OpeningOptions,
):
    """What to recover, towards what, and into what."""

    pruned: Model = option("Folder of the pruned model, or a Hub id.", kw_only=False)
    dense: OtherModel = option(
        "The dense model that PRUNED was made from. --method lora needs none.",
        default=None,
        metavar="MODEL",
        group=MODEL,
    )


class CompareOptions(OverwriteOptions, StateMemoryOptions, ImageOptions, SampleOptions, DeviceOptions, OpeningOptions):
    """Which two models to compare, and on what."""

    group = OUTPUT
    reference: Model = option(
        "The reference, usually the dense model: a folder or a Hub id.", kw_only=False, metavar="A"
    )
    model: Model = option("The model that is compared with it: a folder or a Hub id.", kw_only=False, metavar="B")
    lens: bool = option(
        "Also compare what each model's own head makes of the states that leave every block (logit lens).",
        default=False,
        group=MEASURE,
    )
    plot: File = option("Also write an HTML page with every figure drawn.", default=None, metavar="FILE")


class CalibrateOptions(OutputOptions, ImageOptions, CalibrationOptions, SourceOptions):
    """What to measure statistics of."""

    group = MEASURE
    output: Place = option("Folder of statistics to write.", flags=("-o", "--output"), metavar="STATS", group=OUTPUT)
    collect: Listed = option(
        "Kinds of statistics. moments: vectors only, enough for scores and bias compensation. gram: also the Gram "
        "matrix of every consumer's input, for rotation, ridge and the other closed forms. logits: moments of queries "
        "and keys, to prune q and k. centred: these also with keys less their mean over each sample, for recipes with "
        "centre_keys. rotary: moments of rotary pairs, for recipes that prune them. linears: vectors, and with gram "
        "Gram matrices, of the inputs of all other linear layers, for masks. fisher: how errors of every layer change "
        "the model's output, by its gradients on 8 windows or 32 images, for recipes with allocation least-error "
        "(best-uniform, best). effects: the same, measured by pruning each layer alone, about 3 x blocks^2 more block "
        "runs, for small models. queries, values: with fisher and effects, the same of query heads inside KV groups "
        "and of value directions. taylor: importances of units by gradients of the loss on all windows, about 5 more "
        "runs of each block, for the llm-pruner recipes. [default: all that the model's family can use, except "
        "centred, rotary, queries, values and taylor; effects only up to 12 blocks]",
        default=None,
        metavar="KIND[,KIND...]",
    )
    active_above: float = option(
        "Absolute value above which an input of a projection counts as active: for the score active-probability, and "
        "for the share of active inputs in reports.",
        default=1e-6,
        ge=0,
    )
    shard: str | None = option(
        "Measure only the I-th of N equal shares of the samples, so that several machines can share the work. "
        "`ckpt-prune statistics add` adds the shards.",
        default=None,
        metavar="I/N",
        group=DATA,
    )
    dry_run: bool = option(
        "Check everything, and print what would be measured, its time and memory; measure and write nothing.",
        default=False,
        group=OUTPUT,
    )


class ConvertOptions(OutputOptions):
    """What to convert."""

    model: Folder = option("Folder of a model, a Hub id, or a GGUF file.", kw_only=False)


class QuantizeOptions(ResumeOptions):
    """What to quantise, how, and into what."""

    model: Model = option("Folder of a model, or a Hub id.", kw_only=False)
    format: Literal["int8", "int4"] = option("Type that weights are stored in.", group=ROUNDING)
    group_size: Annotated[
        Accepts[str | int | None, str | None],
        BeforeValidator(lambda size: size if size is None else str(size)),
    ] = option(
        "Columns that share a scale: 32, 64 or 128, or channel for whole rows. [default: channel for int8; for int4 "
        "the largest that divides every weight]",
        default=None,
        metavar="N|channel",
        group=ROUNDING,
    )
    statistics: StatisticsFolder = option(
        "Statistics of MODEL (`ckpt-prune calibrate MODEL --collect moments,gram,linears`): round by GPTQ, so that "
        "later columns make up for earlier ones, instead of to the nearest.",
        default=None,
        metavar="STATS",
        group=ROUNDING,
    )


class PushOptions(PublicOptions):
    """What to share, and where."""

    folder: Folder = option("Folder of an output of this tool.", kw_only=False, metavar="OUT")
    repo: str = option("Repository on the Hub, ORG/NAME. It is made if there is none.", kw_only=False)
    overwrite: bool = option(
        "Replace what this tool pushed to REPO before. Files that it did not push stay.", default=False
    )
    base_model: str | None = option(
        "Hub id of the dense model, for the card, if OUT does not say it.",
        default=None,
        pattern=r"^[\w.-]+/[\w.-]+$",
        metavar="ID",
        group=CARD,
    )
    license: str | None = option(
        "Licence for the card, instead of that of the dense model's card.",
        default=None,
        pattern=r"^[\w.-]+$",
        metavar="ID",
        group=CARD,
    )
    evaluation: Strings = option(
        "Figures for the card and its model-index: the name of the data, and a file with what `evaluate OUT --json` "
        "printed. May be repeated.",
        default=(),
        metavar="NAME=FILE",
        group=CARD,
    )
    dry_run: bool = option(
        "Check everything, verify OUT, and list files and bytes; upload nothing. It asks the Hub whether REPO can be "
        "written, so it needs a token.",
        default=False,
    )


class EvaluateOptions(SpreadOptions, EvaluationOptions, DeviceOptions, TrustOptions):
    """What to measure, and compared with what."""

    group = MEASURE
    model: GraphOrModel = option(
        "Folder of a model, a Hub id, or an ONNX graph next to its config and tokenizer or image processor.",
        kw_only=False,
    )
    against: Annotated[
        Accepts[AnyModel | None, str | None], BeforeValidator(path_of), AfterValidator(_check_graph_or_model)
    ] = option(
        "A reference, usually the dense model: both are measured, and the KL divergence between them.",
        default=None,
        metavar="MODEL2",
        group=MODEL,
    )
    probe: Literal["knn", "linear"] | None = option(
        "With --images: how well the model's features, without a head, tell the classes apart, by 20 nearest "
        "neighbours or by ridge regression.",
        default=None,
    )
    patch_head: File = option(
        "With --images and --label-maps: a linear head on every patch, a safetensors file with weight, perhaps bias "
        "and a batch norm (bn.*). It gives classes (segmentation) or one number (depth).",
        default=None,
        metavar="FILE",
    )
    label_maps: File = option(
        "For --patch-head: folder with a PNG for each image, of its size and stem; 255 is no class, for depth 0 is no "
        "number.",
        default=None,
        metavar="DIR",
    )
    tasks: Annotated[
        Accepts[AnyPath | Sequence[AnyPath] | None, str | None],
        BeforeValidator(lambda tasks: None if tasks == () else with_commas(tasks)),
    ] = option(
        "Files of multiple-choice items (.jsonl), or names of lm-eval tasks (needs the extra eval). For a model with a "
        "sequence-classification head: files of labelled texts, or tasks of GLUE: glue:sst2, FOLDER/glue:mrpc. May be "
        "repeated.",
        default=None,
        metavar="T[,T...]",
        several=True,
    )
    include_path: File = option("For --tasks: folder with lm-eval task files of your own.", default=None, metavar="DIR")
    generate: Strings = option(
        "Show what the model writes after PROMPT, greedily. May be repeated.", default=(), metavar="PROMPT"
    )
    generate_tokens: int = option("Tokens to generate after each prompt, at most.", default=64, ge=1)
    dry_run: bool = option(
        "With --device-map: print where the parts of the models would go, from their configs, and load nothing.",
        default=False,
        group=MACHINE,
    )


class InspectOptions(OpeningOptions):
    """What to describe."""

    group = RECIPE
    model: Model = option("Folder of a model, which may hold only a config.json, or a Hub id.", kw_only=False)
    ratios: Listed = option(
        "Also print the size after dropping these shares of the units of the recipe's spaces.",
        default=None,
        flags=("--ratio",),
        metavar="R[,R...]",
        group=SIZE,
    )
    recipe: AnyFolder = option(
        "Recipe whose spaces and rounding --ratio applies to: rcpu drops heads and MLP columns, corp dimensions of q "
        "and k and MLP columns. Without --ratio, the size by the recipe's own ratios is printed. [default: rcpu]",
        default=None,
        metavar="R",
    )
    sparsity: bool = option(
        "Also count the zeros of the linear weights, and which of 1:4, 2:4 and 4:8 they hold. Reads all weights.",
        default=False,
        group=MEASURE,
    )


class DenseOptions(Options):
    """A second model that a graph is compared with."""

    group = MEASURE
    dense: AnyFolder = option(
        "A dense model: also measure what the graph loses of the task's metric against it.",
        default=None,
        metavar="MODEL",
    )
    max_loss_dense: Accepts[float | str | None, Ratio | None] = option(
        "What the task's metric may lose against --dense: 0.01 or 1%. [default: it is only measured]",
        default=None,
        gt=0,
    )


class ExportOptions(
    OutputOptions, GraphSettings, DenseOptions, ProofOptions, ProviderOptions, SpreadOptions, TrustOptions
):
    """What to export, and into what."""

    model: Model = option("Folder of a model, or a Hub id.", kw_only=False)
    format: Literal["onnx", "gguf"] = option(
        "onnx: a graph for onnxruntime, in a folder. gguf: a file for llama.cpp, whose name ends in .gguf.",
        default="onnx",
        group=MODEL,
    )
    type: GgufType | None = option(
        "Type of the matrices of a GGUF file; norms and biases are float32. [default: that of the checkpoint]",
        default=None,
        group=GRAPH,
    )
    proof: bool = option(
        "Compare the graph in onnxruntime, or the file in llama.cpp, with PyTorch before it takes its place.",
        default=True,
        flags=("--validate",),
        group=MEASURE,
    )

    @model_validator(mode="after")
    def _check_format(self) -> "ExportOptions":
        if self.format == "onnx" and self.type is not None:
            raise ValueError("--type goes with --format gguf; a graph has --dtype")
        names = (*GraphSettings.model_fields, *DenseOptions.model_fields, "provider")
        asked = [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
        if self.format == "gguf" and asked:
            raise ValueError(f"--{asked[0].replace('_', '-')} does not go with --format gguf")
        return self


class ValidateOptions(DenseOptions, ProofOptions, ProviderOptions, SpreadOptions, TrustOptions):
    """What to compare, on what, and how strictly."""

    group = MEASURE
    folder: Folder = option("Folder that `ckpt-prune export` wrote, or a GGUF file.", kw_only=False, metavar="DIR")
    runtime: Literal["onnxruntime", "llama.cpp"] | None = option(
        "What runs DIR. [default: llama.cpp for a GGUF file, else onnxruntime]", default=None
    )
    against: OtherModel = option(
        "The checkpoint that DIR was exported from; needed for GGUF. [default: the one that DIR lies in, or next to]",
        default=None,
        metavar="MODEL",
        group=MODEL,
    )
    metric_only: bool = option(
        "Only measure what the graph loses of the task's metric, and write nothing. DIR may be a graph of another "
        "tool; --max-loss says what it may lose.",
        default=False,
    )
    max_loss: Accepts[float | str | None, Ratio | None] = option(
        "What rounding may have cost of the task's metric: 0.01 or 1%. [default: 2% for int8, 10% for int4 and q4f16]",
        default=None,
        gt=0,
        lt=1,
    )
    tolerance: float | None = option(
        "Largest difference that passes, as a share of the largest output; means may differ by a tenth of it. "
        "[default: 1e-4 for fp32, 2e-2 for fp16]",
        default=None,
        gt=0,
    )


class VerifyOptions(SpreadOptions):
    """What to verify."""

    group = MODEL
    folder: Folder = option("Folder of an output of this tool, or of an exported graph.", kw_only=False, metavar="OUT")
    against: OtherModel = option(
        "The dense model: also check that kept rows, or weights that a mask left, are its own, bit for bit. For an "
        "exported folder: the model that it was exported from.",
        default=None,
        metavar="MODEL",
    )
    statistics: StatisticsFolder = option(
        "What OUT was made from: with --against also compute some blocks again, chosen at random, and compare them.",
        default=None,
        metavar="STATS",
    )
    family: File = same_option(OpeningOptions, "family")


class BenchmarkOptions(SpreadOptions, DeviceOptions, TrustOptions):
    """What to time, and how."""

    group = TIMING
    a: Model = option("The reference, usually the dense model: a folder, a Hub id or an exported graph.", kw_only=False)
    b: Model = option("The model that is compared with it.", kw_only=False)
    onnx: bool = option("Time both in onnxruntime as well.", default=False)
    batches: Annotated[Accepts[str | Sequence[int], str], BeforeValidator(with_commas)] = option(
        "Texts or images at once.", default="1", flags=("--batch",), metavar="N[,N...]"
    )
    tokens: int | None = option(
        "Tokens of each text. [default: 128, or what the shorter context has room for]", default=None, ge=1
    )
    generate: int | None = option(
        "Tokens to generate after the text, with the cache; 0 for none. [default: 16 if both models can, less in a "
        "short context]",
        default=None,
        ge=0,
    )
    rounds: int = option("Times that each model is timed.", default=30, ge=1)
    warmup: int = option("Rounds before them, which do not count.", default=3, ge=0)
    threads: int | None = option("Threads of each model. [default: as many as PyTorch takes]", default=None, ge=1)
    provider: Literal["cpu", "cuda"] | None = option(
        "Device that onnxruntime runs on. [default: cuda if --device is, else cpu]", default=None, group=MACHINE
    )
    optimize: Literal["none", "cpu", "cuda"] | None = option(
        "Fuse graphs made here for this provider. [default: none; a graph in the checkpoint's folder onnx as it is]",
        default=None,
        group=GRAPH,
    )
    dtype: GraphType | None = option(
        "Type of graphs made here or taken from the checkpoint's folder onnx; PyTorch computes in fp32, or in fp16 if "
        "that is given. int8, int4 and q4f16 round both models alike, to time them. [default: fp32; a graph in the "
        "checkpoint's folder onnx as it is]",
        default=None,
        group=GRAPH,
    )
    two_four: bool = option(
        "Also time checkpoints whose weights hold 2:4 with torch's semi-structured kernels. This needs an NVIDIA GPU "
        "of compute capability 8.0 or later and --dtype fp16; elsewhere a line says why it was left out.",
        default=False,
    )


class ReportOptions(OverwriteOptions):
    """Which report to write as a page."""

    source: Accepts[AnyPath, Path] = option(
        "Folder that `ckpt-prune prune` or `recover` wrote, or a plan file.", kw_only=False, metavar="OUT"
    )
    output: File = option(
        "HTML file to write. [default: OUT.report.html]", default=None, flags=("-o", "--output"), metavar="FILE"
    )


class DemoOptions(DeviceOptions):
    """Where the demo runs, and what it keeps."""

    output: File = option(
        "Keep the pruned checkpoints in this new folder.",
        default=None,
        flags=("-o", "--output"),
        metavar="DIR",
        group=OUTPUT,
    )


class RecipeListOptions(Options):
    """Which recipes to list."""

    papers: bool = option("List the recipes of papers, and those that compare one choice.", default=False)
    all: bool = option("List every shipped recipe.", default=False)


class RecipeNameOptions(Options):
    """Which recipe."""

    name: str = option(f"{RECIPE_NAME}.", kw_only=False)


class RecipeCopyOptions(RecipeNameOptions):
    """Which recipe to copy, and where."""

    destination: File = option("File or folder to write. [default: NAME.yaml here]", default=None, kw_only=False)


class RecipePushOptions(PublicOptions):
    """Which recipe to share, and where."""

    file: str = option("A recipe file.", kw_only=False)
    repo: str = option("Repository on the Hub, ORG/NAME. It is made if there is none.", kw_only=False)
    overwrite: bool = option("Replace a recipe of this name in REPO.", default=False)


class StatisticsShowOptions(Options):
    """Which statistics to show."""

    folder: Accepts[AnyPath, Path] = option("Folder of statistics.", kw_only=False)


class StatisticsAddOptions(OutputOptions):
    """Which statistics to add."""

    folders: Texts = option("Two or more folders of statistics.", kw_only=False, metavar="A B...")
