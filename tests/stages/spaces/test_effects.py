"""Effects of single sites, against whole stock models with columns zeroed and consumers refitted by plain solves."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.model.family import Family
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import Names
from ckpt_prune.stages.spaces.effects.measured import measure_effects
from ckpt_prune.stages.spaces.effects.site_variants import dropped_counts
from tests import encoders, families, refusals
from tests.families import BLOCKS
from tests.oracles import closed_forms, logits, values
from tests.oracles import effects as oracle
from tests.pairs import one_of
from tests.stages.whole import Sources, data_of, stock

CPU = torch.device("cpu")
LIMIT = 5
POINTS = (0.25, 0.75)
Effects = dict[str, list[tuple[int, float]]]
VARIANTS = ["llama-gqa-tied", "llama-biases", "opt", "vit", "bert-pretraining", "dinov2-swiglu"]


def measure_variant(
    sources: Sources, variant: str, *, how: Callable[..., Effects] = measure_effects, **options
) -> Effects:
    source = Model.open(sources.folder(variant))
    given = {
        "spaces": [name for name, space in source.family.spaces.items() if space.kind != "rotary"],
        "points": POINTS,
        "limit": LIMIT,
        "statistics": sources.statistics(variant),
    }
    return how(
        source,
        samples=data_of(variant),
        device=CPU,
        **{"compute_dtype": torch.float32, **given, **options},
    )


# ---- by hand, on a whole model ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByHand:
    """A whole dense model, and what reaches its modules."""

    model: PreTrainedModel
    source: Model
    data: Samples

    @property
    def family(self) -> Family:
        return self.source.family

    def path(self, block: int, disk: str) -> str:
        (name, *_) = Names(self.model).parameters(self.family.tensor(block, disk))
        return name.removesuffix(".weight")

    def outputs(self, model: PreTrainedModel) -> list[np.ndarray]:
        """On the first samples only."""
        with torch.no_grad():
            output = model(**self.data.batch(slice(0, LIMIT)))
        names = [name for name in output if name.endswith("logits")] or ["last_hidden_state"]
        return [output[name].double().numpy() for name in names]

    def effect(self, pruned: PreTrainedModel, _block: int) -> float:
        pairs = list(zip(self.outputs(self.model), self.outputs(pruned), strict=True))
        headless = self.family.auto_class == "AutoModel"
        return sum((oracle.relative if headless else oracle.kl)(*pair) for pair in pairs) / LIMIT

    def columns(self, block: int, space: str, counts: list[int]) -> list[tuple[int, float]]:
        path = self.path(block, self.family.columns[space].consumer)
        per = self.source.unit_columns(space)
        seen = encoders.watch(self.model, self.data, inputs=[path])[path]
        X = seen.reshape(-1, seen.shape[2])
        W = self.model.get_submodule(path).weight.detach().double().numpy()
        biased = self.model.get_submodule(path).bias is not None
        order = oracle.removal(W, X - X.mean(0) if biased else X, per, damp=0.01)
        effects = []
        units = self.source.units(space, 0)  # of one of several runs side by side
        runs = [[unit for unit in order if unit // units == run] for run in range(len(order) // units)]
        for count in counts:
            kept = oracle.columns_of(sorted(unit for run in runs for unit in run[count:]), per)
            strength = 0.01 * float(np.mean(np.sum(X[:, kept] ** 2, axis=0)))
            fit = closed_forms.affine if biased else closed_forms.ridge
            weight, bias = fit(W[:, kept], X[:, kept], X @ W.T, strength)
            pruned = copy.deepcopy(self.model)
            consumer = pruned.get_submodule(path)
            with torch.no_grad():
                consumer.weight.zero_()
                consumer.weight[:, kept] = torch.from_numpy(weight)
                if biased:
                    consumer.bias += torch.from_numpy(bias)
            effects.append((count, self.effect(pruned, block)))
        return effects

    def values(self, block: int, space: str, counts: list[int]) -> list[tuple[int, float]]:
        """Values stay as they are: what reads them goes through the directions that are kept."""
        path = self.path(block, self.family.columns[space].consumer)
        seen = encoders.watch(self.model, self.data, inputs=[path])[path]
        X = seen.reshape(-1, seen.shape[2])
        consumer = self.model.get_submodule(path)
        W, biased = consumer.weight.detach().double().numpy(), consumer.bias is not None
        size, groups = self.source.units(space, 0), self.source.copies(space)
        heads = np.split(np.arange(W.shape[1]), W.shape[1] // size)
        per_group, centred = len(heads) // groups, X - X.mean(0) if biased else X
        turns = []
        for group in range(groups):
            group_heads = heads[group * per_group : (group + 1) * per_group]
            Q, P, _ = values.directions([W[:, at] for at in group_heads], [centred[:, at] for at in group_heads])
            turns += [(at, Q, P) for at in group_heads]
        effects = []
        for count in counts:
            keep = size - count
            Z = np.hstack([X[:, at] @ Q[:, :keep] for at, Q, _ in turns])
            V = np.hstack([W[:, at] @ P[:, :keep] for at, _, P in turns])
            fit = closed_forms.affine if biased else closed_forms.ridge
            weight, bias = fit(V, Z, X @ W.T, 0.01 * float(np.mean(np.sum(Z**2, axis=0))))
            pruned = copy.deepcopy(self.model)
            with torch.no_grad():
                for index, (at, Q, _) in enumerate(turns):
                    read = weight[:, index * keep : (index + 1) * keep] @ Q[:, :keep].T
                    pruned.get_submodule(path).weight[:, at] = torch.from_numpy(read)
                if biased:
                    pruned.get_submodule(path).bias += torch.from_numpy(bias)
            effects.append((count, self.effect(pruned, block)))
        return effects

    def dimensions(self, block: int, counts: list[int]) -> list[tuple[int, float]]:
        """All of I + M goes into the queries: what it is split into does not show in the logits."""
        (space,) = self.family.logits.values()
        paths = [self.path(block, module) for module in space.readers]
        seen = encoders.watch(self.model, self.data, results=paths)
        width = self.source.units("qk", 0)
        effects = []
        for count in counts:
            pruned = copy.deepcopy(self.model)
            query, key = (pruned.get_submodule(path) for path in paths)
            for head, pairs in enumerate(encoders.pairs_of(*(seen[path] for path in paths))):
                kept = sorted(np.argsort(-logits.logit_energy(pairs), kind="stable")[: width - count].tolist())
                M = logits.solve(pairs, kept, 0.001 * logits.diagonal_mean(pairs, kept))
                mix = torch.from_numpy(np.eye(len(kept)) + M).T
                rows = [head * width + j for j in kept]
                gone = [head * width + j for j in range(width) if j not in kept]
                with torch.no_grad():
                    for kind in (query.weight, query.bias):
                        kind[rows] = mix @ kind[rows]
                    for projection in (query, key):
                        projection.weight[gone] = 0
                        projection.bias[gone] = 0
            effects.append((count, self.effect(pruned, block)))
        return effects


@cache
def measure_by_hand(sources_folder, variant: str, kind: type[ByHand] = ByHand) -> Effects:
    model = stock(sources_folder, variant).double()
    samples = data_of(variant)
    if variant in encoders.IMAGES:
        samples = encoders.Pixels(samples.values.double(), samples.tokens)
    source = Model.open(sources_folder)
    by_hand = kind(model, source, samples)
    effects: Effects = {}
    for block in range(BLOCKS):
        for space in (name for name, described in source.family.spaces.items() if described.kind != "rotary"):
            counts = dropped_counts(source.units(space, 0), POINTS)
            name = source.site_name(block, space)
            if space == "qk":
                effects[name] = by_hand.dimensions(block, counts)
            else:
                effects[name] = (by_hand.values if space == "values" else by_hand.columns)(block, space, counts)
    return effects


def assert_close(measured: Effects, expected: Effects, tolerance: float) -> None:
    assert measured.keys() == expected.keys()
    for name, points in measured.items():
        assert [count for count, _ in points] == [count for count, _ in expected[name]], name
        effects = [value for _, value in points]
        assert min(effects) > 1e-6, f"{name} says nothing"
        assert effects == pytest.approx([value for _, value in expected[name]], rel=tolerance), name


@pytest.mark.parametrize("variant", one_of(5, VARIANTS))
def test_effects_are_those_on_the_whole_model(dense, variant):
    measured = measure_variant(dense, variant)
    assert_close(measured, measure_by_hand(dense.folder(variant), variant), 2e-4)


refusal = partial(refusals.refusal, measure_variant)


def test_statistics_that_lack_moments(dense, tmp_path):
    folder = dense.folder("vit")
    bare = encoders.calibrate(folder, tmp_path / "bare", data_of("vit"), collect=("moments",))
    assert refusal(dense, "vit", statistics=bare) == (
        f"effects need Grams, and {bare.folder} has none: calibrate with --collect moments,gram"
    )
    grams = encoders.calibrate(folder, tmp_path / "grams", data_of("vit"), collect=("moments", "gram"))
    assert refusal(dense, "vit", statistics=grams) == (
        f"effects of q and k need their moments, and {grams.folder} has none: "
        "calibrate with --collect moments,gram,logits"
    )
    assert len(measure_variant(dense, "vit", statistics=grams, spaces=["heads"])) == BLOCKS
    both = encoders.calibrate(folder, tmp_path / "logits", data_of("vit"), collect=("moments", "logits"))
    assert measure_variant(dense, "vit", statistics=both, spaces=["qk"]) == measure_variant(dense, "vit", spaces=["qk"])


def test_an_output_that_overflows_is_named(dense, monkeypatch):
    monkeypatch.setattr(Readout, "divergence", lambda *_: float("nan"))
    assert refusal(dense, "llama-gqa-tied") == (
        "the output with 1 units of model.layers.0.self_attn.o_proj.weight/queries dropped is not finite: "
        "the model overflows in torch.float32"
    )


def test_a_site_of_one_unit_has_no_effect(tmp_path, monkeypatch):
    folder = families.make(tmp_path / "model", "llama-gqa-tied")
    statistics = families.calibrate(folder, tmp_path / "statistics")
    source, original = Model.open(folder), Model.unit_counts
    monkeypatch.setattr(Model, "unit_counts", lambda self, space: [1] if space == "heads" else original(self, space))
    options = {"device": CPU, "compute_dtype": torch.float32, "limit": 2, "points": (0.5,)}
    samples = data_of("llama-gqa-tied")
    effects = measure_effects(source, statistics, samples, spaces=["heads", "mlp"], **options)
    assert list(effects) == [f"model.layers.{block}.mlp.down_proj.weight" for block in range(BLOCKS)]
    assert measure_effects(source, statistics, samples, spaces=["heads"], **options) == {}
