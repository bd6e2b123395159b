"""Hidden states of all samples, carried through a model one block at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.measure.moments.kinds import Key, SpaceMoments, pool_moments, select_input_moments
from ckpt_prune.measure.samples.samples import SampleRange, Samples, move_batch
from ckpt_prune.measure.streams.block_memory import AllSeenError, BlockMemory, Structure, find_structure
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.experts import SplitExperts, saw_too_few
from ckpt_prune.measure.streams.modules import ReadTensors, load_module
from ckpt_prune.measure.streams.observers import OBSERVERS, Observer, watch_inputs
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.model import Model
from ckpt_prune.parallel.group import ALONE, Group

TOKENS_PER_BATCH = 4096
"""Tokens that go through a block together. Fixed, so that a resumed run repeats the same arithmetic."""
ROWS = 128
"""Tokens worked on at once if intermediate results are to stay in a processor's cache."""


class _LastBlockReachedError(Exception):
    """Raised by the last recorder to stop the model before its final norm."""


@contextmanager
def refuse_data() -> Iterator[None]:
    """Turn an error of a model's forward pass about its input into a UserError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, IndexError, RuntimeError) as error:
        raise UserError(
            f"the model refuses its calibration data: {one_line(error).rstrip('.')}; the tokenizer or {PROCESSOR} in "
            "its folder may belong to another model"
        ) from error


def _by_sample(states: Tensor, count: int, *, flat: bool) -> Tensor:
    """Return states (count, T, hidden), also of blocks that read the tokens of all samples in one sequence."""
    return states.view(count, -1, *states.shape[1:]) if flat else states


def split_folds(samples: int, folds: int) -> list[slice]:
    """Cut samples into `folds` contiguous runs of nearly equal length."""
    return [slice(samples * f // folds, samples * (f + 1) // folds) for f in range(folds)]


class HiddenStream:
    """Hidden states entering the next block, for every calibration sample.

    The embedding, masks and position embeddings come from the model's own forward pass, run once with its blocks
    replaced by recorders. The blocks are the model's own. They run with what it would have passed them, cache off.

    Args:
        factory: builds the blocks.
        tensors: on-disk names of the checkpoint.
        read: reads on-disk tensors by name.
        samples: N samples of T tokens.
        folds: number of contiguous folds of the samples.
        sizes: numbers of samples that `run` will be asked for at once.
        allocate: makes the tensor that holds the states.
        group: processes that share the samples. Moments are of all samples then, at the first process; states, and
            everything else of single samples, are of this process's share.

    Attributes:
        samples: those of this process.
        states: the input of the next block for every one of them, (N, T, hidden), in the factory's dtype, on CPU.
        batches: (fold, samples) of what goes through a block together, in order.
        memory: of what the block has computed that was observed last.
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
    ) -> None:
        group.check_enough(len(samples))
        self.factory, self.folds, self.group = factory, folds, group
        share = group.share(len(samples))
        self.samples = samples if group.size == 1 else SampleRange(samples, share.start, share.stop)
        self._count = len(samples)
        self._tensors, self._read = list(tensors), read
        # An accelerator computes faster than its results are fetched.
        stays = getattr(allocate, "has_room", lambda _: True) if factory.device.type == "cpu" else lambda _: False
        self.memory = BlockMemory(stays)
        per_batch = max(1, TOKENS_PER_BATCH // samples.tokens)
        # No batch straddles two folds, so each fold's moments are sums over whole batches.
        self.batches: list[tuple[int, slice]] = [
            (fold, slice(start - share.start, min(start + per_batch, run.stop, share.stop) - share.start))
            for fold, run in enumerate(split_folds(len(samples), folds))
            for start in range(max(run.start, share.start), min(run.stop, share.stop), per_batch)
        ]
        self._arguments: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self._enter(set(sizes), allocate)

    # no_grad and not inference_mode throughout: what is recorded here also goes through blocks that are being trained.
    @torch.no_grad()
    def _enter(self, sizes: set[int], allocate: Allocate) -> None:
        """Run what comes before the blocks, and record what blocks are passed."""
        family, factory = self.factory.family, self.factory
        model = factory.skeleton
        entry = [load_module(factory, model, path, self._tensors, self._read) for path in family.entry]
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
        batches = [rows for _, rows in self.batches]
        lengths = {rows.stop - rows.start for rows in batches}
        more = (slice(0, size) for size in sorted(sizes - lengths) if size <= len(self.samples))
        for position, rows in enumerate([*batches, *more]):
            captured.clear()
            states.clear()
            batch = move_batch(self.samples.batch(rows), factory.device, factory.dtype)
            # A cache would be among what is recorded, and go on filling at every batch.
            options = {"use_cache": False} if family.modality == "text" else {}
            with suppress(_LastBlockReachedError), refuse_data():
                model(**batch, **options)
            # Samples are full, so what blocks are passed beside hidden states depends on the batch's shape alone.
            count = rows.stop - rows.start
            self._arguments.setdefault(count, list(captured))
            entering = _by_sample(states[0], count, flat=family.flat)
            if position == 0:
                self.states = allocate((len(self.samples), *entering.shape[1:]), entering.dtype)
            if position < len(batches):
                self.states[rows] = entering.cpu()
        for layer in layers:
            del layer.forward
        # What comes before the blocks is not needed again.
        for module in entry:
            if module is not None:
                module.to("meta")

    def run_order(self) -> Iterator[tuple[int, slice]]:
        """Yield the batches one after the other, each of which is then run."""
        for number, batch in enumerate(self.batches):
            self.memory.batch = number
            yield batch

    def run(self, block: nn.Module, index: int, states: Tensor) -> Tensor:
        """Run block `index`, as `factory` builds it, of any widths, on states (B, T, hidden), on any device.

        B is the number of samples of a batch of the stream, or one of `sizes`. The result is on the block's device.
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
        """Measure moments of spaces and linear modules of a block with these tensors, a tuple over folds.

        The moments of a space are those of its consumer's input, or of queries and keys. Those of a linear module are
        of its input. `gram` says what to observe, and whether with the Gram (queries and keys: with that of centred
        keys). If `advance`, the block's output becomes the next block's input.
        """
        block = self.factory.build_block(index, tensors)
        experts = self.factory.find_experts(block)
        # Whether an expert has seen too few tokens is known once all have passed, and it is then shown others.
        moments = self._observe(block, index, gram, tensors, advance=advance and experts is None)
        if experts is not None:
            moments = self.complete_experts(block, index, experts, moments, gram)
            if advance:
                self.pass_through(block, index, self.states, self.states)
        return moments

    def _observe(
        self,
        block: nn.Module,
        index: int,
        gram: Mapping[Key, bool],
        tensors: Mapping[str, Tensor] | None = None,
        *,
        advance: bool = False,
    ) -> dict[Key, SpaceMoments]:
        """Measure a block that was built of `tensors`; without them it runs from its start to its end."""
        observers = {key: self.watch(block, index, key, with_gram) for key, with_gram in gram.items()}
        waiting: set[Observer] = set()

        def see(observer: Observer) -> None:
            waiting.discard(observer)
            if not waiting:
                raise AllSeenError

        with ExitStack() as stack:
            if tensors is not None:
                single = stack.enter_context(self.replay(block, index, tensors, keep=not advance))
                names = {module: path for path, module in block.named_modules()}
                watched = [names[module] for observer in observers.values() for module in observer.modules]
                experts = any(self.factory.find_expert(key) is not None for key in gram)
                if not advance and not experts and single.issuperset(watched):
                    for observer in observers.values():
                        observer.on_seen = see
            for fold, rows in self.run_order():
                waiting |= set(observers.values())
                for observer in observers.values():
                    observer.fold = fold
                with suppress(AllSeenError):
                    output = self.run(block, index, self.states[rows])
                    if advance:
                        self.states[rows] = output.cpu()
        return pool_moments(self.group, {key: observer.finish() for key, observer in observers.items()})

    def learn_structure(self, block: nn.Module, index: int, tensors: Mapping[str, Tensor]) -> Structure:
        """Return the structure of a block. For the first block of a kind, a second one of these tensors is run."""

        def probe() -> Structure:
            twin = self.factory.build_block(index, tensors)
            linears = [path for path, module in twin.named_modules() if isinstance(module, nn.Linear)]
            return find_structure(twin, linears, lambda: self.run(twin, index, self.states[self.batches[0][1]]))

        return self.memory.structure(block, probe)

    @contextmanager
    def replay(
        self, block: nn.Module, index: int, tensors: Mapping[str, Tensor], *, keep: bool = True
    ) -> Iterator[frozenset[str]]:
        """Let runs of a block on the stream's batches start at what changed since the last ones (`BlockMemory`).

        The batches are those of `run_order`.

        Args:
            block: built of `tensors`, with hooks on what must run in any case.
            index: of the block.
            keep: whether other runs on the same states follow.

        Yields:
            Paths of the modules that a run of the block calls once.
        """
        structure = self.learn_structure(block, index, tensors)
        state = index, id(self.states), self.states._version
        find_paths = partial(self.factory.find_paths, index)
        # Noted widths change with the shapes of weights, and those tell which modules they are of.
        noted = self.factory.model.widths_name(index)
        weights = {name: tensor for name, tensor in tensors.items() if name != noted}
        find_makers = partial(self.factory.find_makers, index)
        with self.memory.attach_block(block, structure, state, weights, find_paths, find_makers, keep=keep):
            yield structure.single
        if not keep:
            self.memory.clear()

    @torch.no_grad()
    def complete_experts(
        self,
        block: nn.Module,
        index: int,
        experts: SplitExperts,
        moments: Mapping[Key, SpaceMoments],
        gram: Mapping[Key, bool],
    ) -> dict[Key, SpaceMoments]:
        """Replace moments of experts that saw too few tokens by those of all tokens of the layer.

        Each of these tokens has the same weight, so that together they weigh what the router's did. `moments` were
        measured on this block, as `observe` does with `gram`.
        """
        few: dict[Key, int] = {}
        complete: dict[Key, SpaceMoments] = {}
        for key, folds in moments.items():
            number = self.factory.find_expert(key)
            if number is None:
                complete[key] = folds
                continue
            complete[key] = tuple(replace(fold, routed=fold.count) for fold in select_input_moments(folds))
            counts = [fold.count for fold in select_input_moments(folds)]
            if saw_too_few(counts, experts.count_inputs(number)):
                few[key] = number
        few = self.group.once(lambda: few)
        if few:
            tokens = self._count * self.samples.tokens
            masses = self.group.gather(experts.mass)
            mass = self.group.once(lambda: [sum(own) for own in zip(*(masses or []), strict=True)])
            experts.shown = {number: ((mass[number] or 1.0) / tokens) ** 0.5 for number in few.values()}
            shown = self._observe(block, index, {key: gram[key] for key in few})
            experts.shown = {}
            for key, folds in shown.items():
                pairs = zip(select_input_moments(folds), select_input_moments(complete[key]), strict=True)
                complete[key] = tuple(replace(fold, routed=before.routed) for fold, before in pairs)
        return complete

    def watch(self, block: nn.Module, index: int, key: str, gram: bool) -> Observer:
        """Watch a space or linear module of a block from now on, as in `observe`."""
        samples = [run.stop - run.start for run in split_folds(self._count, self.folds)]
        space = self.factory.family.spaces.get(key)
        if space is None:
            return watch_inputs(self.factory, block, index, key, gram, samples)
        return OBSERVERS[space.ends](self.factory, block, index, space, gram, samples)

    @torch.no_grad()
    def advance(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the block's output, with these tensors, become the next block's input."""
        block = self.factory.build_block(index, tensors)
        with self.replay(block, index, tensors, keep=False):
            self.pass_through(block, index, self.states, self.states)

    @torch.no_grad()
    def pass_through(self, block: nn.Module, index: int, entering: Tensor, leaving: Tensor) -> None:
        """Let states (N, T, hidden) of this process's samples go through a block.

        `leaving` takes the block's output; it may be `entering`.
        """
        for _, rows in self.run_order():
            leaving[rows] = self.run(block, index, entering[rows]).cpu()

    def readout(self) -> Readout:
        """Return what makes the model's outputs of hidden states after the last block."""
        return Readout(self.factory, self._tensors, self._read)

    @torch.no_grad()
    def measure_nll(self, states: Iterable[Tensor] | None = None, rows: Tensor | None = None) -> float:
        """Measure the mean negative log likelihood in nats per scored token (evaluation/README.md, section 1).

        The model is a causal language model, and the samples are windows of text. `states`, by default the stream's
        own, leave the last block, (T, hidden) for each of the samples `rows`, int64, by default all.
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
        return self.group.once(lambda: sum(loss for loss, _ in parts) / sum(tokens for _, tokens in parts))


def open_stream(
    model: Model,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    skeleton: nn.Module | None = None,
    **options: Any,
) -> HiddenStream:
    """Open the stream of samples at the first block of a model as its checkpoint has it.

    `skeleton` is the model on the meta device, if it is not the stock one of its config. `options` are those of
    `HiddenStream`.
    """
    factory = BlockFactory(model, device=device, dtype=compute_dtype, skeleton=skeleton)
    return HiddenStream(factory, model.checkpoint.tensors, model.checkpoint.read, samples, **options)
