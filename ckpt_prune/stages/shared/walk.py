"""The one walk over the blocks: every step acts, the block is written, every step moves on.

The next block is read while this one is worked on, and this one is written while the next one is.

Several processes walk together. If blocks follow from one another, all of them take every block; if not, each takes
some.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from ckpt_prune.checkpoint.block_thread import BlockThread
from ckpt_prune.common.phases import time_block
from ckpt_prune.common.progress import track
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.step import Step, Tensors
from ckpt_prune.job.store import BlockStore
from ckpt_prune.model.model import Model
from ckpt_prune.parallel.group import ALONE, process_group, working_in

Records = dict[str, list[Any]]
"""Key of a stage → its records of all blocks."""
Steps = Mapping[str, Step]
"""Key of a stage → its step, in the order in which they act."""


def walk(
    view: ModelView,
    steps: Steps,
    store: BlockStore | None = None,
    *,
    doing: str = "pruning",
) -> Records:
    """Take every block through the steps and write it. Blocks that an interrupted run has written are read instead.

    Args:
        view: whose blocks are read.
        steps: by the keys of their stages, in order.
        store: where blocks go; nothing is written without one.
        doing: what the progress bar says, unless a step shows its own.

    Returns:
        The records of every step, in the order of blocks; if processes shared the blocks, at the first one only.
    """
    if store is not None and process_group().size > 1 and all(step.apart for step in steps.values()):
        return _walk_apart(view, steps, store, doing)
    records: Records = {key: [] for key in steps}
    blocks = range(view.model.blocks)
    # Written blocks are read from the store, unless a step needs what it was given.
    replayed = any(step.needs_input for step in steps.values())
    unread = [] if replayed or store is None else [block for block in blocks if store.has(block)]
    # In another basis reading is computing.
    ahead = [block for block in blocks if block not in unread] if view.basis is None else []
    with ExitStack() as stack:
        thread = stack.enter_context(BlockThread(view.model.read_block, ahead))
        for step in steps.values():
            stack.enter_context(step.progress())
        silent = any(step.shows_progress for step in steps.values())
        for block in blocks if silent else track(blocks, doing, total=len(blocks)):
            with time_block(block):
                tensors, of_block, inputs = _take(view, steps, block, store, thread)
                for key, step in steps.items():
                    records[key] += of_block[key]
                    if step.needs_input:
                        step.advance_input(block, inputs.pop(key))
                    step.advance(block, tensors)
    return records


def read_records(model: Model, steps: Steps, store: BlockStore) -> Records:
    """Return the records of blocks that are all written, without reading a tensor."""
    records: Records = {key: [] for key in steps}
    for block in range(model.blocks):
        notes = process_group().once(partial(store.notes, block))
        for key, of_block in _validate(steps, notes).items():
            records[key] += of_block
    return records


def _take(
    view: ModelView, steps: Steps, block: int, store: BlockStore | None, thread: BlockThread[dict[str, Tensor]]
) -> tuple[dict[str, Tensor], Records, dict[str, Tensors]]:
    """Make a block, or read it if it is written. Return tensors, records, and inputs of steps that need them."""

    def read(block: int) -> Tensors:
        return view.block(block, None if view.basis is not None else thread.take(block))

    model = view.model
    if store is not None and store.has(block):
        tensors, notes = store.read(model, block)
        return tensors, _validate(steps, notes), _inputs(steps, block, read)
    tensors, records, inputs = _act(steps, block, read(block))
    if store is not None:
        thread.write(partial(store.write, model, block, tensors, _notes(records)))
    return tensors, records, inputs


def _validate(steps: Steps, notes: Mapping[str, Any]) -> Records:
    return {key: [step.record.model_validate(note) for note in notes[key]] for key, step in steps.items()}


def _notes(records: Mapping[str, list[BaseModel]]) -> dict[str, Any]:
    return {key: [record.model_dump(mode="json") for record in of_step] for key, of_step in records.items()}


def _act(steps: Steps, block: int, tensors: Tensors) -> tuple[dict[str, Tensor], Records, dict[str, Tensors]]:
    """Let every step act on a block. Return its new tensors, its records, and the inputs of steps that need them."""
    records: Records = {}
    inputs: dict[str, Tensors] = {}
    for key, step in steps.items():
        if step.needs_input:
            inputs[key] = tensors
        tensors, step_records = step.act(block, tensors)
        records[key] = list(step_records)
    return dict(tensors), records, inputs


def _inputs(steps: Steps, block: int, read: Callable[[int], Tensors]) -> dict[str, Tensors]:
    """Return the inputs of steps that need them, on a block that is written: the steps before them act again."""
    keys = list(steps)
    needed = [place for place, key in enumerate(keys) if steps[key].needs_input]
    if not needed:
        return {}
    last = keys[needed[-1]]
    tensors, _, inputs = _act({key: steps[key] for key in keys[: needed[-1]]}, block, read(block))
    return {**inputs, last: tensors}


def _walk_apart(view: ModelView, steps: Steps, store: BlockStore, doing: str) -> Records:
    """Let every process take some blocks; the first one writes all, in order."""
    group, blocks = process_group(), range(view.model.blocks)
    todo = [block for block in blocks if not store.has(block)]
    records: dict[int, Records] = {}

    def act(block: int) -> tuple[dict[str, Tensor], Records]:
        with working_in(ALONE):
            return _act(steps, block, view.block(block))[:2]

    if group.first:
        records = {block: _validate(steps, store.notes(block)) for block in set(blocks) - set(todo)}
    rounds = [todo[start : start + group.size] for start in range(0, len(todo), group.size)]
    for turn in track(rounds, doing, unit="round"):
        for rank, results in enumerate(group.gather([act(block) for block in turn[group.rank :][:1]]) or ()):
            for tensors, of_block in results:
                records[turn[rank]] = of_block
                store.write(view.model, turn[rank], tensors, _notes(of_block))
    return {key: [record for block in sorted(records) for record in records[block][key]] for key in steps}
