"""The head on states that leave the last block, against the whole model."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.measure.samples.samples import SampleRange
from ckpt_prune.measure.streams import readout as module
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.readout import Readout, kl_divergence, measure_divergences, relative_error
from ckpt_prune.model.model import Model
from tests import encoders, families
from tests.encoders import BLOCKS, HIDDEN
from tests.oracles import effects as oracle
from tests.pairs import one_of
from tests.stages.whole import data_of, stock

CPU = torch.device("cpu")
OWN = {"bert-token-classification": "BertForTokenClassification", "bert-questions": "BertForQuestionAnswering"}
"""Classes that `encoders` makes no checkpoint of."""
VARIANTS = ["llama", "llama-gqa-tied", "mistral", "qwen2", "qwen3", "seed_oss", *encoders.VARIANTS, *OWN]
COUNTS = {"deit-teacher": 3, "bert-pretraining": 2, "bert-questions": 2}
BATCH = 3


def make_model(folder: Path, variant: str) -> tuple[Checkpoint, PreTrainedModel]:
    """A checkpoint and the same as a whole stock model."""
    if variant not in OWN:
        (families if variant in families.VARIANTS else encoders).make(folder, variant)
        return Checkpoint.open(folder), stock(folder, variant)
    labels = {"num_labels": 2} if variant == "bert-questions" else {}
    config = AutoConfig.for_model("bert", **{**encoders.SIZES["bert"], **labels})
    model = getattr(transformers, OWN[variant])(config).eval()
    encoders.randomise(model, 3)
    model.save_pretrained(folder)
    return Checkpoint.open(folder), model


def factory_of(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> BlockFactory:
    return BlockFactory(Model.of(checkpoint), device=CPU, dtype=dtype)


def readout_of(checkpoint: Checkpoint, factory: BlockFactory | None = None) -> Readout:
    return Readout(factory or factory_of(checkpoint), checkpoint.tensors, checkpoint.read)


def data(variant: str):
    return data_of("bert-mlm" if variant in OWN else variant)


def some_states(tokens: int, seed: int) -> Tensor:
    return torch.randn(BATCH, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def whole(model: PreTrainedModel, layers: str, batch: dict[str, Tensor], states: Tensor) -> dict[str, Tensor]:
    """Run the whole model with the output of its last block exchanged."""
    handle = model.get_submodule(layers)[-1].register_forward_hook(lambda *_: states)
    outputs = {name: value for name, value in model(**batch).items() if isinstance(value, Tensor)}
    handle.remove()
    return outputs


@pytest.mark.parametrize("variant", one_of(4, VARIANTS))
def test_outputs_are_those_of_the_whole_model(tmp_path, variant):
    """Every logits there are, in order; of a model without a head its last hidden states, after the final norm."""
    checkpoint, model = make_model(tmp_path / "model", variant)
    samples, readout = data(variant), readout_of(checkpoint)
    batch = samples.batch(slice(0, BATCH))
    headless = variant in encoders.VARIANTS and encoders.VARIANTS[variant].alone
    assert readout.logits != headless
    for seed in (0, 1):
        states = some_states(samples.tokens, seed)
        expected = whole(model, readout.factory.family.layers, batch, states)
        names = ["last_hidden_state"] if headless else [name for name in expected if "logits" in name]
        outputs = readout.outputs(batch, states)
        assert len(outputs) == len(names) == COUNTS.get(variant, 1)
        for name, output in zip(names, outputs, strict=True):
            assert float(output.std()) > 1e-3
            torch.testing.assert_close(output, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_no_tensor_of_a_block_is_read_or_taken(tmp_path):
    checkpoint, _ = make_model(tmp_path / "model", "opt-350m-like")
    factory, names = factory_of(checkpoint), []
    Readout(factory, checkpoint.tensors, lambda requested: names.extend(requested) or checkpoint.read(requested))
    assert names
    assert not set(names) & {name for block in range(BLOCKS) for name in factory.model.block_names(block)}
    assert all(parameter.is_meta for parameter in factory.skeleton.get_submodule(factory.family.layers).parameters())


def test_a_parameter_without_a_tensor(tmp_path):
    checkpoint, _ = make_model(tmp_path / "model", "bert-mlm")
    names = [name for name in checkpoint.tensors if name != "cls.predictions.transform.dense.weight"]
    with pytest.raises(ValueError, match=r"no tensor for cls\.predictions\.transform\.dense\.weight"):
        Readout(factory_of(checkpoint), names, checkpoint.read)


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "bert-sequence-classification"])
def test_half_precision(tmp_path, variant):
    checkpoint, model = make_model(tmp_path / "model", variant)
    samples = data(variant)
    readout = readout_of(checkpoint, factory_of(checkpoint, torch.bfloat16))
    batch, states = samples.batch(slice(0, BATCH)), some_states(samples.tokens, 0)
    (output,) = readout.outputs(batch, states)
    expected = whole(model.bfloat16(), readout.factory.family.layers, batch, states.bfloat16())["logits"]
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected)


# ---- divergence ------------------------------------------------------------------------------------------------


def tensors(seed: int, *shape: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(4, 7), (3, 5, 11), (2, 3, 4, 6), (1, 1)], ids=str)
@pytest.mark.parametrize("chunk", [2**24, 20, 1])
def test_kl_is_the_textbook_one(monkeypatch, shape, chunk):
    """A mean over positions and a sum over samples, however few logits are compared at once."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    p, q = tensors(0, *shape), tensors(1, *shape)
    assert kl_divergence(p, q) == pytest.approx(oracle.kl(p.double().numpy(), q.double().numpy()), rel=1e-5, abs=1e-9)


def test_kl_has_a_direction_and_no_sign():
    p, q = tensors(0, 3, 5, 11), tensors(1, 3, 5, 11, scale=0.1)
    assert kl_divergence(p, q) > 0
    assert kl_divergence(p, q) != pytest.approx(kl_divergence(q, p), rel=0.05)
    assert kl_divergence(p, p) == 0
    # Rounding of a log-softmax alone: some 1e-7, which only counts squared.
    assert all(0 <= kl_divergence(p, p + constant) < 1e-11 for constant in (0.1, 1 / 3, -7.7))


@pytest.mark.parametrize("step", [1e-2, 1e-3, 1e-4])
def test_a_small_kl_keeps_its_digits(step):
    """At the last step Σ p log(p / q) would be rounding for the most part."""
    p, change = tensors(0, 3, 5, 1000), tensors(1, 3, 5, 1000)
    q = p + step * change
    assert kl_divergence(p, q) == pytest.approx(oracle.kl(p.double().numpy(), q.double().numpy()), rel=1e-2)


@given(st.integers(0, 999), st.floats(-20, 20), st.floats(-20, 20))
def test_kl_does_not_see_a_constant(seed, a, b):
    p, q = tensors(seed, 2, 3, 5), tensors(seed + 1, 2, 3, 5)
    assert kl_divergence(p + a, q + b) == pytest.approx(kl_divergence(p, q), rel=1e-4, abs=1e-9)


def test_kl_of_half_precision_and_of_far_logits():
    p, q = tensors(0, 2, 5).bfloat16(), tensors(1, 2, 5).bfloat16()
    assert kl_divergence(p, q) == pytest.approx(oracle.kl(p.double().numpy(), q.double().numpy()), rel=1e-5)
    certain = torch.tensor([[200.0, 0.0, -200.0]])
    assert kl_divergence(certain, certain.flip(1)) == pytest.approx(400)


def test_few_positions_are_those_of_whole_texts(tmp_path):
    """Every second position, beginning at another one in every text: the head tells each of them by itself."""
    checkpoint, _ = make_model(tmp_path, "llama")
    readout, texts = readout_of(checkpoint), SampleRange(data_of("llama"), 0, BATCH)
    dense, pruned = some_states(texts.tokens, 1), some_states(texts.tokens, 2)
    chosen = [torch.arange(number % 2, texts.tokens - texts.tokens % 2, 2) for number in range(BATCH)]
    theirs, ours = (readout.outputs(texts.batch(slice(0, BATCH)), states)[0] for states in (dense, pruned))
    by_hand = [kl_divergence(theirs[i : i + 1, at], ours[i : i + 1, at]) for i, at in enumerate(chosen)]
    positions = BATCH * texts.tokens // 2
    (divergence,) = measure_divergences(readout, dense, texts, [(readout, pruned)], positions=positions)
    assert divergence == pytest.approx(sum(by_hand) / BATCH, rel=1e-5)
    (every,) = measure_divergences(readout, dense, texts, [(readout, pruned)])
    assert divergence != pytest.approx(every, rel=1e-5)
    assert measure_divergences(readout, dense, texts, [(readout, pruned)], positions=10**6) == [every]


def test_relative_error_of_samples_adds():
    h, other = tensors(0, 3, 5, 4), tensors(1, 3, 5, 4)
    h[1] *= 10
    assert relative_error(h, other) == pytest.approx(oracle.relative(h.double().numpy(), other.double().numpy()))
    parts = [relative_error(h[i : i + 1], other[i : i + 1]) for i in range(3)]
    assert relative_error(h, other) == pytest.approx(sum(parts))
    assert relative_error(h, 3 * h) == pytest.approx(3 * 4)


@pytest.mark.parametrize("variant", ["bert-pretraining", "bert-model"])
def test_divergence_of_a_model(tmp_path, variant):
    """Several logits add, each with positions of its own; without a head states are compared."""
    checkpoint, _ = make_model(tmp_path / "model", variant)
    readout, samples = readout_of(checkpoint), data(variant)
    batch = samples.batch(slice(0, BATCH))
    a, b = (readout.outputs(batch, some_states(samples.tokens, seed)) for seed in (0, 1))
    compare = oracle.kl if readout.logits else oracle.relative
    pairs = [tuple(np.asarray(logits, dtype=np.float64) for logits in pair) for pair in zip(a, b, strict=True)]
    assert readout.divergence(a, b) == pytest.approx(sum(compare(*pair) for pair in pairs), rel=1e-5)
    assert readout.divergence(a, a) == 0


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "ElectraForPreTraining"])
def test_a_head_of_one_number_tells_two_classes_apart(tmp_path, architecture):
    """A reranker's and a discriminator's: KL of Bernoulli distributions, and gradients that are not nothing."""
    config = AutoConfig.for_model("bert" if architecture.startswith("Bert") else "electra", **encoders.SIZES["bert"])
    config.num_labels, config.embedding_size = 1, HIDDEN
    model = getattr(transformers, architecture)(config).eval()
    encoders.randomise(model, 3)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    readout, samples = readout_of(checkpoint), data("bert-mlm")
    batch = samples.batch(slice(0, BATCH))
    theirs, ours = (readout.outputs(batch, some_states(samples.tokens, seed)) for seed in (0, 1))
    p, q = (torch.distributions.Bernoulli(logits=logits[0].double().view(BATCH, -1)) for logits in (theirs, ours))
    expected = torch.distributions.kl_divergence(p, q).mean(1).sum().item()
    assert readout.divergence(theirs, ours) == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-3
    drawn = readout.gradients(batch, some_states(samples.tokens, 0), torch.Generator().manual_seed(0))
    assert len(drawn) == (module.DRAWS if architecture.startswith("Bert") else 1)
    assert all(gradient.values.abs().sum() > 0 for gradient in drawn)


@pytest.mark.parametrize(("variant", "read"), [("llama", False), ("llama-gqa-tied", True)])
def test_an_embedding_is_read_only_if_a_head_shares_it(tmp_path, variant, read):
    """What tokens look up, given states take the place of."""
    checkpoint, whole = make_model(tmp_path, variant)
    asked: list[str] = []

    def recording(names: list[str]) -> dict[str, Tensor]:
        asked.extend(names)
        return checkpoint.read(names)

    readout = Readout(factory_of(checkpoint), checkpoint.tensors, recording)
    assert ("model.embed_tokens.weight" in asked) is read
    assert "model.norm.weight" in asked
    states = some_states(3, 2)
    (logits,) = readout.outputs({"input_ids": torch.ones(BATCH, 3, dtype=torch.long)}, states)
    with torch.no_grad():
        expected = whole.lm_head(whole.model.norm(states))
    torch.testing.assert_close(logits, expected)
