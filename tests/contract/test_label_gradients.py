"""Gradients of labels at the last states, from slices of the vocabulary, against autograd through the whole model."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckpt_prune.measure.streams import readout as module
from ckpt_prune.measure.streams import sliced_head
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.measure.streams.sliced_head import LabelDraw
from tests.evaluation.tiny import VOCAB

from .dense import Dense
from .models import LONG, WINDOW, Case

TEXTS, SLICE = 3, 7
HEADS = [
    case for case in LONG if case.family.modality == "text" and case.architecture.endswith(("CausalLM", "MaskedLM"))
]


class _Axes(TorchDispatchMode):
    """Collects the longest axis of every tensor that is computed."""

    longest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.alias.default):
            sizes = [max(leaf.shape, default=0) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.longest = max([self.longest, *sizes])
        return result


@pytest.mark.parametrize("case", HEADS[::2], ids=str)
def test_they_are_those_of_the_whole_model(dense: Dense, case: Case, monkeypatch) -> None:
    """Gradients by the drawn labels are those of the whole model in float64, whatever scales, caps or biases follow."""
    monkeypatch.setattr(sliced_head, "CLASSES", SLICE)
    draws: list[LabelDraw] = []
    monkeypatch.setattr(module, "LabelDraw", lambda *given: draws.append(LabelDraw(*given)) or draws[-1])
    model, data = dense.model(case), case.samples(TEXTS, seed=9)
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float64)
    readout = Readout(factory, model.checkpoint.tensors, model.checkpoint.read)
    batch = data.batch(slice(TEXTS))
    states = torch.randn(TEXTS, WINDOW, factory.model.dimension("hidden"), dtype=torch.float64)
    (drawn,) = readout.gradients(batch, states, torch.Generator().manual_seed(5))
    assert not drawn.whole
    if not draws:
        assert not case.family.causal  # a head that is no module of its own
        return

    dense_model, leaf = case.model().double(), states.clone().requires_grad_(True)
    layer = dense_model.get_submodule(case.family.layers)[-1]
    layer.register_forward_hook(lambda _module, _args, out: leaf if isinstance(out, torch.Tensor) else (leaf, None))
    log_p = dense_model(**batch).logits.log_softmax(-1)
    labels = draws[0].labels.view(TEXTS, WINDOW, 1)
    (expected,) = torch.autograd.grad(log_p.gather(2, labels).sum() / WINDOW**0.5, leaf)
    torch.testing.assert_close(drawn.values, expected.float(), rtol=1e-5, atol=1e-7)

    # Text by text, the same labels.
    generator = torch.Generator().manual_seed(5)
    for row in range(TEXTS):
        part = slice(row, row + 1)
        (alone,) = readout.gradients(data.batch(part), states[part], generator)
        torch.testing.assert_close(alone.values, drawn.values[part])


def test_no_tensor_has_an_axis_of_the_vocabulary(dense: Dense, monkeypatch) -> None:
    monkeypatch.setattr(sliced_head, "CLASSES", SLICE)
    case = next(case for case in HEADS if case.model_type == "llama")
    model, data = dense.model(case), case.samples(TEXTS, seed=9)
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float32)
    readout = Readout(factory, model.checkpoint.tensors, model.checkpoint.read)
    states = torch.randn(TEXTS, WINDOW, factory.model.dimension("hidden"))
    with _Axes() as axes:
        readout.gradients(data.batch(slice(TEXTS)), states, torch.Generator().manual_seed(5))
    assert TEXTS * WINDOW <= axes.longest < VOCAB


def test_every_class_is_drawn_with_its_probability(monkeypatch) -> None:
    """Over slices of a vocabulary, one of which has nearly no mass, and with classes that cannot be drawn."""
    count, p = 40_000, torch.tensor([0.3, 0.0, 0.05, 1e-6, 0.0, 2e-6, 0.25, 0.1, 0.3])
    draw = LabelDraw(count, torch.Generator().manual_seed(0), torch.device("cpu"))
    total = torch.zeros(count, dtype=torch.float64)
    for start in (0, 3, 6):
        weights = p[start : start + 3].expand(count, 3)
        mass = weights.sum(1, dtype=torch.float64)
        total = total + mass
        draw.see(start, weights, mass, total)
    shares = draw.labels.bincount(minlength=len(p)) / count
    assert shares[p == 0].sum() == 0
    assert torch.all((shares - p).abs() <= 4 * (p * (1 - p) / count).sqrt() + 1 / count)
