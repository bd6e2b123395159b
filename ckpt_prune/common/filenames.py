"""Names of files that several rooms write or look for."""

REPORT = "ckpt_prune.json"
"""Report of an output: how it was made, which units it keeps, errors."""

RECIPE = "ckpt_prune_recipe.yaml"
"""The recipe of an output as it was run; `--recipe OUT` takes it."""

ROTATIONS = "rotations.st"
"""Rotations of an output, in the safetensors format, float32: R1 as `residual` (of one block or of all), R2 as `heads`.

The suffix is not .safetensors, because loaders take every such file for weights.
"""
CONVERSION_RECORD = "ckpt_prune_converted.json"
"""Record of a folder that `convert` wrote: its source."""

QUANTISED_RECORD = "ckpt_prune_quantised.json"
"""Record of a folder that `quantize` wrote: its source, settings and digests."""

PRUNED_ELSEWHERE = "pruned elsewhere"
"""Recipe name in the report of a model that another tool pruned and `recover` recovered."""

GRAPH_RECORD = "ckpt_prune_onnx.json"
"""Record of an exported folder: its source and settings, names, types and shapes, digests."""

FRONTIER_RECORD = "frontier.json"
"""Record of a folder that `frontier` wrote: its source, and all that it measured."""

FRONTIER_FILE, FRONTIER_COMMANDS, FRONTIER_PRUNED, FRONTIER_PAGE = "model.gguf", "make.sh", "pruned", "frontier.html"
"""Other names there: the best GGUF file, commands that make it again, the pruned model that these write, the page."""

VALIDATION = "validation.json"
"""Result of comparing an exported graph with PyTorch."""

GENAI = "genai_config.json"
"""Configuration that onnxruntime-genai reads in an exported folder."""

EXPORT_ERROR = ".export-error.log"
"""Ending of the file beside an export that holds the log if a model could not be traced."""


def partial_name(name: str) -> str:
    """Return the name under which a file grows next to its place."""
    return f".{name}.ckpt_prune-partial"


ADAPTER_FOLDER = "adapter"
"""Folder in an output where the LoRA adapter goes that is merged into its weights."""
ADAPTER_PLACE = f"{ADAPTER_FOLDER}/adapter_config.json"

GRAPH_FOLDER = "onnx"
"""Folder in an output where a recipe's graph goes, as in repositories on the Hub."""
