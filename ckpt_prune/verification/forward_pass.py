"""Whether a source's own forward pass is what this tool computes of it block by block.

Everything is measured on hidden states that go through a model's blocks one at a time. What its class does between
them, or a switch of its config that the family's description does not know, would be missing in all of it, silently.
So before anything is measured, the first tokens of one sample go through transformers' own model, and block by block.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.memory import available_bytes
from ckpt_prune.evaluation.whole_model import load_model, read_config
from ckpt_prune.measure.samples.samples import SampleRange, Samples, TokenWindows, move_batch
from ckpt_prune.measure.streams.hidden_stream import open_stream, refuse_data
from ckpt_prune.measure.streams.readout import select_outputs
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import base_model_of
from ckpt_prune.parallel.group import process_group

TOKENS = 64
"""Tokens of the one window that is compared."""
SHARE = 8
"""A model is compared if it takes at most this part of the memory that is free."""
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2**-6}
"""Type that both are run in → largest ‖ours − theirs‖ / ‖theirs‖. In every class of every family they are the same to
the last bit, or to 6e-7 if experts and heads add up in another order."""
_PASSED: set[tuple[str, str, str]] = set()
"""Fingerprints, classes and blocks of the models that this process has compared."""


def check_forward(model: Model, samples: Samples, say: Callable[[str], None]) -> None:
    """Refuse a model whose own forward pass differs from what its blocks compute one by one.

    On the CPU, in the checkpoint's own type, float16 in float32. Weights that are stored in that type are mapped from
    their files, which takes none of the memory that others need; the others take their size. `say` gets a line with the
    reason if the model was not compared.
    """
    key = (model.checkpoint.fingerprint, model.family.architecture, model.family.layers)
    if key in _PASSED:
        return
    process_group().on_first(lambda: _check(model, samples, say))
    _PASSED.add(key)


def _check(model: Model, samples: Samples, say: Callable[[str], None]) -> None:
    # Few operations of a CPU know float16, and if a router's choices are nearly even, rounding decides.
    narrow = model.dtype not in BOUNDS or model.family.experts is not None
    dtype = torch.float32 if narrow else model.dtype
    if (reason := _find_obstacle(model, dtype)) is not None:
        say(f"not compared with transformers' own forward pass: {reason}")
        return
    sample = _shorten(samples)
    theirs = _run_whole(model, sample, dtype)
    try:
        ours = _run_block_by_block(model, sample, dtype)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as failure:
        if model.family.found is None:
            raise
        # Nobody has looked at this class: it may need what its model does beside running its blocks.
        raise UserError(
            f"{model.checkpoint.path}: transformers runs this model, but its blocks cannot be run one by one "
            f"({one_line(failure)}): {model.family.architecture} does something to them that is not known here, so it "
            "can be neither measured nor pruned"
        ) from failure
    for place, (expected, states) in enumerate(zip(theirs, ours, strict=True)):
        error = relative_error(expected, states)
        if error is None or error <= BOUNDS[dtype]:
            continue
        outputs = "logits" if model.family.gives_logits else "last hidden states"
        what = f"what enters block {place}" if place < model.blocks else f"its {outputs}"
        raise UserError(
            f"{model.checkpoint.path}: transformers' own forward pass and its blocks run one by one do not compute the "
            f"same: {what} differs by {error:.2g} of its size on {sample.tokens} tokens (at most {BOUNDS[dtype]:g}); "
            f"{model.family.architecture} does something that the description of {model.family.model_type} does not "
            "say, perhaps by a setting in config.json, so this model can be neither measured nor pruned"
        )


def _find_obstacle(model: Model, dtype: torch.dtype) -> str | None:
    """Say why a model cannot be compared, or return None."""
    checkpoint = model.checkpoint
    if checkpoint.within is not None and not model.family.is_stack:
        return "it is a part of another model"
    if checkpoint.within is not None and checkpoint.within.other_prefixes and (checkpoint.path / REPORT).is_file():
        return "another stack is pruned, and no class has two widths"
    if checkpoint.adapter is not None:
        return "an adapter is merged into it as it is read"
    if "auto_map" in read_config(checkpoint.path):
        return "it brings code of its own, which is not run"
    size = sum(info.numel for info in checkpoint.tensors.values()) * dtype.itemsize
    free = available_bytes()
    if free is None or size <= free // SHARE:
        return None
    return f"its {human_bytes(size)} are more than a part in {SHARE} of the {human_bytes(free)} of memory that are free"


def _shorten(samples: Samples) -> Samples:
    """Return the first tokens of the first sample; an image is taken whole."""
    batch = samples.batch(slice(0, 1))
    if batch.keys() == {"input_ids"}:
        return TokenWindows(batch["input_ids"][:, :TOKENS])
    return SampleRange(samples, 0, 1)


@torch.no_grad()
def _run_whole(model: Model, sample: Samples, dtype: torch.dtype) -> list[Tensor]:
    """Return what enters every block of transformers' own model, and what it returns."""
    family = model.family
    # If several classes are for one task, an Auto class would take its first.
    whole: Any = load_model(model.checkpoint.whole, device="cpu", dtype=dtype, auto=family.architecture, whole=True)
    states: list[Tensor] = []

    def record(_module: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        states.append((arguments[0] if arguments else named["hidden_states"]).clone())

    for layer in whole.get_submodule(family.layers):
        layer.register_forward_pre_hook(record, with_kwargs=True)
    inputs: dict[str, Any] = dict(move_batch(sample.batch(slice(0, 1)), torch.device("cpu"), dtype))
    if family.reads_tokens:
        inputs["use_cache"] = False
    with refuse_data():
        outputs = (whole if family.gives_logits else base_model_of(whole))(**inputs, return_dict=True)
    return [*states, *select_outputs(outputs, logits=family.gives_logits)]


@torch.no_grad()
def _run_block_by_block(model: Model, sample: Samples, dtype: torch.dtype) -> list[Tensor]:
    stream = open_stream(model, sample, device=torch.device("cpu"), compute_dtype=dtype)
    states = []
    for block in range(model.blocks):
        states.append(stream.states.clone())  # the stream writes over them
        stream.advance(block, model.read_block(block))
    return [*states, *stream.readout().outputs(sample.batch(slice(0, 1)), stream.states)]


def relative_error(expected: Tensor, states: Tensor) -> float | None:
    """Return ‖states − expected‖ / ‖expected‖; None if the model itself overflows, which its measuring refuses."""
    expected, states = expected.double().flatten(), states.double().flatten()
    if not all_finite(expected):
        return None
    if expected.shape != states.shape or not all_finite(states):
        return float("inf")
    return float((states - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny))
