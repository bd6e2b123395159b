"""Predicted effects of single sites, against gradients of whole stock models; and which models get which effects."""

import copy
from functools import cached_property

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.architectures.model import Model
from ckpt_prune.calibration import readout
from ckpt_prune.calibration.states import StateMemory
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.errors import UserError
from ckpt_prune.planning.recipe_file import load_recipe
from ckpt_prune.transform import effects
from ckpt_prune.transform import predicted_effects as module
from ckpt_prune.transform.predicted_effects import predict_effects
from tests import encoders, families
from tests.families import BLOCKS
from tests.oracles import effects as oracle

from .test_effects import CPU, LIMIT, VARIANTS, Effects, assert_close, expected, measured
from .test_effects import ByHand as WholeModel
from .whole import Sources, data_of, stock


def predicted(sources: Sources, variant: str, **options) -> Effects:
    return measured(sources, variant, how=predict_effects, **options)


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def unlikeliest(log_p: Tensor, count: int = 1, _generator: torch.Generator | None = None) -> Tensor:
    """Labels that do not hang on rounding, as a draw would where precision differs."""
    return log_p.argmin(-1, keepdim=True).expand(-1, count)


# ---- by hand, on a whole model ---------------------------------------------------------------------------------


class ByHand(WholeModel):
    """Sites pruned as where effects are measured, told by gradients."""

    @cached_property
    def gradients(self) -> list[tuple[list[Tensor], bool, float]]:
        """Of every draw: the gradient at each block's output, whether a sample has one prediction, and its weight."""
        layers = self.model.get_submodule(self.family.layers)
        left: list[Tensor] = []
        hooks = [layer.register_forward_hook(lambda _m, _a, out: left.append(first(out))) for layer in layers]
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
        found = self.model(**self.data.batch(slice(0, LIMIT)))
        for hook in hooks:
            hook.remove()
        names = [name for name in found if name.endswith("logits")]
        losses: list[tuple[Tensor, bool, float]] = []
        for name in names:
            log_p = found[name].log_softmax(-1).flatten(0, -2)
            whole = len(log_p) == LIMIT
            loss = log_p.gather(1, unlikeliest(log_p)).sum() / (len(log_p) / LIMIT) ** 0.5
            losses.append((loss, whole, 1.0))  # all draws are the same one
        if not names:
            wide = found.last_hidden_state.flatten(1)
            drawn = torch.randn(wide.shape, generator=torch.Generator().manual_seed(0)).double()
            losses.append((2**0.5 * ((drawn * wide).sum(1) / wide.detach().norm(dim=1)).sum(), False, 1.0))
        return [
            (list(torch.autograd.grad(loss, left, retain_graph=True)), whole, weight) for loss, whole, weight in losses
        ]

    def left_by(self, model: PreTrainedModel, block: int) -> Tensor:
        """What leaves a block of a model, on the first samples."""
        found: list[Tensor] = []
        layer = model.get_submodule(self.family.layers)[block]
        hook = layer.register_forward_hook(lambda _m, _a, out: found.append(first(out)))
        with torch.no_grad():
            model(**self.data.batch(slice(0, LIMIT)))
        hook.remove()
        return found[0]

    def effect(self, pruned: PreTrainedModel, block: int) -> float:
        error = self.left_by(pruned, block) - self.left_by(self.model, block)
        total = 0.0
        for gradients, whole, weight in self.gradients:
            moved = (gradients[block] * error).sum(-1)
            total += weight * float((moved.sum(1) ** 2 if whole else (moved**2).sum(1)).sum())
        return total / 2 / LIMIT


@pytest.mark.parametrize("variant", VARIANTS)
def test_effects_are_those_on_the_whole_model(dense, variant, monkeypatch):
    monkeypatch.setattr(readout, "draw_labels", unlikeliest)
    found = predicted(dense, variant)
    assert_close(found, expected(dense.folder(variant), variant, ByHand), 2e-4)


def test_blocks_are_read_twice_whatever_the_depth(dense, monkeypatch):
    """Not once for each space and count; statistics once for each block."""
    variant = "opt"
    source, statistics = Model.open(dense.folder(variant)), dense.statistics(variant)
    block_of = {name: block for block in range(BLOCKS) for name in source.block_names(block)}
    read, measured_blocks = [], []
    original, own = Checkpoint.read, Statistics.block

    def reading(self, names):
        read.extend({block_of[name] for name in names if name in block_of})
        return original(self, names)

    def opening(self, block, weights=None):
        measured_blocks.append(block)
        return own(self, block, weights)

    monkeypatch.setattr(Checkpoint, "read", reading)
    monkeypatch.setattr(Statistics, "block", opening)
    predicted(dense, variant, statistics=statistics)
    assert read == [*range(BLOCKS), *reversed(range(BLOCKS))]
    assert measured_blocks == list(reversed(range(BLOCKS)))


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "vit"])
def test_batches_and_where_states_are_change_nothing(dense, variant, monkeypatch, tmp_path):
    whole = predicted(dense, variant)
    tokens = data_of(variant).tokens
    # Five samples as 2 + 2 + 1 through blocks, one by one through the head, states on disk.
    monkeypatch.setattr("ckpt_prune.calibration.streams.TOKENS_PER_BATCH", 2 * tokens)
    monkeypatch.setattr(module, "READOUT_TOKENS", tokens - 1)
    assert_close(predicted(dense, variant, allocate=StateMemory(0, tmp_path)), whole, 1e-3)


def refusal(*args, **options) -> str:
    with pytest.raises(UserError) as caught:
        predicted(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_output_that_overflows_is_named(dense, monkeypatch):
    monkeypatch.setattr(module, "_effect", lambda *_: float("nan"))
    assert refusal(dense, "llama-gqa-tied") == (
        f"the output with 1 units of model.layers.{BLOCKS - 1}.self_attn.o_proj.weight dropped is not finite: "
        "the model overflows in torch.float32"
    )


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "vit", "bert-pretraining", "dinov2-swiglu"])
def test_the_prediction_is_that_of_the_divergence(dense, variant, monkeypatch):
    """Drawn often, for errors that are small: the divergence of the whole model's output, which is what it predicts."""
    monkeypatch.setattr(readout, "DRAWS", 64)
    source, samples = Model.open(dense.folder(variant)), data_of(variant)
    model = stock(dense.folder(variant), variant).double()
    if variant in encoders.IMAGES:
        samples = encoders.Pixels(samples.values.double(), samples.tokens)
    path = ByHand(model, source, samples).path(BLOCKS - 1, source.family.columns["mlp"].consumer)
    torch.manual_seed(0)
    direction = torch.randn_like(model.get_submodule(path).weight) * 0.02
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.get_submodule(path).weight += direction

    def shifted(self, block, tensors):
        name = source.tensor(block, source.family.columns["mlp"].consumer)
        yield tensors | {name: tensors[name] + direction.to(tensors[name].dtype)}

    monkeypatch.setattr(module.Variants, "of", shifted)
    told = []
    for seed in range(40):
        monkeypatch.setattr(module, "_SEED", seed)
        found = predicted(dense, variant, spaces=["mlp"], points=(0.25,), limit=LIMIT)
        told.append(found[source.moments_name(BLOCKS - 1, "mlp")][0][1])

    def outputs(each: PreTrainedModel) -> list[np.ndarray]:
        with torch.no_grad():
            said = each(**samples.batch(slice(0, LIMIT)))
        names = [name for name in said if name.endswith("logits")] or ["last_hidden_state"]
        return [said[name].double().numpy() for name in names]

    headless = source.family.auto_class == "AutoModel"
    pairs = zip(outputs(model), outputs(moved), strict=True)
    true = sum((oracle.relative if headless else oracle.kl)(*pair) for pair in pairs) / LIMIT
    assert np.mean(told) == pytest.approx(true, rel=0.2)


def test_nothing_of_the_statistics_or_the_checkpoint_is_changed(dense):
    statistics, folder = dense.statistics("opt"), dense.folder("opt")
    before = families.contents(folder) | families.contents(statistics.folder)
    once: list[Tensor] = []
    predicted(dense, "opt", allocate=lambda shape, dtype: once.append(torch.empty(shape, dtype=dtype)) or once[-1])
    assert families.contents(folder) | families.contents(statistics.folder) == before
    # States before the first block and after each, and gradients of one draw.
    assert len(once) == 1 + BLOCKS + 1
    assert all(tensor.shape[0] == LIMIT for tensor in once)


def test_sites_are_named_as_where_they_are_measured(dense):
    for variant in ("llama-gqa-tied", "vit"):
        found, by_running = predicted(dense, variant), measured(dense, variant)
        assert list(found) == list(by_running)
        for name, own in found.items():
            assert [count for count, _ in own] == [count for count, _ in by_running[name]]


@pytest.mark.parametrize(("shallow", "how"), [(BLOCKS, "measured"), (BLOCKS - 1, "predicted")])
def test_deep_models_are_predicted(dense, monkeypatch, shallow, how):
    """Measuring takes the square of the depth."""
    monkeypatch.setattr(effects, "SHALLOW", shallow)
    monkeypatch.setattr(effects, "measure_effects", lambda *_a, **_k: {"measured": []})
    monkeypatch.setattr(effects, "predict_effects", lambda *_a, **_k: {"predicted": []})
    source, statistics = Model.open(dense.folder("opt")), dense.statistics("opt")
    given = {"spaces": ["mlp"], "device": CPU, "compute_dtype": torch.float32}
    assert effects.effects_of(source, statistics, data_of("opt"), **given) == {how: []}


def test_a_deep_model_is_pruned_on_predicted_effects(dense, monkeypatch, tmp_path):
    monkeypatch.setattr(effects, "SHALLOW", 1)
    monkeypatch.setattr(effects, "measure_effects", lambda *_a, **_k: pytest.fail("measured"))
    best = load_recipe("best", ratio=0.3)
    report = families.prune(
        families.job_on(dense.folder("llama"), best, live=families.windows(4, 16), folds=2), tmp_path / "out"
    )
    assert report["after"]["parameters"] < report["before"]["parameters"]
