"""`tools/bench_regret.py`: errors of every strength against fits to the tokens themselves, and its table."""

import re

import numpy as np
import pytest
import torch

from ckpt_prune.compensation.fit import lack_from_moments
from ckpt_prune.compensation.methods import GRID
from ckpt_prune.measure.moments.inputs import Moments
from tests import families
from tools import bench_regret


def test_errors_are_those_of_ridges_fitted_to_the_tokens():
    generator = np.random.default_rng(0)
    weight, mix = generator.normal(size=(5, 9)), generator.normal(size=(9, 9))
    seen, unseen = (generator.normal(size=(tokens, 9)) @ mix for tokens in (40, 60))
    kept = np.array([0, 2, 3, 5, 7, 8])
    inputs, gram = seen[:, kept], seen[:, kept].T @ seen[:, kept]
    target = seen @ weight.T - inputs @ weight[:, kept].T
    expected = []
    for strength in GRID:
        damped = gram + strength * np.trace(gram) / len(kept) * np.eye(len(kept))
        fitted = weight[:, kept] + np.linalg.solve(damped, inputs.T @ target).T
        lost = unseen @ weight.T - unseen[:, kept] @ fitted.T
        expected.append((lost**2).sum() / ((unseen @ weight.T) ** 2).sum())

    def moments(tokens: np.ndarray) -> Moments:
        return Moments.zeros(9, gram=True).accumulate(torch.from_numpy(tokens))

    columns, own = torch.from_numpy(kept), torch.from_numpy(weight)
    errors = bench_regret.errors_by_strength(
        own, lack_from_moments(own, moments(seen), columns), moments(unseen), columns
    )
    assert list(errors) == list(GRID)
    assert list(errors.values()) == pytest.approx(expected, rel=1e-4)


def test_table_has_a_line_for_every_site_and_regret_where_another_strength_was_chosen(tmp_path, capsys):
    model = families.make(tmp_path / "model", "llama")
    for name, seed, folds in (("calib", 1, 4), ("other", 2, 1)):
        families.calibrate(model, tmp_path / name, families.windows(8, 24, seed=seed), folds=folds)
    given = ["--statistics", str(tmp_path / "calib"), "--other", str(tmp_path / "other"), "--first", "0", "--step", "1"]
    bench_regret.main([str(model), *given])
    _, *sites, two_folds, all_folds, usual = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in sites] == list(range(families.BLOCKS))
    strengths = [[float(number) for number in line.split("  ")[-1].split(", ")] for line in sites]
    for place, line in ((1, two_folds), (2, all_folds)):
        average, most = (float(number) for number in re.findall(r"([0-9.]+)%", line))
        if all(of_site[0] == of_site[place] for of_site in strengths):
            assert average == most == 0
        assert 0 <= average <= most
    assert usual.startswith("regret of λ = 0.01: mean ")
