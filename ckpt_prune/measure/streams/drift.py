"""Measuring the drift of a pruned model's residual stream, for the drift-correcting target.

See compensation/README.md, section 4.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.measure.moments.inputs import Drift, Moments
from ckpt_prune.measure.moments.kinds import Key, SpaceMoments
from ckpt_prune.measure.moments.pooling import pooled
from ckpt_prune.measure.streams.hidden_stream import HiddenStream


@torch.no_grad()
def observe_drift(
    dense: HiddenStream,
    pruned: HiddenStream,
    index: int,
    dense_tensors: Mapping[str, Tensor] | None,
    tensors: Mapping[str, Tensor],
    gram: Mapping[Key, bool],
    *,
    later: Collection[str] | None = None,
    seen: Callable[[Tensor], Tensor] | None = None,
) -> tuple[dict[Key, SpaceMoments], bool]:
    """Moments of what is named in the pruned stream, a tuple over folds, with the drift of spaces with a consumer.

    The target of a consumer is y* = (dense residual stream after it) − (pruned residual stream before it), its own
    bias aside; where the block multiplies its output by a layer scale s, (…) / s element by element. What is stored
    is δ = y* − W x, where x and W are the input and the weight of the consumer in the block as `tensors` have it:
    ([dense residual stream after] − [pruned residual stream after]) / s, the target of compensation/README.md,
    section 4 (this project's). Where an element of s is zero nothing the consumer does is seen, and δ is zero. An
    RMSNorm with gains g that the output passes on its way is such a scale, g over the root mean square of each token's
    own output: the norm forgets that length, so y* keeps it. Queries and keys have no output of their own in the
    stream: of them, and of linear modules that no space names, the moments are those of `HiddenStream.observe`.

    Both blocks run batch by batch, one after the other; two blocks and two streams are held, and a third set of hidden
    states is not. δ is made in float64. A block runs no further than what is asked for.

    Args:
        dense: stream of the dense model at the input of the block, or at its output.
        pruned: stream of the pruned one, of the same samples and folds, at the input of the block.
        index: the block.
        dense_tensors: its on-disk tensors in the dense model; None where `dense` is past the block. Then only spaces
            after which the residual stream is the block's output can be asked for.
        tensors: its on-disk tensors as they stand in the pruned one, of any widths; consumers that are asked for are
            still whole.
        gram: spaces and linear modules to observe, and whether with the Gram.
        later: what will be asked for next of this block. Where its output alone serves all of that, `dense` is let past
            the block. None leaves `dense` where it is.
        seen: what of the dense residual stream, (tokens, hidden) float64, the pruned one has room for, where that is
            narrower.

    Returns:
        The moments, and whether `dense` is past the block.

    Raises:
        ValueError: the streams have different batches, or `dense` is past what is asked for.
    """
    if dense.batches != pruned.batches:
        raise ValueError("drift is measured between streams of the same samples in the same folds")
    columns = pruned.factory.family.columns
    spaces: dict[Key, SpaceName] = {key: space for key in gram for space in columns if space == key}
    passed = dense_tensors is None
    if not spaces:
        return pruned.observe(index, tensors, gram), passed
    wanted = list(spaces.values())
    theirs = None if dense_tensors is None else Residual(dense, index, dense_tensors, wanted)
    ours = Residual(pruned, index, tensors, wanted)
    experts = pruned.factory.experts(ours.block)
    observers = {key: pruned.observer(ours.block, index, key, own) for key, own in gram.items()}
    ours.whole = any(key not in pruned.factory.family.spaces for key in gram)
    if theirs is not None:
        theirs.whole = later is not None
    drifts = {space: [ours.no_drift(space) for _ in range(pruned.folds)] for space in wanted}
    for position, (fold, rows) in enumerate(pruned.batches):
        for observer in observers.values():
            observer.fold = fold
        if theirs is not None:
            theirs.run(rows)
        ours.run(rows)
        # Only a block that has run tells whether its norms come first.
        if position == 0 and theirs is not None:
            theirs.whole = passed = later is not None and all(theirs.ends(space) for space in columns if space in later)
        elif position == 0 and not all(ours.ends(space) for space in wanted):
            raise ValueError(f"the dense model's hidden states are past what is asked for of block {index}")
        for space, folds in drifts.items():
            reached = _rows(dense.states[rows].to(dense.factory.device)) if theirs is None else theirs.after(space)
            reached = reached if seen is None else seen(reached)
            if (number := pruned.factory.expert_of(space)) is not None:
                tokens = None if experts is None else experts.routed.get(number)
                if experts is None or tokens is None:
                    continue
                # Experts that see a token share what there is to make up for.
                delta = ours.unscaled(space, reached - ours.after(space))[tokens] / experts.most
            else:
                delta = ours.unscaled(space, reached - ours.after(space))
            folds[fold] = folds[fold].accumulate(delta, ours.inputs[columns[space].consumer])
        if theirs is not None and passed:
            dense.states[rows] = theirs.left.cpu()
    found: dict[Key, SpaceMoments] = {}
    for key, observer in observers.items():
        moments: SpaceMoments = observer.moments()
        if key in spaces:
            own = drifts[spaces[key]]
            moments = tuple(
                replace(m, drift=drift.to("cpu"))
                for m, drift in zip(moments, own, strict=True)
                if isinstance(m, Moments)
            )
        found[key] = moments
    found = pooled(pruned.group, found)
    if experts is not None:
        found = pruned.completed(ours.block, index, experts, found, gram)
        found = {key: _with_drift(ours, spaces[key], own) if key in spaces else own for key, own in found.items()}
    return found, passed


def _with_drift(residual: "Residual", space: SpaceName, moments: SpaceMoments) -> SpaceMoments:
    """Moments of tokens that were shown to an expert that does not see them: nothing is to be made up for there."""
    none = residual.no_drift(space).to("cpu")
    return tuple(replace(each, drift=each.drift or none) for each in moments if isinstance(each, Moments))


class _SeenError(Exception):
    """Raised by a hook to stop a block once all that is asked for has been seen."""


class Residual:
    """One block of a stream, and the residual stream after those of its spaces that are asked for.

    Args:
        stream: at the input of the block.
        index: of the block.
        tensors: its on-disk tensors.
        spaces: that end in a consumer.

    Attributes:
        block: the module.
        whole: whether the block runs to its end even where only attention is asked for.
        inputs: linear module → its input in the batch that ran last, (..., d_in).
        outputs: the same of outputs, (..., d_out).
        left: what the block made of that batch, if it ran to its end.
    """

    def __init__(
        self, stream: HiddenStream, index: int, tensors: Mapping[str, Tensor], spaces: list[SpaceName]
    ) -> None:
        self._stream, self._index = stream, index
        family, factory = stream.factory.family, stream.factory
        self._columns = family.columns
        self.block = factory.build_block(index, tensors)
        names = {space: family.scale(index, space) for space in spaces}
        self._scales = {s: tensors[n].to(factory.device, torch.float64) for s, n in names.items() if n is not None}
        for space in spaces:
            key = self._columns[space].multiplier
            if key is not None:
                self._scales[space] = torch.tensor(float(getattr(factory.config, key)), dtype=torch.float64)
        norms = {space: own.norm for space, own in self._columns.items() if space in spaces and own.norm is not None}
        self._norms = {space: self.block.get_submodule(norm) for space, norm in norms.items()}
        self._gains = {
            space: tensors[family.tensor(index, norm)].to(factory.device, torch.float64) + family.norm_offset
            for space, norm in norms.items()
        }
        self.whole = False
        self._brief = all(self._attention(space) for space in spaces)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self._entered = self.left = torch.empty(0)
        # What tells pre-norm and post-norm apart, and what the consumers asked for need.
        watched = {family.attention.query}
        for space in spaces:
            watched |= {self._columns[space].readers[0], self._columns[space].consumer}
        for name in watched:
            self._watch(name)

    def _watch(self, name: str) -> None:
        # A hook that held this would close a circle through the block: a batch's activations would stay, block after
        # block, until Python's collector comes by.
        watching = weakref.ref(self)

        def see(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            own = watching()
            assert own is not None
            own.inputs[name], own.outputs[name] = args[0], output
            if own._brief and not own.whole and name == own._stream.factory.family.attention.output:
                raise _SeenError

        path = self._stream.factory.module_path(self._index, name)
        self.block.get_submodule(path).register_forward_hook(see)

    def run(self, rows: slice, states: Tensor | None = None) -> None:
        """Let samples go through the block, as far as is needed; they enter it as the stream has them by default."""
        entering = self._stream.states[rows] if states is None else states
        self._entered = entering.to(self._stream.factory.device)
        with suppress(_SeenError):
            self.left = self._stream.run(self.block, self._index, self._entered)

    @property
    def _post_norm(self) -> bool:
        """Whether norms stand after the additions: then queries are made of the very input of the block.

        They are, too, where the only norms stand before the additions.
        """
        if any(space.norm is not None for space in self._columns.values()):
            return False
        return torch.equal(self.inputs[self._stream.factory.family.attention.query], self._entered)

    def _attention(self, space: SpaceName) -> bool:
        return self._columns[space].consumer == self._stream.factory.family.attention.output

    def ends(self, space: SpaceName) -> bool:
        """Whether the residual stream after a space's consumer is what the block gives."""
        return not self._attention(space) and not self._post_norm

    def after(self, space: SpaceName) -> Tensor:
        """The residual stream after a space's consumer and before any norm of it, (tokens, hidden) float64."""
        if self.ends(space):
            return _rows(self.left)
        before = self._entered if self._attention(space) else self.inputs[self._columns[space].readers[0]]
        return _rows(before) + self.added(space)

    def added(self, space: SpaceName) -> Tensor:
        """What a space's consumer adds to the residual stream, (tokens, hidden) float64."""
        output = self.outputs[self._columns[space].consumer]
        added = _rows(self._norms[space](output) if space in self._norms else output)
        return added * self._scales[space] if space in self._scales else added

    def unscaled(self, space: SpaceName, residual: Tensor) -> Tensor:
        """What a space's consumer would have to give for a difference of the residual stream; 0 where its scale is."""
        if space in self._gains:
            output = self.outputs[self._columns[space].consumer]
            gain, own = self._gains[space], _rows(output)
            normed = torch.where(gain == 0, 0.0, _rows(self._norms[space](output)) / gain)
            # Its length over that of what the norm makes of it, the same elements counted.
            length = torch.where(gain == 0, 0.0, own).norm(dim=1, keepdim=True)
            length = length / normed.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
            return torch.where(gain == 0, 0.0, length * residual / gain)
        if space not in self._scales:
            return residual
        scale = self._scales[space]
        return torch.where(scale == 0, 0.0, residual / scale)

    def no_drift(self, space: SpaceName) -> Drift:
        """The drift of no token at a space's consumer."""
        path = self._stream.factory.module_path(self._index, self._columns[space].consumer)
        outputs, width = self.block.get_parameter(f"{path}.weight").shape
        return Drift.zeros(outputs, width, self._stream.factory.device)


def _rows(states: Tensor) -> Tensor:
    """(..., d) as (tokens, d) float64: some blocks fold samples and tokens together before their mlp."""
    return states.reshape(-1, states.shape[-1]).double()
