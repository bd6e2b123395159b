"""Measure the drift of a pruned model's residual stream, for the drift-correcting target.

See compensation/README.md, section 4.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ckpt_prune.measure.moments.inputs import Drift
from ckpt_prune.measure.moments.kinds import Key, SpaceMoments, pool_moments, select_input_moments
from ckpt_prune.measure.streams.block_memory import AllSeenError
from ckpt_prune.measure.streams.experts import SplitExperts
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.spaces import SpaceName


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
    narrow: Callable[[Tensor], Tensor] | None = None,
) -> tuple[dict[Key, SpaceMoments], bool]:
    """Measure moments in the pruned stream, a tuple over folds, with the drift of spaces that have a consumer.

    The target of a consumer is y* = (dense residual stream after it) − (pruned residual stream before it), its own
    bias aside. If the block multiplies its output by a layer scale s, the target is divided by s. Stored is
    δ = y* − W x, with the input x and the weight W of the consumer in the block as `tensors` have it. It is the dense
    residual stream behind the consumer less the pruned one there, divided by s (compensation/README.md, section 4; this
    project's). If an element of s is zero, nothing the consumer does is seen, and δ is zero. An RMSNorm with gains g
    that the output passes is such a scale: g over the root mean square of each token's own output. The norm forgets
    that length, so y* keeps it. Queries and keys have no output of their own in the stream; their moments, and those
    of linear modules that no space names, are those of `HiddenStream.observe`.

    Both blocks run batch by batch, one after the other, and no further than is needed; two blocks and two streams are
    held. δ is computed in float64, or in float32 of streams in half precision.

    Args:
        dense: stream of the dense model at the input of the block, or at its output.
        pruned: stream of the pruned one, of the same samples and folds, at the input of the block.
        index: of the block.
        dense_tensors: its on-disk tensors in the dense model; None if `dense` is past the block. Then only spaces
            after which the residual stream is the block's output can be asked for.
        tensors: its tensors in the pruned model, of any widths; consumers that are asked for are still whole.
        gram: spaces and linear modules to observe, and whether with the Gram.
        later: spaces that will be asked for next of this block. If its output alone serves all of them, `dense` is let
            past the block. None leaves `dense` at its input.
        narrow: maps the dense residual stream, (tokens, hidden) float64, to what a narrower pruned one has room for.

    Returns:
        The moments, and whether `dense` is past the block.
    """
    if dense.batches != pruned.batches:
        raise ValueError("drift is measured between streams of the same samples in the same folds")
    factory = pruned.factory
    columns = factory.family.columns
    spaces: list[Key] = [key for key in gram if key in columns]
    passed = dense_tensors is None
    if not spaces:
        return pruned.observe(index, tensors, gram), passed
    ours = ResidualBlock(pruned, index, tensors, spaces)
    pruned.learn_structure(ours.block, index, tensors)  # before there is a dense block, so that two are held at most
    theirs = None if dense_tensors is None else ResidualBlock(dense, index, dense_tensors, spaces)
    pair = _Pair(dense, theirs, ours, factory.find_experts(ours.block), narrow)
    observers = {key: pruned.watch(ours.block, index, key, with_gram) for key, with_gram in gram.items()}
    ours.whole = any(key not in factory.family.spaces for key in gram)
    if theirs is not None:
        theirs.whole = later is not None
    leaving = dense.states
    drifts = {space: [ours.no_drift(space) for _ in range(pruned.folds)] for space in spaces}
    with pruned.replay(ours.block, index, tensors):
        for position, (fold, rows) in enumerate(pruned.run_order()):
            for observer in observers.values():
                observer.fold, observer.counted = fold, pruned.counted(rows)
            if theirs is not None:
                theirs.run(rows)
            ours.run(rows)
            # Only a block that has run tells whether its norms come first.
            if position == 0 and theirs is not None:
                passed = later is not None and all(theirs.ends(space) for space in columns if space in later)
                theirs.whole = passed
            elif position == 0 and not all(ours.ends(space) for space in spaces):
                raise ValueError(f"the dense model's hidden states have already passed block {index}")
            for space, folds in drifts.items():
                delta = pair.difference(space, rows)
                if delta is not None:
                    inputs, counted = ours.inputs[columns[space].consumer], pruned.counted(rows)
                    if counted is not None:
                        delta, inputs = delta[counted.flatten()], inputs[counted]
                    folds[fold] = folds[fold].accumulate(delta, inputs)
            if theirs is not None and passed:
                leaving = dense.put(leaving, rows, theirs.left)
    dense.states = leaving
    moments: dict[Key, SpaceMoments] = {key: observer.finish() for key, observer in observers.items()}
    for space, folds in drifts.items():
        pairs = zip(select_input_moments(moments[space]), folds, strict=True)
        moments[space] = tuple(replace(fold, drift=drift.to("cpu")) for fold, drift in pairs)
    moments = pool_moments(pruned.group, moments)
    if pair.experts is None:
        return moments, passed
    moments = pruned.complete_experts(ours.block, index, pair.experts, moments, gram)
    for space in spaces:  # of tokens that were only shown to an expert: nothing is to be made up for there
        none = ours.no_drift(space).to("cpu")
        complete = select_input_moments(moments[space])
        moments[space] = tuple(replace(fold, drift=fold.drift or none) for fold in complete)
    return moments, passed


@dataclass(frozen=True)
class _Pair:
    """A block of the pruned model that has run on some samples, and the dense one's on the same.

    Attributes:
        theirs: None if the dense stream is past the block.
        experts: of the pruned block.
    """

    dense: HiddenStream
    theirs: "ResidualBlock | None"
    ours: "ResidualBlock"
    experts: SplitExperts | None
    narrow: Callable[[Tensor], Tensor] | None

    def difference(self, space: Key, rows: slice) -> Tensor | None:
        """Return δ at a space's consumer, (tokens, d_out); of an expert's for the tokens that it sees, None if none."""
        number = self.ours._stream.factory.find_expert(space)
        tokens = None if self.experts is None or number is None else self.experts.routed.get(number)
        if number is not None and tokens is None:
            return None
        if self.theirs is None:
            target = _rows(self.dense.cut(rows, self.dense.states[rows]).to(self.dense.factory.device))
        else:
            target = self.theirs.after(space)
        target = target if self.narrow is None else self.narrow(target.double())
        delta = self.ours.unscale(space, target - self.ours.after(space))
        # Experts that see a token share what there is to make up for.
        return delta if self.experts is None or tokens is None else delta[tokens] / self.experts.most


@torch.no_grad()
def ends_block(stream: HiddenStream, index: int, tensors: Mapping[str, Tensor], spaces: Collection[SpaceName]) -> bool:
    """Return True if the residual stream after each of these spaces is the output of their block. It runs once."""
    residual = ResidualBlock(stream, index, tensors, spaces)
    residual.whole = True
    residual.run(stream.batches[0][1])
    return all(residual.ends(space) for space in spaces)


class ResidualBlock:
    """One block of a stream, and the residual stream after those of its spaces that are asked for.

    Attributes:
        block: built of the given tensors.
        whole: whether the block runs to its end even if only attention is asked for.
        inputs: linear module → its input in the batch that ran last, (..., d_in).
        outputs: linear module → its output, (..., d_out).
        left: the block's output for that batch, if it ran to its end.
    """

    def __init__(
        self, stream: HiddenStream, index: int, tensors: Mapping[str, Tensor], spaces: Collection[SpaceName]
    ) -> None:
        self._stream, self._index = stream, index
        family, factory = stream.factory.family, stream.factory
        self._columns = family.columns
        asked = spaces
        if "cross_heads" in spaces:
            spaces = {*spaces, "heads"}  # which stand before those of cross-attention
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
        self._spaces, self._awaited = tuple(asked), set[str]()
        self._attention_alone = all(self._is_attention(space) for space in spaces)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self._entered = self.left = torch.empty(0)
        paths = {
            name: factory.module_path(index, name)
            for space in spaces
            for name in (self._columns[space].readers[0], self._columns[space].consumer)
        }
        # What reads the block's input tells pre-norm and post-norm apart: queries, or what stands in their place.
        queries = factory.find_paths(index, family.tensor(index, family.attention.query))
        linears = (path for path, module in self.block.named_modules() if isinstance(module, nn.Linear))
        self._first = family.attention.query if queries else next(linears)
        paths[self._first] = queries[0].removesuffix(".weight") if queries else self._first
        for name, path in paths.items():
            self._watch(name, path)

    def _watch(self, name: str, path: str) -> None:
        # A hook that held this would close a circle through the block: a batch's activations would stay, block after
        # block, until Python's collector comes by.
        watching = weakref.ref(self)

        def see(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            residual = watching()
            assert residual is not None
            residual.inputs[name], residual.outputs[name] = args[0], output
            residual._awaited.discard(name)
            if residual._attention_alone and not residual.whole and not residual._awaited:
                raise AllSeenError

        self.block.get_submodule(path).register_forward_hook(see)

    def run(self, rows: slice, states: Tensor | None = None) -> None:
        """Let samples go through the block, as far as is needed; they enter it as the stream has them by default."""
        entering = self._stream.states[rows] if states is None else states
        entering = entering.to(self._stream.factory.device)
        self._entered = self._stream.cut(rows, entering)
        self._awaited = {self._columns[space].consumer for space in self._spaces}
        with suppress(AllSeenError):
            self.left = self._stream.cut(rows, self._stream.run(self.block, self._index, entering, rows))

    @property
    def _is_post_norm(self) -> bool:
        """True if norms stand after the additions: then queries are made of the very input of the block.

        They are, too, if the only norms stand before the additions.
        """
        if any(space.norm is not None for space in self._columns.values()):
            return False
        read = self.inputs[self._first]
        return read.numel() == self._entered.numel() and torch.equal(read.reshape(self._entered.shape), self._entered)

    def _is_attention(self, space: SpaceName) -> bool:
        return self._stream.factory.family.mixes(space)

    def ends(self, space: SpaceName) -> bool:
        """Return True if the residual stream after a space's consumer is the block's output."""
        return not self._is_attention(space) and not self._is_post_norm

    def after(self, space: SpaceName) -> Tensor:
        """Return the residual stream after a space's consumer and before any norm of it, (tokens, hidden) float64."""
        if self.ends(space):
            return _rows(self.left)
        if space == "cross_heads" and not self._is_post_norm:  # cross-attention adds to what the other left
            return self.after("heads") + self.addition(space)
        enters = self._is_attention(space) and space != "cross_heads"
        before = self._entered if enters else self.inputs[self._columns[space].readers[0]]
        return _rows(before) + self.addition(space)

    def addition(self, space: SpaceName) -> Tensor:
        """Return what a space's consumer adds to the residual stream, (tokens, hidden) float64."""
        output = self.outputs[self._columns[space].consumer]
        addition = _rows(self._norms[space](output) if space in self._norms else output)
        return addition * self._scales[space] if space in self._scales else addition

    def unscale(self, space: SpaceName, residual: Tensor) -> Tensor:
        """Return the output of a space's consumer that makes a difference of the residual stream; 0 if its scale is."""
        if space in self._gains:
            output = self.outputs[self._columns[space].consumer]
            gain, plain = self._gains[space], _rows(output)
            normed = torch.where(gain == 0, 0.0, _rows(self._norms[space](output)) / gain)
            # The output's length over that of the norm's result, the same elements counted.
            length = torch.where(gain == 0, 0.0, plain).norm(dim=1, keepdim=True)
            length = length / normed.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
            return torch.where(gain == 0, 0.0, length * residual / gain)
        if space not in self._scales:
            return residual
        scale = self._scales[space]
        return torch.where(scale == 0, 0.0, residual / scale)

    def no_drift(self, space: SpaceName) -> Drift:
        """Return the drift of no token at a space's consumer."""
        path = self._stream.factory.module_path(self._index, self._columns[space].consumer)
        outputs, width = self.block.get_parameter(f"{path}.weight").shape
        return Drift.zeros(outputs, width, self._stream.factory.device)


def _rows(states: Tensor) -> Tensor:
    # (..., d) as (tokens, d): some blocks fold samples and tokens together before their mlp. Sums of two numbers of
    # half the digits lose nothing in float32.
    dtype = torch.float32 if states.dtype in (torch.bfloat16, torch.float16) else torch.float64
    return states.reshape(-1, states.shape[-1]).to(dtype)
