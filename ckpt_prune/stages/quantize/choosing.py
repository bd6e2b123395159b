"""How each weight of a checkpoint is stored, by budget: int4 in groups, int8 by rows, or as it is.

What each way loses is predicted (`budget.rounding_losses`). Weights that read one input share a way, since vLLM joins
them. The embedding and the head stay, as `quantize` leaves them, but for tokens that go.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from ckpt_prune.budget.choices import BudgetError, Choices, save, spend
from ckpt_prune.budget.rounding_losses import FED, Losses, left_by_feedback, predict_losses
from ckpt_prune.checkpoint.shard import CODES, build_header
from ckpt_prune.job.layout import Layout, count_bytes, layout_of
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model, TensorSpec
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP
from ckpt_prune.sparsity.inverse import factorise_largest_first
from ckpt_prune.sparsity.zeros import weights_by_module
from ckpt_prune.stages.quantize.packing import packed_shapes
from ckpt_prune.stages.quantize.rounding import MORE_SHRINKS, codes_of, gptq_codes, scales_of, weights_of
from ckpt_prune.stages.quantize.scheme import DENSE, GROUPS, Format, PackingScheme, Schemes, choose_scheme

SCHEMES = (*(PackingScheme("int4", size) for size in (*GROUPS, None)), PackingScheme("int8", None))
"""Ways in question, besides none."""
_WEIGHT = ".weight"
_METADATA = {"format": "pt"}
_WIDEST = 10**10
"""Stands for places in a file, whose digits are not known yet."""


def schemes_for(columns: int) -> list[PackingScheme]:
    """Return the ways in question for rows of so many columns."""
    return [scheme for scheme in SCHEMES if columns % (scheme.group_size or 1) == 0]


def linear_weights(model: Model) -> dict[str, TensorSpec]:
    """Return the weights that `quantize` rounds, in the order of the files, with dtype and shape."""
    tensors = model.checkpoint.tensors
    modules = weights_by_module(tensors, model.family.block, model.family.linears)
    chosen = {name for names in modules.values() for name in names}
    return {name: (info.dtype, info.shape) for name, info in tensors.items() if name in chosen and all(info.shape)}


def predict_scheme_losses(model: Model, samples: Samples, moments: Mapping[str, Moments], **how: Any) -> Losses:
    """Predict what every way to store every linear weight adds, rounded by GPTQ, in nats a token: 0 if it is dense.

    GPTQ is tried on the weights whose moments have a Gram. Others keep the share that it leaves of those in the same
    place of their blocks (`left_by_feedback`).

    Args:
        samples: a few, that the model is run on.
        moments: of the inputs of weights by name, on other samples.
        how: device and dtype that it is run in.
    """
    weights = linear_weights(model)

    def round_all(name: str, rows: Tensor) -> dict[str, Tensor]:
        inputs, dtype = moments.get(name), weights[name][0]
        energies = None if inputs is None else inputs.square / inputs.square.mean().clamp_min(1e-30)
        gram = None if inputs is None else inputs.gram
        if gram is not None:
            factor = factorise_largest_first(gram, DAMP, MOST_DAMP)
        rounded = {}
        for scheme in schemes_for(rows.shape[1]):
            scales = scales_of(rows, scheme, dtype, MORE_SHRINKS, energies)
            rounded[scheme.name] = weights_of(codes_of(rows, scales, scheme), scales, scheme).float()
            if gram is not None:
                scales = scales_of(rows, scheme, dtype, MORE_SHRINKS, factor.energies)
                codes = gptq_codes(rows, factor, scales, scheme)
                rounded[scheme.name + FED] = weights_of(codes, scales, scheme).float()
        return rounded

    predicted = predict_losses(model, samples, round_all, outside=False, **how)
    shares = left_by_feedback(model, predicted)
    return {
        name: {
            scheme.name: predicted[name][scheme.name] * shares[name].get(scheme.name, 1.0)
            for scheme in schemes_for(weights[name][1][1])
        }
        for name in weights
        if name in predicted
    }


@dataclass(frozen=True)
class Shape:
    """A model with fewer columns and tokens.

    Attributes:
        layout: of its files.
        columns: that each MLP keeps; None: all.
        rows: tokens that stay; None: all.
        lost: what the absence of the others is predicted to add, in nats a token.
    """

    layout: Layout
    columns: int | None = None
    rows: int | None = None
    lost: float = 0.0


@dataclass(frozen=True)
class SchemeChoice:
    """How each weight is stored.

    Attributes:
        names: weight → name of its scheme, or dense.
        bytes: of the files.
        kl: what it is predicted to lose, in nats a token.
        shape: of the model that is stored so; None: as it is.
    """

    names: dict[str, str]
    bytes: int
    kl: float
    shape: Shape | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Way to store a weight → how many are."""
        return dict(Counter(self.names.values()).most_common())

    @property
    def rounds(self) -> bool:
        """Whether any weight is rounded."""
        return set(self.counts) != {DENSE}

    @property
    def usual(self) -> PackingScheme:
        """The scheme of most weights that are rounded."""
        rounded = Counter(name for name in self.names.values() if name != DENSE)
        scheme = PackingScheme.parse(rounded.most_common(1)[0][0]) if rounded else None
        return scheme or SCHEMES[-1]

    def types(self, model: Model) -> dict[str, str]:
        """Return expressions that together name each weight once → how it is stored, for the recipe."""
        modules = weights_by_module(self.names, model.family.block, model.family.linears)
        before, after = (re.escape(part) for part in model.family.block.split("{block}"))
        blocks_of: dict[tuple[str, str], list[str]] = {}
        for module, names in modules.items():
            number = re.compile(rf"{before}(\d+){after}{re.escape(module)}\.weight")
            for name in names:
                match = number.fullmatch(name)
                assert match is not None
                blocks_of.setdefault((module, self.names[name]), []).append(match[1])
        return {
            rf"^{before}({'|'.join(blocks)}){after}{re.escape(module)}\.weight$": way
            for (module, way), blocks in blocks_of.items()
        }


@dataclass(frozen=True)
class SchemeBudget:
    """The ways to store a model's weights, with the bytes and the predicted loss of each.

    Of a matrix that keeps a share of its elements, rounding adds that share of what it adds to the whole matrix.

    Attributes:
        losses: of every weight, as `predict_scheme_losses` tells them.
        shape: that the model has then; None: as it is.
    """

    model: Model
    losses: Losses
    shape: Shape | None = None

    @cached_property
    def _layout(self) -> Layout:
        return layout_of(self.model) if self.shape is None else self.shape.layout

    @property
    def _by_pruning(self) -> float:
        return 0.0 if self.shape is None else self.shape.lost

    @cached_property
    def _weights(self) -> dict[str, TensorSpec]:
        specs = {name: spec for tensors in self._layout.values() for name, spec in tensors.items()}
        return {name: specs[name] for name in linear_weights(self.model) if name in self.losses}

    def _lost(self, name: str, way: str) -> float:
        share = prod(self._weights[name][1]) / self.model.checkpoint.tensors[name].numel
        return share * self.losses[name][way]

    @cached_property
    def _together(self) -> list[list[str]]:
        """Weights that share a way, since they read one input."""
        model, remaining = self.model, dict.fromkeys(self._weights)
        groups = []
        for block in range(model.blocks):
            for modules in model.inputs(block).values():
                names = [name for module in modules if (name := model.tensor(block, module)) in remaining]
                for name in names:
                    del remaining[name]
                groups += [names] if names else []
        return [*groups, *([name] for name in remaining)]

    @cached_property
    def _sites(self) -> list[Choices]:
        return [Choices.of(self._choices(names)) for names in self._together]

    def _choices(self, names: Sequence[str]) -> list[tuple[dict[str, str], float, float]]:
        known = self.losses[names[0]]  # rows that are shorter may divide into more
        ways: list[PackingScheme | None] = [
            *(each for each in schemes_for(self._weights[names[0]][1][1]) if each.name in known),
            None,
        ]
        choices = []
        for scheme in ways:
            label = DENSE if scheme is None else scheme.name
            cost = sum(_stored_bytes(name, self._weights[name], scheme) for name in names)
            lost = 0.0 if scheme is None else sum(self._lost(name, label) for name in names)
            choices.append((dict.fromkeys(names, label), float(cost), lost))
        return choices

    @cached_property
    def _outside(self) -> int:
        """Bytes of the files that no choice changes."""
        dense = sum(_stored_bytes(name, spec, None) for name, spec in self._weights.items())
        return file_bytes(self._layout) - dense

    @cached_property
    def _smallest(self) -> SchemeChoice:
        return self._of([0] * len(self._sites))

    @property
    def least(self) -> int:
        """The bytes of the smallest files."""
        return self._smallest.bytes

    def at_bytes(self, limit: int) -> SchemeChoice:
        """Return what is predicted to lose least in files of at most `limit` bytes; BudgetError if nothing fits."""
        room = limit
        while True:
            try:
                choice = self._of(spend(self._sites, room - self._outside))
            except BudgetError:
                if self.least > limit:
                    raise
                return self._smallest  # places in files have fewer digits than was reckoned
            if choice.bytes <= limit:
                return choice
            room -= choice.bytes - limit  # or more

    def at_loss(self, limit: float) -> SchemeChoice:
        """Return the smallest files that are predicted to lose at most `limit`; BudgetError if none do."""
        return self._of(save(self._sites, limit - self._by_pruning))

    def everywhere(self, kind: Format) -> SchemeChoice | None:
        """Return the choice that stores all weights as `quantize` does by default; None if it refuses them."""
        columns = {name: spec[1][1] for name, spec in self._weights.items()}
        if kind == "int4" and any(width % GROUPS[-1] for width in columns.values()):
            return None
        scheme = choose_scheme(kind, None, columns)
        return self._as(dict.fromkeys(self._weights, scheme.name))

    def is_default(self, choice: SchemeChoice) -> bool:
        """Return whether `quantize` stores weights so by a format alone."""
        default = self.everywhere(choice.usual.format)
        return default is not None and choice.names == default.names

    def _of(self, at: Sequence[int]) -> SchemeChoice:
        return self._as(
            {name: way for site, index in zip(self._sites, at, strict=True) for name, way in site.labels[index].items()}
        )

    def _as(self, ways: Mapping[str, str]) -> SchemeChoice:
        names = {name: ways[name] for name in self._weights}
        schemes = {name: scheme for name, way in names.items() if (scheme := PackingScheme.parse(way)) is not None}
        kl = self._by_pruning + sum(self._lost(name, way) for name, way in names.items() if way != DENSE)
        return SchemeChoice(names, file_bytes(_pack(self._layout, schemes)), kl, self.shape)


def _pack(dense: Layout, schemes: Schemes) -> Layout:
    """Return files with their tensors once weights are stored so."""
    layout: Layout = {}
    for file, tensors in dense.items():
        layout[file] = {}
        for name, (dtype, shape) in tensors.items():
            if name in schemes:
                layout[file] |= packed_shapes(name.removesuffix(_WEIGHT), (shape[0], shape[1]), schemes[name], dtype)
            else:
                layout[file][name] = (dtype, shape)
    return layout


def file_bytes(layout: Layout) -> int:
    """Return the bytes of files with these tensors."""
    heads = [len(build_header(file, tensors, _METADATA)[0]) for file, tensors in layout.items()]
    return sum(heads) + count_bytes(layout)


def _stored_bytes(name: str, spec: TensorSpec, scheme: PackingScheme | None) -> int:
    """Return the bytes of a weight stored so, with those that name its tensors in the head of the file."""
    dtype, shape = spec
    tensors = {name: spec}
    if scheme is not None:
        tensors = packed_shapes(name.removesuffix(_WEIGHT), (shape[0], shape[1]), scheme, dtype)
    heads = {
        name: {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [_WIDEST, _WIDEST]}
        for name, (dtype, shape) in tensors.items()
    }
    data = sum(prod(shape) * dtype.itemsize for dtype, shape in tensors.values())
    return data + len(json.dumps(heads, separators=(",", ":")))
