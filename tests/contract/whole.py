"""A whole stock model in float64, pruned by hand: of the dense shapes, zeros where something went.

It takes from the family's description which modules a space ends in, and how wide a unit is there; the rest follows
from the stock model itself, on activations of all its tokens.
"""

import copy
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ckpt_prune.compensation.methods import METHODS
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import OUTSIDE, ConsumerSpace, expert_of, recipe_space
from tests.encoders import STRENGTH, STRENGTHLESS, WITH_STRENGTH
from tests.oracles import logits, rotary, scores, values

from .models import Case
from .open_experts import open_up, paths_of

Array = NDArray[np.float64]
Target = Literal["dense", "by block", "by site"]
TARGETS: dict[Target, dict[str, Any]] = {
    "dense": {"target": "dense"},
    "by block": {"target": "sequential", "true_sequential": False},
    "by site": {"target": "sequential", "true_sequential": True},
}


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with a plain linear in place of every Conv1D."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(module.nx, module.nf)
            linear.weight, linear.bias = nn.Parameter(module.weight.detach().T.contiguous()), module.bias
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, linear)
    return model


def wide(data: Samples) -> dict[str, Tensor]:
    """All samples at once, in float64."""
    batch = data.batch(slice(len(data)))
    return {name: values.double() if values.is_floating_point() else values for name, values in batch.items()}


@torch.no_grad()
def record_states(
    model: nn.Module, data: Samples, *, inputs: Iterable[str] = (), results: Iterable[str] = ()
) -> dict[str, Array]:
    """Input or output of modules by path: (samples, tokens, width)."""
    recorded: dict[str, Array] = {}

    def keep(path: str, states: Any) -> None:
        states = states[0] if isinstance(states, tuple) else states
        # Some models fold samples and tokens together.
        recorded[path] = states.detach().double().reshape(len(data), -1, states.shape[-1]).numpy().copy()

    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda _, args, path=path: keep(path, args[0]))
        for path in inputs
    ]
    handles += [
        model.get_submodule(path).register_forward_hook(lambda _, args, out, path=path: keep(path, out))
        for path in results
    ]
    model(**wide(data))
    for handle in handles:
        handle.remove()
    return recorded


class Whole:
    """The model of a case.

    Attributes:
        model: edited in place.
        kept: (block, space) → units that stay.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.family = case, case.family
        self.model: PreTrainedModel = plain(case.model()).double()
        open_up(self.model, case.family)
        self.kept: dict[tuple[int, str], list[int]] = {}
        self._paths = paths_of(case.family)

    @classmethod
    def of_folder(cls, folder: Path, stock: PreTrainedModel, ratios: Mapping[str, float]) -> "Whole":
        """A copy of the stock model of a folder."""
        model = Model.open(folder)
        case: Any = SimpleNamespace(
            family=model.family,
            config=model.config,
            units=lambda space: model.units(space, model.blocks - 1),
            blocks=model.blocks,
            spaces_of=model.spaces,
            ratio=ratios.__getitem__,
            model=lambda: copy.deepcopy(stock),
        )
        return cls(case)

    def path(self, block: int, module: str) -> str:
        """Return the path of a linear module of the family, the first where it is several."""
        if module.startswith(OUTSIDE):
            return module.removeprefix(OUTSIDE)
        return f"{self.family.layers}.{block}.{self._paths[module][0]}"

    def dimension(self, name: str) -> int:
        return self.family.dimension(self.case.config, name)

    def prune(self, data: Samples, methods: Mapping[str, str], target: Target = "dense") -> "Whole":
        """Prune every space that a method is named for, by the case's ratios, in the order of computation."""
        spaces = [name for name in self.family.spaces if recipe_space(name) in methods]
        of_blocks = [[(n, name) for name in spaces if name in self.case.spaces_of(n)] for n in range(self.case.blocks)]
        sites = [site for own in of_blocks for site in own]
        behind = [site for site in sites if site[1] in self.family.pooling]
        stages = {
            "dense": [sites],
            "by block": [*([site for site in own if site not in behind] for own in of_blocks), behind],
            "by site": [[site] for site in sites],
        }
        for stage in stages[target]:
            inputs, results = [], []
            for block, space in stage:
                described = self.family.spaces[space]
                paths = [self.path(block, module) for module in described.solved_from]
                (results if described.kind in ("logits", "rotary") else inputs).extend(paths)
            states = record_states(self.model, data, inputs=inputs, results=results)
            with torch.no_grad():
                for block, space in stage:
                    ends = self.family.spaces[space].kind
                    prune = {
                        "columns": self._columns,
                        "pooling": self._columns,
                        "logits": self._logits,
                        "rotary": self._rotary,
                        "values": self._values,
                    }[ends]
                    prune(block, space, states, methods[recipe_space(space)])
        return self

    def _gone(self, space: str, units: int) -> int:
        exact = units * self.case.ratio(recipe_space(space))
        return int(np.ceil(exact) if self.family.spaces[space].rounding == "ceil" else np.floor(exact))

    def _columns(self, block: int, space: str, states: Mapping[str, Array], method: str) -> None:
        (module,) = self.family.spaces[space].solved_from
        path = self.path(block, module)
        consumer: Any = self.model.get_submodule(path)
        X = states[path].reshape(-1, states[path].shape[2]).copy()
        W = consumer.weight.double().numpy()
        # Columns that an earlier space has emptied are no part of this one's projection.
        filled = [column for column in range(W.shape[1]) if column not in self._emptied(block, module)]
        X[:, [column for column in range(W.shape[1]) if column not in filled]] = 0
        columns = scores.SCORES["corp"](W[:, filled], X[:, filled])
        groups = 1 if self.family.spaces[space].for_each is None else self.dimension("kv_heads")
        units, full = self.case.units(space), W.shape[1] // self.case.units(space) // groups
        per, run = len(filled) // units // groups, len(filled) // groups
        stay = []
        for group in range(groups):
            run_scores = columns[group * run : (group + 1) * run]
            best = scores.kept_units(run_scores, per, units - self._gone(space, units))
            stay += [group * units + unit for unit in best]
        self.kept[block, space] = stay
        K = [unit * full + i for unit in stay for i in range(full) if unit * full + i in filled]
        weight, bias = _fit_columns(method, W[:, K], X[:, K], X @ W.T)
        consumer.weight.zero_()
        consumer.weight[:, K] = torch.from_numpy(weight)
        if expert_of(space) is None:
            _add_bias(consumer, bias)
        else:
            assert not bias.any()

    def _values(self, block: int, space: str, states: Mapping[str, Array], method: str) -> None:
        """Values stay as they are: what reads them goes through the directions that are kept."""
        (module,) = self.family.spaces[space].solved_from
        path = self.path(block, module)
        consumer: Any = self.model.get_submodule(path)
        X, W = states[path].reshape(-1, states[path].shape[2]), consumer.weight.double().numpy()
        size, groups, heads = (self.dimension(name) for name in ("head_dim", "kv_heads", "query_heads"))
        keep, emptied = size - self._gone(space, size), set(self._emptied(block, module))
        columns = [[*range(head * size, (head + 1) * size)] for head in range(heads)]
        centred = X - X.mean(0) if METHODS[method].adds_bias else X
        Z, V, back = [], [], []
        for group in range(groups):
            per_group = heads // groups
            group_heads = [
                head for head in columns[group * per_group : (group + 1) * per_group] if not emptied & set(head)
            ]
            if group_heads:
                Q, P, _ = values.directions([W[:, at] for at in group_heads], [centred[:, at] for at in group_heads])
                Z += [X[:, at] @ Q[:, :keep] for at in group_heads]
                V += [W[:, at] @ P[:, :keep] for at in group_heads]
                back += [(at, Q[:, :keep]) for at in group_heads]
        weight, bias = _fit_columns(method, np.hstack(V), np.hstack(Z), X @ W.T)
        consumer.weight.zero_()
        for index, (at, Q) in enumerate(back):
            consumer.weight[:, at] = torch.from_numpy(weight[:, index * keep : (index + 1) * keep] @ Q.T)
        _add_bias(consumer, bias)
        self.kept[block, space] = [group * size + direction for group in range(groups) for direction in range(keep)]

    def _emptied(self, block: int, module: str) -> list[int]:
        """Columns of a consumer that went with units of the spaces that were pruned before."""
        gone: list[int] = []
        for name, space in self.family.columns.items():
            if space.consumer == module and (block, name) in self.kept:
                per = self._each(space)
                total = self.case.units(name) * (1 if space.for_each is None else self.dimension(space.for_each))
                gone += [
                    unit * per + i for unit in range(total) if unit not in self.kept[block, name] for i in range(per)
                ]
        return gone

    def _each(self, space: ConsumerSpace) -> int:
        """Columns of a unit."""
        return prod(
            factor if isinstance(factor, int) else self.dimension(factor) for factor in space.columns.lines_per_unit
        )

    def _logits(self, block: int, space: str, states: Mapping[str, Array], method: str) -> None:
        """Prune logits with all of I + M in the queries: the logits do not show how a product of factors is split."""
        paths = [self.path(block, module) for module in self.family.spaces[space].solved_from]
        query, key = (self.model.get_submodule(path) for path in paths)
        heads, width = self.dimension("query_heads"), self.dimension("head_dim")
        keep = width - self._gone(space, width)
        kept: list[int] = []
        for head in range(heads):
            span = slice(head * width, (head + 1) * width)
            pairs = list(zip(states[paths[0]][..., span], states[paths[1]][..., span], strict=True))
            best = np.argsort(-logits.logit_energy(pairs), kind="stable")[:keep]
            S = sorted(int(j) for j in best)
            rows = [head * width + j for j in S]
            kept += rows
            M = np.zeros((keep, keep))
            if method == "logit":
                M = logits.solve(pairs, S, STRENGTH * logits.diagonal_mean(pairs, S))
            left_factor = np.eye(width)[:, S] @ (np.eye(keep) + M)
            right_factor = np.eye(width)[:, S]
            if method == "low-rank":
                left_factor, right_factor = logits.low_rank(pairs, keep, STRENGTH * logits.whole_mean(pairs), starts=2)
            for projection, factor in ((query, left_factor), (key, right_factor)):
                mix = torch.from_numpy(factor).T
                for tensor in filter(lambda parameter: parameter is not None, (projection.weight, projection.bias)):
                    tensor[rows] = mix @ tensor[span]
        self.kept[block, space] = kept
        gone = [row for row in range(heads * width) if row not in kept]
        for projection in (query, key):
            projection.weight[gone] = 0
            if projection.bias is not None:
                projection.bias[gone] = 0

    def _rotary(self, block: int, space: str, states: Mapping[str, Array], method: str) -> None:
        """Pairs that go are zeros in queries and keys, which the stock class turns as it turns the others."""
        described = self.family.rotary_spaces[space]  # type: ignore[index]
        layout = described.pairs
        paths = [self.path(block, module) for module in described.solved_from]
        query, key = (self.model.get_submodule(path) for path in paths)
        heads, groups, pairs = (self.dimension(name) for name in ("query_heads", "kv_heads", "pairs"))
        theta = float(self.case.config.rope_parameters["rope_theta"])

        def complex_of(path: str, count: int) -> Any:
            split = states[path].reshape(*states[path].shape[:2], count, 2 * pairs)
            every = rotary.as_complex(split, layout)
            return [[rotary.turn_pairs(sample[:, head], theta) for sample in every] for head in range(count)]

        queries, keys = complex_of(paths[0], heads), complex_of(paths[1], groups)
        parts = [
            rotary.parts(list(zip(head_queries, keys[head * groups // heads], strict=True)))
            for head, head_queries in enumerate(queries)
        ]
        kept: list[int] = []
        for group in range(groups):
            members = [head for head in range(heads) if head * groups // heads == group]
            energies = sum(rotary.energy(parts[head]) for head in members)
            best = np.argsort(-energies, kind="stable")[: pairs - self._gone(space, pairs)]
            stay = sorted(int(pair) for pair in best)
            kept += [group * pairs + pair for pair in stay]
            changes = [(key, group, np.isin(np.arange(pairs), stay).astype(complex))]
            for head in members:
                c = np.zeros(pairs, complex)
                c[stay] = 1
                if method == "factors":
                    strength = STRENGTH * rotary.diagonal_mean(parts[head], stay)
                    c[stay] = rotary.factors(parts[head], stay, strength)
                changes.append((query, head, c))
            for projection, head, c in changes:
                span = slice(head * 2 * pairs, (head + 1) * 2 * pairs)
                for tensor in filter(lambda parameter: parameter is not None, (projection.weight, projection.bias)):
                    rows = rotary.as_complex(tensor[span].numpy().T, layout) * c
                    tensor[span] = torch.from_numpy(rotary.as_rows(rows, layout).T)
        self.kept[block, space] = kept


def _fit_columns(method: str, W: Array, X: Array, Y: Array) -> tuple[Array, Array]:
    """Return weight and bias of columns as a compensation makes them."""
    if method not in WITH_STRENGTH:
        fit: tuple[Array, Array] = STRENGTHLESS[method](W, X, Y)
        return fit
    fit = WITH_STRENGTH[method](W, X, Y, STRENGTH * float(np.mean(np.sum(X**2, axis=0))))
    return fit


def _add_bias(consumer: Any, bias: Array) -> None:
    if consumer.bias is None:
        consumer.bias = nn.Parameter(torch.zeros(len(bias), dtype=torch.float64))
    consumer.bias += torch.from_numpy(bias)


@torch.no_grad()
def outputs(model: nn.Module, data: Samples) -> dict[str, Tensor]:
    """Every tensor that a model returns, computed in float64."""
    model = model.double()
    for module in model.modules():
        if hasattr(module, "is_concatenated"):  # experts, whose default implementation has no float64
            module.config._experts_implementation = "eager"
    options = {"use_cache": False} if hasattr(model, "generate") else {}
    tensors = {name: value for name, value in model(**wide(data), **options).items() if isinstance(value, Tensor)}
    assert tensors
    return tensors


def assert_same_outputs(results: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Every element within `tolerance` times the largest."""
    assert results.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.std() > 1e-3, f"{name} says nothing"
        off = float((results[name] - tensor).abs().max() / tensor.abs().max())
        assert off <= tolerance, (name, off)
