"""Hidden states of all samples, carried through a model one block at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.moments.kinds import Key, SpaceMoments, pool_moments, select_input_moments
from ckpt_prune.measure.samples.samples import (
    SampleRange,
    Samples,
    counted_tokens,
    move_batch,
    reads_whole,
    runs_alone,
    scored_tokens,
    whole_inputs,
)
from ckpt_prune.measure.streams.block_memory import AllSeenError, BlockMemory, Structure, find_structure
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.experts import SplitExperts, saw_too_few
from ckpt_prune.measure.streams.observers import OBSERVERS, Observer, watch_inputs
from ckpt_prune.measure.streams.outside import ReadTensors, Whole, load_outside, make_recorders
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.measure.streams.recorders import (
    Handed,
    HandedAlone,
    HandedArguments,
    Rows,
    by_width,
    pad_tokens,
    results_of,
    sample_axis,
)
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.cuts import KeptUnits, list_cuts
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
        kept: space → units that stay in blocks which will run beside the dense model's, where the first block passes
            on what depends on them (T5's relative positions).
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
        kept: KeptUnits = MappingProxyType({}),
        group: Group = ALONE,
    ) -> None:
        group.check_enough(len(samples))
        self.factory, self.folds, self.group = factory, folds, group
        share = group.share(len(samples))
        self.samples = samples if group.size == 1 else SampleRange(samples, share.start, share.stop)
        self._count, self._allocate = len(samples), allocate
        self._kept = kept if factory.family.passes_on else {}
        self._tensors, self._read = list(tensors), read
        # An accelerator computes faster than its results are fetched.
        stays = getattr(allocate, "has_room", lambda _: True) if factory.device.type == "cpu" else lambda _: False
        self.memory = BlockMemory(stays)
        # What blocks are passed differs from window to window where images are in them.
        alone = runs_alone(samples)
        per_batch = 1 if alone else max(1, TOKENS_PER_BATCH // samples.tokens)
        # No batch straddles two folds, so each fold's moments are sums over whole batches.
        self.batches: list[tuple[int, slice]] = [
            (fold, slice(start - share.start, min(start + per_batch, run.stop, share.stop) - share.start))
            for fold, run in enumerate(split_folds(len(samples), folds))
            for start in range(max(run.start, share.start), min(run.stop, share.stop), per_batch)
        ]
        shares, count = factory.family.shares_keys, len(self.samples)
        self._handed: HandedArguments | HandedAlone = (
            HandedAlone(allocate, factory.name, shares=shares)
            if alone
            else HandedArguments(count, allocate, factory.name, shares=shares)
        )
        self._enter(set() if alone else set(sizes))

    # no_grad and not inference_mode throughout: what is recorded here also goes through blocks that are being trained.
    @torch.no_grad()
    def _enter(self, sizes: set[int]) -> None:
        """Run what comes before the blocks, and record what blocks are passed."""
        family, factory = self.factory.family, self.factory
        if reads_whole(self.samples):
            surroundings = Whole(factory)
            model = surroundings.load(self._read)
            recorders = make_recorders(surroundings, model, adds=True)
        else:
            head, ties = f"{family.head}.weight", factory.names.ties
            model = load_outside(factory, self._tensors, self._read, {head} - ties.keys() - set(ties.values()))
            recorders = make_recorders(factory, model, first=self._first_results({}) if family.passes_on else None)

        narrow = {space: self._first_results({space: units}) for space, units in self._kept.items()}

        def stop(_: Tensor) -> Tensor:
            raise _LastBlockReachedError

        recorders.leave = stop
        batches = [rows for _, rows in self.batches]
        lengths = {rows.stop - rows.start for rows in batches}
        more = (slice(0, size) for size in sorted(sizes - lengths) if size <= len(self.samples))
        # A cache would be among what is recorded, and go on filling at every batch.
        options = {"use_cache": False} if family.reads_tokens else {}
        for position, rows in enumerate([*batches, *more]):
            batch = whole_inputs(self.samples, rows.start) or self.samples.batch(rows)
            inputs = move_batch(batch, factory.device, factory.dtype) | options
            with suppress(_LastBlockReachedError), refuse_data():
                recorders.run(partial(model, **inputs))
            entering, handed = recorders.entering, recorders.handed
            results = {space: compute(entering, handed[0])[1:] for space, compute in narrow.items()}
            self._handed.keep(rows, by_width(handed, recorders.others, results) if narrow else handed)
            if isinstance(self._handed, HandedAlone) and not reads_whole(self.samples):
                self._handed.shapes[rows.start] = tuple(entering.shape)
                entering = entering.reshape(1, -1, entering.shape[-1])
            is_known = family.stage is not None  # there the tokens of a sample are near their number alone
            self._axis = 0 if is_known else sample_axis(entering.shape, self.samples.tokens)
            if isinstance(self._handed, HandedAlone):
                self._handed.axis = self._axis or 0
            entering = self._by_sample(entering, rows.stop - rows.start)
            if position == 0 or (self._varying and entering.shape[1] > self.states.shape[1]):
                before = self.states if position else None
                self.states = self._allocate((len(self.samples), *entering.shape[1:]), entering.dtype)
                if before is not None:
                    self.states[: rows.start] = pad_tokens(before[: rows.start], entering.shape[1])
            if position < len(batches):
                self.states = self.put(self.states, rows, entering)

    def _first_results(self, kept: KeptUnits) -> Callable[[Tensor, Handed], tuple[Any, ...]]:
        """Return what computes all that the first block with these units returns, hidden states first."""
        model, prefix = self.factory.model, self.factory.family.block.format(block=0)
        tensors = self._read([name for name in self._tensors if name.startswith(prefix)])
        for module, kind, dim, lines in list_cuts(model.remaining_lines(kept)):
            name = model.tensor(0, module, kind)
            tensors |= {name: tensors[name].index_select(dim, lines)} if name in tensors else {}
        block = self.factory.build_block(0, tensors)
        return lambda states, handed: results_of(block(states, *handed.arguments, **handed.options))

    def _by_sample(self, states: Tensor, count: int) -> Tensor:
        """Return states of `count` samples with these along the first axis."""
        return states.view(count, -1, *states.shape[1:]) if self._axis is None else states.movedim(self._axis, 0)

    def run_order(self) -> Iterator[tuple[int, slice]]:
        """Yield the batches one after the other, each of which is then run."""
        for number, batch in enumerate(self.batches):
            self.memory.batch = number
            yield batch

    @property
    def _varying(self) -> HandedAlone | None:
        """What each sample is handed, where samples differ in their number of tokens; None where all have the same."""
        return self._handed if isinstance(self._handed, HandedAlone) and self._handed.shapes else None

    def cut(self, rows: slice, states: Tensor) -> Tensor:
        """Return the tokens of these samples that blocks are passed, of their states (B, T, hidden)."""
        varying = self._varying
        return states if varying is None else states[:, : varying.tokens(rows.start)]

    def counted(self, rows: slice) -> Tensor | None:
        """Return which of the tokens that blocks are passed are no padding, as these have them, bool; None for all."""
        if (varying := self._varying) is not None:
            own = varying.counted(rows.start)
            return None if own is None else own.to(self.factory.device)
        counted = counted_tokens(self.samples, rows)
        if counted is None:
            return None
        behind = self.states.shape[1] - counted.shape[1]  # LED fills its sources up to whole windows
        return functional.pad(counted, (0, behind)).to(self.factory.device)

    def run(self, block: nn.Module, index: int, states: Tensor, rows: Rows) -> Tensor:
        """Run block `index`, as `factory` builds it, of any widths, on states (B, T, hidden), on any device.

        They are those of the samples `rows`, whose number B is that of a batch of the stream, or one of `sizes`. The
        result is on the block's device.
        """
        count, entering = len(states), states.to(self.factory.device)
        placed = entering.flatten(0, 1) if self._axis is None else entering.movedim(0, self._axis)
        if not self._kept or isinstance(self._handed, HandedAlone):
            return self._by_sample(self._handed.call(block, index, placed, rows, count), count)
        narrow = {space for space in self._kept if self.factory.lacks_units(block, index, space)}
        return self._by_sample(self._handed.call(block, index, placed, rows, count, narrow), count)

    @torch.no_grad()
    def observe(
        self, index: int, tensors: Mapping[str, Tensor], gram: Mapping[Key, bool], *, advance: bool = False
    ) -> dict[Key, SpaceMoments]:
        """Measure moments of spaces and linear modules of a block with these tensors, a tuple over folds.

        The moments of a space are those of its consumer's input, or of queries and keys. Those of a linear module are
        of its input. `gram` says what to observe, and whether with the Gram (queries and keys: with that of centred
        keys). If `advance`, the block's output becomes the next block's input.
        """
        pooling = self.factory.family.pooling
        if behind := {key: with_gram for key, with_gram in gram.items() if key in pooling}:
            others = {key: with_gram for key, with_gram in gram.items() if key not in pooling}
            known = self.observe(index, tensors, others, advance=advance) if others or advance else {}
            return known | self._observe_pooling(index, None if advance else tensors, behind)
        block = self.factory.build_block(index, tensors)
        experts = self.factory.find_experts(block)
        # Whether an expert has seen too few tokens is known once all have passed, and it is then shown others.
        moments = self._observe(block, index, gram, tensors, advance=advance and experts is None)
        if experts is not None:
            moments = self.complete_experts(block, index, experts, moments, gram)
            if advance:
                self.states = self.pass_through(block, index, self.states, self.states)
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
        leaving = self.states

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
                    observer.fold, observer.counted = fold, self.counted(rows)
                with suppress(AllSeenError):
                    output = self.run(block, index, self.states[rows], rows)
                    if advance:
                        leaving = self.put(leaving, rows, output)
        self.states = leaving
        return pool_moments(self.group, {key: observer.finish() for key, observer in observers.items()})

    def _observe_pooling(
        self, index: int, tensors: Mapping[str, Tensor] | None, gram: Mapping[Key, bool]
    ) -> dict[Key, SpaceMoments]:
        """Measure what pools tokens behind the last block, which is built of `tensors`; None if it has run."""
        block = None if tensors is None else self.factory.build_block(index, tensors)
        readout = self.readout()
        observers = {key: self.watch(readout.model, index, key, with_gram) for key, with_gram in gram.items()}
        for fold, rows in self.batches:
            for observer in observers.values():
                observer.fold = fold
            states = self.states[rows]
            readout.outputs(self.samples.batch(rows), states if block is None else self.run(block, index, states, rows))
        return pool_moments(self.group, {key: observer.finish() for key, observer in observers.items()})

    def learn_structure(self, block: nn.Module, index: int, tensors: Mapping[str, Tensor]) -> Structure:
        """Return the structure of a block. For the first block of a kind, a second one of these tensors is run."""

        def probe() -> Structure:
            twin = self.factory.build_block(index, tensors)
            linears = [path for path, module in twin.named_modules() if isinstance(module, nn.Linear)]
            _, rows = self.batches[0]
            return find_structure(twin, linears, lambda: self.run(twin, index, self.states[rows], rows))

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
        """Watch a space or linear module of a block, or of a readout's model, from now on, as in `observe`."""
        samples = [run.stop - run.start for run in split_folds(self._count, self.folds)]
        space = self.factory.family.spaces.get(key)
        if space is None:
            return watch_inputs(self.factory, block, index, key, gram, samples)
        return OBSERVERS[space.kind](self.factory, block, index, space, gram, samples)

    @torch.no_grad()
    def advance(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the block's output, with these tensors, become the next block's input."""
        block = self.factory.build_block(index, tensors)
        with self.replay(block, index, tensors, keep=False):
            self.states = self.pass_through(block, index, self.states, self.states)

    @torch.no_grad()
    def pass_through(self, block: nn.Module, index: int, entering: Tensor, leaving: Tensor) -> Tensor:
        """Let states (N, T, hidden) of this process's samples go through a block, and return its output.

        `leaving` takes the output if that has its shape; it may be `entering`.
        """
        for _, rows in self.run_order():
            leaving = self.put(leaving, rows, self.run(block, index, entering[rows], rows))
        return leaving

    def enter(self, states: Tensor) -> None:
        """Let states (N, T, hidden), which are copied, be the input of the next block."""
        self.states = self.put(self.states, slice(None), states)

    def put(self, states: Tensor, rows: slice, output: Tensor) -> Tensor:
        """Put what a block makes of some samples over their states, and return the tensor that holds it.

        That is another than `states` if the block changes their shape: the first block of a stage may make fewer and
        wider rows of its input (Hiera).

        Args:
            states: of all samples.
            rows: samples of the output.
        """
        output = pad_tokens(output, states.shape[1]) if self._varying else output
        shape = (len(states), *output.shape[1:])
        leaving = states if states.shape == shape else self._allocate(shape, states.dtype)
        leaving[rows] = output.cpu()
        return leaving

    def reads_results(self, index: int) -> bool:
        """Return whether a block is passed what the one before it returned beside hidden states, or keys of others."""
        family = self.factory.family
        if family.shares_keys and family.tensor(index, family.attention.key) not in self._tensors:
            return True
        return isinstance(self._handed, HandedArguments) and self._handed.is_carried_to(index)

    def readout(self) -> Readout:
        """Return what makes the model's outputs of hidden states after the last block."""
        return Readout(self.factory, self._tensors, self._read)

    def observe_head(self, *, gram: bool) -> tuple[Moments, ...]:
        """Measure the moments of what the head reads, by fold: the stream is behind the last block."""
        readout = self.readout()
        sums = [Moments.zeros(self.states.shape[-1], gram=gram) for _ in range(self.folds)]
        for fold, rows in self.batches:
            sums[fold] = sums[fold].accumulate(readout.head_inputs(self.samples.batch(rows), self.states[rows]))
        return tuple(sums)

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
            scored = scored_tokens(self.samples, slice(number, number + 1))
            kept = slice(None) if scored is None else scored[0, 1:].to(logits.device)
            predicted, targets = logits[0, :-1][kept].float(), targets[kept]
            loss += functional.cross_entropy(predicted, targets, reduction="sum").double().item()
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
