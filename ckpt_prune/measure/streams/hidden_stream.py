"""Hidden states of calibration windows, carried through a model one block at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_prune.architectures.model import Model
from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.moments.inputs import ACTIVE_THRESHOLD, Moments
from ckpt_prune.measure.moments.kinds import Key, SpaceMoments
from ckpt_prune.measure.moments.pooling import pooled
from ckpt_prune.measure.samples.samples import SampleRange, Samples, move_batch
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.experts import SplitExperts, too_few
from ckpt_prune.measure.streams.modules import ReadTensors, load_module
from ckpt_prune.measure.streams.observers import OBSERVERS, Inputs, Observer
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.parallel.group import ALONE, Group

TOKENS_PER_BATCH = 4096
"""Tokens that go through a block together. Fixed, so that a resumed run repeats the same arithmetic."""
ROWS = 128
"""Tokens worked on at once, where a processor's cache is to hold what comes between."""


class _LastBlockReachedError(Exception):
    """Raised by the last recorder to stop the model before its final norm."""


@contextmanager
def refuse_data() -> Iterator[None]:
    """Turn what a model's forward pass says against its input into a UserError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, IndexError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"the model refuses its calibration data: {reason.rstrip('.')}; the tokenizer or {PROCESSOR} in its folder "
            "may belong to another model"
        ) from error


def _by_sample(states: Tensor, count: int, *, flat: bool) -> Tensor:
    """States (count, T, hidden), also of blocks that read the tokens of all samples in one sequence."""
    return states.view(count, -1, *states.shape[1:]) if flat else states


def split_folds(samples: int, folds: int) -> list[slice]:
    """Cut samples into `folds` contiguous runs of nearly equal length."""
    return [slice(samples * f // folds, samples * (f + 1) // folds) for f in range(folds)]


class HiddenStream:
    """Hidden states entering the next block, for every calibration sample.

    The embedding, masks and position embeddings come from the model's own forward pass, run once with its blocks
    replaced by recorders; the blocks are then the model's own, run with what it would have passed them, cache off.

    Args:
        factory: builds the blocks.
        tensors: on-disk names of the checkpoint.
        read: reads on-disk tensors by name.
        samples: N samples of T tokens.
        folds: samples are cut into this many contiguous folds.
        sizes: numbers of samples that `run` will be asked for at once.
        allocate: makes the tensor that holds the states.
        group: processes that share the samples out among them. Moments are of all samples then, at the first process;
            states, and what else is of single samples, are of this process's share.

    Attributes:
        samples: those of this process.
        states: the input of the next block for every one of them, (N, T, hidden), in the factory's dtype, on CPU.
        batches: (fold, samples) of what goes through a block together, in order.
    """

    states: Tensor

    def __init__(
        self,
        factory: BlockFactory,
        tensors: Iterable[str],
        read: ReadTensors,
        samples: Samples,
        *,
        folds: int = 1,
        sizes: Iterable[int] = (),
        allocate: Allocate = allocate_in_memory,
        group: Group = ALONE,
        active_above: float = ACTIVE_THRESHOLD,
    ) -> None:
        group.check_enough(len(samples))
        self.factory, self.folds, self.group = factory, folds, group
        self._active_above = active_above
        own = group.share(len(samples))
        self.samples = samples if group.size == 1 else SampleRange(samples, own.start, own.stop)
        self._all = len(samples)
        self._tensors, self._read = list(tensors), read
        per_batch = max(1, TOKENS_PER_BATCH // samples.tokens)
        # No batch straddles two folds, so each fold's moments are sums over whole batches.
        self.batches: list[tuple[int, slice]] = [
            (fold, slice(start - own.start, min(start + per_batch, run.stop, own.stop) - own.start))
            for fold, run in enumerate(split_folds(len(samples), folds))
            for start in range(max(run.start, own.start), min(run.stop, own.stop), per_batch)
        ]
        self._arguments: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self._enter(set(sizes), allocate)

    # no_grad and not inference_mode throughout: what is recorded here also goes through blocks that are being trained.
    @torch.no_grad()
    def _enter(self, sizes: set[int], allocate: Allocate) -> None:
        family, factory = self.factory.family, self.factory
        model = factory.skeleton
        entry = [
            module
            for path in family.entry
            if (module := load_module(factory, model, path, self._tensors, self._read)) is not None
        ]
        layers: Any = model.get_submodule(family.layers)
        captured: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        states: list[Tensor] = []

        several = factory.returns_tuple

        def recorder(index: int) -> Callable[..., Any]:
            def record(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                captured.append((args, kwargs))
                if index == 0:
                    states.append(hidden_states)
                if index == len(layers) - 1:
                    raise _LastBlockReachedError
                return (hidden_states, None) if several else hidden_states

            return record

        for index, layer in enumerate(layers):
            layer.forward = recorder(index)
        own = [rows for _, rows in self.batches]
        lengths = {rows.stop - rows.start for rows in own}
        more = (slice(0, size) for size in sorted(sizes - lengths) if size <= len(self.samples))
        for position, rows in enumerate([*own, *more]):
            captured.clear()
            states.clear()
            batch = move_batch(self.samples.batch(rows), factory.device, factory.dtype)
            # A cache would be among what is recorded, and go on filling at every batch.
            options = {"use_cache": False} if family.modality == "text" else {}
            with suppress(_LastBlockReachedError), refuse_data():
                model(**batch, **options)
            # Samples are full, so what blocks are passed beside hidden states depends on the batch's shape alone.
            self._arguments.setdefault(rows.stop - rows.start, list(captured))
            if position == 0:
                shape = _by_sample(states[0], rows.stop - rows.start, flat=family.flat).shape[1:]
                self.states = allocate((len(self.samples), *shape), states[0].dtype)
            if position < len(own):
                self.states[rows] = _by_sample(states[0], rows.stop - rows.start, flat=family.flat).cpu()
        for layer in layers:
            del layer.forward
        # What comes before the blocks is not needed again.
        for module in entry:
            module.to("meta")

    def run(self, block: nn.Module, index: int, states: Tensor) -> Tensor:
        """What block `index` makes of its input.

        Args:
            block: as `factory` builds it, of any widths.
            index: of the block.
            states: (B, T, hidden) of as many samples as a batch of the stream has, or as `sizes` says; on any device.

        Returns:
            (B, T, hidden), on the block's device.
        """
        arguments, options = self._arguments[len(states)][index]
        flat = self.factory.family.flat
        entering = states.to(self.factory.device)
        output = block(entering.flatten(0, 1) if flat else entering, *arguments, **options)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return _by_sample(result, len(states), flat=flat)

    @torch.no_grad()
    def observe(
        self, index: int, tensors: Mapping[str, Tensor], gram: Mapping[Key, bool], *, advance: bool = False
    ) -> dict[Key, SpaceMoments]:
        """Moments of what is named, a tuple over folds.

        The moments of a space are those of its consumer's input, or of queries and keys. Those of a linear module are
        of its input.

        Args:
            index: the block.
            tensors: its on-disk tensors, of any widths.
            gram: spaces and linear modules to observe, and whether with the Gram (queries and keys: with that of
                centred keys).
            advance: also let the block's output become the next block's input.
        """
        block = self.factory.build_block(index, tensors)
        experts = self.factory.experts(block)
        # Whether an expert has seen too few tokens is known once all have passed, and it is then shown others.
        found = self._observe(block, index, gram, advance=advance and experts is None)
        if experts is not None:
            found = self.completed(block, index, experts, found, gram)
            if advance:
                self.pass_through(block, index, self.states, self.states)
        return found

    def _observe(
        self, block: nn.Module, index: int, gram: Mapping[Key, bool], *, advance: bool
    ) -> dict[Key, SpaceMoments]:
        observers = {key: self.observer(block, index, key, wanted) for key, wanted in gram.items()}
        for fold, rows in self.batches:
            for observer in observers.values():
                observer.fold = fold
            output = self.run(block, index, self.states[rows])
            if advance:
                self.states[rows] = output.cpu()
        return pooled(self.group, {key: observer.moments() for key, observer in observers.items()})

    def _mass(self, experts: SplitExperts) -> list[float]:
        """What the router has sent to every expert, in all processes."""
        parts = self.group.gather(experts.mass)
        return self.group.once(lambda: [sum(own) for own in zip(*(parts or []), strict=True)])

    @torch.no_grad()
    def completed(
        self,
        block: nn.Module,
        index: int,
        experts: SplitExperts,
        found: Mapping[Key, SpaceMoments],
        gram: Mapping[Key, bool],
    ) -> dict[Key, SpaceMoments]:
        """Moments of which those of experts that saw too few tokens are of all tokens of the layer.

        Each of these tokens has the same weight, so that together they weigh what the router's did.

        Args:
            block: that they were taken of.
            index: of the block.
            experts: of the block.
            found: moments, of which those of experts are of the tokens that the router sent there.
            gram: as for `observe`.
        """
        inputs = {number: experts.inputs(number) for number in range(len(experts))}
        few: dict[Key, int] = {}
        complete: dict[Key, SpaceMoments] = {}
        for key, folds in found.items():
            number = self.factory.expert_of(key)
            own = tuple(replace(each, routed=each.count) for each in folds if isinstance(each, Moments))
            complete[key] = folds if number is None else own
            if number is not None and too_few([each.count for each in own], inputs[number]):
                few[key] = number
        few = self.group.once(lambda: few)
        if few:
            tokens = self._all * self.samples.tokens
            mass = self._mass(experts)
            experts.show({number: ((mass[number] or 1.0) / tokens) ** 0.5 for number in few.values()})
            shown = self._observe(block, index, {key: gram[key] for key in few}, advance=False)
            experts.show({})
            for key, folds in shown.items():
                routed = [each.routed for each in complete[key] if isinstance(each, Moments)]
                again = (each for each in folds if isinstance(each, Moments))
                complete[key] = tuple(replace(each, routed=seen) for each, seen in zip(again, routed, strict=True))
        return complete

    def observer(self, block: nn.Module, index: int, what: str, gram: bool) -> Observer:
        """Watches a space or linear module of a block from now on, tokens counted to the fold it is told.

        Args:
            block: `index` of this model, of any widths.
            index: of the block.
            what: a space or a linear module (`observe`).
            gram: whether with the Gram.
        """
        space = next((space for name, space in self.factory.family.spaces.items() if name == what), None)
        runs = split_folds(self._all, self.folds)
        if space is None:
            found: Observer = Inputs.of_module(self.factory, block, index, what, [gram] * len(runs))
        else:
            sizes = [run.stop - run.start for run in runs]
            found = OBSERVERS[space.ends](self.factory, block, index, space, gram, sizes)
        if isinstance(found, Inputs):
            found.active_above = self._active_above
        return found

    @torch.no_grad()
    def advance(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the block's output, with these tensors, become the next block's input."""
        self.pass_through(self.factory.build_block(index, tensors), index, self.states, self.states)

    @torch.no_grad()
    def pass_through(self, block: nn.Module, index: int, given: Tensor, out: Tensor) -> None:
        """Let states of this process's samples go through a block, batch by batch.

        Args:
            block: as `factory` builds it, of any widths.
            index: of the block.
            given: what enters it, (N, T, hidden).
            out: what takes its output, (N, T, hidden); it may be `given`.
        """
        for _, rows in self.batches:
            out[rows] = self.run(block, index, given[rows]).cpu()

    def readout(self) -> Readout:
        """What makes the model's outputs of hidden states after the last block."""
        return Readout(self.factory, self._tensors, self._read)

    @torch.no_grad()
    def nll(self, states: Iterable[Tensor] | None = None, rows: Tensor | None = None) -> float:
        """Mean negative log likelihood in nats per scored token after the last block (evaluation/README.md, section 1).

        Only of a causal language model on windows of text.

        Args:
            states: what the last block made of the samples `rows`, (T, hidden) each; the stream's own by default.
            rows: which samples, int64 (R,); all by default.
        """
        assert self.factory.family.causal
        readout = self.readout()
        loss, tokens = 0.0, 0
        numbers = range(len(self.samples)) if rows is None else rows.tolist()
        for hidden, number in zip(self.states if states is None else states, numbers, strict=True):
            batch = self.samples.batch(slice(number, number + 1))
            (logits,) = readout.outputs(batch, hidden[None])
            targets = batch["input_ids"][0, 1:].to(logits.device)
            loss += functional.cross_entropy(logits[0, :-1].float(), targets, reduction="sum").double().item()
            tokens += len(targets)
        parts = self.group.gather((loss, tokens)) or []
        return self.group.once(lambda: sum(own for own, _ in parts) / sum(own for _, own in parts))


def open_stream(
    model: Model,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    skeleton: nn.Module | None = None,
    **options: Any,
) -> HiddenStream:
    """Hidden states of samples at the first block of a model as its checkpoint has it.

    Args:
        model: whose blocks run.
        samples: what runs through them.
        device: where blocks run.
        compute_dtype: in which they run.
        skeleton: the model on the meta device, where it is not the stock one of its config.
        options: as `HiddenStream` takes them.
    """
    factory = BlockFactory(model, device=device, dtype=compute_dtype, skeleton=skeleton)
    return HiddenStream(factory, model.checkpoint.tensors, model.checkpoint.read, samples, **options)
