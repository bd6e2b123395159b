"""What rounding is predicted to add, against the divergence of a model whose weights are changed."""

import shutil
import zlib
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ckpt_prune.budget.rounding_losses import FED, measure_rerouting, predict_losses
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.model.containers.opening import Opening, open_model
from tests.gguf_files.tiny import save

STEP = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("losses") / "model", "llama", num_hidden_layers=2)


EXPERTS = {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture in the first block alone, whose router is sure: no experts are chosen by what other experts round."""
    folder = save(tmp_path_factory.mktemp("losses") / "mixture", "qwen3_moe", **EXPERTS, mlp_only_layers=[1])
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        weights[name] *= 30 if name.endswith("mlp.gate.weight") else 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def windows():
    return torch.randint(3, 2000, (8, 64), generator=torch.Generator().manual_seed(2))


def change(name, rows):
    """Noise that follows from the rows alone, so that a test can make the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return rows + STEP * rows.std() * torch.randn(rows.shape, generator=generator)


def predict(folder, windows):
    """Logarithms of what a model predicts, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the default one has no float64
    with torch.no_grad():
        return model(windows).logits.log_softmax(-1)


def divergence(folder, windows, names, changed):
    """Mean KL in float64 of the model with changed weights from the model."""
    weights = load_file(folder / "model.safetensors")
    with TemporaryDirectory() as other:
        shutil.copytree(folder, other, dirs_exist_ok=True)
        weights |= {name: changed(name, weights[name]).contiguous() for name in names}
        save_file(weights, f"{other}/model.safetensors", {"format": "pt"})
        dense, changed = predict(folder, windows), predict(other, windows)
    return float((dense.exp() * (dense - changed)).sum(-1).mean())


@pytest.fixture(scope="module")
def predicted(folder, windows):
    model = open_model(str(folder), Opening())
    return predict_losses(model, TokenWindows(windows), lambda name, rows: {"noise": change(name, rows)}, **CPU)


def test_every_matrix_is_told_of(folder, predicted):
    model = open_model(str(folder), Opening())
    matrices = {name for name, info in model.checkpoint.tensors.items() if len(info.shape) == 2}
    assert predicted.keys() == matrices


def test_the_head_alone_is_told_to_second_order(folder, windows, predicted):
    """All classes are looked at, and no label is drawn: only every other token is left out."""
    measured = divergence(folder, windows, {"lm_head.weight"}, change)
    assert predicted["lm_head.weight"]["noise"] == pytest.approx(measured, rel=0.15)


def test_types_of_the_embedding_that_are_not_plain_are_measured_beside_those_that_are(folder, windows):
    """A common shift of all rows, as large as the noise: gradients of single tokens do not tell what it does."""
    name, shifted_kind = "model.embed_tokens.weight", "shift" + FED

    def shift(_name, rows):
        direction = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(5))
        return rows + 3 * STEP * rows.std() * direction

    def both(name, rows):
        return {"noise": change(name, rows), shifted_kind: shift(name, rows)}

    told = predict_losses(open_model(str(folder), Opening()), TokenWindows(windows), both, **CPU)[name]
    noise, shifted = (divergence(folder, windows, {name}, by) for by in (change, shift))
    assert told["noise"] == pytest.approx(noise, rel=0.3)
    assert told[shifted_kind] / told["noise"] == pytest.approx(shifted / noise, rel=0.4)


def test_divergences_of_the_blocks_add_up(folder, windows, predicted):
    names = {name for name in predicted if ".layers." in name}
    measured = divergence(folder, windows, names, change)
    told = sum(predicted[name]["noise"] for name in names)
    # Labels are drawn once for 512 predictions: the mean of their squares is within a few times 1 / sqrt(512).
    assert told == pytest.approx(measured, rel=0.3)


def test_experts_are_told_by_the_tokens_that_they_see(mixture, windows):
    model = open_model(str(mixture), Opening())
    predicted = predict_losses(model, TokenWindows(windows), lambda name, rows: {"noise": change(name, rows)}, **CPU)
    assert not any("mlp.gate.weight" in name for name in predicted)
    names = {name for name in predicted if ".experts." in name}
    measured = divergence(mixture, windows, names, change)
    assert sum(predicted[name]["noise"] for name in names) == pytest.approx(measured, rel=0.3)


def test_other_choices_of_routers_are_told_of(tmp_path):
    windows = torch.randint(3, 2000, (32, 64), generator=torch.Generator().manual_seed(2))
    """They grow as the root of all else: for types that are finer or coarser than the one that was tried, too."""
    folder = save(tmp_path / "mixture", "qwen3_moe", **EXPERTS, norm_topk_prob=True)
    model, data, noise = open_model(str(folder), Opening()), TokenWindows(windows), {}

    def scaled(scale):
        return lambda name, rows: rows + scale * (change(name, rows) - rows)

    def round_rows(name, rows):
        return {str(scale): scaled(scale)(name, rows) for scale in (0.3, 1, 3)}

    predicted = predict_losses(model, data, round_rows, outside=False, noise=noise, **CPU)
    assert {kind for kind, _ in noise.values()} == {"1"}
    factor = measure_rerouting(model, data, predicted, noise, **CPU)
    for scale in (0.3, 1, 3):
        lost = sum(own[str(scale)] for own in predicted.values())
        measured = divergence(folder, windows, predicted.keys(), scaled(scale))
        assert lost < 0.4 * measured
        assert lost + factor * lost**0.5 == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize(
    ("which", "part"), [("folder", "layers.1.self_attn.v_proj"), ("mixture", "layers.0.mlp.experts.")]
)
def test_errors_that_the_tokens_of_a_window_have_in_common_add_up(which, part, request):
    """Every token of a window is the same, so that attention leaves an error of values as large as it is."""
    folder = request.getfixturevalue(which)
    repeated = torch.randint(3, 2000, (64, 1), generator=torch.Generator().manual_seed(3)).expand(64, 16).contiguous()
    model = open_model(str(folder), Opening())
    told = predict_losses(model, TokenWindows(repeated), lambda name, rows: {"noise": change(name, rows)}, **CPU)
    names = {name for name in told if part in name}
    # Labels are drawn once for 1,024 predictions, and every window and row gives a square.
    measured = divergence(folder, repeated, names, change)
    assert sum(told[name]["noise"] for name in names) == pytest.approx(measured, rel=0.2)


# ---- inputs that a runtime rounds ------------------------------------------------------------------------------------


def test_inputs_that_a_runtime_rounds_are_told_of(folder, windows):
    """All linear modules of the blocks read noise that follows from the inputs alone."""

    def noisy(x):
        return x + STEP * x.square().mean(-1, keepdim=True).sqrt() * torch.sin(1e4 * x)

    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        expected = dense(windows).logits.log_softmax(-1)
        for name, module in dense.named_modules():
            if ".layers." in name and isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _module, args: (noisy(args[0]),))
        other = dense(windows).logits.log_softmax(-1)
    measured = float((expected.exp() * (expected - other)).sum(-1).mean())
    ways = {"noise": noisy}
    told = predict_losses(
        open_model(str(folder), Opening()), TokenWindows(windows), unchanged, round_inputs=ways, **CPU
    )
    of_blocks = [own for name, own in told.items() if ".layers." in name]
    assert sum(own["noise"] for own in of_blocks) == pytest.approx(measured, rel=0.3)
    assert all(own["same"] == 0 for own in told.values())
    assert all("noise" not in own for name, own in told.items() if ".layers." not in name)


def unchanged(_name, rows):
    return {"same": rows}
