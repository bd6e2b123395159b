"""Distances of runs of blocks, in the stream and in the output, against whole models."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.statistics.distances import measure_distances
from ckpt_prune.measure.statistics.index import StreamDistances, _mean_stream
from ckpt_prune.measure.streams.readout import DrawnGradients
from ckpt_prune.model.model import Model
from tests.evaluation.tiny import random_windows, tiny_llama
from tests.families import stock

BLOCKS = 4


@pytest.mark.parametrize("whole", [False, True])
def test_distances_are_those_of_the_whole_model(tmp_path, monkeypatch, whole: bool) -> None:
    """With one gradient at the last states in place of drawn labels: the rest is one pass back."""
    with quiet_transformers():
        tiny_llama(num_hidden_layers=BLOCKS).save_pretrained(tmp_path)
    ids = random_windows(3, 8, seed=4)
    model = stock(tmp_path)
    ends: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: ends.append(args[0]))
    model.model.layers[-1].register_forward_hook(lambda _, args, out: ends.append(out))
    model(input_ids=ids, use_cache=False)
    last = torch.randn(ends[-1].shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(ends[-1], ends, last)
    ends = [stream.detach() for stream in ends]

    def given_states(readout, samples, states, allocate, draws) -> list[DrawnGradients]:
        return [DrawnGradients(last.clone(), whole, 0.5)]

    monkeypatch.setattr("ckpt_prune.measure.statistics.distances.draw_end_gradients", given_states)
    distances = measure_distances(
        Model.open(tmp_path),
        TokenWindows(ids),
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        gradients=True,
    )
    assert distances.divergence is not None
    for a in range(BLOCKS + 1):
        for b in range(BLOCKS + 1):
            cosine = divergence = 0.0
            if a < b:
                cosine = 1 - float(functional.cosine_similarity(ends[a], ends[b], dim=-1).mean())
                moved = (gradients[b] * (ends[a] - ends[b])).sum(-1)
                moved = moved.sum(-1) if whole else moved
                divergence = 0.5 * float(moved.square().sum()) / 2 / len(ids)
            assert distances.cosine[a][b] == pytest.approx(cosine, abs=1e-5)
            assert distances.divergence[a][b] == pytest.approx(divergence, rel=1e-3, abs=1e-6)


def test_the_sum_of_two_folders_has_the_mean_by_samples() -> None:
    class Index:
        def __init__(self, fisher: int, value: float | None) -> None:
            self.fisher = fisher
            matrix = [[0.0, value or 0.0], [0.0, 0.0]]
            self.stream = None if value is None else StreamDistances(cosine=matrix, divergence=matrix)

    mean = _mean_stream(Index(6, 1.0), Index(2, 3.0))  # type: ignore[arg-type]
    assert mean is not None
    assert (mean.cosine[0][1], mean.divergence[0][1]) == (1.5, 1.5)
    assert _mean_stream(Index(6, 1.0), Index(2, None)) is None  # type: ignore[arg-type]
