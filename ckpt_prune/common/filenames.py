"""Names of files that this tool writes and several of its rooms look for."""

REPORT = "ckpt_prune.json"
"""An output's report: how it was made, kept units and errors."""

ROTATIONS = "rotations.st"
"""An output's rotations, in the safetensors format, float32: R1 as `residual`, of one block or of all, R2 as `heads`.

Not under that format's usual suffix: loaders take every file that has it for weights.
"""
CONVERSION_RECORD = "ckpt_prune_converted.json"
"""What a folder that `convert` wrote was made from."""

QUANTISED_RECORD = "ckpt_prune_quantised.json"
"""The record of a folder that `quantize` wrote: what it was made from and how, digests."""

PRUNED_ELSEWHERE = "pruned elsewhere"
"""Stands for the recipe's name in the report of what another tool pruned and this one recovered."""

GRAPH_RECORD = "ckpt_prune_onnx.json"
"""An exported folder's record: what it was made from and how, names, types and shapes, digests."""

VALIDATION = "validation.json"
"""What came out when an exported graph was compared with PyTorch."""

GENAI = "genai_config.json"
"""What onnxruntime-genai reads of an exported folder."""

EXPORT_ERROR = ".export-error.log"
"""Ending of the file beside an export that has all that was said where a model could not be traced."""

GRAPH_FOLDER = "onnx"
"""Folder in an output that a recipe's export goes to, as in the Hub's repositories."""
