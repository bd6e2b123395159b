"""Walking two models side by side, against whole models in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Meter, meter
from ckpt_prune.stages.recovery import laco as module
from ckpt_prune.stages.recovery.laco import Recoverer, check_same_start
from ckpt_prune.stages.recovery.records import RecoveredLayer
from tests.oracles import laco, similarity
from tests.oracles.perplexity import perplexity

from .twins import BLOCKS, SAMPLES, WINDOW, Twins, Weights, settings

AGREE = {"rtol": 1e-6, "atol": 1e-8}
HELD_OUT = [2, 6]
TRAIN = [0, 1, 3, 4, 5, 7, 8]


def go(
    twins: Twins, walk: Recoverer, pruned: Weights, bar: Meter | None = None, *, done: int = 0
) -> tuple[list[Weights], list[RecoveredLayer]]:
    """Through all blocks but those that are done."""
    recovered = []
    with meter(walk.epochs, "recovering") as silent:
        for index in range(done, BLOCKS):
            given = twins.block(index, pruned)
            recovered.append(walk.block(index, given, bar or silent))
            walk.follow(index, given)
            walk.advance(index, recovered[-1][0])
    return [tensors for tensors, _ in recovered], [layer for _, layer in recovered]


def recover_masked(twins: Twins, **changes: object) -> tuple[Recoverer, list[Weights], list[RecoveredLayer]]:
    """The masked twin, in float64."""
    after = changes.pop("after", ())
    dense, pruned = twins.disk(), twins.disk(twins.pruned())
    walk = twins.recoverer(dense, pruned, settings(**changes), after=after)
    return walk, *go(twins, walk, pruned)


def figures(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Mean squared error and linear CKA over all tokens."""
    X, Y = (states.detach().double().flatten(0, 1).numpy() for states in (ours, theirs))
    return similarity.mse(X, Y), similarity.cka(X, Y)


def same_layers(ours: list[RecoveredLayer], theirs: list[RecoveredLayer]) -> bool:
    return [layer.model_dump() for layer in ours] == [layer.model_dump() for layer in theirs]


# ---- the walk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "changes"),
    [("llama-biases", {}), ("qwen3", {"only": "mlp"}), ("llama-biases", {"norms": True, "teacher": "pruned"})],
)
def test_a_walk_is_algorithm_1(twins, variant, changes):
    """Every block's weights and reported figures: mean squared error and CKA of the real models' hidden states."""
    pair = twins(variant)
    walk, tensors, layers = recover_masked(pair, **changes)
    chosen = walk.settings
    split = (TRAIN, HELD_OUT) if chosen.held_out else (sorted([*TRAIN, *HELD_OUT]), [4])
    assert (walk.split.train.tolist(), walk.split.measured.tolist()) == split
    dense, pruned, by_hand = pair.dense(), pair.pruned(), pair.pruned()
    rule = laco.Rule(chosen.epochs, chosen.rate(16), chosen.batch, chosen.schedule == "cosine")
    rule = replace(rule, last=not chosen.held_out, of_pruned=chosen.teacher == "pruned")
    expected = laco.laco(dense, by_hand, lambda block: pair.names(block, chosen), pair.data, split, rule)
    for block, weights in enumerate(expected):
        for name in weights:
            torch.testing.assert_close(tensors[block][name], weights[name], **AGREE, msg=lambda m, n=name: f"{n}: {m}")
    started = pair.pruned()
    for block, layer in enumerate(layers):
        target = laco.states(dense, block, pair.data, split[1])
        # Behind recovered blocks: those before this one have their new weights by now.
        start = figures(laco.states(started, block, pair.data, split[1]), target)
        before = figures(laco.states(pruned, block, pair.data, split[1]), target)
        after = figures(laco.states(by_hand, block, pair.data, split[1]), target)
        laco.put(started, block, expected[block])
        assert layer.block == block
        assert (layer.mse_before, layer.cka_before) == pytest.approx(before, rel=1e-5)
        assert layer.mse_start == pytest.approx(start[0], rel=1e-5)
        assert (layer.mse_after, layer.cka_after) == pytest.approx(after, rel=1e-5)
        # What the dense block makes of the pruned stream may be farther from the dense stream.
        assert layer.mse_after < layer.mse_start or rule.of_pruned
        assert (layer.epochs, layer.recovered, layer.diverged) == (chosen.epochs, True, False)
        assert 0 < layer.best_epoch <= layer.epochs
    assert layers[0].mse_before == layers[0].mse_start
    assert layers[1].mse_before != layers[1].mse_start


def test_figures_of_many_tokens_are_of_the_first_samples_held_out(twins, monkeypatch):
    monkeypatch.setattr(module, "_COMPARED_TOKENS", WINDOW)  # one of two
    pair = twins("llama")
    _, _, layers = recover_masked(pair, batch=1)
    dense, pruned = pair.dense(), pair.pruned()
    for block, layer in enumerate(layers):
        first = [laco.states(model, block, pair.data, HELD_OUT[:1]) for model in (pruned, dense)]
        assert (layer.mse_before, layer.cka_before) == pytest.approx(figures(*first), rel=1e-5)


@pytest.mark.parametrize("done", [1, 2, 3])
def test_going_past_what_is_done_changes_nothing_that_follows(twins, done):
    pair, options = twins("llama-biases"), {"after": (1, 2)}
    walk, tensors, layers = recover_masked(pair, **options)
    dense, pruned = pair.disk(), pair.disk(pair.pruned())
    again = pair.recoverer(dense, pruned, settings(), **options)
    for block in range(done):
        again.follow(block, pair.block(block, pruned))
        again.advance(block, tensors[block])
    later_tensors, later_layers = go(pair, again, pruned, done=done)
    for resumed, expected in zip(later_tensors, tensors[done:], strict=True):
        assert resumed.keys() == expected.keys()
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert same_layers(later_layers, layers[done:])
    assert again.perplexities() == walk.perplexities()


# ---- perplexity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "opt"])
def test_perplexity_is_that_of_models_with_the_first_blocks_recovered(twins, variant):
    """On windows held out, by a float64 oracle that is given one prefix at a time."""
    pair = twins(variant)
    walk, tensors, _ = recover_masked(pair, after=range(BLOCKS + 1), lr=0.03)
    hybrid, expected = pair.pruned(), []
    windows = pair.data.batch(slice(SAMPLES))["input_ids"][HELD_OUT]
    for blocks in range(BLOCKS + 1):
        if blocks:
            laco.put(hybrid, blocks - 1, tensors[blocks - 1])
        expected.append(perplexity(hybrid.model, windows))
    entries = walk.perplexities()
    assert [entry["blocks"] for entry in entries] == [0, 1, 2, 3]
    assert [entry["perplexity"] for entry in entries] == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == BLOCKS + 1


@pytest.mark.parametrize("variant", ["vit", "bert-mlm", "opt-model"])
def test_models_that_are_no_causal_language_models_have_no_perplexity(twins, variant):
    walk, _, layers = recover_masked(twins(variant), after=(1,))
    assert all(layer.recovered for layer in layers)
    assert walk.perplexities() is None


# ---- two models that belong together ---------------------------------------------------------------------------------


@pytest.fixture
def start() -> Tensor:
    return torch.randn(11, 5, 16, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("change", "figure"),
    [
        (lambda x: x * 1.31, "0.31"),
        (lambda x: -x, "2.00"),
        (lambda x: x @ torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(4)))[0], "1.4"),
        (lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(5)), "1.4"),
        (lambda x: x * torch.nan, "nan"),
        (lambda x: torch.cat([x[:10], x[10:] * 100]), "relative difference"),
    ],
    ids=["beyond fine-tuning", "negated", "rotated", "unrelated", "nan", "in the last batch alone"],
)
def test_models_that_start_otherwise_are_refused(start, change, figure):
    with pytest.raises(UserError, match="not made from this dense one") as error:
        check_same_start(start, change(start))
    assert figure in str(error.value)


def test_models_that_make_other_tokens_are_refused(start):
    with pytest.raises(UserError, match="5 and 4 tokens"):
        check_same_start(start, start[:, :4])


@pytest.mark.parametrize("other", ["unrelated", "rotated"])
def test_a_walk_does_not_begin_with_models_of_different_starts(twins, other):
    pair = twins("llama")
    dense = pair.disk()
    table = "model.embed_tokens.weight"
    if other == "rotated":
        basis = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
        pruned = dense | {table: dense[table] @ basis}
    else:
        pruned = dense | {table: dense[table].roll(7, 0)}
    with pytest.raises(UserError, match="different hidden states"):
        pair.recoverer(dense, pruned, settings())
