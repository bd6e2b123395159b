"""Hidden states of calibration windows, carried through a model one block at a time."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_prune.architectures.family import SpaceName
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.moments import Moments

TOKENS_PER_BATCH = 4096
"""Tokens that go through a block together. Fixed, so that a resumed run repeats the same arithmetic."""

ReadTensors = Callable[[list[str]], dict[str, Tensor]]


class _LastBlockReachedError(Exception):
    """Raised by the last recorder to stop the model before its final norm."""


def fold_slices(windows: int, folds: int) -> list[slice]:
    """Cut windows into `folds` contiguous runs of nearly equal length."""
    return [slice(windows * f // folds, windows * (f + 1) // folds) for f in range(folds)]


class HiddenStream:
    """Hidden states entering the next block, for every calibration window.

    The embedding, masks and position embeddings come from the model's own forward pass, run once with its blocks
    replaced by recorders; the blocks are then the model's own, run with what it would have passed them, cache off.

    Args:
        factory: builds the blocks.
        read: reads on-disk tensors by name.
        windows: token ids, (N, T) int64.
        folds: windows are cut into this many contiguous folds.
    """

    def __init__(self, factory: BlockFactory, read: ReadTensors, windows: Tensor, *, folds: int = 1) -> None:
        self.factory, self.windows, self.folds = factory, windows, folds
        self._read = read
        per_batch = max(1, TOKENS_PER_BATCH // windows.shape[1])
        # No batch straddles two folds, so each fold's moments are sums over whole batches.
        self._batches: list[tuple[int, slice]] = [
            (fold, slice(start, min(start + per_batch, run.stop)))
            for fold, run in enumerate(fold_slices(len(windows), folds))
            for start in range(run.start, run.stop, per_batch)
        ]
        self._arguments: dict[int, list[dict[str, Any]]] = {}
        self._states: list[Tensor] = []
        self._enter()

    @torch.inference_mode()
    def _enter(self) -> None:
        family, factory = self.factory.family, self.factory
        model = factory.skeleton
        embedding = model.get_submodule(family.embedding)
        factory.fill(embedding, {"weight": self._read([f"{family.embedding}.weight"])[f"{family.embedding}.weight"]})
        rotary_owner, _, rotary_name = family.rotary.rpartition(".")
        rotary = model.get_submodule(family.rotary)
        # Frequencies are buffers that no checkpoint stores: the module computes them itself, off the meta device.
        with factory.device:
            real: nn.Module = type(rotary)(config=factory.config)
        setattr(model.get_submodule(rotary_owner), rotary_name, real)
        layers: Any = model.get_submodule(family.layers)
        captured: list[dict[str, Any]] = []
        states: list[Tensor] = []

        def recorder(index: int) -> Callable[..., Tensor]:
            def record(hidden_states: Tensor, **kwargs: Any) -> Tensor:
                captured.append(kwargs)
                if index == 0:
                    states.append(hidden_states)
                if index == len(layers) - 1:
                    raise _LastBlockReachedError
                return hidden_states

            return record

        for index, layer in enumerate(layers):
            layer.forward = recorder(index)
        for _, rows in self._batches:
            captured.clear()
            states.clear()
            ids = self.windows[rows].to(factory.device)
            with contextlib.suppress(_LastBlockReachedError):
                model(input_ids=ids, use_cache=False)
            # Windows are full, so what blocks are passed beside hidden states depends on the batch's shape alone.
            self._arguments.setdefault(len(ids), list(captured))
            self._states.append(states[0].cpu())
        for layer in layers:
            del layer.forward
        # The embedding is not needed again.
        embedding.to("meta")

    def _output(self, block: nn.Module, index: int, position: int) -> Tensor:
        """What the block makes of one batch, on the block's device."""
        state = self._states[position].to(self.factory.device)
        output = block(state, **self._arguments[len(state)][index])
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    @torch.inference_mode()
    def observe(
        self, index: int, tensors: Mapping[str, Tensor], gram: Mapping[SpaceName, bool], *, advance: bool = False
    ) -> dict[SpaceName, tuple[Moments, ...]]:
        """Moments at the input of each named space's consumer, a tuple over folds.

        Args:
            index: the block.
            tensors: its on-disk tensors, of any widths.
            gram: spaces to observe, and whether with the Gram.
            advance: also let the block's output become the next block's input.
        """
        block = self.factory.block(index, tensors)
        found: dict[SpaceName, list[Moments]] = {}
        current = 0
        handles = []
        for space, wanted in gram.items():
            consumer = block.get_submodule(self.factory.family.spaces[space].consumer)
            width = int(consumer.weight.shape[1])  # type: ignore[index]
            found[space] = [Moments.zeros(width, gram=wanted, device=self.factory.device) for _ in range(self.folds)]

            def accumulate(_module: nn.Module, args: tuple[Tensor, ...], space: SpaceName = space) -> None:
                found[space][current] = found[space][current].accumulate(args[0])

            handles.append(consumer.register_forward_pre_hook(accumulate))
        for position, (fold, _) in enumerate(self._batches):
            current = fold
            output = self._output(block, index, position)
            if advance:
                self._states[position] = output.cpu()
        for handle in handles:
            handle.remove()
        return {space: tuple(m.to("cpu") for m in folds) for space, folds in found.items()}

    @torch.inference_mode()
    def advance(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the block's output, with these tensors, become the next block's input."""
        block = self.factory.block(index, tensors)
        for position in range(len(self._batches)):
            self._states[position] = self._output(block, index, position).cpu()

    @torch.inference_mode()
    def nll(self) -> float:
        """Mean negative log likelihood in nats per scored token after the last block (METHODS section 7)."""
        family, factory = self.factory.family, self.factory
        model = factory.skeleton
        tied = bool(factory.config.tie_word_embeddings)
        head_name = f"{family.embedding if tied else family.head}.weight"
        tensors = self._read([head_name, f"{family.final_norm}.weight"])
        norm = model.get_submodule(family.final_norm)
        factory.fill(norm, {"weight": tensors[f"{family.final_norm}.weight"]})
        head = tensors[head_name].to(factory.device, factory.dtype)
        loss, tokens = 0.0, 0
        for state, (_, rows) in zip(self._states, self._batches, strict=True):
            for hidden, ids in zip(state, self.windows[rows], strict=True):
                logits = functional.linear(norm(hidden.to(factory.device)), head)[:-1].float()
                targets = ids[1:].to(factory.device)
                loss += functional.cross_entropy(logits, targets, reduction="sum").double().item()
                tokens += len(targets)
        return loss / tokens
