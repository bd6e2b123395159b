"""Name the command that makes a model as small by fewer bits: at every size that bits reach, they lose less."""

import shlex
from contextlib import suppress
from importlib.util import find_spec
from math import prod

from ckpt_prune.checkpoint.side_files import reader_files
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.graph_types import GgufType
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.model.model import Model
from ckpt_prune.runner.column_budgets import BY_BUDGET
from ckpt_prune.stages.export.keys import Export
from ckpt_prune.stages.quantize.choosing import linear_weights
from ckpt_prune.stages.spaces.size_search import asked_size_of

_EIGHT, _FOUR = 8.5, 4.85
"""Bits of a weight with its scales: of q8_0, and of q4_k_m, which keeps some weights in more."""
_GRAPHS = {"onnxruntime", "genai", "transformers.js", "openvino"}
_FEW = "fewer bits lose less than pruning at every size that they reach"
_FOR = "pruning is for latency, for memory where a runtime takes float types alone, and for sizes below those of 4 bits"


def fewer_bits_line(prepared: Prepared, *, is_planned: bool = False) -> str | None:
    """Name the command that makes a model no larger than this one and loses less.

    None if there is none: the output is smaller than 4 bits make it, is rounded itself, was made for its latency or
    FLOPs, is masked, is a part of a model, or will be rounded by a budget, which has chosen to prune it first. Nor of a
    model that has few bits, nor of a mixture for runtimes of checkpoints, whose experts `quantize` does not round.

    Args:
        is_planned: of a dry run, which reads no tokenizer: the size of a GGUF file is then about that of its weights.
    """
    recipe, checkpoint, size = prepared.whole.recipe, prepared.job.model.checkpoint, asked_size_of(prepared)
    export = recipe.get(Export)
    is_rounded = export is not None and not {"f32", "f16", "bf16", "fp32", "fp16"}.issuperset(export.dtype)
    changes = {change for keys in recipe.stages for change in keys.changes(recipe, set())}
    if changes & {"zeros", "few bits"} or is_rounded or recipe.name == BY_BUDGET or checkpoint.within is not None:
        return None
    if size is not None and size.kind in ("latency", "flops"):
        return None
    if checkpoint.quantisation is not None or (_is_checkpoint(prepared) and prepared.job.model.family.experts):
        return None
    before, after = prepared.before, prepared.output.cost.bytes
    rounded, kept = before.parameters, 0
    if _is_checkpoint(prepared):  # its embedding and head stay
        weights = linear_weights(prepared.job.model).values()
        rounded = sum(prod(shape) for _, shape in weights)
        kept = before.bytes - sum(prod(shape) * dtype.itemsize for dtype, shape in weights)
    sizes = {bits: kept + round(rounded * bits / 8) for bits in (_EIGHT, _FOUR)}
    bits = next((bits for bits, reached in sizes.items() if reached <= after), None)
    if bits is None or after >= before.bytes:
        return None
    model = shlex.quote(checkpoint.name if "/" in checkpoint.name else str(checkpoint.path))
    command, file = _command(prepared, eight=bits == _EIGHT, is_planned=is_planned)
    reached = after if _is_checkpoint(prepared) and bits == _FOUR else sizes[bits]
    tokenizer = sum(path.stat().st_size for path in reader_files(checkpoint).values())
    sides = human_bytes(reached + tokenizer if file is None else file), human_bytes(after + tokenizer)
    each = ", both with the tokenizer" if tokenizer else ""
    return f"{_FEW}: `{command.format(model=model)}` takes about {sides[0]}, this {sides[1]}{each}; {_FOR}"


def _runtimes(prepared: Prepared) -> set[str]:
    return {name.partition(":")[0] for name in prepared.whole.recipe.runs_on or ()}


def _is_checkpoint(prepared: Prepared) -> bool:
    return prepared.job.model.family.causal and bool(_runtimes(prepared) & {"vllm", "transformers"})


def _count_file(model: Model, kind: GgufType, *, is_planned: bool) -> int | None:
    """Return the bytes of a model's file; None in a dry run, which does not count them.

    Raises:
        UserError: llama.cpp does not compute the model, or has no such tokenizer, which a dry run does not read.
    """
    if is_planned:
        from ckpt_prune.gguf.layout import lay_out

        lay_out(model, kind)
        return None
    from ckpt_prune.gguf.file_plan import FilePlanner

    return FilePlanner(model).plan(kind).bytes


def _command(prepared: Prepared, *, eight: bool, is_planned: bool) -> tuple[str, int | None]:
    """Return a command, and the bytes of the GGUF file that it writes, if it writes one and they are counted."""
    family, runs_on = prepared.job.model.family, _runtimes(prepared)
    if _is_checkpoint(prepared):
        few = "int8" if eight else f"int4 --target-bytes {prepared.output.cost.bytes} --text FILE"
        return f"ckpt-prune quantize {{model}} --format {few} -o OUT", None
    kind: GgufType = "q8_0" if eight else "q4_k_m"
    if find_spec("gguf") and (family.causal or "llama.cpp" in runs_on) and not runs_on & _GRAPHS:
        with suppress(UserError):
            size = _count_file(prepared.job.model, kind, is_planned=is_planned)
            return f"ckpt-prune export {{model}} --format gguf --dtype {kind} -o OUT.gguf", size
    return f"ckpt-prune export {{model}} --dtype {'int8' if eight else 'int4'} -o OUT", None
