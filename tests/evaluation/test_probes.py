"""Probes of features, against loops and refits."""

import math

import pytest
import torch

from ckpt_prune.evaluation.probes import STRENGTHS, linear, neighbours


def drawn(count: int, seed: int, classes: int = 3, d: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = torch.randn(classes, d, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return centres[labels] + torch.randn(count, d, generator=generator, dtype=torch.float64), labels


def test_neighbours_vote_by_their_similarity():
    train, classes = drawn(30, 0)
    test, _ = drawn(7, 1)
    votes = neighbours(train, classes, test, count=5, temperature=0.07)
    for row, x in enumerate(test):
        similar = sorted(((float(x @ t / (x.norm() * t.norm())), int(c)) for t, c in zip(train, classes, strict=True)))
        expected = [0.0] * 3
        for value, label in similar[-5:]:
            expected[label] += math.exp((value - similar[-1][0]) / 0.07)
        assert votes[row].tolist() == pytest.approx(expected)


def test_a_linear_probe_is_the_ridge_of_least_error_on_what_is_left_out():
    train, classes = drawn(25, 0)
    test, _ = drawn(8, 1)
    wanted = torch.nn.functional.one_hot(classes).double()
    scale = float((train - train.mean(0)).square().sum()) / min(train.shape)

    def ridge(x: torch.Tensor, y: torch.Tensor, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        own = x - x.mean(0)
        weights = torch.linalg.solve(own.T @ own + strength * scale * torch.eye(x.shape[1]), own.T @ (y - y.mean(0)))
        return weights, y.mean(0) - x.mean(0) @ weights

    def left_out(strength: float) -> float:
        total = 0.0
        for row in range(len(train)):
            others = torch.arange(len(train)) != row
            weights, constant = ridge(train[others], wanted[others], strength)
            total += float((train[row] @ weights + constant - wanted[row]).square().sum())
        return total

    best = min(STRENGTHS, key=left_out)
    weights, constant = ridge(train, wanted, best)
    found, strength = linear(train, classes, test)
    assert strength == best
    torch.testing.assert_close(found, test @ weights + constant)
