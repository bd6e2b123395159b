"""Statistics of encoder-decoders on pairs, against hooks in the stock model on single pairs without padding."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.perplexity import perplexity
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.samples.pairs import PairReader, PairWindows, choose_pairs, read_pairs
from ckpt_prune.measure.samples.samples import SampleRange, SpreadSamples, counted_tokens, scored_tokens
from ckpt_prune.measure.streams.drift import ResidualBlock
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from tests.refusals import refusal
from tests.seq2seq import TYPES, write_model, write_pairs

Stack = Literal["encoder", "decoder"]
FEW = 6


def open_stack(folder: Path, model_type: str, stack: Stack) -> tuple[PreTrainedModel, Model, PairWindows]:
    whole = write_model(folder, model_type)
    model = open_model(str(folder), Opening(part=stack))
    assert model.checkpoint.within is not None
    reader = PairReader(model.checkpoint.within.whole, None)
    return whole, model, choose_pairs(reader, write_pairs(folder / "pairs.jsonl"), stack, samples=FEW, seed=None)


def single_pairs(whole: PreTrainedModel, samples: PairWindows) -> Iterator[dict[str, Tensor]]:
    """What a stock model is called with in training for each pair by itself: labels, from which its class shifts."""
    for row in range(len(samples)):
        length = int(samples.sources["attention_mask"][row].sum())
        labels = samples.windows[row][samples.scored[row]]
        yield {"input_ids": samples.sources["input_ids"][row : row + 1, :length], "labels": labels[None]}


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("model_type", TYPES)
def test_moments_are_those_of_the_stock_model(model_type: str, stack: Stack, tmp_path: Path) -> None:
    """Sums in float32 of n products in another order: n · 2⁻²⁴ of the largest, and as much again for each block."""
    whole, model, samples = open_stack(tmp_path, model_type, stack)
    seen: dict[str, list[Tensor]] = {}
    for block in range(model.blocks):
        path = f"{model.family.layers}.{block}.{model.family.consumers['mlp'].consumer}"
        seen[path] = []
        whole.get_submodule(path).register_forward_pre_hook(
            lambda _module, args, path=path: seen[path].append(args[0].flatten(0, -2).double())
        )
    with torch.no_grad():
        for pair in single_pairs(whole, samples):
            whole(**pair, use_cache=False)
    # Each pair is a fold and a batch of its own. To that without padding models pass no mask.
    stream = open_stream(model, samples, device=torch.device("cpu"), compute_dtype=torch.float32, folds=FEW)
    for block, read in enumerate(map(torch.cat, seen.values())):
        (folds,) = stream.observe(block, model.read_block(block), {"mlp": True}, advance=True).values()
        moments = sum_folds(folds)
        assert isinstance(moments, Moments)
        assert moments.gram is not None
        assert moments.count == len(read)
        gram = read.T @ read
        bound = (1 + block) * len(read) * 2**-24 * float(gram.abs().max())
        torch.testing.assert_close(moments.gram.double(), gram, rtol=0, atol=bound)


def test_the_stream_behind_cross_attention_is_what_the_mlp_reads(tmp_path: Path) -> None:
    """What the encoder's states add comes behind what self-attention adds, where norms come first."""
    _, model, samples = open_stack(tmp_path, "umt5", "decoder")
    stream = open_stream(model, samples, device=torch.device("cpu"), compute_dtype=torch.float32)
    residual = ResidualBlock(stream, 0, model.read_block(0), ["cross_heads"])
    seen: list[Tensor] = []
    residual.block.get_submodule("layer.2").register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    residual.whole = True  # it would end before the mlp
    with torch.no_grad():
        residual.run(slice(0, FEW))
    torch.testing.assert_close(residual.after("cross_heads"), seen[0].flatten(0, 1).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", TYPES)
def test_the_loss_is_that_of_training(model_type: str, tmp_path: Path) -> None:
    whole, _, samples = open_stack(tmp_path, model_type, "decoder")
    score, total, tokens = perplexity(whole, samples), 0.0, 0
    with torch.no_grad():
        for pair in single_pairs(whole, samples):
            count = pair["labels"].numel()
            total, tokens = total + float(whole(**pair).loss) * count, tokens + count
    assert score.tokens == tokens
    assert score.nll == pytest.approx(total / tokens, rel=1e-5)  # logits of float32 to a few units in the last place


def test_parts_of_samples_know_their_padding(tmp_path: Path) -> None:
    _, _, samples = open_stack(tmp_path, "bart", "encoder")
    some = SpreadSamples(SampleRange(samples, 1, FEW), 2)
    counted, scored = counted_tokens(some, slice(0, 2)), scored_tokens(some, slice(0, 2))
    assert counted is not None
    assert scored is not None
    assert torch.equal(counted, samples.sources["attention_mask"][[1, 3]].bool())
    assert torch.equal(scored, samples.scored[[1, 3]])


def test_long_texts_are_cut(tmp_path: Path) -> None:
    _, model, _ = open_stack(tmp_path, "bart", "decoder")
    assert model.checkpoint.within is not None
    reader = PairReader(model.checkpoint.within.whole, 6)
    cut = choose_pairs(reader, tmp_path / "pairs.jsonl", "decoder", samples=FEW, seed=None)
    assert (cut.sources["input_ids"].shape[1], cut.windows.shape[1]) == (6, 6)
    assert set(cut.sources["input_ids"][:, -1].tolist()) <= {1, 2}  # the tokenizer's own end stays


FORM = 'each row must be {"source": "…", "target": "…"}'


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"source": "a"}, f"no source with its target; {FORM}"),
        ({"source": "a", "target": " "}, f"no source with its target; {FORM}"),
        (3, f"no source with its target; {FORM}"),
        ({"source": "a", "target": "b", "target_language": 3}, "target_language 3 is no code of a language"),
    ],
)
def test_rows_of_another_form_are_refused(row: object, says: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert refusal(read_pairs, file) == f"{file}, line 1: {says}"


def test_no_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no pairs in it"):
        read_pairs(tmp_path / "pairs.jsonl")
    with pytest.raises(UserError, match="no such file of pairs"):
        read_pairs(tmp_path / "no.jsonl")


def test_a_tokenizer_without_languages_says_so(tmp_path: Path) -> None:
    _, model, _ = open_stack(tmp_path, "bart", "decoder")
    assert model.checkpoint.within is not None
    file = tmp_path / "named.jsonl"
    file.write_text(json.dumps({"source": "w1", "target": "w2", "target_language": "fr"}) + "\n")
    with pytest.raises(UserError, match=r"line 1: the tokenizer of .* knows no languages$"):
        choose_pairs(PairReader(model.checkpoint.within.whole, None), file, "decoder", samples=1, seed=None)
