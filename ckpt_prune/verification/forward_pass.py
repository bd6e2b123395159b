"""Whether a source's own forward pass is what this tool computes of it block by block.

Everything is measured on hidden states that go through a model's blocks one at a time. What its class does between
them, or a switch of its config that the family's description does not know, would be missing in all of it, silently.
So before anything is measured, the first tokens of one sample go through transformers' own model, and block by block.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.skeleton import base_of
from ckpt_prune.calibration.readout import outputs_of
from ckpt_prune.calibration.samples import Part, Samples, TokenWindows, as_input
from ckpt_prune.calibration.streams import data_refused, stream_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.memory import available_bytes
from ckpt_prune.evaluation.whole_model import load_model, read_config
from ckpt_prune.parallel.group import process_group

TOKENS = 64
"""Of the one window that is compared."""
SHARE = 8
"""A model is compared if it takes at most this part of the memory that is free."""
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2**-6}
"""Type that both are run in → largest ‖ours − theirs‖ / ‖theirs‖. Of every class of every family they are the same to
the last bit, or to 6e-7 where experts and heads add up in another order."""
_PASSED: set[tuple[str, str]] = set()
"""Fingerprints and classes of the models that this process has compared."""


def check_forward(model: Model, samples: Samples, say: Callable[[str], None]) -> None:
    """Refuse a model whose own forward pass differs from what its blocks compute one by one.

    On the CPU, in the checkpoint's own type, float16 in float32. Weights that are stored in that type are mapped from
    their files, which takes none of the memory that others need; the others take their size.

    Args:
        model: the dense model, whose tensors are those that its config asks for.
        samples: at least one.
        say: told in a line why it was not compared, where it is too large, a part of another, or has code of its own.

    Raises:
        UserError: they differ, or transformers cannot load it.
    """
    key = (model.checkpoint.fingerprint, model.family.architecture)
    if key in _PASSED:
        return
    process_group().on_first(lambda: _check(model, samples, say))
    _PASSED.add(key)


def _check(model: Model, samples: Samples, say: Callable[[str], None]) -> None:
    dtype = _dtype(model)
    if (why := _not_compared(model, dtype)) is not None:
        say(f"not compared with transformers' own forward pass: {why}")
        return
    one = _short(samples)
    theirs = _whole(model, one, dtype)
    ours = _block_by_block(model, one, dtype)
    for place, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        apart = _relative(expected, found)
        if apart is None or apart <= BOUNDS[dtype]:
            continue
        kind = "logits" if model.family.gives_logits else "last hidden states"
        what = f"what enters block {place}" if place < model.blocks else f"its {kind}"
        raise UserError(
            f"{model.checkpoint.path}: transformers' own forward pass and its blocks run one by one do not compute the "
            f"same: {what} differs by {apart:.2g} of its size on {one.tokens} tokens (at most {BOUNDS[dtype]:g}); "
            f"{model.family.architecture} does something that the description of {model.family.model_type} does not "
            "say, perhaps by a setting in config.json, so this model can be neither measured nor pruned"
        )


def _dtype(model: Model) -> torch.dtype:
    """The type that both are run in."""
    # Few operations of a CPU know float16; and where a router's choices are nearly even, rounding decides.
    narrow = model.dtype not in BOUNDS or model.family.experts is not None
    return torch.float32 if narrow else model.dtype


def _not_compared(model: Model, dtype: torch.dtype) -> str | None:
    """Why a model is not compared, or None."""
    checkpoint = model.checkpoint
    if checkpoint.within is not None:
        return "it is a part of another model"
    if "auto_map" in read_config(checkpoint.path):
        return "it brings code of its own, which is not run"
    size = sum(info.numel for info in checkpoint.tensors.values()) * dtype.itemsize
    free = available_bytes()
    if free is None or size <= free // SHARE:
        return None
    return f"its {human_bytes(size)} are more than a part in {SHARE} of the {human_bytes(free)} of memory that are free"


def _short(samples: Samples) -> Samples:
    """The first tokens of the first sample; an image is taken whole."""
    batch = samples.batch(slice(0, 1))
    if batch.keys() == {"input_ids"}:
        return TokenWindows(batch["input_ids"][:, :TOKENS])
    return Part(samples, 0, 1)


@torch.no_grad()
def _whole(model: Model, one: Samples, dtype: torch.dtype) -> list[Tensor]:
    """What enters every block of transformers' own model, and what it returns."""
    family, checkpoint = model.family, model.checkpoint
    # Of several classes for one task an Auto class would take its first.
    whole: Any = load_model(checkpoint.path, device="cpu", dtype=dtype, auto=family.architecture, whole=True)
    entering: list[Tensor] = []

    def enters(_module: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        entering.append((given[0] if given else named["hidden_states"]).clone())

    for layer in whole.get_submodule(family.layers):
        layer.register_forward_pre_hook(enters, with_kwargs=True)
    with data_refused():
        found = (whole if family.gives_logits else base_of(whole))(**_inputs(model, one, dtype), return_dict=True)
    return [*entering, *outputs_of(found, logits=family.gives_logits)]


@torch.no_grad()
def _block_by_block(model: Model, one: Samples, dtype: torch.dtype) -> list[Tensor]:
    """The same as this tool computes it."""
    stream = stream_of(model, one, device=torch.device("cpu"), compute_dtype=dtype)
    found = []
    for block in range(model.blocks):
        found.append(stream.states.clone())  # which is written over
        stream.advance(block, model.read_block(block))
    return [*found, *stream.readout().outputs(one.batch(slice(0, 1)), stream.states)]


def _inputs(model: Model, one: Samples, dtype: torch.dtype) -> dict[str, Any]:
    inputs: dict[str, Any] = dict(as_input(one.batch(slice(0, 1)), torch.device("cpu"), dtype))
    return inputs | ({"use_cache": False} if model.family.modality == "text" else {})


def _relative(expected: Tensor, found: Tensor) -> float | None:
    """‖found − expected‖ / ‖expected‖; None where the model itself overflows, which is said where it is measured."""
    wide, own = expected.double().flatten(), found.double().flatten()
    if not all_finite(wide):
        return None
    if wide.shape != own.shape or not all_finite(own):
        return float("inf")
    return float((own - wide).norm() / wide.norm().clamp_min(torch.finfo(torch.float64).tiny))
