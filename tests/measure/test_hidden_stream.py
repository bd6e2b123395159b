"""A stream of hidden states that training reads: its tensor, blocks run on any samples, gradients through them."""

import math

import pytest
import torch

from ckpt_prune.measure.streams.state_memory import StateMemory
from tests.oracles import laco
from tests.oracles.perplexity import perplexity
from tests.pairs import one_of
from tests.stages.recovery.twins import BLOCKS, SAMPLES, settings, written_once

EXACT = {"rtol": 1e-6, "atol": 1e-7}
VARIANTS = ["llama-biases", "mistral", "qwen3", "opt", "opt-350m-like", "bert-mlm", "vit", "deit", "dinov2-swiglu"]


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return written_once(tmp_path_factory)


@pytest.mark.parametrize("variant", one_of(5, VARIANTS))
def test_a_block_runs_on_as_many_samples_as_was_said(twins, variant):
    """In any order, and some twice: what blocks are passed besides depends on the number alone."""
    pair = twins(variant)
    tensors, model = pair.disk(), pair.dense()
    stream = pair.stream(tensors, sizes={1, 2, 4})
    for block in range(BLOCKS):
        expected = laco.states(model, block, pair.data).detach()
        module = stream.factory.build_block(block, pair.block(block, tensors))
        for rows in ([7], [3, 0], [8, 1, 1, 5], list(range(SAMPLES))):
            with torch.no_grad():
                outputs = stream.run(module, block, stream.states[rows], rows)
            torch.testing.assert_close(outputs, expected[rows], **EXACT)
        stream.advance(block, pair.block(block, tensors))


def test_samples_in_several_batches(twins, monkeypatch):
    """The last one shorter; numbers beyond a batch are recorded from the first samples."""
    monkeypatch.setattr("ckpt_prune.measure.streams.hidden_stream.TOKENS_PER_BATCH", 4 * 8)
    pair = twins("qwen3")
    tensors, model = pair.disk(), pair.dense()
    stream = pair.stream(tensors, sizes={3, 9})
    module = stream.factory.build_block(0, pair.block(0, tensors))
    expected = laco.states(model, 0, pair.data).detach()
    with torch.no_grad():
        for rows in (slice(5, 8), slice(0, 9), slice(8, 9), slice(2, 6)):
            torch.testing.assert_close(stream.run(module, 0, stream.states[rows], rows), expected[rows], **EXACT)
    for block in range(BLOCKS):
        stream.advance(block, pair.block(block, tensors))
    torch.testing.assert_close(stream.states, laco.states(model, BLOCKS - 1, pair.data).detach(), **EXACT)


@pytest.mark.parametrize("variant", one_of(5, VARIANTS))
def test_gradients_go_through_a_block(twins, variant):
    """Recorded and carried states are no tensors of inference mode; gradients through them are the whole model's."""
    pair = twins(variant)
    tensors, model = pair.disk(), pair.dense()
    stream = pair.stream(tensors, sizes={2})
    stream.advance(0, pair.block(0, tensors))
    assert not stream.states.is_inference()
    module = stream.factory.build_block(1, pair.block(1, tensors))
    name = pair.names(1, settings())[0]
    (parameter, *_) = (module.get_parameter(path) for path in stream.factory.find_paths(1, name))
    stream.run(module, 1, stream.states[[4, 2]], [4, 2])
    parameter.requires_grad_()
    stream.run(module, 1, stream.states[[4, 2]], [4, 2]).square().sum().backward()
    for frozen in model.model.parameters():
        frozen.requires_grad_(False)
    (reference, *_) = laco.parameters(model, 1)[name]
    reference.requires_grad_()
    laco.states(model, 1, pair.data, [4, 2]).square().sum().backward()
    torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-5, atol=1e-6 * float(reference.grad.abs().max()))


def test_parts_of_a_tensor_with_two_modules(twins):
    """A SwiGLU's gate and up stand one below the other on disk; biases too."""
    pair = twins("dinov2-swiglu")
    factory = pair.stream(pair.disk()).factory
    block = pair.block(1, pair.disk())
    module = factory.build_block(1, block)
    fused = [name for name in block if "weights_in" in name]
    assert len(fused) == 2
    for name in pair.names(1, settings()):
        parts = [module.get_parameter(path) for path in factory.find_paths(1, name)]
        assert len(parts) == (2 if name in fused else 1)
        assert torch.equal(torch.cat(parts), block[name])


@pytest.mark.parametrize("wide", [None, torch.float32], ids=str)
def test_parameters_have_the_type_that_is_asked_for(twins, wide):
    pair = twins("llama-biases")
    stream = pair.stream(pair.disk(), dtype=torch.bfloat16)
    assert stream.states.dtype == torch.bfloat16
    module = stream.factory.build_block(0, pair.block(0, pair.disk()), dtype=wide)
    assert {parameter.dtype for parameter in module.parameters()} == {wide or torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_where_they_were_allocated(twins, tmp_path, dtype):
    """To the last block, with the values that they have in memory."""
    pair = twins("opt")
    tensors, handed = pair.disk(), []
    memory = StateMemory(0, tmp_path)

    def allocate(shape: tuple[int, ...], element_type: torch.dtype) -> torch.Tensor:
        handed.append(memory(shape, element_type))
        return handed[-1]

    stream, plain = pair.stream(tensors, dtype=dtype, allocate=allocate), pair.stream(tensors, dtype=dtype)
    for block in range(BLOCKS):
        assert torch.equal(stream.states, plain.states)
        stream.advance(block, pair.block(block, tensors))
        plain.advance(block, pair.block(block, tensors))
    (only,) = handed
    assert only.dtype == dtype
    assert stream.states.data_ptr() == only.data_ptr()
    assert torch.equal(only, plain.states)


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "opt", "opt-350m-like"])
def test_likelihood_of_chosen_samples(twins, variant):
    """The likelihood is the whole model's, for all samples and for chosen ones if their states come in their order."""
    pair = twins(variant)
    tensors, rows = pair.disk(), [6, 1]
    stream = pair.stream(tensors)
    for block in range(BLOCKS):
        stream.advance(block, pair.block(block, tensors))
    windows = pair.data.batch(slice(SAMPLES))["input_ids"]
    expected, everything = (perplexity(pair.dense().model, some) for some in (windows[rows], windows))
    assert expected != pytest.approx(everything, rel=1e-3)
    chosen = torch.tensor(rows)
    assert math.exp(stream.measure_nll(stream.states[chosen], chosen)) == pytest.approx(expected, rel=1e-5)
    assert math.exp(stream.measure_nll()) == pytest.approx(everything, rel=1e-5)
    # States go with rows one by one, in their order.
    assert math.exp(stream.measure_nll(stream.states[chosen.flip(0)], chosen)) != pytest.approx(expected, rel=1e-3)
