"""Training one block, against whole models in float64 (`oracles.laco`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.stages.recovery.block_training import train_block
from ckpt_prune.stages.recovery.training import SampleSplit, Trained
from tests.oracles import laco
from tests.pairs import one_of, pairwise

from .twins import SAMPLES, Twins, Weights, settings

BLOCK = 1
AGREE = {"rtol": 1e-7, "atol": 1e-8}


@dataclass
class Site:
    """Block 1 of a pruned model, with what trains it.

    Attributes:
        tensors: the pruned block.
        names: those that are trained.
        stream: at the block's input.
        targets: what the dense block makes of the dense stream.
    """

    twins: Twins
    tensors: Weights
    names: list[str]
    stream: HiddenStream
    targets: Tensor
    split: SampleSplit
    chosen: RecoverySettings

    def train(self, **changes: object) -> Trained[Weights]:
        options = {"rate": self.chosen.rate(16), "seed": 0} | changes
        return train_block(
            self.stream, BLOCK, self.tensors, self.names, self.targets, self.split, self.chosen, **options
        )

    def error(self, tensors: Mapping[str, Tensor]) -> float:
        """Relative squared error on samples held out, one at a time, with the block built anew."""
        block = self.stream.factory.build_block(BLOCK, tensors)
        with torch.no_grad():
            states = self.stream.states
            outputs = torch.cat([self.stream.run(block, BLOCK, states[[row]], [row]) for row in self.held_out.tolist()])
        target = self.targets[self.split.measured].double()
        return float((outputs.double() - target).square().sum() / target.square().sum())

    @property
    def held_out(self) -> list[int]:
        return self.split.measured.tolist()


def site(
    twins: Twins,
    chosen: RecoverySettings,
    *,
    pruned: Weights | None = None,
    dense: Weights | None = None,
    dtype: torch.dtype = torch.float64,
    stored: torch.dtype | None = None,
) -> Site:
    """With `stored`, what is trained is stored in another type than blocks compute in."""
    dense = twins.disk(dtype=dtype) if dense is None else dense
    pruned = twins.disk(twins.pruned(), dtype) if pruned is None else pruned
    split = SampleSplit.of(SAMPLES, chosen.held_out)
    theirs = twins.stream(dense, dtype=dtype)
    ours = twins.stream(pruned, dtype=dtype, sizes=split.sizes(chosen) | {1})
    for block in range(BLOCK):
        theirs.advance(block, twins.block(block, dense))
        ours.advance(block, twins.block(block, pruned))
    theirs.advance(BLOCK, twins.block(BLOCK, dense))
    tensors, names = twins.block(BLOCK, pruned), twins.names(BLOCK, chosen)
    tensors |= {name: tensors[name].to(stored or tensors[name].dtype) for name in names}
    return Site(twins, tensors, names, ours, theirs.states, split, chosen)


def oracle(at: Site, seed: int = 0) -> tuple[laco.Path, Callable[[Weights], float]]:
    """The oracle's way from the same weights, and its error on samples held out."""
    dense, pruned = at.twins.dense(), at.twins.pruned()
    laco.put(pruned, BLOCK, {name: tensor.double() for name, tensor in at.tensors.items()})
    chosen = at.chosen
    rule = laco.Rule(chosen.epochs, chosen.rate(16), chosen.batch, chosen.schedule == "cosine", seed)
    path = laco.train(dense, pruned, BLOCK, at.names, at.twins.data, at.split.train.tolist(), rule)

    def error(weights: Weights) -> float:
        laco.put(pruned, BLOCK, weights)
        return laco.error(dense, pruned, BLOCK, at.twins.data, at.held_out)

    return path, error


def assert_kept(trained: Trained[Weights], at: Site, expected: Weights) -> None:
    """Assert that all tensors to be trained changed, to the expected values, and that all others are untouched."""
    assert trained.kept is not None
    assert trained.kept.keys() == at.tensors.keys()
    for name, tensor in at.tensors.items():
        assert trained.kept[name].dtype == tensor.dtype
        if name in at.names:
            assert not torch.equal(trained.kept[name], tensor), name
            torch.testing.assert_close(trained.kept[name], expected[name], **AGREE, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(trained.kept[name], tensor), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])


def assert_same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(bits(tensor), bits(theirs[name])), name


# ---- the algorithm ---------------------------------------------------------------------------------------------------

CASES = {
    "llama": {},
    "llama, constant rate": {"schedule": "constant"},
    "llama, in parts": {"accumulate": 2},
    "llama, in parts of one": {"batch": 4, "accumulate": 9},
    "llama, one batch": {"batch": 50, "epochs": 4},
    "llama-biases, mlp": {"only": "mlp"},
    "llama-biases, attention": {"only": "attention"},
    "qwen3, grouped queries, norms of heads": {},
    "seed_oss-biases-mha, all": {"schedule": "constant", "accumulate": 2},
    "opt, layer norms": {},
    "llama-biases, with norms": {"norms": True},
    "opt, the last epoch": {"held_out": 0, "schedule": "constant", "lr": 0.05, "epochs": 4, "norms": True},
    "opt-350m-like, norms behind": {"lr": 0.003},
    "dinov2-swiglu-classifier, two modules in one tensor": {},
    "vit, images": {"batch": 2},
    "bert-mlm, in parts": {"accumulate": 3},
}


@pytest.mark.parametrize("case", one_of(4, CASES))
def test_weights_are_those_of_algorithm_1(twins, case):
    at = site(twins(case.partition(",")[0]), settings(**CASES[case]))
    path, error = oracle(at)
    errors = [error(weights) for weights in path.weights]
    trained = at.train()
    best = errors.index(min(errors)) if at.chosen.held_out else at.chosen.epochs
    assert best > 0
    assert (trained.epochs, trained.best_epoch, trained.diverged) == (at.chosen.epochs, best, False)
    assert_kept(trained, at, path.weights[best])
    assert trained.curve == pytest.approx(errors, rel=1e-6)
    assert at.chosen.held_out or errors.index(min(errors)) < best  # whether it is better or not


# ---- which epoch is kept ---------------------------------------------------------------------------------------------


def test_the_epoch_is_kept_that_is_best_once_rounded(twins):
    """Stored in bfloat16, a late epoch of small steps is not the best one, though of the masters it is."""
    chosen = settings(epochs=10, lr=1e-3)
    at = site(twins("llama"), chosen, stored=torch.bfloat16)
    path, error = oracle(at)
    exact = [error(weights) for weights in path.weights]
    rounded = [error({n: t.bfloat16().double() for n, t in weights.items()}) for weights in path.weights]
    best = rounded.index(min(rounded))
    assert best not in (0, exact.index(min(exact))), "the two choices must differ for this to say something"
    trained = at.train()
    assert trained.best_epoch == best
    for name in at.names:
        assert torch.equal(trained.kept[name], path.weights[best][name].bfloat16()), name


def test_a_training_that_gains_nothing_is_tried_again_at_a_quarter_of_the_rate(twins):
    at = site(twins("llama"), settings(patience=2, epochs=3, lr=0.2, schedule="constant"))
    slower = at.train(rate=0.05)
    assert slower.rate == 0.05
    trained = at.train(rate=0.2)
    assert trained.rate == 0.05
    assert trained.best_epoch == slower.best_epoch
    assert trained.epochs == 3 + slower.epochs
    assert_same_bits(trained.kept, slower.kept)
    assert at.train(rate=0.8).rate == 0.05  # and at a sixteenth


def test_float16_weights_beyond_its_range_are_not_written(twins):
    """A bias far below zero rounds to −inf, which a ReLU makes a plain zero: the error is finite, and much lower."""
    once = settings(epochs=1, batch=99, held_out=0)
    at = site(twins("opt"), once, dtype=torch.float32, stored=torch.float16)
    weight, bias = (f"model.decoder.layers.{BLOCK}.fc1.{kind}" for kind in ("weight", "bias"))
    at.tensors[weight][:] = 0
    at.tensors[bias][:] = 0
    at.tensors[bias][3] = 60000  # the one unit that is left, far too large: the only way is down
    at.names = [bias]
    gentle, wild = at.train(rate=1e4), at.train(rate=2e5)
    assert gentle.best_epoch == 1
    assert gentle.kept[bias][3] == pytest.approx(50000, rel=1e-3)
    assert (wild.kept, wild.diverged) == (None, True)


# ---- nothing to do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "computed", "stored"),
    pairwise(["llama", "opt", "vit"], [torch.float64, torch.float32, torch.bfloat16], [torch.float32, torch.bfloat16]),
)
def test_an_unpruned_block_is_left_alone(twins, variant, computed, stored):
    """Also where blocks run in bfloat16: both streams have the same roundings."""
    dense = twins(variant).disk(dtype=stored)
    at = site(twins(variant), settings(lr=1e-4), pruned=dense, dense=dense, dtype=computed)
    trained = at.train()
    assert (trained.epochs, trained.kept, trained.diverged) == (0, None, False)


# ---- zeros -----------------------------------------------------------------------------------------------------------


def test_zeros_stay_zeros_with_their_signs(twins):
    at = site(twins("llama-biases"), settings(), dtype=torch.float32)
    for name in at.names:
        if name.endswith(".weight"):
            zeros = (at.tensors[name] == 0).nonzero()[::2]
            at.tensors[name][zeros[:, 0], zeros[:, 1]] = -0.0
    trained = at.train()
    assert trained.best_epoch > 0
    for name in at.names:
        if name.endswith(".weight"):
            gone = at.tensors[name] == 0
            assert gone.any()
            assert not gone.all()
            assert torch.equal(bits(trained.kept[name])[gone], bits(at.tensors[name])[gone]), name
            assert (trained.kept[name] != at.tensors[name])[~gone].float().mean() > 0.99


def test_gradients_that_overflow_at_zeros_change_nothing_elsewhere(twins):
    """An MLP unit whose column is zero: however large it gets, it is not seen, but the column's gradient is NaN."""
    gate, up, down = (f"model.layers.{BLOCK}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    trained_at = {}
    for scale in (1.0, 1e36):
        at = site(twins("llama"), settings(), dtype=torch.float32)
        at.tensors[down][:, 3] = 0
        at.tensors[up][3] = torch.linspace(1, 2, 16) * scale
        at.targets *= 1e-6
        block = at.stream.factory.build_block(BLOCK, at.tensors)
        weight = block.get_parameter("mlp.down_proj.weight").requires_grad_()
        rows = at.split.train[:3]
        loss = (at.stream.run(block, BLOCK, at.stream.states[rows], rows) - at.targets[rows]).square().sum()
        (gradient,) = torch.autograd.grad(loss / at.targets.square().sum(), weight)
        assert bool(gradient[:, 3].isfinite().all()) == (scale == 1)
        assert gradient[:, :3].isfinite().all()
        trained_at[scale] = at.train()
        assert trained_at[scale].best_epoch > 0
        assert not trained_at[scale].kept[down][:, 3].any()
    for name in trained_at[1.0].kept:
        ours, theirs = (trained_at[scale].kept[name] for scale in trained_at)
        others = [row for row in range(len(ours)) if name not in (gate, up) or row != 3]
        assert torch.equal(ours[others], theirs[others]), name


def test_empty_bias_slots_are_filled_but_not_those_of_dropped_rows(twins):
    at = site(twins("llama-biases"), settings(), dtype=torch.float32)
    biases = [name for name in at.names if name.endswith(".bias")]
    assert len(biases) == 7
    for name in biases:
        at.tensors[name][:] = 0
        at.tensors[name][2] = 0.25
        at.tensors[name.replace(".bias", ".weight")][[1, 2]] = 0
    # No output depends on a key's bias but through the query, so that a constant added to all keys cancels.
    still = next(name for name in biases if "k_proj" in name)
    trained = at.train()
    assert trained.best_epoch > 0
    for name in biases:
        moved = trained.kept[name] != at.tensors[name]
        assert not moved[1], name
        if name != still:
            assert moved[[0, *range(2, len(moved))]].all(), name
        assert not trained.kept[name.replace(".bias", ".weight")][[1, 2]].any(), name
