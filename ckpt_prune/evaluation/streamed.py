"""Causal language models that are measured block by block: no more of one than a block, or its head, is in memory."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ckpt_prune.checkpoint.block_thread import read_ahead
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.memory import available_bytes, return_freed_memory
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.kept_states import KeptStates
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.measure.streams.recorders import token_axis
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.containers.checking import check_source
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from ckpt_prune.model.runtimes import Change, changes_of_config

Strip = Callable[[int, slice], Tensor]
"""Number of a window in its batch, and some of its positions → their logits, (positions, vocabulary)."""
_BETWEEN_BLOCKS: set[Change] = {"low rank", "slicing", "rotations"}
"""Changes that blocks alone do not show, or that streams put together anew."""
_STATES_SHARE = 4
"""Hidden states of a model take at most this part of the memory that is free."""


@dataclass(frozen=True)
class StreamedModel:
    """A causal language model on disk, to be run block by block.

    Its logits are never held, nor stored: the hidden states behind its last block are, which are narrower by far, and
    the head makes logits of a strip of positions when these are asked for.
    """

    model: Model
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def open(cls, folder: Path, device: torch.device, dtype: torch.dtype | str) -> "StreamedModel | None":
        """Open the model in a folder, whose weights stay there; None if it has to be loaded whole.

        These are loaded whole: models that no family describes, parts of other models, code that the folder brings,
        outputs with factors or with matrices between their blocks, and models whose tensors and config.json differ.
        transformers then leaves out or makes up some tensors, which is what users get.
        """
        try:
            model = open_model(str(folder), Opening(packed=True))
            check_source(model)
        except UserError:
            return None
        family = model.family
        if not (family.causal and family.gives_logits) or family.auto_class != "AutoModelForCausalLM":
            return None
        if changes_of_config(model.checkpoint.config) & _BETWEEN_BLOCKS:
            return None
        return cls(model, device, model.dtype if isinstance(dtype, str) else dtype)

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @torch.no_grad()
    def read(self, windows: Tensor, work: str, *, keep: bool = False) -> "StreamedLogits":
        """Run all blocks on windows, int64 (windows, window); `work` names it.

        With `keep` that is done once: the states are kept for the next time (kept_states.py).
        """
        model = self.model
        return_freed_memory()
        view = ModelView(model, self.device, container=container_of(model) if model.has_remote_code else None)
        folder, what = Path(tempfile.gettempdir()), "hidden states that memory has no room for"
        allocate = StateMemory(states_limit(), folder, what=what, remedy="fewer --samples")
        stream = view.stream(TokenWindows(windows), self.dtype, allocate=allocate)
        kept = KeptStates(model, windows, self.device, self.dtype) if keep else None
        if kept is not None and kept.load_into(stream.states):
            return StreamedLogits(stream, windows)
        blocks = track(read_ahead(view.block, range(model.blocks)), work, unit="block", total=model.blocks)
        for index, tensors in blocks:
            block = stream.factory.build_block(index, tensors)
            stream.pass_through(block, index, stream.states, stream.states)
        if kept is not None:
            kept.keep(stream.states)
        return StreamedLogits(stream, windows)


def have_room(models: Sequence[StreamedModel]) -> bool:
    """Return whether an accelerator has room for these models whole; it is slower if blocks come and go.

    A CPU is not: what it computes is the same, and takes as long.
    """
    if not models or models[0].device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(models[0].device)
    sizes = (sum(t.numel for t in each.model.checkpoint.tensors.values()) * each.dtype.itemsize for each in models)
    return sum(sizes) <= free // 2  # logits take the rest


def states_limit() -> int:
    """Return the bytes of hidden states that one model holds in memory; the others are mapped from disk."""
    return (available_bytes() or 2**32) // _STATES_SHARE


@dataclass(frozen=True)
class StreamedLogits:
    """Logits of windows, made when they are asked for, by states behind the last block (windows, window, hidden)."""

    stream: HiddenStream
    windows: Tensor

    @cached_property
    def readout(self) -> Readout:
        """The head, which is read once the blocks of all models have run."""
        return self.stream.readout()

    def of_batch(self, rows: slice) -> Strip:
        """Return what makes the logits of some windows."""

        def make(row: int, part: slice) -> Tensor:
            one = slice(rows.start + row, rows.start + row + 1)
            states = self.stream.states[one]
            axis = token_axis(states.shape, self.windows.shape[1])
            cut = states.narrow(axis, part.start, part.stop - part.start)
            logits, *_ = self.readout.outputs({"input_ids": self.windows[one, part]}, cut)
            return logits[0]

        return make
